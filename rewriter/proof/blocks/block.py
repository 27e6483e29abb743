"""Proof of one replaced block: its region on adversarial points, and the whole block on real and spread inputs.

Where the whole block was replaced, so that its region's ends are gone, the heads are proved from the block's inputs
instead (`rewriter.proof.blocks.sublayer`).

A `BlockItem` holds the block's nodes and where its weights stand, so that it can be sent to another process, and a
model of any size is proved in the memory of one block. The whole block (W1, heads, W2) must be the planned block up to
rounding (`rewriter.proof.planned`): in float64 exactly so, and in the model's type as closely as the original block is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rewriter.errors import ValidationError
from rewriter.files.load import LoadedModel
from rewriter.graph.extract import cut
from rewriter.graph.segments import bytes_of
from rewriter.proof.blocks.activation import Regions, prove_region, regions_of
from rewriter.proof.blocks.adversarial_points import machine_epsilon, numpy_dtype
from rewriter.proof.blocks.spread import spread, variants
from rewriter.proof.blocks.sublayer import Heads, heads_of, prove_heads
from rewriter.proof.claims import Claim, Side
from rewriter.proof.distance import Array, ratio
from rewriter.proof.inputs.cases import Case
from rewriter.proof.pass_rule import Channels, Wide, exact_rounding, worst
from rewriter.proof.planned import shaken
from rewriter.proof.run.segmented import SEGMENT, open_part, run_in_segments
from rewriter.proof.run.whole import Results, Wanted, Way
from rewriter.text import quoted

Feeds = Mapping[str, Array]


@dataclass(frozen=True, eq=False)
class BlockItem:
    """Everything that the proof of one block needs; it can be pickled.

    Attributes:
        claim: what is claimed.
        heads: the replaced region of both models; or the parts from which heads are proved that replaced a whole block;
            or what is wrong where the heads read something else than the original does.
        before: the original's block.
        after: the rewritten model's.
        planned: the original's block with the plan's numbers as its activation, and with the rewritten model's weights
            where these are others.
        inputs: values that the block really sees, case by case; none skips the whole block.
        ways: how to run it.
        reweighted: the original's block with the rewritten model's weights, where these are others: it must compute
            what the original's does.
    """

    claim: Claim
    heads: Regions | Heads | str
    before: Side
    after: Side
    planned: Side
    inputs: tuple[Feeds, ...]
    ways: tuple[Way, ...]
    reweighted: Side | None = None


@dataclass(frozen=True)
class BlockProof:
    """What was measured of one block; ratios are new over old.

    Attributes:
        name: the block.
        exact_error: largest error of the heads in float64, over max(1, |f|) (of a gate over max(1, |h|) |u|); None
            without a float64 evaluation.
        region_error: largest error of the heads in the model's type, over max(1, |f|).
        region_ratio: `region_error` over the original region's.
        block_error: largest error of the block on real inputs, absolute; None without a float64 evaluation.
        block_ratio: `block_error` over the original block's.
        failures: what did not hold; empty when the block is proved.
        infinite: what the heads give at infinite pre-activations where the original gives something else. No failure:
            no head program that multiplies by the pre-activation can help it (docs/numerics.md).
        region_original_error: largest error of the original region, as `region_error`; None where it was not kept.
        block_original_error: largest error of the original block, as `block_error`.
        block_allowed: what `block_error` may be, where it is largest.
    """

    name: str
    exact_error: float | None
    region_error: float
    region_ratio: float
    block_error: float | None
    block_ratio: float | None
    failures: tuple[str, ...]
    infinite: tuple[str, ...] = ()
    region_original_error: float | None = None
    block_original_error: float | None = None
    block_allowed: float | None = None

    @property
    def passed(self) -> bool:
        """Whether everything held."""
        return not self.failures


@dataclass(frozen=True)
class _Whole:
    error: float | None
    ratio: float | None
    failures: tuple[str, ...] = ()
    original_error: float | None = None
    allowed: float | None = None


def block_item(
    original: Side,
    rewritten: Side,
    planned: Side,
    claim: Claim,
    inputs: Sequence[Feeds],
    ways: Sequence[Way],
    reweighted: Side | None = None,
) -> BlockItem:
    """What `prove_block` needs.

    Args:
        original: the original model, in the form that the claim names tensors of.
        rewritten: the rewritten model.
        planned: the original with the plan's numbers as its activations.
        claim: what is claimed.
        inputs: values of `block_needs`, one mapping per case; none skips the second half of the proof.
        ways: execution providers, with and without graph optimisation.
        reweighted: the original with the rewritten model's weights, where these are others.
    """
    names = tuple(inputs[0]) if inputs else claim.block_inputs
    before, after, between = (
        Side.of(side.part(claim, names, claim.block_outputs), side.own) for side in (original, rewritten, planned)
    )
    heads: Regions | Heads | str
    foreign = _foreign(original, rewritten, claim, names, claim.block_outputs)
    if foreign is None and not claim.heads:
        foreign = _foreign(original, rewritten, claim, claim.inputs, (claim.output,))
    if foreign is not None:
        heads = f"{claim.name}: its heads read {quoted(foreign)}, which the original's block does not"
    elif claim.heads:
        heads = heads_of(original, rewritten, claim, inputs)
    else:
        heads = regions_of(original, rewritten, claim)
    other = None if reweighted is None else Side.of(reweighted.part(claim, names, claim.block_outputs))
    return BlockItem(claim, heads, before, after, between, tuple(inputs), tuple(ways), other)


def _foreign(
    original: Side, rewritten: Side, claim: Claim, inputs: Sequence[str], outputs: Sequence[str]
) -> str | None:
    """A tensor that the rewritten part reads and the original's does not; None where there is none."""
    ours, theirs = (cut(side.views[claim.path], inputs, outputs).inputs for side in (original, rewritten))
    return next((name for name in theirs if name not in ours), None)


def prove_block(item: BlockItem) -> BlockProof:
    """Prove one block. A function of its item alone: it runs in any process that can read the weights."""
    heads = item.heads
    if isinstance(heads, str):
        return _unproved(item.claim, heads)
    try:
        if isinstance(heads, Heads):
            region = prove_heads(heads, item.claim, item.ways)
        else:
            region = prove_region(heads, item.claim, item.ways)
        whole = _prove_whole(item) if item.inputs else _Whole(None, None)
    except ValidationError as error:
        # What onnxruntime refuses to run says nothing of the block that it belongs to.
        return _unproved(item.claim, f"{item.claim.name}: {error}")
    return BlockProof(
        name=item.claim.name,
        exact_error=region.exact_error,
        region_error=region.error,
        region_ratio=region.ratio,
        block_error=whole.error,
        block_ratio=whole.ratio,
        failures=(*region.failures, *whole.failures),
        infinite=region.infinite,
        region_original_error=region.original_error,
        block_original_error=whole.original_error,
        block_allowed=whole.allowed,
    )


def _unproved(claim: Claim, why: str) -> BlockProof:
    return BlockProof(claim.name, None, float("inf"), float("inf"), None, None, (why,))


def block_needs(original: Side, claim: Claim) -> tuple[str, ...]:
    """The tensors whose values the proof of a block needs: the block's inputs, and shapes computed elsewhere."""
    return cut(original.views[claim.path], claim.block_inputs, claim.block_outputs).inputs


def made_inputs(original: Side, claim: Claim, *, seed: int) -> list[Feeds]:
    """Normal numbers for a block whose real inputs cannot be had: it lies in a body of control flow.

    None where the block also needs something else than its inputs, or its width is unknown.
    """
    if claim.width is None or set(block_needs(original, claim)) != set(claim.block_inputs):
        return []
    rng = np.random.default_rng(seed)
    feeds = {}
    for name in claim.block_inputs:
        rank = original.views[claim.path].type_of(name).rank or 2
        lead = (2, *(1,) * (rank - 3)) if rank > 2 else ()
        values = rng.normal(0.0, 1.0, (*lead, 19, claim.width))
        feeds[name] = values.astype(numpy_dtype(original.views[claim.path].type_of(name).elem_type or claim.elem_type))
    return [feeds]


def _prove_whole(item: BlockItem) -> _Whole:
    real = [Case(str(number), feeds) for number, feeds in enumerate(item.inputs)]
    cases = [*real, *_accepted(item.before, spread(item.claim, item.inputs))]
    evaluated = _Evaluated.of(item, cases)
    if evaluated is None:
        return _Whole(None, None)
    parts = [_judge(item, cases, evaluated, name) for name in item.claim.block_outputs]
    failures = [failure for part in parts for failure in part.failures]
    failures += [*_variants(item, cases), *_reweighted(item, cases, evaluated)]
    return _Whole(
        error=max(part.error or 0.0 for part in parts),
        ratio=max(part.ratio or 0.0 for part in parts),
        failures=tuple(dict.fromkeys(failures)),
        original_error=max(part.original_error or 0.0 for part in parts),
        allowed=max(part.allowed or 0.0 for part in parts),
    )


@dataclass(frozen=True, eq=False)
class _Evaluated:
    """Float64 evaluations of a block, case by case."""

    truth: Results
    planned: Results
    shaken: Results
    rebuilt: Results

    @classmethod
    def of(cls, item: BlockItem, cases: Sequence[Case]) -> _Evaluated | None:
        found = [_wide(side, cases) for side in (item.before, item.planned, shaken(item.planned), item.after)]
        truth, planned, moved, rebuilt = found
        if truth is None or planned is None or moved is None or rebuilt is None:
            return None
        return cls(truth, planned, moved, rebuilt)

    def of_output(self, name: str) -> tuple[list[Array], list[Array], list[Array], list[Array]]:
        """One output of each evaluation."""
        each = (self.truth, self.planned, self.shaken, self.rebuilt)
        truth, planned, moved, rebuilt = ([case[name] for case in results] for results in each)
        return truth, planned, moved, rebuilt


def _judge(item: BlockItem, cases: Sequence[Case], evaluated: _Evaluated, name: str) -> _Whole:
    """One output of the block: the emitted block against the planned one, in float64 and in every way."""
    claim, eps = item.claim, machine_epsilon(item.claim.elem_type)
    truth, planned, moved, rebuilt = evaluated.of_output(name)
    channels = Channels.of(truth)
    granted = channels.errors(moved, planned)
    failures: list[str] = []
    error = worst_ratio = original_error = allowed = 0.0
    exact = channels.errors(rebuilt, planned)
    for way in item.ways:
        old, new = ([run[name] for run in _runs(part, way, cases, [name])] for part in (item.before, item.after))
        old_errors = channels.errors(old, truth, old)
        rounding = channels.rounding(old_errors, eps)
        found = worst(channels.errors(new, planned, old), rounding, granted)
        if not found.holds:
            failures.append(f"{claim.name}: on its inputs the block's {found.text} on {way}")
        found64 = worst(exact, exact_rounding(rounding, eps), granted)
        if not found64.holds:
            failures.append(
                f"{claim.name}: in float64 the block is {found64.error:.3g} away from its plan on its inputs, more "
                f"than the {found64.allowed:.3g} that rounding explains"
            )
        new_error = float(np.max(channels.errors(new, truth, old), initial=0.0))
        old_error = float(np.max(old_errors, initial=0.0))
        if new_error >= error:
            error, allowed = new_error, _total(found.allowed, channels.errors(planned, truth))
        floor = eps * float(np.max(channels.scale, initial=0.0))
        worst_ratio = max(worst_ratio, ratio(new_error, old_error, floor))
        original_error = max(original_error, old_error)
    return _Whole(error, worst_ratio, tuple(failures), original_error, allowed)


def _total(rounding: float, certified: Wide) -> float:
    """What the distance from the original may be: rounding, and what the certified error amounts to."""
    return rounding + float(np.max(certified, initial=0.0))


def _reweighted(item: BlockItem, cases: Sequence[Case], evaluated: _Evaluated) -> list[str]:
    """Where neurons were merged: what the block's other weights make of its inputs, with its own activation."""
    if item.reweighted is None:
        return []
    merged = _wide(item.reweighted, cases)
    if merged is None:
        return []
    old = _runs(item.before, item.ways[0], cases, item.claim.block_outputs)
    failures = []
    for name in item.claim.block_outputs:
        truth, own = ([case[name] for case in results] for results in (evaluated.truth, old))
        channels = Channels.of(truth)
        rounding = channels.rounding(channels.errors(own, truth, own), machine_epsilon(item.claim.elem_type))
        found = worst(channels.errors([case[name] for case in merged], truth), rounding)
        if not found.holds:
            failures.append(
                f"{item.claim.name}: with its neurons merged the block computes something else, {found.text}"
            )
    return failures


def _variants(item: BlockItem, cases: Sequence[Case]) -> list[str]:
    """The rarer ways through the block: several chunks, every position slot. In the model's type, the first way."""
    claim, way, failures = item.claim, item.ways[0], list[str]()
    for case, part, what in variants(claim, item.after.model, cases):
        truth, planned = (_wide(side, [case]) for side in (item.before, item.planned))
        if truth is None or planned is None:
            return []
        made = open_part(part, way.provider, optimise=way.optimise, prepack=True).run(_wanted(case, part))
        old = _runs(item.before, way, [case], claim.block_outputs)
        for name in claim.block_outputs:
            channels = Channels.of([truth[0][name]])
            own = [old[0][name]]
            rounding = channels.rounding(channels.errors(own, [truth[0][name]], own), machine_epsilon(claim.elem_type))
            found = worst(channels.errors([made[name]], [planned[0][name]], own), rounding)
            if not found.holds:
                failures.append(f"{claim.name}: {what} the block's {found.text} on {way}")
    return failures


def _accepted(before: Side, cases: Sequence[Case]) -> list[Case]:
    """The cases whose sizes the original's block takes: a static shape inside it may fix them."""
    kept = []
    if cases:
        session = open_part(before.model, "cpu", optimise=False, prepack=False)
        for case in cases:
            try:
                session.run(_wanted(case, before.model))
            except ValidationError:
                continue
            kept.append(case)
    return kept


def _wanted(case: Case, part: LoadedModel) -> dict[str, Array]:
    names = {value.name for value in part.proto.graph.input}
    return {name: value for name, value in case.feeds.items() if name in names}


def _wide(side: Side, cases: Sequence[Case]) -> Results | None:
    """The block in float64, one of its weights at a time where they are large."""
    cases = [Case(case.name, _wanted(case, side.model)) for case in cases]
    return run_in_segments(side, cases, Wanted(wide=True), lambda _what, _done, _total: None).truth


def _runs(side: Side, way: Way, cases: Sequence[Case], outputs: Sequence[str]) -> Results:
    weights = sum(bytes_of(tensor) for tensor in side.model.proto.graph.initializer)
    session = open_part(side.model, way.provider, optimise=way.optimise, prepack=weights <= SEGMENT)
    return [session.run(_wanted(case, side.model), outputs) for case in cases]
