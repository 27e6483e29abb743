"""Form `whole`: no mask operator, literal weights, limits; `tests.passes.test_networks` has the network in numpy."""

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, shape_inference

from passes.forms.softmax import PREFIX
from passes.options import Options
from passes.plan import Plan, apply, make_plan
from rewriter import heads
from rewriter.graph.edit import ancestors
from rewriter.graph.view import all_views
from rewriter.ort import open_session
from tests.committed import FOLDER as MODELS
from tests.committed import feeds
from tests.errors import RATIO, error_ratio
from tests.oracle import evaluate, tensors
from tests.whole import ARCHITECTURES, without_padding

EACH = pytest.mark.parametrize("name", ARCHITECTURES)
LONGEST = 24
WHOLE = Options(form="whole", max_tokens=LONGEST)


def load(name: str, *, padding: bool = True) -> onnx.ModelProto:
    model = onnx.load(MODELS / f"{name}.onnx")
    return model if padding else without_padding(model)


def planned(model: onnx.ModelProto, neurons: str = "square") -> Any:
    plan = make_plan(model, replace(WHOLE, neurons=neurons))
    assert len(plan.conversions) == 2
    assert plan.whole is not None
    return plan


@pytest.mark.sample(0)
@pytest.mark.parametrize("neurons", ["square", "compact", "staged"])
@EACH
def test_float32_is_as_close_as_the_original(name: str, neurons: str) -> None:
    """Sequences padded on either side, one of them so that a causal token may attend to nothing."""
    model = load(name)
    cases = [feeds(model, seed, 3, LONGEST - 5 * seed) for seed in range(3)]
    for case in cases:
        if "attention_mask" in case:
            case["attention_mask"][2, :4] = 0
    if name == "gelu-vision":
        cases = [feeds(model, seed) for seed in range(3)]
    ratio = error_ratio(model, apply(planned(model, neurons)), cases, [True, False])
    assert ratio <= (1.5 if neurons == "square" else RATIO)


NEVER = {"Relu", "Sigmoid", "Tanh", "Erf", "Clip", "Where", "Gelu", "Trilu", "Softplus", "Min", "Max", "PRelu"}
FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE)


def nodes_of_network(model: onnx.ModelProto, plan: Plan) -> list[onnx.NodeProto]:
    """The nodes above the last sublayer whose results are numbers, not shapes or truth values."""
    view = all_views(shape_inference.infer_shapes(model))[0]
    above = sorted(ancestors(view, frozenset(), [plan.conversions[-1].whole_block.result]))
    return [view.nodes[index] for index in above if view.type_of(view.nodes[index].output[0]).elem_type in FLOATS]


@pytest.mark.sample(1)
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
        assert maker.op_type == "MatMul", "a softmax of a product, with nothing added to it"
        assert {makers[operand].op_type for operand in maker.input} <= {"Concat", "Transpose"}
    types = {node.op_type for node in result.graph.node}
    assert types & {"LessOrEqual", "Trilu", "GreaterOrEqual", "GatherND", "IsNaN"} == set(), (
        "what computed masks is gone"
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "gelu-vision"])
def test_a_mask_that_is_data_stays_and_is_named(name: str) -> None:
    plan = planned(load(name))
    (mask,) = {each.term[1][0] for core in plan.whole.cores for each in core.data}
    assert any(f"'{mask}' depends on data and stays" in note for note in plan.notes)
    nodes = [node for node in nodes_of_network(apply(plan), plan) if node.op_type in NEVER]
    assert all(mask in node.output or "/data_0_" in node.output[0] for node in nodes)


@pytest.mark.slow
def test_literal_weights_stand_in_the_graph() -> None:
    plan = planned(load("silu-decoder", padding=False))
    result = apply(plan)
    made = tensors(result, feeds(load("silu-decoder", padding=False), 0, 2, 5))
    for conversion in plan.conversions:
        heads = f"{conversion.block.name}/heads"
        pattern = made[f"{heads}/pattern"]
        shapes = [made[f"{heads}/{name}"].shape for name in ("W_Q", "W_K", "W_O", "pattern")]
        assert shapes == [(128, 32 + 1 + 1, 1), (1, 32 + 1 + 1, 1), (128, 1, 32), (2, 128, 6, 6)]
        allowed = np.eye(6, dtype=bool)
        allowed[:, 5] = True
        assert not pattern[..., ~allowed].any()
        assert (pattern[..., :5, 5] > 0.0).all()
    weights = numpy_helper.to_array(next(w for w in result.graph.initializer if w.name == f"{PREFIX}/W_QK_positions_0"))
    assert weights.shape == (1 + LONGEST,) * 2
    np.testing.assert_array_equal(weights[1:, 1:] == 0.0, np.tri(LONGEST, dtype=bool))
    assert (weights[1:, 0] < -1e9).all()


def test_blocks_on_merged_sequences_are_proved_token_by_token() -> None:
    """OPT's MLPs read [batch * tokens, channels]; without the joined attention, each row is a separate sequence."""
    model = load("relu-decoder")
    plan = planned(model)
    alone, fed = apply(replace(plan, whole=None)), feeds(model, 0, 3, LONGEST - 1)
    alone.graph.initializer.extend(plan.whole.constants())
    made, expected = tensors(alone, fed), evaluate(model, fed)
    (rows,) = [made[name] for name in made if name.endswith("layers.0/heads/each_alone")]
    assert rows.shape == (3 * (LONGEST - 1), 1, 32)
    for name, values in expected.items():
        np.testing.assert_allclose(made[name], values, rtol=0.0, atol=1e-12)


@pytest.mark.sample(0)
@EACH
def test_heads_of_neurons_with_the_keys_that_w_qk_allows(name: str) -> None:
    """1 + m keys, and the same weights as with all keys; an error planted at a score of the last token is noticed."""
    model = load(name)
    literal, allowed = (apply(planned(model, neurons)) for neurons in ("square", "compact"))
    fed = feeds(model, 0) if name == "gelu-vision" else feeds(model, 0, 2, LONGEST - 1)
    made, expected = tensors(allowed, fed), evaluate(model, fed)
    assert {made[name].shape[-1] for name in made if "/heads/pattern" in name} <= {2, 3, 9}
    for output, values in expected.items():
        np.testing.assert_allclose(made[output], values, rtol=0.0, atol=1e-6)
    index, other = heads(literal).tensors, heads(allowed).tensors
    assert all(each.endswith("mlp_heads.P") for each in index.keys() - other.keys())
    for each, tensor in other.items():
        np.testing.assert_array_equal(tensor.make(), index[each].make(), err_msg=each)
    positions = next(weight for weight in allowed.graph.initializer if "W_QK_positions" in weight.name)
    changed = numpy_helper.to_array(positions).copy()
    last = changed.shape[-1] - (8 if name == "gelu-vision" else 2)
    changed[..., last, last - 1] += 1.0
    positions.CopyFrom(numpy_helper.from_array(changed, positions.name))
    wrong = tensors(allowed, fed)
    assert max(float(np.abs(wrong[output] - values).max()) for output, values in expected.items()) > 1e-4


@pytest.mark.parametrize("neurons", ["square", "compact", "staged"])
def test_longer_sequences_fail_where_the_name_says_why(neurons: str) -> None:
    model = load("relu-decoder")
    result = apply(planned(model, neurons))
    with pytest.raises(Exception, match=f"sequence_longer_than_max_tokens_{LONGEST}"):
        open_session(result, "cpu", optimise=False).run(feeds(model, 0, 1, LONGEST + 1))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "longest"),
    [("silu-decoder", 360), ("relu-decoder", 360), ("gelu-encoder", 247), ("gelu-vision", 17), ("gated-decoder", 292)],
)
def test_without_max_tokens_the_length_is_what_the_model_fixes_or_what_fits(name: str, longest: int) -> None:
    plan: Any = make_plan(load(name), Options(form="whole"))
    assert plan.whole.max_tokens == longest
    stated = None if name == "gelu-vision" else longest  # the model takes no other length
    assert [each.longest for each in plan.conversions] == [stated, stated]


@pytest.mark.parametrize(
    ("name", "options", "said", "times"),
    [
        ("relu-decoder", {"only": ("*.0",)}, "'model.model.decoder.layers.1' is left; use form masked", 1),
        ("relu-decoder", {"only": ("*.1",)}, "'model.model.decoder.layers.0' is left; use form masked", 1),
        ("conformer-encoder", {}, "Sigmoid '/model/layers.0/conv_module/glu/Sigmoid': it would stay", 4),
    ],
    ids=["the second block", "the first block", "no attention"],
)
def test_what_is_left_keeps_the_network_from_being_whole(name: str, options: Any, said: str, times: int) -> None:
    plan = make_plan(load(name), replace(WHOLE, **options))
    assert not plan.conversions
    assert sum(said in left.miss.reason for left in plan.left) == times
