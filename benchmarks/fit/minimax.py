"""Minimax fits by linear programs, from a start that `benchmarks.fit.parameters` found.

The result is a local minimum of the largest error over the points: `sequential` minimises the largest error of the
linearised program within a trust region, by linear programming (scipy), and converges quadratically near a solution.
"""

import numpy as np

from benchmarks.fit.parameters import Layout, Mask, evaluate
from passes.programs.program import Array, Program


def from_program(program: Program) -> tuple[Layout, Array]:
    """The inverse of `to_program`, for programs without quadratic self logits; the self logit is shifted to 0."""
    numbers: list[float] = []
    for head in program.heads:
        plain = head.shifted(-head.beta, -head.gamma)
        numbers += [plain.c, plain.d]
        tokens = plain.bias_tokens
        numbers += [token.slope for token in tokens] + [token.offset for token in tokens]
        numbers += [token.value for token in tokens]
    layout = Layout(tuple(len(head.bias_tokens) for head in program.heads))
    return layout, np.array([*numbers, program.linear, program.constant])


def largest(layout: Layout, x: Array, y: Array, target: Array) -> float:
    """The largest absolute error over the points."""
    return float(np.max(np.abs(evaluate(layout, x, y)[0] - target)))


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
