"""Find the tables that integer inputs index, and the number of positions that the model knows.

`Tables` holds the number of rows that each input may address and the longest sequence that the position tables allow,
so that generated inputs are valid by construction: onnxruntime fails on an index out of range.

An input is followed forwards through operators that pass integers on (`_CARRIERS`), additions of a constant, If
branches and local functions, to the operators that look up rows (`_LOOKUPS`).

A position table is a constant float matrix whose row numbers the model itself counts: walking back from them through
`_PASSING` leads to a Range, a CumSum or a slice of a constant. Tables of relative positions do not qualify, because
their buckets come from Abs, Log and Min, where the walk stops.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import onnx

from rewriter.graph.types import FLOATS
from rewriter.graph.view import GraphView, integer_of, key_of, subgraphs, view_graph
from rewriter.proof.inputs.static_shapes import Scope, constant_shapes

_CARRIERS = {
    "Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze", "Flatten", "Transpose", "Slice", "Expand", "Tile",
    "Split",
    "Concat", "Clip", "Where", "Dropout", "Pad", "Gather", "CastLike", "Min", "Max",
}  # fmt: skip
"""Operators whose outputs contain values of their inputs."""

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


@dataclass(frozen=True)
class Tables:
    """Bounds on integer inputs.

    Attributes:
        rows: maps an input to the number of rows of the smallest table that it indexes.
        sequence: number of positions of the smallest position table; None if there is none.
    """

    rows: Mapping[str, int]
    sequence: int | None


@dataclass(frozen=True)
class _Flow:
    """The value of a tensor that carries an input: `source + offset`."""

    source: str
    offset: int = 0


_Flows = Mapping[str, frozenset[_Flow]]


def main_scope(model: onnx.ModelProto, view: GraphView) -> Scope:
    """The scope of the main graph; `view` holds its inferred types."""
    shapes = {name: kind.shape for name, kind in view.types.items() if kind.shape is not None}
    functions = {(function.domain, function.name): function for function in model.functions}
    return Scope(view, constant_shapes(view.nodes, view.initializers.values(), shapes), functions)


def find_tables(scope: Scope) -> Tables:
    """Follow the inputs of a main graph to the tables that they index."""
    flows = {name: frozenset({_Flow(name)}) for name in scope.view.inputs}
    rows: dict[str, int] = {}
    for source, limit in _lookups(scope, flows, _DEPTH)[0]:
        rows[source] = min(limit, rows.get(source, limit))
    return Tables(rows, sequence_limit(scope))


def _lookups(scope: Scope, start: _Flows, depth: int) -> tuple[set[tuple[str, int]], _Flows]:
    """Pairs of (input, rows) in one scope and below, and the tensors that carry inputs at its end."""
    # One pass in topological order. A tensor may carry several inputs at once, after a Concat or an If.
    found: set[tuple[str, int]] = set()
    flows = dict(start)
    for node in scope.view.nodes:
        carried: frozenset[_Flow] = frozenset()
        operands = [flows.get(name, frozenset()) for name in node.input]
        if any(operands):
            found.update(_addressed(scope, node, operands))
            if key_of(node) in scope.functions and depth:
                inner, ends = _call(scope, node, operands, depth)
                found |= inner
                flows.update(ends)
                continue
            carried = _carried(scope, node, operands)
        for body in _bodies(scope, node) if depth else ():
            inner, ends = _lookups(body, flows, depth - 1)
            found |= inner
            if node.op_type == "If":
                for outer, name in zip(node.output, body.view.outputs, strict=False):
                    flows[outer] = flows.get(outer, frozenset()) | ends.get(name, frozenset())
        if carried:
            flows.update(dict.fromkeys(filter(None, node.output), carried))
    return found, flows


def _addressed(scope: Scope, node: onnx.NodeProto, operands: list[frozenset[_Flow]]) -> Iterator[tuple[str, int]]:
    for index, table in _LOOKUPS.get(key_of(node), ()):
        if max(index, table) >= len(node.input):
            continue
        shape = scope.shapes.get(node.input[table], ())
        axis = next((item.i for item in node.attribute if item.name in {"axis", "gather_axis"}), 0)
        size = shape[axis] if -len(shape) <= axis < len(shape) else None
        if isinstance(size, int):
            # Position ids of OPT and RoBERTa are shifted by 2 on their way, which leaves 2 rows fewer.
            yield from ((flow.source, max(size - flow.offset, 1)) for flow in operands[index])


def _carried(scope: Scope, node: onnx.NodeProto, operands: list[frozenset[_Flow]]) -> frozenset[_Flow]:
    if not scope.view.is_onnx(node):
        return frozenset()
    if node.op_type in {"Add", "Sub"} and len(operands) == 2:
        offset = scope.integer(node.input[0 if operands[1] else 1])
        if offset is None or (node.op_type == "Sub" and operands[1]):
            return frozenset()
        signed = offset if node.op_type == "Add" else -offset
        return frozenset(replace(flow, offset=flow.offset + signed) for flow in operands[0] | operands[1])
    if node.op_type not in _CARRIERS:
        return frozenset()
    # Several operands of these hold values (not the condition of Where); elsewhere only the first one does.
    several = node.op_type in {"Concat", "Where", "Min", "Max"}
    return frozenset().union(*(operands[node.op_type == "Where" :] if several else operands[:1]))


def _call(
    scope: Scope, node: onnx.NodeProto, operands: list[frozenset[_Flow]], depth: int
) -> tuple[set[tuple[str, int]], _Flows]:
    body = scope.enter(scope.functions[key_of(node)], node)
    start = dict(zip(body.view.inputs, operands, strict=False))
    found, ends = _lookups(body, start, depth - 1)
    pairs = zip(node.output, body.view.outputs, strict=False)
    return found, {outer: ends.get(name, frozenset()) for outer, name in pairs if outer}


def _bodies(scope: Scope, node: onnx.NodeProto) -> Iterable[Scope]:
    for _, graph in subgraphs(node):
        view = view_graph(graph, scope.view.opsets)
        yield replace(scope, view=view, shapes=constant_shapes(view.nodes, view.initializers.values(), scope.shapes))


_PASSING = {
    "Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze", "Expand", "Slice", "Mul", "Where", "Flatten",
    "Transpose", "Tile",
}  # fmt: skip
_FEWEST = 8
"""Minimum number of positions; smaller tables are of token types."""
_STEPS = 64
"""Maximum number of nodes on the way back from a lookup."""


def sequence_limit(scope: Scope) -> int | None:
    """Number of tokens that fit the smallest position table."""
    return min(_limits(scope), default=None)


def _limits(scope: Scope) -> Iterator[int]:
    for node in scope.view.nodes:
        if node.op_type == "EmbedLayerNormalization" and len(node.input) > 3:
            rows = scope.shapes.get(node.input[3], (None,))[0]
            offset: int | None = 0
        elif node.op_type in {"Gather", "GatherND"} and len(node.input) == 2 and _is_table(scope, node.input[0]):
            rows = scope.shapes[node.input[0]][0]
            offset = _counted(scope, node.input[1])
        # A table that is sliced up to a computed length: the positions are implicit.
        elif node.op_type == "Slice" and _is_table(scope, node.input[0]) and not _is_constant(scope, node.input[1:3]):
            rows = scope.shapes[node.input[0]][0]
            offset = 0
        else:
            continue
        if isinstance(rows, int) and offset is not None and rows - offset >= _FEWEST:
            yield rows - offset


def _is_table(scope: Scope, tensor: str) -> bool:
    kind = scope.view.type_of(tensor).elem_type
    return tensor in scope.constants and kind in FLOATS and len(scope.shapes.get(tensor, ())) == 2


def _is_constant(scope: Scope, tensors: list[str]) -> bool:
    return all(not name or name in scope.constants for name in tensors)


def _counted(scope: Scope, tensor: str) -> int | None:
    """The offset that is added to numbers that the model itself counts; None if the tensor holds no such numbers."""
    offset = 0
    pending = [tensor]
    for _ in range(_STEPS):
        if not pending:
            return None
        node = scope.view.made_by(pending.pop())
        if node is None:
            continue
        if node.op_type == "Range":
            return offset
        if node.op_type == "CumSum":  # counts from 1, unless it leaves the element itself out
            return offset + (not integer_of(node, "exclusive", 0))
        if node.op_type == "Slice" and node.input[0] in scope.constants:
            # A buffer of position ids, cut to the length of the sequence; a fixed slice of it counts nothing.
            return None if _is_constant(scope, list(node.input[1:3])) else offset
        if node.op_type in {"Add", "Sub"}:
            added = [value for name in node.input if (value := scope.integer(name)) is not None]
            offset += sum(added) if node.op_type == "Add" else -sum(added)
            pending += node.input
        elif node.op_type in _PASSING:
            pending += node.input[1:] if node.op_type == "Where" else node.input[:2]
    return None
