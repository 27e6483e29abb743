"""The differences between two models as files: replaced regions, weights, declarations. Nothing is run.

Tensors have the numbers of the certificate (`rewriter.proof.certificate.graphs`), so that functions are inlined, fused
operators are expanded, and names do not matter. A node of B equals one of A if their numbers are equal. Where B's node
differs, its outputs take over the numbers of A's tensors of the same names, and so does a weight with other values:
downstream nodes can be equal again, and the nodes in between are a replaced region. The time is linear in nodes and
bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import ClassVar

import numpy as np
import onnx

from rewriter.arrays import Array
from rewriter.files.load import LoadedModel, read_tensor
from rewriter.graph.types import TensorType, type_of
from rewriter.graph.view import key_of, label, operator_of, opsets
from rewriter.graph.walk import iter_nodes, subgraphs
from rewriter.proof.certificate.graphs import FUNCTION, SOURCE, Model, Scope, shared_ranges
from rewriter.text import counted, decoded, quoted

_REMARKS = ("unused opset", "metadata", "model")
"""Entries that do not affect the computation."""
_SIGNATURE = ("input", "output")
_INVISIBLE = {FUNCTION: "its function", SOURCE: "its name"}


@dataclass(frozen=True)
class Change:
    """One difference.

    Attributes:
        what: `nodes` (a region that was replaced), `weight`, or the kind of entry: `opset`, `input`, `metadata`.
        name: its name, prefixed by the path of the body for a weight in one; empty for nodes.
        a: its description in A: operators and names, element type and dims, or a text; None if A lacks it.
        b: the same for B.
        how: what differs within a node or a weight that both have: `attribute axis, input 1`, or the number of
            elements and the largest |B - A|.
    """

    what: str
    name: str
    a: str | None
    b: str | None
    how: str = ""

    @property
    def text(self) -> str:
        subject = f"{self.what} {self.name}" if self.name else self.a or self.b or ""
        if self.how:
            return f"{subject} differs in {self.how}"
        if self.a is None or self.b is None:
            return f"{subject} is only in {'A' if self.b is None else 'B'}"
        return f"{subject}: {self.a} in A, {self.b} in B" if self.name else f"{self.a} became {self.b}"


@dataclass(frozen=True)
class GraphDifference:
    """The differences between two models.

    Attributes:
        operators: maps every operator, also in control-flow bodies, to its counts in A and in B, as the files have it.
        regions: the nodes that differ; a node that holds bodies counts as one.
        same_nodes: number of B's nodes that A has too.
        tensors: the weights that differ.
        same_tensors: number of A's weights that B has bit for bit.
        fields: differences in inputs, outputs and their producers, and opsets.
        remarks: differences in metadata, producer and IR version, which do not affect the computation.
    """

    operators: Mapping[str, tuple[int, int]]
    regions: tuple[Change, ...]
    same_nodes: int
    tensors: tuple[Change, ...]
    same_tensors: int
    fields: tuple[Change, ...]
    remarks: tuple[Change, ...]
    also: ClassVar = ("same",)

    @property
    def same(self) -> bool:
        """Whether both models have the same nodes and weights; names and remarks may differ."""
        return not (self.regions or self.tensors or self.fields)


def difference(a: LoadedModel, b: LoadedModel) -> GraphDifference:
    """Compare two models without running them.

    Raises:
        ModelError: external data cannot be read.
        NotCertifiable: a model cannot be numbered, for example because of an attribute of an unknown type.
    """
    left = _Numbered(a, shared=shared_ranges(a, b))
    right = _Numbered(b, left)
    tensors = tuple(_weight_changes(left, right))
    stated = list(_declared_changes(a, b))
    for name in (value.name for value in a.proto.graph.output):
        ends = [side.main.find(name) for side in (left, right) if name in side.model.outputs]
        if len(ends) == 2 and ends[0].number != ends[1].number:
            one, two = (None if each.node is None else label(each.node) for each in ends)
            stated.append(Change("source of output", name, one, two))
    counts = [Counter(operator_of(node) for node in iter_nodes(model.proto.graph.node)) for model in (a, b)]
    return GraphDifference(
        operators={name: (counts[0][name], counts[1][name]) for name in sorted(counts[0] | counts[1])},
        regions=tuple(_regions(left, right)),
        same_nodes=sum(number in left.known for number, _ in right.nodes),
        tensors=tensors,
        same_tensors=len(left.weights) - sum(each.a is not None for each in tensors),
        fields=tuple(each for each in stated if each.what not in _REMARKS),
        remarks=tuple(each for each in stated if each.what in _REMARKS),
    )


# -- nodes -----------------------------------------------------------------------------------------------------------


class _Numbered:
    """The nodes and weights of a model by number; B's take over numbers of A's.

    Attributes:
        model: the model as the certificate sees it; `main` is its main graph.
        nodes: number and node, in graph order, of the main graph; `known` are their numbers.
        makers: tensor of the main graph to the number of its producer.
        weights: number and tensor of initializers and Constant nodes; names of bodies' weights start with their path.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        original: _Numbered | None = None,
        shared: frozenset[tuple[int, ...]] = frozenset(),
    ) -> None:
        self.loaded = loaded
        self.model: Model = Model(loaded, None if original is None else original.model, shared)
        self.main = self.model.main
        self.weights: dict[str, tuple[str, onnx.TensorProto]] = {}
        self.makers: dict[str, str] = {}
        self.nodes: list[tuple[str, onnx.NodeProto]] = []
        for scope in self.model.scopes.values():
            where = "".join(f"{holder}/{attribute}/" for holder, attribute in scope.path)
            for name in {**scope.initializers, **scope.made}:
                found = scope.own(name)
                tensor = scope.initializers.get(name, found and found.constant)
                if tensor is not None:
                    self.weights[where + name] = scope.number(name), tensor
                    if original is not None and where + name in original.weights:
                        scope.numbers[name] = original.weights[where + name][0]
        self.known: Container[str] = ()
        taken = set[str]()
        for node in _nodes(self.main):
            _renumber(self.main, node)
            made = [name for name in node.output if name]
            number = self.main.numbers[made[0]]
            self.nodes.append((number, node))
            self.makers |= dict.fromkeys(made, number)
            if original is None or number in original.known:
                taken.add(number)
                continue
            for name in made:
                if original.makers.get(name, number) not in {number, *taken}:
                    self.main.numbers[name] = original.main.numbers[name]
        self.known = frozenset(number for number, _ in self.nodes)


def _nodes(scope: Scope) -> list[onnx.NodeProto]:
    """The nodes of a graph, except Constant and Identity."""
    every = {id(node): node for node, _ in scope.made.values()}.values()
    return [node for node in every if key_of(node) not in (("", "Constant"), ("", "Identity"))]


def _renumber(scope: Scope, node: onnx.NodeProto) -> None:
    """Number a node by the current numbers of its operands, captures of its bodies included."""
    for name, _ in subgraphs(node):
        body = scope.bodies[id(node), name]
        for inner in _nodes(body):
            _renumber(body, inner)
    scope.number_node(node)


def _regions(a: _Numbered, b: _Numbered) -> Iterator[Change]:
    left, right = ([number for number, _ in side.nodes] for side in (a, b))
    for _, *places in SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        ours, theirs = (
            [node for number, node in side.nodes[slice(*run)] if number not in other.known]
            for side, other, run in ((a, b, places[:2]), (b, a, places[2:]))
        )
        if ours or theirs:
            yield Change("nodes", "", _span(ours), _span(theirs), ", ".join(_changes(a.main, b.main, ours, theirs)))


def _changes(a: Scope, b: Scope, ours: list[onnx.NodeProto], theirs: list[onnx.NodeProto]) -> Iterator[str]:
    if len(ours) != 1 or len(theirs) != 1 or key_of(ours[0]) != key_of(theirs[0]):
        return
    parts: list[dict[str, object]] = []
    inputs: list[list[str]] = []
    for scope, node in ((a, ours[0]), (b, theirs[0])):
        bodies = {name: scope.bodies[id(node), name] for name, _ in subgraphs(node)}
        numbers = {name: (len(each.inputs), *map(each.number, each.outputs)) for name, each in bodies.items()}
        parts.append({**dict(scope.attributes(node)), **numbers})
        inputs.append([scope.number(name) for name in node.input])
    changed = sorted(name for name in parts[0] | parts[1] if parts[0].get(name) != parts[1].get(name))
    yield from (_INVISIBLE.get(name, f"attribute {name}") for name in changed)
    yield from (f"input {place}" for place, (one, two) in enumerate(zip_longest(*inputs)) if one != two)


def _span(nodes: Sequence[onnx.NodeProto]) -> str | None:
    if len(nodes) > 1:
        return f"{len(nodes)} nodes, {label(nodes[0])} to {label(nodes[-1])}"
    return label(nodes[0]) if nodes else None


# -- weights ---------------------------------------------------------------------------------------------------------


def _weight_changes(a: _Numbered, b: _Numbered) -> Iterator[Change]:
    held = [{number for number, _ in side.weights.values()} for side in (a, b)]
    for name in sorted(a.weights.keys() | b.weights.keys()):
        (one, ours), (two, theirs) = (side.weights.get(name, ("", None)) for side in (a, b))
        kinds = ours and _kind_of(ours), theirs and _kind_of(theirs)
        if ours is None or theirs is None:
            if (one or two) not in held[theirs is None]:
                yield Change("weight", name, *kinds)
        elif one != two and a.model.digest(ours, by_place=False) != b.model.digest(theirs, by_place=False):
            values = read_tensor(a.loaded, ours), read_tensor(b.loaded, theirs)
            yield Change("weight", name, *kinds, apart(*values) if kinds[0] == kinds[1] else "")


def _kind_of(tensor: onnx.TensorProto) -> str:
    return str(TensorType(tensor.data_type, tuple(tensor.dims)))


def apart(a: Array, b: Array) -> str:
    """In how many elements two arrays of one type and shape differ, and by how much where these are real numbers."""
    if a.dtype.kind in "cO":
        return "values"
    left, right = (np.ascontiguousarray(each).view(np.uint8).reshape(-1, a.dtype.itemsize) for each in (a, b))
    unequal = np.flatnonzero((left != right).any(-1))
    ours, theirs = (side.reshape(-1)[unequal].astype(np.float64) for side in (a, b))
    with np.errstate(all="ignore"):
        far = np.abs(theirs - ours)
    far = np.where(np.isnan(far), np.inf, far)  # a NaN in one of them counts as an infinite difference
    top = int(np.argmax(far))
    index = [int(place) for place in np.unravel_index(unequal[top], a.shape)]
    return f"{counted(unequal.size, 'element')}, by up to {far[top]:.3g}{f' at {index}' if index else ''}"


# -- declarations ----------------------------------------------------------------------------------------------------


def _declared_changes(a: LoadedModel, b: LoadedModel) -> Iterator[Change]:
    nodes = [node for m in (a, b) for graph in (m.proto.graph, *m.proto.functions) for node in iter_nodes(graph.node)]
    used = {key_of(node)[0] for node in nodes}
    ours, theirs = (_declarations(model.proto, used) for model in (a, b))
    for what in ours:
        for name in {**ours[what], **theirs[what]}:
            one, two = (None if name not in side else decoded(side[name]) for side in (ours[what], theirs[what]))
            if one != two:
                yield Change(what, decoded(name), one, two)


def _declarations(proto: onnx.ModelProto, used: set[str]) -> dict[str, dict[str, str]]:
    versions = {domain: str(version) for domain, version in opsets(proto.opset_import).items()}
    producer = f"{decoded(proto.producer_name)} {decoded(proto.producer_version)}".strip()
    about = {"IR version": str(proto.ir_version), "producer": producer, "graph": proto.graph.name}
    return {
        **{what: {name: _declared(*each) for name, each in _signature(proto, what).items()} for what in _SIGNATURE},
        "order": {f"{what}s": ", ".join(v.name for v in getattr(proto.graph, what)) for what in _SIGNATURE},
        "opset": {name or "ai.onnx": version for name, version in versions.items() if name in used},
        "unused opset": {name or "ai.onnx": version for name, version in versions.items() if name not in used},
        "metadata": {item.key: item.value for item in proto.metadata_props},
        "model": {name: value for name, value in about.items() if value},
    }


def _signature(proto: onnx.ModelProto, what: str) -> dict[str, tuple[onnx.TypeProto, bool]]:
    given = {tensor.name for tensor in proto.graph.initializer} if what == "input" else set[str]()
    return {value.name: (value.type, value.name in given) for value in getattr(proto.graph, what)}


def _declared(kind: onnx.TypeProto, default: bool) -> str:
    held = kind.WhichOneof("value")
    text = str(type_of(kind)) if held == "tensor_type" else (held or "of unknown type").removesuffix("_type")
    return f"{text}{' with a default' if default else ''}"


def signature_differences(a: onnx.ModelProto, b: onnx.ModelProto) -> tuple[str, ...]:
    """Why two models cannot be run on the same inputs and compared, such as `output y: float32[2] in A, int64 in B`.

    Names and element types must agree, and so must sizes that both declare; names of symbolic dimensions do not matter.
    """
    found: list[str] = []
    for what in _SIGNATURE:
        ours, theirs = ({n: kind for n, (kind, default) in _signature(m, what).items() if not default} for m in (a, b))
        for name in {**ours, **theirs}:
            if name not in ours or name not in theirs or not _agree(ours[name], theirs[name]):
                one, two = (_declared(side[name], False) if name in side else None for side in (ours, theirs))
                found.append(Change(what, quoted(name), one, two).text)
    return tuple(found)


def _agree(a: onnx.TypeProto, b: onnx.TypeProto) -> bool:
    """Whether element type, rank and sizes are the same where both are known."""
    if len({each.WhichOneof("value") for each in (a, b)} - {None}) > 1:
        return False
    ours, theirs = ((kind.elem_type or None, kind.rank, *(kind.shape or ())) for kind in (type_of(a), type_of(b)))
    known = zip(ours, theirs, strict=False)
    return all(one == two for one, two in known if isinstance(one, int) and isinstance(two, int))
