"""Proof of the heads of a block that was replaced as a whole: there is no region left to try by itself.

Comes in: a claim with `heads`, the two models, and values that the block really sees. Goes out: `RegionProof`, as
of a region, against a float64 evaluation of the original:

1. from the block's inputs to the heads' outputs: in float64 within the certified error of the activation; in the
   model's own type as accurate as the original's activation. The inputs are real ones, and those scaled down and
   up, so that every part of the activation is met.
2. from the heads' outputs on, in float64: what the original makes of the same activations, whatever stands in the
   rows that are no tokens.

Together they bound what the block's output may be off by; without the second, an error in the output projection would
count as an error that the heads carry through.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx

from rewriter.graph.extract import cut
from rewriter.proof.claims import Claim, Side
from rewriter.proof.distance import FACTOR, Array, gap, largest, magnitude, ratio, relative_gap, setting
from rewriter.proof.float64 import NoReference, open_reference
from rewriter.proof.points import largest_finite, machine_epsilon
from rewriter.proof.regions import RegionProof
from rewriter.proof.roles import is_float
from rewriter.proof.sessions import open_session

Feeds = Mapping[str, Array]

_SCALES = (1.0, 0.0, 1e-6, 1e-2, 8.0, 1e3)
"""What real inputs are multiplied with."""

_EXACT_SLACK = 1e-11
"""Rounding of the float64 evaluations, linear operators included, relative to the largest value."""


def prove_heads(
    original: Side, rewritten: Side, claim: Claim, inputs: Sequence[Feeds], providers: Sequence[str]
) -> RegionProof:
    """Prove the heads of one block from its inputs; `inputs` are values of `block_needs`, one mapping per case."""
    if not inputs:
        return RegionProof(None, 0.0, 0.0, (f"{claim.name}: it has no inputs to be proved on",))
    cases = [_scaled(feeds, claim.block_inputs, scale) for scale in _SCALES for feeds in inputs]
    exact, failures = _exact(original, rewritten, claim, cases)
    error = worst = 0.0
    names = tuple(cases[0])
    before = original.part(claim, names, claim.inputs_and_output)
    after = rewritten.part(claim, names, [claim.heads])
    wide = None if exact is None else open_reference(before)
    floor = machine_epsilon(claim.elem_type)
    for provider in providers:
        for optimise in (True, False):
            old_session, new_session = (open_session(part, provider, optimise=optimise) for part in (before, after))
            for case in cases:
                old = old_session.run(_wanted(case, before))
                new = _tokens(new_session.run(_wanted(case, after))[claim.heads], old[claim.output])
                truth = old if wide is None else wide.run(_wanted(case, before))
                target = truth[claim.output]
                judged = np.abs(target.astype(np.float64)) <= largest_finite(claim.elem_type)
                old_error = largest(relative_gap(old[claim.output], target)[judged])
                new_error = largest(relative_gap(new, target)[judged])
                allowed = FACTOR * max(old_error, floor) + _certified(claim, truth) + claim.rounding
                error, worst = max(error, new_error), max(worst, ratio(new_error, old_error, floor))
                if not new_error <= allowed:
                    where = setting(provider, optimise=optimise)
                    failures.append(
                        f"{claim.name}: the heads are off by {new_error:.3g} on {where}, allowed are {allowed:.3g}"
                    )
    return RegionProof(exact, error, worst, tuple(dict.fromkeys(failures)))


def _exact(original: Side, rewritten: Side, claim: Claim, cases: Sequence[Feeds]) -> tuple[float | None, list[str]]:
    """How far the heads are from the truth in float64, and what is wrong with that or with what follows them."""
    view = rewritten.views[claim.path]
    rest = cut(view, [claim.heads], claim.block_outputs)
    names = tuple(cases[0])
    given = [name for name in rest.inputs if name != claim.heads]
    computed = [name for name in given if name not in names]
    outputs = [*claim.inputs_and_output, *claim.block_outputs]
    try:
        before = original.part(claim, names, outputs)
        front = rewritten.part(claim, names, [claim.heads, *computed])
        whole, heads = open_reference(before), open_reference(front)
        behind = open_reference(rewritten.part(claim, rest.inputs, claim.block_outputs))
        worst, failures = 0.0, []
        for case in cases:
            truth = whole.run(_wanted(case, before))
            made = heads.run(_wanted(case, front))
            error = largest(relative_gap(_tokens(made[claim.heads], truth[claim.output]), truth[claim.output]))
            worst = max(worst, error)
            if error > _certified(claim, truth) + _EXACT_SLACK * max(1.0, _magnitude(truth, claim)):
                failures.append(
                    f"{claim.name}: in float64 the heads are off by {error:.3g}, certified are {claim.max_error:.3g}"
                )
            feeds = {**case, **made, claim.heads: _as_heads(truth[claim.output], made[claim.heads])}
            result = behind.run({name: feeds[name] for name in rest.inputs})
            for name in claim.block_outputs:
                off = largest(gap(result[name], truth[name]))
                if off > _EXACT_SLACK * max(1.0, magnitude(truth[name])):
                    failures.append(
                        f"{claim.name}: in float64 the heads' outputs are projected to something else, off by {off:.3g}"
                    )
    except NoReference:
        return None, []
    return worst, failures


def _magnitude(truth: Feeds, claim: Claim) -> float:
    return max(magnitude(truth[name]) for name in claim.inputs_and_output)


def _certified(claim: Claim, truth: Feeds) -> float:
    """The certified error in output units: a gate's is multiplied with the value."""
    return claim.max_error * max((magnitude(truth[name]) for name in claim.inputs[1:]), default=1.0)


def _scaled(feeds: Feeds, names: Sequence[str], scale: float) -> Feeds:
    """The block's inputs times a number; shapes and the like as they are."""
    if scale == 1.0:
        return feeds
    with np.errstate(over="ignore"):
        return {
            name: (value * scale).astype(value.dtype) if name in names and is_float(value.dtype) else value
            for name, value in feeds.items()
        }


def _wanted(case: Feeds, part: onnx.ModelProto) -> dict[str, Array]:
    names = {value.name for value in part.graph.input}
    return {name: value for name, value in case.items() if name in names}


def _tokens(heads: Array, like: Array) -> Array:
    """The rows of [batch, rows, channels] that are tokens, in the shape of the original's activation."""
    tokens = like.size // (heads.shape[0] * heads.shape[2])
    return heads[:, :tokens].reshape(like.shape)


def _as_heads(activation: Array, like: Array) -> Array:
    """The original's activation as heads' outputs; other numbers in the rows that are no tokens."""
    values = np.random.default_rng(0).normal(0.0, 1.0, like.shape)
    tokens = activation.size // (like.shape[0] * like.shape[2])
    values[:, :tokens] = activation.reshape(like.shape[0], tokens, like.shape[2])
    return values
