"""Shapes of all tensors at sizes that a caller chooses for symbolic dimensions.

Exporters compute the shape operand of a Reshape from other shapes; evaluated at these sizes, it shows which axis holds
the tokens. onnx infers shapes one node at a time, from such operands; where it cannot, they are as the file declares.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np
import onnx

from rewriter.evaluate.scalar import BROADCAST
from rewriter.graph.constants import Constants, Read
from rewriter.graph.types import Dim, terms_of, type_of
from rewriter.graph.view import GraphView

Sizes = tuple[int | None, ...]  # a shape; None for a size that is not known


class Shapes:
    """The shapes of a main graph. `values` are computed from constants and shapes."""

    def __init__(self, view: GraphView, size_of: Callable[[int, str], int], read: Read) -> None:
        """Symbolic dimensions of the inputs have the sizes `size_of(axis, name)`."""
        self._view, self._symbols, self._found = view, {"": 1}, dict[str, Sizes]()
        self.values = Constants(view, read, self.of)
        for tensor in view.inputs:
            shape = view.type_of(tensor).shape
            dims = [dim or f"{tensor}[{axis}]" for axis, dim in enumerate(shape or ())]
            for axis, dim in enumerate(dims):
                if isinstance(dim, str):
                    self._symbols.setdefault(dim, size_of(axis, dim))
            if shape is not None:
                self._found[tensor] = tuple(map(self._size, dims))
        for node in view.nodes:
            self._find(node)

    def of(self, tensor: str) -> Sizes | None:
        """None where the rank is unknown."""
        if tensor in self._found:
            return self._found[tensor]
        shape = self._view.type_of(tensor).shape
        return None if shape is None else tuple(map(self._size, shape))

    def _size(self, dim: Dim) -> int | None:
        """The size of a dimension, which may be a sum of names, such as `past_sequence_length + 1`."""
        if dim is None or isinstance(dim, int):
            return dim
        terms = {dim: 1} if dim in self._symbols else terms_of(dim)
        known = terms.keys() <= self._symbols.keys()
        return sum(count * self._symbols[name] for name, count in terms.items()) if known else None

    def _find(self, node: onnx.NodeProto) -> None:
        """The shapes of a node's outputs: inferred, or as declared."""
        found = self._inferred(node) or [None] * len(node.output)
        # Operands that do not fit at these sizes, such as a mask that broadcasts at batch 1 only.
        longest = max((self.of(name) or () for name in node.input if node.op_type in BROADCAST), key=len, default=None)
        for name, inferred in zip(node.output, found, strict=True):
            stated = [sizes for sizes in (inferred, self.of(name), longest) if sizes is not None]
            alike = [sizes for sizes in stated if len(sizes) == len(stated[0])]
            if stated:
                known = [[size for size in axis if size is not None] for axis in zip(*alike, strict=True)]
                self._found[name] = tuple(next(iter(sizes), None) for sizes in known)

    def _inferred(self, node: onnx.NodeProto) -> list[Sizes | None] | None:
        types, values = {}, {}
        for name in filter(None, node.input):
            elem_type, sizes = self._view.type_of(name).elem_type, self.of(name)
            types[name] = onnx.helper.make_tensor_type_proto(elem_type or onnx.TensorProto.FLOAT, sizes)
            integers = self.values.numbers(name) if elem_type in (onnx.TensorProto.INT64, 0) else None
            if integers is not None:
                array = np.asarray(integers, np.int64)
                values[name] = onnx.numpy_helper.from_array(array.reshape(() if sizes == () else -1), name)
        try:
            schema = onnx.defs.get_schema(node.op_type, self._view.opsets.get("", 1), node.domain)
            inferred = onnx.shape_inference.infer_node_outputs(schema, node, types, values)
        except Exception:  # noqa: BLE001 - the C++ inference raises bare exceptions on unusual nodes
            return None
        shapes = [type_of(inferred[name]).shape if name in inferred else None for name in node.output]
        found = [
            None if shape is None else tuple(dim if isinstance(dim, int) else None for dim in shape) for shape in shapes
        ]
        entries = [prod(size or 0 for size in sizes or ()) for sizes in (found[0], *map(self.of, node.input[:1]))]
        fits = entries[0] == entries[-1] if node.op_type == "Reshape" else node.op_type != "Expand" or entries[0]
        return found if fits else None
