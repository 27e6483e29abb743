"""The normalisation before a sublayer: the scale and the bias that its linear operators read."""

from __future__ import annotations

from dataclasses import dataclass

import onnx

from passes.match.bounds import NORMS
from passes.match.linear import MICROSOFT
from rewriter.graph.constants import Constants
from rewriter.graph.layout import SAME_NUMBERS
from rewriter.graph.view import GraphView, integer_of

_REACH = 8
"""Nodes between a written-out normalisation's scale and the mean that it divides by."""


@dataclass(frozen=True)
class Norm:
    """A normalisation `x_hat * scale + bias` over the last axis.

    Attributes:
        output: its result.
        scale: the constant; empty for none.
        bias: the constant; empty for none.
    """

    output: str
    scale: str
    bias: str


def norm_before(view: GraphView, constants: Constants, tensor: str) -> Norm | None:
    """The normalisation whose result `tensor` is, up to its layout; None where there is none."""
    node = view.made_by(tensor)
    while node is not None and node.op_type in SAME_NUMBERS:
        tensor = node.input[0]
        node = view.made_by(tensor)
    if node is None:
        return None
    known = NORMS.get((node.domain if node.domain == MICROSOFT else "", node.op_type))
    if known is not None and integer_of(node, "axis", -1) == -1:
        return Norm(tensor, _operand(node, known.scale), _operand(node, known.bias))
    return _written_out(view, constants, tensor, node)


def _operand(node: onnx.NodeProto, slot: int | None) -> str:
    return "" if slot is None or len(node.input) <= slot else node.input[slot]


def _written_out(view: GraphView, constants: Constants, tensor: str, node: onnx.NodeProto) -> Norm | None:
    """Mul and Add of constants after a division by a mean."""
    bias = ""
    if node.op_type == "Add":
        data, bias = _parted(constants, node)
        inner = None if not data else view.made_by(data)
        if inner is None or not bias:
            return None
        node = inner
    if node.op_type != "Mul":
        return None
    data, scale = _parted(constants, node)
    if not data or len([size for size in constants.shape(scale) or () if size != 1]) != 1 or not _averages(view, data):
        return None
    return Norm(tensor, scale, bias)


def _parted(constants: Constants, node: onnx.NodeProto) -> tuple[str, str]:
    """(the operand that is data, the one that is constant); empty where they are not one each."""
    held = [name for name in node.input if name in constants]
    data = [name for name in node.input if name not in constants]
    return (data[0], held[0]) if len(held) == len(data) == 1 else ("", "")


def _averages(view: GraphView, tensor: str) -> bool:
    pending = [(tensor, 0)]
    while pending:
        name, depth = pending.pop()
        node = view.made_by(name)
        if node is None or depth > _REACH:
            continue
        if node.op_type in ("ReduceMean", "ReduceSum", "ReduceSumSquare"):
            return True
        if node.op_type in ("Div", "Mul", "Reciprocal", "Sqrt", "Add", "Pow", "Cast", "Sub"):
            pending += [(each, depth + 1) for each in node.input]
    return False
