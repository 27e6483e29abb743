"""How many elements of an output are how far off, in units in the last place.

Comes in: distances, what they are distances from, and the machine epsilon of the output's type. Goes out: counts, one
per bin. Used by `pieces` and `compare`; drawn by `rewriter.report.html`.

The unit is the last place of max(1, |expected|): eps times the power of two at or below it. So an element that is
nearly 0 counts by the output's own scale and not by its own. The bins are: exactly 0; up to 2^LOWEST; up to each
further power of two; above 2^HIGHEST, infinite included.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from rewriter.proof.distance import gap
from rewriter.proof.inputs.roles import is_float

Array = NDArray[Any]

LOWEST, HIGHEST = -4, 16
BINS = HIGHEST - LOWEST + 3

_BITS = 52
_MANTISSA = (1 << _BITS) - 1
"""Layout of a float64: the exponent stands above so many bits of mantissa."""


def ulp_counts(distances: Array, expected: Array, epsilon: float) -> NDArray[np.int64]:
    """Count `distances` (>= 0, no NaN) from `expected` (finite), both float64 of one shape; gives `BINS` counts."""
    # The exponents are read from the bits, which is several times as fast as frexp. A distance is rounded up to a power
    # of two, what it is a distance from is rounded down, so the difference is the ceiling of the logarithm: exactly.
    above = (np.ascontiguousarray(distances, np.float64).view(np.int64) + _MANTISSA) >> _BITS
    below = np.maximum(1.0, np.abs(expected)).view(np.int64) >> _BITS
    power = above - below - (math.frexp(epsilon)[1] - 1)
    bins = np.where(distances == 0, 0, np.clip(power, LOWEST, HIGHEST + 1) - LOWEST + 1)
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
