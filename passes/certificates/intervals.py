"""Interval arithmetic over cells of the axis, and adaptive subdivision where a bound is loose.

An interval is a pair of arrays, least and largest value per cell. Nothing is rounded outwards: callers widen their
bounds by more than the rounding of float64.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from passes.programs.softmax import Array

Interval = tuple[Array, Array]
Bounds = Callable[[Array, Array], tuple[Array, Array]]
"""From the cells' ends (low, high) to (an upper bound per cell, a lower bound of the largest value in it)."""

_PARTS = 4
_NARROW = 2.0**-48


def product(a: Interval, b: Interval) -> Interval:
    """Least and largest product."""
    ends = np.stack(np.broadcast_arrays(a[0] * b[0], a[0] * b[1], a[1] * b[0], a[1] * b[1]))
    return np.min(ends, axis=0), np.max(ends, axis=0)


def weighted(weights: Interval, a: Interval) -> Interval:
    """Least and largest product with nonnegative weights."""
    least = np.where(a[0] < 0.0, weights[1], weights[0]) * a[0]
    return least, np.where(a[1] < 0.0, weights[0], weights[1]) * a[1]


def affine(factor: float, offset: float, a: Interval) -> Interval:
    """`factor a + offset`."""
    ends = factor * a[0] + offset, factor * a[1] + offset
    return np.minimum(*ends), np.maximum(*ends)


def total(*terms: Interval) -> Interval:
    """The sum of intervals."""
    return np.asarray(sum(term[0] for term in terms)), np.asarray(sum(term[1] for term in terms))


def summed(a: Interval) -> Interval:
    """The sum over the first axis."""
    return np.sum(a[0], axis=0), np.sum(a[1], axis=0)


def size(a: Interval) -> Array:
    """The largest absolute value."""
    return np.maximum(np.abs(a[0]), np.abs(a[1]))


def least_size(a: Interval) -> Array:
    """The least absolute value."""
    return np.maximum(np.maximum(a[0], -a[1]), 0.0)


def largest(bounds: Bounds, edges: Array, *, tight: float, enough: float, most: int) -> tuple[float, float, int]:
    """(upper bound, lower bound, number of cells) of the largest value over the cells between `edges`.

    Cells are split until every bound is below `enough`, or within the factor `tight` of the largest value seen. Cells
    of only a few float64 numbers are not split, and none is after `most` cells.
    """
    low, high = edges[:-1], edges[1:]
    bound = seen = 0.0
    count = 0
    while low.size:
        count += low.size
        upper, value = bounds(low, high)
        seen = max(seen, float(np.max(value)))
        # The comparison is negated so that NaN counts as wide.
        wide = ~(upper <= max(tight * seen, enough)) & (high - low > _NARROW * np.maximum(np.abs(low), np.abs(high)))
        bound = max(bound, float(np.max(upper[~wide], initial=0.0)))
        if count > most or not np.all(np.isfinite(upper)):
            worst = float(np.max(upper))
            return (max(bound, worst) if np.isfinite(worst) else np.inf), seen, count
        low, high = _split(low[wide], high[wide])
    return bound, seen, count


def _split(low: Array, high: Array) -> tuple[Array, Array]:
    edges = low[:, None] + (high - low)[:, None] * np.arange(_PARTS + 1) / _PARTS
    edges[:, -1] = high
    return edges[:, :-1].ravel(), edges[:, 1:].ravel()
