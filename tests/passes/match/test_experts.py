"""Experts whose weights are one tensor, projections that are taken apart, and activations left with a reason."""

import re
from typing import Any

import numpy as np
import onnx
import pytest

from passes.accounting import account
from passes.options import Options
from passes.plan import make_plan
from rewriter import certify, rewrite
from rewriter.report.sections import summary_lines
from tests.cases import proved
from tests.changes import run
from tests.spellings import ROWS
from tests.textmodels import SECOND, SILU, findings, integers, mlp, only_block, text_model

RNG = np.random.default_rng(3)
STACKS = {
    name: RNG.normal(size=shape)
    for name, shape in {
        "E1": (3, 4, 8),
        "E1t": (3, 8, 4),
        "E1wide": (3, 4, 16),
        "e1": (3, 8),
        "e1wide": (3, 16),
        "E1one": (3, 1, 8),
        "E2": (3, 8, 4),
        "E2t": (3, 4, 8),
        "e2": (3, 4),
        "W1pairs": (4, 16),
    }.items()
}
"""The weights of three experts."""


NUMBERS = integers(
    zero=[0], one=[1], two=[2], last=[-1], end=[2**31], half=[8, 8], even=range(0, 16, 2), odd=range(1, 16, 2),
    pairs=[0, 0, 8, 2], first_axis=[0], o=0, i=1,
)  # fmt: skip
GATED = "s = Sigmoid(y) g = Mul(y, s) h = Mul(g, u)"
HALVES = "y, u = Split<axis = -1>(p, half)"
ROUTED = {"inputs": "float[tokens, 4] x, int64[tokens] e", "outputs": "float[tokens, 4] out"}
STACKED = {"inputs": "float[3, tokens, 4] x", "outputs": "float[3, tokens, 4] out"}
DENSE = {"inputs": "float[batch, tokens, 4] x", "outputs": "float[batch, tokens, 4] out"}
LEFT = "a = Gather(E1t, e) c = Unsqueeze(x, last) d = MatMul(a, c) y = Squeeze(d, last)"
BACK = "j = Gather(E2t, e) k = Unsqueeze(h, last) l = MatMul(j, k) out = Squeeze(l, last)"
ROW = "c = Unsqueeze(x, one)"
INTO = "j = Gather(E2, e) k = Unsqueeze(h, one) l = MatMul(k, j) out = Squeeze(l, one)"

EXPERTS: tuple[tuple[str, str, str, str, dict[str, Any]], ...] = (
    ("gather-left", LEFT, SILU, BACK, ROUTED),
    ("equal-tokens", f"z = Unsqueeze(e, last) n = Shape(z) x = Expand(one_token, n) {LEFT}", "h = Relu(y)", BACK,
     {**ROUTED, "inputs": "float[1, 4] one_token, int64[tokens] e"}),
    ("gather-right", f"a = Gather(E1, e) {ROW} d = MatMul(c, a) y = Squeeze(d, one)", SILU, INTO, ROUTED),
    ("gather-nd", f"n = Unsqueeze(e, last) a = GatherND(E1, n) {ROW} d = MatMul(c, a) y = Squeeze(d, one)", SILU,
     INTO, ROUTED),
    ("biases", f"a = Gather(E1, e) {ROW} d = MatMul(c, a) f = Squeeze(d, one) b = Gather(e1, e) y = Add(f, b)", SILU,
     INTO.replace("out =", "m =") + " v = Gather(e2, e) out = Add(m, v)", ROUTED),
    ("fused-halves", f"a = Gather(E1wide, e) {ROW} d = MatMul(c, a) p = Squeeze(d, one) {HALVES}", GATED, INTO, ROUTED),
    ("transposed", f"t = Transpose<perm = [0, 2, 1]>(E1t) a = Gather(t, e) {ROW} d = MatMul(c, a) y = Squeeze(d, one)",
     SILU, INTO, ROUTED),
    ("one-expert", "a = Gather(E1, n) y = MatMul(x, a)", SILU, "j = Gather(E2, n) out = MatMul(h, j)",
     {**DENSE, "inputs": "float[batch, tokens, 4] x, int64 n"}),
    ("one-expert-gemm", "a = Gather(E1, n) b = Gather(e1, n) y = Gemm(x, a, b)", SILU,
     "j = Gather(E2, n) v = Gather(e2, n) out = Gemm(h, j, v)", {**ROUTED, "inputs": "float[tokens, 4] x, int64 n"}),
    ("slice", "n = Mod(k, two) m = Add(n, one) q = Slice(E1, n, m, first_axis) "
     "a = Squeeze(q, first_axis) y = MatMul(x, a)", SILU,
     "r = Slice(E2, n, m, first_axis) j = Squeeze(r, first_axis) out = MatMul(h, j)",
     {**DENSE, "inputs": "float[batch, tokens, 4] x, int64[1] k"}),
    ("constant-index", "a = Gather(E1, i) y = MatMul(x, a)", SILU, "j = Gather(E2, i) out = MatMul(h, j)", DENSE),
    ("split", "a, b, c = Split<axis = 0>(E1) d = Squeeze(a, first_axis) y = MatMul(x, d)", SILU,
     "q, r, t = Split<axis = 0>(E2) j = Squeeze(q, first_axis) out = MatMul(h, j)", DENSE),
    ("stacked", "p = MatMul(x, E1) y = Add(p, E1one)", SILU, "out = MatMul(h, E2)", STACKED),
    ("einsum", 'y = Einsum<equation = "etd,edf->etf">(x, E1)', SILU, 'out = Einsum<equation = "etf,efd->etd">(h, E2)',
     STACKED),
    ("einsum-of-all", 'y = Einsum<equation = "btd,edf->btef">(x, E1)', SILU,
     'out = Einsum<equation = "btef,efd->btd">(h, E2)', DENSE),
    ("einsum-fused", f'p = Einsum<equation = "btd,edf->btef">(x, E1wide) {HALVES}', GATED,
     'out = Einsum<equation = "btef,efd->btd">(h, E2)', DENSE),
)  # fmt: skip


def expert_model(place: int) -> onnx.ModelProto:
    _, first, activation, second, options = EXPERTS[place]
    return mlp(activation, first=first, second=second, constants={**STACKS, **NUMBERS}, **options)


def converted(model: onnx.ModelProto, blocks: int = 1) -> onnx.ModelProto:
    report = proved(model)
    assert (len(report.converted), report.validation.certified) == (blocks, True)
    return report.rewritten


EACH_PLACE = pytest.mark.parametrize("place", range(len(EXPERTS)), ids=[e[0] for e in EXPERTS])


@EACH_PLACE
def test_experts_are_found(place: int) -> None:
    block, first = only_block(expert_model(place)), EXPERTS[place][1]
    unknown = "Slice(E1" in first  # onnx infers no sizes behind a Slice with computed bounds
    assert block.neurons == (None if unknown else 8)
    label = "relu" if "one_token" in first else "silu"
    assert block.identified.label == (f"{label}(gate) * value" if "u" in block.region.leaves else label)
    one = unknown or "Gather(E1, i)" in first or "Split<axis = 0>" in first
    assert {operator.experts for operator in (*block.first, *block.second)} == {0 if one else 3}


@pytest.mark.sample(2)
@EACH_PLACE
def test_experts_are_converted_and_certified(place: int) -> None:
    converted(expert_model(place))


@pytest.mark.parametrize("form", ["masked", "maskless", "staged"])
def test_forms_of_whole_blocks_take_no_experts(form: str) -> None:
    model = mlp(SILU, first=LEFT, second=BACK, constants={**STACKS, **NUMBERS}, **ROUTED)
    (row,) = rewrite(model, form=form, max_tokens=8).left
    held = "its MatMul (W X) does not hold a plain matrix"
    assert row.reason == f"form {form} replaces whole blocks, and {held}; use form compact or local"
    assert (row.first, row.second) == ("MatMul (W X) 4x8 of 3 experts", "MatMul (W X) 8x4 of 3 experts")


def test_experts_and_their_parameters_are_counted() -> None:
    model = mlp(SILU, first=LEFT, second=BACK, constants={**STACKS, **NUMBERS}, **ROUTED)
    told = dict(summary_lines(rewrite(model, dry_run=True)))
    assert re.search(r": silu as 3 experts, 8 heads each over \d bias tokens?, exact", told["blocks"])
    (block,) = account(make_plan(model, Options())).blocks
    assert block.parameters == STACKS["E1t"].size + STACKS["E2t"].size


def test_a_loop_over_experts() -> None:
    body = (
        "loop (int64 n, bool on, float[tokens, 4] z) => (bool go, float[tokens, 4] sum) "
        f"{{ go = Identity(on) a = Gather(E1, n) y = MatMul(x, a) {SILU} j = Gather(E2, n) m = MatMul(h, j) "
        "sum = Add(z, m) }"
    )
    constants: dict[str, Any] = {"E1": STACKS["E1"], "E2": STACKS["E2"], **integers(count=3)}
    converted(text_model(f"out = Loop <body = {body}> (count, , x)", constants=constants, **ROWS))


EMBEDDED = {"table": RNG.normal(size=(9, 4))}


def test_an_embedding_is_data_and_no_weight() -> None:
    model = mlp(
        SILU, first="x = Gather(table, ids) y = MatMul(x, W1)", constants=EMBEDDED, inputs="int64[batch, tokens] ids"
    )
    assert (only_block(model).first[0].data, only_block(model).first[0].experts) == ("x", 0)
    given = {"constants": EMBEDDED, "inputs": "float[batch, tokens, 4] x, int64[8] ids"}
    first = "w = Gather(table, ids) v = Transpose(w) y = MatMul(x, v)"
    model = mlp(SILU, first=first, second="out = MatMul(h, v)", **given)
    assert not findings(model).blocks


PAIRS: tuple[tuple[str, str], ...] = (
    ("strides", "y = Slice(p, zero, end, last, two) u = Slice(p, one, end, last, two)"),
    ("indices", "y = Gather<axis = -1>(p, even) u = Gather<axis = -1>(p, odd)"),
    ("reshape-and-index", "q = Reshape(p, pairs) y = Gather<axis = -1>(q, o) u = Gather<axis = -1>(q, i)"),
    ("reshape-and-split", "q = Reshape(p, pairs) r, t = Split<axis = -1>(q) y = Squeeze(r, last) u = Squeeze(t, last)"),
    ("halves", HALVES),
)
CLIPPED = (
    "c = Min(y, $7.0) v = Clip(u, $-7.0, $7.0) k = Mul(c, $1.702) s = Sigmoid(k) g = Mul(c, s) "
    "w = Add(v, $1.0) h = Mul(w, g)"
)
OF_CLIPPED = [
    "clip(slope=1, offset=1, left=-6, right=8)",
    "silu_clipped(beta=1.702, factor=1, low=-inf, high=7)(gate) * value",
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("activation", "labels"), [
    (GATED, ["silu(gate) * value"]),
    (CLIPPED, OF_CLIPPED),
    (CLIPPED.replace("Mul(w, g)", "Mul(g, w)"), OF_CLIPPED),
    ("s = Sigmoid(y) n = Tanh(u) h = Mul(n, s)", ["sigmoid", "tanh(gate) * value"]),
], ids=["swiglu", "gpt-oss", "gpt-oss-right", "tanh-and-sigmoid"])  # fmt: skip
@pytest.mark.parametrize("apart", [p[1] for p in PAIRS], ids=[p[0] for p in PAIRS])
def test_projections_taken_apart(apart: str, activation: str, labels: list[str]) -> None:
    model = mlp(activation, first=f"p = MatMul(x, W1pairs) {apart}", constants={**STACKS, **NUMBERS}, second=SECOND)
    found = findings(model)
    assert sorted(block.identified.label for block in found.blocks) == sorted(labels)
    assert [block.neurons for block in found.blocks] == [8] * len(labels)
    if activation == GATED:
        converted(model, len(labels))


def test_the_value_of_a_gate_goes_with_the_gate() -> None:
    """No linear operator reads the product, so its clipped value is not a block either."""
    model = mlp(CLIPPED, first="y = MatMul(x, W1) u = MatMul(x, V1)", second="n = Softmax(h) out = MatMul(n, W2)")
    found = findings(model)
    assert not found.blocks
    assert {left.miss.reason for left in found.left} == {
        "its output feeds Softmax 'n', which is not a linear operator",
        "the activation that it is a part of is not converted",
    }


def test_a_clipped_value_and_its_gate_are_one_block() -> None:
    model = mlp(CLIPPED, first="y = MatMul(x, W1) u = MatMul(x, V1)", second=SECOND)
    report = proved(model, form="compact")
    part, whole = report.converted
    assert (part.part_of, whole.part_of) == (whole.name, "")
    assert report.what.startswith("1 block, ")
    broken = report.rewritten
    run('change_values(weight(m, "mlp_2/heads/factor_0"), "v = v * 2")', m=broken)
    assert not certify(model, broken).certificate.certified


OTHER_EXPERT = 'change_values(weight(m, "E1t"), "v = v[[1, 0, 2]]")'
OWN_INDEX = """
gather = next(each for each in nodes_of(m, "Gather") if each.input[0] == "E2t")
gather.input[1] = "zeros"
m.graph.node.insert(0, helper.make_node("Sub", ["e", "e"], ["zeros"]))
"""
SWAPPED = """
one, other = (each.input for each in m.graph.node if each.op_type in ("Slice", "Gather") and each.input[0] in "pq")
one[1], other[1] = other[1], one[1]
"""


@pytest.mark.sample(0)
@pytest.mark.parametrize(("first", "activation", "second", "options", "spoil"), [
    (LEFT, SILU, BACK, ROUTED, OTHER_EXPERT),
    (LEFT, SILU, BACK, ROUTED, OWN_INDEX),
    (f"p = MatMul(x, W1pairs) {PAIRS[0][1]}", GATED, SECOND, {}, SWAPPED),
    (f"p = MatMul(x, W1pairs) {PAIRS[2][1]}", GATED, SECOND, {}, SWAPPED),
    (f"p = MatMul(x, W1pairs) {PAIRS[0][1]}", CLIPPED, SECOND, {}, SWAPPED),
], ids=["weights", "index", "strides", "pairs", "clipped"])  # fmt: skip
def test_planted_errors_are_refused(
    first: str, activation: str, second: str, options: dict[str, Any], spoil: str
) -> None:
    model = mlp(activation, first=first, second=second, constants={**STACKS, **NUMBERS}, **options)
    broken = converted(model, 1 + (activation == CLIPPED))
    run(spoil, m=broken)
    assert not certify(model, broken).certificate.certified


IS_NOT = ", is not the output of a linear operator with constant weights"
FUSED = "its activation is inside one operator; write the model without this fusion to have it converted"
NORMAL = "n = LayerNormalization(x, one_each) s = Sigmoid(n) h = Mul(n, s) out = MatMul(h, w)"


@pytest.mark.parametrize(("text", "reason", "options"), [
    (NORMAL, f"'n', which LayerNormalization 'n' makes{IS_NOT}", {}),
    ("h = Relu(x) out = MatMul(h, w)", f"'x', which is an input{IS_NOT}", {}),
    ("a = MatMul(x, U) b = MatMul(x, U) c = Concat<axis = -1>(a, b) h = Tanh(c) out = MatMul(h, W2)",
     f"'c', which Concat 'c' makes{IS_NOT}", {}),
    ("t = Transpose<perm = [0, 2, 1]>(x) c = MatMul(x, t) h = Sigmoid(c) d = Mul(h, $0.5) "
     "e = Reshape(d, same) out = MatMul(e, w)",
     f"'c', which MatMul 'c' makes{IS_NOT}",
     {"inputs": "float[1, 4, 4] x", "outputs": "float[1, 4, 4] out"}),
    ('c = Einsum<equation = "btd,df->bft">(x, W1) h = Relu(c) out = Einsum<equation = "bft,fd->btd">(h, W2)',
     f"'c', which Einsum 'c' makes{IS_NOT}", {}),
    ("y = MatMul(x, W1) h = com.microsoft.QLinearSigmoid(y) out = MatMul(h, W2)",
     "com.microsoft::QLinearSigmoid 'h' is part of no block", {"domains": {"com.microsoft": 1}}),
    ('y = MatMul(x, W1) out = CausalConvWithState<activation = "silu">(y, w)', f"CausalConvWithState 'out': {FUSED}",
     {"opset": 27, "ir": 11}),
    ("y = MatMul(x, W1) out = com.microsoft.QMoE(y, w)",
     "com.microsoft::QMoE 'out': its experts are inside one operator, and onnxruntime's CPU kernel normalises its "
     "routing weights, though normalize_routing_weights is not 1", {"domains": {"com.microsoft": 1}}),
    *((f"{before} out = com.microsoft.{name}({data})", f"com.microsoft::{name} 'out': {FUSED}",
       {"domains": {"com.microsoft": 1}})
      for before, name, data in (("", "MatMulNBitsMlp", "x"), ("y = MatMul(x, W1)", "LinearAttentionGate", "y"))),
], ids=["normal", "input", "concatenated", "product", "einsum", "contributed", "conv", "experts", "fused",
        "gate"])  # fmt: skip
def test_what_is_not_converted_is_listed(text: str, reason: str, options: dict[str, Any]) -> None:
    constants: dict[str, Any] = {
        "w": RNG.normal(size=(4, 4)),
        "one_each": np.ones(4),
        "U": RNG.normal(size=(4, 4)),
        **integers(same=[1, 4, 4]),
    }
    found = findings(text_model(text, constants=constants, **options))
    assert (found.blocks, [left.miss.reason for left in found.left]) == ((), [reason])


@pytest.mark.parametrize("text", [
    "s = Sigmoid(x) out = Add(s, x)",
    "t = Transpose<perm = [0, 2, 1]>(x) c = MatMul(x, t) d = Tanh(c) p = Softmax(d) out = MatMul(p, x)",
    "y = MatMul(x, W1) h = Softmax(y) out = MatMul(h, W2)",
], ids=["nothing-follows", "capped-scores", "softmax"])  # fmt: skip
def test_what_is_no_candidate_is_not_listed(text: str) -> None:
    found = findings(text_model(text, inputs="float[1, 4, 4] x", outputs="float[1, 4, 4] out"))
    assert (found.blocks, found.left) == ((), ())
