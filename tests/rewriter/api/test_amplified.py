"""Quantised models: rounding moves values to the next step, so outputs say little, and every part must hold alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from models.tools.common import Hints
from models.tools.precision import dynamic_int8
from rewriter import Comparison, validate
from tests.changes import Change, change_values, changed, weight
from tests.textmodels import SILU, text_model

ROOT = Path(__file__).resolve().parents[3]
DIMS = {"batch": 16, "sequence": 32}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> onnx.ModelProto:
    """Two layers with dynamically quantised linear operators."""
    path = tmp_path_factory.mktemp("quantised") / "model.onnx"
    dynamic_int8(per_channel=False)(ROOT / "models" / "gelu-encoder.onnx", path, Hints())
    model: onnx.ModelProto = onnx.load(path)
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


def negated_second_weight(model: onnx.ModelProto) -> None:
    second = next(tensor for tensor in model.graph.initializer if list(tensor.dims) == [128, 32])
    change_values(weight(model, second.name.replace("_quantized", "_scale")), "v = -v")


def judged(a: onnx.ModelProto, b: onnx.ModelProto, seed: int = 0) -> Comparison:
    return validate(a, b, seed=seed, dims=DIMS, bisect=True)


@pytest.mark.parametrize("seed", range(2))
def test_a_model_that_rounds_otherwise_passes_whatever_the_seed(original: onnx.ModelProto, seed: int) -> None:
    """Its outputs are further off than a share of 1/64: values have moved to the next step."""
    found = judged(original, changed(original, rounded_otherwise), seed)
    assert (found.verdict, found.failures) == ("agrees", ())
    assert len(found.isolated) > 8
    assert all(each.found.holds for each in found.isolated)
    *_, note = found.notes
    assert note.startswith("rounding is amplified, so that output last_hidden_state says little; ")
    assert note.endswith(f"{len(found.isolated)} of {len(found.isolated)} parts hold by themselves")


def off_by_one_percent(name: str) -> Change:
    return lambda model: change_values(weight(model, name), "v[3] += 1e-2")


BIASES = {
    "one b2": "model.encoder.layer.0.output.dense.bias",
    "one b1": "model.encoder.layer.1.intermediate.dense.bias",
    "one bias of the attention": "model.encoder.layer.1.attention.self.value.bias",
}
PLANTED: dict[str, tuple[Change, str]] = {
    what: (off_by_one_percent(name), f"weight {name} differs in 1 element") for what, name in BIASES.items()
}
PLANTED["W2 negated"] = (negated_second_weight, "weight model.embeddings.word_embeddings.weight differs")


@pytest.mark.parametrize("what", PLANTED)
def test_a_wrong_model_that_also_rounds_otherwise_fails(original: onnx.ModelProto, what: str) -> None:
    plant, wanted = PLANTED[what]

    def both(model: onnx.ModelProto) -> None:
        rounded_otherwise(model)
        plant(model)

    found = judged(original, changed(original, both))
    refuted = any(each.startswith("output ") for each in found.failures)
    assert found.verdict == ("different" if refuted else "not proved"), "where outputs are within rounding"
    (fault,) = found.faults  # errors do not travel from one part to the next
    assert any(wanted in cause for cause in fault.causes)


def test_an_output_that_rounding_decides_alone_is_no_comparison() -> None:
    """Noise at the activation moves it by its own size: without a certificate that does not count as agreement."""
    body = f"first = MatMul(x, W1) y = Add(first, b1) {SILU} second = MatMul(h, W2) t = Add(second, b2) "
    original = text_model(f"{body} u = Mul(t, $1e9) out = Sin(u)")
    assert validate(original, original).same, "certified"
    found = validate(original, changed(original, lambda model: change_values(weight(model, "b2"), "v += 0.1")))
    assert found.verdict == "not proved"
    assert found.undecided == ("nothing could be compared: output out, since rounding changes it by its own magnitude",)


def test_boundaries_that_divide_nothing_tell_nothing() -> None:
    """No tensor inside has a name in common, so that the only part would be the whole model."""
    body = f"first = MatMul(x, W1) y = Add(first, b1) {SILU} second = MatMul(h, W2) t = Add(second, b2) "
    original = text_model(f"{body} u = Mul(t, $1e3) out = Sin(u)")
    renamed = text_model(
        "one = MatMul(x, W1) two = Add(one, b1) three = Sigmoid(two) four = Mul(two, three) five = MatMul(four, W2) "
        f"six = Add(five, b2) seven = Mul(six, $1e3) eight = Mul(seven, ${1 + 2**-22}) out = Sin(eight)"
    )
    found = validate(original, renamed)
    assert found.validation.providers["cpu"].compared["out"].allowed > 2.0**-10
    assert (found.verdict, found.isolated, found.notes) == ("agrees", (), ())
