"""Operators say what inputs are: ids are followed to their tables, axes have the sizes that their readers need."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import numpy_helper, parser

from rewriter.proof.inputs.facts import Facts, Kind, Role, facts_of

HEAD = '<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1, "local": 1]>'


def facts(text: str, rest: str = "") -> Facts:
    model = parser.parse_model(f"{HEAD} {text} {rest}")
    for value in model.graph.value_info:  # weights whose numbers do not matter
        dims = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        model.graph.initializer.append(numpy_helper.from_array(np.zeros(dims, np.float32), value.name))
    return facts_of(model)


ROWS = {
    "straight": "y = Gather(table, ids)",
    "through a cast and a reshape": "a = Cast<to=7>(ids) b = Reshape(a, shape) y = Gather(table, b)",
    "through Unsqueeze and Squeeze": "a = Unsqueeze(ids, one) b = Squeeze(a, one) y = Gather(table, b)",
    "the smallest counts": "a = Gather(table, ids) y = Gather(small, ids)",
    "an offset takes rows away": "a = Add(ids, two) y = Gather(table, a)",
    "the other axis": "y = Gather<axis=1>(small, ids)",
    "GatherND": "a = Unsqueeze(ids, two) y = GatherND(table, a)",
    "EmbedLayerNormalization": "y, m = com.microsoft.EmbedLayerNormalization(ids, , table, small, , g, g)",
    "in a branch": "y = If (flag) <then_branch = t () => (float r) { r = Gather(table, ids) }, "
    "else_branch = e () => (float r) { r = Gather(small, ids) }>",
    "in a function": "y = local.embed(table, ids)",
}
WANTED = dict.fromkeys(ROWS, 50) | {
    "the smallest counts": 20,
    "an offset takes rows away": 48,
    "the other axis": 8,
    "in a branch": 20,
}
FUNCTION = '<domain: "local", opset_import: ["": 17]> embed (w, i) => (o) { c = Cast<to=7>(i) o = Gather(w, c) }'


@pytest.mark.parametrize("case", ROWS)
def test_rows(case: str) -> None:
    graph = f"""g (int64[batch, seq] ids, bool flag) => (float y)
        <float[50, 8] table, float[20, 8] small, float[8] g, int64[2] shape = {{0, -1}}, int64[1] one = {{1}},
         int64[1] two = {{2}}> {{ {ROWS[case]} }}"""
    assert facts(graph, FUNCTION).rows == {"ids": WANTED[case]}


@pytest.mark.parametrize(
    "body",
    ["y = Equal(ids, two)", "a = ArgMax(ids) y = Gather(table, a)", "a = Shape(ids) y = Gather(table, a)"],
)
def test_what_is_no_selection(body: str) -> None:
    graph = f"g (int64[batch, seq] ids) => (float y) <float[50, 8] table, int64[1] two = {{2}}> {{ {body} }}"
    assert facts(graph).rows == {}


@pytest.mark.parametrize(
    ("body", "sizes"),
    [
        ("y = Conv(x, kernel)", {("x", 1): 6}),
        ("y = Conv<group=2>(x, kernel)", {("x", 1): 12}),
        ("y = MatMul(x, matrix)", {("x", 2): 5}),
        ("a = Cast<to=1>(x) y = MatMul(a, matrix)", {("x", 2): 5}),
        ("y = LayerNormalization(x, scale)", {("x", 2): 9}),
        ("y = Reshape(x, split)", {("x", 2): 12}),
        ("y = com.microsoft.MatMulNBits<K=32, N=8, bits=4, block_size=32>(x, packed, scales)", {("x", 2): 32}),
        ("y = Concat<axis=1>(x, matrix3)", {("x", 0): 2, ("x", 2): 6}),
        ("y = Gemm<transB=1>(x, matrix)", {("x", 1): 7}),
        ("a = Relu(x) y = MatMul(a, matrix)", {}),
    ],
)
def test_channels_and_features(body: str, sizes: dict[tuple[str, int], int]) -> None:
    graph = f"""g (float[batch, channels, time] x) => (float z)
        <float[8, 6, 3] kernel, float[5, 7] matrix, float[9] scale, float[2, 3, 6] matrix3, uint8[8, 1, 16] packed,
         float[8] scales, int64[4] split = {{0, 0, 3, 4}}> {{ {body} z = Identity(y) }}"""
    assert facts(graph).sizes == sizes


PAST = "float[b, h, past, kv_cache_dim]"
ATTENTION = {
    "packed, without a known width": "q = com.microsoft.BiasSplitGelu(x, W) y, kk, vv = "
    "com.microsoft.GroupQueryAttention<num_heads=3, kv_num_heads=1, do_rotary=1>(q, , , k, v, last, total, cos, sin)",
    "packed": "q = MatMul(x, W) y, kk, vv = com.microsoft.GroupQueryAttention<num_heads=4, kv_num_heads=2>"
    "(q, , , k, v, last, total)",
    "three projections": "q = MatMul(x, W) p = MatMul(x, P) y, kk, vv = com.microsoft.GroupQueryAttention"
    "<num_heads=8, kv_num_heads=2>(q, p, p, k, v, last, total)",
    "MultiHeadAttention": "q = MatMul(x, W) y, kk, vv = com.microsoft.MultiHeadAttention<num_heads=4>"
    "(q, q, q, , , , k, v, last)",
    "Attention-23": "q = MatMul(x, W) y, kk, vv = Attention<q_num_heads=8, kv_num_heads=2>(q, q, q, , k, v)",
    "appended": "q = MatMul(x, W) r = Reshape(q, split) kk = Concat<axis=2>(k, r) vv = Concat<axis=2>(v, r) y = Neg(x)",
}
SIZES = {
    "packed, without a known width": (1, 8),
    "packed": (2, 8),
    "three projections": (2, 8),
    "MultiHeadAttention": (4, 16),
    "Attention-23": (2, 32),
    "appended": (4, 16),
}


@pytest.mark.parametrize("case", ATTENTION)
def test_a_past_has_the_sizes_of_its_reader(case: str) -> None:
    """`kv_cache_dim` is a size of heads, whatever its name says."""
    found = facts(
        f"""g (float[b, s, 24] x, {PAST} k, {PAST} v, int32[b] last, int32 total)
        => (float[b, s, n] y, {PAST} kk, {PAST} vv)
        <float[24, 64] W, float[24, 16] P, float[50, 4] cos, float[50, 4] sin, int64[4] split = {{0, 4, -1, 16}}>
        {{ {ATTENTION[case]} }}"""
    )
    for name in "kv":
        assert (found.sizes[name, 1], found.sizes[name, 3]) == SIZES[case]
        assert found.kinds[name, 2] is Kind.PAST
    assert found.longest == (50 if "cos" in ATTENTION[case] else None)
    roles = {"Group": Role.LAST_INDEX, "Multi": Role.PAST_LENGTH}
    assert found.roles.get("last") == next((role for name, role in roles.items() if name in ATTENTION[case]), None)
