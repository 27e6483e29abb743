"""Finds the faulty block if a model deviates from its plan end to end although every block passed by itself.

This happens if an error only shows at lengths or values on which the blocks were not tested. Both models are evaluated
in float64 again, with the blocks' outputs as additional outputs: an error spreads only downstream, so the first output
that differs belongs to the faulty block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rewriter.graph.extract import with_outputs
from rewriter.proof.claims import Claim, Side
from rewriter.proof.inputs.cases import Case
from rewriter.proof.pass_rule import Channels
from rewriter.proof.run.whole import Results, Wanted, run_whole

_ROUNDING = 1e-10
"""Largest difference between float64 evaluations of one function, as a share of a channel's scale."""


def first_astray(planned: Side, rewritten: Side, claims: Sequence[Claim], cases: Sequence[Case]) -> str | None:
    """The block whose output is the first to differ, in words; None if all agree or cannot be compared.

    Args:
        planned: the original with its activations as planned.
        rewritten: the model that failed.
        claims: all blocks, in graph order; those in bodies of control flow are skipped.
        cases: the inputs.
    """
    ends = {
        claim.name: [name for name in claim.block_outputs if name in planned.main.producer]
        for claim in claims
        if not claim.path
    }
    names = [name for found in ends.values() for name in found]
    if not all(name in rewritten.main.producer for name in names):
        return None
    right, wrong = (_evaluated(side, names, cases) for side in (planned, rewritten))
    if right is None or wrong is None:
        return None
    for block, outputs in ends.items():
        for name in outputs:
            for case, expected, actual in zip(cases, right, wrong, strict=True):
                channels = Channels.of([expected[name]])
                if not channels.share(channels.errors([actual[name]], [expected[name]])) <= _ROUNDING:
                    return f"{block}: its output '{name}' is the first tensor that leaves the plan, on {case.name}"
    return None


def _evaluated(side: Side, names: Sequence[str], cases: Sequence[Case]) -> Results | None:
    missing = [name for name in names if name not in side.main.outputs]
    model = replace(side.model, proto=with_outputs(side.model.proto, side.main, missing), path=None)
    return run_whole(Side.of(model, side.own), cases, Wanted(wide=True), lambda _what, _done, _total: None).truth
