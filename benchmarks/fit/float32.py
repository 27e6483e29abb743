"""Head programs in float32 arithmetic, as the graph computes them, and their error there.

One evaluation serves the objective of the fitter, the errors stated in `programs.json` and the fit at run time. If all
offsets relative to the self logit are at most 60, a bias token's weight is exp(slope y - t) times the constant
exp(offset), with t the largest slope y. The offset then does not add to the rounding error of the exponent, which is
proportional to its magnitude. Otherwise the offset stays in the exponent.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from passes.programs.program import Array, Head, Program

Single = NDArray[np.float32]

LARGEST_OFFSET = 60.0
"""Largest |offset| that is factored out: e^60 times any weight that matters is within the range of float32."""


@dataclass(frozen=True)
class Coefficients:
    """One head as float32 numbers, self first in `slopes` and `weights`.

    Attributes:
        slopes: factors of y in the logits [keys].
        offsets: offsets in the exponent [keys]; zeros where they are factored out.
        weights: factors of the exponentials [keys], 1 for self; ones where offsets are not factored out.
        numerators: weights times values [bias tokens], rounded once.
        c: factor of y in the self value.
        d: constant of the self value.
    """

    slopes: Single
    offsets: Single
    weights: Single
    numerators: Single
    c: np.float32
    d: np.float32


def coefficients(head: Head) -> Coefficients:
    """The numbers that a graph stores for a head with an affine self logit."""
    head = head.shifted(0.0, -head.gamma)
    slopes = np.array([head.beta, *(token.slope for token in head.bias_tokens)], dtype=np.float32)
    offsets = np.array([head.gamma, *(token.offset for token in head.bias_tokens)])
    values = np.array([token.value for token in head.bias_tokens])
    if np.max(np.abs(offsets)) <= LARGEST_OFFSET:
        weights, kept = np.exp(offsets), np.zeros(len(offsets), dtype=np.float32)
    else:
        weights, kept = np.ones(len(offsets)), offsets.astype(np.float32)
    numerators = (weights[1:] * values).astype(np.float32)
    return Coefficients(slopes, kept, weights.astype(np.float32), numerators, np.float32(head.c), np.float32(head.d))


def on_grid(program: Program) -> Program:
    """The program whose coefficients, in exact arithmetic, are the rounded ones of `coefficients`.

    Rounding it again changes nothing, so bounds proved for it hold for the numbers in a float32 graph.
    """
    return replace(
        program,
        heads=tuple(_head_on_grid(head) for head in program.heads),
        linear=float(np.float32(program.linear)),
        constant=float(np.float32(program.constant)),
    )


def _head_on_grid(head: Head) -> Head:
    numbers = coefficients(head)
    offsets = np.log(numbers.weights.astype(np.float64)) + numbers.offsets
    values = numbers.numerators / numbers.weights[1:].astype(np.float64)
    tokens = tuple(
        replace(token, slope=float(slope), offset=float(offset), value=float(value))
        for token, slope, offset, value in zip(head.bias_tokens, numbers.slopes[1:], offsets[1:], values, strict=True)
    )
    own = {"beta": float(numbers.slopes[0]), "gamma": float(offsets[0]), "c": float(numbers.c), "d": float(numbers.d)}
    return replace(head, bias_tokens=tokens, **own)


def evaluate(program: Program, y: Single) -> Single:
    """The program in float32 throughout, as the graph computes it."""
    total = np.zeros_like(y)
    with np.errstate(over="ignore", under="ignore"):
        for head in program.heads:
            total = total + _head(coefficients(head), y)
        if program.linear:
            total = total + np.float32(program.linear) * y
        if program.constant:
            total = total + np.float32(program.constant)
    return total


def _head(numbers: Coefficients, y: Single) -> Single:
    logits = [slope * y + offset if offset else slope * y for slope, offset in _pairs(numbers)]
    top = np.max(logits, axis=0)
    powers = [np.exp(logit - top) for logit in logits]
    own = numbers.c * y + numbers.d if numbers.d else numbers.c * y
    weighted, total = powers[0] * own, powers[0]
    for power, numerator, weight in zip(powers[1:], numbers.numerators, numbers.weights[1:], strict=True):
        weighted, total = weighted + power * numerator, total + power * weight
    return np.asarray(weighted / total, dtype=np.float32)


def _pairs(numbers: Coefficients) -> list[tuple[np.float32, np.float32]]:
    return list(zip(numbers.slopes, numbers.offsets, strict=True))


def points(low: float, high: float, count: int = 100_001) -> Single:
    """Float32 points for measuring errors, always the same ones.

    They are evenly spaced with random jitter: points on a regular grid, such as powers of two, would round too well.
    """
    grid = np.linspace(low, high, count)
    random = np.random.default_rng(20)
    grid[1:-1] += random.uniform(-0.5, 0.5, count - 2) * (high - low) / (count - 1)
    return grid.astype(np.float32)


def error(program: Program, truth: Callable[[Array], Array], low: float = -20.0, high: float = 20.0) -> float:
    """Largest |float32 evaluation - truth| over max(1, |truth|), at 10^5 float32 points; truth in float64."""
    y = points(low, high)
    return error_at(program, y, truth(y.astype(np.float64)))


def error_at(program: Program, y: Single, expected: Array) -> float:
    """Largest error over max(1, |expected|) at given points."""
    difference = np.abs(evaluate(program, y).astype(np.float64) - expected) / np.maximum(1.0, np.abs(expected))
    return float(np.max(difference)) if np.all(np.isfinite(difference)) else float("inf")


def shifted(program: Program, y: Single, expected: Array) -> Program:
    """The program on the float32 grid, with each head shifted for the smallest error at the points.

    The shifts tried make the slope of one key 0.
    """
    for index in range(len(program.heads)):
        options = [_with_head(program, index, head) for head in _shifts(program.heads[index])]
        program = min(options, key=lambda option: error_at(option, y, expected))
    return on_grid(program)


def _with_head(program: Program, index: int, head: Head) -> Program:
    return on_grid(replace(program, heads=(*program.heads[:index], head, *program.heads[index + 1 :])))


def _shifts(head: Head) -> list[Head]:
    return [head.shifted(-slope, 0.0) for slope in (head.beta, *(token.slope for token in head.bias_tokens))]
