"""Shapes at made-up sizes, so large and prime that every dimension tells the batch and the tokens in it.

Exporters compute the shape operand of a Reshape from other shapes. Computed once at these sizes, it says which axis
holds the tokens afterwards, and onnx infers the rest, one node at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from math import prod

import numpy as np
import onnx

from rewriter.graph.constants import Constants
from rewriter.graph.view import GraphView, LostError

BATCH, TOKENS = 10007, 1000003
"""The made-up numbers of sequences and of tokens in each. No dimension of a model is a multiple of either."""

BROADCAST = ("Add", "Sub", "Mul", "Div", "Pow", "Where")
"""Operators whose operands broadcast, where the stream may pass."""

Sizes = tuple[int | None, ...]
"""A shape; None for a size that is not known."""


def factors(size: int) -> tuple[int, int, int]:
    """A size as number, exponent of the batch and exponent of the tokens.

    Raises:
        LostError: it is no such product, such as N + 1.
    """
    powers = []
    for prime in (BATCH, TOKENS):
        powers.append(0)
        while size and size % prime == 0:
            size, powers[-1] = size // prime, powers[-1] + 1
    if size >= TOKENS:
        raise LostError("a size is neither a number nor a multiple of batch and tokens", "")
    return size, powers[0], powers[1]


def token_axes(sizes: Sizes) -> tuple[int, ...]:
    """The axes that hold tokens, counted from the end."""
    return tuple(axis - len(sizes) for axis, size in enumerate(sizes) if size and size % TOKENS == 0)


class Shapes:
    """The shapes of one view at made-up sizes.

    Attributes:
        view: the graph.
        known: shapes by tensor, to which callers may add those that they infer.
    """

    def __init__(self, view: GraphView, symbols: Mapping[str, int], unknown: int | None = None) -> None:
        """Give symbolic dimensions the sizes in `symbols`, and all others `unknown`."""
        self.view = view
        self.known: dict[str, Sizes] = {}
        self._symbols, self._unknown = symbols, unknown
        self._noted: dict[str, Sizes] = {}
        self._values = Constants(view, sizes=self.of)

    def of(self, tensor: str) -> Sizes | None:
        """The shape of a tensor, None where its rank is unknown."""
        for found in (self.known, self._noted):
            if tensor in found:
                return found[tensor]
        if tensor in self.view.initializers:
            return tuple(self.view.initializers[tensor].dims)
        shape = self.view.type_of(tensor).shape
        if shape is None:
            return None
        return tuple(dim if isinstance(dim, int) else self._symbols.get(dim or "", self._unknown) for dim in shape)

    def note(self, node: onnx.NodeProto) -> None:
        """Keep the shapes of a node's outputs, where type inference does not know them."""
        if any((sizes := self.of(name)) is None or None in sizes for name in node.output):
            with suppress(LostError):
                self._noted.update(zip(node.output, self.infer(node), strict=True))

    def numbers(self, tensor: str) -> list[int] | None:
        """The elements of a tensor of integers; None if they depend on anything but shapes."""
        try:
            return self._values.numbers(tensor)
        except Exception:  # noqa: BLE001 - onnx's evaluator raises of any kind; then they are not known
            return None

    def infer(self, node: onnx.NodeProto, fixed: int | None = None) -> list[Sizes]:
        """The shapes of a node's outputs.

        Args:
            node: the node.
            fixed: the number that exporters write for N where it is fixed. It means the tokens only where nothing else
                fits.

        Raises:
            LostError: they cannot be told.
        """
        if not self.view.is_onnx(node):  # such as a fused activation in a block
            return [self.of(node.input[0]) or ()] * len(node.output)
        found = self._inferred(node)
        if node.op_type in ("Reshape", "Expand"):
            found = self._inferred(node, fixed) if found is None and fixed is not None else found
            if found is None:
                raise LostError.at(node, "which axis of its shape holds the tokens is unknown")
        elif found is None and node.op_type in BROADCAST:
            # An operand that is not carried has as many rows as the tokens, whatever number that is: it is fixed, or a
            # part of a table that is shorter than the made-up sizes.
            found = [max((self.known[name] for name in node.input if name in self.known), key=len, default=())]
        if not found or any(not sizes for name, sizes in zip(node.output, found, strict=True) if name):
            raise LostError.at(node, "the shape of its output is unknown")
        return found

    def _integers(self, name: str) -> list[int] | None:
        return self.numbers(name) if self.view.type_of(name).elem_type in (onnx.TensorProto.INT64, 0) else None

    def _inferred(self, node: onnx.NodeProto, fixed: int | None = None) -> list[Sizes] | None:
        """What onnx infers, where shapes that are constants hold the number `fixed` for the tokens."""
        types, values = {}, {}
        for name in filter(None, node.input):
            elem_type, sizes = self.view.type_of(name).elem_type or onnx.TensorProto.FLOAT, self.of(name)
            types[name] = onnx.helper.make_tensor_type_proto(elem_type, sizes)
            integers = self._integers(name) if name not in self.known else None
            if integers is not None:
                array = np.asarray([TOKENS if number == fixed else number for number in integers], np.int64)
                values[name] = onnx.numpy_helper.from_array(array.reshape(() if sizes == () else -1), name)
        try:
            schema = onnx.defs.get_schema(node.op_type, self.view.opsets.get("", 1), node.domain)
            inferred = onnx.shape_inference.infer_node_outputs(schema, node, types, values)
        except Exception:  # noqa: BLE001 - the C++ inference raises bare exceptions on odd nodes; nothing is known then
            return None
        found: list[Sizes] = []
        for name in node.output:
            shape = inferred[name].tensor_type.shape if name in inferred else onnx.TensorShapeProto()
            found.append(tuple(dim.dim_value if dim.HasField("dim_value") else None for dim in shape.dim))
        entries = [prod(size or 0 for size in sizes) for sizes in (found[0], self.of(node.input[0]) or ())]
        fits = entries[0] == entries[1] if node.op_type == "Reshape" else node.op_type != "Expand" or entries[0]
        return found if fits else None
