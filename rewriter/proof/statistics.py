"""Figures about the difference between two outputs, an expected and an actual one, over all cases; they decide nothing.

Everything is computed in float64. Elements that are NaN or infinite on either side are left out of the distances; if
the two have them in different places, the distance is infinite. An output without a single compared element has not
been validated (`uncompared`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rewriter.arrays import Array
from rewriter.proof.inputs.roles import is_float

_STRINGS = frozenset("OUS")
"""Kinds of numpy element types for strings."""

_LOGITS = re.compile(r"logits|scores", re.IGNORECASE)


@dataclass(frozen=True)
class OutputStats:
    """Differences of one output over all cases.

    Attributes:
        name: the output.
        elements: number of elements; 0 if shapes differ.
        finite: number of elements that are finite on both sides, whose distances were measured; all elements of values
            that are not floating-point.
        max_abs: largest absolute difference, in output units; infinite if shapes, NaN or infinities differ.
        min_tolerance: the smallest t for which |actual - expected| <= t + t |expected| everywhere; infinite if no
            tolerance helps.
        top1: fraction of rows over the last axis with the same argmax; None if the output is not logits.
    """

    name: str
    elements: int
    finite: int
    max_abs: float
    min_tolerance: float
    top1: float | None


def compare(name: str, expected: Sequence[Array], actual: Sequence[Array]) -> OutputStats:
    """Measure the results `actual` of all cases against `expected`.

    Booleans count as 0 and 1. Strings differ by 0 or infinity. Rows are ranked as logits if the name says so, or if the
    output is floating-point with a last axis of two or more.
    """
    far = float("inf")
    if any(e.shape != a.shape for e, a in zip(expected, actual, strict=True)):
        return OutputStats(name, 0, 0, far, far, None)
    parts = [_differences(e, a) for e, a in zip(expected, actual, strict=True)]
    difference, size, finite = (np.concatenate([part[kind].ravel() for part in parts]) for kind in (0, 1, 2))
    with np.errstate(all="ignore"):
        tolerance = np.where(np.isinf(difference), far, difference / (1 + np.where(finite, size, 0.0)))
    return OutputStats(
        name=name,
        elements=difference.size,
        finite=int(finite.sum()),
        max_abs=float(np.max(difference, initial=0.0)),
        min_tolerance=float(np.max(tolerance, initial=0.0)),
        top1=_ranking([pair for pair in zip(expected, actual, strict=True) if _is_ranked(name, pair[0])]),
    )


def _differences(e: Array, a: Array) -> tuple[Array, Array, Array]:
    """|a - e|, |e|, and whether both are finite; elsewhere 0 where both are the same, else infinite."""
    if e.dtype.kind in _STRINGS or a.dtype.kind in _STRINGS:
        unequal = np.asarray(e.astype(object) != a.astype(object), np.bool_)
        return np.where(unequal, np.inf, 0.0), np.ones(e.shape), np.ones(e.shape, np.bool_)
    wide, other = e.astype(np.float64), a.astype(np.float64)
    finite = np.isfinite(wide) & np.isfinite(other)
    if e.dtype.kind in "iu" and e.dtype == a.dtype:
        # Subtracted as integers, since float64 rounds beyond 2^53. The difference of two 64-bit integers always fits
        # the unsigned type, modulo 2^64.
        larger, smaller = np.maximum(e, a), np.minimum(e, a)
        return (larger.astype(np.uint64) - smaller.astype(np.uint64)).astype(np.float64), np.abs(wide), finite
    with np.errstate(all="ignore"):
        gap = np.abs(other - wide)
    same = (np.isnan(wide) & np.isnan(other)) | (wide == other)
    return np.where(finite, gap, np.where(same, 0.0, np.inf)), np.abs(wide), finite


def _is_ranked(name: str, array: Array) -> bool:
    return is_float(array.dtype) and array.ndim > 0 and array.shape[-1] > (0 if _LOGITS.search(name) else 1)


def _ranking(pairs: Sequence[tuple[Array, Array]]) -> float | None:
    """Fraction of rows with the same argmax; rows with NaN or without a finite number are left out."""
    agree = []
    for pair in pairs:
        e, a = (each.reshape(-1, each.shape[-1]).astype(np.float64) for each in pair)
        sound = np.ones(len(e), np.bool_)
        for each in (e, a):
            sound &= ~(np.isnan(each) | np.isposinf(each)).any(1) & np.isfinite(each).any(1)
        agree.append(e[sound].argmax(1) == a[sound].argmax(1))
    return float(np.concatenate(agree).mean()) if sum(map(len, agree)) else None


def uncompared(stats: OutputStats) -> str | None:
    """Why nothing of an output was compared in any case; None if at least one finite element was.

    An output may be empty in some cases, such as a cache before the first token, but not in all.
    """
    if stats.finite or (not stats.elements and stats.max_abs):
        return None
    return "is NaN or infinite throughout, in every case" if stats.elements else "has no elements in any case"
