"""A part of a model in float64, with its weights widened once and as late as possible.

Comes in: a part whose weights stand inline or outside. Goes out: `Reference`. Large weights are fed to the part as
inputs, so that no protobuf holds them. A part that is nothing but one operator on one very large weight (an
embedding table, the projection to the vocabulary) never has that weight in float64 as a whole: `_CHUNKED`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from rewriter.files.load import LoadedModel, read_tensor
from rewriter.graph.segments import bytes_of
from rewriter.graph.view import ONNX_DOMAINS
from rewriter.proof.float64 import Reference, open_reference, widened

_FED = 2**16
"""Bytes above which a weight is fed instead of stored in the part."""

_CHUNK = 2**24
"""Entries of a very large weight that are widened at a time."""

_FLOATS = {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.DOUBLE}

Array = NDArray[Any]
Feeds = Mapping[str, Array]


def open_wide(part: LoadedModel, large: int) -> Reference:
    """Load the float64 evaluation of a part.

    Args:
        part: a model; it is not changed.
        large: bytes above which a weight is widened in chunks, where its operator allows that.

    Raises:
        NoReference: it has none.
        ModelError: a weight cannot be read.
    """
    chunked = _chunked(part, large)
    if chunked is not None:
        return Reference("numpy, in chunks", chunked)
    proto, weights = _with_weights_as_inputs(part)
    inner = open_reference(proto)
    return Reference(inner.how, _Fed(inner, weights)) if weights else inner


@dataclass(frozen=True, eq=False)
class _Fed:
    """A reference some of whose inputs are weights."""

    inner: Reference
    weights: Feeds

    def run(self, feeds: Feeds) -> dict[str, Array]:
        return self.inner.run({**self.weights, **feeds})


def _with_weights_as_inputs(part: LoadedModel) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """A copy of the part without its large float weights, and these in float64; small ones stand inline."""
    proto = onnx.ModelProto()
    bare = part.proto.graph
    proto.ir_version = part.proto.ir_version
    proto.opset_import.extend(part.proto.opset_import)
    proto.functions.extend(part.proto.functions)
    graph = proto.graph
    graph.name = bare.name
    graph.node.extend(bare.node)
    graph.input.extend(bare.input)
    graph.output.extend(bare.output)
    graph.sparse_initializer.extend(bare.sparse_initializer)
    weights: dict[str, Array] = {}
    outputs = {value.name for value in bare.output}
    for tensor in bare.initializer:
        if tensor.data_type in _FLOATS and bytes_of(tensor) > _FED and tensor.name not in outputs:
            weights[tensor.name] = widened(read_tensor(part, tensor))
            graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
        elif tensor.data_location == onnx.TensorProto.EXTERNAL:
            values = np.ascontiguousarray(read_tensor(part, tensor))
            graph.initializer.append(onnx.numpy_helper.from_array(values, tensor.name))
        else:
            graph.initializer.append(tensor)
    return proto, weights


def _product(left: Array, weight: Array) -> Array:
    """`left @ weight` for a weight [in, out] in its own type, some columns at a time."""
    result = np.empty((*left.shape[:-1], weight.shape[1]), np.float64)
    step = max(_CHUNK // weight.shape[0], 1)
    for start in range(0, weight.shape[1], step):
        result[..., start : start + step] = left @ weight[:, start : start + step].astype(np.float64)
    return result


def _matmul(_options: Mapping[str, Any], left: Array, weight: Array) -> Array:
    return _product(left, weight)


def _gemm(options: Mapping[str, Any], left: Array, weight: Array, bias: Array | None = None) -> Array:
    left = left.T if options.get("transA") else left
    result = _product(left, weight.T if options.get("transB") else weight)
    result *= options.get("alpha", 1.0)
    return result if bias is None else result + options.get("beta", 1.0) * bias


def _gather(_options: Mapping[str, Any], table: Array, rows: Array) -> Array:
    return table[rows].astype(np.float64)


_CHUNKED: Mapping[str, tuple[int, Callable[..., Array]]] = {
    "MatMul": (1, _matmul),
    "Gemm": (1, _gemm),
    "Gather": (0, _gather),
}
"""Operator to which operand is the weight, and the operator on it in its own type."""


@dataclass(frozen=True, eq=False)
class _Chunked:
    """One operator on one very large weight."""

    operator: Callable[..., Array]
    options: Mapping[str, Any]
    operands: tuple[str, ...]
    constants: Feeds
    output: str

    def run(self, feeds: Feeds) -> dict[str, Array]:
        known = {**self.constants, **feeds}
        with np.errstate(all="ignore"):
            return {self.output: self.operator(self.options, *(known[name] for name in self.operands if name))}


def _chunked(part: LoadedModel, large: int) -> _Chunked | None:
    """The part as one operator on a two-dimensional float weight beyond `large`, perhaps transposed before."""
    graph = part.proto.graph
    *before, node = graph.node
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    if node.op_type not in _CHUNKED or node.domain not in ONNX_DOMAINS:
        return None
    slot, operator = _CHUNKED[node.op_type]
    options = {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}
    if len(node.output) != 1 or [value.name for value in graph.output] != list(node.output) or options.get("axis"):
        return None
    name, transposed = node.input[slot], False
    if len(before) == 1 and before[0].op_type == "Transpose" and before[0].output[0] == name:
        name, transposed = before[0].input[0], True
    elif before:
        return None
    tensor = initializers.get(name)
    if tensor is None or len(tensor.dims) != 2 or tensor.data_type not in _FLOATS or bytes_of(tensor) <= large:
        return None
    weight = read_tensor(part, tensor)
    constants = {other: widened(read_tensor(part, found)) for other, found in initializers.items() if other != name}
    constants[node.input[slot]] = weight.T if transposed else weight
    return _Chunked(operator, options, tuple(node.input), constants, node.output[0])
