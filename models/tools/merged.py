"""A decoder and the same with past as two branches of an If, as optimum's `merge_decoders` lays them out.

The branches keep the names of both exports, so names in them shadow the outputs of the If and each other; weights are
shared outside, under names with a suffix.
"""

from collections.abc import Iterable

import onnx
from onnx import TensorProto, helper, numpy_helper

CONDITION = "use_cache_branch"


def merge_decoders(decoder: onnx.ModelProto, with_past: onnx.ModelProto) -> onnx.ModelProto:
    """One model that runs the second where `use_cache_branch` is true."""
    _add_outputs(with_past.graph, decoder.graph.output)
    shared = _shared(decoder.graph, with_past.graph)
    bodies = {
        name: helper.make_graph(graph.node, name, [], decoder.graph.output, graph.initializer)
        for name, graph in (("no_past", decoder.graph), ("with_past", with_past.graph))
    }
    outputs = [value.name for value in decoder.graph.output]
    branch = helper.make_node(
        "If",
        [CONDITION],
        outputs,
        "optimum::if",
        then_branch=bodies["with_past"],
        else_branch=bodies["no_past"],
    )
    inputs = {value.name: value for model in (with_past, decoder) for value in model.graph.input}
    condition = helper.make_tensor_value_info(CONDITION, TensorProto.BOOL, [1])
    graph = helper.make_graph([branch], "merged", [*inputs.values(), condition], decoder.graph.output, shared)
    return helper.make_model(
        graph, producer_name="optimum-onnx", opset_imports=decoder.opset_import, ir_version=decoder.ir_version
    )


def _add_outputs(graph: onnx.GraphProto, outputs: Iterable[onnx.ValueInfoProto]) -> None:
    """Empty constants for the outputs that a graph lacks: keys and values of an encoder, which do not change."""
    there = {value.name for value in graph.output}
    for value in outputs:
        if value.name not in there:
            dims = [dim.dim_value or int(axis > 0) for axis, dim in enumerate(value.type.tensor_type.shape.dim)]
            empty = helper.make_tensor("const_tensor", value.type.tensor_type.elem_type, dims, [])
            graph.node.append(helper.make_node("Constant", [], [value.name], value=empty))


def _shared(*graphs: onnx.GraphProto) -> list[TensorProto]:
    """The weights of all graphs, each once, taken out of them; small ones and integers stay."""
    found: dict[tuple[int, bytes, tuple[int, ...]], TensorProto] = {}
    names: dict[str, int] = {}
    for graph in graphs:
        moved = {}
        kept = [each for each in graph.initializer if not each.dims or each.data_type != TensorProto.FLOAT]
        for tensor in graph.initializer:
            if tensor in kept:
                continue
            key = (tensor.data_type, numpy_helper.to_array(tensor).tobytes(), tuple(tensor.dims))
            if key not in found:
                number = names[tensor.name] = names.get(tensor.name, -1) + 1
                found[key] = TensorProto()
                found[key].CopyFrom(tensor)
                found[key].name = f"{tensor.name}_merged_{number}"
            moved[tensor.name] = found[key].name
        del graph.initializer[:]
        graph.initializer.extend(kept)
        for node in graph.node:
            node.input[:] = [moved.get(name, name) for name in node.input]
    return list(found.values())
