"""Proof of a replaced region by itself, on adversarial points.

Comes in: a claim and the two models. Goes out: `RegionProof`. Three questions, against a float64 evaluation of the
original's own nodes:

1. exact: in float64, does the new region compute the original function within the certified error?
2. in the model's own type, is the new region as accurate as the old one?
3. parity: NaN where the original gives NaN, and nowhere else; but NaN in may give NaN out where the original
   swallows it (`Where(y > 0, y, 0)` does).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from rewriter.graph.view import GraphView
from rewriter.proof.claims import Claim, Side
from rewriter.proof.distance import FACTOR, Array, largest, magnitude, ratio, relative_gap, setting
from rewriter.proof.float64 import NoReference, open_reference
from rewriter.proof.points import adversarial, largest_finite, machine_epsilon
from rewriter.proof.sessions import open_session

_EXACT_SLACK = 1e-12
"""Rounding of the float64 evaluations themselves, relative to max(1, |f|)."""

_HALF = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)


@dataclass(frozen=True)
class RegionProof:
    """What was measured; errors are over max(1, |f|), ratios new over old.

    Attributes:
        exact_error: in float64; None where there is no float64 evaluation.
        error: in the model's type, worst over providers and optimisation levels.
        ratio: that over the original region's.
        failures: what did not hold.
    """

    exact_error: float | None
    error: float
    ratio: float
    failures: tuple[str, ...]


def prove_region(original: Side, rewritten: Side, claim: Claim, providers: Sequence[str]) -> RegionProof:
    """Answer the three questions for one claim."""
    before = original.part(claim, claim.inputs, [claim.output])
    after = rewritten.part(claim, claim.inputs, [claim.output])
    feeds = _feeds(original.views[claim.path], claim)
    truth, exact, failures = _exact(before, after, feeds, claim)
    error = worst = 0.0
    for provider in providers:
        for optimise in (True, False):
            old = open_session(before, provider, optimise=optimise).run(feeds)[claim.output]
            new = open_session(after, provider, optimise=optimise).run(feeds)[claim.output]
            target = old if truth is None else truth
            judged = (np.abs(target.astype(np.float64)) <= largest_finite(claim.elem_type)) & ~_nan_in(feeds)
            old_error = largest(relative_gap(old, target)[judged])
            new_error = largest(relative_gap(new, target)[judged])
            floor = machine_epsilon(claim.elem_type)
            allowed = FACTOR * max(old_error, floor) + _certified(claim, feeds) + claim.rounding
            error, worst = max(error, new_error), max(worst, ratio(new_error, old_error, floor))
            where = setting(provider, optimise=optimise)
            if not new_error <= allowed:
                failures.append(
                    f"{claim.name}: the heads are off by {new_error:.3g} on {where}, allowed are {allowed:.3g}"
                )
            if not _parity(old, new, feeds):
                failures.append(f"{claim.name}: NaN at other points than the original's on {where}")
    return RegionProof(exact, error, worst, tuple(failures))


def _exact(
    before: onnx.ModelProto, after: onnx.ModelProto, feeds: Mapping[str, Array], claim: Claim
) -> tuple[Array | None, float | None, list[str]]:
    """The truth, how far the new region is from it in float64, and what is wrong with that."""
    try:
        truth = open_reference(before).run(feeds)[claim.output]
        rebuilt = open_reference(after).run(feeds)[claim.output]
    except NoReference:
        return None, None, []
    failures = []
    exact = largest(relative_gap(rebuilt, truth)[~_nan_in(feeds)])
    if exact > _certified(claim, feeds) + _EXACT_SLACK:
        failures.append(
            f"{claim.name}: in float64 the heads are off by {exact:.3g}, certified are {claim.max_error:.3g}"
        )
    if not _parity(truth, rebuilt, feeds):
        failures.append(f"{claim.name}: in float64 the heads give NaN at other points than the original")
    return truth, exact, failures


def _feeds(view: GraphView, claim: Claim) -> dict[str, Array]:
    """The points for the pre-activation, along its channels; normal numbers for the value of a gated block."""
    points = adversarial(view.type_of(claim.inputs[0]).elem_type or claim.elem_type)
    rank = view.type_of(claim.inputs[0]).rank or 1
    shape = [1] * rank
    shape[claim.axis if -rank <= claim.axis < 0 else -1] = -1
    feeds = {claim.inputs[0]: points.reshape(shape)}
    for other in claim.inputs[1:]:
        values = np.random.default_rng(0).normal(0.0, 2.0, points.size)
        feeds[other] = values.astype(points.dtype).reshape(shape)
    return feeds


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
