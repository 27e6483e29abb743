"""Run a model, loaded as a whole, on all cases and in every way.

`rewriter.proof.run.segmented` does the same without ever loading the model as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rewriter.arrays import Array, magnitude
from rewriter.errors import ValidationError
from rewriter.graph.extract import with_outputs
from rewriter.ort.sessions import Session, open_session
from rewriter.proof.claims import Side
from rewriter.proof.inputs.cases import Case
from rewriter.proof.reference.float64 import NoReference, open_reference

Results = Sequence[Mapping[str, Array]]
"""Case by case, a map from an output to its array."""

TAPPED = 2
"""Number of cases in which tapped tensors are recorded: they become the real inputs of the blocks."""

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


@dataclass(frozen=True, eq=False)
class Ran:
    """The results of one way of running a model.

    Attributes:
        results: the graph's outputs, case by case.
        load_seconds: how long onnxruntime took to load the model.
        cpu_nodes: as in `Session`.
    """

    results: Results
    load_seconds: float
    cpu_nodes: tuple[str, ...] | None


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


def run_whole(side: Side, cases: Sequence[Case], wanted: Wanted, progress: Progress) -> ModelRuns:
    """Load the model once for each way, and once in float64.

    Raises:
        ValidationError: onnxruntime cannot load it, or refuses a case although `wanted.may_refuse` is not set.
    """
    kept, skipped = list(cases), list[str]()
    taps: list[Mapping[str, Array]] = []
    reached: dict[str, float] = {}
    ways: dict[Way, Ran] = {}
    turns = len(wanted.ways) + wanted.wide
    # Only the first way records tensors inside the model: additional outputs would keep onnxruntime from fusing nodes
    # in the others.
    for number, way in enumerate(wanted.ways):
        session = _open(side, way, () if number else (*wanted.taps, *wanted.watched))
        results: list[Mapping[str, Array]] = []
        for place, case in enumerate(tuple(kept)):
            progress(f"running {wanted.what}: {case.name}", number * len(cases) + place, turns * len(cases))
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
                note(reached, known, wanted.watched)
                if len(taps) < TAPPED:
                    taps.append({name: known[name] for name in wanted.taps})
        ways[way] = Ran(results, session.load_seconds, session.cpu_nodes)
        del session  # before the next one is loaded: each may hold a copy of the weights
    truth = _truth(side, kept, wanted, progress) if wanted.wide else None
    return ModelRuns(tuple(kept), tuple(skipped), ways, taps, truth, reached=reached)


def note(reached: dict[str, float], values: Mapping[str, Array], names: Iterable[str]) -> None:
    """Update the largest finite |entry| of the tensors `names`, in place."""
    for name in names:
        if name in values:
            reached[name] = max(reached.get(name, 0.0), magnitude(values[name]))


def _open(side: Side, way: Way, taps: Sequence[str]) -> Session:
    model = side.model
    missing = [name for name in dict.fromkeys(taps) if name not in side.main.outputs and name not in side.main.inputs]
    if missing:
        proto = with_outputs(model.proto, side.main, missing)
        return open_session(proto, way.provider, optimise=way.optimise, base_dir=model.base_dir)
    if model.path is not None and not model.mapped:
        return open_session(model.path, way.provider, optimise=way.optimise)
    return open_session(model.proto, way.provider, optimise=way.optimise, base_dir=model.base_dir)


def _truth(side: Side, cases: Sequence[Case], wanted: Wanted, progress: Progress) -> Results | None:
    """The float64 evaluation on all cases; None if there is none."""
    results = []
    try:
        reference = open_reference(side.model.proto, side.model.base_dir)
        for place, case in enumerate(cases):
            turns = len(wanted.ways) + 1
            done = len(wanted.ways) * len(cases) + place
            progress(f"evaluating {wanted.what} in float64: {case.name}", done, turns * len(cases))
            results.append(reference.run(case.feeds))
    except NoReference:
        return None
    return results
