"""A scope of a model with the static shapes that are known in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import onnx

from rewriter.graph.constants import Constants
from rewriter.graph.types import Dim
from rewriter.graph.view import GraphView, tensor_of, view_function

Shapes = Mapping[str, tuple[Dim, ...]]
_SAME_SHAPE = {"Identity", "Cast", "DequantizeLinear", "CastLike"}


@dataclass(frozen=True, eq=False)
class Scope:
    """A graph, a subgraph or the body of a called function.

    Attributes:
        view: its nodes.
        shapes: maps a tensor of this scope or an enclosing one to its shape, where known.
        functions: local functions of the model, by domain and name.
    """

    view: GraphView
    shapes: Shapes
    functions: Mapping[tuple[str, str], onnx.FunctionProto]

    @cached_property
    def constants(self) -> Constants:
        """Small constant values of this scope."""
        return Constants(self.view)

    def integer(self, tensor: str) -> int | None:
        """The value of a constant that is a single whole number; None for any other tensor."""
        value = self.constants.scalar(tensor)
        return int(value) if value is not None and value == int(value) else None

    def enter(self, function: onnx.FunctionProto, call: onnx.NodeProto) -> Scope:
        """The body of `function` in the context of `call`, whose arguments provide shapes."""
        view = view_function(function)
        pairs = zip(function.input, call.input, strict=False)
        given = {inner: self.shapes[outer] for inner, outer in pairs if outer in self.shapes}
        return replace(self, view=view, shapes=constant_shapes(view.nodes, (), given))


def constant_shapes(nodes: Iterable[onnx.NodeProto], initializers: Iterable[onnx.TensorProto], known: Shapes) -> Shapes:
    """`known` with the shapes of initializers and constants, also behind operators that keep the shape."""
    shapes = dict(known)
    shapes.update((tensor.name, tuple(tensor.dims)) for tensor in initializers)
    for node in nodes:
        if node.op_type == "Constant":
            value = tensor_of(node)
            if value is not None:
                shapes[node.output[0]] = tuple(value.dims)
        # A cast or dequantised weight has the shape of the weight.
        elif node.op_type in _SAME_SHAPE and node.input and node.input[0] in shapes and node.output:
            shapes.setdefault(node.output[0], shapes[node.input[0]])
    return shapes
