"""Changing models: new nodes in place of old ones, everything else byte for byte as it was; inlining of functions.

Nodes and constants are removed only if a replacement made them dead. What was dead before stays, so that a diff of the
two models shows nothing but the replacement.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

import onnx
import onnx.inliner

from rewriter.graph.view import GraphView, all_graphs, captured_names, graph_at, key_of, opsets, subgraphs

LOOSE_INITIALIZERS = 4
"""First IR version whose initializers need not be graph inputs; in older models a new one would change the signature,
so new constants become Constant nodes."""


@dataclass(frozen=True)
class Replacement:
    """A region and the nodes that replace it.

    Attributes:
        output: the tensor that the region produces; the new nodes produce a tensor of the same name.
        region: indices of the region's nodes in the view.
        nodes: the new nodes, in topological order.
        initializers: constants of the new nodes.
        functions: model-local functions that the new nodes call.
        further: replacements elsewhere in the same graph that must be applied together with this one.
        exposed: new tensors that become outputs, if the graph is the main one.
    """

    output: str
    region: tuple[int, ...]
    nodes: tuple[onnx.NodeProto, ...]
    initializers: tuple[onnx.TensorProto, ...]
    functions: tuple[onnx.FunctionProto, ...] = ()
    further: tuple[Replacement, ...] = ()
    exposed: tuple[onnx.ValueInfoProto, ...] = ()


def splice(model: onnx.ModelProto, view: GraphView, replacements: Sequence[Replacement]) -> None:
    """Apply all replacements to the graph of `model` that `view` indexes, which must not have changed since.

    A region node with another consumer (a node outside, a graph output, a subgraph) stays and keeps its value.
    """
    graph = graph_at(model, view.path)
    replacements = [part for replacement in replacements for part in (replacement, *replacement.further)]
    places = {view.producer[replacement.output]: replacement for replacement in replacements}
    dead = _dead_nodes(view, replacements, frozenset(places))
    # The new nodes go where the producer of the region's output was. Their operands all come from before that node and
    # the output's consumers all come after it, so the graph stays in topological order.
    merged: list[onnx.NodeProto] = []
    for index, node in enumerate(graph.node):
        if index in places:
            if model.ir_version < LOOSE_INITIALIZERS:
                merged.extend(_constant_node(tensor) for tensor in places[index].initializers)
            merged.extend(places[index].nodes)
        elif index not in dead:
            merged.append(node)
    # `merged` refers to messages of the repeated field, so they are copied before it is emptied.
    copies = [_copy(node) for node in merged]
    del graph.node[:]
    graph.node.extend(copies)
    _drop_unused(graph, _inputs_of(view, dead | set(places)))
    if model.ir_version >= LOOSE_INITIALIZERS:
        for replacement in replacements:
            graph.initializer.extend(replacement.initializers)
    if not view.path:
        graph.output.extend(value for replacement in replacements for value in replacement.exposed)
    _forget_gone(graph)
    _add_functions(model, [function for replacement in replacements for function in replacement.functions])


def _constant_node(tensor: onnx.TensorProto) -> onnx.NodeProto:
    return onnx.helper.make_node("Constant", [], [tensor.name], f"{tensor.name}/constant", value=tensor)


def _copy(node: onnx.NodeProto) -> onnx.NodeProto:
    duplicate = onnx.NodeProto()
    duplicate.CopyFrom(node)
    return duplicate


def _dead_nodes(view: GraphView, replacements: Sequence[Replacement], replaced: frozenset[int]) -> set[int]:
    """Nodes that are dead once the replacements are in place, by reference counting from the replaced nodes up."""
    uses: Counter[str] = Counter({name: len(readers) for name, readers in view.consumers.items()})
    for name in view.outputs:
        uses[name] += 1
    # Counted before anything is released: the new nodes usually read tensors that the old region read.
    for replacement in replacements:
        for node in replacement.nodes:
            uses.update(name for name in (*node.input, *captured_names(node)) if name)
    dead: set[int] = set()
    pending: list[int] = []

    def release(index: int) -> None:
        for name in view.nodes[index].input:
            if not name:
                continue
            uses[name] -= 1
            maker = view.producer.get(name)
            if uses[name] <= 0 and maker is not None:
                pending.append(maker)

    for index in sorted(replaced, reverse=True):
        release(index)
    while pending:
        index = pending.pop()
        node = view.nodes[index]
        if index in dead or index in replaced or any(uses[name] > 0 for name in node.output):
            continue
        dead.add(index)
        release(index)
    return dead


def _inputs_of(view: GraphView, nodes: Iterable[int]) -> frozenset[str]:
    return frozenset(name for index in nodes for name in view.nodes[index].input)


def _drop_unused(graph: onnx.GraphProto, candidates: frozenset[str]) -> None:
    """Remove initializers among `candidates` that are no longer read, unless a graph input declares them."""
    used = {name for node in graph.node for name in (*node.input, *captured_names(node))}
    used.update(value.name for value in (*graph.output, *graph.input))
    # In place and from the end: rebuilding the list would copy every weight.
    for position in reversed(range(len(graph.initializer))):
        name = graph.initializer[position].name
        if name in candidates and name not in used:
            del graph.initializer[position]


def drop_dead_constants(graph: onnx.GraphProto, tensors: frozenset[str]) -> None:
    """Remove the initializers and nodes that produce `tensors`, and what feeds them, where nothing reads them."""
    candidates = set(tensors)
    while True:
        used = {name for node in graph.node for name in (*node.input, *captured_names(node))}
        used.update(value.name for value in graph.output)
        dead = [
            position
            for position, node in enumerate(graph.node)
            if candidates.intersection(node.output) and not used.intersection(node.output)
        ]
        if not dead:
            break
        for position in reversed(dead):
            candidates.update(graph.node[position].input)
            del graph.node[position]
    _drop_unused(graph, frozenset(candidates))
    _forget_gone(graph)


def _forget_gone(graph: onnx.GraphProto) -> None:
    """Remove the value_info of tensors that no longer exist."""
    made = {name for node in graph.node for name in node.output}
    made.update(value.name for value in (*graph.initializer, *graph.input))
    forget_types(graph, {value.name for value in graph.value_info} - made)


def forget_types(graph: onnx.GraphProto, tensors: Container[str]) -> None:
    """Remove the value_info of some tensors, such as those whose shapes are others now."""
    kept = [value for value in graph.value_info if value.name not in tensors]
    if len(kept) < len(graph.value_info):
        del graph.value_info[:]
        graph.value_info.extend(kept)


def _add_functions(model: onnx.ModelProto, functions: Sequence[onnx.FunctionProto]) -> None:
    present = {(function.domain, function.name) for function in model.functions}
    for function in functions:
        if (function.domain, function.name) not in present:
            model.functions.append(function)
            present.add((function.domain, function.name))
    domains = {function.domain for function in functions}
    imported = {entry.domain for entry in model.opset_import}
    model.opset_import.extend(onnx.helper.make_opsetid(domain, 1) for domain in sorted(domains - imported))


# -- local functions, inlined as the runtime does -------------------------------------------------------------------


Name = tuple[str, str]
"""Domain and name of a function."""


def inlined(model: onnx.ModelProto, only: Collection[Name] | None = None) -> onnx.ModelProto:
    """A copy of the model without its local functions, or without those in `only`.

    Functions that import another operator set stay, and all of them if a call passes an attribute on that may be absent
    while the function that is called has a default for it: onnx cannot inline that.

    Raises:
        RuntimeError: one of `only` cannot be inlined.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    # onnx leaves out an attribute that a call does not give, default or not.
    sure = _state_defaults(copy)
    if only is None:
        return onnx.inliner.inline_local_functions(copy) if sure and copy.functions else copy
    if not sure:
        raise RuntimeError("a call passes an attribute on that may be absent")
    return onnx.inliner.inline_selected_functions(copy, list(only), exclude=False)


def _state_defaults(model: onnx.ModelProto) -> bool:
    """Let every call state the defaults of the attributes that it leaves out; False if that cannot be decided."""
    functions = {(each.domain, each.name, each.overload): each for each in model.functions}
    holders = [(list(model.graph.node), frozenset[str]())]
    holders += [(list(each.node), frozenset(each.attribute)) for each in model.functions]
    for nodes, unsure in holders:
        for node in all_nodes(nodes):
            called = functions.get((node.domain, node.op_type, node.overload))
            given = {attribute.name: attribute.ref_attr_name for attribute in node.attribute}
            for default in () if called is None else called.attribute_proto:
                if default.name not in given:
                    node.attribute.append(default)
                elif given[default.name] in unsure:
                    return False
    return True


def written_out(model: onnx.ModelProto, operator: str) -> tuple[onnx.ModelProto, tuple[str, ...]] | None:
    """A copy in which an operator of ONNX is written out as ONNX defines it, and so is what is defined by it.

    Returns the copy and the operators, as `Swish(25)`; None where the model has none of them, or ONNX no definition.
    """
    copy, found = inlined(model), set[str]()
    version = opsets(model.opset_import).get("", 1)
    for node in all_nodes(copy.graph.node):
        domain, name = key_of(node)
        if domain or not onnx.defs.has(name, version):
            continue
        schema = onnx.defs.get_schema(name, version)
        inner = [each.op_type for each in schema.function_body.node]  # empty where there is no definition
        if inner and operator in (name, *inner):
            found.add(name)
            stated = {attribute.name for attribute in node.attribute}
            defaults = [each.default_value for each in schema.attributes.values() if each.name not in stated]
            node.attribute.extend(default for default in defaults if default.type)  # onnx leaves them out
    if not found:
        return None
    taken = [("", name) for name in {*found, operator}]
    copy = onnx.inliner.inline_selected_functions(copy, taken, exclude=False, inline_schema_functions=True)
    return copy, tuple(f"{name}({version})" for name in sorted(found))


def all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """The nodes and those of their bodies."""
    for node in nodes:
        yield node
        yield from (inner for _, body in subgraphs(node) for graph in all_graphs(body) for inner in graph.node)
