"""Fits that float32 likes: the error of the approximation together with the rounding of the logits.

Comes in: a one-head fit. Goes out: one whose values cancel less. What float32 loses is nearly all in the exponents: a
logit of size l is rounded by about 2^-25 l, and the output moves by that times p_j (v_j - o), the lever of key j. The
levers are rows of the least squares problem beside the errors. Used before `polish`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from passes.fit.model import Layout, Mask, evaluate
from passes.programs import Array


@dataclass(frozen=True)
class Problem:
    """A fit with levers.

    Attributes:
        layout: one head.
        y: points of the errors.
        values: the function there.
        near: points of the levers.
        shift: slope that will be added to all logits.
        weight: of the levers against the errors.
        norm: p of the p-norm over all rows.
    """

    layout: Layout
    y: Array
    values: Array
    near: Array
    shift: float
    weight: float
    norm: float


def residuals(problem: Problem, x: Array) -> Array:
    """Errors, then levers times rounding; in units of 2^-24."""
    m = problem.layout.tokens[0]
    errors = evaluate(problem.layout, x, problem.y)[0] - problem.values
    y = problem.near
    levers = evaluate(problem.layout, x, y)[1][:, 2 + m : 2 + 2 * m]
    slopes = x[2 : 2 + m]
    product = np.abs(slopes + problem.shift) * np.abs(y)[:, None]
    # the largest slope y is subtracted: for y > 0 that of the token, a power of two and exact; else the steepest key's
    lowest = float(np.min(slopes))
    result = np.where(y[:, None] > 0.0, np.abs(slopes), np.abs(slopes - lowest)) * np.abs(y)[:, None]
    top = np.where(y > 0.0, 0.0, abs(lowest + problem.shift) * np.abs(y))[:, None]
    rounding = result + top + (product if problem.shift else np.where(y[:, None] > 0.0, 0.0, product))
    return np.concatenate([errors * 2.0**24, (problem.weight * 0.5 * levers * rounding).ravel()])


def condition(problem: Problem, x: Array, free: Mask, *, steps: int = 40) -> Array:
    """Levenberg-Marquardt on the p-norm of `residuals`, with differences for derivatives."""
    best, damping = x.copy(), 1e-6
    rows = residuals(problem, best)
    score = _norm(rows, problem.norm)
    index = np.flatnonzero(free)
    for _ in range(steps):
        scale = np.maximum(np.abs(best[index]), 0.1)
        jacobian = np.empty((rows.size, index.size))
        for column, parameter in enumerate(index):
            step = 1e-7 * scale[column]
            moved = best.copy()
            moved[parameter] += step
            jacobian[:, column] = (residuals(problem, moved) - rows) / 1e-7
        lawson = (np.abs(rows) / np.max(np.abs(rows)) + 1e-3) ** ((problem.norm - 2.0) / 2.0)
        left, sizes, right = np.linalg.svd(jacobian * lawson[:, None], full_matrices=False)
        along = left.T @ (lawson * rows)
        before = score
        for _ in range(8):
            step_ = right.T @ (sizes / (sizes**2 + damping * sizes[0] ** 2) * along)
            trial = best.copy()
            trial[index] -= scale * step_ / (problem.norm - 1.0)
            rows_new = residuals(problem, trial)
            score_new = _norm(rows_new, problem.norm)
            if np.isfinite(score_new) and score_new < score:
                best, rows, score = trial, rows_new, score_new
                damping = max(damping / 12.0, 1e-26)
                break
            damping *= 8.0
        if score > (1.0 - 1e-4) * before:
            break
    return best


def _norm(rows: Array, p: float) -> float:
    scale = float(np.max(np.abs(rows)))
    return scale * float(np.sum((np.abs(rows) / scale) ** p) ** (1.0 / p)) if np.isfinite(scale) else scale
