"""Other number formats: float16 by conversion, dynamic int8, 4 bits per weight, QDQ, weights only."""

import importlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from models.tools.common import ONNX_DOMAINS, Hints, Refused, opset, random_feeds, require_float32, topological

ACTIVATIONS = ("Erf", "Tanh", "Sigmoid", "Relu", "Gelu", "Pow", "Sqrt", "Softmax", "LayerNormalization", "ReduceMean")
PRODUCTS = ("MatMul", "Gemm")


def float16(*, keep_io: bool) -> Callable[[Path, Path, Hints], None]:
    """onnxconverter-common's float16 conversion."""

    def run(source: Path, target: Path, _: Hints) -> None:
        convert = importlib.import_module("onnxconverter_common.float16").convert_float_to_float16  # untyped
        model = onnx.load(source)
        require_float32(model)
        del model.graph.value_info[:]
        casts = {node.output[0] for node in model.graph.node if node.op_type == "Cast"}
        result = convert(model, keep_io_types=keep_io, disable_shape_infer=True)
        for node in result.graph.node:  # it keeps casts to float32 before operators that it converts
            for attribute in node.attribute if node.op_type == "Cast" and node.output[0] in casts else ():
                attribute.i = TensorProto.FLOAT16 if attribute.i == TensorProto.FLOAT else attribute.i
        onnx.save(result, target)

    return run


def runtime_float16(*, block: Sequence[str] = ()) -> Callable[[Path, Path, Hints], None]:
    """The float16 conversion of onnxruntime; `block` names operators that stay float32, with casts around them.

    With `block`, it appends the casts at the end of the graph, one per consumer under the same name. Both are repaired
    here.
    """

    def run(source: Path, target: Path, _: Hints) -> None:
        from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST, convert_float_to_float16

        model = onnx.load(source)
        require_float32(model)
        blocked = [*DEFAULT_OP_BLOCK_LIST, *block]
        result = convert_float_to_float16(model, keep_io_types=True, op_block_list=blocked)
        if block:
            _repair(result.graph)
        onnx.save(result, target)

    return run


def _repair(graph: onnx.GraphProto) -> None:
    """Keep each node once, in topological order."""
    unique = {tuple(node.output): node for node in reversed(graph.node)}
    ordered = topological(list(reversed(unique.values())), graph)
    del graph.node[:]
    graph.node.extend(ordered)


def dynamic_int8(*, per_channel: bool) -> Callable[[Path, Path, Hints], None]:
    """Dynamic quantisation by onnxruntime: DynamicQuantizeLinear, MatMulInteger, Cast, Mul."""

    def run(source: Path, target: Path, _: Hints) -> None:
        from onnxruntime.quantization import QuantType, quantize_dynamic

        require_float32(onnx.load(source))
        quantize_dynamic(
            source,
            target,
            per_channel=per_channel,
            weight_type=QuantType.QInt8,
            op_types_to_quantize=["MatMul", "Gemm"],
        )

    return run


def four_bits(quant_format: str) -> Callable[[Path, Path, Hints], None]:
    """4-bit weights by onnxruntime, in blocks of 32: `QOperator` writes MatMulNBits, `QDQ` DequantizeLinear."""

    def run(source: Path, target: Path, _: Hints) -> None:
        from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
        from onnxruntime.quantization.quant_utils import QuantFormat

        model = onnx.load(source)
        require_float32(model)
        if quant_format == "QDQ" and opset(model) < 21:
            raise Refused("4-bit DequantizeLinear needs opset 21")
        quantizer = MatMulNBitsQuantizer(model, block_size=32, quant_format=QuantFormat[quant_format])
        quantizer.process()
        result = quantizer.model.model
        if not any(node.op_type in ("MatMulNBits", "DequantizeLinear") for node in result.graph.node):
            raise Refused("it quantises MatMul only, and the model has none with a constant weight")
        onnx.save(result, target)

    return run


def static_qdq(quant_format: str, *, linear_only: bool = True) -> Callable[[Path, Path, Hints], None]:
    """Static quantisation by onnxruntime on random calibration inputs: of linear operators, or as it does by default.

    By default it quantises almost every operator, activations included.
    """

    def run(source: Path, target: Path, hints: Hints) -> None:
        from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

        model = onnx.load(source)
        require_float32(model)
        feeds = [random_feeds(model, hints, seed) for seed in range(2)]

        class Reader(CalibrationDataReader):  # type: ignore[misc]  # untyped
            def get_next(self) -> Any:
                return feeds.pop() if feeds else None

        with tempfile.TemporaryDirectory() as scratch:
            local = Path(scratch, "model.onnx")
            onnx.save(model, local)
            linear = {"activation_type": QuantType.QUInt8, "op_types_to_quantize": ["MatMul", "Gemm"]}
            chosen = linear if linear_only else {}
            quantize_static(local, target, Reader(), quant_format=QuantFormat[quant_format], **chosen)
        if not linear_only and _lost_relu(model, onnx.load(target)):
            raise Refused("the Relu is gone, and nothing takes what is negative to 0")

    return run


def _lost_relu(source: onnx.ModelProto, result: onnx.ModelProto) -> bool:
    """Whether operators on integers took the place of a Relu, without one whose smallest number represents 0."""
    zeros = {tensor.name: numpy_helper.to_array(tensor) for tensor in result.graph.initializer if not tensor.dims}
    lowest = {name for name, zero in zeros.items() if zero.dtype.kind in "iu" and zero == np.iinfo(zero.dtype).min}
    products = ("QLinearMatMul", "QGemm", "QLinearAdd")
    made = [node for node in result.graph.node if node.op_type in (*products, "Relu")]
    kept = any(node.op_type == "Relu" or node.input[-1] in lowest for node in made)
    return bool(made) and not kept and any(node.op_type == "Relu" for node in source.graph.node)


def weight_only(source: Path, target: Path, _: Hints) -> None:
    """int8 weights, one scale per column, with a DequantizeLinear before every linear operator."""
    model = onnx.load(source)
    require_float32(model)
    if opset(model) < 13:
        raise Refused("a DequantizeLinear per channel needs opset 13")
    graph = model.graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    done: dict[str, str] = {}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.op_type in ("MatMul", "Gemm") and node.domain in ONNX_DOMAINS:
            name = node.input[1]
            if name in weights and len(weights[name].dims) == 2 and name not in done:
                done[name] = f"{name}/dequantized"
                nodes.append(_dequantize(graph, weights[name], done[name]))
            node.input[1] = done.get(name, name)
        nodes.append(node)
    if not done:
        raise Refused("no linear operator has a constant weight in the main graph")
    del graph.node[:]
    graph.node.extend(nodes)
    used = {name for node in graph.node for name in node.input}
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    onnx.save(model, target)


def _dequantize(graph: onnx.GraphProto, weight: TensorProto, output: str) -> onnx.NodeProto:
    values = numpy_helper.to_array(weight)
    scale = (np.abs(values).max(0) / 127 + 1e-12).astype(np.float32)
    whole = np.clip(np.round(values / scale), -127, 127).astype(np.int8)
    names = [f"{weight.name}/int8", f"{weight.name}/scale", f"{weight.name}/zero"]
    arrays = [whole, scale, np.zeros(scale.shape, np.int8)]
    graph.initializer.extend(numpy_helper.from_array(array, name) for array, name in zip(arrays, names, strict=True))
    return helper.make_node("DequantizeLinear", names, [output], axis=1)
