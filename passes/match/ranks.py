"""The number of axes of a tensor where type inference stops: at a Reshape to a computed shape, for example."""

from __future__ import annotations

from rewriter.graph.view import GraphView

_DEPTH = 32
"""Longest chain of nodes that is followed."""

_SAME = frozenset(
    [
        *("Identity", "Cast", "Dropout", "Neg", "Abs", "Sqrt", "Erf", "Tanh", "Sigmoid", "Relu", "Softmax", "Gelu"),
        *("QuickGelu", "Swish", "Mish", "Softplus", "LeakyRelu", "Elu", "Clip", "Split", "Slice", "Pad"),
        *("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization", "SkipLayerNormalization"),
    ]
)
"""Operators whose outputs have as many axes as their first input."""
_WIDEST = frozenset(("Add", "Sub", "Mul", "Div", "Pow", "Where", "Min", "Max", "MatMul", "FusedMatMul"))
"""Operators whose output has as many axes as the operand with the most of them."""


def rank_of(view: GraphView, tensor: str, depth: int = 0) -> int | None:
    """The number of axes of a tensor; None where it is unknown."""
    known = view.type_of(tensor).rank
    node = view.made_by(tensor)
    if known is not None or node is None or depth > _DEPTH:
        return known
    if node.op_type == "Reshape" and view.is_onnx(node) and len(node.input) > 1:
        return _length(view, node.input[1], depth + 1)
    if node.op_type == "Transpose":
        order = next((attribute.ints for attribute in node.attribute if attribute.name == "perm"), ())
        return len(order) or rank_of(view, node.input[0], depth + 1)
    if node.op_type in _SAME:
        return rank_of(view, node.input[0], depth + 1)
    if node.op_type in _WIDEST:
        ranks = [rank_of(view, name, depth + 1) for name in node.input if name]
        told = [rank for rank in ranks if rank is not None]
        fits = len(told) == len(ranks) and (min(told) > 1 or "MatMul" not in node.op_type)
        return max(told) if fits else None
    return None


def _length(view: GraphView, shape: str, depth: int) -> int | None:
    """The number of elements of a shape."""
    known = view.type_of(shape).shape
    if known is not None and len(known) == 1 and isinstance(known[0], int):
        return known[0]
    node = view.made_by(shape)
    if node is None or depth > _DEPTH:
        return None
    if node.op_type == "Concat":
        lengths = [_length(view, name, depth + 1) for name in node.input]
        told = [length for length in lengths if length is not None]
        return sum(told) if len(told) == len(lengths) else None
    if node.op_type == "Shape" and not node.attribute:
        return rank_of(view, node.input[0], depth + 1)
    return None
