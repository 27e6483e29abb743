"""Operators say what inputs are: ids are followed to their tables, axes have the sizes that their readers need."""

import pytest
from onnx import parser

from rewriter.inputs.cases import ANY_LENGTH, Inputs, InputSpec, Kind, Role
from tests.textmodels import filled

HEAD = '<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1, "local": 1]>'


def specs(text: str, rest: str = "") -> tuple[dict[str, InputSpec], int]:
    found = Inputs(filled(parser.parse_model(f"{HEAD} {text} {rest}")))
    return found.specs, found.longest


ROWS = {
    "straight": "y = Gather(table, ids)",
    "through a cast and a reshape": "a = Cast<to=7>(ids) b = Reshape(a, shape) y = Gather(table, b)",
    "through Unsqueeze and Squeeze": "a = Unsqueeze(ids, one) b = Squeeze(a, one) y = Gather(table, b)",
    "the smallest counts": "a = Gather(table, ids) y = Gather(small, ids)",
    "the other axis": "y = Gather<axis=1>(small, ids)",
    "GatherND": "a = Unsqueeze(ids, two) y = GatherND(table, a)",
    "GatherElements": "y = GatherElements(table, ids)",
    "EmbedLayerNormalization": "y, m = com.microsoft.EmbedLayerNormalization(ids, , table, small, , g, g)",
    "in a branch": "y = If (flag) <then_branch = t () => (float r) { r = Gather(table, ids) }, "
    "else_branch = e () => (float r) { r = Gather(small, ids) }>",
    "in a function": "y = local.embed(table, ids)",
}
WANTED = dict.fromkeys(ROWS, 50) | {"the smallest counts": 20, "the other axis": 8, "in a branch": 20}
NO_SELECTION = {
    "a comparison": "y = Equal(ids, two)",
    "an index": "a = ArgMax(ids) y = Gather(table, a)",
    "a size": "a = Shape(ids) y = Gather(table, a)",
    "a difference": "a = Sub(two, ids) y = Gather(table, a)",
}
FUNCTION = '<domain: "local", opset_import: ["": 17]> embed (w, i) => (o) { c = Cast<to=7>(i) o = Gather(w, c) }'


@pytest.mark.parametrize("case", [*ROWS, *NO_SELECTION])
def test_rows(case: str) -> None:
    graph = f"""g (int64[batch, seq] ids, bool flag) => (float y)
        <float[50, 8] table, float[20, 8] small, float[8] g, int64[2] shape = {{0, -1}}, int64[1] one = {{1}},
         int64[1] two = {{2}}> {{ {(ROWS | NO_SELECTION)[case]} }}"""
    assert specs(graph, FUNCTION)[0]["ids"].rows == WANTED.get(case)


@pytest.mark.parametrize(
    ("body", "longest"),
    [
        ("p = Range(zero, n, one) y = Gather(table, p)", 50),
        ("p = CumSum(ids, one) q = Add(p, two) y = Gather(table, q)", 50),
        ("y = Slice(table, two, m)", 50),
        ("y = com.microsoft.GroupQueryAttention<num_heads=1, do_rotary=1>(f, f, f, , , m, n, table, table)", 50),
        ("p = Range(zero, n, one) a = Unsqueeze(p, two) d = Sub(a, p) y = Gather(table, d)", ANY_LENGTH),
        ("p = Range(zero, n, one) y = Gather(types, p)", ANY_LENGTH),
    ],
)
def test_positions_that_the_model_counts(body: str, longest: int) -> None:
    """The rows of tables that they select; not of relative positions, which are differences, nor of token types."""
    graph = f"""g (int64[batch, seq] ids, int64 n, int64[1] m) => (float y)
        <float[50, 8] table, float[2, 8] types, int64 zero = {{0}}, int64 one = {{1}}, int64[1] two = {{2}}>
        {{ {body} }}"""
    assert specs(graph)[1] == longest


@pytest.mark.parametrize(
    ("body", "sizes"),
    [
        ("y = Conv(x, kernel)", {1: 6}),
        ("a = Cast<to=1>(x) y = Conv<group=2>(a, kernel)", {1: 12}),
        ("a = Relu(x) y = Conv(a, kernel)", {}),
        ("y = Conv(x, x)", {}),
    ],
)
def test_channels(body: str, sizes: dict[int, int]) -> None:
    graph = f"g (float[batch, channels, time] x) => (float y) <float[8, 6, 3] kernel> {{ {body} }}"
    assert specs(graph)[0]["x"].sizes == sizes


PAST = "float[b, h, past, kv_cache_dim]"
ATTENTION = {
    "packed": "q = MatMul(x, W) y, kk, vv = com.microsoft.GroupQueryAttention<num_heads=4, kv_num_heads=2>"
    "(q, , , k, v, last, total)",
    "three projections": "q = MatMul(x, W) p = MatMul(x, P) y, kk, vv = com.microsoft.GroupQueryAttention"
    "<num_heads=8, kv_num_heads=2>(q, p, p, k, v, last, total)",
    "MultiHeadAttention": "q = MatMul(x, W) y, kk, vv = com.microsoft.MultiHeadAttention<num_heads=4>"
    "(q, q, q, , , , k, v, last)",
    "Attention-23": "q = MatMul(x, W) y, kk, vv = Attention<q_num_heads=8, kv_num_heads=2>(q, q, q, , k, v)",
}
SIZES = {"packed": (2, 8), "three projections": (2, 8), "MultiHeadAttention": (4, 16), "Attention-23": (2, 32)}


@pytest.mark.parametrize("case", ATTENTION)
def test_a_past_has_the_sizes_of_its_reader(case: str) -> None:
    """`kv_cache_dim` is a size of heads, in spite of its name."""
    found, _ = specs(
        f"""g (float[b, s, 24] x, {PAST} k, {PAST} v, int32[b] last, int32 total)
        => (float[b, s, n] y, {PAST} kk, {PAST} vv)
        <float[24, 64] W, float[24, 16] P>
        {{ {ATTENTION[case]} }}"""
    )
    for name in "kv":
        assert (found[name].sizes[1], found[name].sizes[3]) == SIZES[case]
        assert (found[name].role, found[name].kinds[2]) == (Role.PAST, Kind.PAST)
    roles = {"Group": Role.LAST_INDEX, "Multi": Role.PAST_LENGTH}
    assert found["last"].role == next((role for name, role in roles.items() if name in ATTENTION[case]), Role.INTEGERS)
