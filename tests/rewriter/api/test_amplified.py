"""Quantised models: rounding moves values to the next step, so outputs say little, and every part must hold alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from models.tools.common import Hints
from models.tools.precision import dynamic_int8
from rewriter import Comparison, validate
from tests.textmodels import text_model

ROOT = Path(__file__).resolve().parents[3]
DIMS = {"batch": 16, "sequence": 32}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> onnx.ModelProto:
    """Two layers with dynamically quantised linear operators."""
    path = tmp_path_factory.mktemp("quantised") / "model.onnx"
    dynamic_int8(per_channel=False)(ROOT / "models" / "gelu-encoder.onnx", path, Hints())
    model: onnx.ModelProto = onnx.load(path)
    return model


def changed(original: onnx.ModelProto, change: Callable[[onnx.ModelProto], None]) -> onnx.ModelProto:
    model = onnx.ModelProto()
    model.CopyFrom(original)
    change(model)
    return model


def rounded_otherwise(model: onnx.ModelProto) -> None:
    """A few units in the last place more or less on every activation, as another formula for it might have."""
    nearly = 1 + 2.0**-20 * np.where(np.arange(128) % 2, 1, -1)
    model.graph.initializer.append(numpy_helper.from_array(nearly.astype(np.float32), "nearly_one"))
    for index, node in reversed(list(enumerate(model.graph.node))):
        reads = [other.op_type for other in model.graph.node if node.output[0] in other.input]
        if node.op_type == "Mul" and reads == ["DynamicQuantizeLinear"]:
            name = node.output[0]
            node.output[0] = f"{name}/before"
            model.graph.node.insert(index + 1, helper.make_node("Mul", [node.output[0], "nearly_one"], [name]))


def off_by_one_percent(name: str) -> Callable[[onnx.ModelProto], None]:
    def plant(model: onnx.ModelProto) -> None:
        tensor = next(tensor for tensor in model.graph.initializer if tensor.name == name)
        values = numpy_helper.to_array(tensor).copy()
        values[3] += np.float32(1e-2)
        tensor.CopyFrom(numpy_helper.from_array(values, name))

    return plant


def negated_second_weight(model: onnx.ModelProto) -> None:
    weight = next(tensor for tensor in model.graph.initializer if list(tensor.dims) == [128, 32])
    scale = weight.name.replace("_quantized", "_scale")
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == scale)
    tensor.CopyFrom(numpy_helper.from_array(-numpy_helper.to_array(tensor), scale))


def judged(a: onnx.ModelProto, b: onnx.ModelProto, seed: int = 0) -> Comparison:
    return validate(a, b, seed=seed, dims=DIMS)


@pytest.mark.parametrize("seed", range(3))
def test_a_model_that_rounds_otherwise_passes_whatever_the_seed(original: onnx.ModelProto, seed: int) -> None:
    """Its outputs are further off than a share of 1/64: values have moved to the next step."""
    found = judged(original, changed(original, rounded_otherwise), seed)
    assert found.failures == ()
    verdicts = found.providers["cpu"].outputs.values()
    assert {each.rule for each in verdicts} == {"original"}
    assert max(each.share for each in verdicts) > 1 / 64
    assert found.isolated is not None
    assert len(found.isolated) > 8
    assert not any(each.guilty for each in found.isolated)
    (note,) = found.notes
    assert note.startswith("quantisation amplifies rounding: in output ")
    assert note.endswith(f"; {len(found.isolated)} of its {len(found.isolated)} parts hold by themselves")


PLANTED = {
    "W2 negated": negated_second_weight,
    "one b2": off_by_one_percent("model.encoder.layer.0.output.dense.bias"),
    "one b1": off_by_one_percent("model.encoder.layer.1.intermediate.dense.bias"),
    "one bias of the attention": off_by_one_percent("model.encoder.layer.1.attention.self.value.bias"),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_wrong_model_that_also_rounds_otherwise_fails(original: onnx.ModelProto, what: str) -> None:
    def both(model: onnx.ModelProto) -> None:
        rounded_otherwise(model)
        PLANTED[what](model)

    found = judged(original, changed(original, both))
    assert not found.same
    assert found.isolated is not None
    guilty = [each for each in found.isolated if each.guilty]
    assert len(guilty) == 1, "errors do not travel from one part to the next"
    assert f"{guilty[0].boundary.label} by itself: {guilty[0].reason}" in found.failures
    assert " exceeds the allowed " in (guilty[0].reason or "")


@pytest.mark.parametrize("share_names", [True, False])
def test_an_output_that_rounding_decides_alone_is_no_comparison(share_names: bool) -> None:
    """Where the models share no inner tensor there is nothing else to compare either."""
    text = "s = Mul(x, $1e8) t = Sin(s) m = MatMul(t, W) u = Mul(m, $1e8) v = Sin(u) out = com.microsoft.Gelu(v)"
    constants = {"W": np.random.default_rng(0).normal(size=(4, 4)), "nearly": np.asarray(1 + 2.0**-22)}
    a, b = (
        text_model(text.replace("t = Sin(s)", other), constants=constants, domains={"com.microsoft": 1})
        for other in ("t = Sin(s)", "t0 = Sin(s) t = Mul(t0, nearly)")
    )
    inner = {name for node in b.graph.node for name in node.output} - {"out"}
    for node in () if share_names else b.graph.node:
        for names in (node.input, node.output):
            names[:] = [f"{name}_b" if name in inner else name for name in names]
    found = validate(a, b)
    assert found.same is share_names
    assert found.providers["cpu"].outputs["out"].share > 1.0
    if not share_names:
        (failure,) = found.failures
        assert failure.startswith("nothing could be compared: rounding is amplified: in output out differences of up ")
        assert failure.endswith("the models share no inner tensor, so no part of them could be tested alone")
