"""Prove the heads of a block that was replaced as a whole, so that there is no region left to prove in isolation.

The measure is the original in float64. The inputs are those that the block receives in the model, the same scaled down
and up so that every part of the activation is exercised, and spread ones (`rewriter.proof.blocks.spread`).

1. From the block's inputs to the heads' outputs: the plan is within the certified error of the original's activation,
   and the emitted heads equal the plan up to rounding, in float64 and in the model's own type.
2. From the heads' outputs on, in float64: the block computes what the original does from the same activations, whatever
   the rows hold that are not tokens (bias tokens).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rewriter.arrays import Array
from rewriter.files.load import LoadedModel
from rewriter.graph.extract import cut
from rewriter.proof.blocks.activation import RegionProof, evaluated, excess, largest_share, unit
from rewriter.proof.blocks.adversarial_points import largest_finite, machine_epsilon
from rewriter.proof.blocks.spread import accepted, spread, wanted
from rewriter.proof.claims import Claim, Side
from rewriter.proof.distance import gap, largest, magnitude, ratio
from rewriter.proof.inputs.roles import is_float
from rewriter.proof.reference.float64 import NoReference, open_reference
from rewriter.proof.run.segmented import open_part
from rewriter.proof.run.whole import Way

Feeds = Mapping[str, Array]
Run = Callable[[Feeds], dict[str, Array]]

_SCALES = (1.0, 0.0, 1e-6, 1e-2, 8.0, 1e3)
"""Factors that real inputs are multiplied by; with 0, only the biases act."""

_FEW_SCALES = (1.0, 8.0)
"""The same for spread inputs."""

_EXACT_SLACK = 1e-12
"""Allowance for the rounding of linear operators in float64, relative to the largest value that they add up."""


@dataclass(frozen=True, eq=False)
class Heads:
    """What the proof needs of a block that was replaced as a whole; it can be pickled.

    Attributes:
        before: the original, from the block's inputs to the ends of its region and of the block.
        front: the rewritten model, from the block's inputs to the heads' output and what else `behind` reads.
        behind: the rewritten model, from there to the block's outputs.
        cases: the block's inputs: real, scaled, and spread.
    """

    before: LoadedModel
    front: LoadedModel
    behind: LoadedModel
    cases: tuple[Feeds, ...]


def heads_of(original: Side, rewritten: Side, claim: Claim, inputs: Sequence[Feeds]) -> Heads:
    """Cut the parts out; `inputs` are values of the tensors in `block_needs`, one mapping per case."""
    names = tuple(inputs[0]) if inputs else claim.block_inputs
    before = original.part(claim, names, [*claim.inputs_and_output, *claim.block_outputs])
    further = [case.feeds for case in accepted(before, spread(claim, inputs)[:1])]
    cases = tuple(_scaled(feeds, claim.block_inputs, scale) for scale in _SCALES for feeds in inputs)
    cases += tuple(_scaled(feeds, claim.block_inputs, scale) for scale in _FEW_SCALES for feeds in further)
    # The way out may read further tensors of the front, such as the number of tokens to cut the bias tokens off.
    rest = cut(rewritten.views[claim.path], [claim.heads], claim.block_outputs)
    computed = [name for name in rest.inputs if name not in (*names, claim.heads)]
    return Heads(
        before=before,
        front=rewritten.part(claim, names, [claim.heads, *computed]),
        behind=rewritten.part(claim, rest.inputs, claim.block_outputs),
        cases=cases,
    )


@dataclass(frozen=True, eq=False)
class _Case:
    """One input of the block with its float64 evaluations; without these, the original stands in for the truth."""

    feeds: Feeds
    truth: Feeds | None = None
    planned: Array | None = None


def prove_heads(heads: Heads, claim: Claim, ways: Sequence[Way]) -> RegionProof:
    """Prove the heads of one block from its inputs."""
    if not heads.cases:
        return RegionProof(None, 0.0, 0.0, (f"{claim.name}: there are no inputs to prove it on",), 0.0)
    cases, exact, failures = _exact(heads, claim)
    error = worst = original_error = 0.0
    floor = machine_epsilon(claim.elem_type)
    for way in ways:
        old_session, new_session = (
            open_part(part, way.provider, optimise=way.optimise, prepack=True) for part in (heads.before, heads.front)
        )
        for case in cases:
            old = old_session.run(wanted(case.feeds, heads.before))
            new = _tokens(new_session.run(wanted(case.feeds, heads.front))[claim.heads], old[claim.output])
            truth = old if case.truth is None else case.truth
            right = truth[claim.output]
            target = right if case.planned is None else case.planned
            judged = (np.abs(right.astype(np.float64)) <= largest_finite(claim.elem_type)) & _inside(truth, claim)
            # As for a region: the old heads against the truth, the new ones against the plan.
            units = unit(right, claim, truth)
            old_error = largest_share(old[claim.output], right, units, judged)
            new_error = largest_share(new, target, units, judged)
            error, worst = max(error, new_error), max(worst, ratio(new_error, old_error, floor))
            original_error = max(original_error, old_error)
            failures += excess(claim, new_error, max(old_error, floor), way)
    return RegionProof(exact, error, worst, tuple(dict.fromkeys(failures)), original_error)


def _exact(heads: Heads, claim: Claim) -> tuple[list[_Case], float | None, list[str]]:
    """The cases with their float64 evaluations, the heads' largest error there, and the failures."""
    try:
        whole, front, behind = (
            open_reference(part.proto, part.base_dir) for part in (heads.before, heads.front, heads.behind)
        )
        worst, failures, cases = 0.0, [], []
        for feeds in heads.cases:
            truth = whole.run(wanted(feeds, heads.before))
            made = front.run(wanted(feeds, heads.front))
            planned, rounding = evaluated(claim, truth)
            # The emitted heads compute the pre-activations by themselves, so the first linear operator rounds as well.
            rounding = rounding + _EXACT_SLACK * _linear_size(truth, claim)
            cases.append(_Case(feeds, truth, planned))
            found = _tokens(made[claim.heads], truth[claim.output])
            # What overflows even float64, or is NaN, has no distance from anything.
            inside = _inside(truth, claim) & np.isfinite(truth[claim.output])
            units = np.where(inside, unit(truth[claim.output], claim, truth), 1.0)
            rounding = np.where(inside, rounding, 0.0)
            worst = max(worst, largest((gap(found, truth[claim.output]) / units)[inside]))
            off = (gap(planned, truth[claim.output]) - rounding) / units - claim.max_error
            if largest(off[inside]) > 0.0:
                failures.append(
                    f"{claim.name}: the head program's error exceeds the certified {claim.max_error:.3g} by "
                    f"{largest(off[inside]):.3g}; this is a bug, please report it"
                )
            apart = (gap(found, planned) - 2.0 * rounding)[inside]
            if largest(apart) > 0.0:
                failures.append(
                    f"{claim.name}: in float64 the heads differ from their program by "
                    f"{largest(gap(found, planned)[inside]):.3g}, more than rounding explains"
                )
            failures += _projected(behind.run, heads, claim, {**feeds, **made}, truth)
    except NoReference:
        return [_Case(feeds) for feeds in heads.cases], None, []
    return cases, worst, failures


def _projected(run: Run, heads: Heads, claim: Claim, feeds: Feeds, truth: Feeds) -> list[str]:
    """Failures on the way from the heads' outputs to the block's, given the original's activations."""
    result = run(wanted({**feeds, claim.heads: _as_heads(truth[claim.output], feeds[claim.heads])}, heads.behind))
    failures = []
    for name in claim.block_outputs:
        # Given exact activations, only linear operators remain, so there is no certified error to allow for.
        off = largest(gap(result[name], truth[name]))
        if not off <= _EXACT_SLACK * max(1.0, magnitude(truth[claim.output]), magnitude(truth[name])):
            failures.append(
                f"{claim.name}: in float64 the heads' outputs are projected to something else, error {off:.3g}"
            )
    return failures


def _linear_size(truth: Feeds, claim: Claim) -> float:
    """The largest magnitude at the ends of the region, at least 1: the scale of what linear operators add up."""
    return max(1.0, *(magnitude(truth[name]) for name in claim.inputs_and_output))


def _inside(truth: Feeds, claim: Claim) -> Array:
    """Mask of the entries in the claim's domain; whether the model leaves it is checked on the model's own inputs."""
    gate = np.abs(truth[claim.gate].astype(np.float64))
    return np.asarray(np.broadcast_to(~(gate > claim.domain), truth[claim.output].shape))


def _scaled(feeds: Feeds, names: Sequence[str], scale: float) -> Feeds:
    """Scale the block's inputs, but not shapes and the like."""
    if scale == 1.0:
        return feeds
    with np.errstate(over="ignore"):
        return {
            name: (value * scale).astype(value.dtype) if name in names and is_float(value.dtype) else value
            for name, value in feeds.items()
        }


def _tokens(heads: Array, like: Array) -> Array:
    """The rows of [batch, rows, channels] that are tokens, in the shape of the original's activation."""
    tokens = like.size // (heads.shape[0] * heads.shape[2])
    return heads[:, :tokens].reshape(like.shape)


def _as_heads(activation: Array, like: Array) -> Array:
    """The original's activation as the heads' output, with random numbers in the rows that are not tokens.

    Nothing may depend on those rows: noise there makes a leak into the block's outputs visible.
    """
    values = np.random.default_rng(0).normal(0.0, 1.0, like.shape)
    tokens = activation.size // (like.shape[0] * like.shape[2])
    values[:, :tokens] = activation.reshape(like.shape[0], tokens, like.shape[2])
    return values
