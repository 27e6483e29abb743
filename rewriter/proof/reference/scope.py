"""Read a model as nested scopes of operators, ready to be evaluated.

A `Scope` is a graph, the body of a control-flow node, or the body of a call of a local function. It holds constants as
arrays, including those of Constant nodes, and the remaining nodes in graph order; references to attributes of functions
are bound. With `wide`, floats of every type become float64, and what has no float64 form is refused.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx

from rewriter.arrays import Array
from rewriter.errors import ModelError
from rewriter.files.load import LoadedModel, read_tensor
from rewriter.files.walk import is_external
from rewriter.graph.view import key_of, label, opsets, subgraphs
from rewriter.proof.reference.widen import (
    NoReference,
    check_type,
    check_values,
    constant_of,
    widened,
    widened_node,
)
from rewriter.text import one_line

Value = Any
"""The value of a name: an array, a list of arrays (a sequence), or None for an absent optional operand."""

Key = tuple[str, str]
"""Domain (the default one is the empty string) and type of an operator."""

KEPT = 2**16
"""Bytes up to which a constant is stored in a part instead of fed, and a weight that is read on demand is kept."""

CALL = "call"
"""The name of the only body of a node that calls a local function."""


@dataclass(frozen=True, eq=False)
class Node:
    """One operator.

    Attributes:
        proto: the node without its bodies; the default domain is the empty string.
        opset: version of its domain.
        bodies: maps an attribute to the body it holds. The body of a call sees nothing of the scopes around it.
    """

    proto: onnx.NodeProto
    opset: int
    bodies: Mapping[str, Scope]

    @property
    def key(self) -> Key:
        """Domain and type."""
        return self.proto.domain, self.proto.op_type

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """The names that it reads, including those that its bodies capture."""
        captured = [name for key, body in self.bodies.items() if key != CALL for name in body.captures]
        return tuple(dict.fromkeys([*(name for name in self.proto.input if name), *captured]))

    @cached_property
    def gives(self) -> tuple[str, ...]:
        """The names that it writes."""
        return tuple(name for name in self.proto.output if name)

    def __str__(self) -> str:
        return label(self.proto)


@dataclass(frozen=True, eq=False)
class Scope:
    """A graph, or the body of a node."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: Mapping[str, Array]
    nodes: tuple[Node, ...]

    @cached_property
    def captures(self) -> tuple[str, ...]:
        """The names that it reads from the scopes around it."""
        known = {*self.inputs, *self.constants, *(name for node in self.nodes for name in node.gives)}
        read = [name for node in self.nodes for name in node.reads]
        return tuple(name for name in dict.fromkeys([*read, *self.outputs]) if name not in known)


def read_model(model: onnx.ModelProto, base_dir: Path | None, *, wide: bool, held: bool = True) -> Scope:
    """The main graph of `model`.

    Args:
        model: the model; external data may be loaded or not. It is not changed.
        base_dir: where its external data lies.
        wide: whether floats become float64.
        held: whether weights are read now and kept; otherwise each is read when it is used, every time.

    Raises:
        NoReference: a tensor cannot be read or, with `wide`, something has no float64 form. Without `held`, weights
            raise it when they are used.
    """
    functions = {(function.domain, function.name): function for function in model.functions}
    reader = _Reader(functions, LoadedModel(model, None, base_dir, (), 0), wide, held)
    return reader.graph(model.graph, opsets(model.opset_import))


class _OnDemand(Mapping[str, Array]):
    """Weights that are read when they are used: float64 copies of all would take twice the memory of the model.

    Small ones are kept: `rewriter.proof.reference.parts` tells by identity whether a constant is overridden.
    """

    def __init__(self, tensors: Iterable[onnx.TensorProto], read: Callable[[onnx.TensorProto], Array]) -> None:
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._read = read
        self._small: dict[str, Array] = {}

    def __getitem__(self, name: str) -> Array:
        if name in self._small:
            return self._small[name]
        array = self._read(self._tensors[name])
        if array.nbytes <= KEPT:
            self._small[name] = array
        return array

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


@dataclass(frozen=True, eq=False)
class _Reader:
    functions: Mapping[Key, onnx.FunctionProto]
    model: LoadedModel
    wide: bool
    held: bool

    def values(self, tensor: onnx.TensorProto) -> Array:
        """The values of a tensor."""
        if self.wide:
            check_type(tensor.data_type, f"tensor '{tensor.name}'")
        if is_external(tensor) and self.model.base_dir is None:
            raise NoReference("weights lie outside the model file and were not loaded")
        try:
            array = read_tensor(self.model, tensor)
        except ModelError as error:
            what = "external data" if is_external(tensor) else "a weight"
            raise NoReference(f"{what} cannot be loaded: {one_line(error, 160)}") from error
        return widened(array) if self.wide else array

    def graph(self, graph: onnx.GraphProto, versions: Mapping[str, int]) -> Scope:
        if graph.sparse_initializer:
            raise NoReference("the model has sparse initializers")
        if self.wide:
            check_values((*graph.input, *graph.output))
        stated: dict[str, Array] = {}
        nodes = tuple(self.nodes(graph.node, versions, stated))
        weights = _OnDemand(graph.initializer, self.values)
        constants = {**weights, **stated} if self.held else ChainMap(stated, weights)  # type: ignore[arg-type]
        inputs, outputs = (tuple(value.name for value in values) for values in (graph.input, graph.output))
        return Scope(inputs, outputs, constants, nodes)

    def nodes(
        self, nodes: Iterable[onnx.NodeProto], versions: Mapping[str, int], constants: dict[str, Array]
    ) -> Iterator[Node]:
        """The nodes other than Constant nodes, whose values are added to `constants`."""
        for node in nodes:
            function = self.functions.get((node.domain, node.op_type))
            domain, kind = key_of(node)
            if function is not None:
                # The attributes of the call are bound in the body; the opsets that count are the function's own.
                bare = onnx.NodeProto(name=node.name, op_type=node.op_type, input=node.input, output=node.output)
                bare.domain = node.domain
                yield Node(bare, 1, {CALL: self.call(function, node)})
            elif (domain, kind) == ("", "Constant"):
                constants[node.output[0]] = constant_of(node, self.values, wide=self.wide)
            else:
                bodies = {name: self.graph(graph, versions) for name, graph in subgraphs(node)}
                bare = widened_node(node, self.values) if self.wide else _without_bodies(node)
                bare.domain = domain
                yield Node(bare, versions.get(domain, 1), bodies)

    def call(self, function: onnx.FunctionProto, node: onnx.NodeProto) -> Scope:
        # A function is read anew for every call, since its attributes, and so its constants, differ from call to call.
        # The defaults come first, so that attributes of the call override them.
        given = {attribute.name: attribute for attribute in (*function.attribute_proto, *node.attribute)}
        bound = [_bound(inner, given) for inner in function.node]
        constants: dict[str, Array] = {}
        nodes = tuple(self.nodes(bound, opsets(function.opset_import), constants))
        return Scope(tuple(function.input), tuple(function.output), constants, nodes)


def _without_bodies(node: onnx.NodeProto) -> onnx.NodeProto:
    bare = onnx.NodeProto(name=node.name, op_type=node.op_type, input=node.input, output=node.output)
    bodies = dict(subgraphs(node))
    bare.attribute.extend(attribute for attribute in node.attribute if attribute.name not in bodies)
    return bare


def _bound(node: onnx.NodeProto, given: Mapping[str, onnx.AttributeProto]) -> onnx.NodeProto:
    """A copy of a function's node, with references to the function's attributes resolved, also in subgraphs."""
    # References may occur at any depth of control flow inside the function, but not across a call to another function,
    # whose attributes are bound when that call is read.
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    pending = [copy]
    while pending:
        each = pending.pop()
        stated = [found for attribute in each.attribute for found in _stated(attribute, given)]
        del each.attribute[:]
        each.attribute.extend(stated)
        pending.extend(inner for _, graph in subgraphs(each) for inner in graph.node)
    return copy


def _stated(attribute: onnx.AttributeProto, given: Mapping[str, onnx.AttributeProto]) -> Iterator[onnx.AttributeProto]:
    """The attribute with a reference resolved; nothing if the referenced attribute is absent, so defaults apply."""
    found = onnx.AttributeProto()
    if not attribute.ref_attr_name:
        found.CopyFrom(attribute)
        yield found
    elif attribute.ref_attr_name in given:
        found.CopyFrom(given[attribute.ref_attr_name])
        found.name = attribute.name
        yield found


def twins(left: Scope, right: Scope) -> dict[Node, Node]:
    """Maps each operator of one reading of a model to the same operator of another, in bodies too."""
    found: dict[Node, Node] = {}
    pending = [(left, right)]
    while pending:
        a, b = pending.pop()
        for node, twin in zip(a.nodes, b.nodes, strict=True):
            found[node] = twin
            pending.extend(zip(node.bodies.values(), twin.bodies.values(), strict=True))
    return found
