"""Which table rows the integer inputs of a model select, and how many positions the model knows.

Comes in: a model. Goes out: `Tables`: input name to the number of rows it may address, and the longest
sequence that the position tables allow. Used to make inputs that are valid by construction.

An input is followed forwards through operators that hand integers on (`_CARRIERS`), additions of a constant,
If branches and local functions, to the operators that look rows up (`_LOOKUPS`). Positions that the model
makes itself are recognised at the lookup, by walking back to a Range or CumSum.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import onnx

from rewriter.graph.view import GraphView, subgraphs, view_graph
from rewriter.proof.inputs.positions import sequence_limit
from rewriter.proof.inputs.static_shapes import Scope, constant_shapes

_CARRIERS = {
    "Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze", "Flatten", "Transpose", "Slice", "Expand", "Tile",
    "Split",
    "Concat", "Clip", "Where", "Dropout", "Pad", "Gather", "CastLike", "Min", "Max",
}  # fmt: skip
"""Operators whose outputs hold values of their inputs."""

_LOOKUPS: Mapping[tuple[str, str], tuple[tuple[int, int], ...]] = {
    ("", "Gather"): ((1, 0),),
    ("", "GatherND"): ((1, 0),),
    ("com.microsoft", "EmbedLayerNormalization"): ((0, 2), (1, 4), (8, 3)),
    ("com.microsoft", "GatherBlockQuantized"): ((1, 0),),
    ("com.microsoft", "RotaryEmbedding"): ((1, 2), (1, 3)),
    ("", "RotaryEmbedding"): ((3, 1), (3, 2)),
}
"""Domain and operator to the pairs of (operand with row numbers, operand with the table)."""

_DEPTH = 8
"""How deep local functions and subgraphs are followed."""


@dataclass(frozen=True)
class Tables:
    """What bounds the integers.

    Attributes:
        rows: input name to the number of rows of the smallest table that it selects from.
        sequence: number of positions of the smallest position table, None where there is none.
    """

    rows: Mapping[str, int]
    sequence: int | None


@dataclass(frozen=True)
class _Flow:
    """An input's value on its way: `source + offset`."""

    source: str
    offset: int = 0


_Flows = Mapping[str, frozenset[_Flow]]


def main_scope(model: onnx.ModelProto, view: GraphView) -> Scope:
    """The scope of the main graph, whose `view` knows the inferred types."""
    shapes = {name: kind.shape for name, kind in view.types.items() if kind.shape is not None}
    functions = {(function.domain, function.name): function for function in model.functions}
    return Scope(view, constant_shapes(view.nodes, view.initializers.values(), shapes), functions)


def find_tables(scope: Scope) -> Tables:
    """Follow the graph inputs of a main graph to the tables that they select from."""
    flows = {name: frozenset({_Flow(name)}) for name in scope.view.inputs}
    rows: dict[str, int] = {}
    for source, limit in _lookups(scope, flows, _DEPTH)[0]:
        rows[source] = min(limit, rows.get(source, limit))
    return Tables(rows, sequence_limit(scope))


def _lookups(scope: Scope, start: _Flows, depth: int) -> tuple[set[tuple[str, int]], _Flows]:
    """Pairs of (input, rows) found in one scope and below, and where the inputs' values are at its end."""
    found: set[tuple[str, int]] = set()
    flows = dict(start)
    for node in scope.view.nodes:
        carried: frozenset[_Flow] = frozenset()
        operands = [flows.get(name, frozenset()) for name in node.input]
        domain = "" if scope.view.is_onnx(node) else node.domain
        if any(operands):
            found.update(_addressed(scope, node, operands))
            if (domain, node.op_type) in scope.functions and depth:
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
    domain = "" if scope.view.is_onnx(node) else node.domain
    for index, table in _LOOKUPS.get((domain, node.op_type), ()):
        if max(index, table) >= len(node.input):
            continue
        shape = scope.shapes.get(node.input[table], ())
        axis = next((item.i for item in node.attribute if item.name in {"axis", "gather_axis"}), 0)
        size = shape[axis] if -len(shape) <= axis < len(shape) else None
        if isinstance(size, int):
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
    # Of the others only the first operand holds values; the rest are shapes, axes and the like.
    several = node.op_type in {"Concat", "Where", "Min", "Max"}
    return frozenset().union(*(operands[node.op_type == "Where" :] if several else operands[:1]))


def _call(
    scope: Scope, node: onnx.NodeProto, operands: list[frozenset[_Flow]], depth: int
) -> tuple[set[tuple[str, int]], _Flows]:
    domain = "" if scope.view.is_onnx(node) else node.domain
    body = scope.enter(scope.functions[(domain, node.op_type)], node)
    start = dict(zip(body.view.inputs, operands, strict=False))
    found, ends = _lookups(body, start, depth - 1)
    pairs = zip(node.output, body.view.outputs, strict=False)
    return found, {outer: ends.get(name, frozenset()) for outer, name in pairs if outer}


def _bodies(scope: Scope, node: onnx.NodeProto) -> Iterable[Scope]:
    for _, graph in subgraphs(node):
        view = view_graph(graph, scope.view.opsets)
        yield replace(scope, view=view, shapes=constant_shapes(view.nodes, view.initializers.values(), scope.shapes))
