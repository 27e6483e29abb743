"""Check that every name is defined once, and before it is read.

A subgraph sees the names that are defined before its node in the graphs around it. As in onnx and onnxruntime, the
output of a node may not shadow any name in sight, while inputs and initializers of a subgraph may shadow outer ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx

from rewriter.errors import ModelError
from rewriter.files.soundness.order import sorted_order, sources_of
from rewriter.files.walk import subgraphs
from rewriter.text import quoted


class _Scope:
    __slots__ = ("names", "nodes", "parent")

    def __init__(self, nodes: Sequence[onnx.NodeProto], parent: _Scope | None) -> None:
        self.names: set[str] = set()
        self.nodes = nodes
        self.parent = parent

    def sees(self, name: str) -> bool:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.names:
                return True
            scope = scope.parent
        return False


def check_graph(graph: onnx.GraphProto, parent: _Scope | None = None) -> None:
    """Check the names and the order of a graph and its subgraphs. Raises ModelError."""
    scope = _Scope(graph.node, parent)
    _declare(scope, (value.name for value in graph.input), "graph input")
    # An initializer may share the name of an input: it is that input's default. So the two are checked apart.
    initializers = _Scope(graph.node, None)
    _declare(initializers, (tensor.name for tensor in graph.initializer), "initializer")
    _declare(initializers, (sparse.values.name for sparse in graph.sparse_initializer), "initializer")
    scope.names |= initializers.names
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if not isinstance(dim.dim_param, str):
                name = quoted(value.name)
                raise ModelError(
                    f"{quoted(dim.dim_param)}, a dimension of {name}, is not UTF-8; export the model again"
                )
    _check_nodes(scope)
    _check_outputs(scope, (value.name for value in graph.output), "graph output")


def check_function(function: onnx.FunctionProto) -> None:
    """Check the names and the order of a local function. Raises ModelError."""
    scope = _Scope(function.node, None)
    _declare(scope, function.input, "function input")
    _check_nodes(scope)
    _check_outputs(scope, function.output, "function output")


def _declare(scope: _Scope, names: Iterable[str], what: str) -> None:
    for name in names:
        if not name or not isinstance(name, str):
            raise ModelError(f"{what} has the unusable name {quoted(name)}; export the model again")
        if name in scope.names:
            raise ModelError(f"{what} {quoted(name)} is defined twice in one graph; export the model again")
        scope.names.add(name)


def _check_outputs(scope: _Scope, names: Iterable[str], what: str) -> None:
    for name in names:
        if name not in scope.names:
            raise ModelError(
                f"{what} {quoted(name)} is never defined in its graph; the file is damaged: export the model again"
            )


def _check_nodes(scope: _Scope) -> None:
    for node in scope.nodes:
        texts = (node.op_type, node.domain, node.name, *(attribute.name for attribute in node.attribute))
        if not node.op_type or not all(isinstance(text, str) for text in texts):
            raise ModelError(
                f"{_title(node)} of domain {quoted(node.domain)} has no usable operator, domain, name or attribute; "
                "export the model again"
            )
        for name in node.input:
            if name and not scope.sees(name):
                raise _unseen(name, node, scope)
        for graph in subgraphs(node) if node.attribute else ():
            check_graph(graph, scope)
        for name in node.output:
            if not name:
                continue
            if scope.sees(name) or not isinstance(name, str):
                raise ModelError(
                    f"{_title(node)} defines {quoted(name)} again, or its name is not UTF-8; a name may be "
                    "defined once (static single assignment): export the model again"
                )
            scope.names.add(name)


def _unseen(name: str, node: onnx.NodeProto, scope: _Scope) -> ModelError:
    # Only an error pays for the search: unknown, out of order and cyclic look alike until here, and need other advice.
    around: _Scope | None = scope
    while around is not None:
        if any(name in other.output for other in around.nodes):
            looping = _node_in_cycle(around.nodes)
            if looping is not None:
                return ModelError(
                    f"the graph has a cycle through {_title(looping)}, so it has no meaning; export the model again"
                )
            return ModelError(
                f"the nodes are not in topological order: {_title(node)} reads {quoted(name)} before it is "
                "produced; sort the graph (onnx_graphsurgeon: import_onnx, toposort, export_onnx) and "
                "save it again"
            )
        around = around.parent
    return ModelError(f"{_title(node)} reads {quoted(name)}, which is never defined; export the model again")


def _node_in_cycle(nodes: Sequence[onnx.NodeProto]) -> onnx.NodeProto | None:
    """Return a node that is part of a cycle, if there is one."""
    producer = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    reads = [sources_of(node, producer) for node in nodes]
    free = set(sorted_order(reads))
    stuck = next((index for index in range(len(nodes)) if index not in free), None)
    seen: set[int] = set()
    # A stuck node may merely be downstream of a cycle. It has a stuck producer, so walking up ends inside the cycle.
    while stuck is not None and stuck not in seen:
        seen.add(stuck)
        stuck = next(source for source in reads[stuck] if source not in free)
    return None if stuck is None else nodes[stuck]


def _title(node: onnx.NodeProto) -> str:
    return f"node {quoted(node.name)} ({quoted(node.op_type)})"
