"""A graph as consecutive parts, so that a model is run without ever holding all of its weights.

Comes in: the view of a main graph, the tensors wanted of it, and a bound on the weights of a part. Goes out: `Cut`s in
order: each reads graph inputs and outputs of earlier parts only. Together they compute what the graph computes.

Nodes that depend on nothing but constants belong to every part that reads them, so that onnxruntime sees there what it
sees in the whole graph: a constant. A node whose weights alone exceed the bound is a part by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

import onnx

from rewriter.graph.constants import Constants
from rewriter.graph.extract import Cut, ancestors, reads
from rewriter.graph.view import GraphView


def split(view: GraphView, wanted: Sequence[str], limit: int) -> tuple[Cut, ...]:
    """Cut a graph into parts whose weights take at most `limit` bytes each, where single nodes allow that.

    Args:
        view: the graph.
        wanted: tensors that the parts must give beside the graph's outputs.
        limit: bytes.
    """
    ends = [name for name in dict.fromkeys((*view.outputs, *wanted)) if name not in view.inputs]
    constants = _Constants(view)
    # A constant that is asked for is computed by the first part that holds a node, as any other result.
    needed = sorted(ancestors(view, frozenset(), ends))
    groups = _groups(
        [index for index in needed if not constants.is_constant(view.nodes[index])], view, constants, limit
    )
    groups = groups or [[]]
    groups[0][:0] = constants.makers(name for name in ends if name in constants)
    return _cuts(view, groups, ends, constants)


def bytes_of(tensor: onnx.TensorProto) -> int:
    """Bytes that the values of a tensor take, about: types smaller than a byte count one."""
    try:
        itemsize = int(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)
    except KeyError:
        itemsize = 1
    return int(prod(tensor.dims)) * itemsize


class _Constants:
    """What stands behind the constants of a view: the nodes that make them, the initializers they come from."""

    def __init__(self, view: GraphView) -> None:
        self._view = view
        self._constants = Constants(view)
        self._roots: dict[str, frozenset[str]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._constants

    def is_constant(self, node: onnx.NodeProto) -> bool:
        return all(name in self._constants for name in node.output if name)

    def makers(self, names: Iterable[str]) -> list[int]:
        """The nodes that compute these constants, in graph order."""
        return sorted(ancestors(self._view, frozenset(), [name for name in names if name in self._constants]))

    def roots(self, node: onnx.NodeProto) -> frozenset[str]:
        """The initializers that a node reads, directly or through constants."""
        found: set[str] = set()
        for name in reads(node):
            if name in self._constants:
                found |= self._behind(name)
        return frozenset(found)

    def _behind(self, name: str) -> frozenset[str]:
        if name not in self._roots:
            read = {entry for index in self.makers([name]) for entry in reads(self._view.nodes[index])}
            self._roots[name] = frozenset(entry for entry in (name, *read) if entry in self._view.initializers)
        return self._roots[name]


def _groups(indices: Sequence[int], view: GraphView, constants: _Constants, limit: int) -> list[list[int]]:
    groups: list[list[int]] = []
    held: set[str] = set()
    used = 0
    for index in indices:
        new = constants.roots(view.nodes[index]) - held
        more = sum(bytes_of(view.initializers[name]) for name in new)
        if not groups or used + more > limit:
            groups.append([])
            held, used = set(), 0
            new = constants.roots(view.nodes[index])
            more = sum(bytes_of(view.initializers[name]) for name in new)
        groups[-1].append(index)
        held |= new
        used += more
    return groups


def _cuts(
    view: GraphView, groups: Sequence[Sequence[int]], ends: Sequence[str], constants: _Constants
) -> tuple[Cut, ...]:
    made = {name: number for number, group in enumerate(groups) for index in group for name in view.nodes[index].output}
    last, final = _last_readers(view, groups), set(ends)
    crossing: list[list[str]] = [[] for _ in groups]
    for name, number in made.items():
        if name and (name in final or last.get(name, number) > number):
            crossing[number].append(name)
    # Initializers that are outputs too are made by no node.
    crossing[0] += [name for name in ends if name not in made]
    cuts = []
    for number, group in enumerate(groups):
        read = [name for index in group for name in reads(view.nodes[index])]
        inside = sorted({*group, *constants.makers(read)})
        produced = {name for index in inside for name in view.nodes[index].output}
        inputs = dict.fromkeys(
            name
            for index in inside
            for name in reads(view.nodes[index])
            if name not in produced and name not in view.initializers and (name in made or name in view.inputs)
        )
        cuts.append(Cut(tuple(inputs), tuple(crossing[number]), tuple(inside)))
    return tuple(cut for cut in cuts if cut.outputs)


def _last_readers(view: GraphView, groups: Sequence[Sequence[int]]) -> Mapping[str, int]:
    last: dict[str, int] = {}
    for number, group in enumerate(groups):
        for index in group:
            last.update(dict.fromkeys(reads(view.nodes[index]), number))
    return last
