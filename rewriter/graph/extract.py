"""Cutting a part out of a model, as a model of its own.

Comes in: a model, and the tensors to start from and to end at. Goes out: a small model with the weights of that part
alone, so that a block of a large model can be run by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx

from rewriter.graph.constants import Constants
from rewriter.graph.view import GraphView, captured_names

ReadTensor = Callable[[onnx.TensorProto], onnx.TensorProto]
"""Gives an initializer with its bytes inline."""


@dataclass(frozen=True)
class Cut:
    """Where a part begins and ends.

    Attributes:
        inputs: the tensors that the caller starts from, then further ones that the part reads but that do not depend
            on those, such as a shape computed elsewhere.
        outputs: the tensors it ends at.
        nodes: indices of the nodes inside, in graph order.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[int, ...]


def cut(view: GraphView, inputs: Sequence[str], outputs: Sequence[str]) -> Cut:
    """Find the nodes between `inputs` and `outputs`: those that depend on an input, and constants they need."""
    constants = Constants(view)
    above = ancestors(view, frozenset(inputs), outputs)
    depends = set(inputs)
    inside: list[int] = []
    for index in sorted(above):
        names = reads(view.nodes[index])
        constant = all(name in constants for name in view.nodes[index].output if name)
        if constant or any(name in depends for name in names):
            inside.append(index)
            depends.update(() if constant else view.nodes[index].output)
    kept = _needed(view, inside, outputs)
    further = {
        name: None
        for index in kept
        for name in reads(view.nodes[index])
        if name not in depends and name not in constants
    }
    return Cut((*inputs, *further), tuple(outputs), tuple(kept))


def upstream(view: GraphView, stops: frozenset[str], outputs: Sequence[str]) -> Cut:
    """Everything above `outputs`, down from tensors of `stops`, the graph's inputs, and constants.

    Unlike `cut` nothing is left out: what lies on no path from a stop is computed from the graph's inputs again.
    """
    above = sorted(ancestors(view, stops.difference(outputs), outputs))
    made = {name for index in above for name in view.nodes[index].output}
    read = dict.fromkeys(name for index in above for name in reads(view.nodes[index]))
    known = made | set(view.initializers)
    # A body of control flow also names its own tensors; what this graph does not have is one of those.
    outside = [name for name in read if name not in known and (name in view.producer or name in view.inputs)]
    return Cut(tuple(outside), tuple(outputs), tuple(above))


def extract(
    model: onnx.ModelProto, view: GraphView, part: Cut, read: ReadTensor, *, elem_type: int = onnx.TensorProto.FLOAT
) -> onnx.ModelProto:
    """The part as a model: same opsets, IR version and functions; only the weights it needs, inline.

    `elem_type` is what inputs are declared as whose type inference does not know.
    """
    result = onnx.ModelProto(ir_version=model.ir_version)
    result.opset_import.extend(model.opset_import)
    result.functions.extend(model.functions)
    graph = result.graph
    graph.name = "part"
    for index in part.nodes:
        graph.node.append(view.nodes[index])
    needed = {name for node in graph.node for name in reads(node)} | set(part.outputs)
    graph.initializer.extend(read(view.initializers[name]) for name in sorted(needed) if name in view.initializers)
    graph.input.extend(_value(view, name, elem_type) for name in part.inputs if name in needed)
    graph.output.extend(_value(view, name) for name in part.outputs)
    return result


def with_outputs(model: onnx.ModelProto, view: GraphView, tensors: Sequence[str]) -> onnx.ModelProto:
    """A copy of `model` that also gives `tensors` as outputs (those that are not outputs yet)."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    present = {value.name for value in result.graph.output}
    result.graph.output.extend(_value(view, name) for name in dict.fromkeys(tensors) if name not in present)
    return result


def ancestors(view: GraphView, stop: frozenset[str], outputs: Sequence[str]) -> set[int]:
    """The nodes that `outputs` depend on, up to the tensors in `stop`."""
    found: set[int] = set()
    pending = [name for name in outputs if name not in stop]
    while pending:
        index = view.producer.get(pending.pop())
        if index is None or index in found:
            continue
        found.add(index)
        pending.extend(name for name in reads(view.nodes[index]) if name not in stop)
    return found


def _needed(view: GraphView, inside: list[int], outputs: Sequence[str]) -> list[int]:
    """Of the nodes inside, those that an output needs."""
    wanted = set(outputs)
    kept = []
    for index in reversed(inside):
        if wanted.intersection(view.nodes[index].output):
            kept.append(index)
            wanted.update(reads(view.nodes[index]))
    return kept[::-1]


def reads(node: onnx.NodeProto) -> list[str]:
    """The tensors that a node may read, those of its bodies included."""
    return [name for name in (*node.input, *captured_names(node)) if name]


def _value(view: GraphView, name: str, elem_type: int = 0) -> onnx.ValueInfoProto:
    """Name and element type; the shape is left open, since parts run at many sizes."""
    known = view.type_of(name).elem_type or elem_type
    return onnx.helper.make_tensor_value_info(name, known, None) if known else onnx.ValueInfoProto(name=name)
