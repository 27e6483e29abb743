"""Heads that another model has changed: those changed on purpose come first, and restored, the outputs too."""

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import QuantFormat

from rewriter import UsageError
from rewriter.interpret.interventions import changed_heads
from tests.changes import change_values, weight
from tests.committed import FOLDER
from tests.headmath import tapped
from tests.rewriter.interpret.test_attribution import given

MODEL = FOLDER / "silu-decoder.onnx"
UP, DOWN = "model.transformer.h.0.mlp.c_fc.weight", "model.transformer.h.0.mlp.c_proj.weight"
QKV = "model.transformer.h.1.attn.c_attn.weight"


def with_weights(by: dict[str, str]) -> onnx.ModelProto:
    model = onnx.load(MODEL)
    for name, statement in by.items():
        change_values(weight(model, name), statement)
    return model


@pytest.mark.sample(0)
@pytest.mark.parametrize(
    ("by", "head"),
    [
        ({UP: "v[:, 17] *= 2"}, "blocks.0.mlp_heads.17"),
        ({DOWN: "v[17] *= 0.5"}, "blocks.0.mlp_heads.17"),
        ({UP: "v[:, 5] *= -1", DOWN: "v[5] *= 3"}, "blocks.0.mlp_heads.5"),
        ({QKV: "v[:, 8:16] *= 1.5"}, "blocks.1.attn.1"),  # its queries
    ],
)
def test_one_changed_head_comes_first(by: dict[str, str], head: str) -> None:
    found = changed_heads(MODEL, with_weights(by), given("silu-decoder"), top=3)
    first, second, third, *_ = found.rows
    assert (first.head, second.weights, second.written) == (head, 0.0, 0.0)
    assert min(first.weights / 100, found.error) > 1e-3
    assert first.restored == pytest.approx(1.0, abs=1e-4)
    assert (second.restored, third.restored) == (0.0, 0.0)
    if len(by) > 1:
        assert found == changed_heads(MODEL, with_weights(by), given("silu-decoder"), top=3), "repeatable"


@pytest.mark.sample(0)
@pytest.mark.parametrize(
    ("form", "bits", "change"),
    [(QuantFormat.QOperator, 8, 0.01), (QuantFormat.QOperator, 4, 0.1), (QuantFormat.QDQ, 4, 0.1)],
)
def test_quantised_weights(form: QuantFormat, bits: int, change: float) -> None:
    quantisers = pytest.importorskip("onnxruntime.quantization.matmul_nbits_quantizer")  # needs onnx-ir
    path, inputs = FOLDER / "gated-decoder.onnx", given("gated-decoder")
    quantiser = quantisers.MatMulNBitsQuantizer(onnx.load(path), bits=bits, block_size=16, quant_format=form)
    quantiser.process()
    other = quantiser.model.model
    found = changed_heads(path, other, inputs, top=2)
    assert all(change / 20 < row.weights < change for row in found.rows)
    assert [row.written for row in found.rows] == sorted((row.written for row in found.rows), reverse=True)
    assert [row.restored is None for row in found.rows] == [False] * 2 + [True] * (len(found.rows) - 2)
    output = other.graph.output[0].name
    wanted, made = (tapped(model, inputs, [output])[output] for model in (onnx.load(path), other))
    assert found.error == pytest.approx(np.linalg.norm(made - wanted) / np.linalg.norm(wanted), rel=1e-3)


def test_one_of_the_models_may_have_batch_and_tokens_as_one_axis() -> None:
    other, inputs = FOLDER / "relu-decoder.onnx", given("silu-decoder")
    found = changed_heads(MODEL, other, inputs, top=1)
    wanted, made = (tapped(onnx.load(path), inputs, ["logits"])["logits"] for path in (MODEL, other))
    assert found.error == pytest.approx(np.linalg.norm(made - wanted) / np.linalg.norm(wanted), rel=1e-5)
    assert len(found.rows) == 2 * (4 + 128)


def test_other_heads_are_refused() -> None:
    with pytest.raises(UsageError, match=r"mlp_heads is .*, 128 heads in all in one and .*, 1,152 heads in all in the"):
        changed_heads(MODEL, FOLDER / "gelu-encoder.onnx", given("silu-decoder"))
    with pytest.raises(UsageError, match=r"same heads: blocks.0.mlp_heads is 128 neurons on .* in one and .* gated"):
        changed_heads(MODEL, FOLDER / "gated-decoder.onnx", given("silu-decoder"))
