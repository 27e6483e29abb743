"""Removing what ties an exported file to the machine that exported it.

Stack traces and doc strings are removed, and output dimensions named as in the table. Module names and scopes stay,
since they tell readers of the rewritten file where they are. Needs onnx only.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import onnx

from models.entry import Output

MACHINE_KEYS = ("pkg.torch.onnx.stack_trace",)


def clean(model: onnx.ModelProto, outputs: Sequence[Output], shapes: Sequence[tuple[int, ...]]) -> None:
    """Strip the model, and write the output shapes: dimension names where dynamic, lengths where not.

    Args:
        model: The exported model, changed in place.
        outputs: The graph outputs in order.
        shapes: Shape of each output in one run, for the lengths of its fixed axes.
    """
    for message in _messages(model):
        message.doc_string = ""
        kept = [prop for prop in message.metadata_props if prop.key not in MACHINE_KEYS]
        del message.metadata_props[:]
        message.metadata_props.extend(kept)
    for value, output, shape in zip(model.graph.output, outputs, shapes, strict=True):
        for dim, name, length in zip(value.type.tensor_type.shape.dim, output.dims, shape, strict=True):
            dim.Clear()
            if name is None:
                dim.dim_value = length
            else:
                dim.dim_param = name


def _messages(model: onnx.ModelProto) -> Iterator[Any]:
    """Everything with a doc string and metadata: model, functions, graphs, nodes, values, tensors."""
    yield model
    yield from _graph_messages(model.graph)
    for function in model.functions:
        yield function
        for node in function.node:
            yield from _node_messages(node)


def _graph_messages(graph: onnx.GraphProto) -> Iterator[Any]:
    yield graph
    yield from graph.initializer
    for values in (graph.input, graph.output, graph.value_info):
        yield from values
    for node in graph.node:
        yield from _node_messages(node)


def _node_messages(node: onnx.NodeProto) -> Iterator[Any]:
    yield node
    for attribute in node.attribute:
        attribute.doc_string = ""
        for graph in (attribute.g, *attribute.graphs):
            if graph.node:
                yield from _graph_messages(graph)
