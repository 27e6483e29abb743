"""The original's own randomness: elements of its outputs that onnxruntime never writes, so that no two runs agree.

A cache may be larger than what is in it, and its rest is whatever the memory held. The original runs twice in fresh
sessions, the second time into memory filled with a pattern; elements that differ by more than rounding are left out of
every comparison, and named. What is the same in both runs is compared as ever.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from rewriter.arrays import Array
from rewriter.proof.inputs.roles import is_float
from rewriter.proof.rule import Results

_CLOSE = 1e-3
"""Runs on a GPU may differ by rounding, relative to the element; that is the rule's affair."""

Gaps = Sequence[dict[str, Array]]
"""Case by case, an output to a mask of the elements that say nothing; outputs without such elements are missing."""


def gaps(first: Results, second: Results) -> Gaps:
    """The elements that differ between two runs."""
    found = [
        {name: _apart(values, twin[name]) for name, values in one.items()}
        for one, twin in zip(first, second, strict=True)
    ]
    return [{name: mask for name, mask in case.items() if mask.any()} for case in found]


def united(several: Sequence[Gaps]) -> Gaps:
    """What is a gap on any of several providers."""
    return [
        {name: np.logical_or.reduce([case[name] for case in cases if name in case]) for name in set().union(*cases)}
        for cases in zip(*several, strict=True)
    ]


def without(results: Results, left_out: Gaps) -> Results:
    """The same results with zeros at the gaps; an array of another shape stays, and will be refused."""
    return [
        {name: _cleared(values, case[name]) if name in case else values for name, values in found.items()}
        for found, case in zip(results, left_out, strict=True)
    ]


def told(results: Results, left_out: Gaps) -> Iterator[str]:
    """Which elements are left out, in words."""
    counts: dict[str, int] = defaultdict(int)
    for case in left_out:
        for name, mask in case.items():
            counts[name] += int(mask.sum())
    sizes = {name: sum(case[name].size for case in results) for name in counts}
    for count in sorted({count for name, count in counts.items() if count < sizes[name]}):
        names = ", ".join(name for name in counts if counts[name] == count)
        yield f"onnxruntime leaves {count} elements of {names} unwritten; they are not compared"
    whole = ", ".join(name for name in counts if counts[name] == sizes[name])
    if whole:
        yield f"the run proves nothing about {whole}: no element is the same in two runs of the original"


def _apart(one: Array, other: Array) -> Array:
    if one.shape != other.shape:
        return np.ones(one.shape, np.bool_)
    if not is_float(one.dtype):
        return np.asarray(one != other, np.bool_)
    with np.errstate(all="ignore"):
        a, b = (each.astype(np.float64) for each in (one, other))
        apart = ~np.isclose(a, b, rtol=_CLOSE, atol=0.0, equal_nan=True)
    # What still is the NaN that memory was filled with; arithmetic makes NaN of other bits.
    bits = np.ascontiguousarray(other).view(f"u{other.itemsize}").reshape(other.shape)
    return np.asarray(apart | (bits == np.iinfo(bits.dtype).max), np.bool_)


def _cleared(values: Array, mask: Array) -> Array:
    if values.shape != mask.shape:
        return values
    kept = values.copy()
    kept[mask] = 0
    return kept
