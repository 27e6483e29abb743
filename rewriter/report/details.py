"""What a page shows beyond the report: head programs as curves, and the accounting of heads.

Comes in: nothing; these are the plain types that `rewriter.api` fills from the domain's own, so that
`rewriter.report.html` draws without knowing what an MLP or a head program is. Carried by `Report.details`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Curve:
    """One line of a drawing.

    Attributes:
        label: what it is.
        values: one per point of the drawing's axis.
    """

    label: str
    values: tuple[float, ...]


@dataclass(frozen=True)
class Key:
    """One key that a head attends to: its logit is a polynomial in the pre-activation y.

    Attributes:
        label: `self`, or which bias token.
        logit: coefficients of y^2, y and 1.
        value: its value, as text: a number, or `y`.
    """

    label: str
    logit: tuple[float, float, float]
    value: str


@dataclass(frozen=True)
class DrawnHead:
    """One head of a program.

    Attributes:
        keys: what it attends to, the token itself first.
        weights: softmax weight of each key over `Drawing.near`, in the order of the keys.
    """

    keys: tuple[Key, ...]
    weights: tuple[Curve, ...]


@dataclass(frozen=True)
class Drawing:
    """One head program, evaluated in float64 with its coefficients as they stand in the graph.

    Attributes:
        program: its name.
        activation: the activation that it computes; of a gated block, that of the gate.
        blocks: how many blocks use it.
        example: the first of them.
        exact: whether program and activation are equal in exact arithmetic.
        certified: certified largest error over max(1, |f|).
        points: pre-activations y, ascending.
        target: the activation at the points.
        values: the program at the points, of the same length.
        near: pre-activations where the softmax moves: `points`, or closer to 0 for a steep program.
        error: program minus activation f at `near`, over max(1, |f|).
        heads: its heads.
    """

    program: str
    activation: str
    blocks: int
    example: str
    exact: bool
    certified: float
    points: tuple[float, ...]
    target: Curve
    values: Curve
    near: tuple[float, ...]
    error: Curve
    heads: tuple[DrawnHead, ...]


@dataclass(frozen=True)
class HeadCount:
    """One block of the accounting; None where a size is unknown.

    Attributes:
        name: the block.
        d_model: width of its input.
        d_ff: its neurons.
        parameters: elements of its weights.
        share: its part of the multiply-adds of the model's linear operators, for one token; 0 to 1.
        heads: heads of the chosen form; None for a block that is left.
        staged: heads of three sublayers (W1, activation, W2).
    """

    name: str
    d_model: int | None
    d_ff: int | None
    parameters: int
    share: float
    heads: int | None
    staged: tuple[int, int, int] | None


@dataclass(frozen=True)
class Details:
    """Everything that only a page shows.

    Attributes:
        drawings: one per different program, in graph order of the first block that uses it.
        counts: the accounting, block by block.
        share: what all blocks together take of the multiply-adds of linear operators; 0 to 1.
        head_dimension: d_head of the model's own attention, None where it was not found.
        attention_heads: its heads per sublayer.
        remaining: the nonlinearities beside softmax and normalisation that conversion leaves, such as `1 Tanh`; empty
            for none.
    """

    drawings: tuple[Drawing, ...]
    counts: tuple[HeadCount, ...]
    share: float
    head_dimension: int | None
    attention_heads: int | None
    remaining: str
