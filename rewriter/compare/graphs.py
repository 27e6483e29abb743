"""What differs between two models as files: replaced regions, weights, what they state. Nothing is run.

Every tensor has a digest of what it is computed from; functions are inlined, and names do not count. A node of B is the same as one of A if its digest is. Where B's node
is another one, its outputs take over the digests of A's tensors of the same names, and so does a weight with other
values: what follows can be the same again, and the nodes in between are a region that was replaced. The time is linear
in nodes and bytes.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import ClassVar

import numpy as np
import onnx

from rewriter.arrays import Array
from rewriter.files.external import resolve
from rewriter.files.load import LoadedModel, read_tensor
from rewriter.graph.edit import inlined
from rewriter.graph.types import TensorType, type_of
from rewriter.graph.view import constant_of, holder_name, key_of, label, operator_of, opsets
from rewriter.graph.walk import is_external, iter_nodes, subgraphs
from rewriter.text import counted, decoded, quoted

_REMARKS = ("unused opset", "metadata", "model")
"""Entries that do not affect the computation."""
_SIGNATURE = ("input", "output")


@dataclass(frozen=True)
class Change:
    """One difference.

    Attributes:
        what: `nodes` (a region that was replaced), `weight`, or the kind of entry: `opset`, `input`, `metadata`.
        name: its name, that of a weight in a body behind the way to the body; empty for nodes.
        a: what A has there: operators and names, element type and dims, or a text; None if A lacks it.
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
        """In words."""
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
    """
    left = _Numbered(a, shared=_shared(a, b))
    right = _Numbered(b, left)
    tensors = tuple(_weight_changes(left, right))
    stated = list(_declared_changes(a, b))
    for name in (value.name for value in a.proto.graph.output):
        ends = [side for side in (left, right) if name in side.outputs]
        if len(ends) == 2 and left.numbers.get(name) != right.numbers.get(name):
            one, two = (None if name not in each.made else label(each.made[name]) for each in ends)
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
    """The nodes and weights of a model, each with a digest of what it is computed from; B's take over those of A's.

    Attributes:
        numbers: by tensor, those of bodies behind the way to the body.
        nodes: digest and node, in graph order, of the main graph; `known` are their digests.
        makers: tensor of the main graph to the digest of the node that computes it.
        weights: digest and tensor of initializers and Constant nodes; those of bodies behind the way to the body.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        original: _Numbered | None = None,
        shared: frozenset[tuple[int, ...]] = frozenset(),
    ) -> None:
        self.loaded, self._shared = loaded, shared if original is None else original._shared
        proto = inlined(loaded.proto) if loaded.proto.functions else loaded.proto
        self.outputs = [value.name for value in proto.graph.output]
        self.numbers: dict[str, str] = {value.name: f"input {value.name}" for value in proto.graph.input}
        self.weights: dict[str, tuple[str, onnx.TensorProto]] = {}
        self.makers: dict[str, str] = {}
        self.made: dict[str, onnx.NodeProto] = {}
        self.nodes: list[tuple[str, onnx.NodeProto]] = []
        self.known: Container[str] = ()
        self._before = {} if original is None else original.weights
        self._read(proto.graph, "")
        taken = set[str]()
        for node in proto.graph.node:
            number = self._node(node, self.numbers, "")
            if key_of(node) in (("", "Constant"), ("", "Identity")):
                continue
            made = [name for name in node.output if name]
            self.nodes.append((number, node))
            self.makers |= dict.fromkeys(made, number)
            self.made |= dict.fromkeys(made, node)
            if original is None or number in original.known:
                taken.add(number)
                continue
            for name in made:
                if original.makers.get(name, number) not in {number, *taken}:
                    self.numbers[name] = original.numbers[name]
        self.known = frozenset(number for number, _ in self.nodes)

    def _read(self, graph: onnx.GraphProto, where: str) -> None:
        """Number the constants of a graph."""
        constants = [(node.output[0], value) for node in graph.node if (value := constant_of(node)) is not None]
        for name, tensor in (*((each.name, each) for each in graph.initializer), *constants):
            number = self.digest(tensor)
            self.weights[where + name] = number, tensor
            self.numbers[where + name] = self._before.get(where + name, (number,))[0]

    def digest(self, tensor: onnx.TensorProto, *, by_place: bool = True) -> str:
        """A digest of type, shape and bytes, or where these are if both models have them there and `by_place`."""
        place = ()
        if is_external(tensor) and self.loaded.base_dir is not None and by_place:
            place = resolve(tensor, self.loaded.base_dir).range
        if place in self._shared:
            return _digest(tensor.data_type, tuple(tensor.dims), place)
        values = read_tensor(self.loaded, tensor)
        content = repr(values.tolist()).encode() if values.dtype.kind in "OUS" else np.ascontiguousarray(values)
        return _digest(tensor.data_type, tuple(tensor.dims), hashlib.sha256(content).hexdigest())

    def _node(self, node: onnx.NodeProto, numbers: Mapping[str, str], where: str) -> str:
        """Number the outputs of a node, by the numbers that its operands have by now."""
        operands = tuple(numbers.get(name, name) for name in node.input)
        attributes = dict(_attributes(node))
        for name, body in subgraphs(node):
            attributes[name] = self._body(body, numbers, f"{where}{holder_name(node)}/{name}/")
        number = _digest(*key_of(node), operands, sorted(attributes.items()))
        for place, name in enumerate(node.output):
            same = key_of(node) == ("", "Identity") and operands
            if not (key_of(node) == ("", "Constant") and where + name in self.weights):
                self.numbers[where + name] = same[0] if same else _digest(number, place)
        return number

    def _body(self, graph: onnx.GraphProto, outer: Mapping[str, str], where: str) -> str:
        self._read(graph, where)
        inner = {**outer, **{value.name: f"{where} {place}" for place, value in enumerate(graph.input)}}
        inner |= {each.name: self.numbers[where + each.name] for each in graph.initializer}
        for node in graph.node:
            self._node(node, inner, where)
            inner |= {name: self.numbers[where + name] for name in node.output}
        return _digest(len(graph.input), [inner.get(value.name) for value in graph.output])


def _attributes(node: onnx.NodeProto) -> Iterator[tuple[str, str]]:
    """What a node says; its bodies apart."""
    for each in node.attribute:
        if not (each.HasField("g") or each.graphs):
            yield each.name, each.SerializeToString().hex()


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _shared(*models: LoadedModel) -> frozenset[tuple[int, ...]]:
    """The bytes of files that all models refer to, which need not be read to be the same."""
    return frozenset.intersection(*(frozenset(ref.range for ref in model.external) for model in models))


def _regions(a: _Numbered, b: _Numbered) -> Iterator[Change]:
    left, right = ([number for number, _ in side.nodes] for side in (a, b))
    for _, *places in SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        ours, theirs = (
            [node for number, node in side.nodes[slice(*run)] if number not in other.known]
            for side, other, run in ((a, b, places[:2]), (b, a, places[2:]))
        )
        if ours or theirs:
            yield Change("nodes", "", _span(ours), _span(theirs), ", ".join(_what(a, b, ours, theirs)))


def _what(a: _Numbered, b: _Numbered, ours: list[onnx.NodeProto], theirs: list[onnx.NodeProto]) -> Iterator[str]:
    if len(ours) != 1 or len(theirs) != 1 or key_of(ours[0]) != key_of(theirs[0]):
        return
    parts = [dict(_attributes(node)) for node in (ours[0], theirs[0])]
    inputs = [[side.numbers.get(name, name) for name in node.input] for side, node in ((a, ours[0]), (b, theirs[0]))]
    changed = sorted(name for name in parts[0] | parts[1] if parts[0].get(name) != parts[1].get(name))
    yield from (f"attribute {name}" for name in changed)
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
        elif one != two and a.digest(ours, by_place=False) != b.digest(theirs, by_place=False):
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


# -- what models state -----------------------------------------------------------------------------------------------


def _declared_changes(a: LoadedModel, b: LoadedModel) -> Iterator[Change]:
    nodes = [node for m in (a, b) for graph in (m.proto.graph, *m.proto.functions) for node in iter_nodes(graph.node)]
    used = {key_of(node)[0] for node in nodes}
    ours, theirs = (_stated(model.proto, used) for model in (a, b))
    for what in ours:
        for name in {**ours[what], **theirs[what]}:
            one, two = (None if name not in side else decoded(side[name]) for side in (ours[what], theirs[what]))
            if one != two:
                yield Change(what, decoded(name), one, two)


def _stated(proto: onnx.ModelProto, used: set[str]) -> dict[str, dict[str, str]]:
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
