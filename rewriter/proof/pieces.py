"""Distances of two arrays of numbers of one shape, piece by piece.

Only one array of the outputs' size is held at a time, of float32 differences for the percentile; the rest works on
pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from rewriter.proof.histogram import BINS, ulp_counts
from rewriter.proof.inputs.roles import is_float

Array = NDArray[Any]

_PIECE = 1 << 20
"""Elements looked at at once."""


@dataclass(frozen=True)
class Distances:
    """See `rewriter.proof.statistics.OutputStats`; `worst` is an index into the flat array."""

    elements: int
    finite: int
    max_abs: float
    mean_abs: float
    p99_abs: float
    max_rel: float
    mean_rel: float
    p99_rel: float
    worst_rel: int | None
    min_tolerance: float
    cosine: float | None
    worst: int | None
    nan_parity: bool
    inf_parity: bool
    top1: float | None
    kl: float | None
    rows: int
    ulps: tuple[int, ...]


def is_ranking(array: Array) -> bool:
    """Whether rows of `array` can be ranked: floats with a last axis."""
    return is_float(array.dtype) and array.ndim > 0 and array.shape[-1] > 0


def measure(expected: Array, actual: Array, *, ranked: bool) -> Distances:
    """Measure two arrays of the same shape."""
    flat = [np.ascontiguousarray(each).reshape(-1) for each in (expected, actual)]
    size = flat[0].size
    kept = np.empty(size, np.float32)
    count, total, largest, tolerance = 0, 0.0, 0.0, 0.0
    place: int | None = None
    products = np.zeros(3)
    ulps = np.zeros(BINS, np.int64)
    epsilon = float(ml_dtypes.finfo(expected.dtype).eps) if is_float(expected.dtype) else 0.0
    nan_parity = inf_parity = True
    for start in range(0, size, _PIECE):
        e, a = (each[start : start + _PIECE] for each in flat)
        difference = _difference(e, a)
        e, a = e.astype(np.float64), a.astype(np.float64)
        nan_parity &= bool(np.array_equal(np.isnan(e), np.isnan(a)))
        inf_parity &= bool(np.array_equal(np.where(np.isinf(e), e, 0), np.where(np.isinf(a), a, 0)))
        finite = np.isfinite(e) & np.isfinite(a)
        difference = np.where(finite, difference, 0)
        kept[count : count + int(finite.sum())] = difference[finite]
        count += int(finite.sum())
        if not finite.any():
            continue
        total += float(difference.sum())
        top = int(difference.argmax())
        if place is None or difference[top] > largest:
            place, largest = start + top, float(difference[top])
        e, a, difference = e[finite], a[finite], difference[finite]
        tolerance = max(tolerance, float((difference / (1 + np.abs(e))).max()))
        products += _products(e, a)
        ulps += ulp_counts(difference, e, epsilon) if epsilon else 0
    p99_abs = _percentile(kept[:count])
    max_rel, mean_rel, p99_rel, worst_rel = _relative(flat[0], flat[1], kept)
    top1, kl, rows = _ranking(expected, actual) if ranked else (None, None, 0)
    return Distances(
        elements=size,
        finite=count,
        max_abs=largest,
        mean_abs=total / max(count, 1),
        p99_abs=p99_abs,
        max_rel=max_rel,
        mean_rel=mean_rel,
        p99_rel=p99_rel,
        worst_rel=worst_rel,
        min_tolerance=tolerance,
        cosine=_cosine(products),
        worst=place,
        nan_parity=nan_parity,
        inf_parity=inf_parity,
        top1=top1,
        kl=kl,
        rows=rows,
        ulps=tuple(ulps.tolist()) if epsilon else (),
    )


def _relative(expected: Array, actual: Array, kept: NDArray[np.float32]) -> tuple[float, float, float, int | None]:
    """Largest, mean and 99th percentile of |difference| / |expected| where expected is finite and not 0; and where.

    `kept` is overwritten: it holds the quotients for the percentile.
    """
    count, total, largest, place = 0, 0.0, 0.0, None
    for start in range(0, expected.size, _PIECE):
        e, a = (each[start : start + _PIECE] for each in (expected, actual))
        difference = _difference(e, a)
        scale = np.abs(e.astype(np.float64))
        judged = np.isfinite(scale) & np.isfinite(difference) & (scale > 0)
        if not judged.any():
            continue
        with np.errstate(over="ignore"):
            quotients = difference[judged] / scale[judged]
            kept[count : count + quotients.size] = quotients
        count += quotients.size
        total += float(quotients.sum())
        top = int(quotients.argmax())
        if place is None or quotients[top] > largest:
            place, largest = start + int(np.flatnonzero(judged)[top]), float(quotients[top])
    return largest, total / max(count, 1), _percentile(kept[:count]), place


def _difference(e: Array, a: Array) -> Array:
    """|a - e| in float64; exact for integers, which float64 alone would round beyond 2^53."""
    if e.dtype.kind in "iu" and a.dtype.kind in "iu" and e.dtype == a.dtype:
        larger, smaller = np.maximum(e, a), np.minimum(e, a)
        # The difference of two 64-bit integers always fits the unsigned type, modulo 2^64.
        return (larger.astype(np.uint64) - smaller.astype(np.uint64)).astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray(np.abs(a.astype(np.float64) - e.astype(np.float64)))


def _percentile(differences: NDArray[np.float32]) -> float:
    if not differences.size:
        return 0.0
    rank = min(int(np.ceil(0.99 * differences.size)) - 1, differences.size - 1)
    differences.partition(rank)
    return float(differences[rank])


def _products(e: Array, a: Array) -> Array:
    with np.errstate(over="ignore"):
        return np.array([float(e @ a), float(e @ e), float(a @ a)])


def _cosine(products: Array) -> float | None:
    if not np.isfinite(products).all() or products[1] <= 0 or products[2] <= 0:
        return None
    return float(np.clip(products[0] / (np.sqrt(products[1]) * np.sqrt(products[2])), -1, 1))


def _ranking(expected: Array, actual: Array) -> tuple[float | None, float | None, int]:
    """Fraction of rows with the same argmax, mean KL divergence, number of rows; without rows with NaN."""
    same, divergence, rows = 0, 0.0, 0
    for e_rows, a_rows in _rows(expected, actual):
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            sound = np.ones(len(e_rows), np.bool_)
            for each in (e_rows, a_rows):
                sound &= ~(np.isnan(each) | np.isposinf(each)).any(-1) & np.isfinite(each).any(-1)
            e, a = e_rows[sound], a_rows[sound]
            same += int((e.argmax(-1) == a.argmax(-1)).sum())
            log_e, log_a = _log_softmax(e), _log_softmax(a)
            terms = np.where(np.isneginf(log_e), 0, np.exp(log_e) * (log_e - log_a))
            divergence += float(np.maximum(terms.sum(-1), 0).sum())
        rows += int(sound.sum())
    return (same / rows, divergence / rows, rows) if rows else (None, None, 0)


def _log_softmax(x: Array) -> Array:
    shifted = x - x.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def _rows(expected: Array, actual: Array) -> Iterator[tuple[Array, Array]]:
    width = expected.shape[-1]
    step = max(_PIECE // width, 1)
    e, a = expected.reshape(-1, width), actual.reshape(-1, width)
    for start in range(0, len(e), step):
        yield e[start : start + step].astype(np.float64), a[start : start + step].astype(np.float64)
