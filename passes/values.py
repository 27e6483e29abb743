"""The values of constants, computed when they are asked for.

They are weights that nodes transpose or dequantise, and numbers computed from shapes. Unlike `rewriter.graph.constants`
this reads weights of any size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from passes.match.linear import Miss
from rewriter.graph.constants import Read
from rewriter.graph.view import GraphView, attributes, label

Array = NDArray[Any]
Sizes = Callable[[str], Sequence[int | None] | None]
"""The shape of a tensor; None for a size, or for the whole, that is not known."""

_DEPTH = 64
"""Longest chain of nodes that is followed."""


UNFIT = (ValueError, IndexError, KeyError, TypeError, StopIteration, OverflowError, MemoryError)
"""What numpy and attribute look-ups raise for a graph that no runtime would run."""


class LostError(Exception):
    """A tensor cannot be followed or computed.

    Attributes:
        miss: why, and at which node.
    """

    def __init__(self, reason: str, node: str) -> None:
        super().__init__(reason)
        self.miss = Miss(reason, node)


class Values:
    """Computes constants of one view in numpy; nothing is kept."""

    def __init__(self, view: GraphView, read: Read, sizes: Sizes) -> None:
        self._view = view
        self._read = read
        self._sizes = sizes

    def of(self, tensor: str, depth: int = 0) -> Array:
        """The value of a constant.

        Raises:
            LostError: it depends on the inputs, on an unknown size, or on an operator that is not in `_OPERATORS`.
        """
        if tensor in self._view.overridable:
            raise LostError("a caller may override it", tensor)
        if tensor in self._view.initializers:
            return self._read(self._view.initializers[tensor])
        node = self._view.made_by(tensor)
        if node is None or depth > _DEPTH:
            raise LostError("it is not constant", tensor)
        if not self._view.is_onnx(node):
            raise LostError("it is computed by an unknown operator", label(node))
        if node.op_type == "Shape":
            return self._shape(node)
        compute = _OPERATORS.get(node.op_type)
        if compute is None:
            raise LostError("it is not constant", label(node))
        given = attributes(node)
        if node.op_type == "Constant" and "value" in given:
            return self._read(given["value"])
        return np.asarray(compute([self.of(name, depth + 1) for name in node.input if name], given))

    def numbers(self, tensor: str) -> list[int]:
        """The elements of a constant as integers.

        Raises:
            LostError: as `of`, or an element depends on an unknown size.
        """
        value = np.asarray(self.of(tensor), dtype=np.float64).reshape(-1)
        if not np.isfinite(value).all():
            raise LostError("it depends on a size that is not known", tensor)
        return [int(number) for number in value]

    def _shape(self, node: onnx.NodeProto) -> Array:
        sizes = self._sizes(node.input[0])
        if sizes is None:
            raise LostError("the shape of its input is not known", label(node))
        given = attributes(node)
        # Unknown sizes are NaN, which whatever is computed from them then is too.
        known = np.array([np.nan if size is None else size for size in sizes], dtype=np.float64)
        known = known[given.get("start", 0) : given.get("end", len(known))]
        return known if np.isnan(known).any() else known.astype(np.int64)


def _constant(_: Sequence[Array], given: Mapping[str, Any]) -> Array:
    value = next(given[name] for name in ("value_float", "value_int", "value_floats", "value_ints") if name in given)
    return np.asarray(value, dtype=np.float32 if "float" in next(iter(given)) else np.int64)


def _cast(inputs: Sequence[Array], given: Mapping[str, Any]) -> Array:
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(given["to"]))
    return inputs[0] if dtype.kind in "iu" and np.isnan(inputs[0]).any() else inputs[0].astype(dtype)


def _axes(inputs: Sequence[Array], given: Mapping[str, Any]) -> list[int] | None:
    """The axes of Squeeze and Unsqueeze: an attribute before opset 13, an input since."""
    if len(inputs) > 1:
        return [int(axis) for axis in inputs[1].reshape(-1)]
    return list(given["axes"]) if "axes" in given else None


def _unsqueeze(inputs: Sequence[Array], given: Mapping[str, Any]) -> Array:
    return np.expand_dims(inputs[0], tuple(_axes(inputs, given) or ()))


def _squeeze(inputs: Sequence[Array], given: Mapping[str, Any]) -> Array:
    axes = _axes(inputs, given)
    return np.squeeze(inputs[0], None if axes is None else tuple(axes))


def _reshape(inputs: Sequence[Array], _: Mapping[str, Any]) -> Array:
    data, shape = inputs[0], [int(size) for size in inputs[1].reshape(-1)]
    return data.reshape([data.shape[axis] if size == 0 else size for axis, size in enumerate(shape)])


def _slice(inputs: Sequence[Array], given: Mapping[str, Any]) -> Array:
    bounds: list[list[int]] = [[int(number) for number in each.reshape(-1)] for each in inputs[1:]]
    if not bounds:
        bounds = [list(given[name]) for name in ("starts", "ends", "axes") if name in given]
    return sliced(inputs[0], bounds)


def sliced(data: Array, bounds: Sequence[Sequence[int]]) -> Array:
    """What ONNX Slice computes, for `bounds` of starts, ends, and perhaps axes and steps."""
    starts, ends, *rest = bounds
    axes = rest[0] if rest else range(len(starts))
    steps = rest[1] if len(rest) > 1 else [1] * len(starts)
    where = [slice(None)] * data.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        # A slice of numpy that runs backwards to the first element has no end; ONNX writes a very negative one.
        where[axis] = slice(start, None if step < 0 and end < -data.shape[axis] else end, step)
    return data[tuple(where)]


def _gather(inputs: Sequence[Array], given: Mapping[str, Any]) -> Array:
    return np.take(inputs[0], inputs[1].astype(np.int64), axis=given.get("axis", 0))


def _filled(inputs: Sequence[Array], given: Mapping[str, Any]) -> Array:
    value = onnx.numpy_helper.to_array(given["value"]) if "value" in given else np.zeros(1, np.float32)
    return np.broadcast_to(value.reshape(()), [int(size) for size in inputs[0].reshape(-1)])


def _divide(inputs: Sequence[Array], _: Mapping[str, Any]) -> Array:
    a, b = inputs
    if a.dtype.kind in "iu" and b.dtype.kind in "iu":
        return np.asarray(np.trunc(a / b).astype(a.dtype))
    return np.asarray(a / b)


def _dequantize(inputs: Sequence[Array], given: Mapping[str, Any]) -> Array:
    data, scale = inputs[0].astype(np.float32), inputs[1]
    zero = inputs[2].astype(np.float32) if len(inputs) > 2 else np.zeros((), np.float32)
    axis, block = given.get("axis", 1), given.get("block_size", 0)

    def spread(each: Array) -> Array:
        if each.ndim == 0 or each.size == 1:
            return each.reshape(())
        if block:
            return np.repeat(each, block, axis=axis)[tuple(slice(0, size) for size in data.shape)]
        return each.reshape([-1 if place == axis % data.ndim else 1 for place in range(data.ndim)])

    return np.asarray((data - spread(zero)) * spread(scale))


_OPERATORS: dict[str, Callable[[Sequence[Array], Mapping[str, Any]], Array]] = {
    "Constant": _constant,
    "Identity": lambda inputs, _: inputs[0],
    "Cast": _cast,
    "Transpose": lambda inputs, given: np.transpose(inputs[0], given.get("perm")),
    "Reshape": _reshape,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Slice": _slice,
    "Gather": _gather,
    "Concat": lambda inputs, given: np.concatenate([*inputs], axis=given["axis"]),
    "DequantizeLinear": _dequantize,
    "ConstantOfShape": _filled,
    "Equal": lambda inputs, _: inputs[0] == inputs[1],
    "Where": lambda inputs, _: np.where(*inputs),
    "Add": lambda inputs, _: inputs[0] + inputs[1],
    "Sub": lambda inputs, _: inputs[0] - inputs[1],
    "Mul": lambda inputs, _: inputs[0] * inputs[1],
    "Div": _divide,
    "Neg": lambda inputs, _: -inputs[0],
    "Sqrt": lambda inputs, _: np.sqrt(inputs[0]),
    "Reciprocal": lambda inputs, _: 1.0 / inputs[0],
    "Pow": lambda inputs, _: inputs[0] ** inputs[1],
}
