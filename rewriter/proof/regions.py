"""Proof of a replaced region by itself, on adversarial points in several batches and tokens.

Four questions:

1. certificate: do the plan's numbers compute the original's own nodes within the certified error? Both in float64.
2. emission: do the emitted nodes, evaluated in float64, compute the plan's numbers to rounding?
3. accuracy: in the model's own type, is the new region as accurate as the old one?
4. parity: NaN where the original gives NaN, and nowhere else; but NaN in may give NaN out where the original
   swallows it (`Where(y > 0, y, 0)` does). Infinite where the original overflows.

What happens at infinite pre-activations is measured and reported, not judged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rewriter.errors import ValidationError
from rewriter.files.load import LoadedModel
from rewriter.proof.claims import Claim, Side
from rewriter.proof.distance import FACTOR, Array, gap, largest, ratio
from rewriter.proof.float64 import NoReference, open_reference
from rewriter.proof.points import adversarial, laid_out, largest_finite, machine_epsilon, numpy_dtype
from rewriter.proof.runs import Way
from rewriter.proof.segments import open_part
from rewriter.proof.sessions import Session

Run = Callable[[Mapping[str, Array]], Mapping[str, Array]]

_EXACT_SLACK = 2e-14
"""Rounding of the float64 evaluation of the original's own nodes, relative to the unit of errors."""

_CLOSE = 1e-2
"""At infinity values are compared as limits: 0, infinite or not a number. Accuracy is measured at finite points."""


@dataclass(frozen=True)
class RegionProof:
    """What was measured; errors are over max(1, |f|), of a gate over max(1, |h|) |u|; ratios new over old.

    Attributes:
        exact_error: of the emitted nodes in float64; None where there is no float64 evaluation.
        error: in the model's type, worst over providers and optimisation levels.
        ratio: that over the original region's.
        failures: what did not hold.
        infinite: what the heads give at infinite pre-activations where the original gives something else.
        original_error: the original region's.
    """

    exact_error: float | None
    error: float
    ratio: float
    failures: tuple[str, ...]
    original_error: float
    infinite: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Regions:
    """The region in both models, and what it is tried on.

    Attributes:
        before: the original's.
        after: the rewritten model's.
        feeds: adversarial points, all finite.
        nans: pre-activations of NaN among others, at one token: a softmax over tokens spreads NaN to all of them.
        infinities: pre-activations of minus and plus infinity, likewise.
    """

    before: LoadedModel
    after: LoadedModel
    feeds: Mapping[str, Array]
    nans: Mapping[str, Array]
    infinities: Mapping[str, Array]


def regions_of(original: Side, rewritten: Side, claim: Claim) -> Regions:
    """The two regions of a claim."""
    before, after = (side.part(claim, claim.inputs, [claim.output]) for side in (original, rewritten))
    kind = original.views[claim.path].type_of(claim.gate)
    elem_type, rank = kind.elem_type or claim.elem_type, 3 if kind.rank is None else max(kind.rank, 1)
    points = adversarial(elem_type, claim.planned.crossings)
    finite = laid_out(points[np.isfinite(points)], rank, claim.axis, claim.longest)

    def one_token(*values: float) -> Mapping[str, Array]:
        shape = [len(values) if place == claim.axis % rank else 1 for place in range(rank)]
        return _feeds(claim, np.asarray(values).astype(numpy_dtype(elem_type)).reshape(shape))

    nans, infinities = one_token(1.0, np.nan, -1.0), one_token(-np.inf, np.inf)
    return Regions(before, after, _feeds(claim, finite), nans, infinities)


def prove_region(regions: Regions, claim: Claim, ways: Sequence[Way]) -> RegionProof:
    """Answer the questions for one claim."""
    feeds = regions.feeds
    inside = _inside(feeds, claim)
    exact = _exact(regions, claim)
    failures = list(exact.failures)
    error = worst = original_error = 0.0
    infinite: dict[str, None] = {}
    for way in ways:
        sessions = [
            open_part(part, way.provider, optimise=way.optimise, prepack=True)
            for part in (regions.before, regions.after)
        ]
        old, new = (session.run(feeds)[claim.output] for session in sessions)
        if new.shape != old.shape:
            failures.append(f"{claim.name}: the heads give shape {new.shape} instead of {old.shape} on {way}")
            continue
        right = old.astype(np.float64) if exact.truth is None else exact.truth
        target = right if exact.planned is None else exact.planned
        judged = (np.abs(right) <= largest_finite(claim.elem_type)) & inside
        units = unit(right, claim, feeds)
        old_error, new_error = (largest((gap(v, t) / units)[judged]) for v, t in ((old, right), (new, target)))
        floor = machine_epsilon(claim.elem_type)
        allowed = FACTOR * max(old_error, floor) + claim.rounding
        error, worst = max(error, new_error), max(worst, ratio(new_error, old_error, floor))
        original_error = max(original_error, old_error)
        if not new_error <= allowed:
            failures.append(
                f"{claim.name}: the heads' error {new_error:.3g} on {way} exceeds the allowed {allowed:.3g} = "
                f"{FACTOR:g} x {max(old_error, floor):.3g} (the original's) + {claim.rounding:.3g} (stated rounding)"
            )
        failures += _parity(regions, claim, old, new, [session.run for session in sessions], str(way))
        if not _same_overflow(old, new, right, claim, inside):
            failures.append(f"{claim.name}: infinite at other points than the original's on {way}")
        infinite |= dict.fromkeys(_at_infinity(regions, claim, sessions))
    return RegionProof(exact.error, error, worst, tuple(failures), original_error, tuple(infinite))


def unit(right: Array, claim: Claim, values: Mapping[str, Array]) -> Array:
    """What errors are measured in: max(1, |f|), of a gate h(g) u max(1, |h|) |u|. Never 0."""
    size = np.abs(right.astype(np.float64))
    if not claim.gated:
        return np.maximum(1.0, size)
    return np.maximum(np.maximum(np.abs(values[claim.value].astype(np.float64)), size), np.finfo(np.float32).tiny)


@dataclass(frozen=True, eq=False)
class _Exact:
    """The float64 evaluations of a region: the original's nodes, and the plan's numbers."""

    truth: Array | None
    planned: Array | None
    error: float | None
    failures: tuple[str, ...] = ()


def _exact(regions: Regions, claim: Claim) -> _Exact:
    feeds = regions.feeds
    try:
        references = [open_reference(part.proto, part.base_dir) for part in (regions.before, regions.after)]
        truth, rebuilt = (reference.run(feeds)[claim.output] for reference in references)
    except NoReference:
        return _Exact(None, None, None)
    if rebuilt.shape != truth.shape:
        return _Exact(None, None, None, (f"{claim.name}: the heads give shape {rebuilt.shape}, not {truth.shape}",))
    planned, rounding = evaluated(claim, feeds)
    judged = _inside(feeds, claim)
    units = unit(truth, claim, feeds)
    failures = []
    excess = (gap(planned, truth) - rounding) / units - claim.max_error
    off = largest((gap(planned, truth) / units)[judged])
    if largest(excess[judged]) > _EXACT_SLACK:
        failures.append(
            f"{claim.name}: the head program's error {off:.3g} exceeds the certified {claim.max_error:.3g}; this is a "
            "bug, please report it"
        )
    emitted = (gap(rebuilt, planned) - 2.0 * rounding) / units
    if largest(emitted[judged]) > _EXACT_SLACK:
        failures.append(
            f"{claim.name}: in float64 the heads are {largest((gap(rebuilt, planned) / units)[judged]):.3g} away from "
            f"their program, more than rounding explains"
        )
    failures += _parity(regions, claim, truth, rebuilt, [reference.run for reference in references], "float64")
    exact = largest((gap(rebuilt, truth) / units)[judged])
    return _Exact(truth, planned, exact, tuple(failures))


def evaluated(claim: Claim, values: Mapping[str, Array]) -> tuple[Array, Array]:
    """The plan's numbers at given pre-activations (and values), and what rounding may add, in float64."""
    y = values[claim.gate].astype(np.float64)
    z = values[claim.value].astype(np.float64) if claim.gated else None
    with np.errstate(all="ignore"):
        return claim.planned.evaluate(y, z), claim.planned.float64_rounding(y, z)


def _feeds(claim: Claim, points: Array) -> dict[str, Array]:
    """The points for the pre-activation; normal numbers for the value of a gated block."""
    feeds = {claim.gate: points}
    for other in claim.inputs[1:]:
        values = np.random.default_rng(0).normal(0.0, 2.0, points.size)
        feeds[other] = values.astype(points.dtype).reshape(points.shape)
    return feeds


def _inside(feeds: Mapping[str, Array], claim: Claim) -> Array:
    """The points that the claim is about: not the pre-activations beyond its domain."""
    return np.asarray(~(np.abs(feeds[claim.gate].astype(np.float64)) > claim.domain))


def _nan(values: Array) -> Array:
    return np.isnan(values.astype(np.float64))


def _nan_in(feeds: Mapping[str, Array]) -> Array:
    """The points at which an input is NaN."""
    return np.asarray(np.logical_or.reduce([_nan(values) for values in feeds.values()]))


def _parity(regions: Regions, claim: Claim, old: Array, new: Array, runs: Sequence[Run], where: str) -> list[str]:
    """NaN at the same points; where an input is NaN, NaN or what the original gives, the first of `runs`."""
    ends = [run(regions.nans)[claim.output] for run in runs]
    spread = (_nan(ends[0]) == _nan(ends[1])) | (_nan_in(regions.nans) & _nan(ends[1]))
    if np.array_equal(_nan(old), _nan(new)) and spread.all():
        return []
    return [f"{claim.name}: NaN at other points than the original's on {where}"]


def _same_overflow(old: Array, new: Array, target: Array, claim: Claim, inside: Array) -> bool:
    """Where the truth is beyond the type, what the original gives: the same infinity, or something finite."""
    beyond = (np.abs(target.astype(np.float64)) > largest_finite(claim.elem_type)) & inside
    old, new = (values.astype(np.float64)[beyond] for values in (old, new))
    return bool(np.all(~np.isinf(old) | (old == new)))


def _at_infinity(regions: Regions, claim: Claim, sessions: Sequence[Session]) -> list[str]:
    """Where the pre-activation is infinite and the heads give something else than the original, as text."""
    try:
        old, new = (
            session.run(regions.infinities)[claim.output].astype(np.float64).reshape(-1) for session in sessions
        )
    except ValidationError:
        return []
    points = regions.infinities[claim.gate].astype(np.float64).reshape(-1)
    with np.errstate(invalid="ignore"):
        near = np.isfinite(old) & (np.abs(new - old) <= _CLOSE * np.maximum(1, np.abs(old)))
        close = (np.isnan(old) & np.isnan(new)) | (old == new) | near
    return [
        f"{new[place]:g} instead of {old[place]:g} at {points[place]:g}"
        for place in range(points.size)
        if not close[place]
    ]
