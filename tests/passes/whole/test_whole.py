"""Form `whole`: the theorems' network, in numpy; no mask operator; and every row and column of the stream matters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import shape_inference

from passes.forms.whole import BIAS_ROWS, POSITION_ROWS, PREFIX, neuron_scores
from passes.options import FormOptions, Options
from passes.plan import Plan, apply, make_plan, sublayers_only
from passes.whole import widen as widening
from passes.whole.widen import widen
from rewriter import ExitStatus, rewrite
from rewriter.graph.extract import ancestors
from rewriter.graph.view import view_model
from rewriter.ort.sessions import open_session
from tests.attention import Array
from tests.committed import FOLDER as MODELS
from tests.committed import feeds
from tests.conftest import slow
from tests.errors import error_ratio
from tests.oracle import evaluate, tensors
from tests.whole import ARCHITECTURES, changed, layers_of, network, without_padding

EACH = pytest.mark.parametrize("name", ARCHITECTURES)
SOME = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in ("silu-decoder", "gelu-vision") else slow) for name in ARCHITECTURES],
)
TEXTS = [name for name in ARCHITECTURES if name != "gelu-vision"]
LONGEST = 24
WHOLE = Options(form="whole", forms=FormOptions(max_tokens=LONGEST))

EXACT = {"llama": 9e-9}
"""Bound on the float64 error. Gates are small differences times 2^24 (docs/programs.md), in any evaluation: 4.6e-9 was
measured; of the others at most 6e-15, of entries up to 9."""


def load(name: str, *, padding: bool = True) -> onnx.ModelProto:
    model = onnx.load(MODELS / f"{name}.onnx")
    return model if padding or name not in TEXTS else without_padding(model)


def planned(model: onnx.ModelProto) -> Plan:
    plan = make_plan(model, WHOLE)
    assert len(plan.conversions) == 2
    assert plan.whole is not None
    return plan


def last_stream(plan: Plan) -> str:
    """The tensor behind the last residual addition."""
    assert plan.whole is not None
    return str(plan.views[0].nodes[max(plan.whole.sums)].output[0])


def check_against_the_theorems(model: onnx.ModelProto, architecture: str) -> None:
    """The stream behind the last layer, in float64, against `tests.whole`; bias tokens are rows of zeros in it."""
    plan = planned(model)
    result = apply(plan)
    onnx.checker.check_model(result)
    net, programs = layers_of(model, architecture), [each.program.as_heads for each in plan.conversions]
    fed = {
        name: np.ones_like(value) if name == "attention_mask" else value
        for name, value in feeds(model, 0, 2, 11).items()
    }
    assert plan.whole is not None
    made, embedded = tensors(result, fed), tensors(model, fed)[plan.whole.entry]
    wide = made[f"{PREFIX}/{last_stream(plan)}/wide"]
    count, width = embedded.shape[1:]
    for batch, tokens in enumerate(embedded):
        expected = network(tokens, net, programs)
        np.testing.assert_allclose(wide[batch, :count, :width], expected, rtol=0.0, atol=EXACT.get(architecture, 1e-12))
        assert not wide[batch, count:, :width].any()


@EACH
def test_the_network_is_that_of_the_theorems(name: str) -> None:
    check_against_the_theorems(load(name), ARCHITECTURES[name])


@SOME
def test_float32_is_as_close_as_the_original(name: str) -> None:
    """Sequences padded on either side, one of them so that a causal token may attend to nothing."""
    model = load(name)
    cases = [feeds(model, seed, 3, LONGEST - 5 * seed) for seed in range(3)]
    for case in cases:
        if "attention_mask" in case:
            case["attention_mask"][2, :4] = 0
    if name == "gelu-vision":
        cases = [feeds(model, seed) for seed in range(3)]
    assert error_ratio(model, apply(planned(model)), cases, [True, False]) <= 1.5


# -- what is in the graph --------------------------------------------------------------------------------------

NEVER = {"Relu", "Sigmoid", "Tanh", "Erf", "Clip", "Where", "Gelu", "Trilu", "Softplus", "Min", "Max", "PRelu"}
FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE)


def nodes_of_network(model: onnx.ModelProto, plan: Plan) -> list[onnx.NodeProto]:
    """The nodes between the embeddings and the last stream whose results are numbers, not shapes or truth values."""
    assert plan.whole is not None
    inferred = shape_inference.infer_shapes(model)
    view = view_model(inferred)
    above = ancestors(view, frozenset([plan.whole.entry]), [f"{PREFIX}/{last_stream(plan)}/wide"])
    return [
        view.nodes[index] for index in sorted(above) if view.type_of(view.nodes[index].output[0]).elem_type in FLOATS
    ]


@EACH
def test_nothing_masks_but_w_qk(name: str) -> None:
    plan = planned(load(name, padding=False))
    assert not any("depends on data" in note for note in plan.notes)
    result = apply(plan)
    nodes = nodes_of_network(result, plan)
    assert {node.op_type for node in nodes} & NEVER == set()
    makers = {node.output[0]: node for node in nodes}
    softmaxes = [node for node in nodes if node.op_type == "Softmax"]
    assert len(softmaxes) >= 4
    for softmax in softmaxes:
        maker = makers[softmax.input[0]]
        while maker.op_type == "Cast":
            maker = makers[maker.input[0]]
        assert maker.op_type == "MatMul", "a softmax of a product, with nothing added to it"
        assert {makers[operand].op_type for operand in maker.input} <= {"Concat", "Transpose"}
    types = {node.op_type for node in result.graph.node}
    assert types & {"LessOrEqual", "Trilu", "GreaterOrEqual", "GatherND", "IsNaN"} == set(), (
        "what computed masks is gone"
    )


@pytest.mark.parametrize("name", TEXTS)
def test_a_mask_that_is_data_stays_and_is_named(name: str) -> None:
    plan = planned(load(name))
    assert plan.whole is not None
    (mask,) = plan.whole.data
    assert any(f"'{mask}' depends on data and stays" in note for note in plan.notes)
    nodes = [node for node in nodes_of_network(apply(plan), plan) if node.op_type in NEVER]
    assert all(mask in node.output for node in nodes)


def test_literal_weights_stand_in_the_graph() -> None:
    plan = planned(load("silu-decoder", padding=False))
    result = apply(plan)
    made = tensors(result, feeds(load("silu-decoder", padding=False), 0, 2, 5))
    for conversion in plan.conversions:
        heads = f"{conversion.block.name}/heads"
        assert made[f"{heads}/W_Q"].shape == (128, 32 + 1 + 1, 1)
        assert made[f"{heads}/W_K"].shape == (1, 32 + 1 + 1, 1)
        assert made[f"{heads}/W_O"].shape == (128, 1, 32)
        pattern = made[f"{heads}/pattern"]
        assert pattern.shape == (2, 128, 6, 6)
        allowed = np.eye(6, dtype=bool)
        allowed[:, 5] = True
        assert not pattern[..., ~allowed].any()
        assert (pattern[..., :5, 5] > 0.0).all()
    weights = made[f"{PREFIX}/W_QK_positions_0"]
    assert weights.shape == (1 + LONGEST,) * 2
    np.testing.assert_array_equal(weights[1:, 1:] == 0.0, np.tri(LONGEST, dtype=bool))
    np.testing.assert_array_equal(weights[0] == 0.0, np.arange(1 + LONGEST) == 0)
    assert (weights[1:, 0] < -1e9).all()


# -- every row and column matters ------------------------------------------------------------------------------


def other_row(values: Array) -> Array:
    values[0, 0] = -7.5
    return values


def other_model_columns(values: Array) -> Array:
    values[0, 0, :32] = np.linspace(-7.5, 7.5, 32)  # a constant is 0 behind a LayerNormalization
    return values


def merged_slots(values: Array) -> Array:
    values[0, 2] = values[0, 3]
    return values


def no_indicator(values: Array) -> Array:
    values[0, :, 0] = 0.0
    return values


def off_by_one(values: Array) -> Array:
    bias = len(values) - LONGEST
    tokens = np.arange(LONGEST - 1)
    values[bias + tokens, bias + tokens + 1] = 0.0
    return values


def seen(values: Array) -> Array:
    values[len(values) - LONGEST :, 0] = 0.0
    return values


EDITS: dict[str, tuple[str, Callable[[Array], Array]]] = {
    "bias row -7.5": (BIAS_ROWS, other_row),
    "bias row with model columns": (BIAS_ROWS, other_model_columns),
    "position slots merged": (POSITION_ROWS, merged_slots),
    "no indicator of tokens": (POSITION_ROWS, no_indicator),
    "a token sees a bias token": (f"{PREFIX}/W_QK_positions_0", seen),
    "causal mask off by one": (f"{PREFIX}/W_QK_positions_0", off_by_one),
}


@pytest.mark.parametrize("edit", EDITS)
@SOME
def test_other_rows_and_columns_change_the_output(name: str, edit: str) -> None:
    model = load(name, padding=False)
    result = apply(planned(model))
    tensor, change = EDITS[edit]
    if edit == "causal mask off by one" and name in ("gelu-encoder", "gelu-vision"):
        pytest.skip("its heads have no causal mask")
    fed = feeds(model, 0, 2, 9)
    before, after = evaluate(result, fed), evaluate(changed(result, tensor, change), fed)
    assert max(np.abs(after[each] - before[each]).max() for each in before) > 1e-6


def test_columns_that_are_not_carried_change_the_output() -> None:
    model = load("relu-decoder", padding=False)
    result = apply(planned(model))
    fed = feeds(model, 0, 2, 9)
    before = evaluate(result, fed)
    after = evaluate(not_carried(result), fed)
    assert not np.abs(after["logits"] - before["logits"]).max() <= 1e-6


def not_carried(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model whose first residual addition loses the further columns."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    total = next(node for node in result.graph.node if node.op_type == "Add" and node.output[0].endswith("/wide"))
    carried = f"{PREFIX}/wide"
    assert carried in total.input
    keep = np.zeros(next(each for each in result.graph.initializer if each.name == BIAS_ROWS).dims[-1], np.float32)
    keep[:32] = 1.0
    result.graph.initializer.append(onnx.numpy_helper.from_array(keep, "keep"))
    lost = onnx.helper.make_node("Mul", [carried, "keep"], ["lost"])
    index = list(result.graph.node).index(total)
    total.input[list(total.input).index(carried)] = "lost"
    result.graph.node.insert(index, lost)
    return result


SHORT = {"batch": 1, "sequence": 6}
QUICK = ("causal mask off by one",)


def sabotaged(monkeypatch: pytest.MonkeyPatch, edit: Callable[[onnx.ModelProto], onnx.ModelProto]) -> Any:
    monkeypatch.setattr(widening, "widen", lambda *given: edit(widen(*given)))
    return rewrite(load("silu-decoder", padding=False), form="whole", max_tokens=LONGEST, dims=SHORT)


@pytest.mark.parametrize("edit", [pytest.param(edit, marks=() if edit in QUICK else slow) for edit in EDITS])
def test_sabotage_fails_the_proof(edit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor, change = EDITS[edit]
    report = sabotaged(monkeypatch, lambda model: changed(model, tensor, change))
    assert report.exit_status is ExitStatus.VALIDATION_FAILED
    assert not report


@slow
def test_columns_that_are_not_carried_fail_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sabotaged(monkeypatch, not_carried).exit_status is ExitStatus.VALIDATION_FAILED


@slow
def test_a_neuron_that_sees_its_neighbours_fails_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    report = sabotaged(monkeypatch, lambda model: changed(model, neuron_scores(1), off_by_one))
    assert report.exit_status is ExitStatus.VALIDATION_FAILED


@slow
@pytest.mark.parametrize("name", ["silu-decoder", "relu-decoder", "gelu-vision"])
def test_the_proof_passes(name: str) -> None:
    dims = {"batch": 3} if name == "gelu-vision" else {"batch": 3, "sequence": LONGEST - 1}
    report = rewrite(load(name), form="whole", max_tokens=LONGEST, dims=dims)
    assert report.exit_status is ExitStatus.CONVERTED
    assert report.form == "whole"
    assert len(report.converted) == 2
    assert report.validation is not None
    assert len(report.validation.blocks) == 2


@pytest.mark.parametrize(
    ("batch", "count", "length"), [(1, 5, 5), (3, LONGEST - 1, LONGEST - 1), (5, 7, 7), (37, 2, 2)]
)
def test_blocks_on_merged_sequences_are_proved_on_sequences_that_fit(batch: int, count: int, length: int) -> None:
    """OPT's MLPs read [batch * tokens, channels]; alone, they divide the rows into sequences within the positions."""
    model = load("relu-decoder")
    alone = apply(sublayers_only(planned(model)))
    fed = feeds(model, 0, batch, count)
    made, expected = tensors(alone, fed), evaluate(model, fed)
    (divided,) = [made[name] for name in made if name.endswith("layers.0/heads/by_sequence")]
    assert divided.shape[1] <= LONGEST
    assert divided.shape[1] >= length
    assert divided.shape[0] * divided.shape[1] == batch * count
    for name, values in expected.items():
        np.testing.assert_allclose(made[name], values, rtol=0.0, atol=1e-12)


# -- limits ----------------------------------------------------------------------------------------------------


def test_longer_sequences_fail_where_the_name_says_why() -> None:
    model = load("relu-decoder")
    result = apply(planned(model))
    with pytest.raises(Exception, match=f"sequence_longer_than_max_tokens_{LONGEST}"):
        open_session(result, "cpu", optimise=False).run(feeds(model, 0, 1, LONGEST + 1))


@pytest.mark.parametrize(
    ("name", "longest"),
    [("silu-decoder", 360), ("relu-decoder", 360), ("gelu-encoder", 247), ("gelu-vision", 17), ("gated-decoder", 292)],
)
def test_without_max_tokens_the_length_is_what_the_model_fixes_or_what_fits(name: str, longest: int) -> None:
    plan = make_plan(load(name), Options(form="whole"))
    assert plan.whole is not None
    assert plan.whole.max_tokens == longest
    assert [each.longest for each in plan.conversions] == [longest, longest]


@pytest.mark.parametrize(("only", "left"), [("*.0", "1"), ("*.1", "0")])
def test_a_block_that_is_left_keeps_the_network_from_being_whole(only: str, left: str) -> None:
    plan = make_plan(load("relu-decoder"), Options(form="whole", only=(only,), forms=WHOLE.forms))
    assert not plan.conversions
    reasons = [entry.miss.reason for entry in plan.left]
    assert any(f"'model.model.decoder.layers.{left}' is left; use form masked" in reason for reason in reasons)


def test_an_activation_that_is_no_block_is_refused_by_its_name() -> None:
    """A ReLU on the stream itself: between no two linear operators."""
    model = load("relu-decoder", padding=False)
    index, total = next((i, node) for i, node in enumerate(model.graph.node) if node.output[0] == "add_215")
    total.output[0] = "sum"
    model.graph.node.insert(index + 1, onnx.helper.make_node("Relu", ["sum"], ["add_215"], "bent"))
    plan = make_plan(model, WHOLE)
    assert not plan.conversions
    assert any("Relu 'bent': it would stay in a network of attention only" in left.miss.reason for left in plan.left)


def test_scores_and_convolutions_of_tokens_alone_are_refused() -> None:
    plan = make_plan(load("conformer-encoder"), WHOLE)
    assert not plan.conversions
    reasons = [left.miss.reason for left in plan.left]
    assert sum("MatMul '/model/layers.0/self_attn/MatMul': its second factor" in reason for reason in reasons) == 4
    assert sum("cannot be attention only" in reason and reason.endswith("use form masked") for reason in reasons) == 4
