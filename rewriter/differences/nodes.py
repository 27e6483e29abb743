"""Which node of one graph is which node of the other, and what changed in it.

Comes in: two graphs. Goes out: `Matches`: pairs of nodes, and those that have no partner. Used by
`rewriter.differences.models`. Time is linear in the nodes.

A node finds its partner by the first of these that names exactly one on either side, or the same number in the same
order: its name and operator, the tensor it makes, what it computes from the graph's inputs (equal operators,
attributes and weights all the way up, so renaming changes nothing), what is computed from it down to the outputs, the
operators around it, and the tensors that it reads.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import onnx

from rewriter.graph.view import ONNX_DOMAINS

_ROUNDS = 2
"""How many steps around a node its surroundings reach."""

Key = Callable[[int], Hashable | None]


@dataclass(frozen=True)
class Matches:
    """Pairs of node indices; the nodes of A and of B that have no partner."""

    pairs: tuple[tuple[int, int], ...]
    only_a: tuple[int, ...]
    only_b: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Nodes:
    """The nodes of one graph, with what matching asks of them.

    Attributes:
        nodes: in graph order.
        weights: initializer name to its fingerprint.
        inputs: names of the graph's inputs.
        outputs: names of the graph's outputs.
        opsets: operator domain to version.
    """

    nodes: Sequence[onnx.NodeProto]
    weights: Mapping[str, bytes]
    inputs: frozenset[str]
    outputs: tuple[str, ...]
    opsets: Mapping[str, int]

    def computed(self) -> list[bytes]:
        """For each node a digest of the whole computation above it."""
        known = {**{name: b"i" + name.encode() for name in self.inputs}, **self.weights}
        found = []
        for node in self.nodes:
            parts = [own_digest(node, self.opsets), *(known.get(name, b"?" + name.encode()) for name in node.input)]
            found.append(_digest(parts))
            known.update({name: _digest([found[-1], bytes([place % 256])]) for place, name in enumerate(node.output)})
        return found

    def surroundings(self) -> list[bytes]:
        """For each node a digest of the operators, attributes and weights within a few steps of it."""
        maker = {name: index for index, node in enumerate(self.nodes) for name in node.output if name}
        readers: dict[str, list[int]] = defaultdict(list)
        for index, node in enumerate(self.nodes):
            for name in node.input:
                readers[name].append(index)
        digests = [
            _digest([own_digest(node, self.opsets), *(self._weight(name) for name in node.input)])
            for node in self.nodes
        ]
        for _ in range(_ROUNDS):
            above = [[digests[maker[name]] for name in node.input if name in maker] for node in self.nodes]
            # A tensor that everything reads (a mask) tells little, and would make this quadratic.
            below = [
                sorted(digests[reader] for name in node.output for reader in readers[name][:8]) for node in self.nodes
            ]
            digests = [
                _digest([own, b"^", *up, b"v", *down]) for own, up, down in zip(digests, above, below, strict=True)
            ]
        return digests

    def led_to(self) -> list[bytes]:
        """For each node a digest of everything below it, down to the outputs of the graph."""
        below: dict[str, list[bytes]] = defaultdict(list)
        for name in self.outputs:
            below[name].append(b"o" + name.encode())
        own = self._own()
        for index in reversed(range(len(self.nodes))):
            node = self.nodes[index]
            own[index] = _digest([own[index], *(_digest(sorted(below.pop(name, []))) for name in node.output)])
            for place, name in enumerate(node.input):
                below[name].append(_digest([own[index], str(place).encode()]))
        return own

    def _own(self) -> list[bytes]:
        """For each node a digest of its operator, attributes and weights."""
        return [
            _digest([own_digest(node, self.opsets), *(self._weight(name) for name in node.input)])
            for node in self.nodes
        ]

    def _weight(self, name: str) -> bytes:
        return self.weights.get(name, b"i" if name in self.inputs else b"-")


def match(a: Nodes, b: Nodes) -> Matches:
    """Pair the nodes of two graphs."""
    matcher = _Matcher(a, b)
    matcher.unique(_by_name(a), _by_name(b))
    matcher.unique(_by_output(a), _by_output(b))
    if matcher.open:
        for digests in (Nodes.computed, Nodes.led_to, Nodes.surroundings):
            ours, theirs = digests(a), digests(b)
            matcher.in_order(ours.__getitem__, theirs.__getitem__)
        alias = matcher.aliases()
        matcher.unique(_by_inputs(a, alias), _by_inputs(b, {}))
    return matcher.result()


def attributes(node: onnx.NodeProto, opsets: Mapping[str, int]) -> dict[str, bytes]:
    """The attributes of a node as bytes, without those at their defaults: stating a default changes nothing."""
    defaults = _defaults("" if node.domain in ONNX_DOMAINS else node.domain, node.op_type, opsets.get(node.domain, 1))
    stated = {item.name: value_of(item) for item in node.attribute}
    return {name: value for name, value in sorted(stated.items()) if defaults.get(name) != value}


def own_digest(node: onnx.NodeProto, opsets: Mapping[str, int]) -> bytes:
    """Operator and attributes, without names and without the graphs inside."""
    stated = attributes(node, opsets)
    return _digest([operator(node).encode(), *(name.encode() + b"=" + value for name, value in stated.items())])


@cache
def _defaults(domain: str, name: str, version: int) -> Mapping[str, bytes]:
    try:
        schema = onnx.defs.get_schema(name, version, domain)
    except onnx.defs.SchemaError:
        return {}
    return {item.name: value_of(item.default_value) for item in schema.attributes.values() if item.default_value.name}


def value_of(attribute: onnx.AttributeProto) -> bytes:
    """The value of an attribute as bytes: its name, its doc string, a tensor's name and graphs left out."""
    if attribute.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS):
        return b"graph"
    plain = onnx.AttributeProto()
    plain.CopyFrom(attribute)
    plain.ClearField("name")
    plain.ClearField("doc_string")
    if plain.HasField("t"):
        plain.t.ClearField("name")
    data: bytes = plain.SerializeToString(deterministic=True)
    return data


def operator(node: onnx.NodeProto) -> str:
    """`Add`, or `com.microsoft::Gelu` with a domain of its own."""
    return node.op_type if node.domain in ONNX_DOMAINS else f"{node.domain}::{node.op_type}"


class _Matcher:
    def __init__(self, a: Nodes, b: Nodes) -> None:
        self._graphs = a, b
        self._a, self._b = dict.fromkeys(range(len(a.nodes))), dict.fromkeys(range(len(b.nodes)))
        self._pairs: list[tuple[int, int]] = []

    @property
    def open(self) -> bool:
        return bool(self._a and self._b)

    def unique(self, key_a: Key, key_b: Key) -> None:
        """Pair nodes whose key is theirs alone on either side."""
        groups_a, groups_b = _groups(self._a, key_a), _groups(self._b, key_b)
        for key, ours in groups_a.items():
            theirs = groups_b.get(key, [])
            if len(ours) == len(theirs) == 1:
                self._pair(ours[0], theirs[0])

    def in_order(self, key_a: Key, key_b: Key) -> None:
        """Pair nodes of equal keys in graph order, where there are as many on either side."""
        groups_a, groups_b = _groups(self._a, key_a), _groups(self._b, key_b)
        for key, ours in groups_a.items():
            theirs = groups_b.get(key, [])
            if len(ours) == len(theirs):
                for pair in zip(ours, theirs, strict=True):
                    self._pair(*pair)

    def result(self) -> Matches:
        return Matches(tuple(sorted(self._pairs)), tuple(self._a), tuple(self._b))

    def aliases(self) -> dict[str, str]:
        """Tensor of A to the tensor of B that stands in its place, as far as nodes are paired."""
        alias: dict[str, str] = {}
        for ours, theirs in self._pairs:
            alias.update(zip(self._graphs[0].nodes[ours].output, self._graphs[1].nodes[theirs].output, strict=False))
        return alias

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
    """What a node reads: a node that has another operator now still stands between the same tensors."""
    return lambda index: tuple(alias.get(name, name) for name in graph.nodes[index].input) or None


def _digest(parts: Sequence[bytes]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
