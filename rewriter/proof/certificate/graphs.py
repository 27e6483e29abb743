"""A model as a graph of numbered tensors: equal numbers, equal computations.

The number of a tensor is a digest of everything that it is computed from: operators, attributes, constants, and inputs
by name; names of nodes and of inner tensors do not count. Weights that both models take from the same bytes of the same
file are numbered by that place, and never read. Local functions are inlined; fused operators, operators on
quantised numbers and mixtures of experts are written out as they are defined; a sum is its terms, in any order; nodes
that only pass on (Identity, Constant, a Cast to the same type) are transparent. Bodies of control flow see the scopes
around them, and number their own inputs by depth and position.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from rewriter.errors import RewriteError
from rewriter.files.external import read_external, resolve
from rewriter.files.load import LoadedModel, read_tensor
from rewriter.graph.edit import inlined, set_nodes
from rewriter.graph.fused import FUSED, PRODUCTS, apart, in_parts, names_in, saturating
from rewriter.graph.mixtures import with_plain_experts
from rewriter.graph.types import TensorType, declared_types, forget_types, inferred_graph, type_of
from rewriter.graph.view import (
    ONNX_DOMAINS,
    GraphView,
    Path,
    all_views,
    constant_of,
    holder_name,
    integer_of,
    key_of,
    label,
    opsets,
)
from rewriter.graph.walk import all_graphs, functions_with, is_external, iter_nodes, iter_tensors, subgraphs
from rewriter.proof.certificate.expressions import defaults, listing
from rewriter.text import one_line, quoted

_RANDOM = ("Random", "Multinomial", "Bernoulli", "Dropout", "Sampling")
"""What the names of operators that draw numbers contain."""
_KNOWN_DOMAINS = ("", "ai.onnx.ml", "com.microsoft")
"""The domains whose operators are known to be functions of their operands, but for those that draw numbers."""
_MOST_TERMS = 8
_MOST_VALUES = 4096
"""Constants of more elements are not read as numbers of an expression."""

_FIELDS = dict(
    enumerate(
        [
            "f",
            "i",
            "s",
            "t",
            "g",
            "floats",
            "ints",
            "strings",
            "tensors",
            "graphs",
            "sparse_tensor",
            "sparse_tensors",
            "tp",
            "type_protos",
        ],
        1,
    )
)
"""The field that holds an attribute's value, by type."""

FUNCTION, SOURCE, HEADS = "(function)", "(source)", "(heads)"
"""Stand among the attributes of a node for the content of the function that it calls, the numbers that it draws, and
what heads were read as."""

Function = tuple[str, str, str]
"""Domain, name and overload."""


class NotCertifiable(RewriteError):  # noqa: N818 - says what the model is
    """A model with something that no statement can be made about."""


@dataclass(frozen=True, eq=False)
class Tensor:
    """Where a tensor comes from, past Identity nodes and through outer scopes; one object for each.

    Attributes:
        scope: the graph that makes it.
        name: its name there.
        node: the node that makes it.
        place: the position among the outputs of the node, or among the inputs of the graph.
        constant: its value, if it is one; large ones are not read.
    """

    scope: Scope
    name: str
    node: onnx.NodeProto | None = None
    place: int = 0
    constant: onnx.TensorProto | None = None

    @property
    def number(self) -> str:
        """The digest of what it is computed from."""
        return self.scope.number(self.name)

    def equals(self, other: Tensor) -> bool:
        """Whether two constants are the same; those at different places are read."""
        if self.number == other.number:
            return True
        if self.constant is None or other.constant is None:
            return False
        ours = self.scope.model.digest(self.constant, by_place=False)
        return ours == other.scope.model.digest(other.constant, by_place=False)

    @property
    def kind(self) -> str:
        """Whether it is a constant, an input of the graph, or made by a node."""
        return "constant" if self.constant is not None else "input" if self.node is None else "node"

    @property
    def elem_type(self) -> int:
        """Its element type; 0 where that is unknown."""
        if self.constant is not None:
            return self.constant.data_type
        return self.type.elem_type

    @property
    def type(self) -> TensorType:
        """What is declared or inferred about it."""
        return self.scope.types.get(self.name, TensorType.UNKNOWN)

    @property
    def label(self) -> str:
        """Its name in messages, with the operator that makes it."""
        return f"{self.name} ({label(self.node)})" if self.node is not None else self.name

    @cached_property
    def values(self) -> np.ndarray | None:
        """The numbers of a small constant; None for anything else. An entry of a constant vector counts as one."""
        node = self.node
        if node is not None and key_of(node) == ("", "Gather") and not integer_of(node, "axis", False):
            vector, index = (self.scope.find(name).values for name in node.input)
            if vector is None or index is None or vector.ndim != 1 or index.ndim != 0:
                return None
            return np.asarray(vector[int(index)]) if -vector.size <= int(index) < vector.size else None
        if self.constant is None or np.prod(self.constant.dims, dtype=float) > _MOST_VALUES:
            return None
        return self.scope.model.read(self.constant)


class Model:
    """A loaded model, prepared and numbered."""

    def __init__(
        self, loaded: LoadedModel, original: Model | None = None, shared: frozenset[tuple[int, ...]] = frozenset()
    ) -> None:
        """Inline functions, split fused operators, infer types.

        Args:
            loaded: the model; it is not changed.
            original: what it is compared with; None for the specification itself, whose word about its shapes is taken.
            shared: of the specification: places of weights that need not be read (`shared_ranges`).

        Raises:
            NotCertifiable: the model has an attribute that refers to one of a function.
        """
        self._loaded = loaded
        self.ir_version: int = loaded.proto.ir_version
        self.outputs = tuple(value.name for value in loaded.proto.graph.output)
        self.signature = [_signature(values) for values in (loaded.proto.graph.input, loaded.proto.graph.output)]
        self.original = original is None
        self.shared: frozenset[tuple[int, ...]] = shared if original is None else original.shared
        listed = {tensor.name for tensor in loaded.proto.graph.initializer}
        # A model that lists all its initializers as inputs keeps the habit of IR version 3, and means constants.
        inputs = {value.name for value in loaded.proto.graph.input}
        self.fixed: bool = listed <= inputs if original is None else original.fixed
        self.functions: Mapping[Function, str] = {}
        self.drawing: Collection[tuple[str, str]] = ()
        proto = loaded.proto
        if proto.functions:
            # A runtime may have an operator of this name.
            kept = [each for each in proto.functions if _default(each.domain) in _KNOWN_DOMAINS]
            if kept:
                proto = deepcopy(proto)
                for each in kept:
                    proto.functions.remove(each)
            try:
                proto = inlined(proto)
            except (RuntimeError, onnx.checker.ValidationError) as error:
                raise NotCertifiable(f"its local functions cannot be inlined: {one_line(str(error), 120)}") from error
            proto.functions.extend(kept)
            # Those that stay, such as functions of another operator set, are compared as they are written.
            left = {(_default(each.domain), each.name, each.overload): each for each in proto.functions}
            self.functions = {key: _digest(*map(self._content, _closure(key, left))) for key in left}
            self.drawing = {(_default(domain), name) for domain, name in functions_with(proto, _draws)}
        else:
            proto = deepcopy(proto)
        proto = with_plain_experts(proto)
        taken = names_in(proto)
        for graph in all_graphs(proto.graph):
            for node in graph.node:
                node.domain = key_of(node)[0]  # type inference knows the default domain by one name only
                _check_attributes(node)
            given = set() if self.fixed else {value.name for value in graph.input}
            low = saturating(graph, self.read, given)
            # Not by the name that a plan gives it: a lowered model has a tensor of this name.
            definitions = {**FUSED, **PRODUCTS}
            parts = (apart(node, in_parts(node, low, definitions, "saturated"), taken) for node in graph.node)
            set_nodes(graph, [part for each in parts for part in each])
        if not self.original:
            _forget_types(proto)
        self._proto = proto
        self.opsets: Mapping[str, int] = opsets(proto.opset_import)
        self.domains = frozenset(key_of(node)[0] for node in iter_nodes(proto.graph.node))
        typed = inferred_graph(proto)
        self.scopes: dict[Path, Scope] = {}
        self.sums: dict[str, list[str]] = {}
        self.main = Scope(self, proto.graph, declared_types(typed), typed=typed)

    @cached_property
    def views(self) -> Mapping[Path, GraphView]:
        """The indices of its graphs, by path."""
        return {view.path: view for view in all_views(self._proto)}

    def read(self, tensor: onnx.TensorProto) -> np.ndarray:
        """The values of a constant."""
        return read_tensor(self._loaded, tensor)

    def _content(self, function: onnx.FunctionProto) -> tuple[object, ...]:
        """All that a function is, with the data that it has in other files."""
        tensors = (tensor for tensor in iter_tensors(onnx.ModelProto(functions=[function])) if is_external(tensor))
        return function.SerializeToString(deterministic=True), *map(self.digest, tensors)

    def digest(self, tensor: onnx.TensorProto, *, by_place: bool = True) -> str:
        """A digest of type, shape and bytes, or where these are if both models have them there and `by_place`."""
        made = hashlib.sha256(repr((tensor.data_type, tuple(tensor.dims))).encode())
        if is_external(tensor) and self._loaded.base_dir is not None:
            place = resolve(tensor, self._loaded.base_dir).range if by_place else ()
            if place in self.shared:
                made.update(repr(place).encode())
            else:
                made.update(read_external(tensor, self._loaded.base_dir).data)
        elif tensor.data_type == TensorProto.STRING:
            made.update(repr(list(tensor.string_data)).encode())
        else:
            made.update(tensor.raw_data or np.ascontiguousarray(self.read(tensor)).tobytes())
        return made.hexdigest()


def shared_ranges(*models: LoadedModel) -> frozenset[tuple[int, ...]]:
    """The bytes of files that all models refer to, which need not be read to be the same."""
    return frozenset.intersection(*(frozenset(ref.range for ref in model.external) for model in models))


class Scope:
    """One graph of a model: the main one, or the body of a node.

    Attributes:
        model: the model.
        outer: the graph around it; None for the main graph.
        depth: how many graphs are around it.
        types: element types and shapes of its tensors.
        made: tensor to the node that makes it and the place among its outputs.
        bodies: those of its nodes, by id of the node and attribute.
        initializers: by name; `overridable` are those that a caller may replace.
        numbers: what was numbered so far.
        found: what functions found of its tensors so far (`rewriter.proof.certificate.constants.remembered`).
        path: the way from the main graph, as in `rewriter.graph.view.Path`.
        heads: by tensor, the `regions.Region` that `rewriter.proof.certificate.attention` read.
        unread: by tensor, why it was not.
    """

    def __init__(
        self,
        model: Model,
        graph: onnx.GraphProto,
        types: Mapping[str, TensorType],
        *,
        typed: onnx.GraphProto,
        outer: Scope | None = None,
        path: Path = (),
    ) -> None:
        self.model, self.outer, self.path = model, outer, path
        model.scopes[path] = self
        self.depth: int = 0 if outer is None else outer.depth + 1
        self.types = dict(types)
        self.outputs = tuple(value.name for value in graph.output)
        self.inputs = {value.name: place for place, value in enumerate(graph.input)}
        self.made = {name: (node, place) for node in graph.node for place, name in enumerate(node.output) if name}
        self.initializers = {tensor.name: tensor for tensor in graph.initializer}
        self.overridable = frozenset(
            () if outer is None and model.fixed else self.initializers.keys() & self.inputs.keys()
        )
        self.bodies: dict[tuple[int, str], Scope] = {}
        self.numbers: dict[str, str] = {}
        self.found: dict[tuple[object, Tensor], Any] = {}
        self.heads: dict[str, Any] = {}
        self.unread: dict[str, str] = {}
        self._tensors: dict[str, Tensor] = {}
        for node, skeleton in zip(graph.node, typed.node, strict=True):
            self._state_type(node)
            for (name, body), (_, inner) in zip(subgraphs(node), subgraphs(skeleton), strict=True):
                self.bodies[id(node), name] = Scope(
                    model,
                    body,
                    declared_types(inner, types),
                    typed=inner,
                    outer=self,
                    path=(*path, (holder_name(node), name)),
                )
            self.number_node(node)

    def _state_type(self, node: onnx.NodeProto) -> None:
        """Let a CastLike, of whose second operand only the type counts, be a Cast to it."""
        kind = self.types.get(node.input[1], TensorType.UNKNOWN).elem_type if key_of(node) == ("", "CastLike") else 0
        if kind:
            node.op_type = "Cast"
            del node.input[1]
            node.attribute.append(onnx.helper.make_attribute("to", kind))

    def define(self, node: onnx.NodeProto, elem_type: int) -> None:
        """Let a node make a tensor, in place of the one that does, if there is one."""
        name = node.output[0]
        self.made[name] = node, 0
        self.types.setdefault(name, TensorType(elem_type, None))
        self._tensors.pop(name, None)
        self.number_node(node)

    def constant(self, name: str, values: np.ndarray) -> None:
        """Add a constant."""
        self.initializers[name] = onnx.numpy_helper.from_array(np.ascontiguousarray(values), name)

    def find(self, name: str) -> Tensor:
        """Where a tensor comes from. Raises NotCertifiable for a name that nothing defines."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.made:
                node, place = scope.made[name]
                if (key_of(node) == ("", "Identity") and node.input[0]) or (place == 0 and self._inactive(node)):
                    name = node.input[0]
                    continue
            found = scope.own(name)
            if found is not None:
                return found
            scope = scope.outer
        raise NotCertifiable(f"tensor {quoted(name)} is not defined")

    def own(self, name: str) -> Tensor | None:
        """A tensor of this graph; None where it has none of this name."""
        if name not in self._tensors:
            if name in self.made:
                node, place = self.made[name]
                constant = constant_of(node)
                found = Tensor(self, name, None if constant is not None else node, place, constant)
            elif name in self.initializers and name not in self.overridable:
                found = Tensor(self, name, constant=self.initializers[name])
            elif name in self.inputs:
                found = Tensor(self, name, place=self.inputs[name])
            else:
                return None
            self._tensors[name] = found
        return self._tensors[name]

    def _inactive(self, node: onnx.NodeProto) -> bool:
        """Whether a node is a Cast to the type that is there, or a Dropout of opset 7 or later without training."""
        if key_of(node) == ("", "Cast"):
            return self.types.get(node.input[0], TensorType.UNKNOWN).elem_type == integer_of(node, "to", 0) != 0
        return key_of(node) == ("", "Dropout") and len(node.input) < 3 and self.model.opsets.get("", 0) >= 7

    def number(self, name: str) -> str:
        """The digest of what a tensor is computed from; the empty string for an operand that is left out."""
        if not name:
            return ""
        found = self.find(name)
        known = found.scope.numbers.get(found.name)
        if known is None:
            known = found.scope.numbers[found.name] = found.scope.number_source(found)
        return known

    def attributes(self, node: onnx.NodeProto) -> list[tuple[str, object]]:
        """What a node is beside operator, operands and bodies, comparable: attributes, with tensors by digest.

        Attributes at their defaults make no difference. A node that may draw numbers is the same as another only under
        the same name.

        Raises:
            NotCertifiable: an attribute has a type that is not supported.
        """
        key = key_of(node)
        stated = sorted((a for a in node.attribute if a.type not in (5, 10)), key=lambda a: a.name)
        unsaid = {a.name: self._attribute(a) for a in defaults(key, self.model.opsets.get(key[0], 0)).values()}
        found = [(a.name, self._attribute(a)) for a in stated]
        found = [(name, value) for name, value in found if unsaid.get(name) != value]
        if (*key, node.overload) in self.model.functions:
            found.append((FUNCTION, self.model.functions[*key, node.overload]))
        if key[0] not in _KNOWN_DOMAINS or _draws(node) or key in self.model.drawing:
            found.append((SOURCE, (self.path, list(node.output))))
        heads = self.heads.get(node.output[0]) if node.output else None
        if heads is not None:
            found.append((HEADS, (listing(heads.expression), heads.tokens)))
        return found

    def _attribute(self, attribute: onnx.AttributeProto) -> object:
        if attribute.ref_attr_name:
            raise NotCertifiable(f"attribute {quoted(attribute.name)} refers to one of a function")
        if attribute.type == onnx.AttributeProto.TENSOR:
            return self.model.digest(attribute.t)
        if attribute.type in (onnx.AttributeProto.TYPE_PROTO, onnx.AttributeProto.TYPE_PROTOS):
            return attribute.SerializeToString(deterministic=True)
        if attribute.type > onnx.AttributeProto.STRINGS:
            raise NotCertifiable(f"attribute {quoted(attribute.name)} has a type that is not supported")
        return attribute.type, repr(onnx.helper.get_attribute_value(attribute))

    def number_source(self, found: Tensor) -> str:
        """The digest of a constant or an input of this graph."""
        if found.constant is not None:
            return _digest("constant", self.model.digest(found.constant))
        if found.kind == "input":
            start = self.model.digest(self.initializers[found.name]) if found.name in self.overridable else ""
            return _digest("input", self.depth, found.place if self.depth else found.name, start)
        raise NotCertifiable(f"tensor {quoted(found.name)} is used before it is made; sort the graph")

    def number_node(self, node: onnx.NodeProto) -> None:
        """Number the outputs of a node, whose operands come before it; again where these have other numbers by now."""
        key = key_of(node)
        if key in (("", "Identity"), ("", "Constant")):
            return
        bodies = [
            (name, len(body.inputs), [body.number(each) for each in body.outputs])
            for name, body in ((name, self.bodies[id(node), name]) for name, _ in subgraphs(node))
        ]
        operands = [self.number(name) for name in node.input]
        sums = key == ("", "Add") and not node.attribute
        if sums or (key == ("", "Mul") and not node.attribute):
            # Operands may be exchanged, and a sum is its terms, in any order; of two long sums it is the two.
            terms = [each for number in operands for each in self.model.sums.get(number, [number])]
            operands = sorted(terms if sums and len(terms) <= _MOST_TERMS else operands)
        made = (key, self.attributes(node), bodies, operands, [bool(name) for name in node.output])
        for place, name in enumerate(node.output):
            if name:
                self.numbers[name] = _digest("node", place, *made)
                if sums:
                    self.model.sums[self.numbers[name]] = operands


def _default(domain: str) -> str:
    return "" if domain in ONNX_DOMAINS else domain


def _draws(node: onnx.NodeProto) -> bool:
    return any(part in node.op_type for part in _RANDOM)


def _forget_types(proto: onnx.ModelProto) -> None:
    """Leave types to inference, from the inputs on; only what it knows no operator of keeps its element type."""
    for graph in all_graphs(proto.graph):
        foreign = {name for node in graph.node if node.domain not in ("", "ai.onnx.ml") for name in node.output}
        forget_types(graph, {value.name for value in graph.value_info} - foreign)
        for value in (*graph.value_info, *graph.output, *(graph.input if graph is not proto.graph else ())):
            if value.type.HasField("tensor_type"):
                value.type.tensor_type.ClearField("shape")


def _check_attributes(node: onnx.NodeProto) -> None:
    """Raises NotCertifiable where a value is not of the type that its attribute declares, or that the operator has."""
    usual = defaults(key_of(node))
    for each in node.attribute:
        given = {field.name for field, _ in each.ListFields()} - {"name", "type", "doc_string", "ref_attr_name"}
        if given - {_FIELDS.get(each.type)} or (each.name in usual and usual[each.name].type != each.type):
            raise NotCertifiable(f"{label(node)}: attribute {quoted(each.name)} is of another type")


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _closure(key: Function, functions: Mapping[Function, onnx.FunctionProto]) -> list[onnx.FunctionProto]:
    """A function and those that it calls, in an order that does not depend on the model."""
    found, pending = dict[Function, onnx.FunctionProto](), [key]
    while pending:
        each = pending.pop()
        if each in functions and each not in found:
            found[each] = functions[each]
            pending += [(*key_of(node), node.overload) for node in iter_nodes(functions[each].node)]
    return [found[each] for each in sorted(found)]


def _signature(values: Sequence[onnx.ValueInfoProto]) -> list[tuple[str, object]]:
    """Names and types of inputs or outputs, comparable."""
    return [
        (each.name, type_of(each.type) if each.type.HasField("tensor_type") else each.type.SerializeToString())
        for each in values
    ]
