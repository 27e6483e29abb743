"""Fitting the values of one head whose keys are given: the linear part of a fit.

Each centre t_0 < ... < t_m has a key whose logit, a straight line, is the largest around it: from one centre to the
next the slope grows by 1 / (width^2 (t_j+1 - t_j)), and the lines cross half way. Evenly spaced centres give a
normalised row of Gaussians; centres that crowd towards a jump of the curvature resolve it, with one bias token per
halving of the distance. The last centre is that of the token itself, so that beyond it the program is the self value,
a straight line; the linear term makes the other end one too. The values then follow from linear least squares.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from passes.fit.model import Layout, evaluate
from passes.programs.head import Array

_LAWSON = 3
_RATIO = 0.5
"""Spacing over distance, where centres crowd."""


@dataclass(frozen=True)
class Smooth:
    """A function to be fitted by one head.

    Attributes:
        y: points.
        target: its values there.
        low: left of here it is a straight line, within a fraction of the tolerance.
        high: right of here likewise.
        bent_low: whether the curvature jumps at `low`.
        bent_high: whether it jumps at `high`.
        tolerance: largest error wanted.
    """

    y: Array
    target: Array
    low: float
    high: float
    bent_low: bool
    bent_high: bool
    tolerance: float

    @property
    def bent(self) -> bool:
        """Whether the curvature jumps at an end."""
        return self.bent_low or self.bent_high


@dataclass(frozen=True)
class Spacing:
    """Placement of centres: `largest` apart, `least` at a jump of the curvature, `pad` more at each end."""

    largest: float
    least: float
    pad: int
    width: float


def centres(task: Smooth, spacing: Spacing) -> Array:
    """The centres from left to right."""
    if not task.bent:
        count = max(1, round((task.high - task.low) / spacing.largest))
        step = (task.high - task.low) / count
        return np.array(task.low + step * np.arange(-spacing.pad, count + spacing.pad + 1), dtype=np.float64)
    row = [task.low]
    while row[-1] < task.high and len(row) < 200:
        step = spacing.largest
        if task.bent_low:
            step = min(step, max(spacing.least, _RATIO * (row[-1] - task.low)))
        if task.bent_high:
            step = min(step, max(spacing.least, _RATIO / (1.0 + _RATIO) * (task.high - row[-1])))
        row.append(row[-1] + step)
    first, last, more = row[1] - row[0], row[-1] - row[-2], np.arange(1, spacing.pad + 1)
    return np.array([*(row[0] - first * more[::-1]), *row, *(row[-1] + last * more)], dtype=np.float64)


def linear_fit(task: Smooth, spacing: Spacing, most: int) -> tuple[float, Layout, Array] | None:
    """(rank, layout, parameters) of the head with these centres; None where it has more than `most` tokens.

    The rank is the largest error plus an estimate of float32's rounding.
    """
    at = centres(task, spacing)
    m = len(at) - 1
    if not 1 <= m <= most:
        return None
    rise = 1.0 / (spacing.width**2 * np.diff(at))
    slopes = np.append(0.0, np.cumsum(rise))
    offsets = np.append(0.0, np.cumsum(-rise * (at[1:] + at[:-1]) / 2.0))
    layout = Layout((m,))
    x = np.zeros(layout.size)
    x[2 : 2 + m], x[2 + m : 2 + 2 * m] = slopes[:-1] - slopes[-1], offsets[:-1] - offsets[-1]
    linear = np.array([0, 1, *range(2 + 2 * m, 2 + 3 * m), layout.size - 2])
    columns = evaluate(layout, x, task.y)[1][:, linear]
    scale = np.max(np.abs(columns), axis=0) + 1e-300
    columns = columns / scale
    weights, best = np.ones_like(task.y), (np.inf, np.zeros(len(linear)))
    for _ in range(_LAWSON):  # Lawson's weights: from least squares towards the smallest largest error
        solution = np.linalg.lstsq(columns * weights[:, None], weights * task.target, rcond=1e-11)[0]
        residual = np.abs(columns @ solution - task.target)
        error = float(np.max(residual))
        if error < best[0]:
            best = (error, solution)
        if error > 100.0 * task.tolerance or error == 0.0:
            break
        weights = weights * np.sqrt(residual / error + 1e-2)
    x[linear] = best[1] / scale
    return best[0] + _rounding(layout, x, task.y), layout, x


def _rounding(layout: Layout, x: Array, y: Array) -> float:
    """An estimate of float32's rounding: that of the logits, in proportion to their magnitude, for a good shift."""
    m = layout.tokens[0]
    slopes = x[2 : 2 + m]
    levers = np.abs(evaluate(layout, x, y)[1][:, 2 : 2 + m])  # derivatives by the slopes
    shifts = (0.0, float(np.median(slopes)), float(slopes[0]))
    return 2.0**-25 * min(float(np.max(levers @ np.abs(slopes - shift))) for shift in shifts)
