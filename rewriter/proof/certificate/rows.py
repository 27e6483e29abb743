"""Rows of a tensor as functions of the rows of another: linear layers.

A layer is a MatMul or Gemm with constant weights, with or without an addition: x W + b for every row of x. Its rows are
compared without the axes in front of them; `extent` says which those are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import ml_dtypes
import numpy as np
import onnx

from rewriter.graph.types import Dim
from rewriter.graph.view import attributes, integer_of, integers_of, key_of
from rewriter.proof.certificate.constants import DEEPEST, Axes, before_casts, folded, holds, remembered, sizes, widens
from rewriter.proof.certificate.expressions import OPERATORS
from rewriter.proof.certificate.graphs import Scope, Tensor
from rewriter.proof.certificate.regions import FURTHER

ALLOWS_ZERO = 14
"""The operator set since which a 0 in the shape of a Reshape can be a size."""
_LAYOUT = {"Reshape", "Unsqueeze", "Squeeze", "Flatten"}
"""Operators that keep the entries of their first operand in order."""


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
    if node.op_type in ("MatMul", "Gemm"):
        given, weight = attributes(node), folded(scope.find(node.input[1]))
        plain = not given.get("transA") and given.get("alpha", 1.0) == given.get("beta", 1.0) == 1.0
        if weight is None or weight.ndim != 2 or not _real(weight) or not plain:
            return None
        weight = weight.T if given.get("transB") else weight
        layer = Layer(scope.find(node.input[0]), weight, np.zeros(weight.shape[1]))
        return _biased(layer, scope, node.input[2]) if len(node.input) > 2 and node.input[2] else layer
    if node.op_type != "Add" or scope.model.opsets.get("", 0) < 7:
        return None
    constant = [folded(scope.find(name)) is not None for name in node.input]
    if constant not in ([True, False], [False, True]):
        return None
    name, bias = node.input if constant[1] else node.input[::-1]
    found = read_layer(scope.find(name))
    return None if found is None else _biased(found, scope, bias)


def _biased(layer: Layer, scope: Scope, name: str) -> Layer | None:
    """The layer with a bias of its own; a second one is not added up, since the sum could round."""
    bias = folded(scope.find(name))
    if bias is None or bias.ndim > 1 or bias.size not in (1, len(layer.bias)) or not _real(bias) or layer.bias.any():
        return None
    return replace(layer, bias=np.broadcast_to(bias.astype(np.float64), layer.bias.shape))


def _real(values: np.ndarray) -> bool:
    kind = values.dtype.kind == "f" or values.dtype == ml_dtypes.bfloat16
    return kind and bool(np.isfinite(values.astype(np.float32) if values.dtype != np.float64 else values).all())


# -- the same entries ------------------------------------------------------------------------------------------------


def in_order(tensor: Tensor, kind: int = 0, *, shaped: bool = False) -> Tensor:
    """The first tensor with the same entries in the same order.

    `shaped`: the tensor itself has the shape of one with as many entries.
    Casts are passed that lose nothing, or less than the type `kind` would: that of the tensor, unless one is given.
    """
    kind = kind or tensor.elem_type
    while tensor.node is not None and tensor.place == 0:
        node, cast = tensor.node, key_of(tensor.node) == ("", "Cast")
        if not cast and (node.domain or node.op_type not in _LAYOUT or not runs(tensor, shaped=shaped)):
            break
        shaped = shaped and cast
        source = tensor.scope.find(node.input[0])
        if cast and not widens(source.elem_type, node) and not (widens(kind, node) and holds(source.elem_type, kind)):
            break
        tensor = source
    return tensor


def runs(tensor: Tensor, *, shaped: bool = False) -> bool:
    """Whether a layout operator runs at all sizes, 0 included; the original tells which sizes there are."""
    node, scope = tensor.node or onnx.NodeProto(), tensor.scope
    source = scope.find(node.input[0])
    known, made = source.type.shape, tensor.type.shape
    if scope.model.original or node.op_type in ("Unsqueeze", "Flatten"):
        return scope.model.original or made is not None
    if node.op_type == "Squeeze":
        return bool(known and made is not None and len(known) - len(made) == known.count(1) - made.count(1))
    width, zeros = extent(source).width, integer_of(node, "allowzero", False)
    if known:
        known = tuple(f"?{at}" if size is None else size for at, size in enumerate(known))
        known = known if width is None else (*known[:-1], width)
    shape = sizes(scope.find(node.input[1]))
    wanted = [None] if not shape else [dim for each in shape for dim in _dims(each, source, known)]
    if shaped and -1 not in wanted and (zeros or scope.model.opsets.get("", 0) < ALLOWS_ZERO):
        return True
    if not known:  # of any rank: only the last axis is known
        return width is not None and wanted[-2:] == [-1, width] and set(wanted[:-2]) <= {1}
    behind = wanted[1:]
    if None in wanted or (wanted[0] == -1 and 0 < len(behind) < len(known) - 1 and [*known[-len(behind) :]] == behind):
        return None not in wanted
    if wanted[-1] == known[-1]:  # channels, of which there are some
        wanted, known = wanted[:-1], known[:-1]
    copied = {at for at, size in enumerate(wanted[: len(known)]) if size == known[at] or (size == 0 and not zeros)}
    rest = [size for at, size in enumerate(wanted) if at not in copied]
    left = [size for at, size in enumerate(known) if at not in copied]
    entries = [size for size in rest if isinstance(size, int) and size > 0]
    fixed, inferred = [size for size in left if isinstance(size, int)], rest.count(-1)
    if len(entries) + inferred < len(rest) or inferred > 1:
        return False
    if not inferred:
        return len(fixed) == len(left) and prod(fixed) == prod(entries)
    return prod(fixed) % prod(entries) == 0 and all(isinstance(known[at], int) for at in copied)


def _dims(part: int | Axes, source: Tensor, known: Sequence[Dim] | None) -> Sequence[Dim]:
    """The sizes of a part of a shape, those of `source` being known; None for what is not known."""
    if not isinstance(part, Axes):
        return (part,)
    shape = known if before_casts(part.tensor) is before_casts(source) else part.tensor.type.shape
    return (None,) if shape is None else shape[part.start : part.stop]


def alike(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors are known to have the same shape."""
    first, *shapes = (tensor.type.shape for tensor in tensors)
    if first is not None and None not in first and all(shape == first for shape in shapes):
        return True
    return len({extent(tensor) for tensor in tensors}) == 1 and extent(tensors[0]).width is not None


# -- parts of the last axis, and its size ----------------------------------------------------------------------------


def part_of(tensor: Tensor) -> tuple[Tensor, slice] | None:
    """The tensor whose last axis is cut by a Split or Slice, and where; None for any other cut."""
    found = cut_of(tensor)
    if found is None:
        return None
    source, axis, cut = found
    rank = source.type.rank if source.scope.model.original else None
    return (source, cut) if axis == -1 or (rank is not None and axis == rank - 1) else None


def cut_of(tensor: Tensor) -> tuple[Tensor, int, slice] | None:
    """The tensor that is cut by a Split or Slice along an axis, the axis, and where; None for any other cut."""
    node, scope = tensor.node, tensor.scope
    if node is None or node.domain or node.op_type not in ("Split", "Slice"):
        return None
    source, numbers = scope.find(node.input[0]), list[list[int]]()
    for name in filter(None, node.input[1:]):
        number = _integers(scope.find(name))
        if number is None:
            return None
        numbers.append(number)
    if node.op_type == "Slice":
        plain = len(numbers) in (3, 4) and all(len(each) == 1 for each in numbers) and numbers[3:] in ([], [[1]])
        return (source, numbers[2][0], slice(numbers[0][0], numbers[1][0])) if plain else None
    parts, whole = numbers[0] if numbers else integers_of(node, "split") or [], extent(source).width
    if not parts and whole is not None and whole % len(node.output) == 0:
        parts = [whole // len(node.output)] * len(node.output)
    cut = slice(sum(parts[: tensor.place]), sum(parts[: tensor.place + 1]))
    return (source, integer_of(node, "axis", 0), cut) if parts else None


_ARITHMETIC: dict[str, Callable[[int, int], int]] = {"Add": operator.add, "Mul": operator.mul, "Div": operator.floordiv}


@remembered
def _integers(tensor: Tensor, depth: int) -> list[int] | None:
    """Constant integers, or what arithmetic makes of the size of a last axis."""
    shape = sizes(tensor)
    if shape is not None:
        found = [
            each if isinstance(each, int) else extent(each.tensor).width if each[1:] == (-1, None) else None
            for each in shape
        ]
        return None if None in found else [each for each in found if each is not None]
    node, scope = tensor.node, tensor.scope
    if node is None or node.domain or depth > DEEPEST or node.op_type not in _ARITHMETIC:
        return None
    one, two = (_integers(scope.find(name), depth + 1) for name in node.input)
    if one is None or two is None or len(one) != 1 or len(two) != 1 or min(*one, *two) < 0 or two == [0]:
        return None
    return [_ARITHMETIC[node.op_type](one[0], two[0])]


class Extent(NamedTuple):
    """The axes of a tensor, as far as operators here explain them.

    Attributes:
        front: the axes in front of the last: those of the first tensor upwards that is not explained.
        width: the size of the last axis; None where nothing says so.
    """

    front: Axes
    width: int | None = None


@remembered
def extent(tensor: Tensor, depth: int) -> Extent:
    """The axes of a tensor; the original's word about its sizes is taken."""
    found = (_extent(tensor, depth) if depth <= DEEPEST else None) or Extent(Axes(tensor, 0, -1))
    stated = (tensor.type.shape or (None,))[-1] if tensor.scope.model.original else None
    return found._replace(width=stated) if found.width is None and isinstance(stated, int) and stated > 0 else found


def _extent(tensor: Tensor, depth: int) -> Extent | None:
    node, scope, part = tensor.node, tensor.scope, part_of(tensor)
    if part is not None:
        whole = extent(part[0], depth + 1)
        return whole if whole.width is None else whole._replace(width=len(range(*part[1].indices(whole.width))))
    if node is None or tensor.place or (node.domain and key_of(node) not in OPERATORS):
        return None
    if node.op_type == "Reshape":
        shape = sizes(scope.find(node.input[1])) or [0]
        first, last = shape[0], shape[-1]
        alone = len(shape) == 2 and isinstance(first, Axes) and first.start == 0 and (first.stop or 0) > 1
        front = first if alone and isinstance(first, Axes) and isinstance(last, int) else Axes(tensor, 0, -1)
        return Extent(front, last if isinstance(last, int) and last > 0 else None)
    if node.op_type in ("MatMul", "Gemm"):
        weight, given = folded(scope.find(node.input[1])), attributes(node)
        if weight is None or weight.ndim != 2 or given.get("transA"):
            return None
        of_rows = extent(scope.find(node.input[0]), depth + 1)
        return of_rows._replace(width=int(weight.shape[0 if given.get("transB") else 1]))
    if key_of(node) not in OPERATORS and node.op_type not in FURTHER:
        return None
    operands = [scope.find(name) for name in node.input if name]
    axes = {each: _axes_of_number(each, depth) for each in operands}
    most = max((each.type.rank or 1 for each, size in axes.items() if size is None), default=1)
    values = [(each, folded(each)) for each, size in axes.items() if size is None or size > most]
    found = {extent(each, depth + 1) for each, value in values if value is None or value.ndim > 1}
    fronts, widths = {each.front for each in found}, {each.width for each in found}
    widths |= {value.size for _, value in values if value is not None and value.ndim <= 1}
    front = fronts.pop() if len(fronts) == 1 else Axes(tensor, 0, -1)
    return Extent(front, widths.pop() if len(widths) == 1 else None)


@remembered
def _axes_of_number(tensor: Tensor, depth: int) -> int | None:
    """How many axes a number that constants make has; None where it is anything else."""
    value, node = folded(tensor), tensor.node
    if value is not None or node is None or key_of(node) not in OPERATORS or depth > DEEPEST:
        return value.ndim if value is not None and value.size == 1 else None
    axes = [_axes_of_number(tensor.scope.find(name), depth + 1) for name in node.input if name]
    known = [each for each in axes if each is not None]
    return max(known) if known and len(known) == len(axes) else None
