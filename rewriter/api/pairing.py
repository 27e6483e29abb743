"""Compares what two models with the same inputs and outputs compute, and locates the differences.

`rewriter.api.comparing` handles the options that users give; this module fills in the `Comparison`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

from passes.network.names import COUNT, ROWS
from rewriter.api.cases import accepted_cases, blame_inputs, failures_of
from rewriter.api.faults import explain
from rewriter.api.known import Known, know
from rewriter.api.run import Run, silent
from rewriter.compare.bisect import Bench, Isolated, isolate, narrow
from rewriter.compare.boundaries import Boundary, boundaries, rounded
from rewriter.compare.generation import generate
from rewriter.compare.outputs import Programs, Results, compare_pair
from rewriter.compare.taps import Tap, Tapping, tap
from rewriter.compare.verdicts import PairProof, Rules
from rewriter.files.load import LoadedModel
from rewriter.files.walk import iter_nodes
from rewriter.proof.blocks.activation import RegionProof, prove_region, regions_of
from rewriter.proof.calibrate import largest_magnitudes
from rewriter.proof.claims import Side
from rewriter.proof.inputs.cases import Case
from rewriter.proof.inputs.given import Given
from rewriter.proof.noise import QUANTISERS
from rewriter.proof.pass_rule import CAP, coarsest_allowance
from rewriter.proof.reference.float64 import NoReference
from rewriter.proof.run.model import run_model
from rewriter.proof.run.whole import Wanted, Way
from rewriter.proof.settings import Settings
from rewriter.proof.validate import Progress
from rewriter.report.comparison import Comparison, FaultRow
from rewriter.text import counted, first_of

_MOST_FAULTS = 8
"""Faulty parts that are narrowed down; more would take long and add little."""


@dataclass(frozen=True)
class Pairing:
    """How to compare two models: the options of `rewriter.api.comparing.validate`, checked."""

    providers: tuple[str, ...]
    inputs: Given | None
    dims: Mapping[str, int]
    seed: int
    rules: Rules
    taps: bool
    bisect: bool
    generate: int | None = None
    progress: Progress = field(repr=False, default=silent)


@dataclass(frozen=True)
class Pair:
    """Two models with the same inputs and outputs, and how to compare what they compute."""

    models: tuple[LoadedModel, LoadedModel]
    pairing: Pairing
    run: Run

    @cached_property
    def known(self) -> Known:
        """The blocks of A, and which of them are heads in B."""
        return know(*self.models, self._reached)

    @cached_property
    def coarse(self) -> float:
        """The error allowed without a reference, as a share of the largest value."""
        return coarsest_allowance(self.models[0].proto)

    def _reached(self, model: LoadedModel, tensors: Sequence[str]) -> Mapping[str, float]:
        options = self.pairing
        settings = Settings(inputs=options.inputs, seed=options.seed, dims=options.dims)
        return largest_magnitudes(model, tensors, settings, options.progress)

    def compare(self, result: Comparison) -> Comparison:
        """Run both models, judge outputs and heads, and locate the differences if that was asked for."""
        with self.run.step("inputs", "making inputs"):
            options = self.pairing
            given = options.inputs, options.dims, options.seed
            cases, skipped = accepted_cases(self.models[0], options.providers[0], *given)
        with self.run.step("float64", "evaluating in float64"):
            reference, truth = _truth(Side.of(self.models[0]), cases, self.pairing.progress)
        providers: dict[str, PairProof] = {}
        programs = self._programs(cases)
        with self.run.step("outputs", "comparing outputs"):
            for name in self.pairing.providers:
                providers[name] = compare_pair(self.models, cases, truth, name, self.pairing.rules, programs)
        blame_inputs(self.pairing.inputs, cases, providers)
        with self.run.step("blocks", "testing the heads of each block"):
            regions = self._regions()
        result = replace(
            result,
            reference=reference,
            cases=tuple(case.name for case in cases),
            skipped=tuple(skipped),
            providers=providers,
            blocks=dict(self.known.programs),
            regions=regions,
            failures=(*failures_of(providers), *(text for region in regions.values() for text in region.failures)),
            notes=tuple(self._notes(regions, providers, reference)),
        )
        if self.pairing.generate is not None:
            result = self._generated(result, cases)
        return self._attributed(self._by_parts(result, cases), cases, exact=truth is not None)

    def _generated(self, result: Comparison, cases: Sequence[Case]) -> Comparison:
        with self.run.step("generate", "generating tokens"):
            made = generate(self.models, cases, self.pairing.providers[0], self.pairing.generate or 0)
        verdict = next(iter(result.providers.values())).outputs[made.output]
        return replace(result, generation=made, failures=(*result.failures, *made.failures(verdict.allowed)))

    def _programs(self, cases: Sequence[Case]) -> Programs:
        known, progress = self.known, self.pairing.progress

        @cache
        def planned() -> Sequence[Results]:
            found = [_truth(side, cases, progress)[1] for side in known.planned]
            return [results for results in found if results is not None]

        return Programs(known.a.model, known.made, planned)

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
        notes = [
            f"block {name} is attention heads in the second model, but the first has no such block"
            for name in known.unknown
        ]
        untried = [name for name in known.programs if name not in regions]
        whole = [name for name in untried if name in known.whole]
        renamed = [name for name in untried if name not in known.whole]
        fitted = "their programs were fitted with other inputs or options, and nothing is allowed for their errors"
        for names, why in (
            (whole, "they replace whole blocks"),
            (renamed, "another tool renamed their ends"),
            (known.unfitted, fitted),
        ):
            if names:
                heads = f"the heads of {counted(len(names), 'block')}"
                notes.append(f"{heads} could not be tested alone: {why} ({first_of(names)})")
        judged = [each for proof in providers.values() for each in proof.outputs.values() if each.rule == "original"]
        if judged and not reference.startswith("no float64"):
            notes.append(
                f"float64 cannot be the reference for {', '.join(dict.fromkeys(each.name for each in judged))}: an "
                "operator decides something by rounding, and float64 decides it differently; model A stands in"
            )
        return notes

    # -- where they differ ---------------------------------------------------------------------------------------

    @cached_property
    def _marks(self) -> tuple[Boundary, ...]:
        a, b, landmarks = self.known.a.main, self.known.b.main, self.known.landmarks
        found = {mark.tensor: mark for mark in (*rounded(a, b, landmarks), *boundaries(a, b, landmarks))}
        return tuple(sorted(found.values(), key=lambda mark: a.producer[mark.tensor]))

    def _by_parts(self, result: Comparison, cases: Sequence[Case]) -> Comparison:
        """Require every part to hold by itself where amplified rounding hides errors in the outputs."""
        shares = {
            each.name: each.share
            for proof in result.providers.values()
            for each in proof.outputs.values()
            if each.share > CAP
        }
        if not shares:
            return result
        name, share = max(shares.items(), key=lambda item: item[1])
        quantised = any(node.op_type in QUANTISERS for node in iter_nodes(self.models[0].proto.graph.node))
        note = (
            f"{'quantisation amplifies rounding' if quantised else 'rounding is amplified'}: in output {name} "
            f"differences of up to {100 * share:.3g} % of its scale cannot be told from rounding"
        )
        if all(mark.kind == "output" for mark in self._marks):
            note = f"{note}, and the models share no inner tensor, so no part of them could be tested alone"
            if share < 1.0:
                return replace(result, notes=(*result.notes, note))
            return replace(result, failures=(*result.failures, f"nothing could be compared: {note}"))
        with self.run.step("parts", "testing every part alone"):
            isolated = isolate(self._bench(cases, optimise=False), self._marks)
        guilty = [each for each in isolated if each.guilty]
        held = f"{len(isolated) - len(guilty)} of its {len(isolated)} parts hold by themselves"
        return replace(
            result,
            isolated=isolated,
            failures=(*result.failures, *(f"{each.boundary.label} by itself: {each.reason}" for each in guilty)),
            notes=(*result.notes, f"{note}; {held}"),
        )

    def _attributed(self, result: Comparison, cases: Sequence[Case], *, exact: bool) -> Comparison:
        """Add taps and faults; with graph optimisation if the difference does not show without it."""
        failed = bool(result.failures)
        levels = (False, True) if failed else (False,)
        for optimise in levels if self.pairing.taps else ():
            with self.run.step("taps", "comparing every block's output"):
                result = replace(result, taps=self._taps(cases, exact=exact, optimise=optimise))
            if result.first_exceeding is not None:
                break
        for optimise in levels if self.pairing.bisect and failed else ():
            with self.run.step("bisect", "testing every part alone"):
                known = None if optimise else result.isolated
                isolated, faults = self._bisect(known, cases, optimise=optimise)
            result = replace(result, isolated=isolated, faults=faults)
            if faults:
                return result
        exceeding = [each for proof in result.providers.values() for each in proof.outputs.values() if each.exceeds]
        if not exceeding or result.isolated is None or any(each.guilty for each in result.isolated):
            return result
        text = "every part alone is within its share: the difference is the sum of small errors"
        return replace(result, notes=(*result.notes, text))

    def _taps(self, cases: Sequence[Case], *, exact: bool, optimise: bool) -> tuple[Tap, ...]:
        known = self.known
        for truth in (True, False) if exact else (False,):
            tapping = Tapping(
                known.a,
                known.b,
                cases,
                self.pairing.providers[0],
                truth,
                self.coarse,
                lambda: known.planned,
                known.made,
                optimise,
                carried=(COUNT, ROWS) if {COUNT, ROWS} <= known.b.main.producer.keys() else None,
            )
            with suppress(NoReference):
                return tap(tapping, self._marks)
        return ()

    def _bench(self, cases: Sequence[Case], *, optimise: bool) -> Bench:
        known, options = self.known, self.pairing
        return Bench(
            known.a,
            known.b,
            cases,
            options.providers[0],
            self.coarse,
            lambda: known.planned,
            known.made,
            optimise,
            options.progress,
        )

    def _bisect(
        self, isolated: tuple[Isolated, ...] | None, cases: Sequence[Case], *, optimise: bool
    ) -> tuple[tuple[Isolated, ...], tuple[FaultRow, ...]]:
        bench = self._bench(cases, optimise=optimise)
        found = isolate(bench, self._marks) if isolated is None else isolated
        guilty = [each for each in found if each.guilty]
        faults = [explain(narrow(bench, self._marks, each), self.known) for each in guilty[:_MOST_FAULTS]]
        return found, tuple(faults)


def _truth(side: Side, cases: Sequence[Case], progress: Progress) -> tuple[str, Results | None]:
    """What evaluated `side` in float64, or why nothing could; and the results."""
    runs = run_model(side, cases, Wanted(wide=True, what="the model"), progress, by_blocks=False)
    return runs.reference, runs.truth
