"""Finding kinks of a function from its values: points at which its slope or its curvature jumps.

The n-th difference of a smooth function shrinks like the n-th power of the step. Where a lower derivative jumps, it
stands out among its neighbours, and still does after repeated halving of the step, which also locates the kink.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from passes.programs.head import Array

Function = Callable[[Array], Array]

_CELLS = 4096
_HALVINGS = 10


@dataclass(frozen=True)
class Kink:
    """A point at which a derivative (1 the slope, 2 the curvature) changes by `jump`."""

    place: float
    jump: float


def find_kinks(f: Function, low: float, high: float, *, derivative: int = 1, most: int = 8) -> tuple[Kink, ...] | str:
    """The kinks of f between low and high from left to right, or why a sum of heads cannot approximate f."""
    order = derivative + 1
    y = np.linspace(low, high, _CELLS + 1)
    values, step = f(y), (high - low) / _CELLS
    bends = np.abs(np.diff(values, order))
    padded = np.pad(bends, 8, mode="edge")
    around = np.maximum.reduce([padded[8 + shift : 8 + shift + bends.size] for shift in (-6, -5, 5, 6)])
    noise = 1e-14 * max(float(np.max(np.abs(values))), 1e-30)
    kinks: list[Kink] = []
    for index in np.flatnonzero((bends > 3.0 * around) & (bends > 1e3 * noise)):
        if kinks and float(y[index]) < kinks[-1].place + 4.0 * step:
            continue
        found = _locate(f, float(y[index]), float(y[index + order]), order)
        if isinstance(found, str):
            return found
        if found is not None:
            kinks.append(found)
    if len(kinks) > most:
        return (
            f"it has more than {most} kinks, the first near y = {kinks[0].place:.6g}, and each needs heads of its own"
        )
    return tuple(kinks)


def _locate(f: Function, low: float, high: float, order: int) -> Kink | str | None:
    """The kink between two points, the description of a jump, or None where f is smooth."""
    start, width = _difference(f, low, high, order), high - low
    left, right = low, high
    for _ in range(_HALVINGS if order == 2 else 6):
        quarter = (right - left) / 4.0
        places = (left + shift * quarter for shift in (0.0, 0.5, 1.0, 1.5, 2.0))
        left = max(places, key=lambda place: abs(_difference(f, place, place + 2.0 * quarter, order)))
        right = left + 2.0 * quarter
    shrunk = (right - left) / width
    ratio = abs(_difference(f, left, right, order)) / max(abs(start), 1e-300)
    # With step h an n-th difference is of order h^n where f is smooth, h^(n-1) at a kink, and 1 at a jump.
    if ratio > 0.2 * shrunk ** (order - 2) and order == 2:
        return f"it jumps near y = {left:.6g}, and a sum of heads is continuous"
    if ratio < 0.2 * shrunk ** (order - 1):
        return None
    place = _rounded((left + right) / 2.0, right - left)
    jump = _one_sided(f, place, width / 8.0, order - 1) - _one_sided(f, place, -width / 8.0, order - 1)
    return Kink(place, jump) if abs(jump) > 1e-7 else None


def _difference(f: Function, low: float, high: float, order: int) -> float:
    return float(np.diff(f(np.linspace(low, high, order + 1)), order)[0])


def _one_sided(f: Function, at: float, step: float, order: int) -> float:
    """The one-sided slope or curvature at a point, to second order in the step or better."""
    f0, f1, f2, f3 = (float(value) for value in f(at + step * np.arange(4.0)))
    if order == 1:
        return (-11.0 * f0 + 18.0 * f1 - 9.0 * f2 + 2.0 * f3) / (6.0 * step)
    return (2.0 * f0 - 5.0 * f1 + 4.0 * f2 - f3) / step**2


def _rounded(place: float, width: float) -> float:
    """The shortest decimal within the bracket: 3 rather than 2.9999998."""
    for digits in range(12):
        if abs(round(place, digits) - place) <= width:
            return float(np.float32(round(place, digits)))
    return float(np.float32(place))
