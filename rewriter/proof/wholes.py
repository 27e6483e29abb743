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
from dataclasses import dataclass

import numpy as np

from rewriter.files.load import LoadedModel
from rewriter.graph.extract import cut
from rewriter.proof.claims import Claim, Side
from rewriter.proof.distance import FACTOR, Array, gap, largest, magnitude, ratio, relative_gap
from rewriter.proof.float64 import NoReference, Reference, open_reference
from rewriter.proof.points import largest_finite, machine_epsilon
from rewriter.proof.regions import RegionProof
from rewriter.proof.roles import is_float
from rewriter.proof.runs import Way
from rewriter.proof.segments import open_part

Feeds = Mapping[str, Array]

_SCALES = (1.0, 0.0, 1e-6, 1e-2, 8.0, 1e3)
"""What real inputs are multiplied with."""

_EXACT_SLACK = 1e-11
"""Rounding of the float64 evaluations, linear operators included, relative to the largest value."""


@dataclass(frozen=True, eq=False)
class Heads:
    """What the proof of heads needs that replaced a whole block; it can be pickled.

    Attributes:
        before: the original, from the block's inputs to the ends of its region and of the block.
        front: the rewritten model, from the block's inputs to what the heads write, and what else `behind` reads.
        behind: the rewritten model from there on.
        cases: the block's inputs, real ones and scaled ones.
    """

    before: LoadedModel
    front: LoadedModel
    behind: LoadedModel
    cases: tuple[Feeds, ...]


def heads_of(original: Side, rewritten: Side, claim: Claim, inputs: Sequence[Feeds]) -> Heads:
    """The parts of a block; `inputs` are values of `block_needs`, one mapping per case."""
    cases = tuple(_scaled(feeds, claim.block_inputs, scale) for scale in _SCALES for feeds in inputs)
    names = tuple(cases[0]) if cases else claim.block_inputs
    rest = cut(rewritten.views[claim.path], [claim.heads], claim.block_outputs)
    computed = [name for name in rest.inputs if name not in (*names, claim.heads)]
    return Heads(
        before=original.part(claim, names, [*claim.inputs_and_output, *claim.block_outputs]),
        front=rewritten.part(claim, names, [claim.heads, *computed]),
        behind=rewritten.part(claim, rest.inputs, claim.block_outputs),
        cases=cases,
    )


def prove_heads(heads: Heads, claim: Claim, ways: Sequence[Way]) -> RegionProof:
    """Prove the heads of one block from its inputs."""
    if not heads.cases:
        return RegionProof(None, 0.0, 0.0, (f"{claim.name}: it has no inputs to be proved on",), 0.0)
    exact, failures, wide = _exact(heads, claim)
    error = worst = original_error = 0.0
    floor = machine_epsilon(claim.elem_type)
    for way in ways:
        old_session, new_session = (
            open_part(part, way.provider, optimise=way.optimise, prepack=True) for part in (heads.before, heads.front)
        )
        for case in heads.cases:
            old = old_session.run(_wanted(case, heads.before))
            new = _tokens(new_session.run(_wanted(case, heads.front))[claim.heads], old[claim.output])
            truth = old if wide is None else wide.run(_wanted(case, heads.before))
            target = truth[claim.output]
            judged = (np.abs(target.astype(np.float64)) <= largest_finite(claim.elem_type)) & _inside(truth, claim)
            old_error = largest(relative_gap(old[claim.output], target)[judged])
            new_error = largest(relative_gap(new, target)[judged])
            allowed = FACTOR * max(old_error, floor) + _certified(claim, truth) + claim.rounding
            error, worst = max(error, new_error), max(worst, ratio(new_error, old_error, floor))
            original_error = max(original_error, old_error)
            if not new_error <= allowed:
                failures.append(
                    f"{claim.name}: the heads are off by {new_error:.3g} on {way}, allowed are {allowed:.3g}"
                )
    return RegionProof(exact, error, worst, tuple(dict.fromkeys(failures)), original_error)


def _exact(heads: Heads, claim: Claim) -> tuple[float | None, list[str], Reference | None]:
    """How far the heads are from the truth in float64, what is wrong with that or with what follows; the truth."""
    try:
        whole, front, behind = (
            open_reference(part.proto, part.base_dir) for part in (heads.before, heads.front, heads.behind)
        )
        worst, failures = 0.0, []
        for case in heads.cases:
            truth = whole.run(_wanted(case, heads.before))
            made = front.run(_wanted(case, heads.front))
            distance = relative_gap(_tokens(made[claim.heads], truth[claim.output]), truth[claim.output])
            error = largest(distance[_inside(truth, claim)])
            worst = max(worst, error)
            rounding = claim.float64_rounding + _EXACT_SLACK * max(1.0, _magnitude(truth, claim))
            if error > _certified(claim, truth) + rounding:
                failures.append(
                    f"{claim.name}: in float64 the heads are off by {error:.3g}, certified are {claim.max_error:.3g}"
                )
            feeds = {**case, **made, claim.heads: _as_heads(truth[claim.output], made[claim.heads])}
            result = behind.run(_wanted(feeds, heads.behind))
            for name in claim.block_outputs:
                off = largest(gap(result[name], truth[name]))
                if off > _EXACT_SLACK * max(1.0, magnitude(truth[name])):
                    failures.append(
                        f"{claim.name}: in float64 the heads' outputs are projected to something else, off by {off:.3g}"
                    )
    except NoReference:
        return None, [], None
    return worst, failures, whole


def _inside(truth: Feeds, claim: Claim) -> Array:
    """Where the claim holds: pre-activations beyond its domain are judged by nobody."""
    gate = np.abs(truth[claim.inputs[0]].astype(np.float64))
    return np.asarray(np.broadcast_to(~(gate > claim.domain), truth[claim.output].shape))


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


def _wanted(case: Feeds, part: LoadedModel) -> dict[str, Array]:
    names = {value.name for value in part.proto.graph.input}
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
