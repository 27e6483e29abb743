"""Quantised models: rounding moves values to the next step, so outputs say little; values name what differs."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from models.tools.common import Hints
from models.tools.precision import dynamic_int8
from rewriter import Comparison, validate
from tests.cases import departed
from tests.changes import change_values, changed, weight
from tests.textmodels import SILU, text_model

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> onnx.ModelProto:
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


def judged(a: onnx.ModelProto, b: onnx.ModelProto, seed: int = 0) -> Comparison:
    return validate(a, b, seed=seed, dims={"batch": 4, "sequence": 16})


@pytest.mark.slow
def test_a_model_that_rounds_otherwise_agrees(original: onnx.ModelProto) -> None:
    """Its outputs are further off than a share of 1/64: values have moved to the next step."""
    found = judged(original, changed(original, rounded_otherwise))
    assert (found.verdict, found.failures) == ("agrees", ())


BIASES = {
    "one b2": "model.encoder.layer.0.output.dense.bias",
    "one b1": "model.encoder.layer.1.intermediate.dense.bias",
    "one bias of the attention": "model.encoder.layer.1.attention.self.value.bias",
}


@pytest.mark.sample(0)
@pytest.mark.parametrize("what", BIASES)
def test_a_wrong_constant_is_named_whatever_rounding_hides(original: onnx.ModelProto, what: str) -> None:
    wrong = changed(original, lambda model: change_values(weight(model, BIASES[what]), "v[3] += 1e-2"))
    found = judged(original, wrong)
    assert not found.same
    assert departed(found).constants == (BIASES[what],)


def test_an_output_that_rounding_decides_alone_is_no_comparison() -> None:
    """Noise at the activation moves it by its own size: without a certificate that does not count as agreement."""
    body = f"first = MatMul(x, W1) y = Add(first, b1) {SILU} second = MatMul(h, W2) t = Add(second, b2) "
    original = text_model(f"{body} u = Mul(t, $1e9) out = Sin(u)")
    assert validate(original, original).same, "certified"
    found = validate(original, changed(original, lambda model: change_values(weight(model, "b2"), "v += 0.1")))
    said = "nothing could be compared: output out, since rounding moves it as far as it is large"
    assert (found.verdict, found.undecided) == ("not proved", (said,))
