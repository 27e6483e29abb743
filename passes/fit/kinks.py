"""Kinks and jumps of a function that is known by its values alone.

Comes in: a function and an interval. Goes out: the places where its slope jumps, with the jumps, or the place where
the function itself does. A kink is found as a second difference that does not shrink like the square of the step,
then located by halving. Used by `runtime`, which computes a kink by a steep head of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from passes.programs import Array

_COARSE = 4096
_STEEPER = 12
"""Halvings of a bracket; a smooth function's slope change over it shrinks by 2^12 meanwhile, a kink's stays."""


@dataclass(frozen=True)
class Kink:
    """A place where the slope changes by `jump`."""

    place: float
    jump: float


def find_kinks(f: Callable[[Array], Array], low: float, high: float, most: int = 8) -> tuple[Kink, ...] | str:
    """The kinks of f between low and high, from left to right, or why a sum of heads cannot follow f."""
    y = np.linspace(low, high, _COARSE + 1)
    values, step = f(y), (high - low) / _COARSE
    bends = np.abs(np.diff(values, 2))
    size = max(float(np.max(np.abs(values))), 1e-30)
    around = np.maximum.reduce([np.roll(bends, shift) for shift in (-4, -3, 3, 4)])
    suspects = np.flatnonzero((bends > 3.0 * around) & (bends > 1e-9 * size))
    kinks: list[Kink] = []
    for index in suspects:
        found = _locate(f, float(y[index]), float(y[index + 2]))
        if isinstance(found, str):
            return found
        if found is not None and not (kinks and abs(kinks[-1].place - found.place) < 3.0 * step):
            kinks.append(found)
    if len(kinks) > most:
        return f"it has more than {most} kinks, the first near y = {kinks[0].place:.6g}; heads would be needed for each"
    return tuple(kinks)


def _locate(f: Callable[[Array], Array], low: float, high: float) -> Kink | str | None:
    """The kink between two points, a jump's description, or None where f is smooth."""
    start = _bend(f, low, high)
    left, right = low, high
    for _ in range(_STEEPER):
        middle, quarter = (left + right) / 2.0, (right - left) / 4.0
        halves = [(left, middle), (middle - quarter, middle + quarter), (middle, right)]
        left, right = max(halves, key=lambda half: abs(_bend(f, *half)))
    if abs(_bend(f, left, right)) * (right - left) > 0.25 * abs(start) * (high - low):
        return f"it jumps near y = {left:.6g}, and a sum of heads is continuous"
    outside = (high - low) / 2.0
    below, above = _slope(f, low - outside, low), _slope(f, high, high + outside)
    if abs(_bend(f, left, right)) < 0.3 * abs(start):
        return None
    # two lines meet at the kink: intersect them, from points close enough that curvature does not show
    width = (high - low) / 64.0
    l1, l2, r1, r2 = left - 2.0 * width, left - width, right + width, right + 2.0 * width
    below, above = _slope(f, l1, l2), _slope(f, r1, r2)
    if abs(above - below) < 1e-6 * max(1.0, abs(above), abs(below)):
        return None
    at_low, at_high = _value(f, l2), _value(f, r1)
    place = (at_low - below * l2 - at_high + above * r1) / (above - below)
    nearest = round(place * 1024.0) / 1024.0
    place = nearest if abs(nearest - place) < width / 64.0 else place
    return Kink(float(np.float32(place)), above - below) if left - width <= place <= right + width else None


def _bend(f: Callable[[Array], Array], low: float, high: float) -> float:
    """Change of slope across an interval."""
    below, at, above = f(np.array([low, (low + high) / 2.0, high]))
    return float((above - 2.0 * at + below) / ((high - low) / 2.0))


def _slope(f: Callable[[Array], Array], low: float, high: float) -> float:
    below, above = f(np.array([low, high]))
    return float((above - below) / (high - low))


def _value(f: Callable[[Array], Array], at: float) -> float:
    return float(f(np.array([at]))[0])
