"""What becomes of a node that the bias token passes, as data.

Comes in: nothing; the rules fill it. Goes out: `Step` and its edits, which `passes.network.carry` carries out, and
`Known`, what the rules read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import onnx

from passes.match.linear import Miss
from passes.network.sizes import ShapeReader, Sizes
from rewriter.graph.constants import Constants
from rewriter.graph.view import GraphView


@dataclass(frozen=True)
class Pad:
    """Rows to add to an operand that is not carried, at axes (counted from the end) where its size is not 1."""

    tensor: str
    axes: tuple[int, ...]
    rank: int


@dataclass(frozen=True)
class Target:
    """The shape of a Reshape or Expand: `rows` at these positions become N + m, `fixed` are set."""

    rows: tuple[int, ...]
    fixed: tuple[tuple[int, int], ...]
    length: int


@dataclass(frozen=True)
class Step:
    """What becomes of one node.

    Attributes:
        outputs: sizes of its outputs; empty where they are no longer carried (a Shape).
        pads: operands to pad.
        target: how its shape operand changes.
        floor: whether scores are masked in front of it: the softmax of an attention.
        pattern: whether its output is an attention pattern, in which no token sees a bias token.
        correct: for a Shape, which elements of its output m is taken off again from.
    """

    outputs: tuple[Sizes, ...]
    pads: tuple[Pad, ...] = ()
    target: Target | None = None
    floor: bool = False
    pattern: bool = False
    correct: tuple[bool, ...] = ()


@dataclass
class Known:
    """What the rules read: the graph, and what is carried so far."""

    view: GraphView
    constants: Constants
    shapes: ShapeReader
    patterns: set[str] = field(default_factory=set)
    static_tokens: int | None = None

    def carried(self, tensor: str) -> Sizes | None:
        """Sizes of a carried tensor, None for another."""
        return self.shapes.carried.get(tensor)


Rule = Callable[[Known, onnx.NodeProto], Step | Miss]


def token_axes(sizes: Sizes) -> tuple[int, ...]:
    """The axes that hold tokens, counted from the end."""
    return tuple(axis - len(sizes) for axis, size in enumerate(sizes) if size is not None and size.tokens)
