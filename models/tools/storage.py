"""The same operators, stored or named differently.

External data, initializers that are also graph inputs, weights as Constant nodes or behind a Transpose, no names,
another opset.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from models.tools.common import ONNX_DOMAINS, Hints, Refused, opset


def external_data(*, threshold: int) -> Callable[[Path, Path, Hints], None]:
    """Tensors of at least `threshold` bytes in one file beside the model."""

    def run(source: Path, target: Path, _: Hints) -> None:
        location = f"{target.name}.data"
        model = onnx.load(source)
        onnx.save(model, target, save_as_external_data=True, location=location, size_threshold=threshold)

    return run


def initializers_as_inputs(source: Path, target: Path, _: Hints) -> None:
    """IR version 3, in which every initializer must also be a graph input."""
    model = onnx.load(source)
    if model.functions:
        raise Refused("IR version 3 has no model-local functions")
    if opset(model) > 8:
        model.ir_version = max(4, min(model.ir_version, 8))
    else:
        model.ir_version = 3
    known = {value.name for value in model.graph.input}
    for tensor in model.graph.initializer:
        if tensor.name not in known:
            value = helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
            model.graph.input.append(value)
    onnx.save(model, target)


def constant_nodes(source: Path, target: Path, _: Hints) -> None:
    """Every initializer as a Constant node."""
    model = onnx.load(source)
    constants = [helper.make_node("Constant", [], [tensor.name], value=tensor) for tensor in model.graph.initializer]
    nodes = list(model.graph.node)
    del model.graph.node[:]
    del model.graph.initializer[:]
    model.graph.node.extend([*constants, *nodes])
    onnx.save(model, target)


def live_transposes(source: Path, target: Path, _: Hints) -> None:
    """Every MatMul weight stored transposed, with a Transpose before the MatMul."""
    model = onnx.load(source)
    weights = {tensor.name: tensor for tensor in model.graph.initializer if len(tensor.dims) == 2}
    done: dict[str, str] = {}
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        if node.op_type == "MatMul" and node.domain in ONNX_DOMAINS and node.input[1] in weights:
            name = node.input[1]
            if name not in done:
                done[name] = f"{name}/T"
                array = np.ascontiguousarray(_array(weights[name]).T)
                model.graph.initializer.append(_tensor(array, weights[name].data_type, f"{name}/stored"))
                nodes.append(helper.make_node("Transpose", [f"{name}/stored"], [done[name]], perm=[1, 0]))
            node.input[1] = done[name]
        nodes.append(node)
    if not done:
        raise Refused("no MatMul has a constant weight in the main graph")
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, target)


def no_names(source: Path, target: Path, _: Hints) -> None:
    """Tensors, nodes and dimensions without their names and metadata, as some converters leave them."""
    model = onnx.load(source)
    kept = {value.name for values in (model.graph.input, model.graph.output) for value in values}
    if any(attribute.g.node for node in model.graph.node for attribute in node.attribute) or model.functions:
        raise Refused("bodies of control flow refer to the names")
    names: dict[str, str] = {"": ""}

    def renamed(name: str) -> str:
        return name if name in kept else names.setdefault(name, str(len(names)))

    for tensor in model.graph.initializer:
        tensor.name = renamed(tensor.name)
    for node in model.graph.node:
        node.name = ""
        del node.metadata_props[:]
        node.input[:] = [renamed(name) for name in node.input]
        node.output[:] = [renamed(name) for name in node.output]
    del model.graph.value_info[:]
    onnx.save(model, target)


def converted_opset(version: int) -> Callable[[Path, Path, Hints], None]:
    """The version converter of onnx."""

    def run(source: Path, target: Path, _: Hints) -> None:
        from onnx import version_converter

        model = onnx.load(source)
        if opset(model) == version:
            raise Refused("the model has this opset already")
        try:
            result = version_converter.convert_version(model, version)
            onnx.checker.check_model(result)
        except (RuntimeError, onnx.checker.ValidationError) as error:
            raise Refused(f"onnx's version converter: {_first_line(error)}") from error
        onnx.save(result, target)

    return run


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()[0]
    return text.partition(": ")[2] if ".h:" in text or ".cc:" in text else text


def _array(tensor: TensorProto) -> np.ndarray:
    return numpy_helper.to_array(tensor)


def _tensor(array: np.ndarray, data_type: int, name: str) -> TensorProto:
    tensor = numpy_helper.from_array(array, name)
    if tensor.data_type != data_type:
        raise Refused(f"weights of type {TensorProto.DataType.Name(data_type)} cannot be copied")
    return tensor
