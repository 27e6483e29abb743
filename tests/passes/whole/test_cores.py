"""The attention of small networks: found, joined with positions, or refused, with the operator that mixes tokens."""

from typing import Any

import numpy as np
import onnx
import pytest

from passes.accounting import account
from passes.options import Options
from passes.plan import Plan, apply, make_plan
from rewriter import certify, heads
from rewriter.interpret.stream import without_bias_rows
from rewriter.ort import open_session
from tests.cases import proved
from tests.changes import run
from tests.errors import apart
from tests.oracle import tensors
from tests.textmodels import integers, text_model


def planned(model: onnx.ModelProto) -> Plan:
    return make_plan(model, Options(form="whole", max_tokens=24))


ATTENTION = """
  kt = Transpose<perm = [0, 2, 1]>(t) scores = MatMul(t, kt) pattern = Softmax<axis = -1>(scores)
  mixed = MatMul(pattern, t) x1 = Add(t, mixed)
"""
BEFORE = ATTENTION.replace("x1 =", "x0 =")
MLP = """
  first = MatMul(x1, W1) y = Add(first, b1) s = Sigmoid(y) h = Mul(y, s) second = MatMul(h, W2) out = Add(second, x1)
"""
MERGED = """
  kt = Transpose<perm = [0, 2, 1]>(t) scores = MatMul(t, kt) heads = Unsqueeze(scores, one)
  pattern = Softmax<axis = -1>(heads) square = Shape(scores) merged = Reshape(pattern, square)
  mixed = MatMul(merged, t) x1 = Add(t, mixed)
"""
"""A pattern reshaped between softmax and product, as in BLOOM, which merges batch and heads there."""

BY_HEAD = """
  each = Unsqueeze(t, one) q = MatMul(each, by_head) turned = Transpose<perm = [0, 1, 3, 2]>(q)
  scores = MatMul(q, turned) pattern = Softmax<axis = -1>(scores) z4 = MatMul(pattern, q)
  z3 = Transpose<perm = [0, 2, 1, 3]>(z4) joined = Reshape(z3, join) mixed = MatMul(joined, Wo) x1 = Add(t, mixed)
"""
"""One constant [1, heads, 4, 3] for the projections of all heads."""

SINKS = [0.5, 2.0]
SINK = """
  size = Shape(scores) rows = Slice(size, zero, three) column = Concat<axis = 0>(rows, one) own = Expand(sinks, column)
  s1 = Concat<axis = -1>(scores, own) most = ReduceMax<axes = [-1], keepdims = 1>(s1) s2 = Sub(s1, most)
  weights = Softmax<axis = -1>(s2) pattern = Slice(weights, zero, last, last) z4
"""
PADDING = """
  z1 = ReduceMax<axes = [2], keepdims = 0>(z) z2 = Unsqueeze(z1, one_two) seen = Greater(z2, nought)
  low = Where(seen, nought, lowest) masked = Add(scores, low) size = Shape(scores)
"""
WITH_SINK = BY_HEAD.replace("pattern = Softmax<axis = -1>(scores) z4", SINK)
"""As gpt-oss has it; the sinks of two heads are `sinks`."""

ROUTER = """
  flat = Reshape(x0, by_row) logits = MatMul(flat, Wr) shares = Softmax<axis = -1>(logits)
  top, place = TopK(shares, two)
  sum = ReduceSum(top, last) parts = Div(top, sum) part = Reshape(parts, one_column) index = Reshape(place, last)
  row = Unsqueeze(flat, one) twice = Expand(row, each_twice) rows_ = Reshape(twice, by_row) e1 = Gather(E1, index)
  c = Unsqueeze(rows_, last) d = MatMul(e1, c) ye = Squeeze(d, last) se = Sigmoid(ye) he = Mul(ye, se)
  e2 = Gather(E2, index) k = Unsqueeze(he, last) l = MatMul(e2, k) m = Squeeze(l, last) weighed = Mul(m, part)
  pairs = Reshape(weighed, in_pairs) mixture = ReduceSum<keepdims = 0>(pairs, one) was = Shape(x0)
  back = Reshape(mixture, was) x1 = Add(x0, back)
"""
EXPERTS = BEFORE + ROUTER
"""Two of three experts for each token, as Mixtral routes them."""

REFUSED: tuple[tuple[str, str], ...] = (
    (f"{BEFORE} c = ReduceMean<axes = [1]>(x0) x1 = Sub(x0, c)", "ReduceMean 'c': it mixes tokens outside a softmax"),
    (
        ATTENTION.replace("mixed = MatMul(pattern", "gate = Sigmoid(pattern) mixed = MatMul(gate"),
        "MatMul 'scores': it mixes tokens outside a softmax",
    ),
    (ATTENTION.replace("<axis = -1>(scores)", "<axis = 1>(scores)"), "Softmax 'pattern': it is not over the last"),
    (f"{BEFORE} x1 = CumSum(x0, one)", "CumSum 'x1': it mixes tokens outside a softmax"),
    (
        f"{BEFORE} turned = Transpose<perm = [0, 2, 1]>(x0) c = Conv<kernel_shape = [3], pads = [1, 1]>(turned, taps) "
        "x1 = Transpose<perm = [0, 2, 1]>(c)",
        "Conv 'c': it mixes tokens outside a softmax",
    ),
    (
        "last, mixed = Scan<num_scan_inputs = 1, scan_input_axes = [1], scan_output_axes = [1], body = b "
        "(float[batch, 4] s, float[batch, 4] u) => (float[batch, 4] v, float[batch, 4] w) { v = Add(s, u) "
        "w = Identity(v) }>(start, t) x1 = Add(t, mixed)",
        "Scan 'last': no heads were found in this sublayer",
    ),
    (f"{BEFORE} x2 = Relu(x0) x1 = Add(x0, x2)", "Relu 'x2': it would stay in a network of attention only"),
    (f"{BEFORE} g = MatMul(kt, t) x2 = MatMul(x0, g) x1 = Add(x0, x2)", "it mixes tokens outside a softmax"),
    (ATTENTION, "opset 12 is older than 13"),
    (
        "z1 = ReduceMax<axes = [1]>(z) fixed = Add(z1, rows_30) "
        + ATTENTION.replace("[0, 2, 1]>(t)", "[0, 2, 1]>(fixed)").replace("n, t)", "n, fixed)"),
        "MatMul 'scores': it has 30 tokens; raise --max-tokens from 24 to 30",
    ),
    (WITH_SINK.replace("Expand(sinks, column)", "ReduceMax<axes = [-1]>(scores)"), "is not one number for each head"),
    (WITH_SINK.replace("zero, last, last) z4", "one, size, last) z4"), "by other columns than those of keys"),
    (
        WITH_SINK.replace("s2 = Sub(s1, most)", "s2 = Mul(s1, half)"),
        "s2': its scores are not a product of queries and keys",
    ),
    (EXPERTS.replace("axis = -1>(logits)", "axis = 0>(logits)"), "Softmax 'shares': it would stay"),
    (f"{EXPERTS} ".replace("x1 =", "x2 =") + "g = Sigmoid(x2) x1 = Mul(x2, g)", "Sigmoid 'g': it would stay"),
    (
        "k = Constant<value_ints = [1]>() c = Cast<to = 9>(k) x1 = If(c) <then_branch = a () => (float[b, t, 4] d)"
        " { d = Softmax(t) }, else_branch = e () => (float[b, t, 4] f) { f = Identity(t) }>",
        "If 'x1': no heads were found in this sublayer",
    ),
)
"""Graphs from the embeddings `t` to the block, and why each is refused."""

FEEDS = {name: np.random.default_rng(0).normal(size=(2, 5, 4)).astype(np.float32) for name in ("x", "z")}


def small(way: str, opset: int = 17, tokens: str = "tokens") -> onnx.ModelProto:
    draw = np.random.default_rng(0).normal
    return text_model(
        f"t = Add(x, p) {way} {MLP}",
        inputs=f"float[batch, {tokens}, 4] x, float[batch, {tokens}, 4] z",
        outputs="float[batch, rows, 4] out",
        opset=opset,
        domains={"com.microsoft": 1},
        constants={
            "p": np.zeros((1, 1, 4)),
            "rows_30": np.zeros((1, 30, 4)),
            **integers(zero=[0], one=[1], two=[2], three=[3], last=[-1], one_two=[1, 2], join=[0, 0, 6]),
            **integers(by_row=[-1, 4], one_column=[-1, 1], each_twice=[1, 2, 1], in_pairs=[-1, 2, 4], fold=[0, -1, 4]),
            "taps": draw(size=(4, 4, 3)),
            "by_head": draw(size=(1, 2, 4, 3)),
            "sinks": np.reshape(SINKS, (1, 2, 1, 1)),
            **{name: draw(size=size) for name, size in (("Wr", (4, 3)), ("E1", (3, 6, 4)), ("E2", (3, 4, 6)))},
            **{name: draw(size=size) for name, size in (("Wq", (4, 16)), ("Wk", (4, 8)), ("Wo8", (16, 4)))},
            "sink": np.asarray(SINKS),
            "packed": onnx.numpy_helper.from_array(np.arange(32, dtype=np.uint8).reshape(4, 1, 8), "packed"),
            "Wo": draw(size=(6, 4)),
            "start": np.zeros((1, 4)),
            "nought": np.asarray(0.0),
            "half": np.asarray(0.5),
            "lowest": np.asarray(np.finfo(np.float32).min),
        },
    )


@pytest.mark.parametrize(("way", "reason"), REFUSED, ids=[entry[1] for entry in REFUSED])
def test_what_cannot_be_carried_is_refused_with_the_reason(way: str, reason: str) -> None:
    plan = planned(small(way, opset=12 if "opset 12" in reason else 17))
    assert not plan.conversions
    reasons = [left.miss.reason for left in plan.left if left.name == "mlp"]
    assert [each for each in reasons if reason in each] == reasons != []
    assert all(each.startswith("the network cannot be attention only: ") for each in reasons)
    assert all(each.endswith("; use form masked") for each in reasons)


OTHER = {
    "plain": ATTENTION,
    "matrix of each head": BY_HEAD,
    "merged": MERGED,
    "keys of another stream": ATTENTION.replace(
        "kt = Transpose<perm = [0, 2, 1]>(t)", "kt = Transpose<perm = [0, 2, 1]>(z)"
    ),
    "some tokens": f"{BEFORE} x1 = Slice(x0, zero, two, one)",
    "tokens twice": f"{BEFORE} x1 = Concat<axis = 1>(x0, x0)",
    "a guard": ATTENTION.replace(
        "mixed = MatMul(pattern", "n = IsNaN(pattern) p0 = Where(n, nought, pattern) mixed = MatMul(p0"
    ),
    "a sink": WITH_SINK.replace("s2 = Sub(s1, most)", "s2 = Cast<to = 1>(s1)"),
    "a sink behind a mask": WITH_SINK.replace("size = Shape(scores)", PADDING).replace(
        "(scores, own)", "(masked, own)"
    ),
    "an operator with sinks": (
        "size = Shape(t) n = Gather(size, one) before = Sub(n, one) b = Gather(size, zero) seen_64 = Expand(before, b) "
        "seen = Cast<to = 6>(seen_64) count_64 = Squeeze(n) count = Cast<to = 6>(count_64) q = MatMul(t, Wq) "
        "k = MatMul(t, Wk) joined = com.microsoft.GroupQueryAttention<num_heads = 2, kv_num_heads = 1>"
        "(q, k, k, , , seen, count, , , , , sink) mixed = MatMul(joined, Wo8) x1 = Add(t, mixed)"
    ),
    "experts": EXPERTS,
    "an operator that onnx lacks": "u = Reshape(t, fold) v = com.microsoft.MatMulNBits<K = 4, N = 4, block_size = 16>"
    f"(u, packed, b2) {ATTENTION.replace('(t', '(v').replace(' t)', ' v)')}",
    "an operator": "mixed = Attention<q_num_heads = 2, kv_num_heads = 2, is_causal = 1>(t, t, t) x1 = Add(t, mixed)",
}


@pytest.mark.parametrize("way", OTHER)
def test_small_networks_are_the_same_function(way: str) -> None:
    model = small(OTHER[way], opset=24 if way == "an operator" else 17)
    plan = planned(model)
    assert len(plan.conversions) == 1 + (way == "experts"), plan.left
    assert way != "a sink" or account(plan).head_dimension == 3
    routed = "routers and gates of one number for each token stay: 1 Softmax, 1 TopK"
    assert account(plan).operators.get("routers", 0) == 2 * (routed in plan.notes) == 2 * (way == "experts")
    made = apply(plan)
    before, after, plain = (tensors(each, FEEDS) for each in (plan.model, made, without_bias_rows(made)))
    for each in (after, plain):
        np.testing.assert_allclose(each["out"], before["out"], rtol=0.0, atol=1e-13)
    pattern = min((name for name in after if name.startswith("bias_token/") and name.endswith("/pattern")), key=len)
    assert after[pattern].shape[-1] == 6
    softmax = "joined/pattern" if "operator" in way else "weights"
    sink = before[softmax][..., 5:] if "sink" in way else 0.0
    assert np.abs(after[pattern][..., 5:] - sink).max() <= 1e-12, "no token sees another bias token"
    if way == "an operator with sinks":
        positions = heads(made).tensors["blocks.0.attn.P"].make()
        assert (positions[:, 1:, 0] == np.array(SINKS)[:, None]).all()


WRONG = {
    "another head's sink": (WITH_SINK, 'change_values(weight(m, "bias_token/W_QK_sinks_0"), "v = v[::-1]")'),
    "a sink with a value": (
        WITH_SINK,
        'nodes_of(m, "Pad")[[n.output[0][-8:] for n in nodes_of(m, "Pad")].index("v_padded")].input.append("half")',
    ),
    "another expert": (EXPERTS, 'nodes_of(m, "TopK")[0].attribute.append(helper.make_attribute("largest", 0))'),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_sinks_and_experts_are_not_certified(name: str) -> None:
    way, spoil = WRONG[name]
    model = small(way)
    made = apply(planned(model))
    assert certify(model, made).certificate.certified
    run(spoil, m=made)
    assert not certify(model, made).certificate.certified


def test_a_pattern_that_is_an_output_has_no_bias_tokens() -> None:
    model = small(ATTENTION)
    model.graph.output.append(onnx.helper.make_tensor_value_info("pattern", onnx.TensorProto.FLOAT, ["b", "n", "n"]))
    result = apply(planned(model))
    assert result.graph.output == model.graph.output
    before, after = (open_session(each, "cpu", optimise=False).run(FEEDS) for each in (model, result))
    for name, value in before.items():
        np.testing.assert_allclose(after[name], value, rtol=0.0, atol=1e-5)


AROUND = "l = MatMul(x, K) r = Add(x, l)"
"""A sum beside the MLP, from which no block is computed."""


@pytest.mark.sample(0)
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
def test_streams_that_end_elsewhere(body: str, outputs: str) -> None:
    rng = np.random.default_rng(7)
    constants = {"K": rng.normal(size=(4, 4)), "k": rng.normal(size=4)}
    more = f", float[batch, tokens, 4] {outputs}" if outputs else ""
    model = text_model(body, outputs=f"float[batch, tokens, 4] out{more}", constants=constants)
    report = proved(model, form="whole")
    assert apart(model, report.rewritten, []).exact < 1e-6


def test_attention_behind_the_last_block() -> None:
    after = ATTENTION.replace("x1", "out")
    plan: Any = planned(text_model(f"y = MatMul(x, W1) h = Relu(y) s = MatMul(h, W2) t = Add(x, s) {after}"))
    assert len(plan.whole.cores) == 1


def test_an_mlp_of_three_layers() -> None:
    """The operator between the two hidden layers is the last of one block and the first of the next."""
    body = "y = MatMul(x, W1) h = Relu(y) m = MatMul(h, K) g = Relu(m) out = MatMul(g, W2)"
    model = text_model(body, constants={"K": np.random.default_rng(0).normal(size=(8, 8))})
    report = proved(model, form="masked")
    assert len(report.converted) == 2
    assert len(planned(model).conversions) == 2


def test_an_activation_behind_a_whole_block() -> None:
    """It is proved from its pre-activation, since the block before no longer makes what its W1 reads."""
    mlp = "y = MatMul(x, W1) h = Relu(y) m = MatMul(h, W2)"
    body = f"{mlp} g = Mul(m, m) out = Softmax(g)"
    report = proved(text_model(body), form="compact", scope="all", providers=["cpu"])  # a square: not on CUDA
    assert [row.activation for row in report.converted] == ["relu", "square"]
    assert apart(text_model(body), report.rewritten, []).exact < 1e-5
