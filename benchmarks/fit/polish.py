"""From a fit in real numbers to coefficients on the float32 grid, chosen by their error in float32 arithmetic.

Rounding all coefficients at once loses digits. Here they are rounded one after another, and the remaining ones are
refitted each time. A seeded random search moves the slopes and the common shift, and keeps what lowers the measured
total error. Deterministic.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.fit import float32
from benchmarks.fit.parameters import Layout, Mask, evaluate, gauss_newton, to_program
from passes.programs.program import Array, Program


@dataclass(frozen=True)
class Target:
    """The function at the points of the fit and at the float32 points that judge it."""

    y: Array
    values: Array
    single: float32.Single
    expected: Array


def target(f: Callable[[Array], Array], y: Array, reach: float, count: int = 12_001) -> Target:
    """The function at the points `y`, judged at `count` float32 points within +-reach."""
    single = float32.points(-reach, reach, count)
    # Half of the points are where the heads' weights change.
    single = np.concatenate([single, float32.points(-reach / 3.0, reach / 3.0, count)])
    return Target(y, f(y), single, f(single.astype(np.float64)))


def onto_grid(layout: Layout, x: Array, free: Mask, task: Target, shift: float) -> Program:
    """The program with every coefficient on the float32 grid: slopes, weights, then numerators, refitted in between.

    Args:
        layout: one head.
        x: parameters, self logit 0.
        free: which parameters the fit may move.
        task: the function.
        shift: slope added to every logit.
    """
    m = layout.tokens[0]
    x, open_ = x.copy(), free.copy()
    slopes, offsets, values = (slice(2 + i * m, 2 + (i + 1) * m) for i in range(3))
    own = float(np.float32(shift))
    x[slopes] = (x[slopes] + own).astype(np.float32).astype(np.float64) - own
    open_[slopes] = False
    x = gauss_newton(layout, x, task.y, task.values, open_, norm=6.0, steps=6)
    weights = np.exp(x[offsets]).astype(np.float32).astype(np.float64)
    x[offsets] = np.log(weights)
    open_[offsets] = False
    # The numerators with the largest effect first: the remaining ones can compensate for their rounding.
    influence: Array = np.asarray(evaluate(layout, x, task.y)[1][:, values].max(axis=0) * np.abs(x[values]))
    for j in np.argsort(-influence):
        index = 2 + 2 * m + int(j)
        if not open_[index]:
            continue
        if np.count_nonzero(open_) > 1:
            x = gauss_newton(layout, x, task.y, task.values, open_, norm=6.0, steps=3)
        x[index] = float(np.float32(x[index] * weights[j])) / weights[j]
        open_[index] = False
    (head,) = to_program(layout, x, "polished").heads
    return float32.on_grid(Program("polished", (head.shifted(own, 0.0),)))


def polish(
    layout: Layout, x: Array, free: Mask, task: Target, *, tries: int, seed: int = 0
) -> tuple[float, Program, Array]:
    """(total error in float32, program, parameters): the best of a random search around x.

    The common shift is 0 or a power of two, so that the self logit, the largest one for y > 0, is exact.
    """
    rng = np.random.default_rng(seed)
    m = layout.tokens[0]
    best = (np.inf, to_program(layout, x, "none"), x)
    for shift in (0.0, 1.0, 2.0, 4.0, 8.0):
        best = _better(best, layout, x, free, task, shift)
    held = free.copy()
    held[2 : 2 + m] = False
    for attempt in range(tries):
        trial = best[2].copy()
        size = 0.3 * 10.0 ** (-4.0 * rng.random())
        trial[2 : 2 + m] += size * rng.normal(size=m) * (rng.random(m) < rng.choice([0.25, 1.0]))
        trial = gauss_newton(layout, trial, task.y, task.values, held, norm=(2.0, 6.0)[attempt % 2], steps=8)
        if float(np.max(np.abs(evaluate(layout, trial, task.y)[0] - task.values))) <= best[0]:
            best = _better(best, layout, trial, free, task, best[1].heads[0].beta)
    return best


def _better(
    best: tuple[float, Program, Array], layout: Layout, x: Array, free: Mask, task: Target, shift: float
) -> tuple[float, Program, Array]:
    program = onto_grid(layout, x, free, task, shift)
    error = float32.error_at(program, task.single, task.expected)
    return (error, program, x) if error < best[0] else best
