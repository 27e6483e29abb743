"""Original heads in graphs of every layout: which columns belong to which head, and why not."""

from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from rewriter.files.load import load_model
from rewriter.graph.attention import with_plain
from rewriter.graph.view import Miss, all_views
from rewriter.interpret.index import heads
from rewriter.interpret.sublayers import Attention, find_attention
from rewriter.interpret.trace import Tracer

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


def attention(
    *parts: str, tokens: str = "tokens", opset: int = 18, more: str = "", domains: str = ""
) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    text = f"""<ir_version: 10, opset_import: ["" : {opset}{domains}]>
agraph (float[batch, {tokens}, {MODEL}] x{more}) => (float[batch, tokens, {MODEL}] y) {{{"".join(parts)}
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
        "column": np.array([-1, 1]),
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
    source, missed = load_model(model), list[Miss]()
    proto = with_plain(source.proto)
    return tuple(find_attention(Tracer(source, proto, all_views(proto)), missed)), tuple(missed)


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
APART = SPLIT.replace("\n  kt = Transpose<perm = [0, 2, 3, 1]>(k1)", "").partition("\n  v =")[0]
READ = "\n  kt = Transpose<perm = [0, 1, 3, 2]>(ks)\n  v = Identity(vs)"
PLACES = f", float[batch, {HEADS}, 24, {WIDTH}] key_cache_0, float[batch, {HEADS}, 24, {WIDTH}] value_cache_0"
PLACES += ", int64[tokens] cache_position"
BY_ROW = "\n  at = Reshape(cache_position, column)" + "".join(
    f"""
  {each}c = Transpose<perm = [2, 0, 1, 3]>({name}_cache_0)
  {each}n = Transpose<perm = [1, 0, 2, 3]>({each}1)
  {each}w = ScatterND({each}c, at, {each}n)
  {each}s = Transpose<perm = [1, 2, 0, 3]>({each}w)"""
    for each, name in (("k", "key"), ("v", "value"))
)
BY_ENTRY = "\n  at0 = Reshape(cache_position, column)" + "".join(
    f"""
  {each}n = Transpose<perm = [0, 2, 1, 3]>({each}1)
  {each}z = Shape({each}n)
  {each}at = Expand(at0, {each}z)
  {each}s = ScatterElements<axis = 2>({name}_cache_0, {each}at, {each}n)"""
    for each, name in (("k", "key"), ("v", "value"))
)
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
        {"tokens": "5"},
    ),
    "a cache": ((QUERIES, CACHED, JOINED, SCORES, JOIN, OUT), {"more": PAST}),
    "a static cache, row by row": ((QUERIES, APART, BY_ROW, READ, SCORES, JOIN, OUT), {"more": PLACES}),
    "a static cache, entry by entry": ((QUERIES, APART, BY_ENTRY, READ, SCORES, JOIN, OUT), {"more": PLACES}),
    "an operator, flat": ((QUERIES, f"\n  z2 = Attention<{COUNTS}, scale = 0.5>(q0, k0, v0)", OUT), {"opset": 23}),
    "an operator": ((QUERIES, PLAIN_K, "\n  z = Attention<scale = 0.5>(q, k, v)", JOIN, OUT), {"opset": 23}),
    "an operator of onnxruntime": (
        (QUERIES, f"\n  z2 = com.microsoft.MultiHeadAttention<num_heads = {HEADS}, scale = 0.5>(q0, k0, v0)", OUT),
        {"domains": ', "com.microsoft" : 1'},
    ),
    "an operator with biases": (
        (
            *(QUERIES, f"\n  b = Constant<value_floats = {[0.5] * 3 * MODEL}>()"),
            *(f"\n  z2 = com.microsoft.MultiHeadAttention<num_heads = {HEADS}, scale = 0.5>(q0, k0, v0, b)", OUT),
        ),
        {"domains": ', "com.microsoft" : 1'},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_columns_of_heads(layout: str) -> None:
    parts, options = LAYOUTS[layout]
    only = one(attention(*parts, **options))
    for columns in (only.query.columns, only.key.columns, only.value.columns, only.channels):
        np.testing.assert_array_equal(columns, INSIDE_OUT if layout == "inside out" else IN_ORDER)
    assert only.scale == pytest.approx(0.5, rel=1e-6)
    assert (only.groups, only.query.rotary, only.cross) == (1, False, False)
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
    """Nodes that differ in their constants alone, such as queries and values, are distinguished."""
    biased = QUERIES.replace("q0 =", "qm =").replace("v0 =", "vm =") + "\n  qb = Add(bias, qm)\n  q0 = Mul(qb, two)"
    model = attention(f"{biased}\n  vb = Add(bias, vm)\n  v0 = Mul(vb, half)", SPLIT, SCORES, JOIN, OUT)
    only = one(model)
    assert (only.scale, only.query.factor, only.value.factor) == (1.0, 2.0, 0.5)
    (bias,) = (onnx.numpy_helper.to_array(each) for each in model.graph.initializer if each.name == "bias")
    np.testing.assert_array_equal(only.query.added, bias.reshape(HEADS, WIDTH))


def test_factors_of_values_are_in_their_weights() -> None:
    """Those of queries and keys are in the scale."""
    parts = QUERIES.replace("v0 =", "vm =") + "\n  vb = Add(vm, bias)\n  v0 = Mul(vb, two)", SPLIT, SCORES, JOIN, OUT
    model = attention(*parts)
    index, known = heads(model), {each.name: onnx.numpy_helper.to_array(each) for each in model.graph.initializer}
    for side, factor in (("Q", 1.0), ("K", 1.0), ("V", 2.0)):
        columns = factor * known[f"w{side.lower()}"].reshape(MODEL, HEADS, WIDTH)
        np.testing.assert_allclose(index[f"blocks.0.attn.W_{side}"], columns.swapaxes(0, 1), rtol=1e-6)
    np.testing.assert_allclose(index["blocks.0.attn.b_V"], 2.0 * known["bias"].reshape(HEADS, WIDTH), rtol=1e-6)


def test_queries_of_another_sequence() -> None:
    more = f", float[batch, others, {MODEL}] e"
    crossed = QUERIES.replace("(x, wk)", "(e, wk)").replace("(x, wv)", "(e, wv)")
    assert one(attention(crossed, SPLIT, SCORES, JOIN, OUT, more=more)).cross


NONLINEAR = QUERIES.replace("q0 =", "qm =") + "\n  q0 = Softplus(qm)"
SUMMED = QUERIES.replace("q0 =", "qm =") + "\n  qn = MatMul(x, wo)\n  q0 = Add(qm, qn)"
UNEVEN = SPLIT.replace("q =", "qs =") + "\n  q = Mul(qs, unequal)"
BY_ZERO = SPLIT.replace("q =", "qs =") + "\n  nothing = Constant<value_float = 0.0>()\n  q = Div(qs, nothing)"
MIXED = f"\n  shape = Constant<value_ints = [0, -1, {MODEL}]>()\n  z2 = Reshape(z, shape)"
PER_TOKEN = SPLIT.replace("q =", "qs =") + "\n  q = Add(qs, per_token)"
NO_SUCH_AXIS = SPLIT.replace("q = Transpose<perm = [0, 2, 1, 3]>", "q = Transpose<perm = [0, 2, 7, 3]>")
HUGE = (
    SPLIT.replace("q =", "qs =")
    + """
  size = Constant<value_ints = [1000000, 1000000, 1, 1]>()
  q = Expand(qs, size)"""
)
JOINED_SCORES = SCORES.replace("s = Mul(s0, half)", "sm = Mul(s0, half)\n  s = Concat<axis = -1>(sm, s0)")
SOFTMAX = "\n  p = Softmax<axis = -1>(s)"
SIGMOID = SCORES.replace(SOFTMAX, "\n  p = Sigmoid(s)")
SOFTPICK = SCORES.replace(
    SOFTMAX,
    """
  one = Constant<value_float = 1.0>()
  end = Constant<value_ints = [-1]>()
  e = Exp(s)
  e1 = Sub(e, one)
  r = Relu(e1)
  a = Abs(e1)
  t = ReduceSum<keepdims = 1>(a, end)
  p = Div(r, t)""",
)
QUANTISED = """
  p8 = QuantizeLinear(p, scale)
  p1 = DequantizeLinear(p8, scale)
  z = MatMul(p1, v)"""
IN_BYTES = "\n  scale = Constant<value_float = 0.01>()" + SCORES.replace("\n  z = MatMul(p, v)", QUANTISED)
BY_BYTES = IN_BYTES.replace(
    SOFTMAX,
    """
  zero8 = Constant<value = uint8 {0}>()
  s8 = QuantizeLinear(s, scale)
  p7 = com.microsoft.QLinearSoftmax<axis = -1, opset = 18>(s8, scale, zero8, scale, zero8)
  p = DequantizeLinear(p7, scale)""",
)
ROUNDED = "its pattern is rounded to 8 bits: index the model before quantisation"
NO_SOFTMAX = "its weights are not the Softmax of its scores"
PARTS = {"linear": QUERIES, "split": SPLIT, "scores": SCORES, "join": JOIN, "out": OUT}


@pytest.mark.parametrize(
    ("changed", "reason", "node"),
    [
        ({"linear": NONLINEAR}, "it does more than move, scale or add entries", "Softplus 'q0'"),
        ({"split": UNEVEN}, "its channels have different factors", "MatMul 'q0'"),
        ({"split": BY_ZERO}, "it multiplies with something that the inputs change", "Div 'q'"),
        ({"linear": SUMMED}, "it is a sum of several linear operators' outputs", "qm"),
        ({"join": MIXED}, "the output projection does not read all heads of one token", "MatMul 'z'"),
        ({"out": "\n  y = Softplus(z2)"}, "no linear operator reads its heads", "MatMul 'z'"),
        ({"scores": SIGMOID}, NO_SOFTMAX, "MatMul 's0'"),
        ({"scores": SOFTPICK}, NO_SOFTMAX, "MatMul 's0'"),
        ({"scores": JOINED_SCORES}, "its scores are joined of several products", "Concat 's'"),
        ({"scores": IN_BYTES}, ROUNDED, "DequantizeLinear 'p1'"),
        ({"scores": BY_BYTES}, ROUNDED, "DequantizeLinear 'p1'"),
        ({"split": PER_TOKEN}, "the constant 'per_token' that is added differs from token to token", "MatMul 'q0'"),
        # Graphs that no runtime would run, and shapes that are too large to follow.
        ({"split": NO_SUCH_AXIS}, "its nodes do not fit together", "Transpose 'q'"),
        ({"split": HUGE}, "its nodes do not fit together", "Expand 'q'"),
    ],
)
def test_what_is_not_understood_is_said(changed: dict[str, str], reason: str, node: str) -> None:
    parts = {**PARTS, **changed}
    more = PLACES if "cache" in parts["split"] else ""
    domains = ', "com.microsoft" : 1' if parts["scores"] == BY_BYTES else ""
    tokens = "5" if parts["split"] == PER_TOKEN else "tokens"
    model = attention(*parts.values(), tokens=tokens, more=more, domains=domains)
    where = "MatMul 'z'" if reason == NO_SOFTMAX else "Softmax 'p'"
    where = "com.microsoft::QLinearSoftmax 'p7'" if parts["scores"] == BY_BYTES else where
    assert found(model) == ((), (Miss(f"attention at {where}: {reason}", node, "attention"),))


def test_a_softmax_over_classes_is_no_attention() -> None:
    assert found(attention("\n  s = MatMul(x, wq)\n  y = Softmax<axis = -1>(s)")) == ((), ())
