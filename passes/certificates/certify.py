"""Certificates: a proved bound on the distance of a head program from its activation.

The bound is on the largest |program - f| over all reals or a domain, in exact arithmetic for the given coefficients.

Cells. On a cell of centre c and half-width r, Taylor's theorem gives |e| <= |e(c)| + r |e'(c)| + r^2/2 |e''(c)| +
r^3/6 max |e'''|, e = program - f. The derivatives of a head are joint cumulants of slopes a and values v under its
softmax weights p: with v' the slope of the values,

    o' = E[v'] + cov(a, v),   o'' = 2 cov(a, v') + k(a, a, v),   o''' = 3 k(a, a, v') + k(a, a, a, v),

and over a cell log p_j changes by at most r (max a - min a), which bounds o''' by sums of absolute values. Cells whose
bound is well above the largest error seen are split.

Tails. Beyond the outermost cells one key outweighs each other key by a factor exp(difference of slopes * |y|), and the
head equals its value up to a sum of decreasing terms.

The rounding of the evaluations is bounded (`Head.float64_rounding`) and added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from passes.certificates.curves import CURVES, Curve, End
from passes.certificates.intervals import largest
from passes.programs.head import Head
from passes.programs.program import Program
from passes.programs.softmax import Array

_ULP = 2.0**-52
_TIGHT = 1.02
"""Cells are split until no bound exceeds the largest error seen by more than this."""
_MOST_CELLS = 4_000_000
_ROUNDING = 1e-12
"""Cells with a bound below this are not split, since the rounding of the evaluations dominates there."""


@dataclass(frozen=True)
class Certificate:
    """A proved bound.

    Attributes:
        bound: an upper bound on |program - f|; infinite where none could be proved.
        seen: the largest |program - f| met, less its rounding: a lower bound.
        cells: number of cells.
        tail: bound beyond the cells; 0 where the domain ends with them.
        reach: the cells cover |y| <= reach.
        method: how it was proved, in one line.
    """

    bound: float
    seen: float
    cells: int
    tail: float
    reach: float
    method: str


def certify(program: Program, activation: str, *, domain: float = math.inf) -> Certificate:
    """Bound |program - f| over |y| <= domain.

    Args:
        program: heads without quadratic self logits.
        activation: a name in `passes.certificates.curves.CURVES`.
        domain: largest |y|; infinite for all reals.

    Raises:
        KeyError: for an activation without a curve.
        ValueError: for a quadratic self logit.
    """
    if any(head.alpha for head in program.heads):
        raise ValueError(f"{program.name} has a quadratic self logit, which certificates do not cover")
    curve = CURVES[activation]
    reach, tail = (domain, 0.0) if math.isfinite(domain) else _tail(program, curve)
    bound, seen, cells = _cells(program, curve, reach)
    ends = "" if math.isfinite(domain) else f", tails beyond within {tail:.1e}"
    method = f"third-order Taylor bounds on {cells} cells of |y| <= {reach:g}{ends}"
    return Certificate(max(bound, tail), seen, cells, tail, reach, method)


# -- the tails ---------------------------------------------------------------------------------------------------


def _tail(program: Program, curve: Curve) -> tuple[float, float]:
    """(reach, bound beyond it): the nearest reach where the tails are small, else the farthest."""
    # Tails below half the error that a sample shows cannot determine the certificate.
    y = np.linspace(-12.0, 12.0, 4801)
    error = float(np.max(np.abs(program.evaluate(y) - curve.jet(y)[0])))
    reach, bound = 0.0, math.inf
    for candidate in (6.0, 8.0, 10.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 128.0):
        reach = candidate
        bound = max(_one_tail(program, curve.left, -reach), _one_tail(program, curve.right, reach))
        if bound <= 0.5 * error:
            break
    return reach, bound


def _one_tail(program: Program, end: End | None, start: float) -> float:
    """Bound for y beyond `start`, away from 0; infinite where the program does not approach the curve's line."""
    if end is None:
        return math.inf
    slope, constant, total = program.linear - end.slope, program.constant - end.constant, end.excess(abs(start))
    for head in program.heads:
        line, excess = _head_tail(head, start)
        slope, constant, total = slope + line[0], constant + line[1], total + excess
    return (total + abs(constant)) * (1.0 + 1e-12) if slope == 0.0 else math.inf


def _head_tail(head: Head, start: float) -> tuple[tuple[float, float], float]:
    """The line (slope, constant) that a head approaches beyond `start`, and a bound on its distance from it there.

    With k the key of the largest slope, |o - v_k| <= sum over j of exp(l_j - l_k) |v_j - v_k|, and
    |A + B y| exp(-d |y|) decreases once d |y| > 1.
    """
    sign, distance = math.copysign(1.0, start), abs(start)
    keys = [(head.beta, head.gamma, head.c, head.d)]
    keys += [(token.slope, token.offset, 0.0, token.value) for token in head.bias_tokens]
    winner = max(keys, key=lambda key: sign * key[0])
    total = 0.0
    for key in keys:
        if key is winner or key[2:] == winner[2:]:  # equal values: its weight does not matter
            continue
        fall = sign * (winner[0] - key[0])
        if fall * distance <= 1.0:
            return winner[2:], math.inf
        apart = abs(key[3] - winner[3]) + abs(key[2] - winner[2]) * distance
        total += math.exp(min(key[1] - winner[1] - fall * distance, 700.0)) * apart
    return winner[2:], total * (1.0 + 1e-9)


# -- the cells ---------------------------------------------------------------------------------------------------


def _cells(program: Program, curve: Curve, reach: float) -> tuple[float, float, int]:
    """(bound, largest error seen, cells) over |y| <= reach."""
    places = sorted({-reach, reach, *(place for place in curve.breaks if abs(place) < reach)})
    edges = np.unique(
        np.concatenate([np.linspace(a, b, max(2, math.ceil((b - a) * 64.0) + 1)) for a, b in pairwise(places)])
    )

    def bounds(low: Array, high: Array) -> tuple[Array, Array]:
        return _bounds(program, curve, low, high)

    return largest(bounds, edges, tight=_TIGHT, enough=_ROUNDING, most=_MOST_CELLS)


def _bounds(program: Program, curve: Curve, low: Array, high: Array) -> tuple[Array, Array]:
    """(upper bound of |e|, |e| at the centre less rounding) per cell."""
    # c is rounded, so r is the distance to the farther end. The factors just above 1 below cover the rounding of the
    # bounds themselves.
    c = (low + high) / 2.0
    r = np.maximum(high - c, c - low) * (1.0 + 4.0 * _ULP)
    f = curve.jet(c)
    near = np.where(low * high <= 0.0, 0.0, np.minimum(np.abs(low), np.abs(high)))
    far = np.maximum(np.abs(low), np.abs(high))
    e0 = program.linear * c + program.constant - f[0]
    e1, e2 = program.linear - f[1], -f[2]
    e3 = curve.third(near, far, np.sign(c)) * (1.0 + 1e-9)
    size = np.abs(f[0]) + np.abs(c) * (1.0 + abs(program.linear)) + abs(program.constant) + 1.0
    slack = 8.0 * _ULP * size
    slack_of_slopes = 1e-14 * size
    for head in program.heads:
        jet, third, rounding, rough = _head(head, c, r)
        e0, e1, e2 = e0 + jet[0], e1 + jet[1], e2 + jet[2]
        e3, slack, slack_of_slopes = e3 + third, slack + rounding, slack_of_slopes + rough
    upper = np.abs(e0) + slack + r * (np.abs(e1) + slack_of_slopes)
    upper = upper + r**2 / 2.0 * (np.abs(e2) + slack_of_slopes) + r**3 / 6.0 * e3
    return upper * (1.0 + 1e-9), np.maximum(np.abs(e0) - slack, 0.0)


def _head(head: Head, c: Array, r: Array) -> tuple[tuple[Array, Array, Array], Array, Array, Array]:
    """(o, o', o'') at the centres, a bound on |o'''| over the cells, and the rounding of o and of its derivatives."""
    slopes, offsets = np.array(head.logits).T[..., None]
    # da, dv and dw are deviations from the weighted means of slopes, values and the values' slopes: the cumulants of
    # the module's formulas are sums of their products.
    values = np.tile(np.array([0.0, *(token.value for token in head.bias_tokens)])[:, None], (1, c.size))
    values[0] = head.c * c + head.d
    own = np.zeros_like(slopes)
    own[0] = head.c  # v'
    logits = slopes * c + offsets
    top = np.max(logits, axis=0)
    p = np.exp(logits - top)
    p /= np.sum(p, axis=0)
    mean_a, mean_v, mean_own = np.sum(p * slopes, axis=0), np.sum(p * values, axis=0), p[0] * head.c
    da, dv, dw = slopes - mean_a, values - mean_v, own - mean_own
    o1 = mean_own + np.sum(p * da * dv, axis=0)
    o2 = 2.0 * np.sum(p * da * dw, axis=0) + np.sum(p * da * da * dv, axis=0)
    span = float(np.max(slopes) - np.min(slopes))
    sizes = np.sum(p * np.abs(dv) * (1.0 + np.abs(da)) ** 2, axis=0) + abs(head.c) * (1.0 + span)
    relative = 16.0 * _ULP * (np.max(np.abs(slopes), axis=0) * np.abs(c) + np.max(np.abs(offsets)) + len(slopes))
    rough = relative * (sizes + np.abs(mean_v))
    # Over the cell weights grow by at most exp(r span), and the means move by at most r times their derivatives, whose
    # covariances are at most a quarter of the product of the ranges (Popoviciu, Grüss).
    grown = p * np.exp(np.minimum(r * span, 700.0))
    reach_v = np.max(values, axis=0) - np.min(values, axis=0) + 2.0 * abs(head.c) * r
    wide_a = np.abs(da) + r * span**2 / 4.0
    wide_v = np.abs(dv) + r * (2.0 * abs(head.c) + span * reach_v / 4.0)
    second = np.sum(grown * wide_a**2, axis=0)
    third = 3.0 * abs(head.c) * second
    third = third + np.sum(grown * wide_a**3 * wide_v, axis=0)
    third = third + 3.0 * second * np.sum(grown * wide_a * wide_v, axis=0)
    return (mean_v, o1, o2), third, head.float64_rounding(c, c, shifted=False, steps=2), rough
