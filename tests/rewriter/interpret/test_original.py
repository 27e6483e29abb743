"""Original heads in graphs of every layout: which columns belong to which head, and why not."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from rewriter.files.load import load_model, read_tensor
from rewriter.graph.attention import with_plain
from rewriter.graph.view import Miss, all_views
from rewriter.interpret.original import Attention, find_attention
from rewriter.interpret.trace import Tracer, concrete_shapes

HEADS, WIDTH = 3, 4
MODEL = HEADS * WIDTH

QUERIES = """
  q0 = MatMul(x, wq)
  k0 = MatMul(x, wk)
  v0 = MatMul(x, wv)"""
SPLIT = """
  q1 = Reshape(q0, by_head)
  q = Transpose<perm = [0, 2, 1, 3]>(q1)
  k1 = Reshape(k0, by_head)
  kt = Transpose<perm = [0, 2, 3, 1]>(k1)
  v1 = Reshape(v0, by_head)
  v = Transpose<perm = [0, 2, 1, 3]>(v1)"""
SCORES = """
  s0 = MatMul(q, kt)
  s = Mul(s0, half)
  p = Softmax<axis = -1>(s)
  z = MatMul(p, v)"""
JOIN = """
  z1 = Transpose<perm = [0, 2, 1, 3]>(z)
  z2 = Reshape(z1, joined)"""
OUT = """
  y = MatMul(z2, wo)"""


def attention(*parts: str, opset: int = 18, more: str = "", domains: str = "") -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    text = f"""<ir_version: 10, opset_import: ["" : {opset}{domains}]>
agraph (float[batch, tokens, {MODEL}] x{more}) => (float[batch, tokens, {MODEL}] y) {{{"".join(parts)}
}}"""
    model = onnx.parser.parse_model(text)
    constants = {
        **{name: rng.normal(size=(MODEL, MODEL)).astype(np.float32) for name in ("wq", "wk", "wv", "wo")},
        "wkv": rng.normal(size=(MODEL, WIDTH)).astype(np.float32),
        "bias": rng.normal(size=MODEL).astype(np.float32),
        "per_token": rng.normal(size=(1, HEADS, 5, WIDTH)).astype(np.float32),
        "by_head": np.array([0, 0, HEADS, WIDTH]),
        "inside_out": np.array([0, 0, WIDTH, HEADS]),
        "one_head": np.array([0, 0, 1, WIDTH]),
        "joined": np.array([0, 0, MODEL]),
        "half": np.array(0.5, np.float32),
        "two": np.array(2.0, np.float32),
        "unequal": np.arange(1, WIDTH + 1, dtype=np.float32),
        "zero": np.array([0]),
    }
    used = {name for node in model.graph.node for name in node.input}
    arrays = [onnx.numpy_helper.from_array(array, name) for name, array in constants.items() if name in used]
    model.graph.initializer.extend(arrays)
    return model


def found(model: onnx.ModelProto) -> tuple[tuple[Attention, ...], tuple[Miss, ...]]:
    source = load_model(model)
    proto, read = with_plain(source.proto), partial(read_tensor, source)
    view = all_views(proto)[0]
    return find_attention(Tracer(view, concrete_shapes(proto, view, read), read))


def one(model: onnx.ModelProto) -> Attention:
    attentions, missed = found(model)
    assert missed == ()
    (only,) = attentions
    return only


IN_ORDER = np.arange(MODEL).reshape(HEADS, WIDTH)
INSIDE_OUT = np.arange(MODEL).reshape(WIDTH, HEADS).T
"""Column d * heads + h belongs to head h."""

TURNED = SPLIT.replace("by_head", "inside_out").replace("[0, 2, 1, 3]", "[0, 3, 1, 2]")
TURNED = TURNED.replace("[0, 2, 3, 1]", "[0, 3, 2, 1]")
MERGED = """
  flat = Constant<value_ints = [-1, 5, 4]>()
  qf = Reshape(q, flat)
  kf = Reshape(k2, flat)
  ktf = Transpose<perm = [0, 2, 1]>(kf)
  vf = Reshape(v, flat)"""
UNMERGED = "\n  apart = Constant<value_ints = [-1, 3, 5, 4]>()\n  z = Reshape(zf, apart)"
CACHED = SPLIT.replace("kt =", "kn =").replace("v =", "vn =")
JOINED = "\n  kt = Concat<axis = -1>(pk, kn)\n  v = Concat<axis = 2>(pv, vn)"
PAST = f", float[batch, {HEADS}, {WIDTH}, past] pk, float[batch, {HEADS}, past, {WIDTH}] pv"
UNKNOWN = """
  same = Equal(by_head, by_head)
  told = Where(same, by_head, by_head)
  k8 = Reshape(k0, told)
  k9 = Unsqueeze(k8, zero)
  k1 = Squeeze(k9, zero)"""
PLAIN_K = SPLIT.replace("kt = Transpose<perm = [0, 2, 3, 1]>", "k = Transpose<perm = [0, 2, 1, 3]>")
COUNTS = f"q_num_heads = {HEADS}, kv_num_heads = {HEADS}"
LAYOUTS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "in order": ((QUERIES, SPLIT, SCORES, JOIN, OUT), {}),
    "inside out": ((QUERIES, TURNED, SCORES, JOIN.replace("[0, 2, 1, 3]", "[0, 2, 3, 1]"), OUT), {}),
    "batch and heads as one axis": (
        (
            *(QUERIES, SPLIT.replace("kt = Transpose<perm = [0, 2, 3, 1]>", "k2 = Transpose<perm = [0, 2, 1, 3]>")),
            *(MERGED, SCORES.replace("(q, kt)", "(qf, ktf)").replace("(p, v)", "(p, vf)").replace("z = ", "zf = ")),
            *(UNMERGED, JOIN, OUT),
        ),
        {},
    ),
    "a cache": ((QUERIES, CACHED, JOINED, SCORES, JOIN, OUT), {"more": PAST}),
    "sizes that inference does not know": (
        (QUERIES, SPLIT.replace("\n  k1 = Reshape(k0, by_head)", UNKNOWN), SCORES, JOIN, OUT),
        {},
    ),
    "an operator, flat": ((QUERIES, f"\n  z2 = Attention<{COUNTS}, scale = 0.5>(q0, k0, v0)", OUT), {"opset": 23}),
    "an operator": ((QUERIES, PLAIN_K, "\n  z = Attention<scale = 0.5>(q, k, v)", JOIN, OUT), {"opset": 23}),
    "an operator of onnxruntime": (
        (QUERIES, f"\n  z2 = com.microsoft.MultiHeadAttention<num_heads = {HEADS}, scale = 0.5>(q0, k0, v0)", OUT),
        {"domains": ', "com.microsoft" : 1'},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_columns_of_heads(layout: str) -> None:
    parts, options = LAYOUTS[layout]
    model = attention(*parts, **options)
    if layout.startswith("batch"):
        model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 5
    only = one(model)
    for columns in (only.query.columns, only.key.columns, only.value.columns, only.channels):
        np.testing.assert_array_equal(columns, INSIDE_OUT if layout == "inside out" else IN_ORDER)
    assert only.scale == pytest.approx(0.5, rel=1e-6)
    assert (only.groups, only.rotary, only.cross) == (1, False, False)
    if "operator" not in layout:
        assert (only.pattern, only.scores) == ("p", "s")


def test_one_key_head_for_all_queries() -> None:
    shared = QUERIES.replace("(x, wk)", "(x, wkv)").replace("(x, wv)", "(x, wkv)")
    split = SPLIT.replace("(k0, by_head)", "(k0, one_head)").replace("(v0, by_head)", "(v0, one_head)")
    only = one(attention(shared, split, SCORES, JOIN, OUT))
    assert only.groups == HEADS
    np.testing.assert_array_equal(only.key.columns, np.tile(np.arange(WIDTH), (HEADS, 1)))
    np.testing.assert_array_equal(only.query.columns, IN_ORDER)


def test_factors_and_biases() -> None:
    biased = QUERIES.replace("q0 =", "qm =") + "\n  qb = Add(bias, qm)\n  q0 = Mul(qb, two)"
    only = one(attention(biased, SPLIT, SCORES, JOIN, OUT))
    assert only.scale == 1.0
    assert only.query.factor == 2.0
    (added,) = only.query.added
    assert (added.name, set(added.factor.flat)) == ("bias", {2.0})
    np.testing.assert_array_equal(added.index, IN_ORDER)


def test_queries_of_another_sequence() -> None:
    more = f", float[batch, others, {MODEL}] e"
    crossed = QUERIES.replace("(x, wk)", "(e, wk)").replace("(x, wv)", "(e, wv)")
    assert one(attention(crossed, SPLIT, SCORES, JOIN, OUT, more=more)).cross


NONLINEAR = QUERIES.replace("q0 =", "qm =") + "\n  q0 = Softplus(qm)"
SUMMED = QUERIES.replace("q0 =", "qm =") + "\n  qn = MatMul(x, wo)\n  q0 = Add(qm, qn)"
UNEVEN = SPLIT.replace("q =", "qs =") + "\n  q = Mul(qs, unequal)"
MIXED = f"\n  shape = Constant<value_ints = [0, -1, {MODEL}]>()\n  z2 = Reshape(z, shape)"
MISSES = {
    "it does more than move, scale or add entries": (NONLINEAR, SPLIT, SCORES, JOIN, OUT),
    "its channels have different factors": (QUERIES, UNEVEN, SCORES, JOIN, OUT),
    "it is a sum of several linear operators' outputs": (SUMMED, SPLIT, SCORES, JOIN, OUT),
    "the output projection does not read all heads of one token": (QUERIES, SPLIT, SCORES, MIXED, OUT),
    "no linear operator reads its heads": (QUERIES, SPLIT, SCORES, JOIN, "\n  y = Softplus(z2)"),
}


@pytest.mark.parametrize("reason", MISSES)
def test_what_is_not_understood_is_said(reason: str) -> None:
    attentions, missed = found(attention(*MISSES[reason]))
    assert attentions == ()
    (miss,) = missed
    assert miss.reason == f"attention at Softmax 'p': {reason}"
    assert miss.node


SINKS = """
  s1 = Mul(s0, half)
  s = Add(s1, zeros)
  with = Concat<axis = -1>(s, sinks)
  most = ReduceMax<axes = [3], keepdims = 1>(with)
  less = Sub(with, most)
  weights = Softmax<axis = -1>(less)
  p = Slice(weights, zero, end, last)
  z = MatMul(p, v)"""
CAPPED = SCORES.replace("s = Mul", "sm = Mul").replace("\n  p =", "\n  st = Tanh(sm)\n  s = Mul(two, st)\n  p =")


def test_sinks_and_caps() -> None:
    sinks = f", float[batch, {HEADS}, tokens, 1] sinks, float[batch, 1, tokens, tokens] zeros"
    more = "\n  end = Constant<value_ints = [-1]>()\n  last = Constant<value_ints = [-1]>()"
    only = one(attention(QUERIES, SPLIT, "\n  s0 = MatMul(q, kt)", more, SINKS, JOIN, OUT, opset=17, more=sinks))
    assert (only.scores, only.pattern, only.product, only.scale) == ("s", "p", "s0", 0.5)
    capped = one(attention(QUERIES, SPLIT, CAPPED, JOIN, OUT))
    assert (capped.scores, capped.pattern, capped.scale) == ("s", "p", 1.0)


WEIGHTS = {
    "sigmoid": "\n  p = Sigmoid(s)",
    "softpick": """
  e = Exp(s)
  e1 = Sub(e, one)
  r = Relu(e1)
  a = Abs(e1)
  t = ReduceSum<keepdims = 1>(a, end)
  p = Div(r, t)""",
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_that_are_no_softmax(name: str) -> None:
    scores = SCORES.replace("\n  p = Softmax<axis = -1>(s)", WEIGHTS[name])
    constants = "\n  one = Constant<value_float = 1.0>()\n  end = Constant<value_ints = [-1]>()"
    attentions, (miss,) = found(attention(QUERIES, SPLIT, constants, scores, JOIN, OUT))
    assert attentions == ()
    assert miss == Miss("attention at MatMul 'z': its weights are no Softmax of its scores", "MatMul 's0'")


def test_scores_of_two_products() -> None:
    joined = SCORES.replace("s = Mul(s0, half)", "sm = Mul(s0, half)\n  s = Concat<axis = -1>(sm, s0)")
    _, (miss,) = found(attention(QUERIES, SPLIT, joined, JOIN, OUT))
    assert miss.reason == "attention at Softmax 'p': its scores are joined of several products"


def test_a_constant_that_differs_from_token_to_token() -> None:
    model = attention(QUERIES, SPLIT.replace("q =", "qs =") + "\n  q = Add(qs, per_token)", SCORES, JOIN, OUT)
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 5
    _, (miss,) = found(model)
    assert "the constant 'per_token' that is added differs from token to token" in miss.reason


def test_graphs_that_no_runtime_would_run() -> None:
    wrong = SPLIT.replace("q = Transpose<perm = [0, 2, 1, 3]>", "q = Transpose<perm = [0, 2, 7, 3]>")
    attentions, missed = found(attention(QUERIES, wrong, SCORES, JOIN, OUT))
    assert attentions == ()
    assert [miss.reason for miss in missed] == ["attention at Softmax 'p': its nodes do not fit together"]


def test_shapes_of_any_size_are_not_followed() -> None:
    huge = "\n  size = Constant<value_ints = [1000000, 1000000, 1, 1]>()\n  q = Expand(qs, size)"
    _, missed = found(attention(QUERIES, SPLIT.replace("q =", "qs =") + huge, SCORES, JOIN, OUT))
    (miss,) = missed
    assert "too many to follow" in miss.reason or "do not fit together" in miss.reason


def test_a_softmax_over_classes_is_no_attention() -> None:
    assert found(attention("\n  s = MatMul(x, wq)\n  y = Softmax<axis = -1>(s)")) == ((), ())
