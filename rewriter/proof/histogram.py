"""How many elements of an output are how far off, in units in the last place.

Comes in: distances, what they are distances from, and the machine epsilon of the output's type. Goes out: counts, one
per bin. Used by `pieces` and `compare`; drawn by `rewriter.html`.

The unit is the last place of max(1, |expected|): eps times the power of two at or below it. So an element that is
nearly 0 counts by the output's own scale and not by its own. The bins are: exactly 0; up to 2^LOWEST; up to each
further power of two; above 2^HIGHEST, infinite included.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from rewriter.proof.distance import gap
from rewriter.proof.roles import is_float

Array = NDArray[Any]

LOWEST, HIGHEST = -4, 16
BINS = HIGHEST - LOWEST + 3


def ulp_counts(distances: Array, expected: Array, epsilon: float) -> NDArray[np.int64]:
    """Count `distances` (>= 0, no NaN) from `expected` (finite), both float64 of one shape; gives `BINS` counts."""
    _, exponent = np.frexp(np.maximum(1.0, np.abs(expected)))
    with np.errstate(over="ignore"):
        scaled = distances / np.ldexp(epsilon, exponent - 1)
    mantissa, power = np.frexp(scaled)
    # scaled = mantissa 2^power with mantissa in [1/2, 1): the next power of two is 2^power, or itself at 1/2.
    ceiling = np.where(np.isinf(scaled), HIGHEST + 1, power - (mantissa == 0.5))
    bins = np.where(scaled == 0, 0, np.clip(ceiling, LOWEST, HIGHEST + 1) - LOWEST + 1)
    return np.bincount(bins.reshape(-1), minlength=BINS)


def counts_against(values: Iterable[Array], truth: Iterable[Array]) -> tuple[int, ...]:
    """Counts of the distances of `values` from their float64 evaluation, case by case, added up.

    Elements whose truth is not finite are left out. Empty for values that are no floats, or of another shape.
    """
    total = np.zeros(BINS, np.int64)
    for value, right in zip(values, truth, strict=True):
        if value.shape != right.shape or not is_float(value.dtype):
            return ()
        finite = np.isfinite(right.astype(np.float64))
        epsilon = float(ml_dtypes.finfo(value.dtype).eps)
        total += ulp_counts(gap(value, right)[finite], right[finite].astype(np.float64), epsilon)
    return tuple(total.tolist())


def added(counts: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """The sum of several counts; those that are empty say nothing."""
    return tuple(map(sum, zip(*(each for each in counts if each), strict=True)))
