"""A model in double precision.

Comes in: a model with its weights. Goes out: the same computation on float64, as a model. Used by
`rewriter.proof.float64` for the truth that rounding errors are measured against.

float16, bfloat16 and float32 become double everywhere: initializers, constants, inputs and outputs, targets
of Cast and the like, subgraphs, local functions. The values are those of the original weights; nothing is
computed again. Operators that round on purpose (quantisation), draw random numbers or are not known are
refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, MutableSequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from rewriter.errors import RewriteError
from rewriter.graph.view import ONNX_DOMAINS, label, subgraphs
from rewriter.proof.messages import one_line
from rewriter.proof.numpy_operators import NUMPY_OPERATORS

_NARROW = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16}
_EXACT = {
    TensorProto.DOUBLE, TensorProto.BOOL, TensorProto.STRING, TensorProto.UNDEFINED,
    TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64,
    TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64,
}  # fmt: skip
_QUANTISED = (
    "QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul",
    "MatMulInteger", "ConvInteger",
)  # fmt: skip
_RANDOM = (
    "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial",
)  # fmt: skip
_REFUSED = {
    **dict.fromkeys(_QUANTISED, "quantised"),
    **dict.fromkeys(_RANDOM, "random"),
    "BitCast": "about bits",
}
"""Operators without a float64 form, and what they are."""

_TYPE_ATTRIBUTES = {"to", "dtype", "output_dtype", "output_datatype"}
_STAYS_FLOAT = {"Resize": (2,), "Upsample": (1,), "NonMaxSuppression": (0, 1, 3, 4)}
"""Operands whose only type is float32: sizes and selections, not data."""


class NoReference(RewriteError):  # noqa: N818 - no mistake of anyone: the proof does without
    """There is no float64 evaluation of the model; the message is the reason."""


def to_double(model: onnx.ModelProto) -> onnx.ModelProto:
    """`model` on float64.

    Args:
        model: a model whose tensors are all inline.

    Raises:
        NoReference: an operator or a tensor has no float64 form.
    """
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    local = {(function.domain, function.name) for function in wide.functions}
    numbers = itertools.count()
    for function in wide.functions:
        del function.value_info[:]
        _widen_nodes(function.node, local, numbers)
        for attribute in function.attribute_proto:
            if attribute.HasField("t"):
                _widen_tensor(attribute.t)
    _widen_graph(wide.graph, local, numbers)
    return wide


def _widen_graph(graph: onnx.GraphProto, local: set[tuple[str, str]], numbers: Iterator[int]) -> None:
    if graph.sparse_initializer:
        raise NoReference("the model has sparse initializers")
    del graph.value_info[:]
    for tensor in graph.initializer:
        _widen_tensor(tensor)
    for value in (*graph.input, *graph.output):
        _widen_type(value.type)
    _widen_nodes(graph.node, local, numbers)


def _widen_nodes(nodes: MutableSequence[onnx.NodeProto], local: set[tuple[str, str]], numbers: Iterator[int]) -> None:
    casts: list[tuple[int, onnx.NodeProto]] = []
    for index, node in enumerate(nodes):
        if (node.domain, node.op_type) not in local:
            _check(node)
        for _, graph in subgraphs(node):
            _widen_graph(graph, local, numbers)
        for attribute in node.attribute:
            _widen_attribute(node, attribute)
        if node.op_type == "ConstantOfShape" and not node.attribute:
            node.attribute.append(helper.make_attribute("value", numpy_helper.from_array(np.zeros(1))))
        for operand in _STAYS_FLOAT.get(node.op_type, ()):
            if operand < len(node.input) and node.input[operand]:
                narrow = f"float32_operand_{next(numbers)}"
                cast = helper.make_node("Cast", [node.input[operand]], [narrow], to=TensorProto.FLOAT)
                casts.append((index, cast))
                node.input[operand] = narrow
    for index, cast in reversed(casts):
        nodes.insert(index, cast)


def _check(node: onnx.NodeProto) -> None:
    kind = _REFUSED.get(node.op_type)
    if kind is not None:
        raise NoReference(f"{one_line(label(node), 120)} is {kind}")
    if node.domain not in ONNX_DOMAINS and (node.domain, node.op_type) not in NUMPY_OPERATORS:
        raise NoReference(f"{one_line(label(node), 120)} has no known float64 form")


def _widen_attribute(node: onnx.NodeProto, attribute: onnx.AttributeProto) -> None:
    if attribute.name in _TYPE_ATTRIBUTES and attribute.type == onnx.AttributeProto.INT:
        _check_type(attribute.i, label(node))
        if attribute.i in _NARROW:
            attribute.i = TensorProto.DOUBLE
    elif attribute.HasField("sparse_tensor"):
        raise NoReference(f"{one_line(label(node), 120)} holds a sparse tensor")
    elif attribute.HasField("t"):
        _widen_tensor(attribute.t)
    elif node.op_type == "Constant" and attribute.name in {"value_float", "value_floats"}:
        if attribute.ref_attr_name:
            return  # the caller's number; numpy and CastLike widen it
        value: float | list[float] = attribute.f if attribute.name == "value_float" else list(attribute.floats)
        attribute.CopyFrom(helper.make_attribute("value", numpy_helper.from_array(np.asarray(value, np.float64))))


def _widen_tensor(tensor: onnx.TensorProto) -> None:
    _check_type(tensor.data_type, f"tensor '{tensor.name}'")
    if tensor.data_location == TensorProto.EXTERNAL:
        raise NoReference("weights lie outside the model file and were not loaded")
    if tensor.data_type in _NARROW:
        values = numpy_helper.to_array(tensor).astype(np.float64)
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))


def _widen_type(kind: onnx.TypeProto) -> None:
    held = kind.WhichOneof("value")
    if held == "tensor_type":
        _check_type(kind.tensor_type.elem_type, "an input or output")
        if kind.tensor_type.elem_type in _NARROW:
            kind.tensor_type.elem_type = TensorProto.DOUBLE
    elif held in {"sequence_type", "optional_type"}:
        _widen_type(getattr(kind, held).elem_type)
    elif held is not None:
        raise NoReference(f"an input or output is a {held.removesuffix('_type')}")


def _check_type(elem_type: int, what: str) -> None:
    if elem_type not in _NARROW | _EXACT:
        name = next((key for key, value in TensorProto.DataType.items() if value == elem_type), str(elem_type))
        raise NoReference(f"{one_line(what, 120)} is of type {name.lower()}")


def operators(model: onnx.ModelProto) -> set[tuple[str, str]]:
    """Domain and type of every operator anywhere in the model."""
    pending: list[Iterable[onnx.NodeProto]] = [
        model.graph.node,
        *(function.node for function in model.functions),
    ]
    found: set[tuple[str, str]] = set()
    while pending:
        for node in pending.pop():
            found.add(("" if node.domain in ONNX_DOMAINS else node.domain, node.op_type))
            pending.extend(graph.node for _, graph in subgraphs(node))
    return found
