"""Fitting one head: its parameters with exact derivatives, Gauss-Newton steps, and its values where keys are given.

The parameters of a head are c and d of its self value `c y + d`, then the slopes a of all bias tokens, their offsets b
and their values v. Slopes and offsets are relative to the self logit, which is 0 (softmax is invariant to a common
shift). The last two parameters are the program's linear factor and its constant. With p the softmax weights of a head
and o its output, the derivatives are p_j by v_j, p_j (v_j - o) by b_j, and y times that by a_j.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from passes.programs.head import Array, BiasToken, Head
from passes.programs.program import Program

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Layout:
    """The shape of a parameter vector.

    Attributes:
        tokens: bias tokens per head.
    """

    tokens: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of parameters, including fixed ones."""
        return sum(2 + 3 * m for m in self.tokens) + 2

    def head(self, index: int) -> tuple[int, int]:
        """(first parameter, bias tokens) of a head."""
        return sum(2 + 3 * m for m in self.tokens[:index]), self.tokens[index]


def evaluate(layout: Layout, x: Array, y: Array) -> tuple[Array, Array]:
    """Values [points] and Jacobian [points, parameters] of the program with parameters `x`."""
    jacobian = np.empty((y.size, layout.size))
    values = x[-2] * y + x[-1]
    jacobian[:, -2], jacobian[:, -1] = y, 1.0
    for index in range(len(layout.tokens)):
        start, m = layout.head(index)
        c, d = x[start : start + 2]
        a, b, v = x[start + 2 : start + 2 + 3 * m].reshape(3, m)
        logits = np.concatenate([np.zeros((y.size, 1)), y[:, None] * a + b], axis=1)
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        own = c * y + d
        out = p[:, 0] * own + p[:, 1:] @ v
        lever = p[:, 1:] * (v - out[:, None])
        jacobian[:, start], jacobian[:, start + 1] = p[:, 0] * y, p[:, 0]
        jacobian[:, start + 2 : start + 2 + m] = lever * y[:, None]
        jacobian[:, start + 2 + m : start + 2 + 2 * m] = lever
        jacobian[:, start + 2 + 2 * m : start + 2 + 3 * m] = p[:, 1:]
        values = values + out
    return values, jacobian


def to_program(layout: Layout, x: Array, name: str) -> Program:
    """The parameters as a `Program`, without a stated error."""
    heads = []
    for index in range(len(layout.tokens)):
        start, m = layout.head(index)
        rows = x[start + 2 : start + 2 + 3 * m].reshape(3, m).T
        tokens = tuple(BiasToken(*(float(number) for number in row)) for row in rows)
        heads.append(Head(beta=0.0, c=float(x[start]), d=float(x[start + 1]), bias_tokens=tokens))
    return Program(name, tuple(heads), linear=float(x[-2]), constant=float(x[-1]))


# -- all parameters -------------------------------------------------------------------------------------------------


def gauss_newton(
    layout: Layout,
    x: Array,
    y: Array,
    target: Array,
    free: Mask,
    *,
    norm: float = 2.0,
    steps: int = 60,
    weights: Array | None = None,
) -> Array:
    """Levenberg-Marquardt steps on the p-norm of the error (iteratively reweighted least squares)."""
    base = np.ones_like(y) if weights is None else weights
    damping, best = 1e-6, x.copy()
    values, jacobian = evaluate(layout, best, y)
    residual = base * (values - target)
    score = _norm(residual, norm)
    for _ in range(steps):
        scale = np.max(np.abs(residual))
        if scale == 0.0:
            break
        lawson = base * (np.abs(residual) / scale + 1e-3) ** ((norm - 2.0) / 2.0)
        scale_of = np.maximum(np.abs(best[free]), 0.1)
        left, sizes, right = np.linalg.svd(jacobian[:, free] * scale_of * lawson[:, None], full_matrices=False)
        along = left.T @ (lawson * (values - target))
        improved = False
        for _ in range(8):
            step = -scale_of * (right.T @ (sizes / (sizes**2 + damping * sizes[0] ** 2) * along))
            # Reweighting for a p-norm needs a shorter step than least squares, by the factor 1 / (p - 1).
            trial = best.copy()
            trial[free] += step / (norm - 1.0)
            values_new, jacobian_new = evaluate(layout, trial, y)
            residual_new = base * (values_new - target)
            score_new = _norm(residual_new, norm)
            if np.isfinite(score_new) and score_new < score:
                improved = True
                break
            damping *= 8.0
        if not improved:
            break
        gain = (score - score_new) / score
        best, values, jacobian, residual, score = trial, values_new, jacobian_new, residual_new, score_new
        damping = max(damping / 12.0, 1e-26)
        if gain < 1e-5:
            break
    return best


def _norm(residual: Array, p: float) -> float:
    scale = float(np.max(np.abs(residual)))
    if scale == 0.0 or not np.isfinite(scale):
        return scale
    return scale * float(np.mean((np.abs(residual) / scale) ** p) ** (1.0 / p))


# -- the values of a head whose keys are given ----------------------------------------------------------------------
#
# Each centre t_0 < ... < t_m has a key whose logit, a straight line, is the largest around it: from one centre to the
# next the slope grows by 1 / (width^2 (t_j+1 - t_j)), and the lines cross half way. Evenly spaced centres give a
# normalised row of Gaussians; centres that crowd towards a jump of the curvature resolve it, with one bias token per
# halving of the distance. The last centre is that of the token itself, so that beyond it the program is the self value,
# a straight line; the linear term makes the other end one too. The values then follow from linear least squares.


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
