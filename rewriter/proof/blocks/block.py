"""Prove one replaced block: its region on adversarial points, and the whole block on real and spread inputs.

If the whole block was replaced, so that the ends of its region no longer exist, the heads are proved from the block's
inputs instead (`rewriter.proof.blocks.sublayer`).

A `BlockItem` holds the block's nodes and refers to its weights on disk, so it can be sent to another process, and a
model of any size is proved in the memory of one block. The whole block (W1, heads, W2) must equal the planned block
(`rewriter.proof.planned`) up to rounding: to float64's rounding in float64, and to that of the original block in the
model's type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rewriter.arrays import Array
from rewriter.errors import ValidationError
from rewriter.graph.extract import cut
from rewriter.graph.segments import bytes_of
from rewriter.proof.blocks.activation import Regions, prove_region, regions_of
from rewriter.proof.blocks.adversarial_points import machine_epsilon, numpy_dtype
from rewriter.proof.blocks.exposed import Exposed, exposed_failures, exposed_of
from rewriter.proof.blocks.spread import accepted, spread, variants, wanted
from rewriter.proof.blocks.sublayer import Heads, heads_of, prove_heads
from rewriter.proof.claims import Claim, Side
from rewriter.proof.distance import ratio
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
        claim: the claim about the block.
        heads: the replaced region in both models; or, for a block that was replaced as a whole, the parts from which
            its heads are proved; or, where the heads read a tensor that the original does not, the failure.
        before: the original's block.
        after: the rewritten model's block.
        planned: the original's block with the plan as its activation.
        inputs: values that the block receives in the model, case by case; if empty, only the heads are proved.
        ways: how to run it.
        exposed: the tensors of the heads that are outputs of the rewritten model; None if there are none.
    """

    claim: Claim
    heads: Regions | Heads | str
    before: Side
    after: Side
    planned: Side
    inputs: tuple[Feeds, ...]
    ways: tuple[Way, ...]
    exposed: Exposed | None = None


@dataclass(frozen=True)
class BlockProof:
    """Measurements of one block; ratios are new over old.

    Attributes:
        name: the block.
        exact_error: largest error of the heads in float64, relative to max(1, |f|) (of a gate to max(1, |h|) |u|);
            None without a float64 evaluation.
        region_error: largest error of the heads in the model's type, in the same unit.
        region_ratio: `region_error` over the original region's error.
        block_error: largest absolute error of the block on its inputs; None without a float64 evaluation.
        block_ratio: `block_error` over the original block's error.
        failures: what did not hold; empty if the block is proved.
        infinite: results of the heads at infinite pre-activations that differ from the original's. Not a failure: no
            head program that multiplies by the pre-activation can avoid it (docs/numerics.md).
        region_original_error: largest error of the original region, in the unit of `region_error`; None if unknown.
        block_original_error: largest error of the original block, as `block_error`.
        block_allowed: the allowance for `block_error`, in the way of running it where that is largest.
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
) -> BlockItem:
    """Cut out what `prove_block` needs.

    Args:
        original: the original model, in the form whose tensors the claim names.
        rewritten: the rewritten model.
        planned: the original with the plan as its activations.
        claim: the claim about the block.
        inputs: values of the tensors in `block_needs`, one mapping per case; if empty, only the heads are proved.
        ways: execution providers, with and without graph optimisation.
    """
    names = tuple(inputs[0]) if inputs else claim.block_inputs
    before, after, between = (
        Side.of(side.part(claim, names, claim.block_outputs), side.own) for side in (original, rewritten, planned)
    )
    heads: Regions | Heads | str
    # Checked before cutting: a part that reads more than the original's cannot be fed the original's values, and a leak
    # from elsewhere in the model is a fault however close its numbers come.
    foreign = _foreign(original, rewritten, claim, names, claim.block_outputs)
    if foreign is None and not claim.heads:
        foreign = _foreign(original, rewritten, claim, claim.inputs, (claim.output,))
    if foreign is not None:
        heads = f"{claim.name}: its heads read {quoted(foreign)}, which the original's block does not"
    elif claim.heads:
        heads = heads_of(original, rewritten, claim, inputs)
    else:
        heads = regions_of(original, rewritten, claim)
    shown = exposed_of(original, rewritten, claim, names) if claim.exposed and foreign is None else None
    return BlockItem(claim, heads, before, after, between, tuple(inputs), tuple(ways), shown)


def _foreign(
    original: Side, rewritten: Side, claim: Claim, inputs: Sequence[str], outputs: Sequence[str]
) -> str | None:
    """A tensor that the rewritten part reads and the original's does not, if there is one."""
    ours, theirs = (cut(side.views[claim.path], inputs, outputs).inputs for side in (original, rewritten))
    return next((name for name in theirs if name not in ours), None)


def prove_block(item: BlockItem) -> BlockProof:
    """Prove one block. Depends on the item alone, so it runs in any process that can read the weights."""
    heads = item.heads
    if isinstance(heads, str):
        return _unproved(item.claim, heads)
    try:
        if isinstance(heads, Heads):
            region = prove_heads(heads, item.claim, item.ways)
        else:
            region = prove_region(heads, item.claim, item.ways)
        whole = _prove_whole(item) if item.inputs else _Whole(None, None)
        shown = () if item.exposed is None else exposed_failures(item.exposed, item.claim, item.inputs)
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
        failures=(*region.failures, *whole.failures, *shown),
        infinite=region.infinite,
        region_original_error=region.original_error,
        block_original_error=whole.original_error,
        block_allowed=whole.allowed,
    )


def _unproved(claim: Claim, why: str) -> BlockProof:
    return BlockProof(claim.name, None, float("inf"), float("inf"), None, None, (why,))


def block_needs(original: Side, claim: Claim) -> tuple[str, ...]:
    """The tensors whose values the proof of a block needs: its inputs, and shapes that are computed elsewhere."""
    return cut(original.views[claim.path], claim.block_inputs, claim.block_outputs).inputs


def made_inputs(original: Side, claim: Claim, *, seed: int) -> list[Feeds]:
    """Normally distributed inputs for a block in a control-flow body, whose real inputs cannot be observed.

    Empty if the block needs anything besides its inputs, or its width is unknown.
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
    # Real inputs alone are weak evidence: a mix-up of tokens or batches can hide where rows are alike or few.
    real = [Case(str(number), feeds) for number, feeds in enumerate(item.inputs)]
    cases = [*real, *accepted(item.before.model, spread(item.claim, item.inputs))]
    evaluated = _Evaluated.of(item, cases)
    if evaluated is None:
        return _Whole(None, None)
    parts = [_judge(item, cases, evaluated, name) for name in item.claim.block_outputs]
    failures = [failure for part in parts for failure in part.failures]
    failures += _variants(item, cases)
    return _Whole(
        error=max(part.error or 0.0 for part in parts),
        ratio=max(part.ratio or 0.0 for part in parts),
        failures=tuple(dict.fromkeys(failures)),
        original_error=max(part.original_error or 0.0 for part in parts),
        allowed=max(part.allowed or 0.0 for part in parts),
    )


@dataclass(frozen=True, eq=False)
class _Evaluated:
    """Float64 evaluations of a block, case by case: the original's, the planned, the planned shaken, the emitted."""

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
    """Judge one output of the block: the emitted block against the planned one, in float64 and in every way."""
    claim, eps = item.claim, machine_epsilon(item.claim.elem_type)
    truth, planned, moved, rebuilt = evaluated.of_output(name)
    channels = Channels.of(truth)
    # What the rounding of the programs in float64 amounts to here: the sharp comparison below must allow for it.
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
            failures.append(f"{claim.name}: on its inputs the block's {found.text} on {way}{_advice(claim)}")
        # The sharp test: float64 shows faults far below the model's own rounding, and certified errors do not enter,
        # since both sides compute the same programs.
        found64 = worst(exact, exact_rounding(rounding, eps), granted)
        if not found64.holds:
            failures.append(
                f"{claim.name}: in float64 the block differs from its plan by {found64.error:.3g} on its inputs, more "
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


def _advice(claim: Claim) -> str:
    """What helps where a gate's pre-activations are so small that its program's rounding is large beside them."""
    return "; keep its product in the graph with --gate product, or exclude it with --skip" if claim.gated else ""


def _total(rounding: float, certified: Wide) -> float:
    """The allowance for the distance from the original: rounding plus the effect of the certified error."""
    return rounding + float(np.max(certified, initial=0.0))


def _variants(item: BlockItem, cases: Sequence[Case]) -> list[str]:
    """Run the rarer paths through the block (several chunks, every position slot), in the first way only."""
    claim, way, failures = item.claim, item.ways[0], list[str]()
    for case, part, what in variants(claim, item.after.model, cases):
        # The original took all of `cases`, but a length that the variant chose may not suit it.
        if not any(case is each for each in cases) and not accepted(item.before.model, [case]):
            continue
        found = [_wide(side, [case]) for side in (item.before, item.planned, shaken(item.planned))]
        if any(results is None for results in found):
            return []
        truth, planned, moved = (values for results in found for values in results or ())
        made = open_part(part, way.provider, optimise=way.optimise, prepack=True).run(wanted(case.feeds, part))
        (old,) = _runs(item.before, way, [case], claim.block_outputs)
        for name in claim.block_outputs:
            channels, own = Channels.of([truth[name]], claim.axis), [old[name]]
            rounding = channels.rounding(channels.errors(own, [truth[name]], own), machine_epsilon(claim.elem_type))
            granted = channels.errors([moved[name]], [planned[name]])
            excess = worst(channels.errors([made[name]], [planned[name]], own), rounding, granted)
            if not excess.holds:
                failures.append(f"{claim.name}: {what} the block's {excess.text} on {way}")
    return failures


def _wide(side: Side, cases: Sequence[Case]) -> Results | None:
    """Evaluate the block in float64; if its weights are large, one at a time."""
    cases = [Case(case.name, wanted(case.feeds, side.model)) for case in cases]
    return run_in_segments(side, cases, Wanted(wide=True), lambda _what, _done, _total: None).truth


def _runs(side: Side, way: Way, cases: Sequence[Case], outputs: Sequence[str]) -> Results:
    # Prepacking copies the weights: faster, but twice the memory.
    weights = sum(bytes_of(tensor) for tensor in side.model.proto.graph.initializer)
    session = open_part(side.model, way.provider, optimise=way.optimise, prepack=weights <= SEGMENT)
    return [session.run(wanted(case.feeds, side.model), outputs) for case in cases]
