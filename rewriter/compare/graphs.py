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
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Literal

import numpy as np
import onnx
from numpy.typing import NDArray

from rewriter.files.load import LoadedModel, read_tensor
from rewriter.files.tensors import ELEMENT_TYPES, element_type
from rewriter.files.walk import is_external, iter_nodes, iter_tensors
from rewriter.graph.view import key_of, operator_of, opsets, subgraphs, tensor_of
from rewriter.text import counted, decoded, quoted

_SCHEMAS = LoadedModel(onnx.ModelProto(), None, None, (), 0)
"""An empty model, as the owner of the tensors in operator schemas."""

Status = Literal["changed", "only in A", "only in B"]


@dataclass(frozen=True)
class ReplacedNodes:
    """Connected nodes of A, and the nodes of B in their place.

    Attributes:
        a: operators and names of A's nodes in graph order; empty where B has added nodes.
        b: the same for B.
        what: what changed, if one node of the same operator took the place of another: `attribute axis`, `input 1`.
    """

    a: tuple[str, ...]
    b: tuple[str, ...]
    what: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """In words."""
        if self.what:
            return f"{self.a[0]}: {', '.join(self.what)} changed"
        if not (self.a and self.b):
            return f"{span(self.a or self.b)} is only in {'A' if self.a else 'B'}"
        return f"{span(self.a)} became {span(self.b)}"


@dataclass(frozen=True)
class TensorChange:
    """One weight that differs.

    Attributes:
        name: its name in A, or in B if it is only there; in a control-flow body behind that of the body.
        status: `changed`, `only in A` or `only in B`.
        kind: element type and dims in A and in B; empty where it is missing.
        elements: number of elements that differ; None if element types or dims differ.
        max_difference: largest |B - A|; None if it is not defined.
        index: the index of that element.
    """

    name: str
    status: Status
    kind: tuple[str, str]
    elements: int | None = None
    max_difference: float | None = None
    index: tuple[int, ...] | None = None

    @property
    def text(self) -> str:
        """In words."""
        if self.status != "changed":
            return f"weight {self.name} is {self.status}"
        if self.kind[0] != self.kind[1]:
            return f"weight {self.name}: {self.kind[0]} in A, {self.kind[1]} in B"
        if self.elements is None:
            return f"weight {self.name} differs"
        where = f" at {list(self.index)}" if self.index else ""
        count = counted(self.elements, "element")
        return f"weight {self.name} differs in {count}, by up to {self.max_difference:.3g}{where}"


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
        regions: the nodes that differ; a node that holds bodies counts as one.
        same_nodes: number of B's nodes that A has too.
        renamed: number of those whose own name or outputs' names differ.
        tensors: the weights that differ.
        same_tensors: number of A's weights that B has bit for bit.
        fields: differences in inputs, outputs and their producers, local functions, and opsets.
        remarks: differences in metadata, producer and IR version, which do not affect the computation.
    """

    operators: Mapping[str, tuple[int, int]]
    regions: tuple[ReplacedNodes, ...]
    same_nodes: int
    renamed: int
    tensors: tuple[TensorChange, ...]
    same_tensors: int
    fields: tuple[FieldChange, ...]
    remarks: tuple[FieldChange, ...]

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
    tensors = tuple(_tensor_changes(left.weights, right.weights))
    fields, remarks = _stated(a, b)
    found = [*_declared(a.proto.graph, b.proto.graph), *fields]
    for name in (value.name for value in a.proto.graph.output):
        if name in right.numbers and left.numbers.get(name) != right.numbers[name]:
            sources = [side.nodes.get(side.makers.get(name, b"")) for side in (left, right)]
            said = [name if node is None else describe(node) for node in sources]
            found.append(FieldChange("source of output", name, *said))
    same = [(number, node.name, *node.output) for number, node in right.all if number in left.nodes]
    named = {(number, node.name, *node.output) for number, node in left.all}
    counts = [Counter(operator(node) for node in iter_nodes(model.proto.graph.node)) for model in (a, b)]
    return GraphDifference(
        operators={name: (counts[0][name], counts[1][name]) for name in sorted(counts[0] | counts[1])},
        regions=tuple(_regions(left, right)),
        same_nodes=len(same),
        renamed=sum(each not in named for each in same),
        tensors=tensors,
        same_tensors=len(left.weights) - sum(each.status != "only in B" for each in tensors),
        fields=tuple(found),
        remarks=tuple(remarks),
    )


# -- nodes -----------------------------------------------------------------------------------------------------------


class _Numbered:
    """The nodes and tensors of a model by number.

    Attributes:
        all: number and node, in graph order, without Constant nodes that hold a tensor.
        nodes: number to its first node.
        numbers: tensor of the main graph to its number.
        makers: tensor of the main graph to the number of the node that makes it.
        weights: initializers and values of Constant nodes; those of bodies behind the name of the body.
        resumed: tensors that took over the number of A's tensor of the same name.
    """

    def __init__(self, model: LoadedModel, original: _Numbered | None = None) -> None:
        self._model, self._original = model, original
        self._opsets = opsets(model.proto.opset_import)
        self.weights: dict[str, Weight] = {}
        self.makers: dict[str, bytes] = {}
        self.resumed: set[str] = set()
        self._taken: set[bytes] = set()
        self.all: list[tuple[bytes, onnx.NodeProto]] = []
        graph = model.proto.graph
        self.numbers = {value.name: b"input " + value.name.encode() for value in graph.input}
        self.numbers |= self._constants(graph, "")
        for sparse in graph.sparse_initializer:
            parts = [Weight(model, part).digest for part in (sparse.values, sparse.indices)]
            self.numbers[sparse.values.name] = digest([*parts, repr(list(sparse.dims)).encode()])
        for node in graph.node:
            if _tensor(node) is None:
                number = self.number(node, self.numbers, holder=node.name or "".join(node.output[:1]))
                self.all.append((number, node))
                self.numbers |= self._outputs(node, number)
        self.nodes = dict(reversed(self.all))

    def _outputs(self, node: onnx.NodeProto, number: bytes) -> dict[str, bytes]:
        known, found = self._original, _places(node, number)
        self.makers |= dict.fromkeys(found, number)
        if known is None or number in known.nodes:
            self._taken.add(number)
            return found
        again = {name for name in found if name in known.makers and known.makers[name] not in self._taken}
        self.resumed |= again
        return {name: known.numbers[name] if name in again else own for name, own in found.items()}

    def number(self, node: onnx.NodeProto, known: Mapping[str, bytes], holder: str = "") -> bytes:
        """The number of a node. Raises ModelError: external data cannot be read."""
        stated = [b"%b=%b" % (name.encode(), value) for name, value in self.attributes(node, known, holder).items()]
        operands = [known.get(name, b"outer " + name.encode()) if name else b"" for name in node.input]
        outputs = bytes(bool(name) for name in node.output)  # one that is left out makes another node
        return digest([operator(node).encode(), bytes([len(stated) % 256]), *stated, *operands, outputs])

    def attributes(self, node: onnx.NodeProto, known: Mapping[str, bytes], holder: str = "") -> dict[str, bytes]:
        """The attributes as bytes, bodies by number, without those at their defaults, which make no difference."""
        domain, name = key_of(node)
        defaults = _defaults(domain, name, self._opsets.get(domain, 1))
        stated = {item.name: _value(item, self._model) for item in node.attribute}
        for place, body in subgraphs(node):
            stated[place] = self._body(body, known, f"{holder}/{place}/")
        return {name: value for name, value in sorted(stated.items()) if defaults.get(name) != value}

    def _body(self, graph: onnx.GraphProto, outer: Mapping[str, bytes], where: str) -> bytes:
        """The number of a body: names inside are free, places of inputs and outputs are not."""
        known = {**outer, **self._constants(graph, where)}
        # The depth tells the inputs of nested bodies apart.
        places = {value.name: f"{where.count('/')} {place}" for place, value in enumerate(graph.input)}
        known |= {name: b"place " + place.encode() for name, place in places.items()}
        for node in graph.node:
            if _tensor(node) is None:
                inner = f"{where}{node.name or ''.join(node.output[:1])}"
                known |= _places(node, self.number(node, known, inner))
        outputs = [known.get(value.name, value.name.encode()) for value in graph.output]
        return digest([b"%d inputs" % len(graph.input), *outputs])

    def _constants(self, graph: onnx.GraphProto, where: str) -> dict[str, bytes]:
        tensors = {tensor.name: tensor for tensor in graph.initializer}
        tensors |= {node.output[0]: value for node in graph.node if (value := _tensor(node)) is not None}
        found = {}
        for name, tensor in tensors.items():
            weight = self.weights[where + name] = Weight(self._model, tensor)
            named = None if self._original is None else self._original.weights.get(where + name)
            found[name] = (weight if named is None else named).digest
        return found


def _regions(a: _Numbered, b: _Numbered) -> Iterator[ReplacedNodes]:
    """Changed nodes that hang together: one reads what the other makes, or both make the tensor of one name."""
    changed = [(side, place) for side, (one, two) in enumerate(((a, b), (b, a)))
               for place, (number, _) in enumerate(one.all) if number not in two.nodes]  # fmt: skip
    group = {each: [each] for each in changed}
    made: dict[tuple[int, str], tuple[int, int]] = {}
    sides = a, b

    def join(one: tuple[int, int], two: tuple[int, int] | None) -> None:
        if two is not None and group[one] is not group[two]:
            less, more = sorted((group[one], group[two]), key=len)
            more += less
            for each in less:
                group[each] = more

    for each in changed:
        side, place = each
        node = sides[side].all[place][1]
        for name in node.input:
            if name not in b.resumed:
                join(each, made.get((side, name)))
        for name in filter(None, node.output):
            made[side, name] = each
            if name in b.resumed:
                join(each, made.get((1 - side, name)))
    for members in {id(each): sorted(each) for each in group.values()}.values():
        ours, theirs = ([sides[s].all[place][1] for s, place in members if s == side] for side in (0, 1))
        yield ReplacedNodes(tuple(map(describe, ours)), tuple(map(describe, theirs)), tuple(_what(a, b, ours, theirs)))


def _what(a: _Numbered, b: _Numbered, ours: list[onnx.NodeProto], theirs: list[onnx.NodeProto]) -> Iterator[str]:
    """What changed in a node that has a counterpart."""
    if len(ours) != 1 or len(theirs) != 1 or operator(ours[0]) != operator(theirs[0]):
        return
    one, two = a.attributes(ours[0], a.numbers), b.attributes(theirs[0], b.numbers)
    yield from (f"attribute {name}" for name in sorted(one | two) if one.get(name) != two.get(name))
    inputs = [[side.numbers.get(name) for name in node.input] for side, node in ((a, ours[0]), (b, theirs[0]))]
    for place in range(max(map(len, inputs))):
        if inputs[0][place : place + 1] != inputs[1][place : place + 1]:
            yield f"input {place}"


def span(names: Sequence[str]) -> str:
    """The first and the last of the nodes of a region."""
    return names[0] if len(names) == 1 else f"{len(names)} nodes, {names[0]} to {names[-1]}"


def operator(node: onnx.NodeProto) -> str:
    """`Add`, or `com.microsoft::Gelu` in another domain; an overload is appended after `:`."""
    name = operator_of(node)
    return f"{name}:{node.overload}" if node.overload else name


def describe(node: onnx.NodeProto) -> str:
    """Operator and name of a node, or its first output if it has no name."""
    name = node.name or next((name for name in node.output if name), "")
    return f"{operator(node)} {name}".rstrip()


def _places(node: onnx.NodeProto, number: bytes) -> dict[str, bytes]:
    return {name: digest([number, b"%d" % place]) for place, name in enumerate(node.output) if name}


def _tensor(node: onnx.NodeProto) -> onnx.TensorProto | None:
    """The value of a Constant node that holds a tensor; None for any other node."""
    return tensor_of(node) if key_of(node) == ("", "Constant") else None


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
    plain = onnx.AttributeProto()
    plain.CopyFrom(attribute)
    content = b"".join(Weight(model, tensor).digest for tensor in [*plain.tensors, plain.t] if tensor.data_type)
    for unread in ("name", "doc_string", "t", "tensors", "g", "graphs"):
        plain.ClearField(unread)
    data: bytes = plain.SerializeToString(deterministic=True)
    return data + content


def digest(parts: Sequence[bytes | memoryview]) -> bytes:
    """A digest that keeps the parts apart: ("ab", "c") and ("a", "bc") do not collide."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.digest()


# -- weights ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Weight:
    """A tensor of a model, which is read when its digest is asked for."""

    model: LoadedModel
    tensor: onnx.TensorProto

    @cached_property
    def kind(self) -> str:
        """Element type and dims, such as `float32[768, 3072]`."""
        return kind_of(self.tensor)

    @cached_property
    def digest(self) -> bytes:
        """A digest of type, dims and all of the data. Raises ModelError."""
        return digest([self.kind.encode(), self.data().data])

    def data(self) -> NDArray[np.uint8]:
        """The bytes of the data. Raises ModelError: they cannot be read, or do not match the dims."""
        if self.tensor.data_type == onnx.TensorProto.STRING:
            # Each string is preceded by its length.
            packed = b"".join(len(text).to_bytes(8, "little") + text for text in self.tensor.string_data)
            return np.frombuffer(packed, np.uint8)
        return np.ascontiguousarray(read_tensor(self.model, self.tensor)).reshape(-1).view(np.uint8)


def kind_of(tensor: onnx.TensorProto) -> str:
    """Element type and dims, such as `float32[768, 3072]`."""
    known = ELEMENT_TYPES.get(tensor.data_type)
    name = "?" if known is None else known.name.lower()
    return f"{'float32' if name == 'float' else name}[{', '.join(map(str, tensor.dims))}]"


def _tensor_changes(ours: Mapping[str, Weight], theirs: Mapping[str, Weight]) -> Iterator[TensorChange]:
    """Weights of one name with other bytes, and those that one side has neither by name nor by content."""
    held = [{weight.digest for weight in side.values()} for side in (ours, theirs)]
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in theirs:
            if ours[name].digest not in held[1]:
                yield TensorChange(name, "only in A", (ours[name].kind, ""))
        elif name not in ours:
            if theirs[name].digest not in held[0]:
                yield TensorChange(name, "only in B", ("", theirs[name].kind))
        elif ours[name].digest != theirs[name].digest:
            yield compared_weights(name, ours[name], theirs[name])


def compared_weights(name: str, a: Weight, b: Weight) -> TensorChange:
    """How two weights differ whose bytes do. Raises ModelError: data cannot be read."""
    plain = TensorChange(name, "changed", (a.kind, b.kind))
    element = element_type(a.tensor)
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(a.tensor.data_type)) if element.bits else np.dtype(object)
    if a.kind != b.kind or element.bits % 8 or dtype.kind in "cO":
        return plain
    left, right = a.data(), b.data()
    unequal = np.flatnonzero((left.reshape(-1, dtype.itemsize) != right.reshape(-1, dtype.itemsize)).any(-1))
    ours, theirs = (side.view(dtype)[unequal].astype(np.float64) for side in (left, right))
    with np.errstate(all="ignore"):
        far = np.abs(theirs - ours)
    far = np.where(np.isnan(far), np.inf, far)  # a NaN in one of them counts as an infinite difference
    top = int(np.argmax(far))
    index = tuple(int(place) for place in np.unravel_index(unequal[top], tuple(a.tensor.dims)))
    return replace(plain, elements=unequal.size, max_difference=float(far[top]), index=index)


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


def _declared(a: onnx.GraphProto, b: onnx.GraphProto) -> Iterator[FieldChange]:
    """Inputs and outputs that differ; they are known by name, and their order counts."""
    for what in ("input", "output"):
        ours, theirs = (_types(graph, what) for graph in (a, b))
        yield from _changes(what, ours, theirs)
        if ours.keys() == theirs.keys():
            yield from _changes("order", *({f"{what}s": ", ".join(side)} for side in (ours, theirs)))


def _types(graph: onnx.GraphProto, what: str) -> dict[str, str]:
    if what == "output":
        return {value.name: _type_text(value) for value in graph.output}
    given = {tensor.name for tensor in graph.initializer} | {tensor.values.name for tensor in graph.sparse_initializer}
    return {v.name: f"{_type_text(v)}{' with a default' if v.name in given else ''}" for v in graph.input}


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
    kind = value.type.tensor_type
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
        ours, theirs = (_free(model.graph, what) for model in (a, b))
        for name in [*ours, *(name for name in theirs if name not in ours)]:
            if name not in ours or name not in theirs:
                found.append(f"{what} {quoted(name)} is only in {'A' if name in ours else 'B'}")
            elif not _agree(ours[name].type, theirs[name].type):
                kinds = [_type_text(side[name]) for side in (ours, theirs)]
                found.append(f"{what} {quoted(name)}: {kinds[0]} in A, {kinds[1]} in B")
    return tuple(found)


def _free(graph: onnx.GraphProto, what: str) -> dict[str, onnx.ValueInfoProto]:
    defaults = {tensor.name for tensor in graph.initializer}
    values = graph.output if what == "output" else [each for each in graph.input if each.name not in defaults]
    return {value.name: value for value in values}


def _agree(a: onnx.TypeProto, b: onnx.TypeProto) -> bool:
    kinds, tensors = [each.WhichOneof("value") for each in (a, b)], [each.tensor_type for each in (a, b)]
    if None in kinds or kinds[0] != kinds[1]:
        return None in kinds
    elements = {each.elem_type for each in tensors} - {0}
    if len(elements) > 1 or not all(each.HasField("shape") for each in tensors):
        return len(elements) < 2
    dims = [each.shape.dim for each in tensors]
    sizes = zip(*dims, strict=False)
    fixed = (x.dim_value == y.dim_value for x, y in sizes if x.HasField("dim_value") and y.HasField("dim_value"))
    return len(dims[0]) == len(dims[1]) and all(fixed)
