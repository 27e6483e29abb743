"""Symbolic sizes in terms of batch and tokens, and the shapes that a graph computes from them.

Exporters compute the shape operand of a Reshape from other shapes; reading it symbolically tells which axis holds the
tokens afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce

import onnx

from rewriter.graph.constants import Constants
from rewriter.graph.view import GraphView, attributes

_DEPTH = 40
"""Longest chain of shape arithmetic that is followed."""


@dataclass(frozen=True)
class Size:
    """`number * batch^batch * tokens^tokens`: one dimension."""

    number: int = 1
    batch: int = 0
    tokens: int = 0

    def __mul__(self, other: Size) -> Size:
        return Size(self.number * other.number, self.batch + other.batch, self.tokens + other.tokens)

    def over(self, other: Size) -> Size | None:
        """The quotient, None where `other` does not divide it."""
        # Sizes are monomials, so that one divides another exactly if its number and both exponents do.
        if other.number == 0 or self.number % other.number:
            return None
        exponents = self.batch - other.batch, self.tokens - other.tokens
        return Size(self.number // other.number, *exponents) if min(exponents) >= 0 else None

    @property
    def constant(self) -> bool:
        """Whether it is a plain number."""
        return not self.batch and not self.tokens


BATCH, TOKENS = Size(batch=1), Size(tokens=1)
REST = -1
"""The size that a Reshape infers from the number of elements."""

Sizes = tuple[Size | None, ...]
Element = Size | int | None
"""A size, a Reshape's `REST` or 0, or None for unknown."""


def product(sizes: Sizes) -> Size | None:
    """The number of elements, None where a size is unknown."""
    known = [size for size in sizes if size is not None]
    return reduce(Size.__mul__, known, Size()) if len(known) == len(sizes) else None


class ShapeReader:
    """Reads shapes, and tensors that hold them, symbolically.

    Attributes:
        view: the graph.
        carried: sizes of the carried tensors so far; the walk along the route adds to it.
    """

    def __init__(self, view: GraphView, constants: Constants, symbols: Mapping[str, Size]) -> None:
        self.view = view
        self._constants = constants
        self._symbols = symbols
        self.carried: dict[str, Sizes] = {}

    def sizes_of(self, tensor: str) -> Sizes | None:
        """The symbolic shape of a tensor, None where its rank is unknown."""
        if tensor in self.carried:
            return self.carried[tensor]
        shape = self.view.type_of(tensor).shape
        if shape is None:
            return None
        return tuple(Size(dim) if isinstance(dim, int) else self._symbols.get(dim or "") for dim in shape)

    def integers(self, tensor: str) -> list[int] | None:
        """The values of a constant tensor of integers."""
        value = self._constants.value(tensor) if tensor in self._constants else None
        return None if value is None else [int(number) for number in value.reshape(-1)]

    def elements(self, tensor: str, depth: int = 0) -> list[Element] | None:
        """The elements of a tensor of integers as symbolic sizes; None where not even their number is known."""
        known = self.integers(tensor)
        if known is not None:
            # 0 and -1 have a meaning of their own in a Reshape, and are kept as numbers.
            return [Size(number) if number > 0 else number for number in known]
        node = self.view.made_by(tensor)
        if node is None or depth > _DEPTH:
            return None
        # Unsqueeze and Squeeze of a scalar size do not change its elements, so shapes are read as flat lists.
        read = _READERS.get(node.op_type)
        return None if read is None else read(self, node, depth + 1)


Reader = Callable[[ShapeReader, onnx.NodeProto, int], list[Element] | None]


def _shape(reader: ShapeReader, node: onnx.NodeProto, _depth: int) -> list[Element] | None:
    sizes = reader.sizes_of(node.input[0])
    if sizes is None:
        return None
    given = attributes(node)
    start, end = given.get("start", 0), given.get("end", len(sizes))
    every: list[Element] = list(sizes)
    return every[start:end] if isinstance(start, int) and isinstance(end, int) else None


def _same(reader: ShapeReader, node: onnx.NodeProto, depth: int) -> list[Element] | None:
    return reader.elements(node.input[0], depth)


def _concat(reader: ShapeReader, node: onnx.NodeProto, depth: int) -> list[Element] | None:
    parts = [reader.elements(name, depth) for name in node.input]
    known = [part for part in parts if part is not None]
    return [element for part in known for element in part] if len(known) == len(parts) else None


def _gather(reader: ShapeReader, node: onnx.NodeProto, depth: int) -> list[Element] | None:
    data, rows = reader.elements(node.input[0], depth), reader.integers(node.input[1])
    if data is None or rows is None or not all(-len(data) <= row < len(data) for row in rows):
        return None
    return [data[row] for row in rows]


def _slice(reader: ShapeReader, node: onnx.NodeProto, depth: int) -> list[Element] | None:
    data = reader.elements(node.input[0], depth)
    bounds = [reader.integers(name) for name in node.input[1:]]
    if data is None or any(bound is None or len(bound) != 1 for bound in bounds) or len(bounds) < 2:
        return None
    start, end, *rest = [bound[0] for bound in bounds if bound is not None]
    return data[slice(start, end, rest[1] if len(rest) > 1 else 1)]


def _arithmetic(combine: Callable[[Size, Size], Size | None]) -> Reader:
    """A reader for elementwise arithmetic; elements that are not sizes give None."""

    def read(reader: ShapeReader, node: onnx.NodeProto, depth: int) -> list[Element] | None:
        left, right = (reader.elements(name, depth) for name in node.input)
        if left is None or right is None or len(left) != len(right):
            return None
        pairs = zip(left, right, strict=True)
        return [combine(a, b) if isinstance(a, Size) and isinstance(b, Size) else None for a, b in pairs]

    return read


def _sum(left: Size, right: Size) -> Size | None:
    # N + 1 has no place in `Size`; shapes that a residual stream is given do not contain it.
    return Size(left.number + right.number) if left.constant and right.constant else None


def _quotient(left: Size, right: Size) -> Size | None:
    """The integer quotient, rounded down for plain numbers."""
    if left.constant and right.constant and right.number > 0:
        return Size(left.number // right.number)
    return left.over(right)


def _where(reader: ShapeReader, node: onnx.NodeProto, depth: int) -> list[Element] | None:
    """`Where(s == -1, ones, s)`, which exporters put in front of Expand: s, where it holds no -1."""
    # -1 in an Expand of PyTorch means: keep this size. A symbolic size is never -1, whatever the test says.
    test = reader.view.made_by(node.input[0])
    elements = reader.elements(node.input[2], depth)
    if test is None or test.op_type != "Equal" or node.input[2] not in test.input or elements is None:
        return None
    return [element if isinstance(element, Size) else None for element in elements]


_READERS: dict[str, Reader] = {
    "Shape": _shape,
    "Concat": _concat,
    "Gather": _gather,
    "Slice": _slice,
    "Add": _arithmetic(_sum),
    "Mul": _arithmetic(Size.__mul__),
    "Div": _arithmetic(_quotient),
    "Where": _where,
    **dict.fromkeys(("Cast", "Identity", "Unsqueeze", "Squeeze", "Reshape"), _same),
}
"""Operator type to its reader; exporters compute shapes with these."""
