"""Split a graph into consecutive parts, so that a model can be run without holding all of its weights.

Each part reads only graph inputs and outputs of earlier parts, and together they compute what the graph computes.

Constant subexpressions are duplicated into every part that reads them, so that onnxruntime sees a constant there, as it
does in the whole graph. A node whose weights alone exceed the bound forms a part by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

import onnx

from rewriter.graph.extract import Cut, ancestors, reads
from rewriter.graph.view import GraphView


def split(view: GraphView, wanted: Sequence[str], limit: int) -> tuple[Cut, ...]:
    """Split a graph into parts of at most `limit` bytes of weights each, unless a single node needs more.

    Args:
        view: the main graph of a model.
        wanted: tensors that the parts must output besides the graph's own outputs.
        limit: bound on the weights of a part, in bytes.
    """
    ends = [name for name in dict.fromkeys((*view.outputs, *wanted)) if name not in view.inputs]
    constants = _Constants(view)
    needed = sorted(ancestors(view, frozenset(), ends))
    groups = _groups(
        [index for index in needed if not constants.is_constant(view.nodes[index])], view, constants, limit
    )
    # A graph may have constants as its only outputs; and a wanted constant must be computed by some part, so the first.
    groups = groups or [[]]
    groups[0][:0] = constants.makers(name for name in ends if name in constants)
    return _cuts(view, groups, ends, constants)


def bytes_of(tensor: onnx.TensorProto) -> int:
    """Approximate size of a tensor's values in bytes; packed types narrower than a byte count one byte each."""
    try:
        itemsize = int(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)
    except KeyError:
        itemsize = 1
    return int(prod(tensor.dims)) * itemsize


class _Constants:
    """The nodes that compute the constants of a view, and the initializers that they are computed from."""

    def __init__(self, view: GraphView) -> None:
        self._view = view
        self._roots: dict[str, frozenset[str]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._view.constants

    def is_constant(self, node: onnx.NodeProto) -> bool:
        return all(name in self._view.constants for name in node.output if name)

    def makers(self, names: Iterable[str]) -> list[int]:
        """The nodes that compute these constants, in graph order."""
        return sorted(ancestors(self._view, frozenset(), [name for name in names if name in self._view.constants]))

    def roots(self, node: onnx.NodeProto) -> frozenset[str]:
        """The initializers that a node reads, directly or through constants."""
        found: set[str] = set()
        for name in reads(node):
            if name in self._view.constants:
                found |= self._behind(name)
        return frozenset(found)

    def _behind(self, name: str) -> frozenset[str]:
        # Cached, since one weight chain (Transpose, DequantizeLinear) may have many consumers.
        if name not in self._roots:
            read = {entry for index in self.makers([name]) for entry in reads(self._view.nodes[index])}
            self._roots[name] = frozenset(entry for entry in (name, *read) if entry in self._view.initializers)
        return self._roots[name]


def _groups(indices: Sequence[int], view: GraphView, constants: _Constants, limit: int) -> list[list[int]]:
    # Greedy in graph order: every prefix of a topological order is closed under "depends on", so a part never needs
    # the output of a later one. A weight shared within a part counts once, across parts once in each.
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
    # A part outputs what a later part reads or the caller wants; everything else never leaves onnxruntime.
    crossing: list[list[str]] = [[] for _ in groups]
    for name, number in made.items():
        if name and (name in final or last.get(name, number) > number):
            crossing[number].append(name)
    # An initializer that is also an output has no producer.
    crossing[0] += [name for name in ends if name not in made]
    cuts = []
    for number, group in enumerate(groups):
        read = [name for index in group for name in reads(view.nodes[index])]
        inside = sorted({*group, *constants.makers(read)})
        produced = {name for index in inside for name in view.nodes[index].output}
        # The last condition drops names that are local to a control-flow body.
        inputs = dict.fromkeys(
            name
            for index in inside
            for name in reads(view.nodes[index])
            if name not in produced and name not in view.initializers and (name in made or name in view.inputs)
        )
        cuts.append(Cut(tuple(inputs), tuple(crossing[number]), tuple(inside)))
    # A part without outputs computes nothing that anyone reads.
    return tuple(cut for cut in cuts if cut.outputs)


def _last_readers(view: GraphView, groups: Sequence[Sequence[int]]) -> Mapping[str, int]:
    last: dict[str, int] = {}
    for number, group in enumerate(groups):
        for index in group:
            last.update(dict.fromkeys(reads(view.nodes[index]), number))
    return last
