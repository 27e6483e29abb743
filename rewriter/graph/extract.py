"""Extract parts of a graph as separate models, with only the weights that they need.

A block of a large model can then be run, and proved, in the memory of one block.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import prod

import onnx

from rewriter.graph.view import GraphView, needed
from rewriter.graph.walk import reached, reads


@dataclass(frozen=True)
class Cut:
    """The nodes of a part, and its interface."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[int, ...]  # indices, in graph order


def between(view: GraphView, inputs: Sequence[str], outputs: Sequence[str]) -> list[int]:
    """The nodes between `inputs` and `outputs` that depend on an input, and the constants that they need."""
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
    return [inside[place] for place in needed([view.nodes[index] for index in inside], outputs)]


def upstream(view: GraphView, stops: frozenset[str], outputs: Sequence[str]) -> Cut:
    """Everything that `outputs` depend on, back to the tensors in `stops`, the graph's inputs and constants.

    Unlike in `between`, a node that depends on no stop is kept too, and is computed again from the graph's inputs.
    """
    return _closed(view, sorted(ancestors(view, stops.difference(outputs), outputs)), outputs)


def _closed(view: GraphView, nodes: Sequence[int], outputs: Sequence[str]) -> Cut:
    """The part of all these nodes; its inputs are the tensors that none of them computes."""
    made = {name for index in nodes for name in view.nodes[index].output}
    outside = (name for name in _read(view, nodes) if name not in made and name not in view.initializers)
    return Cut(tuple(dict.fromkeys(outside)), tuple(outputs), tuple(nodes))


def extract(model: onnx.ModelProto, view: GraphView, part: Cut) -> onnx.ModelProto:
    """The part as a model with the opsets, IR version and functions of `model`, and only the weights it needs.

    Inputs of unknown type are declared without one.
    """
    result = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
    graph = result.graph
    graph.name = "part"
    graph.node.extend(view.nodes[index] for index in part.nodes)
    needed = {name for node in graph.node for name in reads(node)} | set(part.outputs)
    graph.initializer.extend(view.initializers[name] for name in sorted(needed) if name in view.initializers)
    graph.input.extend(_value(view, name) for name in part.inputs if name in needed)
    graph.output.extend(_value(view, name) for name in part.outputs)
    return result


def with_outputs(model: onnx.ModelProto, view: GraphView, tensors: Sequence[str]) -> onnx.ModelProto:
    """A copy of `model` with `tensors` as further outputs; itself if all of them are outputs or inputs."""
    inside = [name for name in dict.fromkeys(tensors) if name not in view.outputs and name not in view.inputs]
    result = deepcopy(model) if inside else model
    result.graph.output.extend(_value(view, name) for name in inside)
    return result


def ancestors(view: GraphView, stop: frozenset[str], outputs: Sequence[str]) -> set[int]:
    """Indices of the nodes that `outputs` depend on, without going past the tensors in `stop`."""

    def makers(names: Iterable[str]) -> set[int]:
        return {view.producer[name] for name in names if name in view.producer and name not in stop}

    return {*reached(makers(outputs), lambda index: makers(reads(view.nodes[index])))}


def _value(view: GraphView, name: str) -> onnx.ValueInfoProto:
    """Declare a tensor with its element type. The shape stays open, because a part is run at many sizes."""
    known = view.type_of(name).elem_type
    return onnx.helper.make_tensor_value_info(name, known, None) if known else onnx.ValueInfoProto(name=name)


# -- consecutive parts, so that a model can run without loading all of its weights ----------------------------------
#
# Each part reads only graph inputs and outputs of earlier parts, and their composition is the whole graph.
# Constant subexpressions are duplicated into every part that reads them, so that onnxruntime sees a constant there.


def split(view: GraphView, wanted: Sequence[str], limit: int) -> tuple[Cut, ...]:
    """Split the ancestors of `wanted` in a main graph into parts of at most `limit` bytes of weights.

    A node that needs more is a part by itself.
    """
    ends = [name for name in dict.fromkeys(wanted) if name not in view.inputs]

    def makers(names: Iterable[str]) -> list[int]:
        """The nodes that compute the constants among the names, in graph order."""
        return sorted(ancestors(view, frozenset(), [name for name in names if name in view.constants]))

    @functools.cache  # since one weight chain (Transpose, DequantizeLinear) may have many consumers
    def behind(name: str) -> frozenset[str]:
        """The initializers that a constant is computed from."""
        names = [name] if name in view.initializers else _read(view, makers([name]))
        return frozenset(entry for entry in names if entry in view.initializers)

    def size(names: Iterable[str]) -> int:
        return sum(bytes_of(view.initializers[name]) for name in names)

    # Greedy in graph order: every prefix of a topological order is closed under "depends on", so a part never needs
    # the output of a later one. A weight shared within a part counts once, across parts once in each.
    groups: list[list[int]] = []
    held: set[str] = set()
    used = 0
    for index in sorted(ancestors(view, frozenset(), ends)):
        node = view.nodes[index]
        if all(name in view.constants for name in node.output if name):
            continue
        weights = {root for name in reads(node) if name in view.constants for root in behind(name)}
        if not groups or used + size(weights - held) > limit:
            groups.append([])
            held, used = set(), 0
        groups[-1].append(index)
        used += size(weights - held)
        held |= weights
    # A graph may have constants as its only outputs; and a wanted constant must be computed by some part, so the first.
    groups = groups or [[]]
    groups[0][:0] = makers(ends)
    made = {name: number for number, group in enumerate(groups) for index in group for name in view.nodes[index].output}
    last = {name: number for number, group in enumerate(groups) for name in _read(view, group)}
    # A part outputs the tensors that a later part or the caller needs; all others never leave onnxruntime.
    crossing: list[list[str]] = [[] for _ in groups]
    for name, number in made.items():
        if name and (name in ends or last.get(name, number) > number):
            crossing[number].append(name)
    # An initializer that is also an output has no producer.
    crossing[0] += [name for name in ends if name not in made]
    # A part without outputs is dead; the others compute the constants that they read.
    insides = [sorted({*group, *makers(_read(view, group))}) for group in groups]
    return tuple(_closed(view, *each) for each in zip(insides, crossing, strict=True) if each[1])


def _read(view: GraphView, nodes: Iterable[int]) -> list[str]:
    return [name for index in nodes for name in reads(view.nodes[index])]


def bytes_of(tensor: onnx.TensorProto) -> int:
    """Approximate size of a tensor's values in bytes; packed types narrower than a byte count one byte each."""
    return int(prod(tensor.dims)) * int(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)
