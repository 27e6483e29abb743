"""Minimax fits, by weighted Gauss-Newton and then by linear programs.

The result is a local minimum of the largest error over the points. `gauss_newton` minimises a p-norm (close to the
largest error for large p) and is robust far from a solution; `sequential` minimises the largest error of the linearised
program within a trust region, by linear programming (scipy), and converges quadratically near one. Both are
deterministic.
"""

from __future__ import annotations

import numpy as np

from passes.fit.model import Layout, Mask, evaluate
from passes.programs.softmax import Array


def largest(layout: Layout, x: Array, y: Array, target: Array) -> float:
    """The largest absolute error over the points."""
    return float(np.max(np.abs(evaluate(layout, x, y)[0] - target)))


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


def sequential(
    layout: Layout,
    x: Array,
    y: Array,
    target: Array,
    free: Mask,
    *,
    steps: int = 40,
    radius: float = 0.3,
    keep: float = 0.25,
) -> Array:
    """Minimise the largest linearised error by linear programs in a trust region.

    Only points whose error is at least `keep` times the largest can matter within a small step, so only they are rows.
    """
    from scipy.optimize import linprog  # type: ignore[import-untyped]  # the fitter is a development tool

    best = x.copy()
    values, jacobian = evaluate(layout, best, y)
    error = float(np.max(np.abs(values - target)))
    for _ in range(steps):
        residual = values - target
        rows = np.abs(residual) >= keep * error
        scale = np.maximum(0.1, np.abs(best[free]))
        # Singular directions as unknowns, since the columns themselves are too nearly dependent for a linear program.
        left, sizes, right = np.linalg.svd(jacobian[:, free] * scale, full_matrices=False)
        units = error / np.max(np.abs(left), axis=0)
        matrix, near = left[rows] * (units / error), residual[rows] / error
        ones = np.ones((len(near), 1))
        bounds = radius * sizes / units
        result = linprog(
            np.append(np.zeros(matrix.shape[1]), 1.0),
            A_ub=np.block([[matrix, -ones], [-matrix, -ones]]),
            b_ub=np.concatenate([-near, near]),
            bounds=[*((-bound, bound) for bound in bounds), (0.0, None)],
            method="highs-ds",
        )
        if result.status != 0:
            radius /= 4.0
            if radius < 1e-12:
                break
            continue
        trial = best.copy()
        trial[free] += scale * (right.T @ (result.x[:-1] * units / sizes))
        values_new, jacobian_new = evaluate(layout, trial, y)
        error_new = float(np.max(np.abs(values_new - target)))
        predicted, actual = 1.0 - float(result.x[-1]), 1.0 - error_new / error
        if actual > 0.0:
            best, values, jacobian, error = trial, values_new, jacobian_new, error_new
        if actual > 0.7 * predicted:
            radius = min(radius * 2.0, 1.0)
        elif actual < 0.3 * predicted:
            radius /= 4.0
        if predicted < 1e-4 or radius < 1e-12:
            break
    return best
