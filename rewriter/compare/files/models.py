"""Find the differences between two models as files.

Nothing is run. Weights are compared in bounded memory; the time is linear in the number of nodes and the bytes of the
weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx

from rewriter.compare.files.fields import FieldChange, declared, fields, remarks
from rewriter.compare.files.nodes import aliases, attributes, match, operator
from rewriter.compare.files.scopes import SameInput, Scope, Side
from rewriter.compare.files.tensors import Status, TensorChange, compare_tensors, only
from rewriter.files.load import LoadedModel
from rewriter.files.walk import iter_nodes

_TWINS = 8
"""Maximum number of weights with the fingerprint of a missing one that are compared with it in full."""


@dataclass(frozen=True)
class NodeChange:
    """One node that differs.

    Attributes:
        status: `changed`, `only in A` or `only in B`.
        scope: the control-flow body that contains it; empty for the main graph.
        a: operator and name in A; None if it is only in B.
        b: operator and name in B; None if it is only in A.
        what: what changed: `operator`, `attribute NAME`, `input NUMBER`, `outputs`.
    """

    status: Status
    scope: str
    a: str | None
    b: str | None
    what: tuple[str, ...] = ()


@dataclass(frozen=True)
class GraphDifference:
    """The differences between two models.

    Attributes:
        operators: maps every operator, also in control-flow bodies, to its counts in A and in B.
        nodes: the nodes that differ.
        same_nodes: number of nodes with the same operator, attributes and operands.
        renamed: number of those whose own name or outputs' names differ.
        tensors: the weights that differ.
        same_tensors: number of weights that are equal bit for bit.
        fields: differences in inputs, outputs and their producers, local functions, and opsets.
        remarks: differences in metadata, producer, IR version and annotations, which do not affect the computation.
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
        """Whether both models have the same nodes and weights; names and remarks may differ."""
        return not (self.nodes or self.tensors or self.fields)


def difference(a: LoadedModel, b: LoadedModel) -> GraphDifference:
    """Compare two models without running them.

    Raises:
        ModelError: external data cannot be read.
    """
    nodes: list[NodeChange] = []
    tensors: list[TensorChange] = []
    found = [*fields(a, b)]
    same_nodes = renamed = same_tensors = 0
    pending = [Scope("", Side.of(a, a.proto.graph), Side.of(b, b.proto.graph))]
    while pending:
        scope = pending.pop()
        weights, equal = _tensor_changes(scope)
        tensors += weights
        same_tensors += equal
        changes = _node_changes(scope)
        nodes += changes.nodes
        found += [*declared(scope.name, scope.left.proto, scope.right.proto), *changes.outputs]
        same_nodes, renamed = same_nodes + changes.same, renamed + changes.renamed
        pending += changes.inner
    return GraphDifference(
        operators=_operators(a.proto, b.proto),
        nodes=tuple(nodes),
        same_nodes=same_nodes,
        renamed=renamed,
        tensors=tuple(tensors),
        same_tensors=same_tensors,
        fields=tuple(found),
        remarks=tuple(remarks(a.proto, b.proto)),
    )


@dataclass(frozen=True)
class _Changes:
    nodes: list[NodeChange]
    same: int
    renamed: int
    outputs: list[FieldChange]
    inner: list[Scope]


def _tensor_changes(scope: Scope) -> tuple[list[TensorChange], int]:
    """The weights that differ, and the number of A's that are equal, possibly under another name."""
    ours, theirs = scope.left.weights, scope.right.weights
    changes = []
    for name in ours.keys() & theirs.keys():
        change = compare_tensors(name, (scope.left.model, ours[name]), (scope.right.model, theirs[name]))
        changes += [] if change is None else [change]
    changes += [only(name, ours[name], "only in A") for name in _lost(scope.left, scope.right)]
    same = len(ours) - len(changes)  # before those that only B has are added
    changes += [only(name, theirs[name], "only in B") for name in _lost(scope.right, scope.left)]
    return sorted(changes, key=lambda change: change.name), same


def _node_changes(scope: Scope) -> _Changes:
    a, b = scope.left.graph, scope.right.graph
    matches = match(a, b)
    alias = aliases(a, b, matches.pairs)
    same_input = scope.same_input(alias)
    nodes: list[tuple[int, NodeChange]] = []
    inner: list[Scope] = []
    same = renamed = 0
    for ours, theirs in matches.pairs:
        one, other = a.nodes[ours], b.nodes[theirs]
        what = _what(one, other, [attributes(a, one), attributes(b, other)], same_input)
        inner += scope.bodies(one, other, alias)
        if what:
            nodes.append((ours, NodeChange("changed", scope.name, describe(one), describe(other), what)))
        else:
            same += 1
            renamed += one.name != other.name or list(one.output) != list(other.output)
    nodes += [(index, NodeChange("only in A", scope.name, describe(a.nodes[index]), None)) for index in matches.only_a]
    nodes += [(index, NodeChange("only in B", scope.name, None, describe(b.nodes[index]))) for index in matches.only_b]
    ordered = [change for _, change in sorted(nodes, key=lambda entry: entry[0])]
    return _Changes(ordered, same, renamed, list(_output_changes(scope, same_input)), inner)


def _output_changes(scope: Scope, same_input: SameInput) -> Iterator[FieldChange]:
    """Outputs with another source. Comparing nodes does not cover this: two outputs may have swapped names."""
    left, right = scope.left, scope.right
    theirs = {place: name for name, place in right.graph.outputs}
    for name, place in left.graph.outputs:
        if place in theirs and not same_input(name, theirs[place]):
            where = f"{scope.name} {place}" if scope.name else place
            yield FieldChange("source of output", where, _source(left, name), _source(right, theirs[place]))


def _source(side: Side, name: str) -> str:
    maker = next((node for node in side.graph.nodes if name in node.output), None)
    return name if maker is None else describe(maker)


def _lost(side: Side, other: Side) -> list[str]:
    """The weights of one side that the other side has neither by name nor by content."""
    held: dict[bytes, list[str]] = {}
    for name, digest in other.prints.items():
        held.setdefault(digest, []).append(name)
    lost = []
    for name in sorted(side.weights.keys() - other.weights.keys()):
        # Fingerprints cover the ends of large weights only, so candidates are compared in full, but not without limit:
        # a model may hold thousands of alike weights (zeros).
        twins = held.get(side.prints[name], [])
        ours = (side.model, side.weights[name])
        if all(compare_tensors(name, ours, (other.model, other.weights[twin])) for twin in twins[:_TWINS]):
            lost.append(name)
    return lost


def _what(
    one: onnx.NodeProto, other: onnx.NodeProto, values: Sequence[Mapping[str, bytes]], same_input: SameInput
) -> tuple[str, ...]:
    """The changes in a node."""
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
    # Names of outputs are free, but an optional output that is present in one model only is a difference.
    made = [[place for place, name in enumerate(node.output) if name] for node in (one, other)]
    if made[0] != made[1]:
        what.append("outputs")
    return tuple(what)


def describe(node: onnx.NodeProto) -> str:
    """Operator and name of a node, or its first output if it has no name."""
    name = node.name or next((name for name in node.output if name), "")
    return f"{operator(node)} {name}".rstrip()


def _operators(a: onnx.ModelProto, b: onnx.ModelProto) -> dict[str, tuple[int, int]]:
    counts = [Counter(operator(node) for node in iter_nodes(model.graph.node)) for model in (a, b)]
    return {name: (counts[0][name], counts[1][name]) for name in sorted(counts[0] | counts[1])}
