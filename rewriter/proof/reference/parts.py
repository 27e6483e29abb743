"""Run consecutive operators in one onnxruntime session, without optimisation.

Element types are those of the values that the part is fed, so none have to be inferred. Large constants are fed too:
parts share them, and they are not copied into a protobuf.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from rewriter.arrays import Array
from rewriter.errors import ValidationError
from rewriter.graph.view import captured_names, label
from rewriter.ort.sessions import Session, open_session

Value = Any
"""The value of a name: an array, a list of arrays (a sequence), or None for an absent optional operand."""

KEPT = 2**16
"""Bytes up to which a constant is stored in a part instead of fed."""

_SMALL = 2**18
"""Maximum number of fed elements for which one thread is faster than starting more."""

_IR_VERSION = 10

_Kinds = tuple[tuple[str, bytes | None], ...]
"""Name and serialised type of everything that is fed; None for an absent optional operand."""


class NoKernelError(Exception):
    """onnxruntime cannot load a part."""


@dataclass(frozen=True, eq=False)
class Node:
    """One operator; the default domain is the empty string.

    Attributes:
        proto: the node.
        opset: version of its domain.
    """

    proto: onnx.NodeProto
    opset: int

    @property
    def key(self) -> tuple[str, str]:
        """Domain and type."""
        return self.proto.domain, self.proto.op_type

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """The names that it reads, including those that its bodies capture."""
        return tuple(filter(None, dict.fromkeys([*self.proto.input, *sorted(captured_names(self.proto))])))

    @cached_property
    def gives(self) -> tuple[str, ...]:
        """The names that it writes."""
        return tuple(filter(None, self.proto.output))

    def __str__(self) -> str:
        return label(self.proto)


@dataclass(frozen=True, eq=False)
class Part:
    """Operators that onnxruntime runs together.

    Attributes:
        nodes: the operators, all of one version of each domain.
        gives: the names that later operators read.
        constants: constants of the scope around it.
    """

    nodes: tuple[Node, ...]
    gives: tuple[str, ...]
    constants: Mapping[str, Array]
    _sessions: dict[_Kinds, Session] = field(default_factory=dict)

    def run(self, values: Mapping[str, Value]) -> dict[str, Value]:
        """Run the operators on what they read.

        Raises:
            NoKernelError: onnxruntime cannot load them for these types.
            ValidationError: it cannot run them.
        """
        inline = {name for name in self.reads if self._is_inline(name, values)}
        fed = {name: values[name] for name in self.reads if name not in inline}
        # One session per combination of types: a body may run with other types, or without optional operands.
        kinds = tuple((name, _kind(value)) for name, value in fed.items())
        if kinds not in self._sessions:
            few = sum(value.size for value in fed.values() if isinstance(value, np.ndarray)) <= _SMALL
            try:
                self._sessions[kinds] = open_session(
                    self._model(kinds, inline), optimise=False, threads=1 if few else 0
                )
            except ValidationError as error:
                raise NoKernelError(str(error)) from error
        feeds = {name: value for name, value in fed.items() if value is not None}
        return self._sessions[kinds].run_any(feeds)

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """The names that it reads from outside, in order of first use."""
        made = {name for node in self.nodes for name in node.gives}
        read = dict.fromkeys(name for node in self.nodes for name in node.reads)
        return tuple(name for name in read if name not in made)

    def _is_inline(self, name: str, values: Mapping[str, Value]) -> bool:
        # A constant that is also an input may have been overridden.
        constant = self.constants.get(name)
        return constant is not None and constant.nbytes <= KEPT and values[name] is constant

    def _model(self, kinds: _Kinds, inline: set[str]) -> onnx.ModelProto:
        absent = {name for name, kind in kinds if kind is None}
        graph = onnx.GraphProto(name="part")
        for node in self.nodes:
            added = graph.node.add()
            added.CopyFrom(node.proto)
            added.input[:] = ["" if name in absent else name for name in node.proto.input]
        graph.initializer.extend(numpy_helper.from_array(self.constants[name], name) for name in sorted(inline))
        for name, kind in kinds:
            if kind is not None:
                graph.input.add(name=name).type.ParseFromString(kind)
        graph.output.extend(onnx.ValueInfoProto(name=name) for name in self.gives)
        imports = {node.proto.domain: node.opset for node in self.nodes}
        versions = [helper.make_opsetid(domain, version) for domain, version in imports.items()]
        return helper.make_model(graph, opset_imports=versions, ir_version=_IR_VERSION)


def _kind(value: Value) -> bytes | None:
    """The serialised type of a value; None for an absent one."""
    return None if value is None else type_of(value).SerializeToString()


def type_of(value: Value) -> onnx.TypeProto:
    """The type of a tensor or a sequence, without a shape."""
    if isinstance(value, list):
        return helper.make_sequence_type_proto(type_of(value[0] if value else np.zeros(0)))
    array: np.ndarray[Any, Any] = np.asarray(value)
    kind = onnx.TensorProto.STRING if array.dtype.kind in "OUS" else helper.np_dtype_to_tensor_dtype(array.dtype)
    return helper.make_tensor_type_proto(int(kind), None)
