"""Attention over a static axis of keys, read as the function of one number per entry that it is.

Forms `compact` and `local` with an operator Softmax lay the entries y of a tensor out as rows, compute a row of K
numbers for each (logits against K keys, their softmax, values), and return one number per entry, in order.
Reshape keeps entries in order, and everything between works on the last axis with the same K numbers for all rows.
Where `local` returns to the shape of y, `compact` has y as heads of [batch, tokens, heads, 1] and returns to
[batch, tokens, heads]; there nothing may have widened the first two axes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from rewriter.graph.types import FLOATS
from rewriter.graph.view import attributes, integer_of, integers_of, key_of
from rewriter.proof.certificate.expressions import (
    OPERATORS,
    Expression,
    clip,
    constant,
    mul,
    ordered,
    scalar_operator,
    softmax,
    total,
)
from rewriter.proof.certificate.graphs import Scope, Tensor
from rewriter.proof.certificate.layers import Dim, dims, heads_front, read_layer, shaped

_DEEPEST = 100
_MOST_KEYS = 4096
_LAST = (3, -1)


@dataclass(frozen=True)
class Row:
    """A tensor with the last axis of keys: for each entry, these numbers. `column`: the axis is not there yet."""

    numbers: tuple[Expression, ...]
    column: bool = False


Value = Row | np.ndarray
"""A row for each entry, or the same constant matrix for all of them."""


@dataclass(frozen=True)
class Keys:
    """What a tensor computes of the entries of others, by way of an axis of keys.

    Attributes:
        expression: the number for each entry.
        inside: the tensors on the way.
        together: whether entries of several tensors meet, which must then have the same shape: rows know their order,
            not how the axes of the tensors lie beside each other.
    """

    expression: Expression
    inside: tuple[Tensor, ...]
    together: bool


def read_keys(scope: Scope, node: onnx.NodeProto, leaf: Callable[[Tensor], Expression]) -> Keys | None:
    """What a Reshape of a row of one number, to Shape(y) or side by side, computes of entries; None for any other."""
    shape = scope.find(node.input[1])
    rows = _Rows(leaf)
    found = rows.value(scope, node.input[0])
    if not isinstance(found, Row) or len(found.numbers) != 1:
        return None
    # Every tensor whose entries were laid out must have its say: none may have cancelled.
    used = {part for part in ordered(found.numbers[0]) if part.operator == "leaf"}
    if not rows.laid_out <= used:
        return None
    if rows.heads:
        lasting = heads_front(scope.find(node.input[0])) is not None
        whole = [dims(shape)] == [[0, 0, heads] for heads in rows.heads] and lasting
    else:
        measured = shaped(shape)
        whole = measured is not None and leaf(measured) in used
    if not whole:
        return None
    return Keys(found.numbers[0], tuple(rows.inside), len(used) > 1)


class _Rows:
    """Reads tensors with an axis of keys."""

    def __init__(self, leaf: Callable[[Tensor], Expression]) -> None:
        self._leaf = leaf
        self._known: dict[tuple[int, str], Value | None] = {}
        self._depth = 0
        self.inside: list[Tensor] = []
        self.laid_out: set[Expression] = set()
        self.heads: set[int] = set()

    def value(self, scope: Scope, name: str) -> Value | None:
        tensor = scope.find(name) if name else None
        if tensor is None or self._depth > _DEEPEST:
            return None
        if tensor.key not in self._known:
            self._depth += 1
            self._known[tensor.key] = self._read(tensor)
            self._depth -= 1
        return self._known[tensor.key]

    def _read(self, tensor: Tensor) -> Value | None:
        values = tensor.values
        if values is not None:
            return values if values.dtype.kind == "f" else None
        if tensor.node is None:
            return None
        scope, node = tensor.scope, tensor.node
        self.inside.append(tensor)
        key = key_of(node)
        special = _SPECIAL.get(key)
        if special is not None:
            return special(self, scope, node, tensor.place)
        return self._elementwise(scope, node) if key in OPERATORS and tensor.place == 0 else None

    def operands(self, scope: Scope, node: onnx.NodeProto) -> list[Value | None]:
        return [self.value(scope, name) for name in node.input]

    def reshape(self, scope: Scope, node: onnx.NodeProto, _place: int) -> Value | None:
        """Entries in order, in three axes; or those of [batch, tokens, heads] as [batch, tokens, heads, 1]."""
        source, sizes = scope.find(node.input[0]), dims(scope.find(node.input[1]))
        if sizes is not None and len(sizes) == 4 and sizes[:2] == [0, 0]:
            return self._heads(source, *sizes[2:])
        if _length(scope, node.input[1]) != 3:
            return None
        entries = self._leaf(source)
        self.laid_out.add(entries)
        return Row((entries,), column=True)

    def _heads(self, source: Tensor, heads: Dim, size: Dim) -> Value | None:
        """The projections of a stream by heads; where no weight reads x, the same constants for all tokens."""
        layer = read_layer(source)
        if layer is None or not isinstance(heads, int) or not isinstance(size, int) or layer.bias.size != heads * size:
            return None
        if not layer.weight.any():
            return layer.bias.reshape(1, size) if heads == 1 else None
        if size != 1:
            return None
        entries = self._leaf(source)
        self.laid_out.add(entries)
        self.heads.add(heads)
        return Row((entries,))

    def unsqueeze(self, scope: Scope, node: onnx.NodeProto, _place: int) -> Value | None:
        row = self.value(scope, node.input[0])
        if not isinstance(row, Row) or not row.column or not _is_last_axis(scope, node):
            return None
        return Row(row.numbers)

    def expand(self, scope: Scope, node: onnx.NodeProto, _place: int) -> Value | None:
        values, shape = self.value(scope, node.input[0]), scope.find(node.input[1])
        if not isinstance(values, np.ndarray) or shape.node is None:
            return None
        if key_of(shape.node) == ("", "Shape") and values.ndim == 0 and not shape.node.attribute:
            like = self.value(shape.scope, shape.node.input[0])
            plain = isinstance(like, Row) and not like.column
            return Row((constant(float(values)),) * len(like.numbers)) if plain and isinstance(like, Row) else None
        if key_of(shape.node) != ("", "Concat") or len(shape.node.input) != 2:
            return None
        ends = shape.scope.find(shape.node.input[1]).values
        if _length(shape.scope, node.input[1] if shape.scope is scope else shape.name) != 4 or ends is None:
            return None
        sizes = tuple(int(size) for size in ends)
        fits = len(sizes) == 2 and values.ndim <= 2 and max(sizes) <= _MOST_KEYS
        fits = fits and all(a in (1, b) for a, b in zip(values.shape[::-1], sizes[::-1], strict=False))
        return np.broadcast_to(values, sizes) if fits else None

    def concat(self, scope: Scope, node: onnx.NodeProto, _place: int) -> Value | None:
        values, axis = self.operands(scope, node), integer_of(node, "axis", 0)
        rows = [each for each in values if isinstance(each, Row) and not each.column]
        if axis in _LAST and len(rows) == len(values):
            return Row(tuple(number for row in rows for number in row.numbers))
        matrices = [each for each in values if isinstance(each, np.ndarray) and each.ndim == 2]
        return np.concatenate(matrices) if axis == 2 and len(matrices) == len(values) else None

    def cast(self, scope: Scope, node: onnx.NodeProto, _place: int) -> Value | None:
        """The same numbers; what a narrower type would lose is for the caller to refuse."""
        row = self.value(scope, node.input[0])
        known = isinstance(row, Row) and integer_of(node, "to", 0) in FLOATS
        return row if known else None

    def transpose(self, scope: Scope, node: onnx.NodeProto, _place: int) -> Value | None:
        values = self.value(scope, node.input[0])
        swapped = isinstance(values, np.ndarray) and values.ndim == 2 and integers_of(node, "perm") == [0, 1, 3, 2]
        return values.T if swapped and isinstance(values, np.ndarray) else None

    def matmul(self, scope: Scope, node: onnx.NodeProto, _place: int) -> Value | None:
        row, matrix = self.operands(scope, node)
        if not isinstance(row, Row) or row.column or not isinstance(matrix, np.ndarray) or matrix.ndim != 2:
            return None
        if len(row.numbers) != len(matrix):
            return None
        return Row(
            tuple(
                total(
                    [mul(number, constant(float(weight))) for number, weight in zip(row.numbers, column, strict=True)]
                )
                for column in matrix.T
            )
        )

    def softmax(self, scope: Scope, node: onnx.NodeProto, _place: int) -> Value | None:
        row = self.value(scope, node.input[0])
        # Without an attribute the axis depends on the opset, and before 13 several axes were taken together.
        known = isinstance(row, Row) and not row.column and integer_of(node, "axis", None) in _LAST
        old = scope.model.opsets.get("", 0) < 13
        return Row(tuple(softmax(row.numbers))) if known and not old and isinstance(row, Row) else None

    def split(self, scope: Scope, node: onnx.NodeProto, place: int) -> Value | None:
        row = self.value(scope, node.input[0])
        sizes = scope.find(node.input[1]).values if len(node.input) > 1 else None
        if not isinstance(row, Row) or row.column or integer_of(node, "axis", 0) not in _LAST or sizes is None:
            return None
        start = int(sum(sizes[:place]))
        return Row(row.numbers[start : start + int(sizes[place])])

    def reduce_sum(self, scope: Scope, node: onnx.NodeProto, _place: int) -> Value | None:
        row = self.value(scope, node.input[0])
        kept = len(node.input) > 1 and _is_last_axis(scope, node) and integer_of(node, "keepdims", 1) == 1
        return Row((total(row.numbers),)) if kept and isinstance(row, Row) and not row.column else None

    def clip(self, scope: Scope, node: onnx.NodeProto, _place: int) -> Value | None:
        row = self.value(scope, node.input[0])
        ends: list[Expression | None] = [None, None]
        for place, name in enumerate(node.input[1:]):
            values = scope.find(name).values if name else None
            if name and (values is None or values.size != 1 or not np.isfinite(float(values.ravel()[0]))):
                return None
            if values is not None:
                ends[place] = constant(float(values.ravel()[0]))
        if not isinstance(row, Row) or row.column or node.attribute:
            return None
        return Row(tuple(clip(number, *ends) for number in row.numbers))

    def _elementwise(self, scope: Scope, node: onnx.NodeProto) -> Value | None:
        lists = [_as_list(each) for each in self.operands(scope, node)]
        known = [each for each in lists if each is not None]
        width = max(map(len, known), default=0)
        rows = any(isinstance(each, Row) for each in self.operands(scope, node))
        if len(known) < len(lists) or not rows or any(len(each) not in (1, width) for each in known):
            return None
        made = [
            scalar_operator(key_of(node), attributes(node), [each[k % len(each)] for each in known])
            for k in range(width)
        ]
        numbers = [each for each in made if each is not None]
        return Row(tuple(numbers)) if len(numbers) == width else None


def _as_list(value: Value | None) -> list[Expression] | None:
    if isinstance(value, Row):
        return None if value.column else list(value.numbers)
    if value is None or value.ndim > 1 or not np.isfinite(value.astype(np.float64)).all():
        return None
    return [constant(float(number)) for number in value.ravel()]


_SPECIAL = {
    ("", "Reshape"): _Rows.reshape,
    ("", "Unsqueeze"): _Rows.unsqueeze,
    ("", "Expand"): _Rows.expand,
    ("", "Cast"): _Rows.cast,
    ("", "Concat"): _Rows.concat,
    ("", "Transpose"): _Rows.transpose,
    ("", "MatMul"): _Rows.matmul,
    ("", "Softmax"): _Rows.softmax,
    ("", "Split"): _Rows.split,
    ("", "ReduceSum"): _Rows.reduce_sum,
    ("", "Clip"): _Rows.clip,
}


def _is_last_axis(scope: Scope, node: onnx.NodeProto) -> bool:
    """Whether the second operand is the last of four axes alone."""
    axes = scope.find(node.input[1]).values if len(node.input) > 1 else None
    return axes is not None and axes.size == 1 and int(axes.ravel()[0]) in _LAST


def _length(scope: Scope, name: str) -> int | None:
    """The number of entries of a shape that is put together from parts of other shapes."""
    tensor = scope.find(name)
    if tensor.constant is not None:
        return int(tensor.constant.dims[0]) if len(tensor.constant.dims) == 1 else None
    node = tensor.node
    if node is None:
        return None
    if key_of(node) == ("", "Concat"):
        lengths = [_length(tensor.scope, each) for each in node.input]
        return None if None in lengths else sum(each for each in lengths if each is not None)
    if key_of(node) != ("", "Slice"):
        return None
    ends: Sequence[np.ndarray | None] = [tensor.scope.find(each).values for each in node.input[1:3]]
    numbers = [int(each.ravel()[0]) for each in ends if each is not None and each.size == 1]
    if len(numbers) < 2 or len(node.input) > 4:
        return None
    start, stop = numbers
    if start < 0:
        return -start if stop > 2**30 else None
    return stop - start if 0 <= start <= stop < 2**30 else None
