"""The one walk over all graphs, nodes and tensors of a model.

It covers subgraphs, local functions, defaults of function attributes, sparse tensors and training graphs. Loading,
checking, changing and saving share it, so that no tensor is checked by one and forgotten by another.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from copy import deepcopy
from itertools import chain, count
from typing import TypeAlias, TypeVar

import onnx

from rewriter.errors import ModelError

MAX_DEPTH = 30  # maximum nesting of subgraphs. Protobuf itself stops at 100 nested messages, three per subgraph

BODY = "#"
"""Separates a tensor's name from the number of its body, where several bodies define that name."""

Thing: TypeAlias = onnx.GraphProto | onnx.NodeProto | onnx.AttributeProto
Reached = TypeVar("Reached")


def is_external(tensor: onnx.TensorProto) -> bool:
    """Whether the values of a tensor are stored in another file."""
    return tensor.data_location == onnx.TensorProto.EXTERNAL


def subgraphs(node: onnx.NodeProto) -> list[tuple[str, onnx.GraphProto]]:
    """The graphs in the attributes of a node (If, Loop, Scan), with the attribute's name; its type is ignored."""
    return [named for each in node.attribute if each.HasField("g") or each.graphs for named in _graphs(each)]


def all_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """The graph and all graphs inside it. Raises ModelError where they nest too deep."""
    yield graph
    yield from (body for node in iter_nodes(graph.node) for _, body in subgraphs(node))


def iter_nodes(nodes: Iterable[onnx.NodeProto], depth: int = 0) -> Iterator[onnx.NodeProto]:
    """Yield nodes and the nodes of their subgraphs. Raises ModelError where these nest too deep."""
    for node in nodes:
        yield node
        for _, body in subgraphs(node):
            yield from iter_nodes(body.node, _deeper(depth))


def own_names(graph: onnx.GraphProto) -> set[str]:
    """The tensors that a graph defines itself; they hide outer tensors of the same names."""
    sparse = (each.values for each in graph.sparse_initializer)
    names = {entry.name for entry in (*graph.input, *graph.initializer, *sparse)}
    return names.union(*(node.output for node in graph.node)) - {""}


def with_distinct_names(model: onnx.ModelProto, names: Mapping[str, str] | None = None) -> onnx.ModelProto:
    """The model, or a copy in which no two graphs define tensors of one name, as the branches of an If may.

    `names` are other names of some tensors of the main graph.
    """
    names, every = names or {}, [name for graph in all_graphs(model.graph) for name in own_names(graph)]
    if not names and len({*every}) == len(every):
        return model
    made = deepcopy(model)
    _distinguish(made.graph, {*names.values()}, {}, names)
    return made


def _distinguish(graph: onnx.GraphProto, taken: set[str], names: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    """Rename tensors that earlier graphs define too; `names` are the current names of the tensors around it."""
    own = {name: wanted[name] for name in own_names(graph) if name in wanted}
    for name in own_names(graph) - own.keys():
        own[name] = next(each for each in chain((name,), (f"{name}{BODY}{k}" for k in count(2))) if each not in taken)
        taken.add(own[name])
    names = {**names, **own}
    sparse = (each.values for each in graph.sparse_initializer)
    for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer, *sparse):
        value.name = names.get(value.name, value.name)
    for node in graph.node:
        for places in (node.input, node.output):
            places[:] = [names.get(name, name) for name in places]
        for _, body in subgraphs(node):
            _distinguish(body, taken, names, {})


def reads(node: onnx.NodeProto) -> list[str]:
    """The tensors that a node may read, in the same order in every run: its operands, and what its bodies capture.

    Body by body, because one may define a name that another one reads from outside.
    """
    operands, captured = [name for name in node.input if name], set[str]()
    for _, graph in subgraphs(node):
        captured |= {value.name for value in graph.output}.union(*map(reads, graph.node)) - own_names(graph)
    return operands + sorted(captured - {""}, key=str) if captured else operands


def reached(starts: Iterable[Reached], following: Callable[[Reached], Iterable[Reached]]) -> Iterator[Reached]:
    """Yield the starts and everything reached from them, each once, before its successors."""
    pending, seen = [*starts], set[Reached]()
    while pending:
        each = pending.pop()
        if each not in seen:
            seen.add(each)
            yield each
            pending += following(each)


def functions_with(
    model: onnx.ModelProto, wanted: Callable[[onnx.NodeProto], bool], but: Container[tuple[str, str]] = ()
) -> set[tuple[str, str]]:
    """The local functions, (domain, name), except `but`, with a wanted node, or with a call of such a function."""
    every = {(each.domain, each.name): each.node for each in model.functions}
    bodies = {name: [*iter_nodes(nodes)] for name, nodes in every.items() if name not in but}
    calls = {name: {(node.domain, node.op_type) for node in nodes} for name, nodes in bodies.items()}
    holding = (name for name, nodes in bodies.items() if any(map(wanted, nodes)))
    return {*reached(holding, lambda name: [caller for caller, called in calls.items() if name in called])}


def iter_all(model: onnx.ModelProto) -> Iterator[Thing]:
    """Yield every graph, node and attribute of a model. Raises ModelError where subgraphs nest too deep."""
    roots: list[Thing] = [model.graph]
    for function in model.functions:
        roots += [*function.node, *function.attribute_proto]
    for training in model.training_info:
        roots += [training.initialization, training.algorithm]
    return _descend(roots)


def iter_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield every TensorProto of a model. Raises ModelError where subgraphs nest too deep."""
    for thing in iter_all(model):
        if isinstance(thing, onnx.GraphProto):
            yield from thing.initializer
        elif isinstance(thing, onnx.AttributeProto):
            yield from thing.tensors
            if thing.HasField("t"):
                yield thing.t
        for sparse in _sparse(thing):
            yield from (sparse.values, sparse.indices)


def iter_sparse(model: onnx.ModelProto) -> Iterator[onnx.SparseTensorProto]:
    """Yield every SparseTensorProto of a model; `iter_tensors` yields the two tensors inside each."""
    return (sparse for thing in iter_all(model) for sparse in _sparse(thing))


def _descend(roots: Iterable[Thing], depth: int = 0) -> Iterator[Thing]:
    for thing in roots:
        yield thing
        if isinstance(thing, onnx.AttributeProto):
            inside = [graph for _, graph in _graphs(thing)]
            yield from _descend(inside, _deeper(depth) if inside else depth)
        else:
            yield from _descend(thing.attribute if isinstance(thing, onnx.NodeProto) else thing.node, depth)


def _deeper(depth: int) -> int:
    if depth >= MAX_DEPTH:  # long before Python's recursion limit
        what = f"subgraphs nest deeper than {MAX_DEPTH} levels"
        raise ModelError(f"{what}; this model is damaged or hostile: export it again")
    return depth + 1


def _graphs(attribute: onnx.AttributeProto) -> list[tuple[str, onnx.GraphProto]]:
    own = [(attribute.name, attribute.g)] if attribute.HasField("g") else []
    return own + [(f"{attribute.name}[{place}]", graph) for place, graph in enumerate(attribute.graphs)]


def _sparse(thing: Thing) -> Iterator[onnx.SparseTensorProto]:
    if isinstance(thing, onnx.GraphProto):
        yield from thing.sparse_initializer
    elif isinstance(thing, onnx.AttributeProto):
        yield from thing.sparse_tensors
        if thing.HasField("sparse_tensor"):
            yield thing.sparse_tensor
