"""bfloat16 models in float32, because onnxruntime has no bfloat16 kernels on the CPU.

Needs onnx only.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx
from onnx import TensorProto, numpy_helper

BF16, FP32 = TensorProto.BFLOAT16, TensorProto.FLOAT


def widen(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy with the same nodes in float32, on the same (rounded) weights."""
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    _widen_graph(wide.graph)
    for function in wide.functions:
        _widen_nodes(function.node)
    return wide


def _widen_graph(graph: onnx.GraphProto) -> None:
    for tensor in graph.initializer:
        _widen_tensor(tensor)
    for values in (graph.input, graph.output, graph.value_info):
        for value in values:
            if value.type.tensor_type.elem_type == BF16:
                value.type.tensor_type.elem_type = FP32
    _widen_nodes(graph.node)


def _widen_nodes(nodes: Iterable[onnx.NodeProto]) -> None:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.name in ("to", "dtype") and attribute.i == BF16:
                attribute.i = FP32
            if attribute.type == onnx.AttributeProto.TENSOR:
                _widen_tensor(attribute.t)
            elif attribute.type == onnx.AttributeProto.GRAPH:
                _widen_graph(attribute.g)


def _widen_tensor(tensor: TensorProto) -> None:
    if tensor.data_type == BF16:
        values = numpy_helper.to_array(tensor).astype("float32")
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
