"""Match the nodes of two graphs, in time linear in the number of nodes.

A node is paired by the first of these keys that identifies exactly one node in either graph, or equally many, which are
then paired in graph order:

1. its name and operator;
2. the tensor that it produces;
3. the computation above it, up to the graph's inputs (operators, attributes and weights, so that renaming changes
   nothing);
4. the computation below it, down to the outputs;
5. the operators around it;
6. the tensors that it reads.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import onnx

from rewriter.compare.files.tensors import digest
from rewriter.files.load import LoadedModel
from rewriter.graph.view import key_of, operator_of, opsets

_SCHEMAS = LoadedModel(onnx.ModelProto(), None, None, (), 0)
"""An empty model, as the owner of the tensors in operator schemas."""

_ROUNDS = 2
"""Number of steps that the surroundings of a node extend."""

Key = Callable[[int], Hashable | None]


@dataclass(frozen=True)
class Matches:
    """Pairs of node indices, and the unmatched nodes of A and of B."""

    pairs: tuple[tuple[int, int], ...]
    only_a: tuple[int, ...]
    only_b: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Nodes:
    """The nodes of one graph, with everything that matching needs.

    Attributes:
        model: the model that contains the graph.
        nodes: its nodes, in graph order.
        weights: maps an initializer, also of an enclosing graph, to its fingerprint.
        inputs: maps an input to its identity: its name, or its position in a body, where names are arbitrary.
        outputs: its outputs, likewise.
        outer: maps a tensor of an enclosing graph to its name in the other model.
    """

    model: LoadedModel
    nodes: Sequence[onnx.NodeProto]
    weights: Mapping[str, bytes]
    inputs: Mapping[str, str]
    outputs: Sequence[tuple[str, str]]
    outer: Mapping[str, str]

    @cached_property
    def opsets(self) -> Mapping[str, int]:
        """Operator domain to version."""
        return opsets(self.model.proto.opset_import)

    def computed(self) -> list[bytes]:
        """For each node, a digest of the whole computation above it."""
        # Digests of operands are combined (a Merkle tree), so shared subexpressions are not expanded and the time is
        # linear.
        known = {**self.weights, **{name: b"i" + place.encode() for name, place in self.inputs.items()}}
        found = []
        for node in self.nodes:
            given = (known.get(name, b"?" + self.outer.get(name, name).encode()) for name in node.input)
            parts = [own_digest(self, node), *given]
            found.append(_digest(parts))
            known.update({name: _digest([found[-1], bytes([place % 256])]) for place, name in enumerate(node.output)})
        return found

    def surroundings(self) -> list[bytes]:
        """For each node, a digest of the operators, attributes and weights within `_ROUNDS` steps.

        A changed weight alters the digests of everything below it (`computed`) and above it (`led_to`), but only a few
        of these: the layers far from the change still find their partners.
        """
        maker = {name: index for index, node in enumerate(self.nodes) for name in node.output if name}
        readers: dict[str, list[int]] = defaultdict(list)
        for index, node in enumerate(self.nodes):
            for name in node.input:
                readers[name].append(index)
        digests = self._own()
        for _ in range(_ROUNDS):
            above = [[digests[maker[name]] for name in node.input if name in maker] for node in self.nodes]
            # Only a few consumers count: a tensor with many (a mask) tells little and would make this quadratic.
            below = [
                sorted(digests[reader] for name in node.output for reader in readers[name][:8]) for node in self.nodes
            ]
            digests = [
                _digest([own, b"^", *up, b"v", *down]) for own, up, down in zip(digests, above, below, strict=True)
            ]
        return digests

    def led_to(self) -> list[bytes]:
        """For each node, a digest of everything below it, down to the outputs of the graph."""
        below: dict[str, list[bytes]] = defaultdict(list)
        for name, place in self.outputs:
            below[name].append(b"o" + place.encode())
        own = self._own()
        for index in reversed(range(len(self.nodes))):
            node = self.nodes[index]
            own[index] = _digest([own[index], *(_digest(sorted(below.pop(name, []))) for name in node.output)])
            for number, name in enumerate(node.input):
                below[name].append(_digest([own[index], str(number).encode()]))
        return own

    def _own(self) -> list[bytes]:
        """For each node, a digest of its operator, attributes and weights."""
        return [_digest([own_digest(self, node), *(self._weight(name) for name in node.input)]) for node in self.nodes]

    def _weight(self, name: str) -> bytes:
        return self.weights.get(name, b"i" if name in self.inputs else b"-")


def match(a: Nodes, b: Nodes) -> Matches:
    """Pair the nodes of two graphs."""
    # From the most to the least specific evidence. Exporters give stable names, so the first two keys usually pair
    # everything, and the digests, which read weights, are computed only for the rest.
    matcher = _Matcher(a, b)
    matcher.unique(_by_name(a), _by_name(b))
    matcher.unique(_by_output(a), _by_output(b))
    if matcher.open:
        for digests in (Nodes.computed, Nodes.led_to, Nodes.surroundings):
            ours, theirs = digests(a), digests(b)
            matcher.in_order(ours.__getitem__, theirs.__getitem__)
        # Last, because the names of operands can be compared only through the pairs found so far.
        matcher.unique(_by_inputs(a, matcher.aliases()), _by_inputs(b, {}))
    return matcher.result()


def attributes(graph: Nodes, node: onnx.NodeProto) -> dict[str, bytes]:
    """The attributes of a node as bytes, without those at their defaults, which make no difference.

    Raises:
        ModelError: external data cannot be read.
    """
    domain, name = key_of(node)
    defaults = _defaults(domain, name, graph.opsets.get(domain, 1))
    stated = {item.name: value_of(item, graph.model) for item in node.attribute}
    return {name: value for name, value in sorted(stated.items()) if defaults.get(name) != value}


def own_digest(graph: Nodes, node: onnx.NodeProto) -> bytes:
    """A digest of operator and attributes, without names and without subgraphs."""
    stated = attributes(graph, node)
    return _digest([operator(node).encode(), *(name.encode() + b"=" + value for name, value in stated.items())])


@cache
def _defaults(domain: str, name: str, version: int) -> Mapping[str, bytes]:
    try:
        schema = onnx.defs.get_schema(name, version, domain)
    except onnx.defs.SchemaError:
        return {}
    stated = (item.default_value for item in schema.attributes.values() if item.default_value.name)
    return {value.name: value_of(value, _SCHEMAS) for value in stated}


def value_of(attribute: onnx.AttributeProto, model: LoadedModel) -> bytes:
    """The value of an attribute as bytes, without name, doc string and subgraphs; tensors by their content."""
    if attribute.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS):
        return b"%d graphs" % max(len(attribute.graphs), 1)
    plain = onnx.AttributeProto()
    plain.CopyFrom(attribute)
    sparse = [*plain.sparse_tensors, *([plain.sparse_tensor] if plain.HasField("sparse_tensor") else [])]
    tensors = [*plain.tensors, *([plain.t] if plain.HasField("t") else [])]
    tensors += [part for each in sparse for part in (each.values, each.indices)]
    content = [digest(model, tensor) for tensor in tensors]
    for each in sparse:
        each.ClearField("values")
        each.ClearField("indices")
    for field in ("name", "doc_string", "t", "tensors"):
        plain.ClearField(field)
    data: bytes = plain.SerializeToString(deterministic=True)
    return data + b"".join(content)


def operator(node: onnx.NodeProto) -> str:
    """`Add`, or `com.microsoft::Gelu` in another domain; an overload is appended after `:`."""
    name = operator_of(node)
    return f"{name}:{node.overload}" if node.overload else name


def aliases(a: Nodes, b: Nodes, pairs: Iterable[tuple[int, int]]) -> dict[str, str]:
    """Maps a tensor of A to its counterpart in B: outputs of paired nodes, inputs, tensors of enclosing graphs."""
    places = {place: name for name, place in b.inputs.items()}
    alias = {**a.outer, **{name: places[place] for name, place in a.inputs.items() if place in places}}
    for ours, theirs in pairs:
        names = zip(a.nodes[ours].output, b.nodes[theirs].output, strict=False)
        alias.update((left, right) for left, right in names if left and right)
    return alias


class _Matcher:
    def __init__(self, a: Nodes, b: Nodes) -> None:
        self._graphs = a, b
        self._a, self._b = dict.fromkeys(range(len(a.nodes))), dict.fromkeys(range(len(b.nodes)))
        self._pairs: list[tuple[int, int]] = []

    @property
    def open(self) -> bool:
        return bool(self._a and self._b)

    def unique(self, key_a: Key, key_b: Key) -> None:
        """Pair nodes whose key is unique in both graphs."""
        groups_a, groups_b = _groups(self._a, key_a), _groups(self._b, key_b)
        for key, ours in groups_a.items():
            theirs = groups_b.get(key, [])
            if len(ours) == len(theirs) == 1:
                self._pair(ours[0], theirs[0])

    def in_order(self, key_a: Key, key_b: Key) -> None:
        """Pair nodes with equal keys in graph order, if both graphs have equally many."""
        groups_a, groups_b = _groups(self._a, key_a), _groups(self._b, key_b)
        for key, ours in groups_a.items():
            theirs = groups_b.get(key, [])
            if len(ours) == len(theirs):
                for pair in zip(ours, theirs, strict=True):
                    self._pair(*pair)

    def result(self) -> Matches:
        return Matches(tuple(sorted(self._pairs)), tuple(self._a), tuple(self._b))

    def aliases(self) -> dict[str, str]:
        """Maps a tensor of A to its counterpart in B, as far as nodes are paired."""
        return aliases(*self._graphs, self._pairs)

    def _pair(self, ours: int, theirs: int) -> None:
        self._pairs.append((ours, theirs))
        del self._a[ours], self._b[theirs]


def _groups(indices: Mapping[int, None], key: Key) -> dict[Hashable, list[int]]:
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for index in indices:
        found = key(index)
        if found is not None:
            groups[found].append(index)
    return groups


def _by_name(graph: Nodes) -> Key:
    return lambda index: (graph.nodes[index].name, operator(graph.nodes[index])) if graph.nodes[index].name else None


def _by_output(graph: Nodes) -> Key:
    return lambda index: next((name for name in graph.nodes[index].output if name), None)


def _by_inputs(graph: Nodes, alias: Mapping[str, str]) -> Key:
    """The operands of a node: a node whose operator was changed still reads the same tensors."""
    return lambda index: tuple(alias.get(name, name) for name in graph.nodes[index].input) or None


def _digest(parts: Sequence[bytes]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        # Lengths keep the parts apart: ("ab", "c") and ("a", "bc") must not collide.
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
