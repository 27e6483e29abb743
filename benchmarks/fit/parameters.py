"""All parameters of a program as one vector, with exact derivatives, and Gauss-Newton steps on them."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from passes.programs.program import Array, BiasToken, Head, Program

# Parameters of a head: c and d of its self value `c y + d`, then the slopes a of all bias tokens, their offsets b
# and their values v. Slopes and offsets are relative to the self logit, which is 0 (softmax is invariant to a common
# shift). The last two parameters are the program's linear factor and its constant. With p the softmax weights of a head
# and o its output, the derivatives are p_j by v_j, p_j (v_j - o) by b_j, and y times that by a_j.

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
