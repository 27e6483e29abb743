"""What weights say about inputs: how many rows each may address, how many positions and channels there are.

Numbers are followed forwards, from the inputs and from where the model itself counts (Range, CumSum, a slice of stored
positions), through operators that pass values on and additions of a constant, to the operators that look up rows.
Tables of relative positions do not count: their row numbers are differences, at which the walk ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import onnx

from rewriter.graph.constants import Constants
from rewriter.graph.edit import inlined
from rewriter.graph.types import FLOATS, Dim
from rewriter.graph.view import GraphView, all_views, integer_of, key_of

_CARRIERS = frozenset(
    """
    Cast Identity Reshape Unsqueeze Squeeze Flatten Transpose Slice Expand Tile Split Clip Dropout Pad Gather CastLike
    """.split()  # noqa: SIM905 - more readable
)
"""Operators whose outputs contain values of their first input."""

_MIXERS = {"Concat", "Where", "Min", "Max", "Mul"}
"""Operators whose outputs contain values of several inputs."""

_LOOKUPS: Mapping[tuple[str, str], tuple[tuple[int, int], ...]] = {
    ("", "Gather"): ((1, 0),),
    ("", "GatherND"): ((1, 0),),
    ("com.microsoft", "EmbedLayerNormalization"): ((0, 2), (1, 4), (8, 3)),
    ("com.microsoft", "GatherBlockQuantized"): ((1, 0),),
    ("com.microsoft", "RotaryEmbedding"): ((1, 2), (1, 3)),
    ("", "RotaryEmbedding"): ((3, 1), (3, 2)),
}
"""Maps domain and operator to pairs of (operand with row numbers, operand with the table)."""

_FEWEST = 8
"""Minimum number of positions; smaller tables are of token types."""

_COUNTED = None
"""The source of numbers that the model counts itself."""

_Flow = set[tuple[str | None, int]]
"""What a tensor carries: pairs of a source, an input or `_COUNTED`, and the offset that was added to it."""


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


def find_tables(model: onnx.ModelProto) -> Tables:
    """Follow the inputs of a model to the tables that they index, in control-flow bodies and local functions too."""
    rows: dict[str, int] = {}
    limits: list[int] = []
    sizes: dict[tuple[str, int], int] = {}
    flows: dict[str, _Flow] = defaultdict(set, {value.name: {(value.name, 0)} for value in model.graph.input})
    for view in all_views(inlined(model) if model.functions else model):
        constants = Constants(view)
        shapes = {name: kind.shape for name, kind in view.types.items() if kind.shape is not None}
        shapes |= {name: tuple(tensor.dims) for name, tensor in view.initializers.items()}

        def limit(table: str, offset: int = 0) -> None:
            """Positions index `table`, if it is a matrix of floats."""
            count = _rows_of(view, constants, shapes, table)  # noqa: B023 - called in this turn
            if count is not None and count - offset >= _FEWEST:
                limits.append(count - offset)

        for node in view.nodes:
            inputs = list(node.input)
            for table, count, source, offset in _lookups(node, shapes, flows):
                if source is _COUNTED:
                    limit(table, offset)
                elif count is not None:
                    # Position ids of OPT and RoBERTa are shifted by 2 on their way, which leaves 2 rows fewer.
                    rows[source] = min(max(count - offset, 1), rows.get(source, count))
            if node.op_type == "EmbedLayerNormalization" and len(inputs) > 3:
                limit(inputs[3])  # without position ids, it counts itself
            cut = node.op_type == "Slice" and inputs[0] in constants
            if cut and not all(not name or name in constants for name in inputs[1:3]):
                limit(inputs[0])  # cut to a computed length: positions are implicit
            if len(inputs) > 1 and inputs[0] in view.inputs:
                sizes.update(_multiplied(node, shapes) or {})
            carried = _carried(node, flows, constants)
            for name in filter(None, node.output):
                flows[name] |= carried
    return Tables(rows, min(limits, default=None), sizes)


def _lookups(
    node: onnx.NodeProto, shapes: Mapping[str, tuple[Dim, ...]], flows: Mapping[str, _Flow]
) -> Iterator[tuple[str, int | None, str | None, int]]:
    """The tables that a node selects from, their rows, and whose numbers select."""
    for index, table in _LOOKUPS.get(key_of(node), ()):
        if max(index, table) < len(node.input):
            shape = shapes.get(node.input[table], ())
            axis = integer_of(node, "axis", integer_of(node, "gather_axis", 0))
            count = shape[axis] if -len(shape) <= axis < len(shape) else None
            for source, offset in flows[node.input[index]]:
                yield node.input[table], count if isinstance(count, int) else None, source, offset


def _rows_of(view: GraphView, constants: Constants, shapes: Mapping[str, tuple[Dim, ...]], table: str) -> int | None:
    is_float = view.type_of(table).elem_type in FLOATS
    shape = shapes.get(table, ())
    return shape[0] if table in constants and is_float and len(shape) == 2 and isinstance(shape[0], int) else None


def _multiplied(node: onnx.NodeProto, shapes: Mapping[str, tuple[Dim, ...]]) -> dict[tuple[str, int], int] | None:
    """A product with a weight fixes the number of features or channels."""
    weight = shapes.get(node.input[1], ())
    turned = node.op_type == "Gemm" and integer_of(node, "transB", 0) == 1
    axis = {"Conv": 1, "MatMul": len(shapes.get(node.input[0], ())) - 1, "Gemm": 1}.get(node.op_type)
    size = weight[1 if node.op_type == "Conv" or turned else -2] if len(weight) > 1 else None
    if axis is None or not isinstance(size, int):
        return None
    return {(node.input[0], axis): size * integer_of(node, "group", 1)}


def _carried(node: onnx.NodeProto, flows: Mapping[str, _Flow], constants: Constants) -> _Flow:
    kind, given = node.op_type, [flows[name] if name else set() for name in node.input]
    if key_of(node)[0]:
        return set()
    if kind == "Range":
        return {(_COUNTED, 0)}
    if kind == "CumSum":  # counts from 1, unless it leaves the element itself out
        return {(_COUNTED, 1 - integer_of(node, "exclusive", 0))}
    if kind == "Slice" and node.input[0] in constants:
        fixed = all(not name or name in constants for name in node.input[1:3])
        return set() if fixed else {(_COUNTED, 0)}
    if kind in {"Add", "Sub"} and any(given):
        numbers = [constants.scalar(name) for name in node.input]
        if kind == "Sub" and (given[1] or numbers[1] is None):
            return set()
        offset = int(sum(number for number in numbers if number is not None)) * (1 if kind == "Add" else -1)
        return {(source, before + offset) for flow in given for source, before in flow}
    if kind in _MIXERS:
        return set().union(*given[kind == "Where" :])
    return given[0] if kind in _CARRIERS and given else set()
