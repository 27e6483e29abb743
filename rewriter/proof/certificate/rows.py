"""Rows of a tensor as functions of the rows of another: linear layers, and attention over a static axis of keys.

A layer is a MatMul or Gemm with constant weights, with or without an addition, of x or of x beside a column of ones,
whose row of the weights is then the bias: x W + b for every row of x. Its rows are compared without the axes in front
of them; `front` says which those are.

Form `compact`, and `local` with an operator Softmax, lay the entries y of a tensor out as rows, compute K numbers for
each (logits against K keys, their softmax, values), and return one number per entry, in order. Reshape keeps entries in
order, and everything between works on the last axis with the same K numbers for all rows. Where `local` returns to the
shape of y, `compact` has y as heads of [batch, tokens, heads, 1], projected by a layer, and returns to
[batch, tokens, heads]; there nothing may have widened the first two axes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import onnx

from rewriter.graph.types import FLOATS
from rewriter.graph.view import attributes, integer_of, integers_of, key_of
from rewriter.proof.certificate.constants import (
    DEEPEST,
    Axes,
    Sizes,
    folded,
    rank,
    sizes,
    whole_shape,
    widens,
)
from rewriter.proof.certificate.expressions import (
    OPERATORS,
    Expression,
    clip,
    constant,
    leaf,
    mul,
    ordered,
    scalar_operator,
    softmax,
    total,
)
from rewriter.proof.certificate.graphs import Scope, Tensor

_MOST_KEYS = 4096


@dataclass(frozen=True, eq=False)
class Layer:
    """What a tensor is of the rows of another.

    Attributes:
        source: the tensor x; its entries in order, cut into rows of `len(weight)`.
        weight: W [in, out].
        bias: b [out].
    """

    source: Tensor
    weight: np.ndarray
    bias: np.ndarray

    def equals(self, other: Layer) -> bool:
        """Whether weights and bias are the same real numbers."""
        return np.array_equal(self.weight, other.weight) and np.array_equal(self.bias, other.bias)


def read_layer(tensor: Tensor) -> Layer | None:
    """The tensor as x W + b; None for anything else, and where a weight is not constant."""
    node, scope = tensor.node, tensor.scope
    if node is None or node.domain:
        return None
    part = part_of(tensor)
    if part is not None:
        whole = read_layer(part[0])
        return None if whole is None else Layer(whole.source, whole.weight[:, part[1]], whole.bias[part[1]])
    if tensor.place:
        return None
    if node.op_type == "MatMul":
        return _product(scope, node.input[0], folded(scope.find(node.input[1])))
    if node.op_type == "Gemm":
        given = attributes(node)
        weight = folded(scope.find(node.input[1]))
        if weight is None or given.get("transA", 0) or given.get("alpha", 1.0) != 1.0 or given.get("beta", 1.0) != 1.0:
            return None
        layer = _product(scope, node.input[0], weight.T if given.get("transB", 0) else weight)
        return (
            layer if layer is None or len(node.input) < 3 or not node.input[2] else _biased(layer, scope, node.input[2])
        )
    if node.op_type != "Add" or scope.model.opsets.get("", 0) < 7:
        return None
    for name, other in (node.input, node.input[::-1]):
        layer = None if folded(scope.find(other)) is None else read_layer(scope.find(name))
        if layer is not None:
            return _biased(layer, scope, other)
    return None


def _product(scope: Scope, name: str, weight: np.ndarray | None) -> Layer | None:
    if weight is None or weight.ndim != 2 or not _real(weight):
        return None
    source = scope.find(name)
    beside = _beside_ones(source)
    if beside is None:
        return Layer(source, weight, np.zeros(weight.shape[1]))
    return Layer(beside, weight[:-1], weight[-1].astype(np.float64))


def _biased(layer: Layer, scope: Scope, name: str) -> Layer | None:
    """The layer with a bias of its own; a second one is not added up, since the sum could round."""
    bias = folded(scope.find(name))
    if bias is None or bias.ndim > 1 or bias.size not in (1, len(layer.bias)) or not _real(bias) or layer.bias.any():
        return None
    return replace(layer, bias=np.broadcast_to(bias.astype(np.float64), layer.bias.shape))


def _real(values: np.ndarray) -> bool:
    kind = values.dtype.kind == "f" or values.dtype == ml_dtypes.bfloat16
    return kind and bool(np.isfinite(values.astype(np.float32) if values.dtype != np.float64 else values).all())


def _beside_ones(tensor: Tensor) -> Tensor | None:
    """x of [batch, tokens, width] with one column of ones behind its last axis; None for any other tensor."""
    node, scope = tensor.node, tensor.scope
    while node is not None and key_of(node) == ("", "Cast") and widens(scope.find(node.input[0]).elem_type, node):
        tensor = scope.find(node.input[0])
        node, scope = tensor.node, tensor.scope
    if node is None or key_of(node) != ("", "Concat") or len(node.input) != 2:
        return None
    column = scope.find(node.input[1])
    if column.node is None or key_of(column.node) != ("", "Expand") or integer_of(node, "axis", 0) not in (2, -1):
        return None
    value, shape = column.scope.find(column.node.input[0]).values, sizes(column.scope.find(column.node.input[1]))
    # Three axes and a last one of size 1: what stands beside it has three axes as well.
    single = value is not None and value.size == 1 and value.ndim <= 3 and float(value.ravel()[0]) == 1.0
    return scope.find(node.input[0]) if single and shape and rank(shape) == 3 and shape[-1] == 1 else None


# -- parts of the last axis, and its size ----------------------------------------------------------------------------


def part_of(tensor: Tensor) -> tuple[Tensor, slice] | None:
    """The tensor whose last axis is cut by a Split or Slice, and where; None for any other cut."""
    node, scope = tensor.node, tensor.scope
    if node is None or node.domain or node.op_type not in ("Split", "Slice"):
        return None
    source = scope.find(node.input[0])
    given = [_integers(scope.find(name)) for name in node.input[1:] if name]
    if any(each is None for each in given):
        return None
    numbers = [each for each in given if each is not None]
    axis: int | None
    if node.op_type == "Split":
        axis, whole = integer_of(node, "axis", 0), width(source)
        parts = numbers[0] if numbers else integers_of(node, "split") or []
        if not parts and whole is not None and whole % len(node.output) == 0:
            parts = [whole // len(node.output)] * len(node.output)
        cut = slice(sum(parts[: tensor.place]), sum(parts[: tensor.place + 1])) if parts else None
    else:
        plain = len(numbers) in (3, 4) and all(len(each) == 1 for each in numbers) and numbers[3:] in ([], [[1]])
        axis = numbers[2][0] if plain else None
        cut = slice(numbers[0][0], numbers[1][0]) if plain else None
    types = scope.types.get(source.name)
    known = types.rank if types is not None and scope.model.original else None
    last = axis is not None and (axis == -1 or (known is not None and axis == known - 1))
    return (source, cut) if last and cut is not None else None


_ARITHMETIC: dict[str, Callable[[int, int], int]] = {"Add": operator.add, "Mul": operator.mul, "Div": operator.floordiv}


def _integers(tensor: Tensor, depth: int = 0) -> list[int] | None:
    """Constant integers, or what arithmetic makes of the size of a last axis."""
    shape = sizes(tensor)
    if shape is not None:
        found = [
            each if isinstance(each, int) else width(each.tensor) if each[1:] == (-1, None) else None for each in shape
        ]
        return None if None in found else [each for each in found if each is not None]
    node, scope = tensor.node, tensor.scope
    if node is None or node.domain or depth > DEEPEST or node.op_type not in _ARITHMETIC:
        return None
    one, two = (_integers(scope.find(name), depth + 1) for name in node.input)
    if one is None or two is None or len(one) != 1 or len(two) != 1 or min(*one, *two) < 0 or two == [0]:
        return None
    return [_ARITHMETIC[node.op_type](one[0], two[0])]


def width(tensor: Tensor, depth: int = 0) -> int | None:
    """The size of the last axis, as far as operators here say so."""
    part = part_of(tensor)
    if part is not None and depth <= DEEPEST:
        whole = width(part[0], depth + 1)
        return None if whole is None else len(range(*part[1].indices(whole)))
    node, scope = tensor.node, tensor.scope
    if node is None or node.domain or tensor.place or depth > DEEPEST:
        return None
    if node.op_type == "Reshape":
        shape = sizes(scope.find(node.input[1]))
        return shape[-1] if shape and isinstance(shape[-1], int) and shape[-1] > 0 else None
    if node.op_type in ("MatMul", "Gemm"):
        weight = folded(scope.find(node.input[1]))
        known = weight is not None and weight.ndim == 2
        return int(weight.shape[0 if attributes(node).get("transB") else 1]) if known and weight is not None else None
    if not _entrywise(node) and tensor.name not in scope.rows:
        return None
    found = set()
    for each in (scope.find(name) for name in node.input if name):
        value = folded(each)
        if value is None or value.ndim > 1:
            found.add(width(each, depth + 1))
        elif value.size != 1:
            found.add(value.size)
    return found.pop() if len(found) == 1 else None


def _entrywise(node: onnx.NodeProto) -> bool:
    return key_of(node) in OPERATORS or key_of(node) in (("", "Cast"), ("", "Clip"))


# -- the axes in front of the last -----------------------------------------------------------------------------------


def front(tensor: Tensor, depth: int = 0) -> Axes:
    """The axes in front of the last: those of the first tensor upwards that an operator here does not explain.

    Of heads [batch, tokens, heads, ...] they are the first two.
    """
    known: dict[Tensor, Axes] = tensor.scope.fronts
    if tensor not in known:
        known[tensor] = _front(tensor, depth)
    return known[tensor]


def _front(tensor: Tensor, depth: int) -> Axes:
    node, scope = tensor.node, tensor.scope
    own, part = Axes(tensor, 0, -1), part_of(tensor)
    if part is not None and depth <= DEEPEST:
        return front(part[0], depth + 1)
    if node is None or tensor.place or node.domain or depth > DEEPEST:
        return own
    if node.op_type == "Reshape":
        return _front_of_reshape(tensor, node, depth)
    if node.op_type == "Concat":
        source = _beside_ones(tensor)
        return own if source is None else front(source, depth + 1)
    if node.op_type in ("MatMul", "Gemm"):
        weight = folded(scope.find(node.input[1]))
        known = weight is not None and weight.ndim == 2 and not integer_of(node, "transA", False)
        return front(scope.find(node.input[0]), depth + 1) if known else own
    if not _entrywise(node) and tensor.name not in scope.rows:
        return own
    values = [(each, folded(each)) for each in (scope.find(name) for name in node.input if name)]
    found = {front(each, depth + 1) for each, value in values if value is None or value.ndim > 1}
    return found.pop() if len(found) == 1 else own


def _front_of_reshape(tensor: Tensor, node: onnx.NodeProto, depth: int) -> Axes:
    own, shape = Axes(tensor, 0, -1), sizes(tensor.scope.find(node.input[1]))
    if shape is None or integer_of(node, "allowzero", False):
        return own
    if len(shape) == 3 and shape[:2] == [0, 0]:
        heads = _Rows(lambda _: leaf(0), depth + 1)
        found = heads.value(tensor.scope, node.input[0])
        return own if found is None or not heads.heads else heads.front(found) or own
    first = shape[0] if len(shape) == 2 and isinstance(shape[1], int) else 0
    return first if isinstance(first, Axes) and first.start == 0 and (first.stop or 0) > 1 else own


# -- attention over a static axis of keys ----------------------------------------------------------------------------


class Numbers(NamedTuple):
    """A tensor whose last axis is that of keys.

    Attributes:
        values: expressions: of each entry, for [keys], or alone while there is no such axis yet; or constants of at
            most two axes, which are the same for all entries.
        each: whether there are such numbers for each entry.
        like: tensors with the axes in front, as `front` says; of heads the first two.
    """

    values: np.ndarray
    each: bool
    like: frozenset[Tensor] = frozenset()

    @property
    def row(self) -> bool:
        """Whether each entry has a row of numbers."""
        return self.each and self.values.ndim == 1

    @property
    def single(self) -> bool:
        """Whether it is a constant matrix with one entry."""
        return self.matrix and self.values.size == 1

    @property
    def matrix(self) -> bool:
        """Whether it is a constant matrix, the same for all entries."""
        return not self.each and self.values.ndim == 2


class Keys(NamedTuple):
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
    if found is None or not found.each or found.values.size != 1:
        return None
    expression: Expression = found.values.item()
    # Every tensor whose entries were laid out must have its say: none may have cancelled.
    used = {part for part in ordered(expression) if part.operator == "leaf"}
    if not rows.laid_out <= used:
        return None
    if rows.heads:
        whole = [sizes(shape)] == [[0, 0, heads] for heads in rows.heads] and rows.front(found) is not None
    else:
        measured = whole_shape(shape)
        whole = measured is not None and leaf(before_casts(measured)) in used
    return Keys(expression, tuple(rows.inside), len(used) > 1) if whole else None


def clip_ends(scope: Scope, node: onnx.NodeProto) -> tuple[Expression | None, Expression | None] | None:
    """Both ends of a Clip, None for an infinite one; None for a Clip that is not read."""
    ends: list[Expression | None] = []
    for place, (name, nowhere) in enumerate((("min", -np.inf), ("max", np.inf)), 1):
        given = node.input[place] if len(node.input) > place else ""
        numbers = scope.find(given).values if given else np.array(attributes(node).get(name, nowhere))
        if numbers is None or numbers.size != 1 or np.isnan(end := float(numbers.ravel()[0])) or end == -nowhere:
            return None
        ends.append(None if np.isinf(end) else constant(end))
    return ends[0], ends[1]


def before_casts(tensor: Tensor, passed: list[Tensor] | None = None) -> Tensor:
    """The tensor that casts between floating-point types make this one of; these are added to `passed`."""
    while tensor.node is not None and key_of(tensor.node) == ("", "Cast") and tensor.elem_type in FLOATS:
        source = tensor.scope.find(tensor.node.input[0])
        if source.elem_type not in FLOATS:
            break
        if passed is not None:
            passed.append(tensor)
        tensor = source
    return tensor


_LAST = (3, -1)


class _Rows:
    """Reads tensors with an axis of keys.

    Attributes:
        inside: the tensors that were read.
        laid_out: the leaves whose entries became rows.
        heads: the numbers of heads that a layer was projected to.
    """

    def __init__(self, leaf: Callable[[Tensor], Expression], depth: int = 0) -> None:
        self._leaf = leaf
        self._known: dict[Tensor, Numbers | None] = {}
        self._depth = depth
        self.inside: list[Tensor] = []
        self.laid_out: set[Expression] = set()
        self.heads: set[int] = set()

    def front(self, numbers: Numbers) -> Axes | None:
        """The first two axes of heads; None where they are not those of one tensor."""
        found = {front(each, self._depth + 1) for each in numbers.like}
        return found.pop() if len(found) == 1 else None

    def value(self, scope: Scope, name: str) -> Numbers | None:
        tensor = scope.find(name) if name else None
        if tensor is None or self._depth > DEEPEST:
            return None
        if tensor not in self._known:
            self._depth += 1
            self._known[tensor] = self._read(tensor)
            self._depth -= 1
        return self._known[tensor]

    def _read(self, tensor: Tensor) -> Numbers | None:
        values = tensor.values
        if values is not None:
            real = values.dtype.kind == "f" and values.ndim <= 2 and np.isfinite(values).all()
            exact = [constant(float(number)) for number in values.ravel()] if real else []
            return Numbers(objects(exact).reshape(values.shape), each=False) if real else None
        if tensor.node is None:
            return None
        self.inside.append(tensor)
        key = key_of(tensor.node)
        special = _SPECIAL.get(key)
        if special is not None:
            return special(self, tensor, tensor.scope, tensor.node)
        return self._elementwise(tensor.scope, tensor.node) if key in OPERATORS and tensor.place == 0 else None

    def _first(self, scope: Scope, node: onnx.NodeProto) -> Numbers:
        """The first operand, a row for each entry, or one without numbers."""
        found = self.value(scope, node.input[0])
        return found if found is not None and found.row else Numbers(objects([]), each=False)

    def reshape(self, tensor: Tensor, scope: Scope, node: onnx.NodeProto) -> Numbers | None:
        """Entries in order, in three axes; or those of [batch, tokens, heads] as [batch, tokens, heads, 1]."""
        source, shape = scope.find(node.input[0]), sizes(scope.find(node.input[1]))
        if shape is not None and len(shape) == 4 and shape[:2] == [0, 0]:
            return self._heads(source, shape)
        if rank(shape) != 3:
            return None
        source = before_casts(source, self.inside)
        self.laid_out.add(self._leaf(source))
        return Numbers(objects([self._leaf(source)]).reshape(()), True, frozenset((tensor,)))

    def _heads(self, source: Tensor, shape: Sizes) -> Numbers | None:
        """The projections of a stream by heads; where no weight reads x, the same constants for all tokens."""
        layer, (heads, size) = read_layer(source), shape[2:]
        if layer is None or not isinstance(heads, int) or not isinstance(size, int) or layer.bias.size != heads * size:
            return None
        node = source.node
        if node is None or key_of(node) != ("", "MatMul") or _beside_ones(source.scope.find(node.input[0])) is None:
            return None  # its axes need not be three
        like = frozenset((source,))
        if not layer.weight.any():
            bias = objects([constant(float(number)) for number in layer.bias])
            return Numbers(bias.reshape(1, size), False, like) if heads == 1 else None
        if size != 1:
            return None
        self.laid_out.add(self._leaf(source))
        self.heads.add(heads)
        return Numbers(objects([self._leaf(source)]), True, like)

    def unsqueeze(self, _tensor: Tensor, scope: Scope, node: onnx.NodeProto) -> Numbers | None:
        found = self.value(scope, node.input[0])
        entries = found is not None and found.each and found.values.ndim == 0 and _is_last_axis(scope, node)
        return found._replace(values=found.values.reshape(1)) if entries and found is not None else None

    def expand(self, tensor: Tensor, scope: Scope, node: onnx.NodeProto) -> Numbers | None:
        found, shape = self.value(scope, node.input[0]), sizes(scope.find(node.input[1]))
        if found is None or found.each or not shape:
            return None
        like = whole_shape(scope.find(node.input[1]))
        if like is not None:
            other = self.value(like.scope, like.name) if found.values.ndim == 0 else None
            return other._replace(values=np.repeat(found.values, len(other.values))) if other and other.row else None
        ends = [each for each in shape[-2:] if isinstance(each, int)]
        fits = rank(shape) == 4 and len(ends) == 2 and max(ends) <= _MOST_KEYS
        fits = fits and all(a in (1, b) for a, b in zip(found.values.shape[::-1], ends[::-1], strict=False))
        if not fits:
            return None
        first = shape[0]
        known = isinstance(first, Axes) and first[1:] == (0, 2)  # of the tensor that the heads' stream begins with
        source = first.tensor if known and isinstance(first, Axes) else tensor
        return Numbers(np.broadcast_to(found.values, ends), False, frozenset((source,)))

    def concat(self, _tensor: Tensor, scope: Scope, node: onnx.NodeProto) -> Numbers | None:
        values, axis = [self.value(scope, name) for name in node.input], integer_of(node, "axis", 0)
        found = [each for each in values if each is not None and (each.row if axis in _LAST else each.matrix)]
        if len(found) < len(values) or axis not in (*_LAST, 2):
            return None
        return Numbers(np.concatenate([each.values for each in found]), axis != 2, _all_like(found))

    def cast(self, _tensor: Tensor, scope: Scope, node: onnx.NodeProto) -> Numbers | None:
        """The same numbers; what a narrower type would lose is for the caller to refuse."""
        found = self.value(scope, node.input[0])
        return found if found is not None and found.each and integer_of(node, "to", 0) in FLOATS else None

    def transpose(self, _tensor: Tensor, scope: Scope, node: onnx.NodeProto) -> Numbers | None:
        found = self.value(scope, node.input[0])
        swapped = found is not None and found.matrix and integers_of(node, "perm") == [0, 1, 3, 2]
        return found._replace(values=found.values.T) if swapped and found is not None else None

    def matmul(self, _tensor: Tensor, scope: Scope, node: onnx.NodeProto) -> Numbers | None:
        row = self._first(scope, node)
        matrix = self.value(scope, node.input[1]) if row.row else None
        if matrix is None or not matrix.matrix or len(row.values) != len(matrix.values):
            return None
        sums = [total([mul(*pair) for pair in zip(row.values, column, strict=True)]) for column in matrix.values.T]
        return Numbers(objects(sums), True, _all_like((row, matrix)))

    def softmax(self, _tensor: Tensor, scope: Scope, node: onnx.NodeProto) -> Numbers | None:
        row = self._first(scope, node)
        # Without an attribute the axis depends on the opset. Of the last axis, all versions say the same.
        known = row.row and integer_of(node, "axis", None) in _LAST
        return row._replace(values=objects(softmax(list(row.values)))) if known else None

    def split(self, tensor: Tensor, scope: Scope, node: onnx.NodeProto) -> Numbers | None:
        row, place = self._first(scope, node), tensor.place
        parts = scope.find(node.input[1]).values if len(node.input) > 1 else integers_of(node, "split")
        if not row.row or integer_of(node, "axis", 0) not in _LAST or parts is None:
            return None
        start = int(sum(parts[:place]))
        return row._replace(values=row.values[start : start + int(parts[place])])

    def reduce_sum(self, _tensor: Tensor, scope: Scope, node: onnx.NodeProto) -> Numbers | None:
        row = self._first(scope, node)
        kept = row.row and _is_last_axis(scope, node) and integer_of(node, "keepdims", 1) == 1
        return row._replace(values=objects([total(list(row.values))])) if kept else None

    def clip(self, _tensor: Tensor, scope: Scope, node: onnx.NodeProto) -> Numbers | None:
        row, ends = self._first(scope, node), clip_ends(scope, node)
        return row._replace(values=objects([clip(each, *ends) for each in row.values])) if row.row and ends else None

    def _elementwise(self, scope: Scope, node: onnx.NodeProto) -> Numbers | None:
        found: list[Numbers] = []
        for name in node.input:
            value = self.value(scope, name)
            if value is None:
                return None
            found.append(value)
        each = any(value.each for value in found)
        # One number for all tokens and heads.
        found = [value._replace(values=value.values.reshape(1)) if value.single else value for value in found]
        if each and not all(value.row if value.each else value.values.ndim < 2 for value in found):
            return None
        try:
            operands = np.broadcast_arrays(*(value.values for value in found))
        except ValueError:
            return None
        made = [
            scalar_operator(key_of(node), attributes(node), of)
            for of in zip(*(x.ravel() for x in operands), strict=True)
        ]
        known = [number for number in made if number is not None]
        return (
            Numbers(objects(known).reshape(operands[0].shape), each, _all_like(found))
            if len(known) == len(made)
            else None
        )


def objects(numbers: Sequence[Any]) -> np.ndarray:
    """A vector of Python objects."""
    return np.array([*numbers, None], dtype=object)[:-1]


def _all_like(found: Sequence[Numbers]) -> frozenset[Tensor]:
    return frozenset().union(*(each.like for each in found))


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
    """Whether the axes of a node, an operand or before opset 13 an attribute, are the last of four alone."""
    axes = scope.find(node.input[1]).values if len(node.input) > 1 else integers_of(node, "axes")
    return axes is not None and len(found := np.ravel(axes)) == 1 and int(found[0]) in _LAST
