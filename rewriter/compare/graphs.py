"""What differs between two models as files: operators, replaced regions, weights, metadata. Nothing is run.

Every tensor gets a number: a digest of operator, attributes and the numbers of operands, or of a weight's bytes. A node
of B is the same as one of A if its number is; names do not count. Where B's node is another one, its outputs take over
the numbers of A's tensors of the same names, and so does a weight with other values: what follows can be the same
again, and the nodes in between are a region that was replaced. The time is linear in nodes and bytes.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from typing import ClassVar

import numpy as np
import onnx

from rewriter.arrays import Array
from rewriter.files.load import LoadedModel, read_tensor
from rewriter.files.tensors import ELEMENT_TYPES
from rewriter.graph.view import constant_of, key_of, operator_of, opsets
from rewriter.graph.walk import is_external, iter_nodes, iter_tensors, subgraphs
from rewriter.text import counted, decoded, quoted

_SCHEMAS = LoadedModel(onnx.ModelProto(), None, None, (), 0)
"""An empty model, as the owner of the tensors in operator schemas."""

_REMARKS = ("unused opset", "metadata", "model")
"""Entries that do not affect the computation."""


@dataclass(frozen=True)
class Change:
    """One difference.

    Attributes:
        what: `nodes` (a region that was replaced), `weight`, or the kind of entry: `opset`, `input`, `metadata`.
        name: its name, that of a weight in a body behind the name of the body; empty for nodes.
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
        operators: maps every operator, also in control-flow bodies, to its counts in A and in B.
        regions: the nodes that differ; a node that holds bodies counts as one.
        same_nodes: number of B's nodes that A has too.
        tensors: the weights that differ.
        same_tensors: number of A's weights that B has bit for bit.
        fields: differences in inputs, outputs and their producers, local functions, and opsets.
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
    left = _Numbered(a)
    right = _Numbered(b, left)
    tensors = tuple(_weight_changes(left, right))
    stated = declared_changes(a, b)
    for name in (value.name for value in a.proto.graph.output):
        if name in right.numbers and left.numbers.get(name) != right.numbers[name]:
            one, two = (side.nodes.get(side.makers.get(name, b"")) for side in (left, right))
            stated.append(Change("source of output", name, one and _describe(one), two and _describe(two)))
    counts = [Counter(_operator(node) for node in iter_nodes(model.proto.graph.node)) for model in (a, b)]
    return GraphDifference(
        operators={name: (counts[0][name], counts[1][name]) for name in sorted(counts[0] | counts[1])},
        regions=tuple(_regions(left, right)),
        same_nodes=sum(number in left.nodes for number, _ in right.all),
        tensors=tensors,
        same_tensors=len(left.weights) - sum(each.a is not None for each in tensors),
        fields=tuple(each for each in stated if each.what not in _REMARKS),
        remarks=tuple(each for each in stated if each.what in _REMARKS),
    )


# -- nodes -----------------------------------------------------------------------------------------------------------


class _Numbered:
    """The nodes and tensors of a model by number.

    Attributes:
        model: the model.
        all: number and node, in graph order, without Constant nodes that hold a tensor.
        nodes: number to its first node.
        numbers: tensor of the main graph to its number.
        makers: tensor of the main graph to the number of the node that makes it.
        weights: digest and tensor of initializers and Constant nodes; those of bodies behind the name of the body.
    """

    def __init__(self, model: LoadedModel, original: _Numbered | None = None) -> None:
        self.model, self._original = model, original
        self._opsets = opsets(model.proto.opset_import)
        self.weights: dict[str, tuple[bytes, onnx.TensorProto]] = {}
        self.makers: dict[str, bytes] = {}
        self._taken: set[bytes] = set()
        self.all: list[tuple[bytes, onnx.NodeProto]] = []
        self.numbers = self._numbers(model.proto.graph, {}, "")
        self.nodes = dict(reversed(self.all))

    def _numbers(self, graph: onnx.GraphProto, outer: Mapping[str, bytes], where: str) -> dict[str, bytes]:
        """Number the tensors of a graph; in bodies names are free, and the depth tells nested inputs apart."""
        places = (f"{where.count('/')} place {n}" if where else f"input {v.name}" for n, v in enumerate(graph.input))
        known = {**outer, **{v.name: place.encode() for v, place in zip(graph.input, places, strict=True)}}
        tensors = {tensor.name: tensor for tensor in graph.initializer}
        tensors |= {node.output[0]: value for node in graph.node if (value := constant_of(node)) is not None}
        for name, tensor in tensors.items():
            found = self.weights[where + name] = digest_of(self.model, tensor), tensor
            known[name] = found[0] if self._original is None else self._original.weights.get(where + name, found)[0]
        for sparse in graph.sparse_initializer:
            parts = [digest_of(self.model, part) for part in (sparse.values, sparse.indices)]
            known[sparse.values.name] = _digest([*parts, repr(list(sparse.dims)).encode()])
        for node in graph.node:
            if constant_of(node) is None:
                number = self._number(node, known, f"{where}{node.name or ''.join(node.output[:1])}")
                made = {name: _digest([number, b"%d" % n]) for n, name in enumerate(node.output) if name}
                known |= made if where else self._resumed(node, number, made)
        return known

    def _resumed(self, node: onnx.NodeProto, number: bytes, made: dict[str, bytes]) -> dict[str, bytes]:
        """The numbers of a node's outputs: those of A's tensors of these names where A has no such node."""
        self.all.append((number, node))
        self.makers |= dict.fromkeys(made, number)
        known = self._original
        if known is None or number in known.nodes:
            self._taken.add(number)
            return made
        again = {name for name in made if name in known.makers and known.makers[name] not in self._taken}
        return {name: known.numbers[name] if name in again else own for name, own in made.items()}

    def _number(self, node: onnx.NodeProto, known: Mapping[str, bytes], holder: str) -> bytes:
        """The number of a node. Raises ModelError: external data cannot be read."""
        stated = [b"%b=%b" % (name.encode(), value) for name, value in self.attributes(node, known, holder).items()]
        operands = [known.get(name, b"outer " + name.encode()) if name else b"" for name in node.input]
        outputs = bytes(bool(name) for name in node.output)  # one that is left out makes another node
        return _digest([_operator(node).encode(), bytes([len(stated) % 256]), *stated, *operands, outputs])

    def attributes(self, node: onnx.NodeProto, known: Mapping[str, bytes], holder: str) -> dict[str, bytes]:
        """The attributes as bytes, bodies by number, without those at their defaults, which make no difference."""
        domain, name = key_of(node)
        defaults = _defaults(domain, name, self._opsets.get(domain, 1))
        stated = {item.name: _value(item, self.model) for item in node.attribute}
        for place, body in subgraphs(node):
            inner = self._numbers(body, known, f"{holder}/{place}/")
            outputs = [inner.get(value.name, value.name.encode()) for value in body.output]
            stated[place] = _digest([b"%d inputs" % len(body.input), *outputs])
        return {name: value for name, value in sorted(stated.items()) if defaults.get(name) != value}


def _regions(a: _Numbered, b: _Numbered) -> Iterator[Change]:
    """Runs of nodes, in graph order, of which the other model has none."""
    left, right = ([number for number, _ in side.all] for side in (a, b))
    for _, *places in SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        ours, theirs = (
            [node for number, node in side.all[slice(*run)] if number not in other.nodes]
            for side, other, run in ((a, b, places[:2]), (b, a, places[2:]))
        )
        if ours or theirs:
            yield Change("nodes", "", _span(ours), _span(theirs), ", ".join(_what(a, b, ours, theirs)))


def _what(a: _Numbered, b: _Numbered, ours: list[onnx.NodeProto], theirs: list[onnx.NodeProto]) -> Iterator[str]:
    """What changed in a node that has a counterpart."""
    if len(ours) != 1 or len(theirs) != 1 or _operator(ours[0]) != _operator(theirs[0]):
        return
    one, two = a.attributes(ours[0], a.numbers, ""), b.attributes(theirs[0], b.numbers, "")
    yield from (f"attribute {name}" for name in sorted(one | two) if one.get(name) != two.get(name))
    inputs = [[side.numbers.get(name) for name in node.input] for side, node in ((a, ours[0]), (b, theirs[0]))]
    for place in range(max(map(len, inputs))):
        if inputs[0][place : place + 1] != inputs[1][place : place + 1]:
            yield f"input {place}"


def _span(nodes: Sequence[onnx.NodeProto]) -> str | None:
    """The first and the last of the nodes of a region; None if there are none."""
    if len(nodes) > 1:
        return f"{len(nodes)} nodes, {_describe(nodes[0])} to {_describe(nodes[-1])}"
    return _describe(nodes[0]) if nodes else None


def _operator(node: onnx.NodeProto) -> str:
    """`Add`, or `com.microsoft::Gelu` in another domain; an overload is appended after `:`."""
    name = operator_of(node)
    return f"{name}:{node.overload}" if node.overload else name


def _describe(node: onnx.NodeProto) -> str:
    """Operator and name of a node, or its first output if it has no name."""
    name = node.name or next((name for name in node.output if name), "")
    return f"{_operator(node)} {name}".rstrip()


@cache
def _defaults(domain: str, name: str, version: int) -> Mapping[str, bytes]:
    try:
        schema = onnx.defs.get_schema(name, version, domain)
    except onnx.defs.SchemaError:
        return {}
    stated = (item.default_value for item in schema.attributes.values() if item.default_value.name)
    return {value.name: _value(value, _SCHEMAS) for value in stated}


def _value(attribute: onnx.AttributeProto, model: LoadedModel) -> bytes:
    """The value of an attribute as bytes, without name and doc string; tensors by their content, bodies as such."""
    plain = deepcopy(attribute)
    content = b"".join(digest_of(model, tensor) for tensor in [*plain.tensors, plain.t] if tensor.data_type)
    for unread in ("name", "doc_string", "t", "tensors", "g", "graphs"):
        plain.ClearField(unread)
    data: bytes = plain.SerializeToString(deterministic=True)
    return data + content


def _digest(parts: Sequence[bytes | memoryview]) -> bytes:
    """A digest that keeps the parts apart: ("ab", "c") and ("a", "bc") do not collide."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.digest()


# -- weights ---------------------------------------------------------------------------------------------------------


def digest_of(model: LoadedModel, tensor: onnx.TensorProto) -> bytes:
    """A digest of type, dims and all of the data. Raises ModelError: they cannot be read, or do not fit the dims."""
    strings = tensor.data_type == onnx.TensorProto.STRING
    data = [*tensor.string_data] if strings else [_bytes(read_tensor(model, tensor)).data]
    return _digest([_kind_of(tensor).encode(), *data])


def _bytes(values: Array) -> Array:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def _kind_of(tensor: onnx.TensorProto) -> str:
    """Element type and dims, such as `float32[768, 3072]`."""
    known = ELEMENT_TYPES.get(tensor.data_type)
    name = "?" if known is None else known.name.lower()
    return f"{'float32' if name == 'float' else name}[{', '.join(map(str, tensor.dims))}]"


def _weight_changes(a: _Numbered, b: _Numbered) -> Iterator[Change]:
    """Weights of one name with other bytes, and those that one side has neither by name nor by content."""
    held = [{digest for digest, _ in side.weights.values()} for side in (a, b)]
    for name in sorted(a.weights.keys() | b.weights.keys()):
        (one, ours), (two, theirs) = (side.weights.get(name, (b"", None)) for side in (a, b))
        kinds = ours and _kind_of(ours), theirs and _kind_of(theirs)
        if ours is None or theirs is None:
            if (one or two) not in held[theirs is None]:
                yield Change("weight", name, *kinds)
        elif one != two:
            values = read_tensor(a.model, ours), read_tensor(b.model, theirs)
            yield Change("weight", name, *kinds, apart(*values) if kinds[0] == kinds[1] else "")


def apart(a: Array, b: Array) -> str:
    """In how many elements two arrays of one type and shape differ, and by how much where these are real numbers."""
    if a.dtype.kind in "cO":
        return "values"
    left, right = (_bytes(each).reshape(-1, a.dtype.itemsize) for each in (a, b))
    unequal = np.flatnonzero((left != right).any(-1))
    ours, theirs = (side.reshape(-1)[unequal].astype(np.float64) for side in (a, b))
    with np.errstate(all="ignore"):
        far = np.abs(theirs - ours)
    far = np.where(np.isnan(far), np.inf, far)  # a NaN in one of them counts as an infinite difference
    top = int(np.argmax(far))
    index = [int(place) for place in np.unravel_index(unequal[top], a.shape)]
    return f"{counted(unequal.size, 'element')}, by up to {far[top]:.3g}{f' at {index}' if index else ''}"


# -- what models state -----------------------------------------------------------------------------------------------


def declared_changes(a: LoadedModel, b: LoadedModel) -> list[Change]:
    """What models state that differs: opsets, inputs, outputs and their order, functions, metadata.

    Raises:
        ModelError: external data cannot be read.
    """
    nodes = [node for m in (a, b) for graph in (m.proto.graph, *m.proto.functions) for node in iter_nodes(graph.node)]
    used = {_domain(node.domain) for node in nodes}
    ours, theirs = (_stated(model, used) for model in (a, b))
    return [each for what in ours for each in _changed(what, ours[what], theirs[what])]


def _stated(model: LoadedModel, used: set[str]) -> dict[str, dict[str, str]]:
    """By kind, the names and texts of what a model states."""
    proto, graph = model.proto, model.proto.graph
    versions = {_domain(item.domain): str(item.version) for item in proto.opset_import}
    given = {tensor.name for tensor in graph.initializer} | {tensor.values.name for tensor in graph.sparse_initializer}
    producer = f"{decoded(proto.producer_name)} {decoded(proto.producer_version)}".strip()
    about = {"IR version": str(proto.ir_version), "producer": producer, "graph": graph.name}
    return {
        "input": {v.name: f"{type_text(v)}{' with a default' if v.name in given else ''}" for v in graph.input},
        "output": {value.name: type_text(value) for value in graph.output},
        "order": {f"{what}s": ", ".join(v.name for v in getattr(graph, what)) for what in ("input", "output")},
        "opset": {name: version for name, version in versions.items() if name in used},
        "function": {_function_name(item): _function_text(model, item) for item in proto.functions},
        "unused opset": {name: version for name, version in versions.items() if name not in used},
        "metadata": {item.key: item.value for item in proto.metadata_props},
        "model": {name: value for name, value in about.items() if value},
    }


def _changed(what: str, ours: Mapping[str, str], theirs: Mapping[str, str]) -> Iterator[Change]:
    for name in {**ours, **theirs}:
        if ours.get(name) != theirs.get(name):
            one, two = (None if name not in side else decoded(side[name]) for side in (ours, theirs))
            yield Change(what, decoded(name), one, two)


def _function_name(function: onnx.FunctionProto) -> str:
    return f"{_domain(function.domain)}::{function.name}{f':{function.overload}' if function.overload else ''}"


def _function_text(model: LoadedModel, function: onnx.FunctionProto) -> str:
    """The size of a function, and a digest of it with all of its data, external data included."""
    tensors = (tensor for tensor in iter_tensors(onnx.ModelProto(functions=[function])) if is_external(tensor))
    stated: bytes = function.SerializeToString(deterministic=True)
    content = _digest([stated, *(digest_of(model, tensor) for tensor in tensors)])
    return f"{counted(len(function.node), 'node')}, digest {content.hex()[:8]}"


def _domain(domain: str) -> str:
    return domain or "ai.onnx"


def type_text(value: onnx.ValueInfoProto) -> str:
    """Element type and dims of an input or output, such as `float32[batch, 768]`."""
    held = value.type.WhichOneof("value")
    if held != "tensor_type":
        return (held or "of unknown type").removesuffix("_type")
    kind = value.type.tensor_type
    name = _kind_of(onnx.TensorProto(data_type=kind.elem_type)).partition("[")[0]
    if not kind.HasField("shape"):
        return name
    dims = [str(dim.dim_value) if dim.HasField("dim_value") else dim.dim_param or "?" for dim in kind.shape.dim]
    return f"{name}[{', '.join(map(decoded, dims))}]"


def signature_differences(a: onnx.ModelProto, b: onnx.ModelProto) -> tuple[str, ...]:
    """Why two models cannot be run on the same inputs and compared, such as `output 'y': float32[2] in A, int64 in B`.

    Names and element types must agree, and so must sizes that both declare; names of symbolic dimensions do not matter.
    """
    found: list[str] = []
    for what in ("input", "output"):
        defaults = [{tensor.name for tensor in m.graph.initializer if what == "input"} for m in (a, b)]
        ours, theirs = (
            {value.name: value for value in getattr(model.graph, what) if value.name not in own}
            for model, own in zip((a, b), defaults, strict=True)
        )
        for name in {**ours, **theirs}:
            if name not in ours or name not in theirs:
                found.append(f"{what} {quoted(name)} is only in {'A' if name in ours else 'B'}")
            elif not _agree(ours[name].type, theirs[name].type):
                kinds = [type_text(side[name]) for side in (ours, theirs)]
                found.append(f"{what} {quoted(name)}: {kinds[0]} in A, {kinds[1]} in B")
    return tuple(found)


def _agree(a: onnx.TypeProto, b: onnx.TypeProto) -> bool:
    kinds = {each.WhichOneof("value") for each in (a, b)} - {None}
    elements = {each.tensor_type.elem_type for each in (a, b)} - {0}
    if len(kinds) > 1 or len(elements) > 1 or not all(each.tensor_type.HasField("shape") for each in (a, b)):
        return len(kinds) < 2 and len(elements) < 2
    dims = [each.tensor_type.shape.dim for each in (a, b)]
    sizes = zip(*dims, strict=False)
    fixed = (x.dim_value == y.dim_value for x, y in sizes if x.HasField("dim_value") and y.HasField("dim_value"))
    return len(dims[0]) == len(dims[1]) and all(fixed)
