"""What weights say about inputs: how many rows each may address, how many positions and channels there are.

Generated inputs are thus valid by construction; onnxruntime fails on an index out of range. Numbers are followed
forwards, from the inputs and from where the model itself counts (Range, CumSum, a slice of stored positions), through
operators that pass values on and additions of a constant, into branches and local functions, to the operators that
look up rows. Tables of relative positions do not count: their row numbers are differences, at which the walk ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import onnx

from rewriter.graph.constants import Constants
from rewriter.graph.types import FLOATS, Dim
from rewriter.graph.view import GraphView, all_graphs, integer_of, key_of, subgraphs, tensor_of

_CARRIERS = {
    "Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze", "Flatten", "Transpose", "Slice", "Expand", "Tile", "Split",
    "Clip", "Dropout", "Pad", "Gather", "CastLike",
}  # fmt: skip
"""Operators whose outputs contain values of their first input."""

_MIXERS = {"Concat", "Where", "Min", "Max", "Mul"}
"""Operators whose outputs contain values of several inputs."""

_SAME_SHAPE = {"Identity", "Cast", "DequantizeLinear", "CastLike"}

_LOOKUPS: Mapping[tuple[str, str], tuple[tuple[int, int], ...]] = {
    ("", "Gather"): ((1, 0),),
    ("", "GatherND"): ((1, 0),),
    ("com.microsoft", "EmbedLayerNormalization"): ((0, 2), (1, 4), (8, 3)),
    ("com.microsoft", "GatherBlockQuantized"): ((1, 0),),
    ("com.microsoft", "RotaryEmbedding"): ((1, 2), (1, 3)),
    ("", "RotaryEmbedding"): ((3, 1), (3, 2)),
}
"""Maps domain and operator to pairs of (operand with row numbers, operand with the table)."""

_DEPTH = 8
"""Maximum depth to which local functions and subgraphs are followed."""

_FEWEST = 8
"""Minimum number of positions; smaller tables are of token types."""

_COUNTED = None
"""The source of numbers that the model counts itself."""

_Step = tuple[onnx.NodeProto, list[str], list[str]]
"""A node, and the names of its inputs and outputs, unique in the model."""

_Flow = frozenset[tuple[str | None, int]]
"""What a tensor carries: pairs of a source, an input or `_COUNTED`, and the offset that was added to it."""

_NONE: _Flow = frozenset()


@dataclass(frozen=True)
class Tables:
    """Bounds on integer inputs.

    Attributes:
        rows: maps an input to the number of rows of the smallest table that it indexes.
        sequence: number of positions of the smallest position table; None if there is none.
        sizes: the size of an axis of an input that a convolution or a matrix product reads, by input and axis.
    """

    rows: Mapping[str, int]
    sequence: int | None
    sizes: Mapping[tuple[str, int], int]


def find_tables(model: onnx.ModelProto, view: GraphView) -> Tables:
    """Follow the inputs of a model to the tables that they index; `view` is the index of its main graph."""
    walk = _Walker(model, view)
    for step in _flat(model.graph.node, {(each.domain, each.name): each for each in model.functions}):
        walk.take(*step)
    return Tables(walk.rows, min(walk.limits, default=None), walk.sizes)


def _flat(
    nodes: Iterable[onnx.NodeProto],
    functions: Mapping[tuple[str, str], onnx.FunctionProto],
    names: Mapping[str, str] | None = None,
    prefix: str = "",
    depth: int = _DEPTH,
) -> Iterator[_Step]:
    """All nodes, those of bodies and called functions in the place of their holders."""
    known = names or {}

    def unique(names: Iterable[str]) -> list[str]:
        return [known.get(name, prefix + name if name else "") for name in names]

    for node in nodes:
        inputs, outputs = unique(node.input), unique(node.output)
        called = functions.get(key_of(node))
        if called is not None:
            inner = dict(zip(called.input, inputs, strict=False)) | dict(zip(called.output, outputs, strict=False))
            if depth:
                yield from _flat(called.node, functions, inner, f"{outputs[0]}/", depth - 1)
            continue
        for _, body in subgraphs(node) if depth else ():
            yield from _flat(body.node, functions, known, prefix, depth - 1)
            if node.op_type == "If":
                for outer, value in zip(outputs, unique(each.name for each in body.output), strict=False):
                    yield onnx.NodeProto(op_type="Identity"), [value], [outer]
        yield node, inputs, outputs


class _Walker:
    """What tensors carry, and the limits found so far."""

    def __init__(self, model: onnx.ModelProto, view: GraphView) -> None:
        self._view, self._constants = view, Constants(view)
        self._shapes: dict[str, tuple[Dim, ...]] = {
            name: kind.shape for name, kind in view.types.items() if kind.shape is not None
        }
        weights = [tensor for graph in all_graphs(model.graph) for tensor in graph.initializer]
        self._shapes.update((tensor.name, tuple(tensor.dims)) for tensor in weights)
        self._inner: dict[str, float] = {}
        """Numbers that are constants of functions and bodies."""
        self._flows: dict[str, _Flow] = {name: frozenset({(name, 0)}) for name in view.inputs}
        self.rows: dict[str, int] = {}
        self.limits: list[int] = []
        self.sizes: dict[tuple[str, int], int] = {}

    def take(self, node: onnx.NodeProto, inputs: list[str], outputs: list[str]) -> None:
        """Follow what a node reads to what it writes."""
        flows = [self._flows.get(name, _NONE) for name in inputs]
        for index, table in _LOOKUPS.get(key_of(node), ()):
            if max(index, table) < len(inputs):
                self._look_up(node, inputs[table], flows[index])
        if node.op_type == "EmbedLayerNormalization" and len(inputs) > 3:
            self._limit(inputs[3])  # without position ids, it counts itself
        if len(inputs) > 1 and inputs[0] in self._view.inputs:
            self._multiply(node, inputs[0], self._shapes.get(inputs[1], ()))
        if node.op_type in _SAME_SHAPE and inputs and inputs[0] in self._shapes:
            self._shapes.setdefault(outputs[0], self._shapes[inputs[0]])
        if node.op_type == "Constant" and (value := tensor_of(node)) is not None:
            self._shapes[outputs[0]] = tuple(value.dims)
            if not value.dims or tuple(value.dims) == (1,):
                self._inner[outputs[0]] = float(onnx.numpy_helper.to_array(value).reshape(()))
        if carried := self._carried(node, inputs, flows):
            self._flows.update(dict.fromkeys(filter(None, outputs), carried))

    def _look_up(self, node: onnx.NodeProto, table: str, flow: _Flow) -> None:
        shape = self._shapes.get(table, ())
        axis = integer_of(node, "axis", integer_of(node, "gather_axis", 0))
        rows = shape[axis] if -len(shape) <= axis < len(shape) else None
        for source, offset in flow:
            if source is _COUNTED:
                self._limit(table, offset)
            elif isinstance(rows, int):
                # Position ids of OPT and RoBERTa are shifted by 2 on their way, which leaves 2 rows fewer.
                self.rows[source] = min(max(rows - offset, 1), self.rows.get(source, rows))

    def _multiply(self, node: onnx.NodeProto, source: str, weight: tuple[Dim, ...]) -> None:
        """A product with a weight fixes the number of features or channels."""
        rank = len(self._shapes.get(source, ()))
        turned = node.op_type == "Gemm" and integer_of(node, "transB", 0) == 1
        axis = {"Conv": 1, "MatMul": rank - 1, "Gemm": 1}.get(node.op_type)
        size = weight[1 if node.op_type == "Conv" or turned else -2] if len(weight) > 1 else None
        if axis is not None and isinstance(size, int):
            self.sizes.setdefault((source, axis), size * integer_of(node, "group", 1))

    def _limit(self, table: str, offset: int = 0) -> None:
        """Positions index `table`, if it is a matrix of floats."""
        rows = self._shapes[table][0] if self._is_table(table) else None
        if isinstance(rows, int) and rows - offset >= _FEWEST:
            self.limits.append(rows - offset)

    def _is_table(self, tensor: str) -> bool:
        is_float = self._view.type_of(tensor).elem_type in FLOATS
        return tensor in self._constants and is_float and len(self._shapes.get(tensor, ())) == 2

    def _carried(self, node: onnx.NodeProto, inputs: list[str], flows: list[_Flow]) -> _Flow:
        kind = node.op_type
        if key_of(node)[0]:
            return _NONE
        if kind == "Range":
            return frozenset({(_COUNTED, 0)})
        if kind == "CumSum":  # counts from 1, unless it leaves the element itself out
            return frozenset({(_COUNTED, 1 - integer_of(node, "exclusive", 0))})
        if kind == "Slice" and inputs[0] in self._constants:
            # Cut to a computed length: a table, whose positions are implicit, or stored positions.
            if all(not name or name in self._constants for name in inputs[1:3]):
                return _NONE
            self._limit(inputs[0])
            return frozenset({(_COUNTED, 0)})
        if kind in {"Add", "Sub"} and any(flows):
            numbers = [self._integer(name) for name in inputs]
            if kind == "Sub" and (flows[1] or numbers[1] is None):
                return _NONE
            offset = sum(number for number in numbers if number is not None) * (1 if kind == "Add" else -1)
            return frozenset((source, before + offset) for flow in flows for source, before in flow)
        if kind in _MIXERS:
            return _NONE.union(*flows[kind == "Where" :])
        return flows[0] if kind in _CARRIERS and flows else _NONE

    def _integer(self, tensor: str) -> int | None:
        """The value of a constant that is a single whole number; None for any other tensor."""
        value = self._constants.scalar(tensor)
        value = self._inner.get(tensor) if value is None else value
        return int(value) if value is not None and value == int(value) else None
