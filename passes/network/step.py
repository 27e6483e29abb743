"""The edits of a node on the route, as data that the rules produce and `passes.network.carry` applies."""

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
    """Rows to append to an operand that is not carried, along axes (counted from the end) where its size is not 1."""

    tensor: str
    axes: tuple[int, ...]
    rank: int


@dataclass(frozen=True)
class Target:
    """The edits of a shape operand.

    Attributes:
        rows: elements that become N + m.
        fixed: (position, value) pairs to set.
        length: the number of elements.
        keys: elements that are a number of keys, to which m is added.
    """

    rows: tuple[int, ...]
    fixed: tuple[tuple[int, int], ...]
    length: int
    keys: tuple[int, ...] = ()


@dataclass(frozen=True)
class Step:
    """The edits of one node.

    Attributes:
        outputs: sizes of its outputs; empty where they are not carried (a Shape).
        pads: operands to pad.
        target: how its shape operand changes.
        floor: whether to mask the scores that it reads: it is the softmax of an attention.
        pattern: whether its output is an attention pattern, in which no token attends to a bias token.
        correct: for a Shape, the elements of its output from which m is subtracted.
    """

    outputs: tuple[Sizes, ...]
    pads: tuple[Pad, ...] = ()
    target: Target | None = None
    floor: bool = False
    pattern: bool = False
    correct: tuple[bool, ...] = ()


@dataclass(frozen=True)
class Aside:
    """A node that reads the tokens alone, as in the original: the stream does not pass it, what it gives joins again.

    Attributes:
        reason: why the stream does not pass it, with the node's name.
        node: the node's name.
        scores: whether what it gives is a product of two tensors that depend on the input, as scores are.
    """

    reason: str
    node: str
    scores: bool = False


@dataclass
class Known:
    """What the rules read: the graph, the tensors carried so far, and those computed beside the route from tokens."""

    view: GraphView
    constants: Constants
    shapes: ShapeReader
    patterns: set[str] = field(default_factory=set)
    beside: dict[str, Aside] = field(default_factory=dict)
    static_tokens: int | None = None

    def carried(self, tensor: str) -> Sizes | None:
        """Sizes of a carried tensor, None for other tensors."""
        return self.shapes.carried.get(tensor)


Rule = Callable[[Known, onnx.NodeProto], Step | Aside | Miss]


def token_axes(sizes: Sizes) -> tuple[int, ...]:
    """The axes that hold tokens, or the keys of a cache and the tokens, counted from the end."""
    return tuple(axis - len(sizes) for axis, size in enumerate(sizes) if size is not None and size.rows)
