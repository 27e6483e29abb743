"""A proved bound on what a gate over pairs of keys loses when the pairs' coefficients are rounded.

The keys of such a gate are those of a head times those of a line (`passes.programs.line`). Relative to the self key,
the pairs of a bias token have the logits (a + s) g + b + o, and these sums are rounded; the pairs of the self key are
the line's own keys and are not. With p the weight of the self key and p_j those of the bias tokens in the head, the
denominator is that of the product but for factors exp(d) on the terms of token j, with |d| <= D_j = max_i (|rounding of
a_j + s_i| |g| + |rounding of b_j + o_i|). So the sum of the self heads, M line with M = c p, changes by at most

    |M line| min(s / (1 - s), exp(max D_j) - 1),   s = sum over j of p_j (exp(D_j) - 1).

Constant values are heads over the keys of the head alone, whose coefficients stay as they are.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from passes.certificates.intervals import affine, largest, least_size, size, summed, total, weighted
from passes.programs.head import Head
from passes.programs.line import Line
from passes.programs.softmax import FACTORED, Array

_TIGHT = 1.5
_MOST_CELLS = 200_000

LOGARITHMS = 2e-15
"""Relative error of a line whose weights are written as e^(ln w), with logarithms down to -7 rounded to float64."""


def pairable(head: Head) -> bool:
    """Whether pairs with a line keep their offsets: those of a steep key with an offset of its own would be lost."""
    return head.alpha == 0.0 and all(abs(token.offset - head.gamma) <= FACTORED for token in head.bias_tokens)


def pairing_error(head: Head, line: Line, domain: float, *, enough: float) -> float:
    """A bound on the change over max(1, |h|), or max(1, |h g|) / |g| where all values are multiples of g.

    Args:
        head: the head of h, with an affine self logit and offsets that `pairable` accepts.
        line: the line.
        domain: largest |g|.
        enough: bounds below this need not be sharp.
    """
    if not head.bias_tokens or head.c == 0.0:
        return 0.0
    slopes, offsets = _roundings(head, line)
    values = np.array([token.value for token in head.bias_tokens]).reshape(-1, 1)
    multiples = head.d == 0.0 and not np.any(values)

    def bounds(low: Array, high: Array) -> tuple[Array, Array]:
        middle = (low + high) / 2.0
        return change(low, high), change(middle, middle)

    def change(low: Array, high: Array) -> Array:
        g = low, high
        least, most = head.keys.enclosed(*g)
        apart = np.expm1(slopes * size(g) + offsets)
        grown = np.sum(most[1:] * apart, axis=0)
        share = np.minimum(np.where(grown < 0.5, 2.0 * grown, np.inf), np.max(apart, axis=0))
        others = summed(weighted((least[1:], most[1:]), (values, values)))
        output = total(weighted((least[0], most[0]), affine(head.c, head.d, g)), others)
        floor = 1.0 / np.maximum(1.0, size(g)) if multiples else np.ones_like(low)
        own = abs(head.c) * most[0] * size(g) * (1.0 + line.max_error)
        return np.asarray(own * share / np.maximum(floor, least_size(output)))

    steps = np.concatenate([[0.0], np.geomspace(1e-12, 1.0, 400)]) * domain
    edges = np.concatenate([-steps[:0:-1], steps])
    bound, _, _ = largest(bounds, edges, tight=_TIGHT, enough=enough, most=_MOST_CELLS)
    return bound * (1.0 + 1e-6)


def _roundings(head: Head, line: Line) -> tuple[Array, Array]:
    """The largest rounding of a slope and of an offset among the pairs of each bias token, [tokens, 1] each."""
    exact = [
        (Fraction(token.slope) - Fraction(head.beta), Fraction(token.offset) - Fraction(head.gamma))
        for token in head.bias_tokens
    ]
    pairs, count = line.pairs_with(head), len(line.keys)
    worst = np.zeros((len(exact), 2))
    for number, (slope, offset) in enumerate(exact):
        written = pairs[(number + 1) * count : (number + 2) * count]
        for (a, b), (s, o, _) in zip(written, line.keys, strict=True):
            off = abs(Fraction(a) - slope - Fraction(s)), abs(Fraction(b) - offset - Fraction(o))
            worst[number] = np.maximum(worst[number], [float(part) * (1.0 + 1e-9) for part in off])
    return worst[:, :1], worst[:, 1:]
