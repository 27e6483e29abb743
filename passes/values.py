"""The values of constants, computed by onnx's reference implementation when they are asked for.

They are weights that nodes transpose or dequantise, and numbers computed from shapes. Unlike `rewriter.graph.constants`
this reads weights of any size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from passes.match.linear import Miss
from rewriter.graph.constants import Read, computed
from rewriter.graph.view import GraphView, attributes, label

Array = NDArray[Any]
Sizes = Callable[[str], Sequence[int | None] | None]
"""The shape of a tensor; None for a size, or for the whole, that is not known."""

_SMALL, _LARGEST = 1024, 2**31
"""Elements of the largest value that is kept, and of the largest that is computed."""

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

    @classmethod
    def at(cls, node: onnx.NodeProto, reason: str) -> LostError:
        """The error at a node, which its message names."""
        return cls(f"{label(node)}: {reason}", label(node))


class Values:
    """Computes constants of one view; only small ones are kept."""

    def __init__(self, view: GraphView, read: Read, sizes: Sizes) -> None:
        self._view = view
        self._read = read
        self._sizes = sizes
        self._kept: dict[str, Array] = {}

    def of(self, tensor: str, depth: int = 0) -> Array:
        """The value of a constant.

        Raises:
            LostError: it depends on the inputs, on an unknown size, or on an operator that is not in `_OPERATORS`.
        """
        if tensor not in self._kept:
            value = self._computed(tensor, depth)
            if value.size > _SMALL:
                return value
            self._kept[tensor] = value
        return self._kept[tensor]

    def _computed(self, tensor: str, depth: int) -> Array:
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
        if node.op_type not in _OPERATORS:
            raise LostError("it is not constant", label(node))
        given = attributes(node)
        if node.op_type == "Constant" and "value" in given:
            return self._read(given["value"])
        operands = {name: self.of(name, depth + 1) for name in node.input if name}
        first = next(iter(operands.values()), np.empty(0))
        if node.op_type == "ConstantOfShape":
            value = onnx.numpy_helper.to_array(given["value"]) if "value" in given else np.zeros(1, np.float32)
            sizes = [int(size) for size in first.reshape(-1)]
            if prod(sizes) > _LARGEST:
                raise LostError("it is larger than any weight", label(node))
            return np.broadcast_to(value.reshape(()), sizes)
        if node.op_type == "Cast" and np.isnan(first).any():
            return first  # a size that is not known, which no integer stands for
        return np.asarray(computed([node], operands, node.output[:1], {"": self._view.opsets.get("", 1)})[0])

    def numbers(self, tensor: str) -> list[int]:
        """The elements of a constant as integers.

        Raises:
            LostError: as `of`, or an element depends on an unknown size.
        """
        value = np.asarray(self.of(tensor)).reshape(-1)
        if value.dtype.kind not in "iub" and not np.isfinite(value.astype(np.float64)).all():
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


_OPERATORS = frozenset(
    [
        *("Constant", "Identity", "Cast", "Transpose", "Reshape", "Unsqueeze", "Squeeze", "Slice", "Gather", "Concat"),
        *("DequantizeLinear", "ConstantOfShape", "Equal", "Where", "Add", "Sub", "Mul", "Div", "Neg", "Sqrt"),
        *("Reciprocal", "Pow"),
    ]
)
"""Operators whose output is not larger than their operands, but for ConstantOfShape."""
