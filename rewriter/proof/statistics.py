"""How far apart two outputs are: `OutputStats` of an expected and an actual array, combined over several cases.

Everything is computed in float64, in pieces. Elements that are NaN or infinite on either side are left out of the
distances and judged by parity: both sides must have the same ones. An output of which no element was ever compared
has not been validated (`uncompared`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rewriter.proof.histogram import added, counts_against
from rewriter.proof.pieces import Distances, is_ranking, measure

Array = NDArray[Any]

STRINGS = frozenset("OUS")
"""Kinds of numpy element types that hold strings."""

_LOGITS = re.compile(r"logits|scores", re.IGNORECASE)


@dataclass(frozen=True)
class OutputStats:
    """Distances of one output, or of several cases of it.

    Attributes:
        name: the output.
        elements: how many elements there are.
        max_abs: largest absolute difference, in output units; infinite when shapes or parity differ.
        mean_abs: mean absolute difference.
        p99_abs: absolute difference that 99 % of the elements stay below; the largest of the cases' after
            merging, so an upper bound.
        max_rel: largest |difference| / |expected|, over elements with expected != 0.
        cosine: cosine of the angle between the two as vectors, None where one is all zero; the smallest of
            the cases' after merging.
        top1: fraction of rows over the last axis with the same argmax, None where the output is no logits.
        kl: mean Kullback-Leibler divergence of the softmaxes of the rows, in nats; None where no logits.
        worst: index of the largest difference, None where nothing was compared.
        worst_case: which of the merged cases it lies in.
        same_shape: the shapes are equal.
        same_dtype: the element types are equal.
        nan_parity: NaN at the same places.
        inf_parity: the same infinities at the same places.
        min_tolerance: the smallest t for which |actual - expected| <= t + t |expected| everywhere; infinite
            where no tolerance helps.
        rows: how many rows `top1` and `kl` are about.
        ulps: elements by |difference| in units in the last place of max(1, |expected|), in the bins of
            `rewriter.proof.histogram`; empty where the output is no floats, or shapes differ.
        original_ulps: the same of the original against float64; empty without a float64 evaluation.
        rewritten_ulps: the same of the rewritten model against float64.
        mean_rel: mean of |difference| / |expected| over the same elements as `max_rel`; the largest of the cases'.
        p99_rel: what 99 % of those stay below; the largest of the cases'.
        worst_rel: index of `max_rel`.
        worst_rel_case: which of the merged cases it lies in.
        finite: how many elements are finite on both sides, so that their distances were measured; of values that are
            not floating-point, all.
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
    ulps: tuple[int, ...] = ()
    original_ulps: tuple[int, ...] = ()
    rewritten_ulps: tuple[int, ...] = ()
    mean_rel: float = 0.0
    p99_rel: float = 0.0
    worst_rel: tuple[int, ...] | None = None
    worst_rel_case: int = 0
    finite: int = 0

    @property
    def comparable(self) -> bool:
        """Whether the two agree in all that no tolerance forgives."""
        return self.same_shape and self.same_dtype and self.nan_parity and self.inf_parity


def compare(name: str, expected: Array, actual: Array) -> OutputStats:
    """Measure `actual` against `expected`.

    Booleans count as 0 and 1. Strings differ by 0 or infinitely. An output is logits when its name says so or
    when it is float with a last axis of two or more.
    """
    same_shape = expected.shape == actual.shape
    same_dtype = expected.dtype == actual.dtype or {expected.dtype.kind, actual.dtype.kind} <= STRINGS
    if not same_shape:
        return _apart(name, same_dtype=same_dtype)
    if expected.dtype.kind in STRINGS or actual.dtype.kind in STRINGS:
        return _compare_strings(name, expected, actual, same_dtype=same_dtype)
    ranked = is_ranking(expected) and (bool(_LOGITS.search(name)) or expected.shape[-1] > 1)
    found = measure(expected, actual, ranked=ranked)
    return _stats(name, found, expected.shape, same_dtype=same_dtype)


def uncompared(stats: OutputStats) -> str | None:
    """Why nothing of an output was compared, over all of its cases; None where at least one finite element was.

    An output may be empty in some cases, such as a cache before the first token, but not in all.
    """
    if stats.finite or not stats.same_shape:
        return None
    return "is NaN or infinite throughout, in every case" if stats.elements else "has no elements in any case"


def merge(stats: Sequence[OutputStats]) -> OutputStats:
    """Combine the statistics of one output over several cases; every case counts by its elements or rows."""
    if not stats:
        raise ValueError("no statistics to merge")
    worst = max(range(len(stats)), key=lambda index: stats[index].max_abs)
    worst_rel = max(range(len(stats)), key=lambda index: stats[index].max_rel)
    elements = sum(each.elements for each in stats)
    ranked = [each for each in stats if each.top1 is not None and each.rows]
    rows = sum(each.rows for each in ranked)
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
        top1=sum((each.top1 or 0) * each.rows for each in ranked) / rows if rows else None,
        kl=sum((each.kl or 0) * each.rows for each in ranked) / rows if rows else None,
        worst=stats[worst].worst,
        worst_case=worst,
        same_shape=all(each.same_shape for each in stats),
        same_dtype=all(each.same_dtype for each in stats),
        nan_parity=all(each.nan_parity for each in stats),
        inf_parity=all(each.inf_parity for each in stats),
        min_tolerance=max(each.min_tolerance for each in stats),
        rows=rows,
        ulps=added(each.ulps for each in stats),
        original_ulps=added(each.original_ulps for each in stats),
        rewritten_ulps=added(each.rewritten_ulps for each in stats),
        mean_rel=max(each.mean_rel for each in stats),
        p99_rel=max(each.p99_rel for each in stats),
        worst_rel=stats[worst_rel].worst_rel,
        worst_rel_case=worst_rel,
        finite=finite,
    )


def against_truth(
    stats: OutputStats, expected: Sequence[Array], actual: Sequence[Array], truth: Sequence[Array]
) -> OutputStats:
    """The statistics, with how far each side is from a float64 evaluation, case by case."""
    return replace(stats, original_ulps=counts_against(expected, truth), rewritten_ulps=counts_against(actual, truth))


def _stats(name: str, found: Distances, shape: tuple[int, ...], *, same_dtype: bool) -> OutputStats:
    parity = found.nan_parity and found.inf_parity
    return OutputStats(
        name=name,
        elements=found.elements,
        max_abs=found.max_abs if parity else float("inf"),
        mean_abs=found.mean_abs,
        p99_abs=found.p99_abs,
        max_rel=found.max_rel if parity else float("inf"),
        cosine=found.cosine,
        top1=found.top1,
        kl=found.kl,
        worst=_index(found.worst, shape),
        worst_case=0,
        same_shape=True,
        same_dtype=same_dtype,
        nan_parity=found.nan_parity,
        inf_parity=found.inf_parity,
        min_tolerance=found.min_tolerance if parity else float("inf"),
        rows=found.rows,
        ulps=found.ulps,
        mean_rel=found.mean_rel,
        p99_rel=found.p99_rel,
        worst_rel=_index(found.worst_rel, shape),
        finite=found.finite,
    )


def _index(place: int | None, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    return None if place is None else tuple(int(index) for index in np.unravel_index(place, shape))


def _apart(name: str, *, same_dtype: bool) -> OutputStats:
    far = float("inf")
    return OutputStats(
        name, 0, far, far, far, far, None, None, None, None, 0, False, same_dtype, True, True, far
    )  # fmt: skip


def _compare_strings(name: str, expected: Array, actual: Array, *, same_dtype: bool) -> OutputStats:
    unequal = np.asarray(expected.astype(object) != actual.astype(object), dtype=np.bool_).reshape(-1)
    differs = bool(unequal.any())
    far = float("inf") if differs else 0.0
    place = int(unequal.argmax()) if unequal.size else None
    worst = _index(place, expected.shape)
    return OutputStats(
        name, unequal.size, far, far, far, far, None, None, None, worst, 0, True, same_dtype, True, True, far,
        finite=unequal.size,
    )  # fmt: skip


def top_k_agreement(expected: Array, actual: Array, k: int) -> tuple[float, int] | None:
    """How much of the k best entries of each row over the last axis both have, and the number of rows.

    None where there are no rows to rank. Rows with NaN on either side are left out.
    """
    if expected.shape != actual.shape or not is_ranking(expected):
        return None
    width = expected.shape[-1]
    k = min(k, width)
    ours, theirs = (each.reshape(-1, width) for each in (expected, actual))
    sound = ~(np.isnan(ours.astype(np.float32)).any(-1) | np.isnan(theirs.astype(np.float32)).any(-1))
    best = [np.argpartition(-each[sound].astype(np.float64), k - 1, axis=-1)[:, :k] for each in (ours, theirs)]
    if not len(best[0]):
        return None
    shared = [np.intersect1d(one, other, assume_unique=True).size for one, other in zip(*best, strict=True)]
    return float(np.mean(shared)) / k, len(shared)
