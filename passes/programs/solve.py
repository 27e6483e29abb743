"""Solving for the parameters of an activation, from a few values of an unknown function.

A solver returns candidates, which `passes.match.identify` tests on a whole grid. For another activation it returns None
or raises one of `UNSOLVED`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from passes.programs.program import Array

Function = Callable[[Array], Array]
Parameters = tuple[float, ...]
Solve = Callable[[Function], Parameters | None]
UNSOLVED = (ArithmeticError, ValueError, StopIteration)  # quotients and logarithms without a value; no bend
FAR = 1e4  # where sigmoid-shaped functions have reached their limits


def at(f: Function, point: float) -> float:
    """The value of `f` at one point."""
    return float(f(np.array([point]))[0])


def logit(p: float) -> float:
    """The inverse of sigmoid."""
    return math.log(p / (1.0 - p))


def _bend(share: Callable[[float], float]) -> tuple[float, float]:
    """A y > 0 at which the sigmoid is numerically away from both asymptotes, and its value. Raises StopIteration."""
    places = [1.0, *(2.0 ** (sign * power) for power in range(1, 21) for sign in (-1, 1))]
    shares = ((place, share(place)) for place in places)
    return next((place, found) for place, found in shares if 0.02 < found < 0.98)


def self_gated(quantile: Callable[[float], float]) -> Solve:
    """(k, a) of a y S(k y), S a distribution function symmetric about 0: f(y) - f(-y) = a y, f(y) = a y S(k y)."""

    def solve(f: Function) -> Parameters | None:
        height = at(f, 1.0) - at(f, -1.0)
        place, found = _bend(lambda y: at(f, y) / (height * y))
        return None if found == 0.5 else (quantile(found) / place, height)  # a straight line has S(k y) = 1/2, k = 0

    return solve


def two_slopes(f: Function) -> Parameters | None:
    """(right, left) of a kink at 0."""
    right, left = at(f, 1.0), -at(f, -1.0)
    return (right, left) if math.isfinite(right) and math.isfinite(left) and right != left else None


def logistic(f: Function) -> Parameters | None:
    """(k, height, low) of low + height sigmoid(k y)."""
    low, high = at(f, -FAR), at(f, FAR)
    place, found = _bend(lambda y: (at(f, y) - low) / (high - low))
    return logit(found) / place, high - low, low


_PROBES = np.concatenate([-np.logspace(2, -4, 400), [0.0], np.logspace(-4, 2, 400)])


def clip(f: Function) -> Parameters | None:
    """(slope, offset, left, right) of slope y + offset, clipped to the values left and right (may be infinite)."""
    ends = [at(f, side * FAR) if at(f, side * FAR) == at(f, 2 * side * FAR) else math.inf for side in (-1.0, 1.0)]
    if not all(np.isnan(end) == 0 for end in ends) or ends == [math.inf, math.inf]:
        return None
    values = f(_PROBES)
    inner = np.flatnonzero((values != ends[0]) & (values != ends[1]) & np.isfinite(values))
    if inner.size < 2:
        return None
    first, last = int(inner[0]), int(inner[-1])
    slope = float((values[last] - values[first]) / (_PROBES[last] - _PROBES[first]))
    if slope == 0.0 or not math.isfinite(slope):
        return None
    nearest = int(inner[np.argmin(np.abs(_PROBES[inner]))])
    offset = float(values[nearest] - slope * _PROBES[nearest])
    left = -math.copysign(math.inf, slope) if math.isinf(ends[0]) else ends[0]
    right = math.copysign(math.inf, slope) if math.isinf(ends[1]) else ends[1]
    return slope, offset, left, right


def exponential_linear(f: Function) -> Parameters | None:
    """(right, depth, rate) of right y above 0 and depth (e^(rate y) - 1) below."""
    right, depth = at(f, 1.0), -at(f, -FAR)
    place, found = _bend(lambda y: 1.0 + at(f, -y) / depth)
    return (right, depth, -math.log(found) / place) if math.isfinite(right) else None


def exponential(f: Function) -> Parameters | None:
    """(rate, factor) of factor e^(rate y)."""
    start, rate = at(f, 0.0), math.log(at(f, 1.0) / at(f, 0.0))
    return (rate, start) if rate != 0.0 and math.isfinite(rate) else None


def softplus(f: Function) -> Parameters | None:
    """(inner, factor) of factor ln(1 + e^(inner y))."""
    scale, slopes = at(f, 0.0) / math.log(2.0), (at(f, FAR) / FAR, at(f, -FAR) / -FAR)
    slope = max(slopes, key=abs)
    return (slope / scale, scale) if scale != 0.0 and slope != 0.0 and math.isfinite(slope) else None


def softsign(f: Function) -> Parameters | None:
    """(inner, factor) of factor inner y / (1 + |inner y|)."""
    one, three = at(f, 1.0), at(f, 3.0)
    if one == 0.0 or not 1.0 < three / one < 3.0:
        return None
    inner = (3.0 - three / one) / (3.0 * three / one - 3.0)
    return inner, one * (1.0 + inner) / inner


def clipped(solve: Solve, function: Callable[[Array, Parameters], Array]) -> Solve:
    """(parameters..., low, high) of h(clip(y, low, high)); `solve` reads h at -1 and 1, which must not be clipped."""

    def cut_off(f: Function) -> Parameters | None:
        inside = solve(f)
        if inside is None or inside[0] <= 0.0:
            return None
        ends = [_last_agreement(f, lambda y: function(y, inside), side) for side in (-1.0, 1.0)]
        return None if ends == [-math.inf, math.inf] else (*inside, *ends)

    return cut_off


def _last_agreement(f: Function, h: Function, side: float) -> float:
    """The point on one side up to which f equals h and beyond which f is constant; infinite if they always agree."""
    y = side * np.logspace(0, 4, 400)
    apart = np.flatnonzero(np.abs(f(y) - h(y)) > 1e-6 * np.maximum(1.0, np.abs(h(y))))
    if apart.size == 0:
        return side * math.inf
    end = at(f, side * FAR)
    outer, inner = float(y[apart[0]]), float(y[max(int(apart[0]) - 1, 0)])
    start = at(h, inner) - end
    while (middle := 0.5 * (inner + outer)) not in (inner, outer):
        inside = (at(h, middle) - end) * start > 0.0
        inner, outer = (middle, outer) if inside else (inner, middle)
    return middle
