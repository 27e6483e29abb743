"""Widen nodes and tensors to double precision.

float16, bfloat16 and float32 become double everywhere: weights, constants, targets of Cast and the like. The values are
the original's. Operators that round on purpose (quantisation) or draw random numbers are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from rewriter.arrays import Array
from rewriter.errors import RewriteError
from rewriter.graph.view import key_of, label
from rewriter.proof.inputs.roles import is_float
from rewriter.text import one_line

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
    "BitCast": "a reinterpretation of bits",
}
"""Operators without a float64 form, and the reason."""

_TYPE_ATTRIBUTES = {"to", "dtype", "output_dtype", "output_datatype"}
_DEFAULTS = {
    "ConstantOfShape": helper.make_attribute("value", numpy_helper.from_array(np.zeros(1))),
    **dict.fromkeys(
        ("HannWindow", "HammingWindow", "BlackmanWindow", "MelWeightMatrix"),
        helper.make_attribute("output_datatype", TensorProto.DOUBLE),
    ),
}
"""Operators whose result is float32 unless an attribute says otherwise, and that attribute for float64."""


_CONSTANTS: dict[int, type[np.generic]] = {
    onnx.AttributeProto.FLOAT: np.float32,
    onnx.AttributeProto.FLOATS: np.float32,
    onnx.AttributeProto.INT: np.int64,
    onnx.AttributeProto.INTS: np.int64,
}
"""Kinds of values that a Constant node may hold without a tensor."""


class NoReference(RewriteError):  # noqa: N818 - not an error: the proof does without
    """There is no float64 evaluation of the model; the message is the reason."""


def widened(array: Array) -> Array:
    """Floats as float64; anything else unchanged."""
    return array.astype(np.float64, copy=False) if is_float(array.dtype) else array


def widened_node(node: onnx.NodeProto, values: Callable[[TensorProto], Array]) -> onnx.NodeProto:
    """A copy of the node, and of its bodies, for float64 operands. `values` reads a tensor. Raises NoReference."""
    kind = _REFUSED.get(node.op_type)
    if kind is not None:
        raise NoReference(f"{one_line(label(node), 120)} is {kind}")
    domain, _ = key_of(node)
    wide = onnx.NodeProto(name=node.name, op_type=node.op_type, domain=domain, input=node.input, output=node.output)
    for attribute in node.attribute:
        wide.attribute.append(_widened_attribute(attribute, node, values))
    default = _DEFAULTS.get(node.op_type)
    if default is not None and all(attribute.name != default.name for attribute in wide.attribute):
        wide.attribute.append(default)
    return wide


def _widened_body(graph: onnx.GraphProto, values: Callable[[TensorProto], Array]) -> onnx.GraphProto:
    wide = onnx.GraphProto(name=graph.name, input=graph.input, output=graph.output)
    check_values((*graph.input, *graph.output))
    for value in (*wide.input, *wide.output):
        kind = value.type.tensor_type
        if value.type.WhichOneof("value") == "tensor_type" and kind.elem_type in _NARROW:
            kind.elem_type = TensorProto.DOUBLE
    wide.initializer.extend(numpy_helper.from_array(values(tensor), tensor.name) for tensor in graph.initializer)
    for node in graph.node:
        if key_of(node) == ("", "Constant"):
            stated = numpy_helper.from_array(constant_of(node, values))
            wide.node.append(helper.make_node("Constant", [], node.output, value=stated))
        else:
            wide.node.append(widened_node(node, values))
    return wide


def _widened_attribute(
    attribute: onnx.AttributeProto, node: onnx.NodeProto, values: Callable[[TensorProto], Array]
) -> onnx.AttributeProto:
    wide = onnx.AttributeProto()
    wide.CopyFrom(attribute)
    if attribute.name in _TYPE_ATTRIBUTES and attribute.type == onnx.AttributeProto.INT:
        check_type(attribute.i, label(node))
        wide.i = TensorProto.DOUBLE if attribute.i in _NARROW else attribute.i
    elif attribute.type == onnx.AttributeProto.TENSOR:
        wide.t.CopyFrom(numpy_helper.from_array(values(attribute.t), attribute.t.name))
    elif attribute.type == onnx.AttributeProto.GRAPH:
        wide.g.CopyFrom(_widened_body(attribute.g, values))
    return wide


def constant_of(node: onnx.NodeProto, values: Callable[[TensorProto], Array]) -> Array:
    """The value of a Constant node, widened; `values` reads a tensor. Raises NoReference."""
    stated = {attribute.type: attribute for attribute in node.attribute}
    if (tensor := stated.get(onnx.AttributeProto.TENSOR)) is not None:
        return values(tensor.t)
    for kind, dtype in _CONSTANTS.items():
        if kind in stated:
            return widened(np.asarray(helper.get_attribute_value(stated[kind]), dtype))
    raise NoReference(f"{one_line(label(node), 120)} holds no dense tensor of numbers")


def check_values(values: Iterable[onnx.ValueInfoProto]) -> None:
    """Refuse inputs and outputs whose type has no float64 form. Raises NoReference."""
    for value in values:
        _check_kind(value.type)


def _check_kind(kind: onnx.TypeProto) -> None:
    held = kind.WhichOneof("value")
    if held == "tensor_type":
        check_type(kind.tensor_type.elem_type, "an input or output")
    elif held in {"sequence_type", "optional_type"}:
        _check_kind(getattr(kind, held).elem_type)
    elif held is not None:
        raise NoReference(f"an input or output is a {held.removesuffix('_type')}")


def check_type(elem_type: int, what: str) -> None:
    """Refuse an element type that has no float64 form. Raises NoReference."""
    if elem_type not in _NARROW | _EXACT:
        name = next((key for key, value in TensorProto.DataType.items() if value == elem_type), str(elem_type))
        raise NoReference(f"{one_line(what, 120)} is of type {name.lower()}")
