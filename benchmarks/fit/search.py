"""The search for one-head programs: many starts are fitted, and the best is kept.

Fits have many local minima, some with keys that nearly coincide. New starts are random, or known fits with one key
more, one key less, or all parameters perturbed. The search is seeded, so that a run can be repeated; a longer run
continues from the entries in the table.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.fit.minimax import largest, sequential
from benchmarks.fit.parameters import Layout, Mask, gauss_newton
from passes.programs.program import Array

_NEIGHBOURS = 0.7
"""Fraction of the starts that are derived from known parameters."""
_HOPELESS = 30.0
"""Starts whose least-squares error is this many times that of the best are dropped."""


@dataclass(frozen=True)
class Task:
    """The function to be fitted, and the constraints on the head.

    Attributes:
        y: points.
        target: the function there.
        keys: bias tokens.
        values: how many of them may have a nonzero value; None for all except the steepest.
        far: whether y ranges over all reals, so that the tails must be the self value y and the value 0.
    """

    y: Array
    target: Array
    keys: int
    values: int | None
    far: bool


def points(f: Callable[[Array], Array], low: float, high: float) -> tuple[Array, Array]:
    """Points that are dense in the middle and sparse at the ends, and the function there."""
    nodes = np.cos(np.pi * (np.arange(420) + 0.5) / 420)
    y = (low + high) / 2.0 + (high - low) / 2.0 * np.sinh(2.2 * nodes) / np.sinh(2.2)
    y = np.unique(np.concatenate([y, [low, high]]))
    return y, f(y)


def search(task: Task, known: Sequence[Array], *, starts: int, seed: int) -> tuple[float, Array]:
    """(largest error, parameters) of the best of `starts` fits, finished by linear programs."""
    rng = np.random.default_rng(seed)
    layout = Layout((task.keys,))
    pool = [x for x in known if abs((x.size - 4) // 3 - task.keys) <= 2]
    best: tuple[float, Array] = (np.inf, np.zeros(layout.size))
    for number in range(starts):
        if number < len(pool):
            start = _resized(pool[number], task.keys, rng)
        elif pool and rng.random() < _NEIGHBOURS:
            start = _moved(_resized(pool[int(rng.integers(len(pool)))], task.keys, rng), rng)
        else:
            start = _random(task.keys, rng)
        error, x = _fit(task, layout, start, best[0])
        if error < best[0]:
            best = (error, x)
            pool.append(x)
    free = free_parameters(task, layout, best[1])
    x = sequential(layout, best[1], task.y, task.target, free)
    return min(best, (largest(layout, x, task.y, task.target), x), key=lambda pair: pair[0])


def _fit(task: Task, layout: Layout, start: Array, best: float) -> tuple[float, Array]:
    x = start.copy()
    free = free_parameters(task, layout, x)
    held = slice(2 + 2 * task.keys, 2 + 3 * task.keys)
    x[held] = np.where(free[held], x[held], 0.0)
    try:
        x = gauss_newton(layout, x, task.y, task.target, free, norm=2.0)
        if largest(layout, x, task.y, task.target) < _HOPELESS * best:
            for norm in (4.0, 8.0, 16.0):
                x = gauss_newton(layout, x, task.y, task.target, free, norm=norm, steps=150)
    except np.linalg.LinAlgError:
        return np.inf, start
    return largest(layout, x, task.y, task.target), x


def free_parameters(task: Task, layout: Layout, x: Array) -> Mask:
    """Which parameters the fit may move.

    Over all reals the tails determine the self value y, no linear term, and the value 0 at the steepest key. If only
    some values may be nonzero, those nearest to 0 are fixed at 0.
    """
    m = task.keys
    free = np.ones(layout.size, dtype=bool)
    free[-1] = False
    steepest = int(np.argmin(x[2 : 2 + m]))
    if task.far:
        free[[0, 1, layout.size - 2]] = False
        free[2 + 2 * m + steepest] = False
    if task.values is not None:
        sizes = np.abs(x[2 + 2 * m : 2 + 3 * m])
        order = [int(j) for j in np.argsort(-sizes) if not (task.far and j == steepest)]
        free[[2 + 2 * m + j for j in order[task.values :]]] = False
    return free


def _resized(x: Array, m: int, rng: np.random.Generator) -> Array:
    """The parameters with keys added beside others, or removed."""
    slopes, offsets, values = x[2:-2].reshape(3, -1)
    while slopes.size < m:
        j = int(rng.integers(slopes.size))
        slopes = np.append(slopes, slopes[j] + 1.2 * rng.normal())
        offsets = np.append(offsets, offsets[j] - 3.0 * abs(rng.normal()))
        values = np.append(values, values[j] * rng.random() + 0.2 * rng.normal())
    while slopes.size > m:
        j = int(rng.integers(slopes.size))
        slopes, offsets, values = (np.delete(row, j) for row in (slopes, offsets, values))
    return np.concatenate([x[:2], slopes, offsets, values, x[-2:]])


def _moved(x: Array, rng: np.random.Generator) -> Array:
    size = float(rng.choice([0.02, 0.1, 0.4]))
    slopes, offsets, values = x[2:-2].reshape(3, -1)
    m = slopes.size
    slopes = slopes * (1.0 + 0.3 * size * rng.normal(size=m))
    offsets = offsets + 2.0 * size * rng.normal(size=m)
    values = values * (1.0 + size * rng.normal(size=m))
    return np.concatenate([x[:2], slopes, offsets, values, x[-2:]])


def _random(m: int, rng: np.random.Generator) -> Array:
    """Slopes below that of the self key, offsets on a parabola, values small except for one."""
    slopes = -np.sort(rng.uniform(rng.uniform(0.2, 3.0), rng.uniform(4.0, 14.0), m))
    bend = rng.uniform(0.15, 0.6)
    offsets = rng.uniform(0.0, 13.0) - bend * (slopes - slopes.mean() - rng.normal()) ** 2
    values = rng.normal(size=m) * np.where(rng.random(m) < 0.5, 0.01, 1.0)
    values[np.argmax(slopes)] = rng.uniform(0.5, 15.0)
    return np.concatenate([[1.0, 0.0], slopes, offsets + 0.3 * rng.normal(size=m), values, [0.0, 0.0]])
