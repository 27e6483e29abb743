"""Proof of one replaced block: its region on adversarial points, and the whole block on real inputs.

Where the whole block was replaced, so that its region's ends are gone, the heads are proved from the block's inputs
instead (`rewriter.proof.wholes`).

Comes in: the original and the rewritten model, a `Claim`, and values that the block really sees. Goes out:
`BlockProof`. Blocks are cut out with their weights one at a time, so a model of any size is proved in the memory of
one block. The whole block (W1, heads, W2) must be as accurate against float64 as the original block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rewriter.graph.extract import cut
from rewriter.proof.claims import Claim, Side
from rewriter.proof.distance import FACTOR, Array, gap, largest, magnitude, ratio, setting
from rewriter.proof.float64 import NoReference, open_reference
from rewriter.proof.points import machine_epsilon, numpy_dtype
from rewriter.proof.regions import prove_region
from rewriter.proof.sessions import Session, open_session
from rewriter.proof.wholes import prove_heads

Feeds = Mapping[str, Array]


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
    """

    name: str
    exact_error: float | None
    region_error: float
    region_ratio: float
    block_error: float | None
    block_ratio: float | None
    failures: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether everything held."""
        return not self.failures


@dataclass(frozen=True)
class _Whole:
    error: float | None
    ratio: float | None
    failures: tuple[str, ...] = ()


def prove_block(
    original: Side, rewritten: Side, claim: Claim, inputs: Sequence[Feeds], providers: Sequence[str]
) -> BlockProof:
    """Prove one block.

    Args:
        original: the original model.
        rewritten: the rewritten model.
        claim: what is claimed.
        inputs: values of `block_needs`, one mapping per case; none skips the second half.
        providers: execution providers, each tried with and without graph optimisation.
    """
    if claim.heads:
        region = prove_heads(original, rewritten, claim, inputs, providers)
    else:
        region = prove_region(original, rewritten, claim, providers)
    whole = _prove_whole(original, rewritten, claim, inputs, providers) if inputs else _Whole(None, None)
    return BlockProof(
        name=claim.name,
        exact_error=region.exact_error,
        region_error=region.error,
        region_ratio=region.ratio,
        block_error=whole.error,
        block_ratio=whole.ratio,
        failures=(*region.failures, *whole.failures),
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


def _prove_whole(
    original: Side, rewritten: Side, claim: Claim, inputs: Sequence[Feeds], providers: Sequence[str]
) -> _Whole:
    names, outputs = tuple(inputs[0]), claim.block_outputs
    before = original.part(claim, names, outputs)
    after = rewritten.part(claim, names, outputs)
    wanted = {value.name for value in before.graph.input}
    cases = [{name: value for name, value in feeds.items() if name in wanted} for feeds in inputs]
    try:
        truth = [open_reference(before).run(given) for given in cases]
        rebuilt = [open_reference(after).run(given) for given in cases]
    except NoReference:
        return _Whole(None, None)
    carried = _distance(rebuilt, truth, outputs)
    floor = machine_epsilon(claim.elem_type) * max(magnitude(right[name]) for right in truth for name in outputs)
    worst = worst_ratio = 0.0
    failures = []
    for provider in providers:
        for optimise in (True, False):
            old, new = (
                _distance(_runs(open_session(part, provider, optimise=optimise), cases, outputs), truth, outputs)
                for part in (before, after)
            )
            worst, worst_ratio = max(worst, new), max(worst_ratio, ratio(new, old, floor))
            allowed = FACTOR * max(old, floor) + carried
            if not new <= allowed:
                where = setting(provider, optimise=optimise)
                failures.append(
                    f"{claim.name}: on real inputs the block is off by {new:.3g} on {where}, allowed are {allowed:.3g}"
                )
    return _Whole(worst, worst_ratio, tuple(failures))


def _runs(session: Session, cases: Sequence[Feeds], outputs: Sequence[str]) -> list[dict[str, Array]]:
    return [session.run(given, outputs) for given in cases]


def _distance(values: Sequence[Feeds], truth: Sequence[Feeds], outputs: Sequence[str]) -> float:
    """Largest distance over cases and outputs."""
    pairs = zip(values, truth, strict=True)
    return max(largest(gap(value[name], right[name])) for value, right in pairs for name in outputs)
