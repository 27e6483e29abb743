"""Distances to the truth, and how large they may be.

Comes in: arrays. Goes out: single numbers. Where the truth is not finite nothing is compared (parity is judged
elsewhere); NaN or infinity where the truth is finite counts as infinitely far.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

FACTOR = 4.0
"""A conversion may be this many times as far from float64 as the original is, plus its certified error."""


def largest(values: Array) -> float:
    """The largest entry, 0 for none."""
    return float(np.max(values)) if values.size else 0.0


def gap(values: Array, truth: Array) -> Array:
    """|values - truth|, entry by entry, in float64."""
    truth = truth.astype(np.float64)
    with np.errstate(all="ignore"):
        distance = np.abs(values.astype(np.float64) - truth)
    known = np.broadcast_to(np.isfinite(truth), distance.shape)
    return np.where(known, np.where(np.isnan(distance), np.inf, distance), 0.0)


def relative_gap(values: Array, truth: Array) -> Array:
    """|values - truth| over max(1, |truth|), entry by entry."""
    with np.errstate(all="ignore"):
        scaled = gap(values, truth) / np.maximum(1.0, np.abs(truth.astype(np.float64)))
    return np.where(np.isnan(scaled), 0.0, scaled)


def magnitude(values: Array) -> float:
    """The largest finite |entry|."""
    wide = np.abs(values.astype(np.float64))
    return largest(wide[np.isfinite(wide)])


def ratio(new: float, old: float, floor: float) -> float:
    """`new` over `old`, where errors below `floor` count as `floor`."""
    return new / max(old, floor, float(np.finfo(np.float64).tiny))


def setting(provider: str, *, optimise: bool) -> str:
    """How messages name a way to run a model."""
    return f"{provider}, {'default optimisation' if optimise else 'no optimisation'}"
