"""Fit heads with equally spaced keys, whose weights are powers of one exponential (`passes.programs.powers`).

For a given step c, Phi (z P + 2 R) = r P + R is linear in the coefficients of P and R. Least squares, weighted with the
denominator found before, give a start for each of many steps, and Euclid's algorithm makes it a continued fraction.
From the best of them sequential linear programs minimise the largest error of y Phi(y). Then the number whose rounding
to float32 costs most is rounded, those still free are fitted again, and so on. By symmetry y > 0 is enough.

Needs scipy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from passes.certificates.curves import CURVES
from passes.programs.powers import Powers
from passes.programs.softmax import Array

_STARTS = 60
_REWEIGHTED = 12
_ENOUGH = 1e-7
"""A step must lessen the error by this share of it."""
_SMALLEST = 1e-9
"""The search ends at this radius, relative to the numbers."""


def points() -> Array:
    """Where the error is measured."""
    return np.concatenate([np.linspace(0.0, 9.0, 1501)[1:], np.linspace(9.0, 16.0, 40)])


def fit(
    activation: str, keys: int, *, single: bool, step: float | None = None, based: bool = True, rounds: int = 200
) -> tuple[Powers, float]:
    """Phi of `activation`, y Phi(y), over an odd number of keys, at least 5, and the largest error measured.

    Args:
        activation: a name in `passes.certificates.curves.CURVES`.
        keys: their number.
        single: whether the numbers are to be float32 numbers.
        step: the step c; None to search for the best.
        based: whether the continued fraction has a base; without, it is one operation shorter.
        rounds: the largest number of linear programs after each rounding.
    """
    y = points()
    share = CURVES[activation].jet(y)[0] / y
    levels = (keys - 3) // 2
    steps = np.geomspace(0.5, 2.5, _STARTS) if step is None else [step]
    starts = (_start(c, levels, y, share, based=based) for c in steps)
    x = min(starts, key=lambda x: _largest(x, y, share))
    free = np.flatnonzero([step is None, based, *[True] * (2 * levels)])
    for radius in (1e-1, 1e-2, 1e-3):
        x = _sequential(x, free, y, share, rounds, radius)
    if single:
        x = _on_grid(x, free.tolist(), y, share, rounds)
    return _powers(x), _largest(x, y, share)


def _powers(x: Array) -> Powers:
    step, base, *rows = map(float, x)
    return Powers(step, tuple(rows[: len(rows) // 2]), tuple(rows[len(rows) // 2 :]), base)


def _errors(x: Array, y: Array, share: Array) -> Array:
    """The error of y Phi(y)."""
    return np.asarray(y * (_powers(x).mean(y) - share))


def _largest(x: Array, y: Array, share: Array) -> float:
    with np.errstate(invalid="ignore"):
        found = float(np.max(np.abs(_errors(x, y, share))))
    return found if np.isfinite(found) else np.inf


def _start(c: float, degree: int, y: Array, share: Array, *, based: bool) -> Array:
    """Numbers for the step c: least squares on the equation that is linear in P and R."""
    near = y <= 16.0 / c
    r = np.exp(c * y[near])
    z, s = r + 1.0 / r, share[near]
    powers = z[:, None] ** np.arange(degree, -1, -1)
    # Unknowns: P without its leading 1, then R.
    of_r = powers if based else powers[:, 1:]
    matrix = np.concatenate([(s * z - r)[:, None] * powers[:, 1:], (2.0 * s - 1.0)[:, None] * of_r], axis=1)
    right = -(s * z - r) * powers[:, 0]
    weight = 1.0 / z ** (degree + 1)
    for _ in range(_REWEIGHTED):
        rows = matrix * (y[near] * weight)[:, None]
        sizes = np.linalg.norm(rows, axis=0)
        solved = np.linalg.lstsq(rows / sizes, right * y[near] * weight, rcond=None)[0] / sizes
        total = z * (powers[:, 0] + powers[:, 1:] @ solved[:degree]) + 2.0 * (of_r @ solved[degree:])
        weight = 1.0 / np.maximum(np.abs(total), 1e-300)
    denominator, numerator = np.append(1.0, solved[:degree]), solved[degree:]
    base = float(numerator[0]) if based else 0.0
    rest = numerator[1:] - base * denominator[1:] if based else numerator
    return np.array([c, base, *_fraction(rest, denominator)])


def _fraction(numerator: Array, denominator: Array) -> list[float]:
    """Parts and shifts of a quotient of polynomials, by Euclid's algorithm.

    The denominator is monic and of one degree more than the numerator.
    """
    parts, shifts = [], []
    while numerator.size:
        parts.append(float(numerator[0]))
        monic = numerator / numerator[0]
        (_, shift), rest = np.polydiv(denominator, monic)
        shifts.append(float(shift))
        padded = np.pad(rest, (monic.size, 0))
        denominator, numerator = monic, padded[padded.size - monic.size + 1 :]
    return parts + shifts


def _sequential(x: Array, free: NDArray[np.intp], y: Array, share: Array, rounds: int, radius: float) -> Array:
    """The numbers after linear programs that minimise the largest error within a trust region."""
    from scipy.optimize import linprog  # type: ignore[import-untyped]  # a development tool

    errors = _errors(x, y, share)
    best = float(np.max(np.abs(errors)))
    for _ in range(rounds):
        if radius < _SMALLEST:
            break
        scale = radius / best
        rows = np.stack([_slope(x, int(i), y, share) for i in free], axis=1) * scale
        ones = np.ones((y.size, 1))
        result = linprog(
            np.append(np.zeros(free.size), 1.0),
            A_ub=np.block([[rows, -ones], [-rows, -ones]]),
            b_ub=np.concatenate([-errors, errors]) / best,
            bounds=[*[(-1.0, 1.0)] * free.size, (0.0, None)],
            method="highs-ds",
        )
        if result.status != 0:
            radius /= 4.0
            continue
        trial = x.copy()
        trial[free] *= 1.0 + result.x[:-1] * radius
        found = _largest(trial, y, share)
        if found < best * (1.0 - _ENOUGH):
            x, best, radius = trial, found, min(2.0 * radius, 0.2)
            errors = _errors(x, y, share)
        else:
            radius /= 3.0
    return x


def _slope(x: Array, place: int, y: Array, share: Array) -> Array:
    """The derivative of the errors by the logarithm of one number."""
    ends = []
    for factor in (1.0 + 1e-5, 1.0 - 1e-5):
        moved = x.copy()
        moved[place] *= factor
        ends.append(_errors(moved, y, share))
    return np.asarray((ends[0] - ends[1]) / 2e-5)


def _on_grid(x: Array, free: list[int], y: Array, share: Array, rounds: int) -> Array:
    """All numbers rounded to float32, the one that costs most first; those that are not `free` are float32 numbers."""
    while free:
        place = max(free, key=lambda i: _largest(_narrowed(x, [i]), y, share))
        x = _narrowed(x, [place])
        free.remove(place)
        if free:
            x = _sequential(x, np.array(free), y, share, rounds, 1e-5)
    return x


def _narrowed(x: Array, places: Sequence[int]) -> Array:
    result = x.copy()
    result[list(places)] = result[list(places)].astype(np.float32)
    return result
