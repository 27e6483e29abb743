"""Run a model on all cases and in every way: loaded as a whole, or segment by segment.

In segments it is never loaded as a whole. For each segment in turn, every way of running it loads that segment alone
and continues with the values that it computed itself, so the weights of a segment are read from disk once. onnxruntime
fuses nodes within segments only, and nothing is evaluated in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import onnx

from rewriter.arrays import Array, magnitude
from rewriter.errors import UsageError, ValidationError
from rewriter.files.load import LoadedModel
from rewriter.graph.extract import Cut, split, with_outputs
from rewriter.ort.sessions import Session, open_session
from rewriter.proof.claims import Side
from rewriter.proof.inputs.cases import Case
from rewriter.proof.reference.float64 import NoReference, open_reference
from rewriter.text import quoted

Results = Sequence[Mapping[str, Array]]
"""Case by case, a map from an output to its array."""

TAPPED = 2
"""Number of cases in which tapped tensors are recorded: they become the real inputs of the blocks."""

SEGMENT = 2**27
"""Maximum size of the weights of a segment in bytes; a larger weight forms a segment by itself."""

Progress = Callable[[str, int, int], None]
"""Called with a description of the current step, the number of steps done, and the number of all steps."""


@dataclass(frozen=True)
class Way:
    """A way to run a model: an execution provider, with or without graph optimisation."""

    provider: str
    optimise: bool

    def __str__(self) -> str:
        return f"{self.provider}, {'default optimisation' if self.optimise else 'no optimisation'}"


@dataclass(frozen=True)
class Wanted:
    """What to run and record of a model.

    Attributes:
        ways: how to run it.
        taps: tensors whose values are recorded, in the first way and the first `TAPPED` cases.
        watched: tensors whose largest finite |entry| over all cases is recorded, in the first way.
        wide: whether to evaluate it in float64, if it is loaded as a whole.
        may_refuse: whether cases that the first way cannot run are dropped; otherwise they are an error.
        what: the model's name in progress messages.
    """

    ways: tuple[Way, ...] = ()
    taps: tuple[str, ...] = ()
    watched: tuple[str, ...] = ()
    wide: bool = False
    may_refuse: bool = False
    what: str = "the model"


@dataclass(eq=False)
class Ran:
    """The results of one way of running a model.

    Attributes:
        results: the graph's outputs, case by case.
        load_seconds: how long onnxruntime took to load the model.
        cpu_nodes: as in `Session`.
    """

    results: Results
    load_seconds: float = 0.0
    cpu_nodes: tuple[str, ...] | None = ()

    def loaded(self, session: Session) -> None:
        """Count a session that was opened."""
        self.load_seconds += session.load_seconds
        known = self.cpu_nodes is not None and session.cpu_nodes is not None
        self.cpu_nodes = (*(self.cpu_nodes or ()), *(session.cpu_nodes or ())) if known else None


@dataclass(frozen=True, eq=False)
class ModelRuns:
    """All runs of one model.

    Attributes:
        cases: the cases that the model accepts.
        skipped: the names of the others, with reasons.
        ways: the results of each way.
        taps: values of the tapped tensors in the first cases.
        truth: its float64 evaluation; None if there is none.
        segments: number of parts that were loaded one after the other.
        reached: largest finite |entry| of each watched tensor over all cases.
    """

    cases: tuple[Case, ...]
    skipped: tuple[str, ...]
    ways: Mapping[Way, Ran]
    taps: Results
    truth: Results | None
    segments: int = 1
    reached: Mapping[str, float] = field(default_factory=dict)


def run_model(side: Side, cases: Sequence[Case], wanted: Wanted, progress: Progress, *, by_blocks: bool) -> ModelRuns:
    """Run a model; with `by_blocks` it is never loaded as a whole.

    Raises:
        ValidationError: onnxruntime cannot load it, or refuses a case although `wanted.may_refuse` is not set.
        UsageError: with `by_blocks`, a case feeds an input that has a default.
    """
    return (run_in_segments if by_blocks else run_whole)(side, cases, wanted, progress)


def open_part(model: LoadedModel, provider: str, *, optimise: bool, prepack: bool) -> Session:
    """Open a session on a part of a model; external weights are memory-mapped."""
    return open_session(model.proto, provider, optimise=optimise, base_dir=model.base_dir, prepack=prepack)


def _note(reached: dict[str, float], values: Mapping[str, Array], names: Iterable[str]) -> None:
    """Update the largest finite |entry| of the tensors `names`, in place."""
    for name in names:
        if name in values:
            reached[name] = max(reached.get(name, 0.0), magnitude(values[name]))


# -- as a whole ------------------------------------------------------------------------------------------------------


def run_whole(side: Side, cases: Sequence[Case], wanted: Wanted, progress: Progress) -> ModelRuns:
    """Load the model once for each way, and once in float64.

    Raises:
        ValidationError: onnxruntime cannot load it, or refuses a case although `wanted.may_refuse` is not set.
    """
    kept, skipped = list(cases), list[str]()
    taps: list[Mapping[str, Array]] = []
    reached: dict[str, float] = {}
    ways: dict[Way, Ran] = {}
    turns = (len(wanted.ways) + wanted.wide) * len(cases)
    # Only the first way records tensors inside the model: additional outputs would keep onnxruntime from fusing nodes
    # in the others.
    for number, way in enumerate(wanted.ways):
        taps_here = () if number else (*wanted.taps, *wanted.watched)
        session = open_tapped(side, taps_here, way.provider, optimise=way.optimise)
        results: list[Mapping[str, Array]] = []
        for place, case in enumerate(tuple(kept)):
            progress(f"running {wanted.what}: {case.name}", number * len(cases) + place, turns)
            try:
                values = session.run(case.feeds)
            except ValidationError as error:
                if number or not wanted.may_refuse:
                    raise
                skipped.append(f"{case.name}: {error}")
                kept.remove(case)
                continue
            results.append({name: values[name] for name in side.main.outputs})
            if not number:
                known = {**case.feeds, **values}
                _note(reached, known, wanted.watched)
                if len(taps) < TAPPED:
                    taps.append({name: known[name] for name in wanted.taps})
        ways[way] = Ran(results)
        ways[way].loaded(session)
        del session  # before the next one is loaded: each may hold a copy of the weights
    truth: list[Mapping[str, Array]] | None = None
    if wanted.wide:
        with suppress(NoReference):
            reference, exact = open_reference(side.model.proto, side.model.base_dir), list[Mapping[str, Array]]()
            for place, case in enumerate(kept):
                done = len(wanted.ways) * len(cases) + place
                progress(f"evaluating {wanted.what} in float64: {case.name}", done, turns)
                exact.append(reference.run(case.feeds))
            truth = exact
    return ModelRuns(tuple(kept), tuple(skipped), ways, taps, truth, reached=reached)


def open_model(model: LoadedModel, provider: str, *, optimise: bool) -> Session:
    """Open a session on a whole model."""
    if model.path is not None and not model.mapped:
        return open_session(model.path, provider, optimise=optimise)
    return open_session(model.proto, provider, optimise=optimise, base_dir=model.base_dir)


def open_tapped(side: Side, names: Sequence[str], provider: str, *, optimise: bool = False) -> Session:
    """Open a session that also outputs tensors inside a model."""
    inside = [name for name in dict.fromkeys(names) if name not in side.main.outputs and name not in side.main.inputs]
    if not inside:
        return open_model(side.model, provider, optimise=optimise)
    proto = with_outputs(side.model.proto, side.main, inside)
    return open_session(proto, provider, optimise=optimise, base_dir=side.model.base_dir)


# -- in segments -----------------------------------------------------------------------------------------------------

_Values = dict[str, Array]


def run_in_segments(
    side: Side, cases: Sequence[Case], wanted: Wanted, progress: Progress, limit: int = SEGMENT
) -> ModelRuns:
    """Run the model segment by segment.

    Raises:
        ValidationError: onnxruntime cannot load a segment, or refuses a case although `wanted.may_refuse` is not set.
        UsageError: a case feeds an input that has a default; the segments contain the default.
    """
    given = {name for case in cases for name in case.feeds} - set(side.main.inputs)
    if given:
        raise UsageError(
            f"input {quoted(min(given))} has a default, which a proof by blocks cannot override; leave it out, or "
            "prove with --option proof=whole"
        )
    cuts = split(side.main, (*wanted.taps, *wanted.watched), limit)
    # Of each way, the values of the tensors that later segments read, case by case.
    flows: list[list[_Values]] = [[dict(case.feeds) for case in cases] for _ in wanted.ways]
    ways = {way: Ran(()) for way in wanted.ways}
    kept, skipped = list(cases), list[str]()
    reached: dict[str, float] = {}
    for number, part in enumerate(cuts):
        progress(f"running {wanted.what}, segment {number + 1} of {len(cuts)}", number, len(cuts))
        model = side.extracted(side.main, part)
        for way, flow in zip(wanted.ways, flows, strict=True):
            # Only the first way may refuse a case. It is then dropped everywhere, in all ways alike: a case that one
            # way accepts and another refuses is an error, not an invalid input.
            refused = _run_part(flow, way, ways[way], model, part, may_refuse=wanted.may_refuse and flow is flows[0])
            for index in sorted(refused, reverse=True):  # from the end, so that earlier indices stay valid
                skipped.append(f"{kept.pop(index).name}: {refused[index]}")
                for other in flows:
                    del other[index]
        later = {name for cut in cuts[number + 1 :] for name in cut.inputs}.union(side.main.outputs)
        for values in flows[0] if flows else ():
            _note(reached, values, set(wanted.watched).intersection((*part.inputs, *part.outputs)))
        for way_number, flow in enumerate(flows):
            for place, values in enumerate(flow):
                tapped = wanted.taps if place < TAPPED and not way_number else ()
                for name in values.keys() - later.union(tapped):
                    del values[name]
    for ran, flow in zip(ways.values(), flows, strict=True):
        ran.results = [{name: values[name] for name in side.main.outputs} for values in flow]
    # Taps are kept for the first cases only. A case that moves up because another is refused later lacks some of them.
    complete = [values for values in (flows[0] if flows else ()) if all(name in values for name in wanted.taps)]
    taps = [{name: values[name] for name in wanted.taps} for values in complete[:TAPPED]]
    return ModelRuns(tuple(kept), tuple(skipped), ways, taps, None, segments=len(cuts), reached=reached)


def _run_part(
    flow: Sequence[_Values], way: Way, ran: Ran, model: LoadedModel, part: Cut, *, may_refuse: bool
) -> dict[int, str]:
    """Run one segment in one way. Returns the cases that it refused, with reasons."""
    refused: dict[int, str] = {}
    if not flow:
        return refused
    # Inference knows no types behind custom operators.
    for value in model.proto.graph.input:
        value.type.tensor_type.elem_type = _elem_type(flow[0][value.name])
    session = open_part(model, way.provider, optimise=way.optimise, prepack=False)
    ran.loaded(session)
    read = {value.name for value in model.proto.graph.input}.intersection(part.inputs)
    for index, values in enumerate(flow):
        try:
            values.update(session.run({name: values[name] for name in read}))
        except ValidationError as error:
            if not may_refuse:
                raise
            refused[index] = str(error)
    return refused


def _elem_type(array: Array) -> int:
    if array.dtype.kind in "OUS":
        return int(onnx.TensorProto.STRING)
    return int(onnx.helper.np_dtype_to_tensor_dtype(np.dtype(array.dtype)))
