"""The pass for onnx-ir: in a sequence of other passes, with its proof as postcondition."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

ir = pytest.importorskip("onnx_ir", reason="needs the extra ir")

from onnx_ir.passes import PostconditionError, PreconditionError, Sequential  # noqa: E402
from onnx_ir.passes.common import RemoveUnusedNodesPass  # noqa: E402

from rewriter import ExitStatus  # noqa: E402
from rewriter.adapters.ir_pass import AttentionOnlyPass  # noqa: E402
from tests.oracle import evaluate  # noqa: E402
from tests.textmodels import SILU, mlp, text_model  # noqa: E402

pytestmark = pytest.mark.exports


def model_of(proto: onnx.ModelProto) -> Any:
    return ir.serde.deserialize_model(proto)


def test_in_a_sequence_of_passes() -> None:
    proto = mlp(SILU)
    ours = AttentionOnlyPass(providers="cpu")
    result = Sequential(RemoveUnusedNodesPass(), ours)(model_of(proto))
    assert result.modified
    assert ours.report is not None
    assert ours.report.exit_status is ExitStatus.CONVERTED
    made = ir.serde.serialize_model(result.model)
    assert "NeuronAttention" in {node.op_type for node in made.graph.node}
    x = np.random.default_rng(0).normal(size=(2, 3, 4))
    assert np.abs(evaluate(made, {"x": x})["out"] - evaluate(proto, {"x": x})["out"]).max() < 1e-12


def test_the_model_that_comes_in_stays() -> None:
    model = model_of(mlp(SILU))
    before = ir.serde.serialize_model(model).SerializeToString(deterministic=True)
    result = AttentionOnlyPass(providers="cpu")(model)
    assert result.model is not model
    assert ir.serde.serialize_model(model).SerializeToString(deterministic=True) == before


def test_nothing_to_convert_passes_through_unless_it_is_needed() -> None:
    model = model_of(text_model("out = Relu(x)"))
    result = AttentionOnlyPass(providers="cpu")(model)
    assert [node.op_type for node in result.model.graph] == ["Relu"]
    assert not result.modified
    with pytest.raises(PreconditionError, match="NOTHING TO CONVERT"):
        AttentionOnlyPass(providers="cpu", needed=True)(model)


@pytest.mark.usefixtures("wrong_bias")
def test_a_wrong_rewriting_is_a_broken_postcondition() -> None:
    ours = AttentionOnlyPass(providers="cpu")
    with pytest.raises(PostconditionError, match="FAILED  1 block"):
        ours(model_of(mlp(SILU)))
    assert ours.report is not None
    assert ours.report.exit_status is ExitStatus.VALIDATION_FAILED


def test_ensures_judges_only_the_model_that_was_proved() -> None:
    ours = AttentionOnlyPass(providers="cpu")
    with pytest.raises(PostconditionError, match="not the one"):
        ours.ensures(model_of(mlp(SILU)))


def test_a_wrong_option_is_a_broken_precondition() -> None:
    with pytest.raises(PreconditionError, match="unknown form 'round'"):
        AttentionOnlyPass(form="round")(model_of(mlp(SILU)))
