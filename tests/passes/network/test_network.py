"""A bias token carried through a whole network: tokens keep their values, and other networks are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from passes.match.linear import Miss
from passes.network.carry import carry
from passes.network.names import COUNT, INDICATORS, IS_TOKEN, STREAM
from passes.network.route import Route, find_route
from passes.network.step import token_axes
from passes.options import FormOptions, Options
from passes.plan import Plan, apply, make_plan
from rewriter import ExitStatus, rewrite
from rewriter.errors import UsageError
from rewriter.ort.sessions import open_session
from tests.committed import FOLDER as MODELS
from tests.committed import emitted, feeds, in_place
from tests.conftest import slow
from tests.errors import apart, error_ratio
from tests.oracle import tensors
from tests.textmodels import text_model

CARRIED = {
    "silu-decoder": "/model/transformer/Add_output_0",
    "relu-decoder": "add_102",
    "gelu-encoder": "layer_norm",
    "gelu-vision": "/model/vit/embeddings/Add_output_0",
    "gated-decoder": "embedding",
    "conformer-encoder": "hidden_states",
}
"""Models of class GPT-2, OPT, BERT, ViT, Llama and Conformer, and where the bias token enters.

In BERT that is behind the first norm.
"""


def planned(name: str) -> Plan:
    return make_plan(onnx.load(MODELS / f"{name}.onnx"), Options())


def route_of(plan: Plan) -> Route | Miss:
    blocks = [conversion.block for conversion in plan.conversions]
    return find_route(plan.views[0], blocks or [left.block for left in plan.left if left.block is not None])


@pytest.mark.parametrize("m", [2])
@pytest.mark.parametrize("name", CARRIED)
def test_every_token_is_what_it_was(name: str, m: int) -> None:
    """Every tensor on the route, in float64; the largest error measured is 4.6e-15 of the tensor's largest entry."""
    plan = planned(name)
    route = route_of(plan)
    assert isinstance(route, Route)
    assert route.entry == CARRIED[name]
    longer = carry(plan.model, plan.views[0], route, m)
    onnx.checker.check_model(longer)
    names = [tensor for tensor, sizes in route.sizes.items() if tensor != route.entry and not _flat(sizes)]
    assert len(names) > 30
    for batch, length in ((1, 1), (2, 7), (3, 19)):
        fed = feeds(plan.model, 0, batch, length)
        before, after = tensors(plan.model, fed), tensors(longer, fed)
        for tensor in names:
            tokens = after[tensor]
            if tensor not in plan.views[0].outputs:
                for axis in token_axes(route.sizes[tensor]):
                    count = before[tensor].shape[axis]
                    assert tokens.shape[axis] == count + m
                    tokens = np.take(tokens, range(count), axis=axis)
            if before[tensor].dtype.kind == "f":
                largest = np.abs(before[tensor]).max(where=np.isfinite(before[tensor]), initial=0.0)
                np.testing.assert_allclose(tokens, before[tensor], rtol=0.0, atol=9e-15 * largest, err_msg=tensor)
            else:
                np.testing.assert_array_equal(tokens, before[tensor], err_msg=tensor)


def _flat(sizes: Any) -> bool:
    """Whether batch and tokens are one axis, of which the tokens are not a range."""
    return any(size is not None and size.tokens and size.batch for size in sizes)


@pytest.mark.parametrize("name", ["silu-decoder", "gelu-encoder"])
def test_bias_tokens_are_seen_by_the_new_heads_alone(name: str) -> None:
    plan = planned(name)
    route = route_of(plan)
    assert isinstance(route, Route)
    longer = carry(plan.model, plan.views[0], route, 2)
    patterns = [node.output[0] for node in longer.graph.node if node.op_type == "Softmax"]
    assert len(patterns) == 2
    values = tensors(longer, feeds(plan.model))
    count = int(values[COUNT][0])
    for pattern in patterns:
        assert values[pattern].shape[-2:] == (count + 2, count + 2)
        assert not values[pattern][..., :count, count:].any()
        np.testing.assert_array_equal(
            values[pattern][..., count:, :], np.broadcast_to(np.eye(count + 2)[count:], (3, 4, 2, count + 2))
        )
    assert not values[STREAM][:, count:].any()
    np.testing.assert_array_equal(values[IS_TOKEN][:, 0], np.arange(count + 2) < count)
    np.testing.assert_array_equal(values[INDICATORS][count:], np.eye(2, 3, 1))


WHOLE = FormOptions(bias_token="network")


@pytest.mark.parametrize("name", CARRIED)
def test_whole_networks_are_the_same_function(name: str) -> None:
    model = onnx.load(MODELS / f"{name}.onnx")
    plan = make_plan(model, Options(form="masked", forms=WHOLE))
    result = apply(plan)
    found = apart(model, result, in_place(f"{name}.onnx", plan), [feeds(model)])
    bound = emitted(f"{name}.onnx")
    assert found.emitted <= bound
    assert found.exact <= found.carried + bound
    cases = [feeds(model, seed) for seed in range(4)]
    assert error_ratio(model, result, cases, [True]) <= 2.0  # measured: at most 1.0


SHORT = {"silu-decoder": {"batch": 1, "sequence": 5}, "gelu-vision": {"batch": 1}}


@pytest.mark.parametrize("name", [pytest.param("silu-decoder", marks=slow), "gelu-vision"])
def test_whole_networks_are_proved(name: str) -> None:
    """The proof finds what the oracle finds."""
    report = rewrite(MODELS / f"{name}.onnx", form="masked", bias_token="network", dims=SHORT[name])
    assert report.exit_status is ExitStatus.CONVERTED
    assert len(report.converted) == 2
    assert any(CARRIED[name] in note for note in report.notes)
    assert report.validation is not None
    assert len(report.validation.blocks) == 2
    assert report.rewritten is not None
    streams = [node for node in report.rewritten.graph.node if node.output[0] == STREAM]
    assert len(streams) == 1, "the bias token is appended once"
    readers = {node.name.partition("/heads")[0] for node in report.rewritten.graph.node if INDICATORS in node.input}
    assert readers == {row.name for row in report.converted}, "every sublayer reads it"


def test_a_bias_token_that_tokens_can_see_fails_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    from passes.network import planning

    def open_floor(*arguments: Any) -> onnx.ModelProto:
        model = carry(*arguments)
        for node in model.graph.node:
            if node.op_type == "Softmax" and node.input[0].endswith("scores_apart"):
                maker = next(other for other in model.graph.node if node.input[0] in other.output)
                node.input[0] = maker.input[1]
        return model

    monkeypatch.setattr(planning, "carry", open_floor)
    report = rewrite(MODELS / "gelu-vision.onnx", form="masked", bias_token="network", dims={"batch": 1})
    assert report.exit_status is ExitStatus.VALIDATION_FAILED
    assert report.rewritten is None


def test_blocks_of_other_architectures_are_left_with_the_reason() -> None:
    way, reason, _ = REFUSED[0]
    report = rewrite(small(way, opset=18), form="masked", bias_token="network", dry_run=True)
    assert report.exit_status is ExitStatus.NOTHING_TO_CONVERT
    (left,) = report.left
    assert left.reason is not None
    assert "the bias token cannot be carried through the network" in left.reason
    assert reason in left.reason
    assert left.reason.endswith("use --option bias_token=sublayer")


def test_other_forms_are_refused() -> None:
    with pytest.raises(UsageError, match="bias token is for form masked or whole"):
        rewrite(MODELS / "silu-decoder.onnx", bias_token="network")
    with pytest.raises(UsageError, match="known are: sublayer, network"):
        rewrite(MODELS / "silu-decoder.onnx", bias_token="everywhere")


ATTENTION = """
  kt = Transpose<perm = [0, 2, 1]>(t) scores = MatMul(t, kt) pattern = Softmax<axis = -1>(scores)
  mixed = MatMul(pattern, t) x1 = Add(t, mixed)
"""
MLP = """
  first = MatMul(x1, W1) y = Add(first, b1) s = Sigmoid(y) h = Mul(y, s) second = MatMul(h, W2) out = Add(second, x1)
"""
REFUSED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    (
        ATTENTION.replace("x1 =", "x0 =")
        + "axes = Constant<value_ints = [1]>() c = ReduceMean(x0, axes) x1 = Sub(x0, c)",
        "it reduces over tokens",
        {"opset": 18},
    ),
    (
        ATTENTION.replace("mixed = MatMul(pattern", "gate = Sigmoid(pattern) mixed = MatMul(gate"),
        "it mixes tokens outside a softmax",
        {},
    ),
    (ATTENTION.replace("<axis = -1>(scores)", "<axis = 1>(scores)"), "its scores are not [tokens, tokens]", {}),
    (ATTENTION.replace("x1 =", "x0 =") + "x1 = Concat<axis = 1>(x0, x0)", "it appends tokens", {}),
    (ATTENTION.replace("x1 =", "x0 =") + "x1 = CumSum(x0, one)", "no rule says how it treats", {}),
    (ATTENTION.replace("x1 =", "x0 =") + "x1 = Slice(x0, zero, one, one)", "it selects tokens before the last", {}),
    (
        ATTENTION.replace("kt = Transpose<perm = [0, 2, 1]>(t)", "kt = Transpose<perm = [0, 2, 1]>(z)"),
        "its second factor is neither constant nor computed from the stream",
        {},
    ),
    (
        ATTENTION.replace("x1 =", "x0 =")
        + "each = Unsqueeze(x0, two) own = MatMul(each, by_place) x2 = Squeeze(own, two) x1 = Add(x0, x2)",
        "'by_place' has a matrix for each token",
        {"tokens": "5"},
    ),
    (ATTENTION, "opset 12 is older than 13", {"opset": 12}),
    (ATTENTION.replace("Add(t, mixed)", "Add(z, mixed)"), "no tensor", {}),
)
"""Graphs from the embeddings `t` to the block, and why each cannot carry the bias token."""


def small(way: str, opset: int = 17, tokens: str = "tokens") -> onnx.ModelProto:
    names = ("zero", "one", "two")
    ints = {name: onnx.numpy_helper.from_array(np.asarray([i], np.int64), name) for i, name in enumerate(names)}
    draw = np.random.default_rng(0).normal
    return text_model(
        f"t = Add(x, p) {way} {MLP}",
        inputs=f"float[batch, {tokens}, 4] x, float[batch, {tokens}, 4] z",
        outputs="float[batch, rows, 4] out",
        opset=opset,
        constants={
            "p": np.zeros((1, 1, 4)),
            **ints,
            "by_place": draw(size=(5, 4, 4)),
            "by_head": draw(size=(1, 2, 4, 3)),
            "Wo": draw(size=(6, 4)),
        },
    )


def test_the_small_model_itself_can_be_carried() -> None:
    model = small(ATTENTION)
    plan = make_plan(model, Options(form="masked"))
    assert isinstance(route_of(plan), Route)
    assert len(make_plan(model, Options(form="masked")).conversions) == 1


@pytest.mark.parametrize(("way", "reason", "options"), REFUSED, ids=[entry[1] for entry in REFUSED])
def test_what_cannot_be_carried_is_refused_with_the_reason(way: str, reason: str, options: dict[str, Any]) -> None:
    plan = make_plan(small(way, **options), Options())
    assert len(plan.conversions) == 1
    found = route_of(plan)
    assert isinstance(found, Miss)
    assert reason in found.reason


MERGED = """
  kt = Transpose<perm = [0, 2, 1]>(t) scores = MatMul(t, kt) heads = Unsqueeze(scores, ones)
  pattern = Softmax<axis = -1>(heads) square = Shape(scores) merged = Reshape(pattern, square)
  mixed = MatMul(merged, t) x1 = Add(t, mixed)
"""


def test_a_pattern_may_be_reshaped_between_softmax_and_product() -> None:
    """As in BLOOM, which merges batch and heads there."""
    ones = {"ones": onnx.numpy_helper.from_array(np.asarray([1], np.int64), "ones")}
    other = MERGED.replace("merged = Reshape(pattern", "gate = Sigmoid(pattern) merged = Reshape(gate")
    model, gated = (small(way) for way in (MERGED, other))
    for each in (model, gated):
        each.graph.initializer.extend(ones.values())
    plan = make_plan(model, Options())
    route = route_of(plan)
    assert isinstance(route, Route)
    longer = carry(plan.model, plan.views[0], route, 2)
    feeds = {name: np.random.default_rng(0).normal(size=(2, 5, 4)).astype(np.float32) for name in ("x", "z")}
    before, after = tensors(model, feeds), tensors(longer, feeds)
    np.testing.assert_allclose(after["mixed"][:, :5], before["mixed"], rtol=0.0, atol=1e-14)
    assert not after["merged"][:, :5, 5:].any()
    found = route_of(make_plan(gated, Options()))
    assert isinstance(found, Miss)
    assert "it mixes tokens outside a softmax" in found.reason


BY_HEAD = """
  each = Unsqueeze(t, one) q = MatMul(each, by_head) turned = Transpose<perm = [0, 1, 3, 2]>(q)
  scores = MatMul(q, turned) pattern = Softmax<axis = -1>(scores) z4 = MatMul(pattern, q)
  z3 = Transpose<perm = [0, 2, 1, 3]>(z4) joined = Reshape(z3, join) mixed = MatMul(joined, Wo) x1 = Add(t, mixed)
"""


def test_each_head_may_have_a_matrix_of_its_own() -> None:
    """One constant [1, heads, 4, 3] for the projections of all heads."""
    model = small(BY_HEAD)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0, 0, 6]), "join"))
    plan = make_plan(model, Options())
    route = route_of(plan)
    assert isinstance(route, Route)
    assert not route.asides
    longer = carry(plan.model, plan.views[0], route, 2)
    feeds = {name: np.random.default_rng(0).normal(size=(3, 5, 4)).astype(np.float32) for name in ("x", "z")}
    before, after = tensors(model, feeds), tensors(longer, feeds)
    assert after["q"].shape == (3, 2, 7, 3)
    np.testing.assert_allclose(after["q"][:, :, :5], before["q"], rtol=0.0, atol=1e-14)
    np.testing.assert_allclose(after["mixed"][:, :5], before["mixed"], rtol=0.0, atol=1e-14)


def test_an_output_on_the_way_is_cut_to_the_tokens() -> None:
    model = small(ATTENTION)
    model.graph.output.append(onnx.helper.make_tensor_value_info("pattern", onnx.TensorProto.FLOAT, ["b", "n", "k"]))
    plan = make_plan(model, Options())
    route = route_of(plan)
    assert isinstance(route, Route)
    longer = carry(plan.model, plan.views[0], route, 2)
    feeds = {name: np.random.default_rng(0).normal(size=(2, 5, 4)).astype(np.float32) for name in ("x", "z")}
    before, after = (open_session(each, "cpu", optimise=False).run(feeds) for each in (model, longer))
    for name in before:
        np.testing.assert_array_equal(after[name], before[name])
    assert apply(plan).graph.output == model.graph.output


AROUND = "l = MatMul(x, K) r = Add(x, l)"
"""A sum beside the MLP, from which no block is computed."""


@pytest.mark.parametrize("form", ["masked", "whole"])
@pytest.mark.parametrize(
    ("body", "outputs"),
    [
        # Behind the last block, the stream is added to what the block does not read: the tokens leave after b2.
        (f"{AROUND} y = MatMul(x, W1) h = Relu(y) s = MatMul(h, W2) b = Add(s, b2) out = Add(b, r)", ""),
        # No residual addition at all, and the block's output is one of the model's as well.
        ("y = MatMul(x, W1) h = Relu(y) s = MatMul(h, W2) b = Add(s, b2) l = MatMul(b, K) out = Add(l, l)", "b"),
        # As many neurons as channels: the pre-activation looks like a stream.
        ("a = MatMul(x, K) y = Add(a, k) h = Relu(y) s = MatMul(h, K) out = Add(s, b2)", ""),
    ],
)
def test_streams_that_end_elsewhere(form: str, body: str, outputs: str) -> None:
    rng = np.random.default_rng(7)
    constants = {"K": rng.normal(size=(4, 4)), "k": rng.normal(size=4)}
    more = f", float[batch, tokens, 4] {outputs}" if outputs else ""
    model = text_model(body, outputs=f"float[batch, tokens, 4] out{more}", constants=constants)
    report = rewrite(model, form=form, bias_token="network" if form == "masked" else "sublayer")
    assert report.exit_status is ExitStatus.CONVERTED, report.problems
    assert report.rewritten is not None
    assert apart(model, report.rewritten, []).exact < 1e-6


@pytest.mark.parametrize("form", ["masked", "whole"])
def test_a_branch_between_two_blocks_is_named(form: str) -> None:
    """It reads the stream from around it, and a block reads what it makes."""
    first = "y = MatMul(x, W1) h = Relu(y) s = MatMul(h, W2) n = Softmax(s)"
    branch = (
        "k = Constant<value_ints = [1]>() c = Cast<to = 9>(k) m = If(c) <then_branch = t () => (float[b, t, 4] a)"
        " { a = Neg(n) }, else_branch = e () => (float[b, t, 4] a) { a = Identity(n) }>"
    )
    second = "v = MatMul(m, V1) w = Relu(v) out = MatMul(w, W2)"
    model = text_model(f"{first} {branch} {second}")
    plan = make_plan(model, Options(form=form, forms=FormOptions(bias_token="network")))
    reason = "If 'm': a subgraph of control flow reads the residual stream"
    assert [left.miss.reason.partition(";")[0] for left in plan.left] == 2 * [
        f"the bias token cannot be carried through the network: {reason}"
    ]


DEEP = "y = MatMul(x, W1) h = Relu(y) m = MatMul(h, K) g = Relu(m) out = MatMul(g, W2)"
"""Two hidden layers: the operator between them is the last of one block and the first of the next."""


def test_an_mlp_of_three_layers() -> None:
    model = text_model(DEEP, constants={"K": np.random.default_rng(0).normal(size=(8, 8))})
    report = rewrite(model, form="masked", bias_token="network")
    assert report.exit_status is ExitStatus.CONVERTED, report.problems
    assert len(report.converted) == 2
    whole = rewrite(model, form="whole")
    assert whole.exit_status is ExitStatus.NOTHING_TO_CONVERT
    reason = "a block reads 'h', which has other channels than the stream's 4; use form masked"
    assert {row.reason for row in whole.left} == {f"the network cannot be attention only: {reason}"}


@pytest.mark.parametrize("form", ["masked", "compact"])
def test_an_activation_behind_a_whole_block(form: str) -> None:
    """It is proved from its pre-activation, since the block before no longer makes what its W1 reads."""
    mlp = "y = MatMul(x, W1) h = Relu(y) m = MatMul(h, W2)"
    body = f"{mlp} g = Mul(m, m) s = ReduceMean<axes = [-1]>(g) out = Div(m, s)"
    report = rewrite(text_model(body), form=form, scope="all")
    assert report.exit_status is ExitStatus.CONVERTED, report.problems
    assert [row.activation for row in report.converted] == ["relu", "square"]
    assert report.rewritten is not None
    assert apart(text_model(body), report.rewritten, []).exact < 1e-5
