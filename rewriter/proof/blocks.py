"""Proof of one replaced block: its region on adversarial points, and the whole block on real inputs.

Comes in: the original and the rewritten model, a `Claim`, and values that the block really sees. Goes out: a
`BlockItem`, which is all that the proof of this block needs, and from it a `BlockProof`. An item holds the block's
nodes and where its weights stand, so that it can be sent to another process, and a model of any size is proved in the
memory of one block. The whole block (W1, heads, W2) must be as accurate against float64 as the original block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rewriter.files.load import LoadedModel
from rewriter.graph.extract import cut
from rewriter.graph.segments import bytes_of
from rewriter.proof.cases import Case
from rewriter.proof.claims import Claim, Side
from rewriter.proof.distance import FACTOR, Array, gap, largest, magnitude, ratio
from rewriter.proof.points import machine_epsilon, numpy_dtype
from rewriter.proof.regions import Regions, prove_region, regions_of
from rewriter.proof.runs import Results, Wanted, Way
from rewriter.proof.segments import SEGMENT, open_part, run_in_segments

Feeds = Mapping[str, Array]


@dataclass(frozen=True, eq=False)
class BlockItem:
    """Everything that the proof of one block needs; it can be pickled.

    Attributes:
        claim: what is claimed.
        regions: the replaced region of both models.
        wholes: the block of the original and of the rewritten model.
        reweighted: the original's block with the rewritten model's weights, where these are others: what the certified
            errors of the heads amount to is measured from there, so that a wrong weight cannot pass for one.
        gate: the original's way from the block's inputs to the pre-activation, where that must stay in a domain.
        inputs: values that the block really sees, case by case; none skips the whole block.
        ways: how to run it.
    """

    claim: Claim
    regions: Regions
    wholes: tuple[LoadedModel, LoadedModel]
    inputs: tuple[Feeds, ...]
    ways: tuple[Way, ...]
    reweighted: LoadedModel | None = None
    gate: LoadedModel | None = None


@dataclass(frozen=True)
class BlockProof:
    """What was measured of one block; ratios are new over old.

    Attributes:
        name: the block.
        exact_error: largest error of the heads in float64, over max(1, |f|); None without a float64 evaluation.
        region_error: largest error of the heads in the model's type, over max(1, |f|).
        region_ratio: that over the original region's.
        block_error: largest error of the block on real inputs, absolute; None without a float64 evaluation.
        block_ratio: that over the original block's.
        failures: what did not hold; empty when the block is proved.
        infinite: what the heads give at infinite pre-activations where the original gives something else. No failure:
            no head program that multiplies by the pre-activation can help it (docs/numerics.md).
    """

    name: str
    exact_error: float | None
    region_error: float
    region_ratio: float
    block_error: float | None
    block_ratio: float | None
    failures: tuple[str, ...]
    infinite: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether everything held."""
        return not self.failures


@dataclass(frozen=True)
class _Whole:
    error: float | None
    ratio: float | None
    failures: tuple[str, ...] = ()


def block_item(
    original: Side,
    rewritten: Side,
    claim: Claim,
    inputs: Sequence[Feeds],
    ways: Sequence[Way],
    reweighted: Side | None = None,
) -> BlockItem:
    """What `prove_block` needs.

    Args:
        original: the original model, in the form that the claim names tensors of.
        rewritten: the rewritten model.
        claim: what is claimed.
        inputs: values of `block_needs`, one mapping per case; none skips the second half of the proof.
        ways: execution providers, with and without graph optimisation.
        reweighted: the original with the rewritten model's weights, where these are others.
    """
    names = tuple(inputs[0]) if inputs else claim.block_inputs
    before, after = (side.part(claim, names, claim.block_outputs) for side in (original, rewritten))
    between = None if reweighted is None else reweighted.part(claim, names, claim.block_outputs)
    bounded = bool(inputs) and np.isfinite(claim.domain)
    gate = original.part(claim, names, claim.inputs[:1]) if bounded else None
    regions = regions_of(original, rewritten, claim)
    return BlockItem(claim, regions, (before, after), tuple(inputs), tuple(ways), between, gate)


def prove_block(item: BlockItem) -> BlockProof:
    """Prove one block. A function of its item alone: it runs in any process that can read the weights."""
    region = prove_region(item.regions, item.claim, item.ways)
    whole = _prove_whole(item) if item.inputs else _Whole(None, None)
    return BlockProof(
        name=item.claim.name,
        exact_error=region.exact_error,
        region_error=region.error,
        region_ratio=region.ratio,
        block_error=whole.error,
        block_ratio=whole.ratio,
        failures=(*region.failures, *whole.failures, *_beyond_domain(item)),
        infinite=region.infinite,
    )


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
        values = rng.normal(0.0, 1.0, (*(1,) * (rank - 2), 17, claim.width))
        feeds[name] = values.astype(numpy_dtype(original.views[claim.path].type_of(name).elem_type or claim.elem_type))
    return [feeds]


def _prove_whole(item: BlockItem) -> _Whole:
    claim, outputs = item.claim, item.claim.block_outputs
    cases = _cases(item, item.wholes[0])
    truth, rebuilt = (_evaluated(part, cases) for part in item.wholes)
    certain = truth if item.reweighted is None else _evaluated(item.reweighted, cases)
    if truth is None or rebuilt is None or certain is None:
        return _Whole(None, None)
    carried = _distance(rebuilt, certain, outputs)
    floor = machine_epsilon(claim.elem_type) * max(magnitude(right[name]) for right in truth for name in outputs)
    worst = worst_ratio = 0.0
    failures = []
    for way in item.ways:
        old, new = (_distance(_runs(part, way, cases, outputs), truth, outputs) for part in item.wholes)
        worst, worst_ratio = max(worst, new), max(worst_ratio, ratio(new, old, floor))
        allowed = FACTOR * max(old, floor) + carried
        if not new <= allowed:
            failures.append(
                f"{claim.name}: on real inputs the block is off by {new:.3g} on {way}, allowed are {allowed:.3g}"
            )
    return _Whole(worst, worst_ratio, tuple(failures))


def _cases(item: BlockItem, part: LoadedModel) -> list[Case]:
    """The real inputs, as far as a part of the block reads them."""
    wanted = {value.name for value in part.proto.graph.input}
    return [
        Case(str(number), {name: value for name, value in feeds.items() if name in wanted})
        for number, feeds in enumerate(item.inputs)
    ]


def _beyond_domain(item: BlockItem) -> list[str]:
    """What is wrong when real pre-activations lie beyond where the claim holds."""
    if item.gate is None:
        return []
    claim, cases = item.claim, _cases(item, item.gate)
    (gate, *_) = claim.inputs
    way = Way(item.ways[0].provider, optimise=False)
    reached = max(magnitude(values[gate]) for values in _runs(item.gate, way, cases, [gate]))
    if reached <= claim.domain:
        return []
    limit = f"the program holds up to {claim.domain:.4g}; convert it with a larger --domain, or leave it with --skip"
    return [f"{claim.name}: pre-activations reach {reached:.4g}, {limit}"]


def _evaluated(part: LoadedModel, cases: Sequence[Case]) -> Results | None:
    """The block in float64, one of its weights at a time where they are large."""
    return run_in_segments(Side.of(part), cases, Wanted(wide=True), lambda _what, _done, _total: None).truth


def _runs(part: LoadedModel, way: Way, cases: Sequence[Case], outputs: Sequence[str]) -> Results:
    weights = sum(bytes_of(tensor) for tensor in part.proto.graph.initializer)
    session = open_part(part, way.provider, optimise=way.optimise, prepack=weights <= SEGMENT)
    return [session.run(case.feeds, outputs) for case in cases]


def _distance(values: Results, truth: Results, outputs: Sequence[str]) -> float:
    """Largest distance over cases and outputs."""
    pairs = zip(values, truth, strict=True)
    return max(largest(gap(value[name], right[name])) for value, right in pairs for name in outputs)
