"""`validate` and `diff`: whether two models compute the same function, and where they differ. Nothing is written.

The verdict is the one of `rewriter.proof.validate`: a certificate and a run. What B says of itself, the plan in its
metadata, names blocks and options only: A is planned again with these options, and B is held to what this tool would
claim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from passes.forms.whole import COUNT, ROWS
from passes.match.blocks import Block
from passes.options import Options
from passes.plan import make_plan
from passes.record import BlockRecord, Record, UnreadableError, read_record
from rewriter.api.rows import claims_of
from rewriter.api.run import Run, name_of, silent
from rewriter.compare.depth import (
    Bench,
    Boundary,
    Fault,
    Landmark,
    Measured,
    boundaries,
    isolate,
    narrow,
    tap,
)
from rewriter.compare.generation import generate
from rewriter.compare.graphs import difference, signature_differences
from rewriter.compare.tolerances import Rule, Tolerance
from rewriter.errors import ExitStatus, RewriteError, UsageError
from rewriter.files.load import LoadedModel, Source, load_model
from rewriter.options import build
from rewriter.ort.providers import chosen_providers
from rewriter.proof.claims import Claim, Side, Variants
from rewriter.proof.inputs.cases import Case
from rewriter.proof.inputs.given import Inputs as GivenInputs
from rewriter.proof.inputs.given import as_given
from rewriter.proof.inputs.roles import is_float
from rewriter.proof.nudge import Point
from rewriter.proof.settings import Settings
from rewriter.proof.statistics import uncompared
from rewriter.proof.validate import Progress, Validation, cases_of, noise_points, other_cases
from rewriter.proof.validate import validate as prove
from rewriter.report.comparison import Comparison, Verdict
from rewriter.text import quoted

Tolerances = float | Mapping[str, float] | Mapping[str | None, float]
"""One number for all outputs, or output name to number; the key None stands for all outputs that are not named."""


def validate(
    original: Source,
    rewritten: Source,
    *,
    providers: str | Sequence[str] | None = None,
    inputs: GivenInputs | None = None,
    dims: Mapping[str, int] | None = None,
    seed: int = 0,
    atol: Tolerances | None = None,
    rtol: Tolerances | None = None,
    taps: bool = False,
    bisect: bool = False,
    generate: int | None = None,
    progress: Progress = silent,
) -> Comparison:
    """Judge whether `rewritten` computes what `original` does: a certificate, and a run on a few inputs.

    Any two models with the same inputs and outputs can be compared. Heads that the plan in the metadata of `rewritten`
    names, but that are not certified, are tested block by block.

    Args:
        original: path of an ONNX file, or a model in memory.
        rewritten: path of the rewritten model, or a model in memory.
        providers: execution providers, `cpu` and `cuda`; default: cpu, and cuda where it works.
        inputs: inputs to use instead of generated ones: an npz file, arrays by name, or a list of those.
        dims: sizes for symbolic dimensions of the generated inputs.
        seed: random seed of the generated inputs.
        atol: absolute tolerance, for all outputs or by output name. Outputs with a tolerance are judged only by
            |rewritten - original| <= atol + rtol |original|.
        rtol: relative tolerance, likewise.
        taps: compare every block's output as well, and find the first whose error exceeds its share.
        bisect: if the models differ, test every part of `rewritten` alone and name the faulty ones.
        generate: number of tokens to generate greedily with both, through the key-value cache if there is one.
        progress: called with (current activity, steps done, total steps).

    Returns:
        The comparison; `verdict` says what is proved, and `exit_status` is 1 if the models differ, otherwise 0.

    Raises:
        UsageError: an option is invalid, or the given inputs left nothing to compare.
        ModelError: a model is unreadable, malformed or unsafe.
        ProviderError: a requested execution provider is not available.
        ValidationError: nothing could be compared, for example because a model does not run.
    """
    how = _pairing(providers, inputs, dims, seed, (atol, rtol), generate, progress, taps=taps, bisect=bisect)
    return _compare((original, rewritten), how, graph=False, outputs=True)


def diff(
    a: Source,
    b: Source,
    *,
    graph: bool = True,
    outputs: bool = True,
    providers: str | Sequence[str] | None = None,
    inputs: GivenInputs | None = None,
    dims: Mapping[str, int] | None = None,
    seed: int = 0,
    atol: Tolerances | None = None,
    rtol: Tolerances | None = None,
    taps: bool = False,
    bisect: bool = False,
    generate: int | None = None,
    progress: Progress = silent,
) -> Comparison:
    """Compare two models: their files, and what they compute.

    Args:
        a: path of an ONNX file, or a model in memory.
        b: path of the second model, or a model in memory.
        graph: compare operators, nodes, metadata, and weights bit for bit.
        outputs: run both and compare the outputs as `validate` does.
        providers: as for `validate`.
        inputs: as for `validate`.
        dims: as for `validate`.
        seed: as for `validate`.
        atol: as for `validate`.
        rtol: as for `validate`.
        taps: as for `validate`.
        bisect: as for `validate`.
        generate: as for `validate`.
        progress: as for `validate`.

    Returns:
        The comparison; `exit_status` is 0 if both compute the same or agree (without `outputs`: if graphs and weights
        are the same), else 1.

    Raises:
        UsageError: both `graph` and `outputs` are off, or as for `validate`.
        ModelError: as for `validate`.
        ProviderError: as for `validate`.
        ValidationError: as for `validate`.
    """
    if not graph and not outputs:
        raise UsageError("nothing to compare: leave the graph or the outputs in")
    if not outputs and (taps or bisect):
        raise UsageError("taps and bisect need the models to be run: leave the outputs in")
    if not outputs and generate:
        raise UsageError("generate needs the models to be run: leave the outputs in")
    how = _pairing(providers, inputs, dims, seed, (atol, rtol), generate, progress, taps=taps, bisect=bisect)
    return _compare((a, b), how, graph=graph, outputs=outputs)


_LOOSE = 2.0**-10
"""A pair that is not certified must hold part by part if the rule allows an output to be off by more than this share
of its norm: quantised models amplify rounding, and such an output says little."""

_MOST_FAULTS = 8
"""Faulty parts that are narrowed down; more would take long and add little."""


@dataclass(frozen=True)
class Pairing:
    """How to compare two models: the options of `validate`, checked."""

    settings: Settings
    rule: Rule
    taps: bool
    bisect: bool
    generate: int | None
    progress: Progress = field(repr=False)


def _pairing(
    providers: str | Sequence[str] | None,
    inputs: GivenInputs | None,
    dims: Mapping[str, int] | None,
    seed: int,
    tolerances: tuple[Tolerances | None, Tolerances | None],
    generate: int | None,
    progress: Progress,
    *,
    taps: bool,
    bisect: bool,
) -> Pairing:
    if generate is not None and generate < 1:
        raise UsageError(f"generate is {generate}; it must be at least 1")
    wanted = (providers,) if isinstance(providers, str) else tuple(providers or ())
    settings = Settings(providers=chosen_providers(wanted), inputs=as_given(inputs), dims=dict(dims or {}), seed=seed)
    return Pairing(settings, Rule(_tolerances(*tolerances)), taps, bisect, generate, progress)


def _tolerances(atol: Tolerances | None, rtol: Tolerances | None) -> dict[str | None, Tolerance]:
    absolute, relative = (_by_name(given) for given in (atol, rtol))
    for value in (*absolute.values(), *relative.values()):
        if not 0.0 <= value < float("inf"):
            raise UsageError(f"a tolerance is {value:g}; it must be finite and at least 0")
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


def _compare(sources: tuple[Source, Source], pairing: Pairing, *, graph: bool, outputs: bool) -> Comparison:
    run = Run(pairing.progress)
    with run.step("load", "loading"):
        a, b = (load_model(each) for each in sources)
    models = a, b
    signature = signature_differences(a.proto, b.proto)
    result = Comparison(name_of(sources[0]), name_of(sources[1]), signature=signature)
    if graph:
        with run.step("graph", "comparing the graphs"):
            result = replace(result, graph=difference(*models))
    if result.signature:
        failures = tuple(f"the signatures differ: {text}" for text in result.signature)
        result = replace(result, failures=failures, verdict="different")
    elif outputs:
        known = [value.name for value in a.proto.graph.output]
        odd = next((name for name in pairing.rule.tolerances if name is not None and name not in known), None)
        if odd is not None:
            raise UsageError(f"a tolerance names '{odd}', which is not an output; the outputs are: {', '.join(known)}")
        result = Pair(models, pairing, run).compare(result)
    elif result.graph is not None and result.graph.same:
        result = replace(result, verdict="same")
    else:
        result = replace(result, failures=("the graphs differ",), verdict="different")
    status = ExitStatus.VALIDATION_FAILED if result.verdict == "different" else ExitStatus.CONVERTED
    return replace(result, exit_status=status, seconds=run.seconds())


@dataclass(frozen=True)
class Known:
    """What is known about a pair from its files.

    Attributes:
        model: A, or its lowered form if B was made from that: the form whose tensors name the blocks.
        landmarks: A's blocks.
        claims: what this tool claims about the blocks that B's plan names.
        programs: block to head program, as B's plan has them.
        notes: remarks.
    """

    model: LoadedModel
    landmarks: tuple[Landmark, ...]
    claims: tuple[Claim, ...]
    programs: Mapping[str, str]
    notes: tuple[str, ...]


def known_of(a: LoadedModel, b: LoadedModel) -> Known:
    """Find A's blocks, and those of them that B's plan names."""
    notes: list[str] = []
    record: Record | None = None
    try:
        record = read_record(b.proto)
    except UnreadableError as error:
        notes.append(f"the plan in the metadata of the second model is ignored: {error}")
    options = Options()
    if record is not None:
        # An option that is unknown or invalid here says nothing about the graph.
        with suppress(RewriteError, TypeError, ValueError):
            options = build(Options, record.options)
    plan = make_plan(a.proto, options)
    named = {each.name: each for each in record.blocks} if record is not None else {}
    conversions = tuple(each for each in plan.conversions if each.block.name in named)
    blocks = [each.block for each in plan.conversions] + [left.block for left in plan.left if left.block is not None]
    missing = [name for name in named if name not in {block.name for block in blocks}]
    if missing:
        notes.append(f"the plan of the second model names a block that the first does not have: {missing[0]}")
    # Blocks whose bias tokens the network carries cannot be cut out of B.
    accuracy = options.accuracy.error
    claims = claims_of(replace(plan, conversions=conversions), accuracy) if plan.whole is None else ()
    fitted = (block for block in plan.undetermined if block.name in named and named[block.name].form == "local")
    claims += tuple(_fitted_claim(block, named[block.name], accuracy) for block in fitted)
    model = replace(a, proto=plan.model, path=None) if named and plan.model is not a.proto else a
    made = {name for node in model.proto.graph.node for name in node.output}
    marks = (_landmark(block, named[block.name].program.name if block.name in named else None) for block in blocks)
    return Known(
        model=model,
        landmarks=tuple(mark for mark in marks if {*mark.outputs, *mark.starts, mark.end} <= made),
        claims=claims,
        programs={name: each.program.name for name, each in named.items()},
        notes=tuple(notes),
    )


def _fitted_claim(block: Block, record: BlockRecord, accuracy: float | None) -> Claim:
    """The claim about a program that was fitted: what B's plan says is proved or fails, within the usual limits."""
    mark = _landmark(block, record.program.name)
    return Claim(
        name=block.name,
        inputs=mark.starts,
        output=mark.end,
        block_inputs=mark.inputs,
        block_outputs=mark.outputs,
        max_error=record.bound,
        elem_type=block.coarsest,
        gated=block.gate != block.value,
        unstable=True,
        path=block.path,
        width=next((operator.in_features for operator in block.first), None),
        domain=record.program.domain,
        axis=next((operator.axis for operator in block.first), -1),
        accuracy=accuracy or 0.0,
    )


def _landmark(block: Block, program: str | None) -> Landmark:
    return Landmark(
        name=block.name,
        inputs=tuple(dict.fromkeys(operator.data for operator in block.first)),
        outputs=tuple(operator.output for operator in block.second) or (block.output,),
        starts=tuple(dict.fromkeys((block.gate, block.value))),
        end=block.output,
        program=program,
    )


@dataclass(frozen=True)
class Pair:
    """Two models with the same inputs and outputs, and how to compare what they compute."""

    models: tuple[LoadedModel, LoadedModel]
    pairing: Pairing
    run: Run

    @cached_property
    def known(self) -> Known:
        """The blocks of A, and what B's plan says of them."""
        return known_of(*self.models)

    def compare(self, result: Comparison) -> Comparison:
        """Judge both models, and locate the differences if that was asked for."""
        options, (a, b) = self.pairing, self.models
        with self.run.step("plan", "finding the blocks"):
            known = self.known
        with self.run.step("validate", "proving"):
            variants = Variants(lowered=known.model)
            noise = self._points()
            proof = prove(a, b, known.claims, options.settings, options.progress, variants, options.rule, noise)
        self._blame_inputs(proof)
        result = replace(
            result,
            validation=proof,
            tolerated=tuple(each.name for each in a.proto.graph.output if options.rule.tolerance(each.name)),
            blocks=dict(known.programs),
            failures=tuple(self._failures(proof)),
            notes=(*known.notes, *proof.notes),
        )
        result = replace(result, verdict=_verdict(result))
        if options.generate is not None and proof.providers:
            result = self._generated(result, proof)
        return self._attributed(result, proof)

    def _failures(self, proof: Validation) -> list[str]:
        """What does not hold. A tolerance excuses what is refuted, unless this tool claims it."""
        failures = list(proof.failures)
        names = [each.name for each in self.models[0].proto.graph.output]
        if not self.known.claims and all(self.pairing.rule.tolerance(name) is not None for name in names):
            failures = [each for each in failures if not each.startswith("not certified: ")]
        if proof.certified or proof.blocks:
            return failures
        nothing = {
            name: None
            for each in proof.providers.values()
            for name, found in each.compared.items()
            if found.proves_nothing and self.pairing.rule.tolerance(name) is None
        }
        why = "rounding moves it as far as it is large"
        return [*failures, *(f"nothing could be compared: output {name}, since {why}" for name in nothing)]

    def _blame_inputs(self, proof: Validation) -> None:
        """Raise a usage error if the given inputs kept outputs from being compared, and nothing else failed."""
        given = self.pairing.settings.inputs
        found = [stats for each in proof.providers.values() for stats in each.outputs.values()]
        empty = any(uncompared(stats) is not None for stats in found)
        if given is None or not empty or any("nothing could be compared" not in each for each in proof.failures):
            return
        flaw = _flaw(self._cases(proof))
        if flaw is not None:
            raise UsageError(f"{proof.failures[0]}; in {given.name}, {flaw}")

    def _cases(self, proof: Validation) -> tuple[Case, ...]:
        """The inputs that were run."""
        a, settings = self.models[0], self.pairing.settings
        cases = tuple(case for case in cases_of(a, settings, 0) if case.name in proof.cases)
        return cases or other_cases(a, settings) or ()

    def _generated(self, result: Comparison, proof: Validation) -> Comparison:
        provider = self.pairing.settings.providers[0]
        with self.run.step("generate", "generating tokens"):
            cases = self._cases(proof)
            made = generate(self.models, cases, provider, self.pairing.generate or 0)
        found = proof.providers[provider].compared[made.output]
        failures = made.failures(found.allowed, absolute=made.output in result.tolerated)
        result = replace(result, generation=made, failures=(*result.failures, *failures))
        return replace(result, verdict=_verdict(result))

    # -- where they differ ---------------------------------------------------------------------------------------

    def _attributed(self, result: Comparison, proof: Validation) -> Comparison:
        """Add taps and faults; with graph optimisation if the difference does not show without it."""
        loose = [] if proof.certified or proof.blocks else self._loose(proof)
        options, failed = self.pairing, bool(result.failures)
        if not proof.providers or not (options.taps or loose or (options.bisect and failed)):
            return result
        bench, known = self._bench(proof), self.known
        a, b = bench.a.main, bench.b.main
        marks = boundaries(a, b, known.landmarks)
        if loose and not failed and any(each.kind != "output" for each in marks):
            with self.run.step("parts", "testing every part alone"):
                result = self._by_parts(result, loose, isolate(bench, marks))
        failed = bool(result.failures)
        levels = (False, True) if failed else (False,)
        for optimise in levels if options.taps else ():
            with self.run.step("taps", "comparing every block's output"):
                result = replace(result, taps=tap(replace(bench, optimise=optimise), marks))
            if result.first_exceeding is not None:
                break
        for optimise in levels if options.bisect and failed else ():
            with self.run.step("bisect", "testing every part alone"):
                isolated, faults = _bisected(replace(bench, optimise=optimise), marks)
            result = replace(result, isolated=isolated, faults=tuple(_refuted(each, proof) for each in faults))
            if faults:
                return result
        if not options.bisect or not failed:
            return result
        text = "every part alone is within its share: the difference is the sum of small errors"
        return replace(result, notes=(*result.notes, text))

    def _loose(self, proof: Validation) -> list[str]:
        """The outputs on which the run says little."""
        found = (each for run in proof.providers.values() for each in run.compared.values())
        names = (each.name for each in found if each.allowed > _LOOSE and math.isfinite(each.error))
        return [name for name in dict.fromkeys(names) if self.pairing.rule.tolerance(name) is None]

    @staticmethod
    def _by_parts(result: Comparison, loose: Sequence[str], isolated: tuple[Measured, ...]) -> Comparison:
        """Require every part to hold by itself where amplified rounding hides errors in the outputs."""
        guilty = [each for each in isolated if each.exceeds]
        note = (
            f"rounding is amplified, so that output {loose[0]} says little; {len(isolated) - len(guilty)} of "
            f"{len(isolated)} parts hold by themselves"
        )
        failures = tuple(f"{each.boundary.label} by itself {each.found.reason}" for each in guilty)
        result = replace(result, isolated=isolated, failures=(*result.failures, *failures), notes=(*result.notes, note))
        return replace(result, verdict=_verdict(result))

    def _points(self) -> tuple[Point, ...]:
        """The activations of A's blocks, where rounding is tried."""
        view = Side.of(self.known.model).main
        return tuple(
            Point(mark.end, (), view.type_of(mark.end).elem_type, argument=mark.starts[0])
            for mark in self.known.landmarks
        )

    def _bench(self, proof: Validation) -> Bench:
        a, b = Side.of(self.known.model), Side.of(self.models[1])
        return Bench(
            a,
            b,
            self._cases(proof),
            self.pairing.settings.providers[0],
            noise_points(proof.certificate, self.known.claims, self._points()),
            carried=(COUNT, ROWS) if {COUNT, ROWS} <= b.main.producer.keys() else None,
            progress=self.pairing.progress,
        )


def _bisected(bench: Bench, marks: Sequence[Boundary]) -> tuple[tuple[Measured, ...], tuple[Fault, ...]]:
    found = isolate(bench, marks)
    guilty = [each for each in found if each.exceeds]
    return found, tuple(narrow(bench, marks, each) for each in guilty[:_MOST_FAULTS])


def _refuted(fault: Fault, proof: Validation) -> Fault:
    """A fault, with what the certificate says of its tensor first."""
    refusals = () if proof.certificate is None else proof.certificate.refusals
    found = tuple(each.text for each in refusals if each.refuted and each.original == fault.tensor)
    return replace(fault, causes=(*found, *fault.causes))


def _verdict(result: Comparison) -> Verdict:
    if result.failures:
        return "different"
    return "same" if result.validation is not None and result.validation.certified else "agrees"


def _flaw(cases: Sequence[Case]) -> str | None:
    """A defect of the inputs that may keep outputs from being compared."""
    for case in cases:
        where = f" in case {case.name}" if len(cases) > 1 else ""
        for name, array in case.feeds.items():
            if not array.size:
                return f"input {quoted(name)} has shape {list(array.shape)}{where}, which holds no elements"
            if is_float(array.dtype) and not np.isfinite(array.astype(np.float64)).all():
                return f"input {quoted(name)} holds NaN or infinities{where}"
    return None
