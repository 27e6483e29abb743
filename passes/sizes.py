"""Shapes of all tensors at sizes that a caller chooses for symbolic dimensions.

Exporters compute the shape operand of a Reshape from other shapes; evaluated at these sizes, it shows which axis holds
the tokens. onnx infers the other shapes, one node at a time; the rest is as the file declares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

import numpy as np
import onnx

from rewriter.evaluate.scalar import BROADCAST
from rewriter.graph.constants import Constants, Read, small
from rewriter.graph.types import Dim, declared_types, inferred_graph, skeleton_of, type_of
from rewriter.graph.view import GraphView

TOKENS = 1000003  # a placeholder for a size that is not known: no dimension of a model is a multiple of it
Sizes = tuple[int | None, ...]  # a shape; None for a size that is not known


def shapes_at(model: onnx.ModelProto, view: GraphView, size_of: Callable[[int, str], int], read: Read) -> Shapes:
    """The shapes of the main graph if symbolic dimensions have the sizes `size_of(axis, name)`."""
    skeleton, symbols = skeleton_of(model), dict[str, int]()
    for value in skeleton.graph.input:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            name = dim.dim_param or f"{value.name}[{axis}]"
            if not dim.dim_value and name not in symbols:
                symbols[name] = size_of(axis, name)
            dim.dim_value = dim.dim_value or symbols[name]
    del skeleton.graph.value_info[:]  # declared shapes would override those inferred from these sizes
    for value in skeleton.graph.output:
        value.type.tensor_type.ClearField("shape")
    shapes = Shapes(view, symbols, read=read)
    for tensor, kind in declared_types(inferred_graph(skeleton)).items():
        sizes = tuple(dim for dim in kind.shape or () if isinstance(dim, int))
        if kind.shape is not None and len(sizes) == len(kind.shape):
            shapes.set(tensor, sizes)
    for node in view.nodes:  # where inference stopped
        shapes.note(node)
    return shapes


class Shapes:
    """The shapes of one view. `values` are computed from constants and shapes."""

    def __init__(
        self, view: GraphView, symbols: Mapping[str, int], unknown: int | None = None, read: Read = small
    ) -> None:
        """Symbolic dimensions have the sizes in `symbols`, others `unknown`."""
        self.view = view
        self._symbols, self._unknown = dict(symbols), unknown
        self._noted: dict[str, Sizes] = {}
        self.values = Constants(view, read, self.of)

    def of(self, tensor: str) -> Sizes | None:
        """None where the rank is unknown."""
        if tensor in self._noted:
            return self._noted[tensor]
        held = self.view.initializers.get(tensor)
        shape = self.view.type_of(tensor).shape if held is None else held.dims
        return None if shape is None else tuple(map(self._size, shape))

    def _size(self, dim: Dim) -> int | None:
        """The size of a dimension; the name of one may be a sum, such as `past_sequence_length + 1`."""
        if dim is None or isinstance(dim, int):
            return self._unknown if dim is None else dim
        terms = [int(each) if each.isdecimal() else self._symbols.get(each) for each in dim.split(" + ")]
        known = [term for term in terms if term is not None]
        return self._symbols.get(dim, sum(known) if len(known) == len(terms) else self._unknown)

    def set(self, tensor: str, sizes: Sizes) -> None:
        """Also sets the dimensions that it is declared with."""
        self._noted[tensor] = sizes
        declared = self.view.type_of(tensor).shape or ()
        for dim, size in zip(declared, sizes, strict=True) if len(declared) == len(sizes) else ():
            if isinstance(dim, str) and size is not None:
                self._symbols.setdefault(dim, size)

    def note(self, node: onnx.NodeProto) -> None:
        """Set the shapes of a node's outputs, where they are not known: inferred, or as declared."""
        if not any((sizes := self.of(name)) is None or None in sizes for name in node.output if name):
            return
        found = self._inferred(node) or [None] * len(node.output)
        # Operands that do not fit at these sizes, such as a mask that broadcasts at batch 1 only.
        longest = max((self.of(name) or () for name in node.input if node.op_type in BROADCAST), key=len, default=None)
        for name, inferred in zip(node.output, found, strict=True):
            stated = [sizes for sizes in (inferred, self.of(name), longest) if sizes is not None]
            alike = [sizes for sizes in stated if len(sizes) == len(stated[0])]
            if stated:
                known = [[size for size in axis if size is not None] for axis in zip(*alike, strict=True)]
                self.set(name, tuple(next(iter(sizes), None) for sizes in known))

    def numbers(self, tensor: str) -> list[int] | None:
        """The elements of a tensor of integers; None if they depend on more than shapes."""
        try:
            return self.values.numbers(tensor)
        except Exception:  # noqa: BLE001 - onnx's evaluator raises any exception; they are then unknown
            return None

    def _inferred(self, node: onnx.NodeProto) -> list[Sizes | None] | None:
        types, values = {}, {}
        for name in filter(None, node.input):
            elem_type, sizes = self.view.type_of(name).elem_type, self.of(name)
            types[name] = onnx.helper.make_tensor_type_proto(elem_type or onnx.TensorProto.FLOAT, sizes)
            integers = self.numbers(name) if elem_type in (onnx.TensorProto.INT64, 0) else None
            if integers is not None:
                array = np.asarray(integers, np.int64)
                values[name] = onnx.numpy_helper.from_array(array.reshape(() if sizes == () else -1), name)
        try:
            schema = onnx.defs.get_schema(node.op_type, self.view.opsets.get("", 1), node.domain)
            inferred = onnx.shape_inference.infer_node_outputs(schema, node, types, values)
        except Exception:  # noqa: BLE001 - the C++ inference raises bare exceptions on unusual nodes
            return None
        shapes = [type_of(inferred[name]).shape if name in inferred else None for name in node.output]
        found = [
            None if shape is None else tuple(dim if isinstance(dim, int) else None for dim in shape) for shape in shapes
        ]
        entries = [prod(size or 0 for size in sizes or ()) for sizes in (found[0], self.of(node.input[0]))]
        fits = entries[0] == entries[1] if node.op_type == "Reshape" else node.op_type != "Expand" or entries[0]
        return found if fits else None
