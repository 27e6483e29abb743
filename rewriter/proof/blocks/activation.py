"""Prove a replaced region in isolation, on adversarial points laid out over batches and tokens.

The proof answers four questions:

1. Certificate: is the plan within the certified error of the original's own nodes? Both are evaluated in float64.
2. Emission: do the emitted nodes, evaluated in float64, compute the plan up to rounding?
3. Accuracy: is the new region as accurate as the old one in the model's own type?
4. Parity: is the result NaN exactly where the original's is, and infinite where the original overflows? A NaN input may
   give NaN where the original swallows it, as `Where(y > 0, y, 0)` does.

The behaviour at infinite pre-activations is reported but not judged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rewriter.arrays import Array
from rewriter.errors import ValidationError
from rewriter.files.load import LoadedModel
from rewriter.ort.sessions import Session
from rewriter.proof.blocks.adversarial_points import adversarial, laid_out, largest_finite, machine_epsilon, numpy_dtype
from rewriter.proof.claims import Claim, Side
from rewriter.proof.distance import FACTOR, gap, in_pieces, largest, ratio
from rewriter.proof.reference.float64 import NoReference, open_reference
from rewriter.proof.run.segmented import open_part
from rewriter.proof.run.whole import Way

Run = Callable[[Mapping[str, Array]], Mapping[str, Array]]

_EXACT_SLACK = 2e-14
"""Allowance for the rounding of the original's own nodes in float64 (about 90 eps), relative to the unit of errors. The
plan states its own rounding (`Planned.float64_rounding`)."""

_CLOSE = 1e-2
"""Relative tolerance at infinity, where only the limit matters (0, infinite or NaN); accuracy is measured elsewhere."""


@dataclass(frozen=True)
class RegionProof:
    """Measurements of one region. Errors are relative to max(1, |f|); of a gated block, to max(1, |h|) |u|.

    Attributes:
        exact_error: error of the emitted nodes in float64; None where there is no float64 evaluation.
        error: error in the model's type, the worst over providers and optimisation levels.
        ratio: `error` over the original region's error, the worst likewise.
        failures: what did not hold.
        infinite: results of the heads at infinite pre-activations that differ from the original's.
        original_error: the original region's error, the worst likewise.
    """

    exact_error: float | None
    error: float
    ratio: float
    failures: tuple[str, ...]
    original_error: float
    infinite: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Regions:
    """The region in both models, and the points that it is evaluated at.

    Attributes:
        before: the original's region.
        after: the rewritten model's region.
        feeds: adversarial points, all finite.
        nans: some NaN pre-activations, at a single token: a softmax over tokens spreads NaN to all of them.
        infinities: pre-activations of minus and plus infinity, likewise.
    """

    before: LoadedModel
    after: LoadedModel
    feeds: Mapping[str, Array]
    nans: Mapping[str, Array]
    infinities: Mapping[str, Array]


def regions_of(original: Side, rewritten: Side, claim: Claim) -> Regions:
    """The region of a claim in both models, with its points."""
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
    """Prove one region, in every way. Raises ValidationError where onnxruntime cannot load or run it."""
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
        # The old region is measured against the truth and the new one against the plan. The plan's distance from the
        # truth is judged once, in float64, so that a certified error never serves as an allowance for rounding.
        right = old.astype(np.float64) if exact.truth is None else exact.truth
        target = right if exact.planned is None else exact.planned
        # Beyond the type's range, only parity and overflow mean anything.
        judged = (np.abs(right) <= largest_finite(claim.elem_type)) & inside
        units = unit(right, claim, feeds)
        old_error, new_error = largest_share(old, right, units, judged), largest_share(new, target, units, judged)
        floor = machine_epsilon(claim.elem_type)
        error, worst = max(error, new_error), max(worst, ratio(new_error, old_error, floor))
        original_error = max(original_error, old_error)
        failures += excess(claim, new_error, max(old_error, floor), way)
        failures += _parity(regions, claim, old, new, [session.run for session in sessions], str(way))
        if not _same_overflow(old, new, right, claim, inside):
            failures.append(f"{claim.name}: infinite at other points than in the original on {way}")
        infinite |= dict.fromkeys(_at_infinity(regions, claim, sessions))
    return RegionProof(exact.error, error, worst, tuple(failures), original_error, tuple(infinite))


def largest_share(values: Array, truth: Array, units: Array, judged: Array) -> float:
    """The largest distance from `truth` among the entries that are judged, in `units`."""
    with np.errstate(invalid="ignore"):  # infinite units: those entries are not judged
        return largest((gap(values, truth) / units)[judged])


def excess(claim: Claim, error: float, rounding: float, way: Way) -> list[str]:
    """The failure if the error of a block's heads exceeds its allowance, given the original's rounding."""
    allowed = FACTOR * rounding + claim.rounding
    text = (
        f"{claim.name}: the heads' error {error:.3g} on {way} exceeds the allowed {allowed:.3g} = "
        f"{FACTOR:g} x {rounding:.3g} (the original's) + {claim.rounding:.3g} (stated rounding)"
    )
    return [] if error <= allowed else [text]


def unit(right: Array, claim: Claim, values: Mapping[str, Array]) -> Array:
    """The unit of errors: max(1, |f|); for a gate h(g) u, max(1, |h|) |u|. Never 0."""
    size = np.abs(right.astype(np.float64))
    if not claim.gated:
        return np.maximum(1.0, size)
    return np.maximum(np.maximum(np.abs(values[claim.value].astype(np.float64)), size), np.finfo(np.float32).tiny)


def apart(regions: Regions, claim: Claim) -> float:
    """How far the heads are from the plan of a claim in float64, in the unit of errors.

    Infinite if that is more than rounding explains; 0 where float64 cannot tell.
    """
    exact = _exact(regions, claim)
    if exact.emitted is None or exact.planned is None:
        return 0.0 if exact.emitted is None else float("inf")
    return exact.apart if exact.emitted <= _EXACT_SLACK else float("inf")


@dataclass(frozen=True, eq=False)
class _Exact:
    """Float64 evaluations of a region: of the original's nodes (`truth`) and of the plan.

    `apart` is the distance of the emitted nodes from the plan, in the unit of errors, and `emitted` what of it rounding
    does not explain.
    """

    truth: Array | None
    planned: Array | None
    error: float | None
    failures: tuple[str, ...] = ()
    emitted: float | None = None
    apart: float = 0.0


def _exact(regions: Regions, claim: Claim) -> _Exact:
    feeds = regions.feeds
    try:
        references = [open_reference(part.proto, part.base_dir) for part in (regions.before, regions.after)]
        truth, rebuilt = (reference.run(feeds)[claim.output] for reference in references)
    except NoReference:
        return _Exact(None, None, None)
    if rebuilt.shape != truth.shape:
        reason = f"{claim.name}: the heads give shape {rebuilt.shape}, not {truth.shape}"
        return _Exact(None, None, None, (reason,), float("inf"))
    planned, rounding = evaluated(claim, feeds)
    # Where the truth overflows even float64, or is NaN, only parity means anything.
    judged = _inside(feeds, claim) & np.isfinite(truth)
    units = np.where(judged, unit(truth, claim, feeds), 1.0)
    rounding = np.where(judged, rounding, 0.0)
    failures = []
    # The certificate bounds the program in exact arithmetic; evaluating it rounds once more.
    excess = (gap(planned, truth) - rounding) / units - claim.max_error
    off = largest((gap(planned, truth) / units)[judged])
    if largest(excess[judged]) > _EXACT_SLACK:
        failures.append(
            f"{claim.name}: the head program's error {off:.3g} exceeds the certified {claim.max_error:.3g}; this is a "
            "bug, please report it"
        )
    # Twice, because either side may be that far from exact arithmetic.
    emitted = largest(((gap(rebuilt, planned) - 2.0 * rounding) / units)[judged])
    distance = largest((gap(rebuilt, planned) / units)[judged])
    if emitted > _EXACT_SLACK:
        failures.append(
            f"{claim.name}: in float64 the heads differ from their program by {distance:.3g}, more than rounding "
            "explains"
        )
    failures += _parity(regions, claim, truth, rebuilt, [reference.run for reference in references], "float64")
    exact = largest((gap(rebuilt, truth) / units)[judged])
    return _Exact(truth, planned, exact, tuple(failures), emitted, distance)


def evaluated(claim: Claim, values: Mapping[str, Array]) -> tuple[Array, Array]:
    """The plan at given pre-activations (and values), and a bound on its rounding, both in float64."""
    y = values[claim.gate].astype(np.float64)
    z = values[claim.value].astype(np.float64) if claim.gated else None
    with np.errstate(all="ignore"):
        return in_pieces(claim.planned.evaluate, y, z), in_pieces(claim.planned.float64_rounding, y, z)


def _feeds(claim: Claim, points: Array) -> dict[str, Array]:
    """The points as pre-activations; normally distributed values for a gated block."""
    feeds = {claim.gate: points}
    for other in claim.inputs[1:]:
        values = np.random.default_rng(0).normal(0.0, 2.0, points.size)
        feeds[other] = values.astype(points.dtype).reshape(points.shape)
    return feeds


def _inside(feeds: Mapping[str, Array], claim: Claim) -> Array:
    """Mask of the points in the claim's domain. Written so that NaN counts as inside."""
    return np.asarray(~(np.abs(feeds[claim.gate].astype(np.float64)) > claim.domain))


def _nan(values: Array) -> Array:
    return np.isnan(values.astype(np.float64))


def _nan_in(feeds: Mapping[str, Array]) -> Array:
    """Mask of the points at which an input is NaN."""
    return np.asarray(np.logical_or.reduce([_nan(values) for values in feeds.values()]))


def _parity(regions: Regions, claim: Claim, old: Array, new: Array, runs: Sequence[Run], where: str) -> list[str]:
    """Check that NaN occurs at the same points; where an input is NaN, the rewritten region may give NaN too.

    `runs` evaluate the original's region and the rewritten one.
    """
    ends = [run(regions.nans)[claim.output] for run in runs]
    spread = (_nan(ends[0]) == _nan(ends[1])) | (_nan_in(regions.nans) & _nan(ends[1]))
    if np.array_equal(_nan(old), _nan(new)) and spread.all():
        return []
    return [f"{claim.name}: NaN at other points than in the original on {where}"]


def _same_overflow(old: Array, new: Array, target: Array, claim: Claim, inside: Array) -> bool:
    """Whether the new region agrees with every infinity of the old one where the truth exceeds the type's range.

    Where the old region gives something finite there (an intermediate saturates), nothing is asked.
    """
    beyond = (np.abs(target.astype(np.float64)) > largest_finite(claim.elem_type)) & inside
    old, new = (values.astype(np.float64)[beyond] for values in (old, new))
    return bool(np.all(~np.isinf(old) | (old == new)))


def _at_infinity(regions: Regions, claim: Claim, sessions: Sequence[Session]) -> list[str]:
    """Results of the heads at infinite pre-activations that differ from the original's, as text."""
    try:
        old, new = (session.run(regions.infinities)[claim.output].astype(np.float64).ravel() for session in sessions)
    except ValidationError:
        return []
    points = regions.infinities[claim.gate].astype(np.float64).ravel()
    with np.errstate(invalid="ignore"):
        near = np.isfinite(old) & (np.abs(new - old) <= _CLOSE * np.maximum(1, np.abs(old)))
        close = (np.isnan(old) & np.isnan(new)) | (old == new) | near
    return [
        f"{new[place]:g} instead of {old[place]:g} at {points[place]:g}"
        for place in range(points.size)
        if not close[place]
    ]
