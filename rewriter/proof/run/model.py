"""Run a model as a whole or in segments, and evaluate it in float64 with a part of its weights in memory.

In float64 the weights take twice as much memory or more, and no fusion is lost in segments. So a model that
onnxruntime loads as a whole is still evaluated in segments, unless it is small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rewriter.proof.claims import Side
from rewriter.proof.inputs.cases import Case
from rewriter.proof.run.segmented import run_in_segments
from rewriter.proof.run.whole import ModelRuns, Progress, Wanted, run_whole, within

WIDE_SEGMENT = 2**24
"""Maximum size of the weights, in bytes and in the model's own type, that are in float64 at a time."""


def run_model(side: Side, cases: Sequence[Case], wanted: Wanted, progress: Progress, *, by_blocks: bool) -> ModelRuns:
    """Run a model; with `by_blocks` it is never loaded as a whole.

    Raises:
        ValidationError: onnxruntime cannot load it, or refuses a case although `wanted.may_refuse` is not set.
        UsageError: with `by_blocks`, a case feeds an input that has a default.
    """
    if by_blocks:
        return run_in_segments(side, cases, wanted, progress)
    if not wanted.wide or not _by_segments(side, cases):
        return run_whole(side, cases, wanted, progress)
    if not wanted.ways:
        return _evaluated(side, cases, wanted, progress)
    plain = len(wanted.ways) / (len(wanted.ways) + 1)
    runs = run_whole(side, cases, replace(wanted, wide=False), within(progress, 0.0, plain))
    if not runs.cases:
        return runs
    found = _evaluated(side, runs.cases, wanted, within(progress, plain, 1.0))
    return replace(runs, truth=found.truth, reference=found.reference)


def _by_segments(side: Side, cases: Sequence[Case]) -> bool:
    """Whether a model is evaluated in segments; these contain the defaults of inputs, so a default cannot be fed."""
    fed = {name for case in cases for name in case.feeds}
    return side.model.size > WIDE_SEGMENT and fed <= set(side.main.inputs)


def _evaluated(side: Side, cases: Sequence[Case], wanted: Wanted, progress: Progress) -> ModelRuns:
    evaluated = Wanted(wide=True, what=f"{wanted.what} in float64")
    return run_in_segments(side, cases, evaluated, progress, WIDE_SEGMENT)
