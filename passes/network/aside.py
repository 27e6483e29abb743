"""Operators that mix tokens without a softmax: convolutions and scores by relative position.

They read the tokens alone, as in the original, and bias tokens have zeros where their results join the stream. Such a
node is an `Aside`; what follows from it reads no bias token either, until an elementwise operator joins it. A pattern
of attention may not go this way, since its rows and columns are those of the stream (Theorem 6). The rules are entries
of the table in `passes.network.rules`.
"""

from __future__ import annotations

from dataclasses import replace

import onnx

from passes.match.linear import Miss
from passes.network.sizes import Size
from passes.network.step import Aside, Known, Step, token_axes
from rewriter.graph.view import attributes, label

_CHANNELS = 2
"""The axes of a convolution's data in front of the positions: batch and channels."""


def conv(known: Known, node: onnx.NodeProto) -> Step | Aside | Miss:
    """A linear map of rows if each position sees itself alone, otherwise aside."""
    sizes = known.carried(node.input[0])
    weight = known.constants.shape(node.input[1]) if node.input[1] in known.constants else None
    if sizes is None:
        return Miss(f"{label(node)}: its weights are computed from the residual stream", label(node))
    given = attributes(node)
    pointwise = (
        weight is not None
        and all(number == 1 for number in (*weight[_CHANNELS:], *_numbers(given.get("strides"))))
        and not any(_numbers(given.get("pads")))
    )
    if weight is None or not pointwise or any(axis + len(sizes) < _CHANNELS for axis in token_axes(sizes)):
        return Aside(f"{label(node)}: it mixes tokens", label(node))
    return Step(((sizes[0], Size(weight[0]), *sizes[_CHANNELS:]),))


def _numbers(value: object) -> list[int]:
    return [int(number) for number in value] if isinstance(value, list) else []


def pad(known: Known, node: onnx.NodeProto) -> Aside | Miss:
    """A padded axis shifts what is reshaped afterwards, as scores by relative position are."""
    if known.carried(node.input[0]) is None:
        return Miss(f"{label(node)}: what it pads with is computed from the residual stream", label(node))
    return Aside(f"{label(node)}: it adds entries to rows", label(node))


def gather_elements(known: Known, node: onnx.NodeProto) -> Aside | Miss:
    """A table of scores, looked up by the distance between two tokens."""
    if known.carried(node.input[0]) is None or known.carried(node.input[1]) is not None:
        return Miss(f"{label(node)}: its indices are computed from the residual stream", label(node))
    return Aside(f"{label(node)}: it looks up entries by position", label(node))


def follow(known: Known, node: onnx.NodeProto) -> Miss | None:
    """Note what is computed beside the route; a Miss where that is the pattern of an attention."""
    sources = [known.beside[name] for name in node.input if name in known.beside]
    if not sources or node.op_type in ("Shape", "Size"):
        return None
    source = next((each for each in sources if each.scores), sources[0])
    if node.op_type == "Softmax" and source.scores:
        return Miss(f"{source.reason}, so {label(node)} has no scores of the bias token", source.node)
    if node.op_type in ("MatMul", "Einsum") and not any(name in known.constants for name in node.input):
        source = replace(source, scores=True)
    known.beside.update(dict.fromkeys(node.output, source))
    return None
