"""The model's own attention: its number of heads and their dimension, which `inspect` and form `staged` go by."""

from __future__ import annotations

from passes.recognise import Recognised
from rewriter.graph.view import GraphView

_SEARCH_DEPTH = 8


def own_attention(views: tuple[GraphView, ...], recognised: Recognised) -> tuple[int | None, int | None]:
    """Number of heads and head dimension of the first attention that states them, from the query before its softmax."""
    for view in views:
        made = recognised.nodes(view)
        for index, node in enumerate(view.nodes):
            if node.op_type != "Softmax" or index in made:
                continue
            shape = _query_shape(view, node.input[0])
            if shape is not None and len(shape) == 4 and isinstance(shape[3], int):
                return (shape[1] if isinstance(shape[1], int) else None), shape[3] - recognised.positions
    return None, None


def _query_shape(view: GraphView, scores: str) -> tuple[int | str | None, ...] | None:
    """Shape of the left factor of the product that makes the scores."""
    tensor = scores
    for _ in range(_SEARCH_DEPTH):
        node = view.made_by(tensor)
        if node is None:
            return None
        if node.op_type in ("MatMul", "FusedMatMul"):
            return view.type_of(node.input[0]).shape
        candidates = [name for name in node.input if name in view.producer]
        if not candidates:
            return None
        tensor = candidates[1] if node.op_type == "Where" and len(candidates) > 1 else candidates[0]
    return None
