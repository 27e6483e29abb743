"""Resolve a name in a graph: to a node's output, a weight, an input, or a tensor of an enclosing graph.

Like onnxruntime, `Scope.find` looks a name up from the inside out. Bodies of control flow and of local functions are
scopes like the main graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx

from rewriter.files.load import LoadedModel


@dataclass(frozen=True)
class Definition:
    """What a name refers to.

    Attributes:
        depth: how many graphs further out it is defined.
        kind: `computed`, `a weight` (also the default of an input), `a sparse weight` or `an input`.
        dims: dims of a sparse weight; its tensors do not state them.
        tensors: its values: one tensor, or the values and indices of a sparse one.
    """

    depth: int
    kind: str
    dims: tuple[int, ...] = ()
    tensors: tuple[onnx.TensorProto, ...] = ()


@dataclass(frozen=True, eq=False)
class Scope:
    """One graph, or the body of a local function.

    Attributes:
        model: the model it belongs to.
        where: the empty string for the main graph, else a readable path.
        nodes: its nodes.
        inputs: what it declares as inputs; those of a function have no types.
        outputs: its outputs, likewise.
        makers: maps a tensor to the index of its producer.
        weights: initializers by name; one with the name of an input is that input's default.
        annotations: the graph's quantisation annotations.
        outer: the enclosing graph.
    """

    model: LoadedModel
    where: str
    nodes: tuple[onnx.NodeProto, ...]
    inputs: tuple[onnx.ValueInfoProto, ...]
    outputs: tuple[onnx.ValueInfoProto, ...]
    makers: Mapping[str, int]
    weights: Mapping[str, onnx.TensorProto | onnx.SparseTensorProto]
    annotations: frozenset[tuple[str, ...]] = frozenset()
    outer: Scope | None = None

    @classmethod
    def of_graph(cls, model: LoadedModel, graph: onnx.GraphProto, where: str = "", outer: Scope | None = None) -> Scope:
        """The scope of a graph."""
        # A sparse initializer has no name of its own: it is named by its values.
        nodes, sparse = tuple(graph.node), {tensor.values.name: tensor for tensor in graph.sparse_initializer}
        return cls(
            model=model,
            where=where,
            nodes=nodes,
            inputs=tuple(graph.input),
            outputs=tuple(graph.output),
            makers=_makers(nodes),
            weights={**{tensor.name: tensor for tensor in graph.initializer}, **sparse},
            annotations=frozenset(_annotation(entry) for entry in graph.quantization_annotation),
            outer=outer,
        )

    @classmethod
    def of_function(cls, model: LoadedModel, function: onnx.FunctionProto) -> Scope:
        """The scope of a function's body."""
        inputs, outputs = (
            tuple(onnx.ValueInfoProto(name=name) for name in names) for names in (function.input, function.output)
        )
        nodes = tuple(function.node)
        return cls(model, f"function {function.domain}::{function.name}", nodes, inputs, outputs, _makers(nodes), {})

    def find(self, name: str, depth: int = 0) -> Definition | None:
        """What `name` refers to here; None if it is undefined. `depth` is that of this scope."""
        if name in self.makers:
            return Definition(depth, "computed")
        # Before the inputs: an initializer of the same name is a default, and a changed default changes the outputs.
        weight = self.weights.get(name)
        if isinstance(weight, onnx.SparseTensorProto):
            return Definition(depth, "a sparse weight", tuple(weight.dims), (weight.values, weight.indices))
        if weight is not None:
            return Definition(depth, "a weight", tensors=(weight,))
        if any(value.name == name for value in self.inputs):
            return Definition(depth, "an input")
        return None if self.outer is None else self.outer.find(name, depth + 1)


def _makers(nodes: tuple[onnx.NodeProto, ...]) -> dict[str, int]:
    return {name: index for index, node in enumerate(nodes) for name in node.output if name}


def _annotation(entry: onnx.TensorAnnotation) -> tuple[str, ...]:
    parameters = sorted((item.key, item.value) for item in entry.quant_parameter_tensor_names)
    return entry.tensor_name, *(text for parameter in parameters for text in parameter)
