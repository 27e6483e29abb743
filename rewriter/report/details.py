"""What an HTML page shows beyond the report: head programs with their keys, and the accounting of heads.

These are plain types that `rewriter.api` fills, so that `rewriter.report.html` can show them without knowing what an
MLP or a head program is.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Key:
    """One key that a head attends to; its logit is a polynomial in the pre-activation y.

    Attributes:
        label: `self`, or the name of the bias token.
        logit: coefficients of y and 1.
        value: its value, as text: a number, or `y`.
    """

    label: str
    logit: tuple[float, float]
    value: str


@dataclass(frozen=True)
class ProgramDetails:
    """One head program with the coefficients that the graph contains.

    Attributes:
        program: its name.
        activation: the activation that it computes; for a gated block, that of the gate.
        blocks: number of blocks that use it.
        certified: certified maximum error, relative to max(1, |f|).
        measured: whether that was measured on a dense grid instead.
        count: number of heads per neuron.
        tokens: the largest number of bias tokens that a head attends to.
        heads: the keys of its heads, the token itself first; heads over the same keys are one entry, with these in
            ascending order. Of a gate made with the line, those of the program that the line enters.
    """

    program: str
    activation: str
    blocks: int
    certified: float
    measured: bool
    count: int
    tokens: int
    heads: tuple[tuple[Key, ...], ...]


@dataclass(frozen=True)
class HeadCount:
    """One block of the accounting; sizes are None if unknown.

    Attributes:
        name: the block.
        d_model: width of its input.
        d_ff: number of neurons.
        parameters: number of elements of its weights.
        share: its share of the multiply-adds of the model's linear operators per token, from 0 to 1.
        heads: number of heads in the chosen form; None for a block that is not converted.
        staged: number of heads of each of three sublayers (W1, activation, W2).
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
        programs: one per distinct program, in graph order of the first block that uses it.
        counts: the accounting, block by block.
        share: share of all blocks in the multiply-adds of linear operators, from 0 to 1.
        head_dimension: d_head of the model's own attention; None if it was not found.
        attention_heads: number of its heads per sublayer.
        remaining: the nonlinearities that remain besides softmax and normalisation, such as `1 Tanh`; empty if none do.
    """

    programs: tuple[ProgramDetails, ...]
    counts: tuple[HeadCount, ...]
    share: float
    head_dimension: int | None
    attention_heads: int | None
    remaining: str
