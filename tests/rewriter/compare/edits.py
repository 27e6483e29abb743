"""Ways to change a model by hand, for tests of what notices that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

Change = Callable[[onnx.ModelProto], object]

BRANCHES = ("then_branch", "else_branch")


def graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """The graph and all bodies of control flow in it."""
    yield graph
    for node in graph.node:
        for item in node.attribute:
            if item.HasField("g"):
                yield from graphs(item.g)


def body(model: onnx.ModelProto, attribute: str) -> onnx.GraphProto:
    """The first body under an attribute of that name."""
    found: onnx.GraphProto = next(
        item.g for node in model.graph.node for item in node.attribute if item.name == attribute
    )
    return found


def maker(model: onnx.ModelProto, tensor: str) -> onnx.NodeProto:
    """The node that makes a tensor, wherever it is."""
    found: onnx.NodeProto = next(node for graph in graphs(model.graph) for node in graph.node if tensor in node.output)
    return found


def weight(model: onnx.ModelProto, name: str) -> onnx.TensorProto:
    """An initializer of the main graph."""
    found: onnx.TensorProto = next(tensor for tensor in model.graph.initializer if tensor.name == name)
    return found


def reads(model: onnx.ModelProto, tensor: str, place: int, name: str) -> None:
    """The maker of a tensor reads something else."""
    maker(model, tensor).input[place] = name


def swap(entries: Any, first: int, second: int) -> None:
    """Two entries of a repeated field change places."""
    copies = [type(entry).FromString(entry.SerializeToString()) for entry in (entries[first], entries[second])]
    entries[first].CopyFrom(copies[1])
    entries[second].CopyFrom(copies[0])


def swap_names(model: onnx.ModelProto, one: str, two: str) -> None:
    """What the nodes make change names; nobody who reads them notices."""
    other = {one: two, two: one}
    for node in model.graph.node:
        node.output[:] = [other.get(name, name) for name in node.output]


def swap_branches(model: onnx.ModelProto) -> None:
    """The bodies of an If change places."""
    bodies = [onnx.GraphProto.FromString(body(model, name).SerializeToString()) for name in BRANCHES]
    for name, other in zip(BRANCHES, reversed(bodies), strict=True):
        body(model, name).CopyFrom(other)


def nudge(tensor: onnx.TensorProto) -> None:
    """The first value of a weight becomes the next larger number."""
    values = numpy_helper.to_array(tensor).copy()
    flat = values.reshape(-1)
    flat[0] = np.nextafter(flat[0], np.asarray(np.inf, values.dtype))
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))


def without(tensor: str) -> Change:
    """The node that makes a tensor is gone."""
    return lambda model: model.graph.node.remove(maker(model, tensor))


def shadowing(domain: str, name: str, count: int) -> Change:
    """A local function appears under the name of an operator, whose nodes are calls of it from then on."""

    def change(model: onnx.ModelProto) -> None:
        inputs = [f"a{i}" for i in range(count)]
        node = helper.make_node("Sum", inputs, ["b"])
        imports = [helper.make_opsetid("", 17)]
        model.functions.append(helper.make_function(domain, name, inputs, ["b"], [node], imports))

    return change


def latest_first(model: onnx.ModelProto) -> None:
    """Another topological order: depth first from the outputs instead of as it was written."""
    for graph in graphs(model.graph):
        made = {name: node for node in graph.node for name in node.output}
        ordered: list[onnx.NodeProto] = []

        def visit(node: onnx.NodeProto, made: Any = made, ordered: Any = ordered) -> None:
            inner = [each.input for item in node.attribute if item.HasField("g") for each in item.g.node]
            for name in reversed([*node.input, *(name for names in inner for name in names)]):
                if name in made and made[name] not in ordered:
                    visit(made[name])
            if node not in ordered:
                ordered.append(node)

        for node in reversed(graph.node):
            visit(node)
        copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in ordered]
        del graph.node[:]
        graph.node.extend(copies)
