"""Two models of one signature: what they compute, and where that differs.

Comes in: two loaded models and how to compare them. Goes out: a filled-in `Comparison`. Used by
`rewriter.api.comparing`, which knows the options that users give.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from rewriter.api.faults import explain
from rewriter.api.known import Known, know
from rewriter.api.run import Run
from rewriter.comparison import Comparison, FaultRow
from rewriter.errors import ValidationError
from rewriter.files.load import LoadedModel
from rewriter.proof.boundaries import Boundary, boundaries
from rewriter.proof.cases import Case
from rewriter.proof.endtoend import coarsest_allowance
from rewriter.proof.float64 import NoReference, open_reference
from rewriter.proof.inputs import load_cases, make_cases
from rewriter.proof.isolate import Bench, Isolated, isolate, narrow
from rewriter.proof.pairs import Results, compare_pair, open_named
from rewriter.proof.regions import RegionProof, prove_region, regions_of
from rewriter.proof.runs import Way
from rewriter.proof.taps import Tap, tap
from rewriter.proof.validate import Progress
from rewriter.proof.verdicts import PairProof, Rules

_MOST_FAULTS = 8
"""Guilty parts that are narrowed down."""


@dataclass(frozen=True)
class Pairing:
    """How to compare two models; the fields are the options of `rewriter.api.comparing.validate`."""

    providers: tuple[str, ...]
    inputs: Path | None
    dims: Mapping[str, int]
    seed: int
    rules: Rules
    taps: bool
    bisect: bool
    progress: Progress = field(repr=False)


@dataclass(frozen=True)
class Pair:
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
        """Run both, judge the outputs and the heads, and say where they differ where that was asked for."""
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
            notes=tuple(self._notes(regions, providers, reference)),
        )
        return self._attributed(result, cases, exact=truth is not None)

    def _cases(self) -> tuple[list[Case], list[str]]:
        """The inputs that A accepts, and the refusals."""
        proto, options = self.models[0].proto, self.pairing
        if options.inputs is not None:
            made = load_cases(options.inputs, proto)
        else:
            made = make_cases(proto, seed=options.seed, dims=options.dims)
        session = open_named("A", self.models[0], options.providers[0], optimise=False)
        kept, skipped = [], []
        for case in made:
            try:
                session.run(case.feeds)
                kept.append(case)
            except ValidationError as error:
                skipped.append(f"{case.name}: {error}")
        if not kept:
            raise ValidationError(
                f"model A runs on none of the {len(made)} inputs tried; give some with --inputs or sizes with "
                f"--dim ({skipped[0]})"
            )
        return kept, skipped

    def _regions(self) -> dict[str, RegionProof]:
        found = {}
        for number, claim in enumerate(self.known.claims):
            self.pairing.progress(f"proving the heads of {claim.name}", number, len(self.known.claims))
            ways = [Way(name, optimise) for name in self.pairing.providers for optimise in (False, True)]
            found[claim.name] = prove_region(regions_of(self.known.a, self.known.b, claim), claim, ways)
        return found

    def _notes(
        self, regions: Mapping[str, RegionProof], providers: Mapping[str, PairProof], reference: str
    ) -> list[str]:
        known = self.known
        notes = [f"block {name} is heads in the second model, but no block of the first" for name in known.unknown]
        untried = [name for name in known.programs if name not in regions]
        if untried:
            notes.append(
                f"the heads of {len(untried)} blocks could not be tried alone: another tool renamed their ends "
                f"({', '.join(untried[:3])}{', ...' if len(untried) > 3 else ''})"
            )
        judged = [each for proof in providers.values() for each in proof.outputs.values() if each.rule == "original"]
        if judged and not reference.startswith("no float64"):
            notes.append(
                f"float64 is no reference for {', '.join(dict.fromkeys(each.name for each in judged))}: somewhere a "
                "rounding decides, so that float64 computes something else; model A stands in"
            )
        return notes

    # -- where they differ ---------------------------------------------------------------------------------------

    def _attributed(self, result: Comparison, cases: Sequence[Case], *, exact: bool) -> Comparison:
        """With taps and faults; with graph optimisation where only that brings the difference out."""
        failed = bool(result.failures)
        if not self.pairing.taps and not (self.pairing.bisect and failed):
            return result
        marks = boundaries(self.known.a.main, self.known.b.main, self.known.landmarks)
        levels = (False, True) if failed else (False,)
        for optimise in levels if self.pairing.taps else ():
            with self.run.step("taps", "comparing every block's output"):
                result = replace(result, taps=self._taps(marks, cases, exact=exact, optimise=optimise))
            if result.first_exceeding is not None:
                break
        for optimise in levels if self.pairing.bisect and failed else ():
            with self.run.step("bisect", "trying every part alone"):
                isolated, faults = self._bisect(marks, cases, optimise=optimise)
            result = replace(result, isolated=isolated, faults=faults)
            if faults:
                return result
        if result.isolated is None:
            return result
        text = "every part alone is within its share: the difference is what small errors amount to together"
        return replace(result, notes=(*result.notes, text))

    def _taps(
        self, marks: Sequence[Boundary], cases: Sequence[Case], *, exact: bool, optimise: bool
    ) -> tuple[Tap, ...]:
        for truth in (True, False) if exact else (False,):
            with suppress(NoReference):
                return tap(
                    self.known.a,
                    self.known.b,
                    marks,
                    cases,
                    self.pairing.providers[0],
                    truth=truth,
                    coarse=self.coarse,
                    optimise=optimise,
                    certified=lambda: self.known.inexact,
                )
        return ()

    def _bisect(
        self, marks: Sequence[Boundary], cases: Sequence[Case], *, optimise: bool
    ) -> tuple[tuple[Isolated, ...], tuple[FaultRow, ...]]:
        bench = Bench(
            self.known.a,
            self.known.b,
            cases,
            self.pairing.providers[0],
            self.coarse,
            lambda: self.known.inexact,
            optimise,
            self.pairing.progress,
        )
        isolated = isolate(bench, marks)
        guilty = [each for each in isolated if each.guilty]
        faults = [explain(narrow(bench, marks, each), self.known) for each in guilty[:_MOST_FAULTS]]
        return isolated, tuple(faults)


@dataclass(frozen=True)
class _Certified:
    """A with certified heads, in float64, evaluated when first asked for."""

    pair: Pair
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
