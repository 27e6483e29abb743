"""Run a model in consecutive segments, so that it is never loaded as a whole.

The result has the form of that of `rewriter.proof.run.whole`. For each segment in turn, every way of running it loads
that segment alone and continues with the values that it computed itself, so the weights of a segment are read from disk
once. onnxruntime fuses nodes within segments only. Nothing is evaluated in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx

from rewriter.arrays import Array
from rewriter.errors import UsageError, ValidationError
from rewriter.files.load import LoadedModel
from rewriter.graph.extract import Cut
from rewriter.graph.segments import split
from rewriter.ort.sessions import Session, open_session
from rewriter.proof.claims import Side
from rewriter.proof.inputs.cases import Case
from rewriter.proof.run.whole import TAPPED, ModelRuns, Progress, Ran, Wanted, Way, note, run_whole
from rewriter.text import quoted

SEGMENT = 2**27
"""Maximum size of the weights of a segment in bytes; a larger weight forms a segment by itself."""

Values = dict[str, Array]
Feeds = Mapping[str, Array]


def run_model(side: Side, cases: Sequence[Case], wanted: Wanted, progress: Progress, *, by_blocks: bool) -> ModelRuns:
    """Run a model; with `by_blocks` it is never loaded as a whole.

    Raises:
        ValidationError: onnxruntime cannot load it, or refuses a case although `wanted.may_refuse` is not set.
        UsageError: with `by_blocks`, a case feeds an input that has a default.
    """
    return (run_in_segments if by_blocks else run_whole)(side, cases, wanted, progress)


def run_in_segments(
    side: Side, cases: Sequence[Case], wanted: Wanted, progress: Progress, limit: int = SEGMENT
) -> ModelRuns:
    """Run the model segment by segment.

    Raises:
        ValidationError: onnxruntime cannot load a segment, or refuses a case although `wanted.may_refuse` is not set.
        UsageError: a case feeds an input that has a default; the segments contain the default.
    """
    _check_defaults(side, cases)
    cuts = split(side.main, (*wanted.taps, *wanted.watched), limit)
    flows = [_Flow([dict(case.feeds) for case in cases]) for _ in wanted.ways]
    kept, skipped = list(cases), list[str]()
    reached: dict[str, float] = {}
    for number, part in enumerate(cuts):
        progress(f"running {wanted.what}, segment {number + 1} of {len(cuts)}", number, len(cuts))
        model = side.extracted(side.main, part)
        gone = _gone(cuts, number, set(side.main.outputs))
        for way, flow in zip(wanted.ways, flows, strict=True):
            load = _session_of(flow, way)
            # Only the first way may refuse a case. It is then dropped everywhere, in all engines alike: a case that one
            # way accepts and another refuses is an error, not an invalid input.
            refused = _run_on(flow, load, model, part, may_refuse=wanted.may_refuse and flow is flows[0])
            for index in sorted(refused, reverse=True):  # from the end, so that earlier indices stay valid
                skipped.append(f"{kept.pop(index).name}: {refused[index]}")
                for other in flows:
                    del other.values[index]
        for values in flows[0].values if flows else ():
            note(reached, values, set(wanted.watched).intersection((*part.inputs, *part.outputs)))
        for flow in flows:
            flow.forget(gone, first=TAPPED if flow is flows[0] else 0, taps=set(wanted.taps))
    ways = {way: flow.ran(side.main.outputs) for way, flow in zip(wanted.ways, flows, strict=True)}
    # Taps are kept for the first cases only. A case that moves up because another is refused later lacks some of them.
    complete = [values for values in (flows[0].values if flows else ()) if all(name in values for name in wanted.taps)]
    taps = [{name: values[name] for name in wanted.taps} for values in complete[:TAPPED]]
    return ModelRuns(
        cases=tuple(kept),
        skipped=tuple(skipped),
        ways=ways,
        taps=taps,
        truth=None,
        segments=len(cuts),
        reached=reached,
    )


@dataclass(eq=False)
class _Flow:
    """The state of one engine between segments: values of the tensors that later ones read, case by case."""

    values: list[Values]
    load_seconds: float = 0.0
    cpu_nodes: list[str] | None = field(default_factory=list)

    def forget(self, names: set[str], *, first: int, taps: set[str]) -> None:
        """Drop the values of `names`, except those of `taps` in the `first` cases."""
        for place, values in enumerate(self.values):
            for name in names - taps if place < first else names:
                values.pop(name, None)

    def outputs(self, names: Sequence[str]) -> list[Values]:
        return [{name: values[name] for name in names} for values in self.values]

    def ran(self, names: Sequence[str]) -> Ran:
        return Ran(self.outputs(names), self.load_seconds, None if self.cpu_nodes is None else tuple(self.cpu_nodes))


Load = Callable[[LoadedModel], Callable[[Feeds], Values]]
"""Loads a segment and returns a function that runs it."""


def _run_on(flow: _Flow, load: Load, model: LoadedModel, part: Cut, *, may_refuse: bool) -> dict[int, str]:
    """Run one engine on one segment. Returns the cases that it refused, with reasons."""
    refused: dict[int, str] = {}
    if not flow.values:
        return refused
    # Declared anew for each engine: float64 feeds the same segment with other types, and inference knows none behind
    # custom operators.
    for value in model.proto.graph.input:
        value.type.tensor_type.elem_type = _elem_type(flow.values[0][value.name])
    run = load(model)
    wanted = {value.name for value in model.proto.graph.input}
    for index, values in enumerate(flow.values):
        try:
            made = run({name: values[name] for name in part.inputs if name in wanted})
        except ValidationError as error:
            if not may_refuse:
                raise
            refused[index] = str(error)
            continue
        values.update(made)
    return refused


def _session_of(flow: _Flow, way: Way) -> Load:
    def load(model: LoadedModel) -> Callable[[Feeds], Values]:
        session = open_part(model, way.provider, optimise=way.optimise, prepack=False)
        flow.load_seconds += session.load_seconds
        known = flow.cpu_nodes is not None and session.cpu_nodes is not None
        flow.cpu_nodes = [*(flow.cpu_nodes or ()), *(session.cpu_nodes or ())] if known else None
        return session.run

    return load


def open_part(model: LoadedModel, provider: str, *, optimise: bool, prepack: bool) -> Session:
    """Open a session on a part of a model; external weights are memory-mapped."""
    return open_session(model.proto, provider, optimise=optimise, base_dir=model.base_dir, prepack=prepack)


def _elem_type(array: Array) -> int:
    if array.dtype.kind in "OUS":
        return int(onnx.TensorProto.STRING)
    return int(onnx.helper.np_dtype_to_tensor_dtype(np.dtype(array.dtype)))


def _gone(cuts: Sequence[Cut], number: int, keep: set[str]) -> set[str]:
    """The tensors that no later segment reads."""
    later: set[Any] = {name for cut in cuts[number + 1 :] for name in cut.inputs}
    here = {name for cut in cuts[: number + 1] for name in (*cut.inputs, *cut.outputs)}
    return here - later - keep


def _check_defaults(side: Side, cases: Sequence[Case]) -> None:
    given = {name for case in cases for name in case.feeds} - set(side.main.inputs)
    if given:
        raise UsageError(
            f"input {quoted(min(given))} has a default, which a proof by blocks cannot override; leave it out, or "
            "prove with --option proof=whole"
        )
