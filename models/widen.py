"""A model in another type: the same nodes, on weights rounded to it. Needs onnx only."""

from collections.abc import Iterable
from dataclasses import dataclass

import ml_dtypes
import onnx
from onnx import TensorProto, helper, numpy_helper


def widen(model: onnx.ModelProto) -> onnx.ModelProto:
    """A bfloat16 model in float32, because onnxruntime has no bfloat16 kernels on the CPU."""
    return retyped(model, TensorProto.BFLOAT16, TensorProto.FLOAT)


def retyped(model: onnx.ModelProto, old: int, new: int) -> onnx.ModelProto:
    """A copy with element type `new` wherever `old` stands: tensors, constants, casts, inputs and outputs."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    change = _Change(old, new)
    change.graph(made.graph)
    for function in made.functions:
        change.nodes(function.node)
    return made


@dataclass(frozen=True)
class _Change:
    old: int
    new: int

    def graph(self, graph: onnx.GraphProto) -> None:
        for tensor in graph.initializer:
            self.tensor(tensor)
        for values in (graph.input, graph.output, graph.value_info):
            for value in values:
                if value.type.tensor_type.elem_type == self.old:
                    value.type.tensor_type.elem_type = self.new
        self.nodes(graph.node)

    def nodes(self, nodes: Iterable[onnx.NodeProto]) -> None:
        for node in nodes:
            for attribute in node.attribute:
                if attribute.name in ("to", "dtype") and attribute.i == self.old:
                    attribute.i = self.new
                if attribute.type == onnx.AttributeProto.TENSOR:
                    self.tensor(attribute.t)
                elif attribute.type == onnx.AttributeProto.GRAPH:
                    self.graph(attribute.g)

    def tensor(self, tensor: TensorProto) -> None:
        if tensor.data_type == self.old:
            values, dtype = numpy_helper.to_array(tensor), helper.tensor_dtype_to_np_dtype(self.new)
            largest = min(float(ml_dtypes.finfo(each).max) for each in (values.dtype, dtype))
            values = values.clip(-largest, largest).astype(dtype)  # masks of -1e38 stay finite
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
