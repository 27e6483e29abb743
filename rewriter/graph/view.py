"""A frozen index of one graph: who makes and who reads each tensor.

Comes in: a GraphProto or FunctionProto that nobody changes while the view lives. Goes out: `GraphView`,
which every matcher reads instead of the protobuf. Building it is one pass over the nodes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import onnx

from rewriter.graph.types import TensorType, infer_types

ONNX_DOMAINS = ("", "ai.onnx")
"""Spellings of the default operator domain."""


@dataclass(frozen=True, eq=False)
class GraphView:
    """One scope of a model, indexed.

    Attributes:
        where: the empty string for the main graph, else a readable path such as `If_3/then_branch`.
        nodes: the nodes in topological order; everything below refers to them by index.
        producer: tensor name to the index of the node that writes it.
        consumers: tensor name to the indices of the nodes that read it, a node once per input that reads
            it; a node whose subgraph captures the tensor counts once.
        initializers: tensor name to initializer; their bytes are never touched here.
        overridable: initializers that are graph inputs too, so that a caller may replace them.
        inputs: names of the graph's inputs, without those that only declare an initializer.
        outputs: names of the graph's outputs.
        types: tensor name to element type and shape, as far as inference knows them.
        opsets: operator domain to version, the default domain under the empty string.
    """

    where: str
    nodes: tuple[onnx.NodeProto, ...]
    producer: Mapping[str, int]
    consumers: Mapping[str, tuple[int, ...]]
    initializers: Mapping[str, onnx.TensorProto]
    overridable: frozenset[str]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    types: Mapping[str, TensorType]
    opsets: Mapping[str, int]
    captured: frozenset[str] = field(default=frozenset())

    def made_by(self, tensor: str) -> onnx.NodeProto | None:
        """The node that writes `tensor`, or None for inputs, initializers and unknown names."""
        index = self.producer.get(tensor)
        return None if index is None else self.nodes[index]

    def type_of(self, tensor: str) -> TensorType:
        """Element type and shape of `tensor`; unknown parts are 0 and None."""
        return self.types.get(tensor, TensorType.UNKNOWN)

    def is_onnx(self, node: onnx.NodeProto) -> bool:
        """Whether `node` belongs to the default operator domain."""
        return node.domain in ONNX_DOMAINS


def label(node: onnx.NodeProto) -> str:
    """How messages name a node: its operator, and its name or first output."""
    operator = node.op_type if node.domain in ONNX_DOMAINS else f"{node.domain}::{node.op_type}"
    name = node.name or (node.output[0] if node.output else "")
    return f"{operator} '{name}'"


def view_model(model: onnx.ModelProto) -> GraphView:
    """Index the main graph of `model`, with inferred types."""
    return view_graph(model.graph, opsets(model.opset_import), types=infer_types(model))


def view_graph(
    graph: onnx.GraphProto,
    opset_versions: Mapping[str, int],
    *,
    where: str = "",
    types: Mapping[str, TensorType] | None = None,
    outer: Mapping[str, onnx.TensorProto] | None = None,
) -> GraphView:
    """Index one graph: the main graph, or a subgraph that also sees the `outer` initializers."""
    initializers = {**(outer or {}), **{tensor.name: tensor for tensor in graph.initializer}}
    declared = tuple(value.name for value in graph.input)
    return _index(
        where,
        tuple(graph.node),
        initializers=initializers,
        inputs=declared,
        outputs=tuple(value.name for value in graph.output),
        types=types or {},
        opset_versions=opset_versions,
    )


def view_function(function: onnx.FunctionProto) -> GraphView:
    """Index the body of a model-local function; its tensors have no known types."""
    return _index(
        f"function {function.domain}::{function.name}",
        tuple(function.node),
        initializers={},
        inputs=tuple(function.input),
        outputs=tuple(function.output),
        types={},
        opset_versions=opsets(function.opset_import),
    )


def opsets(imports: Sequence[onnx.OperatorSetIdProto]) -> dict[str, int]:
    """Operator domain to imported version; the default domain under the empty string."""
    return {"" if entry.domain in ONNX_DOMAINS else entry.domain: entry.version for entry in imports}


def subgraphs(node: onnx.NodeProto) -> Iterator[tuple[str, onnx.GraphProto]]:
    """The graphs held by a node's attributes (If, Loop, Scan), with the attribute's name."""
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.name, attribute.g
        elif attribute.type == onnx.AttributeProto.GRAPHS:
            for position, graph in enumerate(attribute.graphs):
                yield f"{attribute.name}[{position}]", graph


def inner_views(model: onnx.ModelProto) -> Iterator[GraphView]:
    """Views of every scope other than the main graph: bodies of control flow and of local functions."""
    pending = [view_graph(model.graph, opsets(model.opset_import))]
    for function in model.functions:
        view = view_function(function)
        yield view
        pending.append(view)
    while pending:
        outer = pending.pop()
        for node in outer.nodes:
            for attribute, graph in subgraphs(node):
                path = "/".join(part for part in (outer.where, node.name or node.op_type, attribute) if part)
                inner = view_graph(graph, outer.opsets, where=path, outer=outer.initializers)
                yield inner
                pending.append(inner)


def captured_names(node: onnx.NodeProto) -> frozenset[str]:
    """Names that the subgraphs of `node` may read from the scopes around them."""
    names: set[str] = set()
    pending = [graph for _, graph in subgraphs(node)]
    while pending:
        graph = pending.pop()
        for inner in graph.node:
            names.update(inner.input)
            pending.extend(body for _, body in subgraphs(inner))
        names.update(value.name for value in graph.output)
    return frozenset(names)


def _index(
    where: str,
    nodes: tuple[onnx.NodeProto, ...],
    *,
    initializers: Mapping[str, onnx.TensorProto],
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    types: Mapping[str, TensorType],
    opset_versions: Mapping[str, int],
) -> GraphView:
    producer: dict[str, int] = {}
    consumers: dict[str, list[int]] = defaultdict(list)
    captured: set[str] = set()
    for index, node in enumerate(nodes):
        for name in node.output:
            if name:
                producer[name] = index
        for name in node.input:
            if name:
                consumers[name].append(index)
        for name in captured_names(node):
            consumers[name].append(index)
            captured.add(name)
    return GraphView(
        where=where,
        nodes=nodes,
        producer=producer,
        consumers={name: tuple(readers) for name, readers in consumers.items()},
        initializers=initializers,
        overridable=frozenset(initializers).intersection(inputs),
        inputs=tuple(name for name in inputs if name not in initializers),
        outputs=outputs,
        types=types,
        opsets=opset_versions,
        captured=frozenset(captured),
    )
