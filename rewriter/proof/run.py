"""Run a model on all cases and in every way, segment by segment; a model that is loaded as a whole is one segment.

For each segment in turn, every way of running it loads that segment alone and continues with the values that it
computed itself, so the weights of a segment are read from disk once. onnxruntime fuses nodes within segments only, and
only a whole model is evaluated in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
import onnx

from rewriter.arrays import Array
from rewriter.errors import UsageError, ValidationError
from rewriter.files.load import LoadedModel
from rewriter.graph.extract import Cut, split, with_outputs
from rewriter.ort.sessions import Session, open_session
from rewriter.proof.claims import Side
from rewriter.proof.inputs.cases import Case
from rewriter.proof.reference.float64 import NoReference, open_reference
from rewriter.proof.rule import magnitude
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
    """A way to run a model: a provider, with or without graph optimisation, once more to see what it never writes."""

    provider: str
    optimise: bool
    again: bool = False

    def __str__(self) -> str:
        level = "default optimisation" if self.optimise else "no optimisation"
        return f"{self.provider}, {level}{', again' if self.again else ''}"


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
        cpu_nodes: as in `Session`.
        defined: as in `Session`.
    """

    results: Results = ()
    cpu_nodes: tuple[str, ...] | None = ()
    defined: tuple[str, ...] = ()

    def loaded(self, session: Session) -> None:
        """Count a session that was opened."""
        self.defined += session.defined
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
        UsageError: with `by_blocks`, a case feeds an input that has a default; the segments contain the default.
    """
    given = {name for case in cases for name in case.feeds} - set(side.main.inputs)
    if given and by_blocks:
        raise UsageError(
            f"input {quoted(min(given))} has a default, which a proof by blocks cannot override; leave it out, or "
            "prove with --option proof=whole"
        )
    inside = (*wanted.taps, *wanted.watched)
    cuts: Sequence[Cut | None] = split(side.main, inside, SEGMENT) if by_blocks else (None,)
    # Of each way, the values of the tensors that later segments read, case by case.
    flows: list[list[dict[str, Array]]] = [[dict(case.feeds) for case in cases] for _ in wanted.ways]
    ways = {way: Ran() for way in wanted.ways}
    kept, skipped = list(cases), list[str]()
    reached: dict[str, float] = {}
    for number, part in enumerate(cuts):
        later = {name for cut in cuts[number + 1 :] if cut is not None for name in cut.inputs} | {*side.main.outputs}
        for place, (way, flow) in enumerate(zip(wanted.ways, flows, strict=True)):
            progress(f"running {wanted.what}, {way}", number * len(flows) + place, len(cuts) * len(flows))
            # Only the first way records tensors inside the model, since additional outputs keep onnxruntime from fusing
            # nodes, and only it may refuse a case: one that another way refuses is an error, not an invalid input.
            here = () if place else inside
            over = flows[wanted.ways.index(replace(way, again=False))] if way.again else ()
            may_refuse = wanted.may_refuse and not place
            refused = _run_part(side, part, way, ways[way], flow, here, over=over, may_refuse=may_refuse)
            skipped += [f"{kept[index].name}: {error}" for index, error in refused.items()]
            for index in sorted(refused, reverse=True):  # from the end, so that earlier indices stay valid
                del kept[index]
                for other in flows:
                    del other[index]
            for index, values in enumerate(flow):
                for name in () if place else values.keys() & {*wanted.watched}:
                    reached[name] = max(reached.get(name, 0.0), magnitude(values[name]))
                for name in values.keys() - later.union(() if place or index >= TAPPED else wanted.taps):
                    del values[name]
    for ran, flow in zip(ways.values(), flows, strict=True):
        ran.results = [{name: values[name] for name in side.main.outputs} for values in flow]
    # A case that moves up because another is refused later lacks some of the taps.
    complete = [values for values in (flows[0] if flows else ()) if all(name in values for name in wanted.taps)]
    taps = [{name: values[name] for name in wanted.taps} for values in complete[:TAPPED]]
    truth = _in_float64(side.model, kept, progress) if wanted.wide and not by_blocks else None
    return ModelRuns(tuple(kept), tuple(skipped), ways, taps, truth, segments=len(cuts), reached=reached)


def _run_part(
    side: Side,
    part: Cut | None,
    way: Way,
    ran: Ran,
    flow: Sequence[dict[str, Array]],
    taps: Sequence[str],
    *,
    over: Sequence[Mapping[str, Array]],
    may_refuse: bool,
) -> dict[int, str]:
    """Run one segment in one way, and add what it computes to the values of each case.

    Returns the cases that it refused, with reasons.
    """
    refused: dict[int, str] = {}
    if not flow:
        return refused
    read: Sequence[str] | None = None
    if part is None:
        session = open_tapped(side, taps, way.provider, optimise=way.optimise)
    else:
        model = side.extracted(part)
        for value in model.proto.graph.input:  # inference knows no types behind custom operators
            value.type.tensor_type.elem_type = _elem_type(flow[0][value.name])
        session = open_model(model, way.provider, optimise=way.optimise, prepack=False)
        read = [value.name for value in model.proto.graph.input if value.name in part.inputs]
    ran.loaded(session)
    for index, values in enumerate(flow):
        feeds = values if read is None else {name: values[name] for name in read}
        try:
            values.update(session.run(feeds, over=over[index] if over else None))
        except ValidationError as error:
            if not may_refuse:
                raise
            refused[index] = str(error)
    return refused


def _in_float64(model: LoadedModel, cases: Sequence[Case], progress: Progress) -> Results | None:
    with suppress(NoReference):
        reference, exact = open_reference(model.proto, model.base_dir), list[Mapping[str, Array]]()
        for place, case in enumerate(cases):
            progress(f"evaluating in float64: {case.name}", place, len(cases))
            exact.append(reference.run(case.feeds))
        return exact
    return None


def _elem_type(array: Array) -> int:
    if array.dtype.kind in "OUS":
        return int(onnx.TensorProto.STRING)
    return int(onnx.helper.np_dtype_to_tensor_dtype(np.dtype(array.dtype)))


def open_model(model: LoadedModel, provider: str, *, optimise: bool, prepack: bool = True) -> Session:
    """Open a session on a model, or on a part of one, whose external weights are memory-mapped."""
    if model.path is not None and not model.mapped:
        return open_session(model.path, provider, optimise=optimise, prepack=prepack)
    return open_session(model.proto, provider, optimise=optimise, base_dir=model.base_dir, prepack=prepack)


def open_tapped(side: Side, names: Sequence[str], provider: str, *, optimise: bool = False) -> Session:
    """Open a session that also outputs tensors inside a model."""
    inside = [name for name in dict.fromkeys(names) if name not in side.main.outputs and name not in side.main.inputs]
    if not inside:
        return open_model(side.model, provider, optimise=optimise)
    proto = with_outputs(side.model.proto, side.main, inside)
    return open_session(proto, provider, optimise=optimise, base_dir=side.model.base_dir)
