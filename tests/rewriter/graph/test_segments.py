"""A graph in consecutive parts: bounded, complete, each reading earlier ones only."""

from __future__ import annotations

import onnx
import pytest

from rewriter.graph.segments import bytes_of, split
from rewriter.graph.view import GraphView, view_model
from tests.committed import FOLDER as MODELS

CHAIN = """<ir_version: 8, opset_import: ["": 17]>
g (float[n, 4] x) => (float[n, 4] out, float[4, 4] turned)
<float[4, 4] W = {1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1},
 float[4, 4] V = {1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7}>
{
  turned = Transpose(V)
  a = MatMul(x, W)
  b = Relu(a)
  c = MatMul(b, turned)
  d = MatMul(c, W)
  unused = Neg(d)
  out = Add(d, a)
}"""
SIZE = 64


def view() -> GraphView:
    return view_model(onnx.parser.parse_model(CHAIN))


def operators(limit: int, *taps: str) -> list[list[str]]:
    graph = view()
    return [[graph.nodes[index].op_type for index in part.nodes] for part in split(graph, taps, limit)]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        # A constant that is an output is made in the first part, and again wherever it is read.
        (10**6, [["Transpose", "MatMul", "Relu", "MatMul", "MatMul", "Add"]]),
        (SIZE, [["Transpose", "MatMul", "Relu"], ["Transpose", "MatMul"], ["MatMul", "Add"]]),
        (1, [["Transpose", "MatMul"], ["Relu"], ["Transpose", "MatMul"], ["MatMul"], ["Add"]]),
    ],
)
def test_parts(limit: int, expected: list[list[str]]) -> None:
    assert operators(limit) == expected


@pytest.mark.parametrize(
    ("kind", "dims", "size"),
    [
        (onnx.TensorProto.FLOAT, [3, 5], 60),
        (onnx.TensorProto.DOUBLE, [], 8),
        (onnx.TensorProto.BFLOAT16, [7], 14),
        (onnx.TensorProto.INT4, [7], 7),
        (onnx.TensorProto.FLOAT, [0, 5], 0),
        (999, [7], 7),
    ],
)
def test_sizes_of_weights(kind: int, dims: list[int], size: int) -> None:
    """Of a type that onnx does not know yet, a byte each."""
    assert bytes_of(onnx.TensorProto(data_type=kind, dims=dims)) == size


def test_a_weight_counts_once_in_a_part() -> None:
    assert len(operators(2 * SIZE)) == 1


def test_what_crosses() -> None:
    first, second, third = split(view(), ("b",), SIZE)
    assert (first.inputs, set(first.outputs)) == (("x",), {"a", "b", "turned"})
    assert (second.inputs, second.outputs) == (("b",), ("c",))
    assert (set(third.inputs), third.outputs) == ({"c", "a"}, ("out",))


@pytest.mark.parametrize("file", sorted(path.name for path in MODELS.glob("*.onnx")))
@pytest.mark.parametrize("limit", [2000, 20_000, 10**9])
def test_parts_are_bounded_ordered_and_complete(file: str, limit: int) -> None:
    graph = view_model(onnx.load(MODELS / file))
    parts = split(graph, (), limit)
    known = set(graph.inputs)
    for part in parts:
        assert set(part.inputs) <= known
        known.update(part.outputs)
        used = {name for index in part.nodes for name in graph.nodes[index].input if name in graph.initializers}
        large = [name for name in used if bytes_of(graph.initializers[name]) > limit]
        assert sum(bytes_of(graph.initializers[name]) for name in used - set(large)) <= limit
        assert len(large) <= 1
    assert set(graph.outputs) <= known
    assert (len(parts) == 1) is (limit == 10**9)
