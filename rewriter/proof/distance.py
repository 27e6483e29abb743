"""Distances from the truth.

Where the truth is not finite nothing is compared, since parity is judged separately; NaN or infinity where the truth is
finite counts as an infinite distance.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rewriter.arrays import Array

FACTOR = 4.0
"""A conversion may be this many times as far from float64 as the original, plus its certified error."""


PIECE = 2**15
"""Number of entries that `in_pieces` evaluates at a time: the temporaries of a head program then stay in the cache."""


def in_pieces(function: Callable[..., Array], *operands: Array | None) -> Array:
    """`function(*operands)` for a function that works entry by entry; operands broadcast, absent ones stay None.

    A function that needs several arrays per entry would otherwise hold all of them for all entries.
    """
    shape = np.broadcast_shapes(*(each.shape for each in operands if each is not None))
    flat = [None if each is None else np.broadcast_to(each, shape).ravel() for each in operands]
    result = np.empty(shape)
    out = result.ravel()
    for start in range(0, out.size, PIECE):
        piece = slice(start, start + PIECE)
        out[piece] = function(*(None if each is None else each[piece] for each in flat))
    return result


def largest(values: Array) -> float:
    """The largest entry; 0 if there is none."""
    return float(np.max(values)) if values.size else 0.0


def gap(values: Array, truth: Array) -> Array:
    """|values - truth|, entry by entry, in float64."""
    truth = truth.astype(np.float64)
    with np.errstate(all="ignore"):
        distance = np.abs(values.astype(np.float64) - truth)
    known = np.broadcast_to(np.isfinite(truth), distance.shape)
    return np.where(known, np.where(np.isnan(distance), np.inf, distance), 0.0)


def magnitude(values: Array) -> float:
    """The largest finite |entry|."""
    wide = np.abs(values.astype(np.float64))
    return largest(wide[np.isfinite(wide)])


def ratio(new: float, old: float, floor: float) -> float:
    """`new` over `old`, where an `old` below `floor` counts as `floor`."""
    return new / max(old, floor, float(np.finfo(np.float64).tiny))
