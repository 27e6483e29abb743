"""What differs between two models as files.

Comes in: two loaded models. Goes out: `GraphDifference`. Used by `rewrite diff`. Nothing is run, and weights are
compared in bounded memory; time is linear in the nodes and in the bytes of the weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import onnx

from rewriter.differences.fields import FieldChange, fields, remarks
from rewriter.differences.nodes import Matches, Nodes, attributes, match, operator
from rewriter.differences.tensors import TensorChange, compare_tensors, fingerprint, only
from rewriter.files.load import LoadedModel
from rewriter.files.walk import iter_nodes
from rewriter.graph.view import opsets, subgraphs

_TWINS = 8
"""How many weights with the fingerprint of a lost one are compared with it in full."""

SameInput = Callable[[str, str], bool]


@dataclass(frozen=True)
class NodeChange:
    """One node that differs.

    Attributes:
        status: `changed`, `only in A` or `only in B`.
        scope: the body of control flow it stands in, empty for the main graph.
        a: operator and name in A; None where it is only in B.
        b: operator and name in B.
        what: what changed: the operator, `attribute NAME`, `input NUMBER`.
    """

    status: str
    scope: str
    a: str | None
    b: str | None
    what: tuple[str, ...] = ()


@dataclass(frozen=True)
class GraphDifference:
    """What differs.

    Attributes:
        operators: every operator, bodies of control flow included, with its count in A and in B.
        nodes: the nodes that differ.
        same_nodes: how many nodes are the same: operator, attributes and what they read.
        renamed: how many of those have another name or name their outputs otherwise.
        tensors: the weights that differ.
        same_tensors: how many weights are equal bit for bit.
        fields: inputs, outputs, local functions and opsets that differ.
        remarks: metadata, producer and IR version that differ: nothing that is computed.
    """

    operators: Mapping[str, tuple[int, int]]
    nodes: tuple[NodeChange, ...]
    same_nodes: int
    renamed: int
    tensors: tuple[TensorChange, ...]
    same_tensors: int
    fields: tuple[FieldChange, ...]
    remarks: tuple[FieldChange, ...]

    @property
    def same(self) -> bool:
        """Whether both compute the same by the same nodes and weights; names and remarks may differ."""
        return not (self.nodes or self.tensors or self.fields)


def difference(a: LoadedModel, b: LoadedModel) -> GraphDifference:
    """Compare two models without running them.

    Raises:
        ModelError: external data cannot be read.
    """
    nodes: list[NodeChange] = []
    tensors: list[TensorChange] = []
    same_nodes = renamed = same_tensors = 0
    pending: list[tuple[str, onnx.GraphProto, onnx.GraphProto]] = [("", a.proto.graph, b.proto.graph)]
    while pending:
        scope, ours, theirs = pending.pop()
        scoped = _Scope(scope, _Side.of(a, ours), _Side.of(b, theirs))
        found, equal = scoped.tensor_changes()
        tensors += found
        same_tensors += equal
        changes = scoped.node_changes()
        nodes += changes.nodes
        same_nodes, renamed = same_nodes + changes.same, renamed + changes.renamed
        pending += changes.inner
    return GraphDifference(
        operators=_operators(a.proto, b.proto),
        nodes=tuple(nodes),
        same_nodes=same_nodes,
        renamed=renamed,
        tensors=tuple(tensors),
        same_tensors=same_tensors,
        fields=tuple(fields(a.proto, b.proto)),
        remarks=tuple(remarks(a.proto, b.proto)),
    )


@dataclass(frozen=True)
class _Changes:
    nodes: list[NodeChange]
    same: int
    renamed: int
    inner: list[tuple[str, onnx.GraphProto, onnx.GraphProto]]


@dataclass(frozen=True, eq=False)
class _Side:
    """One graph: its nodes, and its weights, which are initializers and the values of Constant nodes."""

    model: LoadedModel
    graph: Nodes
    weights: Mapping[str, onnx.TensorProto]

    @classmethod
    def of(cls, model: LoadedModel, graph: onnx.GraphProto) -> _Side:
        weights = {tensor.name: tensor for tensor in graph.initializer}
        nodes = []
        for node in graph.node:
            if node.op_type == "Constant" and len(node.attribute) == 1 and node.attribute[0].name == "value":
                weights[node.output[0]] = node.attribute[0].t
            else:
                nodes.append(node)
        outputs = tuple(value.name for value in graph.output)
        inputs = frozenset(value.name for value in graph.input)
        prints = {name: fingerprint(model, tensor) for name, tensor in weights.items()}
        return cls(model, Nodes(nodes, prints, inputs, outputs, opsets(model.proto.opset_import)), weights)


@dataclass(frozen=True, eq=False)
class _Scope:
    """One graph of A and the graph of B that stands in its place."""

    name: str
    left: _Side
    right: _Side

    @property
    def a(self) -> Nodes:
        return self.left.graph

    @property
    def b(self) -> Nodes:
        return self.right.graph

    def tensor_changes(self) -> tuple[list[TensorChange], int]:
        """The weights that differ, and how many of A are equal; a weight under another name is the same weight."""
        ours, theirs = self.left.weights, self.right.weights
        changes = []
        for name in ours.keys() & theirs.keys():
            change = compare_tensors(name, (self.left.model, ours[name]), (self.right.model, theirs[name]))
            changes += [] if change is None else [change]
        changes += [only(name, ours[name], "only in A") for name in _lost(self.left, self.right)]
        same = len(ours) - len(changes)
        changes += [only(name, theirs[name], "only in B") for name in _lost(self.right, self.left)]
        return sorted(changes, key=lambda change: change.name), same

    def node_changes(self) -> _Changes:
        matches = match(self.a, self.b)
        alias = self._aliases(matches)
        nodes: list[tuple[int, NodeChange]] = []
        inner: list[tuple[str, onnx.GraphProto, onnx.GraphProto]] = []
        same = renamed = 0
        for ours, theirs in matches.pairs:
            one, other = self.a.nodes[ours], self.b.nodes[theirs]
            values = [attributes(one, self.a.opsets), attributes(other, self.b.opsets)]
            what = _what(one, other, values, lambda left, right: self._same_input(left, right, alias))
            bodies = dict(subgraphs(one)), dict(subgraphs(other))
            for attribute in bodies[0].keys() & bodies[1].keys():
                where = "/".join(part for part in (self.name, one.name or one.op_type, attribute) if part)
                inner.append((where, bodies[0][attribute], bodies[1][attribute]))
            if what:
                nodes.append((ours, NodeChange("changed", self.name, describe(one), describe(other), what)))
            else:
                same += 1
                renamed += one.name != other.name or list(one.output) != list(other.output)
        nodes += [
            (index, NodeChange("only in A", self.name, describe(self.a.nodes[index]), None)) for index in matches.only_a
        ]
        nodes += [
            (index, NodeChange("only in B", self.name, None, describe(self.b.nodes[index]))) for index in matches.only_b
        ]
        ordered = [change for _, change in sorted(nodes, key=lambda entry: entry[0])]
        return _Changes(ordered, same, renamed, inner)

    def _aliases(self, matches: Matches) -> dict[str, str]:
        """Tensor of A to the tensor of B that stands in its place."""
        alias: dict[str, str] = {}
        for ours, theirs in matches.pairs:
            alias.update(zip(self.a.nodes[ours].output, self.b.nodes[theirs].output, strict=False))
        return alias

    def _same_input(self, ours: str, theirs: str, alias: Mapping[str, str]) -> bool:
        if ours in alias:
            return alias[ours] == theirs
        if ours in self.a.weights and theirs in self.b.weights:
            return ours == theirs or self.a.weights[ours] == self.b.weights[theirs]
        return ours == theirs


def _lost(side: _Side, other: _Side) -> list[str]:
    """The weights of one side that the other has neither by name nor by content."""
    held: dict[bytes, list[str]] = {}
    for name, digest in other.graph.weights.items():
        held.setdefault(digest, []).append(name)
    lost = []
    for name in sorted(side.weights.keys() - other.weights.keys()):
        twins = held.get(side.graph.weights[name], [])
        ours = (side.model, side.weights[name])
        if all(compare_tensors(name, ours, (other.model, other.weights[twin])) for twin in twins[:_TWINS]):
            lost.append(name)
    return lost


def _what(
    one: onnx.NodeProto, other: onnx.NodeProto, values: Sequence[Mapping[str, bytes]], same_input: SameInput
) -> tuple[str, ...]:
    """What changed in a node."""
    what = []
    if operator(one) != operator(other):
        what.append("operator")
    else:
        names = sorted(values[0].keys() | values[1].keys())
        what += [f"attribute {name}" for name in names if values[0].get(name) != values[1].get(name)]
    inputs = [list(node.input) for node in (one, other)]
    for number in range(max(map(len, inputs))):
        ours, theirs = (names[number] if number < len(names) else "" for names in inputs)
        if not same_input(ours, theirs):
            what.append(f"input {number}")
    if len([name for name in one.output if name]) != len([name for name in other.output if name]):
        what.append("outputs")
    return tuple(what)


def describe(node: onnx.NodeProto) -> str:
    """Operator and name, or the first output of a node without a name."""
    name = node.name or next((name for name in node.output if name), "")
    return f"{operator(node)} {name}".rstrip()


def _operators(a: onnx.ModelProto, b: onnx.ModelProto) -> dict[str, tuple[int, int]]:
    counts = [Counter(operator(node) for node in iter_nodes(model.graph.node)) for model in (a, b)]
    return {name: (counts[0][name], counts[1][name]) for name in sorted(counts[0] | counts[1])}
