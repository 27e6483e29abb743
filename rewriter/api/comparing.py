"""`validate` and `diff`: whether two models compute the same, and where they differ.

Comes in: two models and options. Goes out: a `Comparison`. Nothing is written.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import onnx

from rewriter.api.faults import explain
from rewriter.api.known import Known, know
from rewriter.api.rewriting import chosen_providers
from rewriter.api.run import Run, name_of, silent
from rewriter.comparison import Comparison, FaultRow
from rewriter.differences.models import difference
from rewriter.errors import ExitStatus, UsageError, ValidationError
from rewriter.files.load import LoadedModel, load_model
from rewriter.proof.boundaries import Boundary, boundaries
from rewriter.proof.cases import Case
from rewriter.proof.endtoend import coarsest_allowance
from rewriter.proof.float64 import NoReference, open_reference
from rewriter.proof.inputs import load_cases, make_cases
from rewriter.proof.isolate import Bench, Isolated, isolate, narrow
from rewriter.proof.pairs import PairProof, Results, Rules, Tolerance, compare_pair, open_model
from rewriter.proof.regions import RegionProof, prove_region
from rewriter.proof.signature import signature_differences
from rewriter.proof.taps import Tap, tap
from rewriter.proof.validate import Progress

Model = str | os.PathLike[str] | onnx.ModelProto
Tolerances = float | Mapping[str, float] | Mapping[str | None, float]
"""One number for all outputs, or output name to number; None is the name of all that are not named."""

_MOST_FAULTS = 8
"""Guilty parts that are narrowed down."""


@dataclass(frozen=True)
class Pairing:
    """How to compare two models; see `validate` for the meaning of each field."""

    providers: tuple[str, ...]
    inputs: Path | None
    dims: Mapping[str, int]
    seed: int
    rules: Rules
    taps: bool
    bisect: bool
    progress: Progress = field(repr=False)


def validate(
    original: Model,
    rewritten: Model,
    *,
    providers: Sequence[str] | None = None,
    inputs: str | os.PathLike[str] | None = None,
    dims: Mapping[str, int] | None = None,
    seed: int = 0,
    atol: Tolerances | None = None,
    rtol: Tolerances | None = None,
    top_k: int | None = None,
    taps: bool = False,
    bisect: bool = False,
    progress: Progress = silent,
) -> Comparison:
    """Judge whether `rewritten` computes what `original` does, against a float64 evaluation of the original.

    Any two models of one signature will do. Where `rewritten` was made by this tool, the heads of each block are also
    tried alone, on adversarial points.

    Args:
        original: path of an ONNX file, or a model in memory.
        rewritten: the other one.
        providers: execution providers, `cpu` and `cuda`; default cpu, and cuda where it works.
        inputs: an npz file with inputs, instead of generated ones.
        dims: sizes for symbolic dimensions of the generated inputs.
        seed: seed of the generated inputs.
        atol: absolute tolerance, for all outputs or by output name. Outputs with a tolerance are judged by
            |rewritten - original| <= atol + rtol |original| alone.
        rtol: relative tolerance, likewise.
        top_k: also say how much of the k best entries of each row both models have.
        taps: compare every block's output as well, and find the first whose error exceeds its share.
        bisect: if the models differ, try every part of `rewritten` alone and name the guilty ones.
        progress: called with (what is being done, steps done, steps in all).

    Returns:
        The comparison; `exit_status` is 0 when everything held, 1 when not, or when the signatures differ.

    Raises:
        UsageError: an option cannot be followed.
        ModelError: a model is unreadable, malformed or unsafe.
        ProviderError: a requested execution provider is not available.
        ValidationError: nothing could be compared, for example since a model does not run.
    """
    pairing = _pairing(providers, inputs, dims, seed, (atol, rtol), top_k, taps=taps, bisect=bisect, progress=progress)
    return _compare(original, rewritten, pairing, graph=False, outputs=True)


def diff(
    a: Model,
    b: Model,
    *,
    graph: bool = True,
    outputs: bool = True,
    providers: Sequence[str] | None = None,
    inputs: str | os.PathLike[str] | None = None,
    dims: Mapping[str, int] | None = None,
    seed: int = 0,
    atol: Tolerances | None = None,
    rtol: Tolerances | None = None,
    top_k: int | None = None,
    taps: bool = False,
    bisect: bool = False,
    progress: Progress = silent,
) -> Comparison:
    """Compare two models: their files, and what they compute.

    Args:
        a: path of an ONNX file, or a model in memory.
        b: the other one.
        graph: compare operators, nodes, weights bit for bit, metadata.
        outputs: run both and compare the outputs as `validate` does.
        providers: as for `validate`, like all that follow.
        inputs: see there.
        dims: see there.
        seed: see there.
        atol: see there.
        rtol: see there.
        top_k: see there.
        taps: see there.
        bisect: see there.
        progress: see there.

    Returns:
        The comparison; `exit_status` is 0 when both compute the same, or without `outputs`, when both are the same
        graph with the same weights; else 1.

    Raises:
        UsageError: neither graph nor outputs are to be compared, or as for `validate`.
        ModelError: as for `validate`, like the others.
        ProviderError: see there.
        ValidationError: see there.
    """
    if not graph and not outputs:
        raise UsageError("nothing to compare: leave the graph or the outputs in")
    if not outputs and (taps or bisect):
        raise UsageError("taps and bisect need the models to be run: leave the outputs in")
    pairing = _pairing(providers, inputs, dims, seed, (atol, rtol), top_k, taps=taps, bisect=bisect, progress=progress)
    return _compare(a, b, pairing, graph=graph, outputs=outputs)


def _pairing(
    providers: Sequence[str] | None,
    inputs: str | os.PathLike[str] | None,
    dims: Mapping[str, int] | None,
    seed: int,
    tolerances: tuple[Tolerances | None, Tolerances | None],
    top_k: int | None,
    *,
    taps: bool,
    bisect: bool,
    progress: Progress,
) -> Pairing:
    if top_k is not None and top_k < 1:
        raise UsageError(f"top-k is {top_k}; it must be at least 1")
    return Pairing(
        providers=chosen_providers(providers),
        inputs=None if inputs is None else Path(inputs),
        dims=dict(dims or {}),
        seed=seed,
        rules=Rules(_tolerances(*tolerances), top_k),
        taps=taps,
        bisect=bisect,
        progress=progress,
    )


def _tolerances(atol: Tolerances | None, rtol: Tolerances | None) -> dict[str | None, Tolerance]:
    absolute, relative = (_by_name(given) for given in (atol, rtol))
    for value in (*absolute.values(), *relative.values()):
        if not 0.0 <= value < float("inf"):
            raise UsageError(f"a tolerance is {value:g}; it must be a number from 0")
    return {
        name: Tolerance(absolute.get(name, absolute.get(None, 0.0)), relative.get(name, relative.get(None, 0.0)))
        for name in {**absolute, **relative}
    }


def _by_name(given: Tolerances | None) -> dict[str | None, float]:
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return dict(given.items())
    return {None: float(given)}


def _compare(a: Model, b: Model, pairing: Pairing, *, graph: bool, outputs: bool) -> Comparison:
    run = Run(pairing.progress)
    with run.step("load", "loading"):
        models = load_model(a), load_model(b)
    result = Comparison(
        a=name_of(a),
        b=name_of(b),
        signature=signature_differences(models[0].proto, models[1].proto),
        graph=None,
        reference="",
        cases=(),
        skipped=(),
        providers={},
        blocks={},
        regions={},
        taps=None,
        isolated=None,
        faults=(),
        failures=(),
        notes=(),
        seconds={},
        exit_status=ExitStatus.CONVERTED,
    )
    if graph:
        with run.step("graph", "comparing the graphs"):
            result = replace(result, graph=difference(*models))
    if result.signature:
        result = replace(result, failures=tuple(f"other signature: {text}" for text in result.signature))
    elif outputs:
        _check_names(pairing.rules, models[0])
        result = _Pair(models, pairing, run).compare(result)
    elif result.graph is not None and not result.graph.same:
        result = replace(result, failures=("the graphs differ",))
    status = ExitStatus.VALIDATION_FAILED if result.failures else ExitStatus.CONVERTED
    return replace(result, exit_status=status, seconds=run.seconds())


def _check_names(rules: Rules, model: LoadedModel) -> None:
    known = [value.name for value in model.proto.graph.output]
    for name in rules.tolerances:
        if name is not None and name not in known:
            raise UsageError(f"a tolerance is given for '{name}', which is no output; outputs are: {', '.join(known)}")


@dataclass(frozen=True)
class _Pair:
    """Two models of one signature, and how to compare what they compute."""

    models: tuple[LoadedModel, LoadedModel]
    pairing: Pairing
    run: Run

    @cached_property
    def known(self) -> Known:
        """Blocks and heads."""
        return know(*self.models)

    @cached_property
    def coarse(self) -> float:
        """What is allowed without a reference, as a share of the largest value."""
        return coarsest_allowance(self.models[0].proto)

    def compare(self, result: Comparison) -> Comparison:
        with self.run.step("inputs", "making inputs"):
            cases, skipped = self._cases()
        with self.run.step("float64", "evaluating in float64"):
            reference, truth = _truth(self.models[0], cases, self.pairing.progress)
        providers: dict[str, PairProof] = {}
        certified = _Certified(self, cases)
        with self.run.step("outputs", "comparing outputs"):
            for name in self.pairing.providers:
                providers[name] = compare_pair(self.models, cases, truth, name, self.pairing.rules, certified.get)
        with self.run.step("blocks", "trying the heads of each block"):
            regions = self._regions()
        failures = [
            f"output {each.name} on {each.where}: {each.reason}"
            for proof in providers.values()
            for each in proof.outputs.values()
            if each.reason is not None
        ]
        failures += [text for region in regions.values() for text in region.failures]
        result = replace(
            result,
            reference=reference,
            cases=tuple(case.name for case in cases),
            skipped=tuple(skipped),
            providers=providers,
            blocks=dict(self.known.programs),
            regions=regions,
            failures=tuple(failures),
            notes=tuple(self._notes(regions)),
        )
        return self._attributed(result, cases, exact=truth is not None)

    def _cases(self) -> tuple[list[Case], list[str]]:
        """The inputs that A accepts, and the refusals."""
        proto, options = self.models[0].proto, self.pairing
        if options.inputs is not None:
            made = load_cases(options.inputs, proto)
        else:
            made = make_cases(proto, seed=options.seed, dims=options.dims)
        session = open_model(self.models[0], options.providers[0], optimise=False)
        kept, skipped = [], []
        for case in made:
            try:
                session.run(case.feeds)
                kept.append(case)
            except ValidationError as error:
                skipped.append(f"{case.name}: {error}")
        if not kept:
            raise ValidationError(
                f"the first model runs on none of the {len(made)} inputs tried; give some with --inputs or sizes with "
                f"--dim ({skipped[0]})"
            )
        return kept, skipped

    def _regions(self) -> dict[str, RegionProof]:
        found = {}
        for number, claim in enumerate(self.known.claims):
            self.pairing.progress(f"proving the heads of {claim.name}", number, len(self.known.claims))
            found[claim.name] = prove_region(self.known.a, self.known.b, claim, self.pairing.providers)
        return found

    def _notes(self, regions: Mapping[str, RegionProof]) -> list[str]:
        known = self.known
        notes = [f"block {name} is heads in the second model, but no block of the first" for name in known.unknown]
        untried = [name for name in known.programs if name not in regions]
        if untried:
            notes.append(
                f"the heads of {len(untried)} blocks could not be tried alone: another tool renamed their ends "
                f"({', '.join(untried[:3])}{', ...' if len(untried) > 3 else ''})"
            )
        return notes

    # -- where they differ ---------------------------------------------------------------------------------------

    def _attributed(self, result: Comparison, cases: Sequence[Case], *, exact: bool) -> Comparison:
        failed = bool(result.failures)
        if not self.pairing.taps and not (self.pairing.bisect and failed):
            return result
        marks = boundaries(self.known.a.main, self.known.b.main, self.known.landmarks)
        if self.pairing.taps:
            with self.run.step("taps", "comparing every block's output"):
                result = replace(result, taps=self._taps(marks, cases, exact=exact))
        if self.pairing.bisect and failed:
            with self.run.step("bisect", "trying every part alone"):
                isolated, faults = self._bisect(marks, cases)
            result = replace(result, isolated=isolated, faults=faults)
            if not faults:
                text = "every part alone is within its share: the difference is what small errors amount to together"
                result = replace(result, notes=(*result.notes, text))
        return result

    def _taps(self, marks: Sequence[Boundary], cases: Sequence[Case], *, exact: bool) -> tuple[Tap, ...]:
        sides, provider = (self.known.a, self.known.b), self.pairing.providers[0]
        if exact:
            with suppress(NoReference):
                return tap(
                    *sides, marks, cases, provider, truth=True, coarse=self.coarse, certified=lambda: self.known.inexact
                )
        return tap(*sides, marks, cases, provider, truth=False, coarse=self.coarse)

    def _bisect(
        self, marks: Sequence[Boundary], cases: Sequence[Case]
    ) -> tuple[tuple[Isolated, ...], tuple[FaultRow, ...]]:
        bench = Bench(
            self.known.a,
            self.known.b,
            cases,
            self.pairing.providers[0],
            self.coarse,
            lambda: self.known.inexact,
            self.pairing.progress,
        )
        isolated = isolate(bench, marks)
        guilty = [each for each in isolated if each.guilty]
        faults = [explain(narrow(bench, marks, each), self.known) for each in guilty[:_MOST_FAULTS]]
        return isolated, tuple(faults)


@dataclass(frozen=True)
class _Certified:
    """A with certified heads, in float64, evaluated when first asked for."""

    pair: _Pair
    cases: Sequence[Case]

    def get(self) -> Results | None:
        return self._results

    @cached_property
    def _results(self) -> Results | None:
        side = self.pair.known.inexact
        if side is None:
            return None
        return _truth(side.model, self.cases, self.pair.pairing.progress)[1]


def _truth(model: LoadedModel, cases: Sequence[Case], progress: Progress) -> tuple[str, Results | None]:
    """What computes in float64, or why nothing does; and the results."""
    try:
        reference = open_reference(model.proto, model.base_dir)
        results = []
        for number, case in enumerate(cases):
            progress(f"evaluating in float64: {case.name}", number, len(cases))
            results.append(reference.run(case.feeds))
    except NoReference as reason:
        return f"no float64 reference: {reason}", None
    return reference.how, results
