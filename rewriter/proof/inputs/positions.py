"""How many positions a model knows.

Comes in: the scope of a main graph. Goes out: the number of tokens that its smallest position table allows,
or None. Used by `rewriter.proof.inputs.embedding_tables`.

A position table is a constant float matrix whose rows are selected by numbers that the model counts itself:
walking back from the row numbers leads through `_PASSING` to a Range, a CumSum or a slice of a constant.
Tables of relative positions are not meant: their buckets go through Abs, Log and Min, where the walk stops.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from rewriter.proof.inputs.static_shapes import Scope

_PASSING = {
    "Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze", "Expand", "Slice", "Mul", "Where", "Flatten",
    "Transpose", "Tile",
}  # fmt: skip
_FLOATS = {
    onnx.TensorProto.FLOAT,
    onnx.TensorProto.FLOAT16,
    onnx.TensorProto.DOUBLE,
    onnx.TensorProto.BFLOAT16,
}
_FEWEST = 8
"""Smaller tables are of token types."""
_STEPS = 64


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
        elif node.op_type == "Slice" and _is_table(scope, node.input[0]) and not _is_constant(scope, node.input[1:3]):
            rows = scope.shapes[node.input[0]][0]
            offset = 0
        else:
            continue
        if isinstance(rows, int) and offset is not None and rows - offset >= _FEWEST:
            yield rows - offset


def _is_table(scope: Scope, tensor: str) -> bool:
    kind = scope.view.type_of(tensor).elem_type
    return tensor in scope.constants and kind in _FLOATS and len(scope.shapes.get(tensor, ())) == 2


def _is_constant(scope: Scope, tensors: list[str]) -> bool:
    return all(not name or name in scope.constants for name in tensors)


def _counted(scope: Scope, tensor: str) -> int | None:
    """What is added to numbers that the model counts itself; None when they are no such numbers."""
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
            return offset + (not any(item.name == "exclusive" and item.i for item in node.attribute))
        if node.op_type == "Slice" and node.input[0] in scope.constants:
            return None if _is_constant(scope, list(node.input[1:3])) else offset
        if node.op_type in {"Add", "Sub"}:
            added = [value for name in node.input if (value := scope.integer(name)) is not None]
            offset += sum(added) if node.op_type == "Add" else -sum(added)
            pending += node.input
        elif node.op_type in _PASSING:
            pending += node.input[1:] if node.op_type == "Where" else node.input[:2]
    return None
