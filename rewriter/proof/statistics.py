"""Statistics of the difference between two outputs, an expected and an actual one, combined over several cases.

Everything is computed in float64. Elements that are NaN or infinite on either side are left out of the distances and
judged by parity: both sides must have them in the same places. An output without a single compared element has not
been validated (`uncompared`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rewriter.arrays import Array
from rewriter.proof.inputs.roles import is_float

NEAR_ZERO = 1e-3
"""Share of an output's largest value below which an element counts as near 0, and its relative error says nothing."""


def is_ranking(array: Array) -> bool:
    """Whether the rows of `array` can be ranked: floats with a non-empty last axis."""
    return is_float(array.dtype) and array.ndim > 0 and array.shape[-1] > 0


def measure(name: str, expected: Array, actual: Array, *, ranked: bool) -> OutputStats:
    """Measure two arrays of numbers of the same shape; without parity no tolerance helps."""
    e, a = expected.astype(np.float64).ravel(), actual.astype(np.float64).ravel()
    finite = np.isfinite(e) & np.isfinite(a)
    difference = np.where(finite, _difference(expected.ravel(), actual.ravel()), 0.0)
    nan_parity = bool(np.array_equal(np.isnan(e), np.isnan(a)))
    inf_parity = bool(np.array_equal(np.where(np.isinf(e), e, 0), np.where(np.isinf(a), a, 0)))
    parity, count, size = nan_parity and inf_parity, int(finite.sum()), np.abs(e)
    near = finite & (size > 0) & (size >= NEAR_ZERO * np.max(size, initial=0.0, where=np.isfinite(size)))
    with np.errstate(all="ignore"):
        relative = np.where(near, difference / size, 0.0)
        tolerance = float(np.max(np.where(finite, difference / (1 + size), 0.0), initial=0.0))
    top1, kl, rows = _ranking(expected, actual) if ranked else (None, None, 0)
    return OutputStats(
        name=name,
        elements=expected.size,
        max_abs=float(np.max(difference, initial=0.0)) if parity else float("inf"),
        mean_abs=float(difference.sum()) / max(count, 1),
        p99_abs=_percentile(difference[finite]),
        max_rel=float(np.max(relative, initial=0.0)) if parity else float("inf"),
        cosine=_cosine(e[finite], a[finite]),
        top1=top1,
        kl=kl,
        worst=_index(int(difference.argmax()) if count else None, expected.shape),
        worst_case=0,
        same_shape=True,
        same_dtype=_same_type(expected, actual),
        nan_parity=nan_parity,
        inf_parity=inf_parity,
        min_tolerance=tolerance if parity else float("inf"),
        rows=rows,
        mean_rel=float(relative.sum()) / max(int(near.sum()), 1),
        p99_rel=_percentile(relative[near]),
        worst_rel=_index(int(relative.argmax()) if near.any() else None, expected.shape),
        finite=count,
    )


def _same_type(expected: Array, actual: Array) -> bool:
    """Whether the element types are equal; all those of strings are."""
    return expected.dtype == actual.dtype or {expected.dtype.kind, actual.dtype.kind} <= STRINGS


def _difference(e: Array, a: Array) -> Array:
    """|a - e| in float64. Integers are subtracted as such, since float64 would round them beyond 2^53."""
    if e.dtype.kind in "iu" and e.dtype == a.dtype:
        larger, smaller = np.maximum(e, a), np.minimum(e, a)
        # The difference of two 64-bit integers always fits the unsigned type, modulo 2^64.
        return (larger.astype(np.uint64) - smaller.astype(np.uint64)).astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray(np.abs(a.astype(np.float64) - e.astype(np.float64)))


def _percentile(differences: Array) -> float:
    return float(np.quantile(differences, 0.99, method="inverted_cdf")) if differences.size else 0.0


def _cosine(e: Array, a: Array) -> float | None:
    with np.errstate(over="ignore"):
        product, ours, theirs = float(e @ a), float(e @ e), float(a @ a)
    if not np.isfinite([product, ours, theirs]).all() or ours <= 0 or theirs <= 0:
        return None
    return float(np.clip(product / (np.sqrt(ours) * np.sqrt(theirs)), -1, 1))


def _ranking(expected: Array, actual: Array) -> tuple[float | None, float | None, int]:
    """Fraction of rows with the same argmax, mean KL divergence, and number of rows; rows with NaN are left out."""
    e, a = (each.reshape(-1, each.shape[-1]).astype(np.float64) for each in (expected, actual))
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        sound = np.ones(len(e), np.bool_)
        for each in (e, a):
            sound &= ~(np.isnan(each) | np.isposinf(each)).any(1) & np.isfinite(each).any(1)
        e, a = e[sound], a[sound]
        log_e, log_a = _log_softmax(e), _log_softmax(a)
        terms = np.where(np.isneginf(log_e), 0, np.exp(log_e) * (log_e - log_a))
    if not len(e):
        return None, None, 0
    return float((e.argmax(1) == a.argmax(1)).mean()), float(np.maximum(terms.sum(1), 0).mean()), len(e)


def _log_softmax(x: Array) -> Array:
    shifted = x - x.max(1, keepdims=True, initial=-np.inf)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(1, keepdims=True)))


STRINGS = frozenset("OUS")
"""Kinds of numpy element types for strings."""

_LOGITS = re.compile(r"logits|scores", re.IGNORECASE)


@dataclass(frozen=True)
class OutputStats:
    """Differences of one output, in one case or merged over several.

    Attributes:
        name: the output.
        elements: number of elements.
        max_abs: largest absolute difference, in output units; infinite if shapes or parity differ.
        mean_abs: mean absolute difference.
        p99_abs: 99th percentile of the absolute difference; after merging the largest of the cases', so an upper
            bound.
        max_rel: largest |difference| / |expected|, over elements that are not near 0: at least a thousandth of the
            output's largest value.
        cosine: cosine of the angle between the two as vectors, None if one is all zero; after merging the smallest of
            the cases'.
        top1: fraction of rows over the last axis with the same argmax; None if the output is not logits.
        kl: mean Kullback-Leibler divergence of the softmaxes of the rows, in nats; None if it is not logits.
        worst: index of the largest difference; None if nothing was compared.
        worst_case: the case in which that is.
        same_shape: the shapes are equal.
        same_dtype: the element types are equal.
        nan_parity: NaN at the same places.
        inf_parity: the same infinities at the same places.
        min_tolerance: the smallest t for which |actual - expected| <= t + t |expected| everywhere; infinite if no
            tolerance helps.
        rows: number of rows that `top1` and `kl` cover.
        mean_rel: mean of |difference| / |expected| over the same elements as `max_rel`; the largest of the cases'.
        p99_rel: what 99 % of these relative differences stay below; the largest of the cases'.
        worst_rel: index of `max_rel`.
        worst_rel_case: the case in which that is.
        finite: number of elements that are finite on both sides, whose distances were measured; all elements of values
            that are not floating-point.
    """

    name: str
    elements: int
    max_abs: float
    mean_abs: float
    p99_abs: float
    max_rel: float
    cosine: float | None
    top1: float | None
    kl: float | None
    worst: tuple[int, ...] | None
    worst_case: int
    same_shape: bool
    same_dtype: bool
    nan_parity: bool
    inf_parity: bool
    min_tolerance: float
    rows: int = 0
    mean_rel: float = 0.0
    p99_rel: float = 0.0
    worst_rel: tuple[int, ...] | None = None
    worst_rel_case: int = 0
    finite: int = 0

    @property
    def comparable(self) -> bool:
        """Whether the two agree in everything that no tolerance can excuse."""
        return self.same_shape and self.same_dtype and self.nan_parity and self.inf_parity


def compare(name: str, expected: Array, actual: Array) -> OutputStats:
    """Measure `actual` against `expected`.

    Booleans count as 0 and 1. Strings differ by 0 or infinity. Rows are ranked as logits if the name says so, or if the
    output is floating-point with a last axis of two or more.
    """
    if expected.shape != actual.shape:
        return _apart(name, same_dtype=_same_type(expected, actual))
    if expected.dtype.kind in STRINGS or actual.dtype.kind in STRINGS:
        return _compare_strings(name, expected, actual)
    ranked = is_ranking(expected) and (bool(_LOGITS.search(name)) or expected.shape[-1] > 1)
    return measure(name, expected, actual, ranked=ranked)


def uncompared(stats: OutputStats) -> str | None:
    """Why nothing of an output was compared in any case; None if at least one finite element was.

    An output may be empty in some cases, such as a cache before the first token, but not in all.
    """
    if stats.finite or not stats.same_shape:
        return None
    return "is NaN or infinite throughout, in every case" if stats.elements else "has no elements in any case"


def merge(stats: Sequence[OutputStats]) -> OutputStats:
    """Combine the statistics of one output over several cases, weighted by their elements or rows."""
    if not stats:
        raise ValueError("no statistics to merge")
    worst = max(range(len(stats)), key=lambda index: stats[index].max_abs)
    worst_rel = max(range(len(stats)), key=lambda index: stats[index].max_rel)
    elements = sum(each.elements for each in stats)
    rows = sum(each.rows for each in stats)
    cosines = [each.cosine for each in stats if each.cosine is not None]
    finite = sum(each.finite for each in stats)
    mean = sum(each.mean_abs * each.finite for each in stats if each.finite) / max(finite, 1)
    return OutputStats(
        name=stats[0].name,
        elements=elements,
        max_abs=stats[worst].max_abs,
        mean_abs=mean if all(each.same_shape for each in stats) else float("inf"),
        p99_abs=max(each.p99_abs for each in stats),
        max_rel=max(each.max_rel for each in stats),
        cosine=min(cosines, default=None),
        top1=sum((each.top1 or 0) * each.rows for each in stats) / rows if rows else None,
        kl=sum((each.kl or 0) * each.rows for each in stats) / rows if rows else None,
        worst=stats[worst].worst,
        worst_case=worst,
        same_shape=all(each.same_shape for each in stats),
        same_dtype=all(each.same_dtype for each in stats),
        nan_parity=all(each.nan_parity for each in stats),
        inf_parity=all(each.inf_parity for each in stats),
        min_tolerance=max(each.min_tolerance for each in stats),
        rows=rows,
        mean_rel=max(each.mean_rel for each in stats),
        p99_rel=max(each.p99_rel for each in stats),
        worst_rel=stats[worst_rel].worst_rel,
        worst_rel_case=worst_rel,
        finite=finite,
    )


def _index(place: int | None, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    return None if place is None else tuple(int(index) for index in np.unravel_index(place, shape))


def _apart(name: str, *, same_dtype: bool) -> OutputStats:
    far = float("inf")
    return OutputStats(
        name, 0, far, far, far, far, None, None, None, None, 0, False, same_dtype, True, True, far
    )  # fmt: skip


def _compare_strings(name: str, expected: Array, actual: Array) -> OutputStats:
    unequal = np.asarray(expected.astype(object) != actual.astype(object), dtype=np.bool_).ravel()
    differs = bool(unequal.any())
    far = float("inf") if differs else 0.0
    place = int(unequal.argmax()) if unequal.size else None
    worst, same_dtype = _index(place, expected.shape), _same_type(expected, actual)
    return OutputStats(
        name, unequal.size, far, far, far, far, None, None, None, worst, 0, True, same_dtype, True, True, far,
        finite=unequal.size,
    )  # fmt: skip


def top_k_agreement(expected: Array, actual: Array, k: int) -> tuple[float, int] | None:
    """The share of the top k entries of each row over the last axis that both have, and the number of rows.

    None if there are no rows to rank. Rows with NaN on either side are left out.
    """
    if expected.shape != actual.shape or not is_ranking(expected):
        return None
    width = expected.shape[-1]
    k = min(k, width)
    ours, theirs = (each.reshape(-1, width) for each in (expected, actual))
    sound = ~(np.isnan(ours.astype(np.float32)).any(1) | np.isnan(theirs.astype(np.float32)).any(1))
    best = [np.argpartition(-each[sound].astype(np.float64), k - 1, axis=1)[:, :k] for each in (ours, theirs)]
    if not len(best[0]):
        return None
    shared = [np.intersect1d(one, other, assume_unique=True).size for one, other in zip(*best, strict=True)]
    return float(np.mean(shared)) / k, len(shared)


def top_k_share(expected: Sequence[Array], actual: Sequence[Array], k: int) -> float | None:
    """`top_k_agreement` over the rows of all cases; None if there are none to rank."""
    found = [top_k_agreement(a, b, k) for a, b in zip(expected, actual, strict=True)]
    known = [one for one in found if one is not None]
    rows = sum(count for _, count in known)
    return sum(share * count for share, count in known) / rows if rows else None
