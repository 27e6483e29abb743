"""The pass for onnx-ir: in a sequence of other passes, with its proof as postcondition."""

from collections.abc import Callable
from typing import Any

import onnx
import pytest

ir = pytest.importorskip("onnx_ir", reason="needs the extra ir")

from onnx_ir.passes import InPlacePass, PassResult, PostconditionError, PreconditionError, Sequential  # noqa: E402
from onnx_ir.passes.common import RemoveUnusedNodesPass  # noqa: E402

from rewriter import ExitStatus, UsageError  # noqa: E402
from rewriter.adapters.ir_pass import AttentionOnlyPass, Certified  # noqa: E402
from tests.errors import EMITTED, apart  # noqa: E402
from tests.textmodels import SILU, mlp, text_model  # noqa: E402

pytestmark = pytest.mark.exports


def model_of(proto: onnx.ModelProto) -> Any:
    return ir.serde.deserialize_model(proto)


def test_in_a_sequence_of_passes() -> None:
    proto = mlp(SILU)
    ours: Any = AttentionOnlyPass(providers="cpu")
    result = Sequential(RemoveUnusedNodesPass(), ours)(model_of(proto))
    assert result.modified
    assert ours.report.exit_status is ExitStatus.CONVERTED
    made = ir.serde.serialize_model(result.model)
    assert "NeuronAttention" in {node.op_type for node in made.graph.node}
    assert apart(proto, made, []).exact <= EMITTED


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
    ours: Any = AttentionOnlyPass(providers="cpu")
    with pytest.raises(PostconditionError, match="FAILED  1 block"):
        ours(model_of(mlp(SILU)))
    assert ours.report.exit_status is ExitStatus.VALIDATION_FAILED


def test_ensures_judges_only_the_model_that_was_proved() -> None:
    ours: Any = AttentionOnlyPass(providers="cpu")
    with pytest.raises(PostconditionError, match="not the one"):
        ours.ensures(model_of(mlp(SILU)))


def test_a_wrong_option_is_a_broken_precondition() -> None:
    with pytest.raises(PreconditionError, match="unknown form 'round'"):
        AttentionOnlyPass(form="round")(model_of(mlp(SILU)))


class Mistaken(InPlacePass):
    """Says that it changed nothing."""

    def call(self, model: Any) -> PassResult:
        next(node for node in model.graph if node.op_type == "Sigmoid").op_type = "Tanh"
        return PassResult(model, modified=False)


def rules(replacement: Callable[..., Any]) -> Any:
    rewriter = pytest.importorskip("onnxscript.rewriter")
    rule = rewriter.pattern.RewriteRule(lambda op, y: op.Mul(y, op.Sigmoid(y)), replacement)
    return rewriter.RewriteRuleSet([rule])


def by_exponential(op: Any, y: Any) -> Any:
    return op.Div(y, op.Add(op.Exp(op.Neg(y)), op.Constant(value_float=1.0)))


def test_a_right_pass_is_certified() -> None:
    model = model_of(mlp(SILU))
    for ours, operators in ((Certified(RemoveUnusedNodesPass()), "Sigmoid"), (Certified(rules(by_exponential)), "Exp")):
        result = ours(model)
        assert ours.certification is not None
        assert ours.certification.verdict == "certified"
        assert operators in {node.op_type for node in result.model.graph}
        assert "Sigmoid" in {node.op_type for node in model.graph}, "the model that comes in stays"


class WithoutBias(InPlacePass):
    """Drops the last operand."""

    def call(self, model: Any) -> PassResult:
        last = model.graph[-1]
        last.op_type = "Identity"
        last.resize_inputs(1)
        return PassResult(model, modified=True)


REFUTED = r"different: differs by .* at y = .* \(the activation h\)"


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (Mistaken, REFUTED),
        (lambda: rules(lambda op, y: op.Mul(y, op.Tanh(y))), REFUTED),
        (WithoutBias, r"not proved: .*first difference: output 'out' has the values of 'second' of A; first node of A"),
    ],
)
def test_a_wrong_pass_is_told_where_it_departs(what: Callable[[], Any], said: str) -> None:
    ours = Certified(what())
    with pytest.raises(PostconditionError, match=said):
        ours(model_of(mlp(SILU)))
    assert ours.certification is not None


def test_what_is_no_pass() -> None:
    with pytest.raises(UsageError, match="a pass of onnx-ir or a rule set of onnxscript is needed, not 'Tanh'"):
        Certified("Tanh")
