"""Rows of a tensor as functions of the rows of another: linear layers.

A layer is a MatMul or Gemm with constant weights, with or without an addition: x W + b for every row of x. Its rows are
compared without the axes in front of them; `front` says which those are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import onnx

from rewriter.graph.types import FLOATS
from rewriter.graph.view import attributes, integer_of, integers_of, key_of
from rewriter.proof.certificate.constants import (
    DEEPEST,
    Axes,
    folded,
    sizes,
)
from rewriter.proof.certificate.expressions import (
    OPERATORS,
    Expression,
    constant,
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
    return Layer(scope.find(name), weight, np.zeros(weight.shape[1]))


def _biased(layer: Layer, scope: Scope, name: str) -> Layer | None:
    """The layer with a bias of its own; a second one is not added up, since the sum could round."""
    bias = folded(scope.find(name))
    if bias is None or bias.ndim > 1 or bias.size not in (1, len(layer.bias)) or not _real(bias) or layer.bias.any():
        return None
    return replace(layer, bias=np.broadcast_to(bias.astype(np.float64), layer.bias.shape))


def _real(values: np.ndarray) -> bool:
    kind = values.dtype.kind == "f" or values.dtype == ml_dtypes.bfloat16
    return kind and bool(np.isfinite(values.astype(np.float32) if values.dtype != np.float64 else values).all())


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
        shape = [] if integer_of(node, "allowzero", False) else sizes(scope.find(node.input[1])) or []
        first = shape[0] if len(shape) == 2 and isinstance(shape[1], int) else 0
        return first if isinstance(first, Axes) and first.start == 0 and (first.stop or 0) > 1 else own
    if node.op_type in ("MatMul", "Gemm"):
        weight = folded(scope.find(node.input[1]))
        known = weight is not None and weight.ndim == 2 and not integer_of(node, "transA", False)
        return front(scope.find(node.input[0]), depth + 1) if known else own
    if not _entrywise(node) and tensor.name not in scope.rows:
        return own
    values = [(each, folded(each)) for each in (scope.find(name) for name in node.input if name)]
    found = {front(each, depth + 1) for each, value in values if value is None or value.ndim > 1}
    return found.pop() if len(found) == 1 else own


# -- casts and clips ---------------------------------------------------------------------------------------------------


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
