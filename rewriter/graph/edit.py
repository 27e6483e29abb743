"""Editing models: new nodes in place of old ones, parts as separate models, and inlining of functions.

What is not replaced is unchanged byte for byte. Nodes and constants are removed only if a replacement makes them dead.
Nodes that were dead before stay, so that a diff of the two models shows only the replacement.
"""

from collections.abc import Collection, Container, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import prod

import onnx
import onnx.inliner
from onnx.helper import make_node, make_opsetid

from rewriter.graph.types import forget_types
from rewriter.graph.view import GraphView, graph_at, key_of, opsets
from rewriter.graph.walk import iter_nodes, own_names, reached, reads

LOOSE_INITIALIZERS = 4
"""First IR version whose initializers need not be graph inputs; in older models a new one would change the signature,
so new constants become Constant nodes."""


@dataclass(frozen=True)
class Replacement:
    """New nodes, in topological order, that produce `output` in place of a region."""

    output: str
    nodes: tuple[onnx.NodeProto, ...]
    initializers: tuple[onnx.TensorProto, ...]
    functions: tuple[onnx.FunctionProto, ...] = ()
    further: "tuple[Replacement, ...]" = ()  # elsewhere in the same graph, to be applied together with this one
    exposed: tuple[onnx.ValueInfoProto, ...] = ()  # new tensors that become outputs, if the graph is the main one


def splice(model: onnx.ModelProto, view: GraphView, replacements: Sequence[Replacement]) -> None:
    """Apply all replacements to the graph of `model` that `view` indexes, which must not have changed since.

    A region node with another consumer (a node outside, a graph output, a subgraph) stays and keeps its value.
    """
    graph = graph_at(model, view.path)
    replacements = [part for replacement in replacements for part in (replacement, *replacement.further)]
    places = {view.producer[replacement.output]: replacement for replacement in replacements}
    unread = {name for index in places for name in view.nodes[index].input}
    # The new nodes go where the producer of the region's output was. Their operands all come from before that node and
    # the output's consumers all come after it, so the graph stays in topological order.
    merged: list[onnx.NodeProto] = []
    for index, node in enumerate(graph.node):
        part = places.get(index)
        constants = part.initializers if part is not None and model.ir_version < LOOSE_INITIALIZERS else ()
        merged += (make_node("Constant", [], [each.name], f"{each.name}/constant", value=each) for each in constants)
        merged += [node] if part is None else part.nodes
    set_nodes(graph, merged)
    drop_dead(graph, unread, kept={name for part in replacements for node in part.nodes for name in node.output})
    if model.ir_version >= LOOSE_INITIALIZERS:
        for replacement in replacements:
            graph.initializer.extend(replacement.initializers)
    if not view.path:
        graph.output.extend(value for replacement in replacements for value in replacement.exposed)
    functions = {(each.domain, each.name): each for replacement in replacements for each in replacement.functions}
    present = {(each.domain, each.name) for each in model.functions}
    model.functions.extend(function for key, function in functions.items() if key not in present)
    missing = {domain for domain, _ in functions} - {entry.domain for entry in model.opset_import}
    model.opset_import.extend(make_opsetid(domain, 1) for domain in sorted(missing))


def set_nodes(graph: onnx.GraphProto, nodes: Iterable[onnx.NodeProto]) -> None:
    """Give a graph other nodes, some of which may be its own: they are copied before the field is emptied."""
    copies = [deepcopy(node) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)


def rename_output(graph: onnx.GraphProto, tensor: str, name: str) -> int:
    """Rename a node's output and return its index. Raises KeyError."""
    for index, node in enumerate(graph.node):
        if tensor in node.output:
            node.output[list(node.output).index(tensor)] = name
            return index
    raise KeyError(tensor)


def drop_dead(graph: onnx.GraphProto, tensors: Iterable[str], kept: Container[str] = ()) -> None:
    """Remove the producers of `tensors`, and their ancestors, as far as they have no readers.

    A node that was dead before still counts as a reader. Producers of the tensors in `kept` and initializers that a
    graph input declares stay.
    """
    unread, used = set(tensors), {value.name for value in graph.output}
    for index, node in reversed([*enumerate(graph.node)]):  # readers come before what they read
        if used.isdisjoint(node.output) and any(name in unread and name not in kept for name in node.output):
            unread.update(reads(node))
            del graph.node[index]
        else:
            used.update(reads(node))
    # In place and from the end: rebuilding the list would copy every weight.
    unread -= used.union(value.name for value in graph.input)
    for index in reversed(range(len(graph.initializer))):
        if graph.initializer[index].name in unread:
            del graph.initializer[index]
    forget_types(graph, {value.name for value in graph.value_info} - own_names(graph))


# -- parts as separate models with only the weights that they need ----------------------------------------------------


@dataclass(frozen=True)
class Cut:
    """The nodes of a part, and its interface."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[int, ...]  # indices, in graph order


def between(view: GraphView, inputs: Sequence[str], outputs: Sequence[str]) -> list[int]:
    """The nodes between `inputs` and `outputs` that depend on an input, and the constants that they need."""
    above, depends = ancestors(view, frozenset(inputs), outputs), set(inputs)
    for index in sorted(above):
        node = view.nodes[index]
        depends.update(() if depends.isdisjoint(reads(node)) else node.output)
    # Not past a tensor from elsewhere, such as a mask, to the constants that it is computed from.
    outside = {name for index in above for name in view.nodes[index].output} - depends - view.constants
    return sorted(ancestors(view, outside.union(inputs), outputs))


def extract(model: onnx.ModelProto, view: GraphView, part: Cut) -> onnx.ModelProto:
    """The part as a model with the opsets, IR version and functions of `model`, and only the weights it needs."""
    result = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
    graph = result.graph
    graph.name = "part"
    graph.node.extend(view.nodes[index] for index in part.nodes)
    needed = {name for node in graph.node for name in reads(node)} | set(part.outputs)
    graph.initializer.extend(view.initializers[name] for name in sorted(needed) if name in view.initializers)
    graph.input.extend(_value(view, name) for name in part.inputs if name in needed)
    graph.output.extend(_value(view, name) for name in part.outputs)
    return result


def with_outputs(model: onnx.ModelProto, view: GraphView, tensors: Sequence[str]) -> onnx.ModelProto:
    """A copy of `model` with `tensors` as further outputs; itself if all of them are outputs or inputs."""
    inside = [name for name in dict.fromkeys(tensors) if name not in view.outputs and name not in view.inputs]
    result = deepcopy(model) if inside else model
    result.graph.output.extend(_value(view, name) for name in inside)
    return result


def ancestors(view: GraphView, stop: Container[str], outputs: Sequence[str]) -> set[int]:
    """Indices of the nodes that `outputs` depend on, without going past the tensors in `stop`."""

    def makers(names: Iterable[str]) -> set[int]:
        return {view.producer[name] for name in names if name in view.producer and name not in stop}

    return {*reached(makers(outputs), lambda index: makers(reads(view.nodes[index])))}


def _value(view: GraphView, name: str) -> onnx.ValueInfoProto:
    """Declare a tensor with its element type, if known. The shape stays open, because a part is run at many sizes."""
    known = view.type_of(name).elem_type
    return onnx.helper.make_tensor_value_info(name, known, None) if known else onnx.ValueInfoProto(name=name)


# -- consecutive parts, so that a model can run without loading all of its weights ----------------------------------
#
# Each part reads only graph inputs and outputs of earlier parts, and their composition is the whole graph.
# Constant subexpressions are duplicated into every part that reads them, so that onnxruntime sees a constant there.


def split(view: GraphView, wanted: Sequence[str], limit: float, stops: frozenset[str] = frozenset()) -> tuple[Cut, ...]:
    """Parts of one node or at most `limit` bytes of weights that compute `wanted` from graph inputs and `stops`."""
    ends = [name for name in dict.fromkeys(wanted) if name not in view.inputs]
    stops = stops.difference(ends)

    def makers(names: Iterable[str]) -> list[int]:
        """The nodes that compute the constants among the names, in graph order."""
        return sorted(ancestors(view, stops, [name for name in names if name in view.constants]))

    # Greedy in graph order: every prefix of a topological order is closed under "depends on", so a part never needs
    # the output of a later one. A weight shared within a part counts once, across parts once in each.
    groups, held = list[list[int]](), dict[str, int]()  # the bytes of the weights of the last one
    for index in sorted(ancestors(view, stops, ends)):
        node = view.nodes[index]
        if all(name in view.constants for name in node.output if name):
            continue
        named = [name for name in _read(view, [index, *makers(reads(node))]) if name in view.initializers]
        weights = {name: bytes_of(view.initializers[name]) for name in named}
        if not groups or sum({**held, **weights}.values()) > limit:
            groups.append([])
            held = {}
        groups[-1].append(index)
        held |= weights
    # A graph may have constants as its only outputs; and a wanted constant must be computed by some part, so the first.
    groups = groups or [[]]
    groups[0][:0] = makers(ends)
    # A part outputs the tensors that a later part or the caller needs; all others never leave onnxruntime. Without
    # outputs it is dead; the others compute the constants that they read.
    parts, needed = list[Cut](), {*ends}
    for group in reversed(groups):
        crossing = [name for index in group for name in view.nodes[index].output if name in needed]
        if group is groups[0]:  # an initializer that is also an output has no producer
            crossing += [name for name in ends if name not in view.producer]
        needed.update(_read(view, group))
        if crossing:
            inside = sorted({*group, *makers(_read(view, group))})
            known = view.initializers.keys() | {name for index in inside for name in view.nodes[index].output}
            inputs = dict.fromkeys(name for name in _read(view, inside) if name not in known)
            parts.append(Cut(tuple(inputs), tuple(crossing), tuple(inside)))
    return tuple(reversed(parts))


def _read(view: GraphView, nodes: Iterable[int]) -> list[str]:
    return [name for index in nodes for name in reads(view.nodes[index])]


def bytes_of(tensor: onnx.TensorProto) -> int:
    """Approximate size of a tensor's values in bytes; packed types narrower than a byte count one byte each."""
    return int(prod(tensor.dims)) * int(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)


# -- local functions, inlined as the runtime does -------------------------------------------------------------------


def inlined(model: onnx.ModelProto, only: Collection[tuple[str, str]] | None = None) -> onnx.ModelProto:
    """A copy of the model without its local functions, or without those in `only`, by domain and name.

    Functions that import another operator set stay, and all of them if a call passes an attribute on that may be absent
    while the function that is called has a default for it: onnx cannot inline that. Raises RuntimeError where that
    concerns one of `only`.
    """
    copy = deepcopy(model)
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
    for holder in (model.graph, *model.functions):
        unsure = holder.attribute if isinstance(holder, onnx.FunctionProto) else ()
        for node in iter_nodes(holder.node):
            called = functions.get((node.domain, node.op_type, node.overload))
            given = {attribute.name: attribute.ref_attr_name for attribute in node.attribute}
            for default in () if called is None else called.attribute_proto:
                if default.name not in given:
                    node.attribute.append(default)
                elif given[default.name] in unsure:
                    return False
    return True


def by_definition(model: onnx.ModelProto, operators: Collection[tuple[str, str]]) -> onnx.ModelProto:
    """The model with operators of ONNX expanded by their definitions, their defaults stated, which onnx omits."""
    version = opsets(model.opset_import).get("", 1)
    for node in iter_nodes(model.graph.node):
        if key_of(node) in operators:
            schema, stated = onnx.defs.get_schema(node.op_type, version), {each.name for each in node.attribute}
            defaults = [each.default_value for each in schema.attributes.values() if each.name not in stated]
            node.attribute.extend(default for default in defaults if default.type)
    return onnx.inliner.inline_selected_functions(model, list(operators), exclude=False, inline_schema_functions=True)


def written_out(model: onnx.ModelProto, operator: str) -> tuple[onnx.ModelProto, tuple[str, ...]] | None:
    """A copy in which an operator of ONNX is expanded by its ONNX definition, recursively.

    Returns the copy and the operators, as `Swish(25)`; None if the model has none of them, or if ONNX does not define
    them for its operator set.
    """
    copy, version = inlined(model), opsets(model.opset_import).get("", 1)
    used = {name for domain, name in map(key_of, iter_nodes(copy.graph.node)) if not domain}
    schemas = [onnx.defs.get_schema(name, version) for name in used if onnx.defs.has(name, version)]
    # The body is empty if it depends on the node.
    found = {each.name for each in schemas if operator in (each.name, *(x.op_type for x in each.function_body.node))}
    if not found:
        return None
    try:
        copy = by_definition(copy, [("", name) for name in {*found, operator}])
    except RuntimeError:
        return None  # a definition depends on unknown types
    if any(key_of(node) == ("", operator) for node in iter_nodes(copy.graph.node)):
        return None
    return copy, tuple(f"{name}({version})" for name in sorted(found))
