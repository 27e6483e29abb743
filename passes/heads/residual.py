"""Where sublayers write, the sums that are the residual stream; and what a tensor of the stream is a sum of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from passes.heads.layers import Named
from passes.heads.original import Attention
from rewriter.graph.constants import Constants
from rewriter.graph.layout import REARRANGED
from rewriter.graph.view import GraphView

_STREAM = {
    *("Add", "Sum", "Sub", "Mul", "Div", "Neg", "Pow", "Sqrt", "Reciprocal"),
    *("ReduceMean", "ReduceSum", "ReduceSumSquare", "ReduceL2", "LayerNormalization", "RMSNormalization"),
    *("SimplifiedLayerNormalization", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "LpNormalization"),
    *REARRANGED,
    "Expand",
}
"""Operators of normalisations, sums and layout: their results have the channels of what they read."""


@dataclass(frozen=True)
class Write:
    """How a sublayer's result enters the residual stream.

    Attributes:
        out: the result, after its bias.
        before: the stream before it is added.
        after: the stream with it; sublayers in parallel have the same.
    """

    out: str
    before: str
    after: str


def writes(view: GraphView, constants: Constants, sublayers: Sequence[Named]) -> dict[str, Write]:
    """Name of a sublayer to its write; a sublayer whose result is not simply added has none."""
    sums = {each.name: found for each in sublayers if (found := _sum(view, constants, _result(each))) is not None}
    # Results of parallel sublayers are added to each other first, and their sum to the stream.
    shared = Counter(found.after for found in sums.values())
    for name, found in sums.items():
        if shared[found.after] > 1:
            outer = _sum(view, constants, found.after)
            if outer is not None:
                sums[name] = Write(found.out, outer.before, outer.after)
    return sums


def _result(named: Named) -> str:
    sublayer = named.sublayer
    return sublayer.output.output if isinstance(sublayer, Attention) else sublayer.result


def _sum(view: GraphView, constants: Constants, tensor: str) -> Write | None:
    """The first sum of a tensor with data, past biases, scales and whatever keeps its entries."""
    for _ in range(len(view.nodes)):
        readers = [view.nodes[index] for index in view.consumers.get(tensor, ())]
        readers = [node for node in readers if node.op_type != "Shape"]
        if len(readers) != 1 or not view.is_onnx(readers[0]):
            return None
        (node,) = readers
        others = [name for name in node.input if name != tensor]
        if node.op_type == "Add" and len(others) == 1 and others[0] not in constants:
            return Write(tensor, others[0], node.output[0])
        scaled = node.op_type in ("Add", "Mul") and all(name in constants for name in others)
        if not scaled and not (node.op_type in REARRANGED and node.input[0] == tensor):
            return None
        tensor = node.output[0]
    return None


def parts_of(view: GraphView, constants: Constants, tensor: str, ends: Collection[str]) -> Iterator[str]:
    """What a tensor of the stream is a sum of, up to normalisations: the tensors where the way back ends.

    It ends at `ends`, at inputs of the graph, and at results of whatever mixes channels or tokens. Constants are left
    out. Shapes and sizes that nodes read count as data, and end there too.
    """
    pending, seen = [tensor], {tensor}
    while pending:
        name = pending.pop()
        node = view.made_by(name)
        if name in ends or node is None or node.op_type not in _STREAM:
            yield name
            continue
        fresh = [each for each in node.input if each and each not in seen and each not in constants]
        seen.update(fresh)
        pending += fresh
