"""The rule: the allowed difference between two models in a run.

A certificate proves that two models agree over the reals. A run only has to detect errors outside the certificate's
scope: in the runtime. The effect of rounding is measured on the original alone: by onnxruntime's own optimisation, and
by noise of one unit in the last place at the outputs of the blocks. For each output of each case,

    ||B - A|| <= FACTOR max(||A_optimised - A||, ||A_noisy - A||, eps ||A||)        (Euclidean norms)

The error of a miscompiled graph is as large as its outputs. Where rounding is as large, `Judgement.proves_nothing` is
true, and the verdict rests on the certificate. Shapes, element types and the places of NaN and infinities must be the
same; integers and booleans may differ only as often as noise changes them.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import ml_dtypes
import numpy as np

from rewriter.arrays import Array
from rewriter.evaluate.arithmetic import is_float

FACTOR = 16.0
"""Allowed error in units of the original's rounding: the noise is only a sample of rounding errors, and heads round a
few times as often as the operator that they replace."""

NOTHING = 0.5  # an allowance of this share of an output's norm makes the comparison vacuous

SMALL = 1e-2
"""A case whose entries are smaller than this share of another case's is measured on that share: if terms nearly cancel,
the rounding error is that of the terms."""

Results = Sequence[Mapping[str, Array]]  # case by case, an output's name to its values
_Pairs = Mapping[int, tuple[Array, Array]]  # of an output: the number of a case to the values of both models


@dataclass(frozen=True)
class Judgement:
    """One output of two models, over all cases."""

    name: str  # name of the output
    error: float  # ||B - A|| / ||A|| of the case that is closest to its limit
    rounding: float  # the original's rounding error there, in the same unit
    allowed: float  # the largest error that the rule allows there
    reason: str = ""  # why the rule does not hold; empty where it does
    # largest |B - A| over all cases, in the output's units, where both are finite; infinite where shapes, types,
    # strings or the places of NaN and infinities differ
    max_abs: float = math.inf
    case: int | None = None  # number of the case, from 0, in which the rule does not hold; None where it does

    @property
    def holds(self) -> bool:
        return not self.reason

    @property
    def proves_nothing(self) -> bool:
        """Whether rounding alone changes this output by its own magnitude."""
        return self.allowed >= NOTHING


def compared(
    name: str,
    original: Results,
    variants: Sequence[Results],
    rewritten: Results,
    tolerance: tuple[float, float] | None = None,
) -> Judgement:
    """Apply the rule to one output, or an element of a sequence, which some cases may lack.

    `variants` are results of the original that differ by rounding alone: with optimisation, with noise. A `tolerance`
    (atol, rtol) replaces the rule for floats: |B - A| <= atol + rtol |A| for every finite entry; errors are then in the
    output's units.
    """
    every = (original, rewritten, *variants)
    ours, theirs, *others = ({at: case[name] for at, case in enumerate(each) if name in case} for each in every)
    if theirs.keys() != ours.keys():
        return Judgement(name, np.inf, 0.0, 0.0, "is an element of a sequence that has another length")
    others = [each for each in others if each.keys() == ours.keys()]
    pairs = {number: (a, theirs[number]) for number, a in ours.items()}
    for number, (a, b) in pairs.items():
        kinds = ("shape", list(a.shape), list(b.shape)), ("type", a.dtype, b.dtype)
        if changed := next((f"has {what} {other} instead of {own}" for what, own, other in kinds if own != other), ""):
            return Judgement(name, np.inf, 0.0, 0.0, changed, case=number)
    gap = _largest_gap(pairs.values())
    if not any(map(is_float, ours.values())):
        return replace(_exact(name, pairs, others), max_abs=gap)
    for number, (a, b) in pairs.items():
        wrong = misplaced(a, b, [other[number] for other in others])
        if wrong.any():
            what = "entries that are finite in one model only, or NaN or infinite otherwise"
            reason = f"has {int(wrong.sum())} {what}{_entry(a, b, wrong)}"
            return Judgement(name, np.inf, 0.0, 0.0, reason, case=number)
    if tolerance is not None:
        return _by_tolerance(name, pairs, gap, *tolerance)
    sizes, moved = _sizes(ours), dict[int, float]()
    for number, a in ours.items():
        eps = float(ml_dtypes.finfo(a.dtype).eps)
        moved[number] = max([eps, *(relative_error(a, other[number], sizes[number]) for other in others)])
    # A case of few entries may round less by chance: it is granted the median of all cases.
    usual, found = median(moved.values()), dict[int, Judgement]()
    for number, pair in pairs.items():
        rounding = max(moved[number], usual)
        found[number] = Judgement(name, relative_error(*pair, sizes[number]), rounding, FACTOR * rounding, max_abs=gap)
    shares = {at: -1.0 if each.proves_nothing else each.error / each.allowed for at, each in found.items()}
    number = max(shares, key=shares.__getitem__)
    worst = found[number]
    if worst.proves_nothing or worst.error <= worst.allowed:
        return worst
    where = _entry(*pairs[number], np.nan_to_num(_differences(*pairs[number]), posinf=0.0))
    most = f"{worst.allowed:.3g} is allowed: {FACTOR:g} x {worst.rounding:.3g} of rounding"
    reason = f"is off by {worst.error:.3g} of its norm, where {most}{where}"
    return replace(worst, case=number, reason=reason)


def _differences(a: Array, b: Array) -> Array:
    with np.errstate(all="ignore"):
        return np.abs(b.astype(np.float64) - a.astype(np.float64))


def _entry(a: Array, b: Array, weight: Array) -> str:
    """The entry of the largest weight, with both values."""
    index = np.unravel_index(int(np.argmax(weight)), a.shape)
    where = f"at {[int(each) for each in index]} " if index else ""
    return f"; {where}{b[index]!s} instead of {a[index]!s}"


def _by_tolerance(name: str, pairs: _Pairs, gap: float, atol: float, rtol: float) -> Judgement:
    excess, worst, where = 0.0, None, ""
    for number, (a, b) in pairs.items():
        wide = a.astype(np.float64)
        with np.errstate(all="ignore"):
            over = _differences(a, b) - (atol + rtol * np.abs(wide))
        over = np.where(np.isfinite(wide), np.where(np.isnan(over), np.inf, over), 0.0)
        if np.max(over, initial=0.0) > excess:
            excess, worst, where = float(np.max(over)), number, _entry(a, b, over)
    reason = f"error {gap:.3g} exceeds atol {atol:g}, rtol {rtol:g} by {excess:.3g}{where}"
    return Judgement(name, gap, 0.0, atol, reason if excess else "", gap, worst)


def _sizes(values: Mapping[int, Array]) -> dict[int, float]:
    """The norm of each case, at least `SMALL` times the norm with entries as large as in the largest case."""
    norms = {number: norm(each) for number, each in values.items()}
    top = max((norms[number] / math.sqrt(each.size) for number, each in values.items() if each.size), default=0.0)
    return {number: max(norms[number], SMALL * top * math.sqrt(each.size)) for number, each in values.items()}


def uncompared(values: Sequence[Array]) -> str:
    """Why an output, which may be empty in some cases, such as a cache, cannot be compared in any; "" if it can."""
    if not sum(each.size for each in values):
        return "has no elements in any case"
    told = any(each.dtype.kind in "OUS" or np.isfinite(each.astype(np.float64)).any() for each in values)
    return "" if told else "is NaN or infinite throughout, in every case"


def _largest_gap(pairs: Collection[tuple[Array, Array]]) -> float:
    """The largest |b - a| over all cases, where both are finite; infinite where strings differ."""
    if any(a.dtype.kind in "OUS" for a, _ in pairs):
        return 0.0 if all(np.array_equal(*pair) for pair in pairs) else math.inf
    return max((magnitude(_differences(*pair)) for pair in pairs), default=0.0)


def norm(values: Array) -> float:
    """The Euclidean norm of the finite entries."""
    wide = values.astype(np.float64).ravel()
    wide = wide[np.isfinite(wide)]
    top = float(np.max(np.abs(wide), initial=0.0))
    # Scaled, so that squares neither overflow nor vanish.
    return top * float(np.linalg.norm(wide / top)) if top else 0.0


def relative_error(a: Array, b: Array, size: float) -> float:
    """||b - a|| over the norm of the original; over entries that are finite in both."""
    if a.shape != b.shape:
        return 0.0
    apart = norm(_differences(a, b))
    return apart / size if size else (np.inf if apart else 0.0)


def misplaced(a: Array, b: Array, others: Sequence[Array] = ()) -> Array:
    """The entries where NaN or infinities differ although they are the same in all variants of the original."""
    kinds = _kinds(a)
    wrong: Array = np.asarray(kinds != _kinds(b))
    for other in others:
        if wrong.any() and other.shape == a.shape:
            wrong &= _kinds(other) == kinds
    return wrong


def _kinds(values: Array) -> Array:
    wide = values.astype(np.float64)
    return np.where(np.isnan(wide), 1, np.where(np.isposinf(wide), 2, np.where(np.isneginf(wide), 3, 0)))


def _exact(name: str, pairs: _Pairs, others: Sequence[Mapping[int, Array]]) -> Judgement:
    """Integers, booleans and strings: as many may differ as noise changes, times the factor."""

    def unequal(a: Array, b: Array) -> int:
        return int(np.sum(a != b)) if a.shape == b.shape else a.size

    count = max(sum(a.size for a, _ in pairs.values()), 1)
    moved = [sum(unequal(a, other[number]) for number, (a, _) in pairs.items()) for other in others]
    different = sum(unequal(*pair) for pair in pairs.values())
    rounding = max(moved, default=0) / count
    error, allowed = different / count, FACTOR * rounding
    if error <= allowed:
        return Judgement(name, error, rounding, allowed)
    number, (a, b) = next(each for each in pairs.items() if unequal(*each[1]))
    reason = f"differs in {different} of {count} entries, which rounding does not explain{_entry(a, b, a != b)}"
    return Judgement(name, error, rounding, allowed, reason, case=number)


def magnitude(values: Array) -> float:
    """The largest finite |entry|; 0 if there is none."""
    wide = np.abs(values.astype(np.float64))
    return float(np.max(wide, initial=0.0, where=np.isfinite(wide)))
