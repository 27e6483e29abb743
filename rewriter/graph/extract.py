"""Cut a part out of a model, as a model with only the weights of that part.

A block of a large model can then be run, and proved, in the memory of one block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx

from rewriter.graph.view import GraphView, captured_names

ReadTensor = Callable[[onnx.TensorProto], onnx.TensorProto]
"""Returns the initializer to put into the part, such as a copy with its bytes inline."""


@dataclass(frozen=True)
class Cut:
    """The nodes of a part, and its interface.

    Attributes:
        inputs: the tensors that the caller asked to start from, then other operands that do not depend on them, such
            as a shape computed elsewhere.
        outputs: the tensors that the part ends at.
        nodes: indices of its nodes, in graph order.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[int, ...]


def cut(view: GraphView, inputs: Sequence[str], outputs: Sequence[str]) -> Cut:
    """Find the nodes between `inputs` and `outputs`: those that depend on an input, and the constants they need."""
    above = ancestors(view, frozenset(inputs), outputs)
    depends = set(inputs)
    inside: list[int] = []
    # Indices are in topological order, so the producers of an operand have been classified before its consumers.
    for index in sorted(above):
        names = reads(view.nodes[index])
        constant = all(name in view.constants for name in view.nodes[index].output if name)
        if constant or any(name in depends for name in names):
            inside.append(index)
            depends.update(() if constant else view.nodes[index].output)
    # `above` also contains constants that only feed nodes outside the part, such as a mask computed elsewhere.
    kept = _needed(view, inside, outputs)
    further = {
        name: None
        for index in kept
        for name in reads(view.nodes[index])
        if name not in depends and name not in view.constants
    }
    return Cut((*inputs, *further), tuple(outputs), tuple(kept))


def upstream(view: GraphView, stops: frozenset[str], outputs: Sequence[str]) -> Cut:
    """Everything that `outputs` depend on, back to the tensors in `stops`, the graph's inputs and constants.

    Unlike in `cut`, a node that depends on no stop is kept too, and is computed again from the graph's inputs.
    """
    above = sorted(ancestors(view, stops.difference(outputs), outputs))
    made = {name for index in above for name in view.nodes[index].output}
    read = dict.fromkeys(name for index in above for name in reads(view.nodes[index]))
    known = made | set(view.initializers)
    # `reads` may report names that are local to a control-flow body; only tensors of this graph can be inputs.
    outside = [name for name in read if name not in known and (name in view.producer or name in view.inputs)]
    return Cut(tuple(outside), tuple(outputs), tuple(above))


def extract(
    model: onnx.ModelProto, view: GraphView, part: Cut, read: ReadTensor, *, elem_type: int = onnx.TensorProto.FLOAT
) -> onnx.ModelProto:
    """The part as a model with the opsets, IR version and functions of `model`, and only the weights it needs.

    Args:
        model: the model that `view` indexes.
        view: the graph that `part` was cut from.
        part: the part.
        read: maps an initializer of `model` to the one of the result.
        elem_type: declared element type of inputs that type inference knows nothing about; 0 declares none.
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
    """A copy of `model` with `tensors` as further outputs."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    present = {value.name for value in result.graph.output}
    result.graph.output.extend(_value(view, name) for name in dict.fromkeys(tensors) if name not in present)
    return result


def ancestors(view: GraphView, stop: frozenset[str], outputs: Sequence[str]) -> set[int]:
    """Indices of the nodes that `outputs` depend on, without going past the tensors in `stop`."""
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
    """The nodes of `inside` that an output depends on through nodes of `inside` alone."""
    wanted = set(outputs)
    kept = []
    for index in reversed(inside):
        if wanted.intersection(view.nodes[index].output):
            kept.append(index)
            wanted.update(reads(view.nodes[index]))
    return kept[::-1]


def reads(node: onnx.NodeProto) -> list[str]:
    """The tensors that a node may read, including those that its subgraphs capture, in the same order in every run."""
    return [name for name in (*node.input, *sorted(captured_names(node))) if name]


def _value(view: GraphView, name: str, elem_type: int = 0) -> onnx.ValueInfoProto:
    """Declare a tensor with its element type. The shape stays open, because a part is run at many sizes."""
    known = view.type_of(name).elem_type or elem_type
    return onnx.helper.make_tensor_value_info(name, known, None) if known else onnx.ValueInfoProto(name=name)
