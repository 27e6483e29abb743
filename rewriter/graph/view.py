"""A frozen index of one graph: the producer and the consumers of each tensor.

Matchers read this index instead of the protobuf, which must not change while a view of it is in use. Building it takes
one pass over the nodes.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeVar

import numpy as np
import onnx

import rewriter.evaluate.moves as rows
from rewriter.arrays import grouped
from rewriter.evaluate.table import is_random
from rewriter.graph.types import TensorType, declared_types, inferred_graph
from rewriter.graph.walk import own_names, reached, reads, subgraphs

ONNX_DOMAINS = ("", "ai.onnx")  # spellings of the default operator domain

PARTS, REARRANGED, SAME_ENTRIES, SAME_NUMBERS = rows.PARTS, rows.REARRANGED, rows.SAME_ENTRIES, rows.SAME_NUMBERS
SIZES = frozenset(("Shape", "Size"))  # operators that read the shape of a tensor alone
_QUANTISING = frozenset(("QuantizeLinear", "DequantizeLinear"))

Other = TypeVar("Other")

Path = tuple[tuple[str, str], ...]
"""From the main graph to a body: at each step the first output of its holder, which no replacement changes, and its
attribute."""

Place = tuple[Path, str]  # a tensor: the path of its graph, and its name, which is unique only in that graph

Step = tuple[int, int]  # index of a node, and the operand by which it is passed
Passed = Callable[[onnx.NodeProto, int], bool]  # whether a route passes a node by this operand
Route = tuple[int, tuple[Step, ...]]  # index of the node where it ends, and the steps to there


@dataclass(frozen=True)
class Miss:
    """Why a structure was not found in a graph."""

    reason: str
    node: str
    kind: Literal["", "domain", "attention"] = ""  # `domain` if only the range of the pre-activations is missing


class LostError(Exception):
    """A tensor cannot be followed or computed: `miss` says why, and at which node."""

    def __init__(self, reason: str, node: str, kind: Literal["", "domain"] = "") -> None:
        super().__init__(reason)
        self.miss = Miss(reason, node, kind)

    @classmethod
    def at(cls, node: onnx.NodeProto, reason: str) -> "LostError":
        """The error at a node, which its message names."""
        return cls(f"{label(node)}: {reason}", label(node))


@dataclass(frozen=True, eq=False)
class GraphView:
    """One scope of a model, indexed."""

    where: str  # empty for the main graph, else a readable path such as `If_3/then_branch`
    nodes: tuple[onnx.NodeProto, ...]  # in topological order; everything below refers to them by index
    producer: Mapping[str, int]
    consumers: Mapping[str, tuple[int, ...]]  # a node once per operand, and once if a body of it captures the tensor
    initializers: Mapping[str, onnx.TensorProto]
    # Initializers that are graph inputs too, so that a caller may replace them. None if the graph lists all of them as
    # inputs: IR version 3 required that and exporters kept the habit, so weights are not meant to be replaced.
    overridable: frozenset[str]
    inputs: tuple[str, ...]  # without declarations of initializers
    outputs: tuple[str, ...]
    types: Mapping[str, TensorType]
    opsets: Mapping[str, int]  # by domain; the default domain is the empty string
    path: Path = ()

    @cached_property
    def constants(self) -> frozenset[str]:
        """The tensors that depend on initializers and Constant nodes alone, such as a transposed weight."""
        constant = set(self.initializers)
        for node in self.nodes:  # in topological order, so one pass finds them all
            # A body may capture anything, so a control-flow node is never counted as constant.
            if is_random(node.op_type) or subgraphs(node):
                continue
            named = [name for name in operands_of(node) if name]
            # A node without operands is constant only if it is a Constant: a custom operator may produce anything.
            if key_of(node) == ("", "Constant") or (named and constant.issuperset(named)):
                constant.update(node.output)
        constant.discard("")
        return frozenset(constant)

    @cached_property
    def data(self) -> frozenset[str]:
        """The tensors that depend on values of inputs or of outer graphs, not on shapes and constants alone."""
        data = {*self.inputs}
        for node in self.nodes:
            read = {name for name in reads(node) if name not in self.constants}
            if node.op_type not in SIZES and not (data.isdisjoint(read) and read <= self.producer.keys()):
                data.update(node.output)
        return frozenset(data)

    @cached_property
    def picked(self) -> Mapping[str, str]:
        """The tensors that an index selects from a constant, such as one expert's weights, each with that constant."""
        found: dict[str, str] = {}
        for node in self.nodes:
            if self.is_onnx(node) and node.op_type in PARTS | REARRANGED | _QUANTISING and node.input:
                whole = found.get(node.input[0], node.input[0] if node.input[0] in self.constants else "")
                if whole:
                    found.update((name, whole) for name in node.output if name and name not in self.constants)
        return found

    def made_by(self, tensor: str) -> onnx.NodeProto | None:
        """The node that writes `tensor`, or None for inputs, initializers and unknown names."""
        return self.nodes[self.producer[tensor]] if tensor in self.producer else None

    def readers(self, tensor: str) -> list[onnx.NodeProto]:
        """The nodes that read more of `tensor` than its shape, once per operand."""
        nodes = (self.nodes[index] for index in self.consumers.get(tensor, ()))
        return [node for node in nodes if node.op_type != "Shape"]

    def has_further_readers(self, node: onnx.NodeProto) -> bool:
        """Whether an output of a node except the first is read, such as the mask of a Dropout."""
        return any(name in self.consumers or name in self.outputs for name in node.output[1:])

    def before(self, tensor: str) -> str:
        """Trace back through operators that keep the entries."""
        while (node := self.made_by(tensor)) is not None and node.op_type in SAME_NUMBERS:
            tensor = node.input[0]
        return tensor

    def back(self, tensor: str, through: Container[str], ends: Container[str] = ()) -> Iterator[str]:
        """Trace back through the operators `through` and return the distinct sources."""

        def before(name: str) -> list[str]:
            node = None if name in ends else self.made_by(name)
            return [] if node is None or node.op_type not in through else [*filter(None, operands_of(node))]

        return (name for name in reached([tensor], before) if not before(name))

    def routes(
        self, tensor: str, is_end: Callable[[onnx.NodeProto], bool], through: Passed, *, onward: bool = False
    ) -> Iterator[Route]:
        """Routes back from a tensor, or `onward` to ends whose first operand they reach; the shortest come first."""
        pending, seen = [(tensor, tuple[Step, ...]())], {tensor}
        for name, steps in pending:  # which grows
            at = self.consumers.get(name, ()) if onward else [self.producer[name]] if name in self.producer else ()
            for index in dict.fromkeys(at):
                node = self.nodes[index]
                places = [place for place, each in enumerate(node.input) if (each == name if onward else each)]
                if places[:1] == [0] and is_end(node):
                    yield index, steps
                    continue
                for place in places:
                    following = node.output[0] if onward else node.input[place]
                    if following not in seen and through(node, place):
                        seen.add(following)
                        pending.append((following, (*steps, (index, place))))

    def type_of(self, tensor: str) -> TensorType:
        return self.types.get(tensor, TensorType())

    def sizes_of(self, tensor: str) -> tuple[int | None, ...] | None:
        """The shape of a tensor, with None for sizes that inputs decide."""
        shape = self.type_of(tensor).shape
        return None if shape is None else tuple(dim if isinstance(dim, int) else None for dim in shape)

    def is_onnx(self, node: onnx.NodeProto) -> bool:
        return node.domain in ONNX_DOMAINS


def operands_of(node: onnx.NodeProto) -> Sequence[str]:
    """The operands whose values matter: the second one of a CastLike only gives the type."""
    return [*node.input][:1] if key_of(node) == ("", "CastLike") else list(node.input)


def key_of(node: onnx.NodeProto) -> tuple[str, str]:
    """Domain and name of a node's operator; the default domain is the empty string."""
    return "" if node.domain in ONNX_DOMAINS else node.domain, node.op_type


def operator_of(node: onnx.NodeProto) -> str:
    """`Add`, or `com.microsoft::Gelu` in another domain."""
    domain, name = key_of(node)
    return f"{domain}::{name}" if domain else name


def label(node: onnx.NodeProto) -> str:
    """The name of a node in messages: its operator, and its name or first output."""
    name = node.name or (node.output[0] if node.output else "")
    return f"{operator_of(node)} '{name}'"


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """The attributes of a node as Python values."""
    return {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}


def integer_of(node: onnx.NodeProto, name: str, default: Other) -> int | Other:
    """An attribute that is an integer."""
    return next((attribute.i for attribute in node.attribute if attribute.name == name), default)


def integers_of(node: onnx.NodeProto, name: str) -> list[int] | None:
    """An attribute that is a list of integers; None if absent."""
    return next((list(attribute.ints) for attribute in node.attribute if attribute.name == name), None)


def constant_of(node: onnx.NodeProto) -> onnx.TensorProto | None:
    """The value of a Constant node, in any attribute; None for other nodes and sparse values."""
    if key_of(node) != ("", "Constant"):
        return None
    for name, value in attributes(node).items():
        if name == "value":
            return value  # type: ignore[no-any-return]
        for prefix, dtype in (("value_float", np.float32), ("value_int", np.int64), ("value_string", object)):
            if name.startswith(prefix):
                return onnx.numpy_helper.from_array(np.array(value, dtype))
    return None


def _view(
    graph: onnx.GraphProto, typed: onnx.GraphProto, versions: Mapping[str, int], outer: GraphView | None = None,
    where: str = "", path: Path = (),
) -> GraphView:  # fmt: skip
    """Index one graph: the main graph, or a body that also sees the tensors of `outer`; `typed` has its types."""
    own = {tensor.name: tensor for tensor in graph.initializer}
    initializers, overridable = dict(own), overridable_in(graph)
    if outer is not None:
        hidden, around = own_names(graph), dict(outer.initializers)
        for node in outer.nodes:  # to a body, Constant nodes are constants like initializers
            if (constant := constant_of(node)) is not None:
                around[node.output[0]] = tensor = deepcopy(constant)
                tensor.name = node.output[0]
        initializers.update((name, tensor) for name, tensor in around.items() if name not in hidden)
        overridable |= outer.overridable - hidden
    # A capture counts as a consumer: a node whose output only a body reads is not dead.
    consumers = grouped((name, index) for index, node in enumerate(graph.node) for name in reads(node))
    return GraphView(
        where=where,
        nodes=tuple(graph.node),
        producer={name: index for index, node in enumerate(graph.node) for name in node.output if name},
        consumers={name: tuple(readers) for name, readers in consumers.items()},
        initializers=initializers,
        overridable=overridable,
        inputs=tuple(value.name for value in graph.input if value.name not in own),
        outputs=tuple(value.name for value in graph.output),
        types=declared_types(typed, {} if outer is None else outer.types),
        opsets=versions,
        path=path,
    )


def overridable_in(graph: onnx.GraphProto) -> frozenset[str]:
    """The initializers that a caller may replace; see `GraphView.overridable`."""
    declared, listed = {value.name for value in graph.input}, {tensor.name for tensor in graph.initializer}
    return frozenset() if listed <= declared else frozenset(listed & declared)


def opsets(imports: Sequence[onnx.OperatorSetIdProto]) -> dict[str, int]:
    """Operator domain to imported version; the default domain under the empty string."""
    return {"" if entry.domain in ONNX_DOMAINS else entry.domain: entry.version for entry in imports}


def all_views(model: onnx.ModelProto) -> tuple[GraphView, ...]:
    """Views of the main graph and of all control-flow bodies in it, outer before inner; without local functions.

    An inner view includes the initializers and the types of the graphs around it.
    """
    inferred, versions = inferred_graph(model), opsets(model.opset_import)
    pending = [(_view(model.graph, inferred, versions), inferred)]
    for outer, typed in pending:  # which grows
        # Both have the same nodes in the same order, so that its bodies can be paired by position.
        for node, typed_node in zip(outer.nodes, typed.node, strict=True):
            for (attribute, graph), (_, inner) in zip(subgraphs(node), subgraphs(typed_node), strict=True):
                where = "/".join(filter(None, (outer.where, node.name or node.op_type, attribute)))
                path = (*outer.path, (holder_name(node), attribute))
                pending.append((_view(graph, inner, versions, outer, where, path), inner))
    return tuple(view for view, _ in pending)


def graph_at(model: onnx.ModelProto, path: Path) -> onnx.GraphProto:
    """The graph that a view of `model` with this path indexes."""
    graph = model.graph
    for name, attribute in path:
        holder = next(node for node in graph.node if holder_name(node) == name)
        graph = dict(subgraphs(holder))[attribute]
    return graph


def holder_name(node: onnx.NodeProto) -> str:
    """The name in paths of a node with bodies: its first named output."""
    return next((name for name in node.output if name), "")


def needed(nodes: Sequence[onnx.NodeProto], outputs: Iterable[str]) -> list[int]:
    """The positions of the nodes, in topological order, that an output depends on through these nodes alone."""
    wanted = set(outputs)
    kept = []
    for place, node in reversed([*enumerate(nodes)]):
        if wanted.intersection(node.output):
            kept.append(place)
            wanted.update(reads(node))
    return kept[::-1]
