"""Fits by weighted Gauss-Newton, deterministic and robust far from a solution.

They minimise a p-norm of the errors at the points, which for large p is close to the largest error.
"""

from __future__ import annotations

import numpy as np

from passes.fit.model import Layout, Mask, evaluate
from passes.programs.head import Array


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
