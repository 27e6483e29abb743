"""Proof of a replaced region by itself, on adversarial points.

Comes in: a claim and the two models. Goes out: `RegionProof`. Three questions, against a float64 evaluation of the
original's own nodes:

1. exact: in float64, does the new region compute the original function within the certified error?
2. in the model's own type, is the new region as accurate as the old one?
3. parity: NaN where the original gives NaN, and nowhere else; but NaN in may give NaN out where the original
   swallows it (`Where(y > 0, y, 0)` does). Infinite where the original overflows.

What happens at infinite pre-activations is measured and reported, not judged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rewriter.files.load import LoadedModel
from rewriter.proof.claims import Claim, Side
from rewriter.proof.distance import FACTOR, Array, largest, magnitude, ratio, relative_gap
from rewriter.proof.float64 import NoReference, open_reference
from rewriter.proof.points import adversarial, largest_finite, machine_epsilon, numpy_dtype
from rewriter.proof.runs import Way
from rewriter.proof.segments import open_part
from rewriter.proof.sessions import Session

_EXACT_SLACK = 1e-12
"""Rounding of the float64 evaluations themselves, relative to max(1, |f|)."""

_CLOSE = 1e-2
"""At infinity values are compared as limits: 0, infinite or not a number. Accuracy is measured at finite points."""


@dataclass(frozen=True)
class RegionProof:
    """What was measured; errors are over max(1, |f|), ratios new over old.

    Attributes:
        exact_error: in float64; None where there is no float64 evaluation.
        error: in the model's type, worst over providers and optimisation levels.
        ratio: that over the original region's.
        failures: what did not hold.
        infinite: what the heads give at infinite pre-activations where the original gives something else.
    """

    exact_error: float | None
    error: float
    ratio: float
    failures: tuple[str, ...]
    infinite: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Regions:
    """The region in both models, and what it is tried on.

    Attributes:
        before: the original's.
        after: the rewritten model's.
        feeds: adversarial points.
        infinities: pre-activations of minus and plus infinity.
    """

    before: LoadedModel
    after: LoadedModel
    feeds: Mapping[str, Array]
    infinities: Mapping[str, Array]


def regions_of(original: Side, rewritten: Side, claim: Claim) -> Regions:
    """The two regions of a claim."""
    before, after = (side.part(claim, claim.inputs, [claim.output]) for side in (original, rewritten))
    view = original.views[claim.path]
    elem_type = view.type_of(claim.inputs[0]).elem_type or claim.elem_type
    rank = view.type_of(claim.inputs[0]).rank or 1
    points, edge = (
        _feeds(claim, values.reshape((1,) * (rank - 1) + (-1,)))
        for values in (adversarial(elem_type), np.asarray([-np.inf, np.inf]).astype(numpy_dtype(elem_type)))
    )
    return Regions(before, after, points, edge)


def prove_region(regions: Regions, claim: Claim, ways: Sequence[Way]) -> RegionProof:
    """Answer the three questions for one claim."""
    feeds = regions.feeds
    inside = _inside(feeds, claim)
    truth, exact, failures = _exact(regions, claim)
    error = worst = 0.0
    infinite: dict[str, None] = {}
    for way in ways:
        sessions = [
            open_part(part, way.provider, optimise=way.optimise, prepack=True)
            for part in (regions.before, regions.after)
        ]
        old, new = (session.run(feeds)[claim.output] for session in sessions)
        target = old if truth is None else truth
        judged = (np.abs(target.astype(np.float64)) <= largest_finite(claim.elem_type)) & ~_nan_in(feeds) & inside
        old_error = largest(relative_gap(old, target)[judged])
        new_error = largest(relative_gap(new, target)[judged])
        floor = machine_epsilon(claim.elem_type)
        allowed = FACTOR * max(old_error, floor) + _certified(claim, feeds) + claim.rounding
        error, worst = max(error, new_error), max(worst, ratio(new_error, old_error, floor))
        if not new_error <= allowed:
            failures.append(f"{claim.name}: the heads are off by {new_error:.3g} on {way}, allowed are {allowed:.3g}")
        if not _parity(old, new, feeds):
            failures.append(f"{claim.name}: NaN at other points than the original's on {way}")
        if not _same_overflow(old, new, target, claim):
            failures.append(f"{claim.name}: infinite at other points than the original's on {way}")
        infinite |= dict.fromkeys(_at_infinity(regions, claim, sessions))
    return RegionProof(exact, error, worst, tuple(failures), tuple(infinite))


def _exact(regions: Regions, claim: Claim) -> tuple[Array | None, float | None, list[str]]:
    """The truth, how far the new region is from it in float64, and what is wrong with that."""
    feeds = regions.feeds
    try:
        truth, rebuilt = (
            open_reference(part.proto, part.base_dir).run(feeds)[claim.output]
            for part in (regions.before, regions.after)
        )
    except NoReference:
        return None, None, []
    failures = []
    exact = largest(relative_gap(rebuilt, truth)[~_nan_in(feeds) & _inside(feeds, claim)])
    if exact > _certified(claim, feeds) + claim.float64_rounding + _EXACT_SLACK:
        failures.append(
            f"{claim.name}: in float64 the heads are off by {exact:.3g}, certified are {claim.max_error:.3g}"
        )
    if not _parity(truth, rebuilt, feeds):
        failures.append(f"{claim.name}: in float64 the heads give NaN at other points than the original")
    return truth, exact, failures


def _feeds(claim: Claim, points: Array) -> dict[str, Array]:
    """The points for the pre-activation; normal numbers for the value of a gated block."""
    feeds = {claim.inputs[0]: points}
    for other in claim.inputs[1:]:
        values = np.random.default_rng(0).normal(0.0, 2.0, points.size)
        feeds[other] = values.astype(points.dtype).reshape(points.shape)
    return feeds


def _inside(feeds: Mapping[str, Array], claim: Claim) -> Array:
    """The points that the claim is about: NaN is among them, pre-activations beyond the domain are not."""
    return np.asarray(~(np.abs(feeds[claim.inputs[0]].astype(np.float64)) > claim.domain))


def _certified(claim: Claim, feeds: Mapping[str, Array]) -> float:
    """The certified error in output units: a gate's is multiplied with the value."""
    return claim.max_error * max((magnitude(feeds[name]) for name in claim.inputs[1:]), default=1.0)


def _nan(values: Array) -> Array:
    return np.isnan(values.astype(np.float64))


def _nan_in(feeds: Mapping[str, Array]) -> Array:
    """The points at which an input is NaN."""
    return np.asarray(np.logical_or.reduce([_nan(values) for values in feeds.values()]))


def _parity(old: Array, new: Array, feeds: Mapping[str, Array]) -> bool:
    """NaN at the same points; where an input is NaN, NaN or what the original gives."""
    same = (_nan(old) == _nan(new)) | (_nan_in(feeds) & _nan(new))
    return bool(same.all())


def _same_overflow(old: Array, new: Array, target: Array, claim: Claim) -> bool:
    """Where the truth is beyond the type, what the original gives: the same infinity, or something finite."""
    beyond = np.abs(target.astype(np.float64)) > largest_finite(claim.elem_type)
    old, new = (values.astype(np.float64)[beyond] for values in (old, new))
    return bool(np.all(~np.isinf(old) | (old == new)))


def _at_infinity(regions: Regions, claim: Claim, sessions: Sequence[Session]) -> list[str]:
    """Where the pre-activation is infinite and the heads give something else than the original, as text."""
    old, new = (session.run(regions.infinities)[claim.output].astype(np.float64).reshape(-1) for session in sessions)
    points = regions.infinities[claim.inputs[0]].astype(np.float64).reshape(-1)
    with np.errstate(invalid="ignore"):
        close = (
            (np.isnan(old) & np.isnan(new)) | (old == new) | (np.abs(new - old) <= _CLOSE * np.maximum(1, np.abs(old)))
        )
    return [
        f"{new[place]:g} instead of {old[place]:g} at {points[place]:g}"
        for place in range(points.size)
        if not close[place]
    ]
