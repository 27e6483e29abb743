"""Sizes are searched where a model refuses the usual inputs; what was tried is said where none is accepted."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from rewriter import ExitStatus, ValidationError, rewrite, validate
from rewriter.files.load import load_model
from rewriter.proof.inputs.cases import make_cases
from rewriter.proof.settings import Settings
from rewriter.proof.validate import other_cases
from tests.textmodels import SILU, mlp, text_model


def speech(least: int, most: int, *, name: str = "samples") -> onnx.ModelProto:
    """Raw audio in frames of 160 samples, and an MLP; it runs on `least` to `most` samples in whole frames only.

    An Expand to the negative number of missing or surplus frames fails, as a table of positions that is too short does.
    """
    text = (
        "n = Shape(audio) count = Gather(n, one) frames = Div(count, hop) rest = Mod(count, hop) "
        "short = Sub(frames, low) beyond = Sub(high, frames) lacking = Min(short, beyond) none = Min(lacking, zero) "
        "left = Sub(none, rest) bad = Less(left, zero) sign = Cast<to = 7>(bad) twice = Mul(sign, minus) "
        "size = Add(twice, one) sized = Unsqueeze(size, axis) checked = ConstantOfShape(sized) "
        "total = ReduceSum<keepdims = 0>(checked) nothing = Mul(total, zero_float) "
        "cut = Reshape(audio, shape) x = Add(cut, nothing) f = MatMul(x, W1) y = Add(f, b1) "
        "s = Sigmoid(y) h = Mul(s, y) out = MatMul(h, W2)"
    )
    rng = np.random.default_rng(0)
    constants: dict[str, Any] = {
        "one": np.int64(1),
        "hop": np.int64(160),
        "low": np.int64(least // 160),
        "high": np.int64(most // 160),
        "zero": np.int64(0),
        "minus": np.int64(-2),
        "axis": np.array([0]),
        "zero_float": np.float32(0.0),
        "shape": np.array([0, -1, 160]),
        "W1": rng.normal(0.0, 0.1, (160, 8)).astype(np.float32),
        "b1": rng.normal(size=8).astype(np.float32),
        "W2": rng.normal(size=(8, 4)).astype(np.float32),
    }
    tensors = {key: onnx.numpy_helper.from_array(np.asarray(value), key) for key, value in constants.items()}
    return text_model(text, inputs=f"float[batch, {name}] audio", outputs="float[b, t, 4] out", constants=tensors)


def lengths(cases: Any) -> list[tuple[int, ...]]:
    return [case.feeds["audio"].shape for case in cases]


def test_accepted_sizes_are_found() -> None:
    model = load_model(speech(640, 1000))
    assert all(shape[1] > 1000 for shape in lengths(make_cases(model.proto)))
    found = other_cases(model, Settings())
    assert found is not None
    wanted = [(batch, size) for size in (640, 800, 960) for batch in (1, 3)]
    assert [case.name for case in found] == [f"batch {batch}, samples {size}" for batch, size in wanted]
    assert lengths(found) == wanted
    assert not np.array_equal(found[0].feeds["audio"][0, :8], found[1].feeds["audio"][1, :8])


def test_the_proof_runs_on_sizes_that_the_model_accepts() -> None:
    report = rewrite(speech(640, 1000), providers="cpu")
    assert report.exit_status is ExitStatus.CONVERTED
    assert report.validation is not None
    assert len(report.validation.cases) == 6
    assert {"batch 3, samples 640", "batch 1, samples 960"} <= set(report.validation.cases)
    assert report.validation.skipped, "what was refused is said"


def test_comparisons_search_too() -> None:
    model = speech(640, 1000)
    wrong = onnx.ModelProto()
    wrong.CopyFrom(model)
    weight = next(each for each in wrong.graph.initializer if each.name == "W2")
    weight.CopyFrom(onnx.numpy_helper.from_array(-onnx.numpy_helper.to_array(weight), "W2"))
    assert validate(model, model, providers="cpu").same
    assert not validate(model, wrong, providers="cpu").same


def test_usual_sizes_are_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewriter.proof.validate.other_cases", lambda *_: pytest.fail("searched"))
    assert rewrite(mlp(SILU), providers="cpu").exit_status is ExitStatus.CONVERTED


def test_what_was_tried_in_vain() -> None:
    model = speech(10**7, 10**7, name="length")
    message = (
        r"the original model runs on none of the \d inputs tried; other sizes were tried too, up to "
        r"16,384; give some with inputs= or sizes with dims="
    )
    with pytest.raises(ValidationError, match=message):
        rewrite(model, providers="cpu")
    with pytest.raises(ValidationError, match=r"the original model runs on none of the \d inputs tried; other sizes"):
        validate(model, model, providers="cpu")


def test_fixed_sizes_are_kept() -> None:
    """--dim fixes the samples, so nothing is left to vary."""
    model = speech(640, 1000)
    with pytest.raises(ValidationError, match=r"runs on none of the . inputs tried; give some with inputs="):
        rewrite(model, providers="cpu", dims={"samples": 4900})
    assert rewrite(model, providers="cpu", dims={"samples": 800}).exit_status is ExitStatus.CONVERTED
