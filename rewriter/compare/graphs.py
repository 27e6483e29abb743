"""What differs between two models as files: operators, nodes, weights, metadata. Nothing is run.

Nodes of two graphs are paired by name and operator, by the tensor that they make, by the whole computation above them,
and then outwards from pairs: what makes the operands of a pair and what reads its results. Whatever is paired, a node
counts as the same only if operator, attributes and operands are. The time is linear in the number of nodes and the
bytes of the weights.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import onnx

from rewriter.compare.weights import Status, TensorChange, Weight, compared, kind_of, only
from rewriter.files.load import LoadedModel
from rewriter.files.walk import is_external, iter_nodes, iter_tensors
from rewriter.graph.types import elem_name
from rewriter.graph.view import ONNX_DOMAINS, key_of, operator_of, opsets, subgraphs
from rewriter.text import decoded, quoted

_SCHEMAS = LoadedModel(onnx.ModelProto(), None, None, (), 0)
"""An empty model, as the owner of the tensors in operator schemas."""

Key = Callable[[int], Hashable | None]
SameInput = Callable[[str, str], bool]
"""Whether a name in A and a name in B refer to the same tensor."""


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
class FieldChange:
    """One entry that differs.

    Attributes:
        what: the kind of entry: `opset`, `input`, `metadata` and so on.
        name: its name.
        a: its value in A; None if A lacks it.
        b: its value in B; None if B lacks it.
    """

    what: str
    name: str
    a: str | None
    b: str | None


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
        remarks: differences in metadata, producer and IR version, which do not affect the computation.
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
    found, remarks = _stated(a, b)
    same_nodes = renamed = same_tensors = 0
    pending = [_Pair("", Graph.of(a, a.proto.graph), Graph.of(b, b.proto.graph))]
    while pending:
        pair = pending.pop()
        weights, equal = pair.tensor_changes()
        changed, sources, alike, others, inner = pair.node_changes()
        tensors += weights
        nodes += changed
        found += [*declared(pair.name, pair.left.proto, pair.right.proto), *sources]
        found += _changes("sparse weight", _sparse(pair.left), _sparse(pair.right))
        same_tensors, same_nodes, renamed = same_tensors + equal, same_nodes + alike, renamed + others
        pending += inner
    counts = [Counter(operator(node) for node in iter_nodes(model.proto.graph.node)) for model in (a, b)]
    return GraphDifference(
        operators={name: (counts[0][name], counts[1][name]) for name in sorted(counts[0] | counts[1])},
        nodes=tuple(nodes),
        same_nodes=same_nodes,
        renamed=renamed,
        tensors=tuple(tensors),
        same_tensors=same_tensors,
        fields=tuple(found),
        remarks=tuple(remarks),
    )


# -- graphs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Graph:
    """One graph of a model, with the graphs around it.

    Attributes:
        model: the model that contains it.
        proto: the graph.
        nodes: its nodes in graph order, without Constant nodes.
        weights: its initializers and the values of its Constant nodes, by name.
        inputs: maps an input to its identity: its name, or its position in a body, where names are arbitrary.
        outputs: its outputs, likewise.
        captured: maps a tensor of an enclosing graph to its name in the other model.
        outer: the enclosing graph.
    """

    model: LoadedModel
    proto: onnx.GraphProto
    nodes: Sequence[onnx.NodeProto]
    weights: Mapping[str, Weight]
    inputs: Mapping[str, str]
    outputs: Sequence[tuple[str, str]]
    captured: Mapping[str, str]
    outer: Graph | None = None

    @classmethod
    def of(
        cls,
        model: LoadedModel,
        proto: onnx.GraphProto,
        outer: Graph | None = None,
        captured: Mapping[str, str] | None = None,
    ) -> Graph:
        """Index a graph."""
        weights = {tensor.name: Weight(model, tensor) for tensor in proto.initializer}
        constants = {node.output[0]: value for node in proto.node if (value := _constant(node)) is not None}
        weights |= {name: Weight(model, value) for name, value in constants.items()}
        return cls(
            model=model,
            proto=proto,
            nodes=[node for node in proto.node if _constant(node) is None],
            weights=weights,
            inputs={value.name: value.name if outer is None else str(i) for i, value in enumerate(proto.input)},
            outputs=[(value.name, value.name if outer is None else str(i)) for i, value in enumerate(proto.output)],
            captured=captured or {},
            outer=outer,
        )

    @cached_property
    def opsets(self) -> Mapping[str, int]:
        """Operator domain to version."""
        return opsets(self.model.proto.opset_import)

    @cached_property
    def makers(self) -> Mapping[str, tuple[int, int]]:
        """Tensor to the node that makes it, and the place among its outputs."""
        return {name: (index, place) for index, node in enumerate(self.nodes) for place, name in _named(node.output)}

    @cached_property
    def readers(self) -> Mapping[str, Sequence[tuple[int, int]]]:
        """Tensor to the nodes that read it, and the places among their inputs."""
        found: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for index, node in enumerate(self.nodes):
            for place, name in _named(node.input):
                found[name].append((index, place))
        return found

    def weight(self, name: str, depth: int = 0) -> tuple[int, Weight] | None:
        """The weight that a name refers to here, and how many graphs further out it is; None for other tensors."""
        if name in self.weights:
            return depth, self.weights[name]
        return None if self.outer is None or name in self.inputs else self.outer.weight(name, depth + 1)

    def computed(self) -> list[bytes]:
        """For each node, a digest of the whole computation above it."""
        # Digests of operands are combined (a Merkle tree), so shared subexpressions are not expanded and the time is
        # linear.
        known = {name: b"i" + place.encode() for name, place in self.inputs.items()}

        def given(name: str) -> bytes:
            return known.get(name) or self._data(name) or b"?" + self.captured.get(name, name).encode()

        found = []
        for node in self.nodes:
            found.append(_digest([own_digest(self, node), *map(given, node.input)]))
            known.update({name: _digest([found[-1], bytes([place % 256])]) for place, name in enumerate(node.output)})
        return found

    def _data(self, name: str) -> bytes | None:
        weight = self.weight(name)
        return None if weight is None else weight[1].digest


def _named(names: Sequence[str]) -> Iterator[tuple[int, str]]:
    return ((place, name) for place, name in enumerate(names) if name)


def _constant(node: onnx.NodeProto) -> onnx.TensorProto | None:
    """The value of a Constant node that holds a tensor; None for any other node."""
    if node.op_type != "Constant" or node.domain not in ONNX_DOMAINS or len(node.attribute) != 1:
        return None
    (stated,) = node.attribute
    return stated.t if stated.name == "value" else None


# -- nodes -----------------------------------------------------------------------------------------------------------


Matches = tuple[Sequence[tuple[int, int]], Sequence[int], Sequence[int]]
"""Pairs of node indices, and the unmatched nodes of A and of B."""


def match(a: Graph, b: Graph) -> Matches:
    """Pair the nodes of two graphs."""
    # From the most to the least specific evidence. Exporters give stable names, so the first two keys usually pair
    # everything, and the digests, which read weights, are computed only for the rest.
    matcher = _Matcher(a, b)
    matcher.unique(_by_name(a), _by_name(b))
    matcher.unique(_by_output(a), _by_output(b))
    if matcher.open:
        matcher.in_order(a.computed().__getitem__, b.computed().__getitem__)
        matcher.spread([operator(node) for node in a.nodes], [operator(node) for node in b.nodes])
        # Last, because the names of operands can be compared only through the pairs found so far.
        matcher.unique(_by_inputs(a, aliases(a, b, matcher.pairs)), _by_inputs(b, {}))
    return matcher.result()


def aliases(a: Graph, b: Graph, pairs: Sequence[tuple[int, int]]) -> dict[str, str]:
    """Maps a tensor of A to its counterpart in B: outputs of paired nodes, inputs, tensors of enclosing graphs."""
    places = {place: name for name, place in b.inputs.items()}
    alias = {**a.captured, **{name: places[place] for name, place in a.inputs.items() if place in places}}
    for ours, theirs in pairs:
        names = zip(a.nodes[ours].output, b.nodes[theirs].output, strict=False)
        alias.update((left, right) for left, right in names if left and right)
    return alias


class _Matcher:
    def __init__(self, a: Graph, b: Graph) -> None:
        self._graphs = a, b
        self._a, self._b = dict.fromkeys(range(len(a.nodes))), dict.fromkeys(range(len(b.nodes)))
        self.pairs: list[tuple[int, int]] = []

    @property
    def open(self) -> bool:
        return bool(self._a and self._b)

    def unique(self, key_a: Key, key_b: Key) -> None:
        """Pair nodes whose key is unique in both graphs."""
        groups_a, groups_b = _groups(self._a, key_a), _groups(self._b, key_b)
        for key, ours in groups_a.items():
            if len(ours) == len(groups_b.get(key, [])) == 1:
                self._pair(ours[0], groups_b[key][0])

    def in_order(self, key_a: Key, key_b: Key) -> None:
        """Pair nodes with equal keys in graph order, if both graphs have equally many."""
        groups_a, groups_b = _groups(self._a, key_a), _groups(self._b, key_b)
        for key, ours in groups_a.items():
            if len(ours) == len(groups_b.get(key, [])):
                for pair in zip(ours, groups_b[key], strict=True):
                    self._pair(*pair)

    def spread(self, kinds_a: Sequence[Hashable], kinds_b: Sequence[Hashable]) -> None:
        """Pair what makes the operands of pairs and what reads their results, where the kinds of nodes agree."""
        a, b = self._graphs
        outputs = {place: name for name, place in b.outputs}
        queue = deque(aliases(a, b, self.pairs).items())
        queue += [(name, outputs[place]) for name, place in a.outputs if place in outputs]
        for ours, theirs in self.pairs:
            queue += zip(a.nodes[ours].input, b.nodes[theirs].input, strict=False)
        seen = set()
        while queue:
            tensors = queue.popleft()
            if tensors in seen or not all(tensors):
                continue
            seen.add(tensors)
            for ours, theirs in [*self._makers(*tensors, kinds_a, kinds_b), *self._readers(*tensors, kinds_a, kinds_b)]:
                self._pair(ours, theirs)
                one, other = a.nodes[ours], b.nodes[theirs]
                queue += zip(one.input, other.input, strict=False)
                queue += zip(one.output, other.output, strict=False)

    def result(self) -> Matches:
        return sorted(self.pairs), list(self._a), list(self._b)

    def _makers(
        self, left: str, right: str, kinds_a: Sequence[Hashable], kinds_b: Sequence[Hashable]
    ) -> Iterator[tuple[int, int]]:
        one, other = self._graphs[0].makers.get(left), self._graphs[1].makers.get(right)
        if one is None or other is None or one[0] not in self._a or other[0] not in self._b:
            return
        if (kinds_a[one[0]], one[1]) == (kinds_b[other[0]], other[1]):
            yield one[0], other[0]

    def _readers(
        self, left: str, right: str, kinds_a: Sequence[Hashable], kinds_b: Sequence[Hashable]
    ) -> Iterator[tuple[int, int]]:
        groups: list[dict[Hashable, dict[int, None]]] = [defaultdict(dict), defaultdict(dict)]
        for found, graph, name, left_open, kinds in zip(
            groups, self._graphs, (left, right), (self._a, self._b), (kinds_a, kinds_b), strict=True
        ):
            taken = set()
            for index, place in graph.readers.get(name, ()):
                if index in left_open and index not in taken:
                    taken.add(index)  # by the first of its places
                    found[kinds[index], place][index] = None
        for key, ours in groups[0].items():
            if len(ours) == len(groups[1].get(key, ())):
                yield from zip(ours, groups[1][key], strict=True)

    def _pair(self, ours: int, theirs: int) -> None:
        self.pairs.append((ours, theirs))
        del self._a[ours], self._b[theirs]


def _groups(indices: Mapping[int, None], key: Key) -> dict[Hashable, list[int]]:
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for index in indices:
        found = key(index)
        if found is not None:
            groups[found].append(index)
    return groups


def _by_name(graph: Graph) -> Key:
    return lambda index: (graph.nodes[index].name, operator(graph.nodes[index])) if graph.nodes[index].name else None


def _by_output(graph: Graph) -> Key:
    return lambda index: next((name for name in graph.nodes[index].output if name), None)


def _by_inputs(graph: Graph, alias: Mapping[str, str]) -> Key:
    """The operands of a node: a node whose operator was changed still reads the same tensors."""
    return lambda index: tuple(alias.get(name, name) for name in graph.nodes[index].input) or None


def operator(node: onnx.NodeProto) -> str:
    """`Add`, or `com.microsoft::Gelu` in another domain; an overload is appended after `:`."""
    name = operator_of(node)
    return f"{name}:{node.overload}" if node.overload else name


def describe(node: onnx.NodeProto) -> str:
    """Operator and name of a node, or its first output if it has no name."""
    name = node.name or next((name for name in node.output if name), "")
    return f"{operator(node)} {name}".rstrip()


def attributes(graph: Graph, node: onnx.NodeProto) -> dict[str, bytes]:
    """The attributes of a node as bytes, without those at their defaults, which make no difference.

    Raises:
        ModelError: external data cannot be read.
    """
    domain, name = key_of(node)
    defaults = _defaults(domain, name, graph.opsets.get(domain, 1))
    stated = {item.name: value_of(item, graph.model) for item in node.attribute}
    return {name: value for name, value in sorted(stated.items()) if defaults.get(name) != value}


def own_digest(graph: Graph, node: onnx.NodeProto) -> bytes:
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
    content = [Weight(model, tensor).digest for tensor in tensors]
    for each in sparse:
        each.ClearField("values")
        each.ClearField("indices")
    for field in ("name", "doc_string", "t", "tensors"):
        plain.ClearField(field)
    data: bytes = plain.SerializeToString(deterministic=True)
    return data + b"".join(content)


def _digest(parts: Sequence[bytes]) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        # Lengths keep the parts apart: ("ab", "c") and ("a", "bc") must not collide.
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.digest()


# -- two graphs ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Pair:
    """A graph of A and its counterpart in B; `name` is empty for the main graph."""

    name: str
    left: Graph
    right: Graph

    def tensor_changes(self) -> tuple[list[TensorChange], int]:
        """The weights that differ, and the number of A's that are equal, possibly under another name."""
        ours, theirs = self.left.weights, self.right.weights
        changes = []
        for name in ours.keys() & theirs.keys():
            change = compared(name, ours[name], theirs[name])
            changes += [] if change is None else [change]
        changes += [only(name, ours[name], "only in A") for name in _lost(self.left, self.right)]
        same = len(ours) - len(changes)  # before those that only B has are added
        changes += [only(name, theirs[name], "only in B") for name in _lost(self.right, self.left)]
        return sorted(changes, key=lambda change: change.name), same

    def node_changes(self) -> tuple[list[NodeChange], list[FieldChange], int, int, list[_Pair]]:
        """Nodes that differ, outputs with another source, counts of same and renamed nodes, and bodies to compare."""
        a, b = self.left, self.right
        pairs, only_a, only_b = match(a, b)
        alias = aliases(a, b, pairs)
        same_input = self._same_input(alias)
        nodes: list[tuple[int, NodeChange]] = []
        inner: list[_Pair] = []
        same = renamed = 0
        for ours, theirs in pairs:
            one, other = a.nodes[ours], b.nodes[theirs]
            what = _what(one, other, [attributes(a, one), attributes(b, other)], same_input)
            inner += self._bodies(one, other, alias)
            if what:
                nodes.append((ours, NodeChange("changed", self.name, describe(one), describe(other), what)))
            else:
                same += 1
                renamed += one.name != other.name or list(one.output) != list(other.output)
        nodes += [(i, NodeChange("only in A", self.name, describe(a.nodes[i]), None)) for i in only_a]
        nodes += [(i, NodeChange("only in B", self.name, None, describe(b.nodes[i]))) for i in only_b]
        ordered = [change for _, change in sorted(nodes, key=lambda entry: entry[0])]
        return ordered, list(self._output_changes(same_input)), same, renamed, inner

    def _output_changes(self, same_input: SameInput) -> Iterator[FieldChange]:
        """Outputs with another source. Comparing nodes does not cover this: two outputs may have swapped names."""
        theirs = {place: name for name, place in self.right.outputs}
        for name, place in self.left.outputs:
            if place in theirs and not same_input(name, theirs[place]):
                where = f"{self.name} {place}" if self.name else place
                sources = [_source(self.left, name), _source(self.right, theirs[place])]
                yield FieldChange("source of output", where, *sources)

    def _same_input(self, alias: Mapping[str, str]) -> SameInput:
        """The test for names of this pair; `alias` maps tensors of A to their counterparts in B."""
        made = frozenset(alias.values())

        @cache
        def same(ours: str, theirs: str) -> bool:
            if ours in alias:
                return alias[ours] == theirs
            one, other = self.left.weight(ours), self.right.weight(theirs)
            if one is None or other is None:
                # Neither is a weight: an input or an outer tensor. `made` excludes a name that B gave to the
                # counterpart of another tensor of A.
                return ours == theirs and one is other and theirs not in made
            if ours == theirs and one[0] == other[0]:
                return True  # weights of the same name are compared where they are defined
            return one[1].same(other[1])

        return same

    def _bodies(self, one: onnx.NodeProto, other: onnx.NodeProto, alias: Mapping[str, str]) -> Iterator[_Pair]:
        """Pairs of control-flow bodies that two nodes hold under the same attribute."""
        ours, theirs = dict(subgraphs(one)), dict(subgraphs(other))
        for attribute in sorted(ours.keys() & theirs.keys()):
            where = "/".join(part for part in (self.name, one.name or one.op_type, attribute) if part)
            left = Graph.of(self.left.model, ours[attribute], self.left, alias)
            yield _Pair(where, left, Graph.of(self.right.model, theirs[attribute], self.right))


def _source(graph: Graph, name: str) -> str:
    return describe(graph.nodes[graph.makers[name][0]]) if name in graph.makers else name


def _lost(side: Graph, other: Graph) -> list[str]:
    """The weights of one side that the other side has neither by name nor by content."""
    missing = sorted(side.weights.keys() - other.weights.keys())
    kinds = {side.weights[name].kind for name in missing}
    held = {weight.digest for weight in other.weights.values() if weight.kind in kinds}
    return [name for name in missing if side.weights[name].digest not in held]


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
    if [place for place, _ in _named(one.output)] != [place for place, _ in _named(other.output)]:
        what.append("outputs")
    return tuple(what)


# -- what models state -----------------------------------------------------------------------------------------------


def _stated(a: LoadedModel, b: LoadedModel) -> tuple[list[FieldChange], list[FieldChange]]:
    """Opsets and local functions that differ; and what differs without affecting the computation.

    Raises:
        ModelError: external data cannot be read.
    """
    used = {
        _domain(node.domain)
        for model in (a.proto, b.proto)
        for node in iter_nodes([*model.graph.node, *(node for item in model.functions for node in item.node)])
    }
    versions = ({_domain(item.domain): str(item.version) for item in m.proto.opset_import} for m in (a, b))
    versioned = list(_changes("opset", *versions))
    functions = []
    ours, theirs = ({_function_name(item): item for item in m.proto.functions} for m in (a, b))
    for name in sorted(ours.keys() | theirs.keys()):
        sides = (a, ours.get(name)), (b, theirs.get(name))
        values = [None if item is None else _function_value(model, item) for model, item in sides]
        if values[0] != values[1]:
            counts = (None if item is None else f"{len(item.node)} nodes" for _, item in sides)
            functions.append(FieldChange("function", name, *counts))
    remarks = [
        *(each for each in versioned if each.name not in used),
        *_changes("metadata", *({item.key: item.value for item in m.proto.metadata_props} for m in (a, b))),
        *_changes("model", *(_about(m.proto) for m in (a, b))),
    ]
    return [*(each for each in versioned if each.name in used), *functions], remarks


def declared(scope: str, a: onnx.GraphProto, b: onnx.GraphProto) -> Iterator[FieldChange]:
    """Inputs and outputs that differ.

    In the main graph, whose `scope` is empty, inputs and outputs are identified by name, and their order counts. In a
    control-flow body they are identified by position, so only their number can differ.
    """
    for what in ("input", "output"):
        ours, theirs = (_types(graph, what) for graph in (a, b))
        if scope:
            yield from _changes(f"{what}s", *({scope: str(len(side))} for side in (ours, theirs)))
        else:
            yield from _changes(what, ours, theirs)
            if ours.keys() == theirs.keys():
                yield from _changes("order", *({f"{what}s": ", ".join(side)} for side in (ours, theirs)))


def _sparse(graph: Graph) -> dict[str, str]:
    """The sparse weights, in words."""
    found = {}
    for item in graph.proto.sparse_initializer:
        content = _digest([Weight(graph.model, part).digest for part in (item.values, item.indices)])
        found[item.values.name] = f"{list(item.dims)} of data {content.hex()[:12]}"
    return found


def _types(graph: onnx.GraphProto, what: str) -> dict[str, str]:
    if what == "output":
        return {value.name: _type_text(value) for value in graph.output}
    given = {tensor.name for tensor in graph.initializer} | {tensor.values.name for tensor in graph.sparse_initializer}
    defaults = {value.name: " with a default" if value.name in given else "" for value in graph.input}
    return {value.name: _type_text(value) + defaults[value.name] for value in graph.input}


def _function_name(function: onnx.FunctionProto) -> str:
    return f"{_domain(function.domain)}::{function.name}{f':{function.overload}' if function.overload else ''}"


def _function_value(model: LoadedModel, function: onnx.FunctionProto) -> bytes:
    """A function with all of its data, external data included."""
    tensors = (tensor for tensor in iter_tensors(onnx.ModelProto(functions=[function])) if is_external(tensor))
    stated: bytes = function.SerializeToString(deterministic=True)
    return stated + b"".join(Weight(model, tensor).digest for tensor in tensors)


def _about(model: onnx.ModelProto) -> dict[str, str]:
    producer = f"{decoded(model.producer_name)} {decoded(model.producer_version)}".strip()
    said = {"IR version": str(model.ir_version), "producer": producer, "graph": model.graph.name}
    return {name: value for name, value in said.items() if value}


def _changes(what: str, ours: Mapping[str, str], theirs: Mapping[str, str]) -> Iterator[FieldChange]:
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        if ours.get(name) != theirs.get(name):
            sides = (None if name not in side else decoded(side[name]) for side in (ours, theirs))
            yield FieldChange(what, decoded(name), *sides)


def _domain(domain: str) -> str:
    return domain or "ai.onnx"


def _type_text(value: onnx.ValueInfoProto) -> str:
    held = value.type.WhichOneof("value")
    if held != "tensor_type":
        return (held or "of unknown type").removesuffix("_type")
    name = kind_of(onnx.TensorProto(data_type=value.type.tensor_type.elem_type)).partition("[")[0]
    dims = _dims(value)
    return name if dims is None else f"{name}[{', '.join(map(decoded, dims))}]"


def signature_differences(a: onnx.ModelProto, b: onnx.ModelProto) -> tuple[str, ...]:
    """Why two models cannot be run on the same inputs and compared, such as `output 'y': float in A, double in B`.

    Names and element types must agree, and so must sizes that both declare; names of symbolic dimensions do not matter.
    """
    found: list[str] = []
    for what in ("input", "output"):
        ours, theirs = (dict(_free(model.graph, what)) for model in (a, b))
        for name in [*ours, *(name for name in theirs if name not in ours)]:
            if name not in ours or name not in theirs:
                found.append(f"{what} {quoted(name)} is only in {'A' if name in ours else 'B'}")
                continue
            kinds = [_element(side[name]) for side in (ours, theirs)]
            dims = [_dims(side[name]) for side in (ours, theirs)]
            if kinds[0] != kinds[1] and "undefined" not in kinds:
                found.append(f"{what} {quoted(name)}: {kinds[0]} in A, {kinds[1]} in B")
            elif not _agree(*dims):
                found.append(
                    f"{what} {quoted(name)}: [{', '.join(dims[0] or ())}] in A, [{', '.join(dims[1] or ())}] in B"
                )
    return tuple(found)


def _free(graph: onnx.GraphProto, what: str) -> Iterator[tuple[str, onnx.ValueInfoProto]]:
    defaults = {tensor.name for tensor in graph.initializer}
    values = graph.output if what == "output" else [each for each in graph.input if each.name not in defaults]
    return ((value.name, value) for value in values)


def _element(value: onnx.ValueInfoProto) -> str:
    held = value.type.WhichOneof("value")
    return (
        elem_name(value.type.tensor_type.elem_type)
        if held == "tensor_type"
        else (held or "undefined").removesuffix("_type")
    )


def _dims(value: onnx.ValueInfoProto) -> list[str] | None:
    kind = value.type.tensor_type
    if not kind.HasField("shape"):
        return None
    return [str(dim.dim_value) if dim.HasField("dim_value") else dim.dim_param or "?" for dim in kind.shape.dim]


def _agree(a: Sequence[str] | None, b: Sequence[str] | None) -> bool:
    if a is None or b is None:
        return True
    return len(a) == len(b) and all(x == y for x, y in zip(a, b, strict=True) if x.isdecimal() and y.isdecimal())
