"""Each operator of the float64 evaluation against onnxruntime's float32 kernel, at every opset where it changed."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from rewriter.ort.sessions import open_session
from rewriter.proof.reference import Reference, open_reference
from tests.rewriter.proof.reference.operator_cases import OPERATORS, cases_of, model_of

Array = NDArray[Any]
Results = dict[str, Array]
Key = tuple[str, str]

EPS = 2.0**-23

RUNS = [pytest.param(key, opset, id=f"{key[1]}-{opset}") for key in OPERATORS for opset in cases_of(key)]


@cache
def prepared(key: Key, opset: int) -> tuple[onnx.ModelProto, Results, Results, Reference]:
    """The model of all cases, feeds, what onnxruntime makes of them in float32, and the reference."""
    model, feeds = model_of(cases_of(key)[opset], opset)
    return model, feeds, open_session(model, optimise=False, threads=1).run(feeds), open_reference(model)


def agree(plain: Results, exact: Results) -> None:
    for name, value in plain.items():
        truth = exact[name]
        assert truth.shape == value.shape, name
        if value.dtype.kind != "f":
            np.testing.assert_array_equal(truth, value)
            continue
        assert truth.dtype == np.float64
        known = truth[np.isfinite(truth)]
        scale = np.abs(known).max() if known.size else 1.0
        np.testing.assert_allclose(value, truth, rtol=0, atol=8 * EPS * scale, err_msg=name)


@pytest.mark.parametrize(("key", "opset"), RUNS)
def test_agrees_with_float32(key: Key, opset: int) -> None:
    _, feeds, plain, reference = prepared(key, opset)
    agree(plain, reference.run(feeds))


@pytest.mark.parametrize(("key", "opset"), RUNS)
def test_nothing_sticks_to_float32(key: Key, opset: int) -> None:
    """Results follow operands that change by less than float32 can tell: f(x + d) + f(x - d) is 2 f(x), up to d^2."""
    _, feeds, _, reference = prepared(key, opset)
    random = np.random.default_rng(5)
    data = {name: value for name, value in feeds.items() if value.dtype.kind == "f"}

    def moved(by: float, signs: dict[str, Array]) -> Results:
        # The operands are not float32 numbers there, and none is a tie.
        base = {name: value.astype(np.float64) * (1 + 1e-4 * places[name]) for name, value in data.items()}
        return reference.run({**feeds, **{name: np.asarray(base[name] * (1 + by * signs[name])) for name in data}})

    places, signs = ({name: random.uniform(0.5, 1, (1, *value.shape))[0] for name, value in data.items()} for _ in "ab")
    here, ahead, behind = (moved(by, signs) for by in (0, 3e-8, -3e-8))
    for name, value in here.items():
        if value.dtype.kind == "f":
            known = np.isfinite(value)
            second = (ahead[name] + behind[name] - 2 * value)[known]
            np.testing.assert_allclose(second, 0, atol=1e-12 * np.abs(value[known]).max(initial=1e-3))


def test_a_wrong_definition_is_noticed() -> None:
    """onnx's reference evaluator computes BatchNormalization of opset 9 to 13 from the statistics of the batch."""
    from onnx.reference import ReferenceEvaluator

    key = ("", "BatchNormalization")
    model, feeds, plain, _ = prepared(key, 9)
    made = ReferenceEvaluator(model).run(None, feeds)
    wrong = dict(zip(plain, [np.asarray(value, np.float64) for value in made], strict=True))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        agree(plain, wrong)
