"""`passes.tuning`: samples compute what the block computes, in every way, and need no float64 that it does not need."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from passes.options import WAYS, Options
from passes.plan import make_plan
from passes.tuning import INPUT, ORIGINAL, Sample, samples
from tests.textmodels import ERF_GELU, FIRST, SILU, mlp

RELU = "h = Relu(y)"
GLU = "s = Sigmoid(y) g = Mul(s, y) h = Mul(g, u)"


def of(model: onnx.ModelProto, **options: Any) -> tuple[Sample, ...]:
    given = Options(**options)
    return samples(make_plan(model, given), given, lambda tensor: tensor)


def outputs(sample: Sample) -> dict[str, np.ndarray[Any, Any]]:
    x = np.random.default_rng(3).normal(0.0, 2.0, (2, 5, sample.width)).astype(sample.dtype)
    found = {}
    for name, model in sample.models.items():
        onnx.checker.check_model(model, full_check=True)
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        (found[name],) = session.run(None, {INPUT: x})
    return found


@pytest.mark.parametrize(
    ("text", "elem", "ways"),
    [
        (SILU, "float", ["fewest operations", "operator Softmax"]),
        (RELU, "float", ["fewest operations", "operator Softmax"]),
        (ERF_GELU, "float", ["fewest operations", "fewest keys"]),
        (ERF_GELU, "float16", ["fewest operations", "fewest keys", "operator Softmax"]),
        (SILU, "double", ["fewest operations", "operator Softmax"]),
    ],
)
def test_every_way_computes_the_block(text: str, elem: str, ways: list[str]) -> None:
    (sample,) = of(mlp(text, elem=elem))
    assert list(sample.models) == [ORIGINAL, *ways]
    found = outputs(sample)
    largest = np.abs(found[ORIGINAL]).max()
    assert largest > 1.0
    for name in ways:
        assert np.abs(found[name] - found[ORIGINAL]).max() <= {"float16": 4e-3}.get(elem, 2e-6) * largest, name
        assert sample.models[name].graph.node != sample.models[ORIGINAL].graph.node
    wide = any(tensor.data_type == onnx.TensorProto.DOUBLE for tensor in sample.models[ways[-1]].graph.initializer)
    assert wide == (elem == "double")


def test_gates_have_one_way_in_their_own_type() -> None:
    first = f"{FIRST} u = MatMul(x, V1)"
    assert of(mlp(GLU, first=first)) == ()


def test_blocks_of_one_kind_are_timed_once() -> None:
    two = (
        f"{FIRST} {SILU} second = MatMul(h, W2) f2 = MatMul(second, W1) y2 = Add(f2, b1) s2 = Sigmoid(y2) "
        "h2 = Mul(s2, y2) out = MatMul(h2, W2)"
    )
    model = mlp("", first=two, second="")
    (sample,) = of(model)
    assert (sample.kind, sample.blocks, sample.width) == ("silu, float, 8 neurons", 2, 4)


def test_the_chosen_way_is_written() -> None:
    model = mlp(ERF_GELU)
    usual = make_plan(model, Options()).conversions[0]
    for name, way in WAYS.items():
        plan = make_plan(model, Options(ways={usual.block.kind: name}))
        (conversion,) = plan.conversions
        assert conversion.options.spelling == way.spelling
        assert (conversion.program == usual.program) == way.quick
    other = make_plan(model, Options(ways={"another kind": "fewest keys"})).conversions[0]
    assert other.program == usual.program
