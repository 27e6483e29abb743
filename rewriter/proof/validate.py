"""The judge: PASS is a certificate (`rewriter.proof.values.compare`) and a run.

The run looks for what no certificate can see: both models on a few inputs, on each provider, with and without
optimisation, compared by the one rule of `rewriter.proof.rule`.
"""

import gc
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import repeat
from math import hypot, nan
from threading import Event
from typing import Any

import ml_dtypes
import onnx

from rewriter.errors import ValidationError
from rewriter.evaluate.arithmetic import is_float
from rewriter.files.load import LoadedModel
from rewriter.graph.edit import between
from rewriter.graph.fused import EXPERTS
from rewriter.graph.view import GraphView, Place, key_of
from rewriter.graph.walk import reads
from rewriter.inputs.cases import Case, Kind, Maker, load_cases
from rewriter.ort import parse_provider
from rewriter.proof.accepted import run_accepted
from rewriter.proof.records import Certificate, Claim, Claimed
from rewriter.proof.rule import Judgement, compared, norm, relative_error, uncompared
from rewriter.proof.run import ModelRuns, Point, Progress, Way, noisy, remarks, rounds_to_bytes, run_model, silent
from rewriter.proof.settings import Settings
from rewriter.proof.values.compare import prove

CHEAP = 2**26  # models of at most this many bytes are evaluated in float64 too, for the figure `error_ratio`
_LONGEST = 64  # tokens of the longest generated sequence

_COARSE = (
    "the bound of the activation of {} allows that, but is too coarse for values of this magnitude: lower "
    "--accuracy, or keep the products of gates in the graph with --gate product"
)
_SHORTER = "the second model takes sequences of at most {}, up to which both are compared; beyond it: {}"
_NOT_RUN = "neither model was run, so what a runtime makes of the result is not shown"
_ROUNDED = "{} rounds {} in float64 to float32, which these heads do not tolerate: use form local, or --gate product"


@dataclass(frozen=True)
class ProviderRun:
    """A run on one execution provider."""

    compared: Mapping[str, Judgement]  # the rule, output by output; the worse of both optimisation levels
    # root mean square error against float64, rewritten over original, of the worst output; None if not evaluated
    error_ratio: float | None
    # nodes that fell back to the CPU, except nodes that do in the original too, and nodes that compute shapes, which
    # onnxruntime leaves there on purpose
    cpu_nodes: tuple[str, ...]
    # number of such nodes in the original; None if onnxruntime does not report them
    cpu_nodes_of_original: int | None = 0
    failures: tuple[str, ...] = ()  # differences, with the input
    uncompared: tuple[str, ...] = ()  # outputs that cannot be compared, and why


@dataclass(frozen=True)
class Validation:
    """The verdict."""

    certificate: Certificate  # the proof for every input
    providers: Mapping[str, ProviderRun]  # the runs, by execution provider as requested: cpu, cuda:device_id=1
    cases: tuple[str, ...]  # inputs that were run
    skipped: tuple[str, ...]  # inputs that the original model itself refused, with the reason
    # differences, each with a counterexample: an input that was run, or a number that refutes a region
    failures: tuple[str, ...] = ()
    unproved: tuple[str, ...] = ()  # requirements of a rewriting that were neither proved nor refuted
    uncompared: tuple[str, ...] = ()  # outputs that the run should have compared, and could not
    by_blocks: bool = False  # whether neither model was ever loaded as a whole
    # number of consecutive parts in which original and rewritten model were run; 1 if loaded as a whole
    segments: tuple[int, int] = (1, 1)
    notes: tuple[str, ...] = ()  # remarks on the verdict, such as outputs whose run proves nothing
    also = ("passed",)

    @property
    def passed(self) -> bool:
        """Whether everything held."""
        return not self.problems

    @property
    def problems(self) -> tuple[str, ...]:
        """Failures, and parts that could not be proved."""
        return (*self.failures, *self.unproved, *self.uncompared)

    @property
    def certified(self) -> bool:
        """Whether the rewritten model is proved to compute the same function as the original."""
        return self.certificate.certified

    @property
    def error_ratio(self) -> float:
        """The largest `error_ratio` of the providers; NaN where nothing was evaluated in float64."""
        return max((each.error_ratio for each in self.providers.values() if each.error_ratio is not None), default=nan)


@dataclass(frozen=True)
class Judge:
    """Judges a rewritten model against its original."""

    original: LoadedModel
    rewritten: LoadedModel
    claims: Sequence[Claim]  # what the passes say of the blocks that they replaced; empty for models from elsewhere
    settings: Settings
    progress: Progress = silent
    # The form of the original whose tensors the claims name, if that is another; it is shown to compute the same.
    lowered: LoadedModel | None = None
    tolerance: tuple[float, float] | None = None  # atol and rtol, if they take the place of the rule
    noise: Sequence[Point] = ()  # further tensors of the original that get noise of one unit in the last place
    run: bool = True  # whether anything is run
    held: Mapping[Place, Claimed] = field(default_factory=dict)  # what the rewritten model states; claims come first
    longest: int | None = None  # the longest sequence that the rewritten model takes; None for any
    isolate: bool = False  # whether several differences by value are distinguished

    def verdict(self) -> Validation:
        """The certificate and the run. Raises as `run_accepted`."""
        self.progress("certifying", 0, 4)
        with self._ahead() as ahead:
            certificate = self._certificate()
        if self._by_blocks:
            gc.collect()  # evaluations are in reference cycles, and hold weights that they mapped
        # Only tensors that kept their names, and replaced blocks, are certainly meant to be the same.
        names = {(each.path, name): f"{each.name}: " for each in self.claims for name in (each.output, *each.makes)}
        of_blocks = {each.name for each in self.claims}
        refusals = [each for each in certificate.refusals if self.claims or each.refuted]
        refused: dict[bool, dict[str, None]] = {True: {}, False: {}}
        # Others may follow from a counterexample, and from a block that was not replaced.
        for each in [each for each in refusals if each.refuted or each.node] or refusals:
            told = f"{'refuted' if each.refuted else 'not proved'}: {each.text}"
            text = each.text if each.node in of_blocks else f"{names.get((each.path, each.original), '')}{told}"
            # A tolerance excuses refuted regions, unless they are claimed.
            refused[each.refuted and bool(self.claims or self.tolerance is None)][text] = None
        refuted, unproved = (tuple(refused[each]) for each in (True, False))
        if unproved and certificate.departure is not None and certificate.departure.first:
            unproved += (f"first difference: {certificate.departure.first}",)
        if not self.run:
            return Validation(certificate, {}, (), (), refuted, unproved, notes=(*certificate.notes, _NOT_RUN))
        try:
            return self._judged(certificate, refuted, unproved, ahead)
        except (ValidationError, LookupError, ValueError) as error:
            # The file may be too broken to run; the refutation is more informative.
            if not (refuted or unproved):
                raise
            return Validation(certificate, {}, (), (), refuted, unproved, (str(error),))

    @property
    def _by_blocks(self) -> bool:
        return self.settings.by_blocks(max(self.original.size, self.rewritten.size))

    @contextmanager
    def _ahead(self) -> Iterator[Sequence[Future[ModelRuns]]]:
        """The runs of both models on few inputs, made while a large model is certified, which takes one core."""
        failed = Event()

        def progress(*_: object) -> None:
            if failed.is_set():
                raise KeyboardInterrupt

        with ThreadPoolExecutor(1) as pool:
            try:
                before = pool.submit(self._before, progress, few=True) if self.run and self._by_blocks else None
                ahead = [] if before is None else [before, pool.submit(lambda: self._after(before.result(), progress))]
                yield ahead
                wait(ahead)  # here, where an interrupt ends them
            except BaseException:
                failed.set()
                raise

    def _certificate(self) -> Certificate:
        held, sizes = {**self.held, **{each.place: each.held for each in self.claims}}, self._sizes
        further = dict[str, Any](claims=held, blocks=self.claims, longest=self.longest, isolate=self.isolate, **sizes)
        found = prove(self.original, self.rewritten, **further)
        named = self.lowered or self.original
        if found.certified or not self.claims or named is self.original:
            return found
        # The names of the blocks are those of the lowered form, which must then be the same as the original.
        second = prove(named, self.rewritten, **further)
        if not second.certified:
            return second
        first = prove(self.original, named, **sizes)
        return replace(second, sizes=first.sizes or second.sizes) if first.certified else found

    def _judged(
        self, certificate: Certificate, refuted: Sequence[str], unproved: Sequence[str],
        ahead: Sequence[Future[ModelRuns]],
    ) -> Validation:  # fmt: skip
        claims, old, named = self.claims, self.original, self.lowered or self.original
        main = named.views[()]
        there = {*main.producer, *main.inputs}  # not tensors of bodies
        watched = {name: held for name, held in _domains(claims, certificate) if name in there}
        # What is certified needs few inputs, except for pre-activations in a domain: small models run on all of them.
        few = certificate.certified and (self._by_blocks or not watched)
        before = ahead[0].result() if ahead and few else self._before(self.progress, few=few)
        reached = dict[str, float]()
        if watched:
            what, cases = "the original, pre-activations", None if few else before.cases
            reached = self._run(named, self._ways[:1], cases, outputs=tuple(watched), what=what).largest()
        try:
            after = ahead[1].result() if ahead and few else self._after(before, self.progress)
        except ValidationError as error:
            most = 0 if claims or self.longest is not None else self._most_taken()
            if not most:
                raise ValidationError(f"the rewritten model does not run: {error}") from error
            shorter = replace(self, longest=most).verdict()
            return replace(shorter, uncompared=(_SHORTER.format(most, error), *shorter.uncompared))
        points = {each.place: each for each in reversed([*_noise(certificate, claims, old), *self.noise])}
        runs = {name: self._provider(name, before, after, (*points.values(),)) for name in self.settings.providers}
        failures = [*refuted, *(failure for each in runs.values() for failure in each.failures)]
        uncompared = [text for each in runs.values() for text in each.uncompared]
        notes = [*certificate.notes, *_by_definition(before, after)]
        notes += remarks(old.proto.graph.output, before)
        if any(rounds_to_bytes(node) for _, node in _nodes(old)):
            why = "one unit in the last place can change individual rounding decisions"
            effect = "generated tokens may differ, as on another processor"
            notes.append(f"activations are rounded to 8 bits, where {why}, so {effect}")
        if empty := {each.name: 0 for run in runs.values() for each in run.compared.values() if each.proves_nothing}:
            why = "rounding moves it as far as it is large; the verdict rests on the certificate"
            notes.append(f"the run proves nothing about {', '.join(empty)}: {why}")
        return Validation(
            certificate=certificate,
            providers=runs,
            cases=tuple(case.name for case in before.cases),
            skipped=before.skipped,
            failures=tuple(dict.fromkeys(failures)),
            unproved=(*unproved, *_left_domain(watched, reached), *_foreign(claims, self.rewritten)),
            uncompared=tuple(dict.fromkeys(uncompared)),
            by_blocks=self._by_blocks,
            segments=(before.segments, after.segments),
            notes=tuple(notes),
        )

    @property
    def _sizes(self) -> dict[str, Any]:
        """What the settings say of sizes: those of dimensions, and the ranks of given inputs."""
        inputs = self.settings.inputs
        given = () if inputs is None else load_cases(inputs, self.original.proto)
        return {"dims": self.settings.dims, "ranks": {name: x.ndim for case in given for name, x in case.feeds.items()}}

    @property
    def _ways(self) -> tuple[Way, ...]:
        return tuple(Way(name, optimise) for name in self.settings.providers for optimise in (False, True))

    def _before(self, progress: Progress, *, few: bool) -> ModelRuns:
        """The runs of the original, twice without optimisation."""
        ways = (*self._ways, *(Way(name, optimise=False, again=True) for name in self.settings.providers))
        wide = self.original.size <= CHEAP
        return self._run(self.original, ways, few=few, wide=wide, what="the original", progress=progress)

    def _after(self, before: ModelRuns, progress: Progress) -> ModelRuns:
        how: dict[str, Any] = {"wide": self.original.size <= CHEAP, "gaps": before.gaps, "what": "the rewritten model"}
        return self._run(self.rewritten, self._ways, before.cases, progress=progress, **how)

    def _most_taken(self) -> int:
        """The longest sequence that the rewritten model runs on, below the longest generated one; 0 for none."""
        maker = Maker(self.original.proto, **self._sizes)

        def refuses(length: int) -> bool:
            return not self._run(self.rewritten, self._ways[:1], [maker.case((1, length, 0))], may_refuse=True).cases

        with suppress(ValidationError):  # it does not load
            return bisect_left(range(1, _LONGEST if Kind.SEQUENCE in maker.varied else 1), True, key=refuses)
        return 0

    def _run(
        self, model: LoadedModel, ways: Sequence[Way], cases: Sequence[Case] | None = None, **options: Any
    ) -> ModelRuns:
        """Run a model on some cases, by default on the given or generated ones that it accepts."""
        options = {"by_blocks": self._by_blocks, "progress": self.progress, **options}
        if cases is None:
            return run_accepted(model, ways, self.settings, most=self.longest, **options)
        return run_model(model, cases, ways, **options)

    def _provider(self, provider: str, before: ModelRuns, after: ModelRuns, points: Sequence[Point]) -> ProviderRun:
        """Judge the runs on one provider; noise at `points` measures how rounding affects the original's outputs."""
        ways = [Way(provider, optimise) for optimise in (False, True)]
        (plain, old), new = (before.ways[way] for way in ways), after.ways[ways[1]]
        outputs = [value.name for value in self.original.proto.graph.output]
        results = [*plain.results, *(case for way in ways for case in after.ways[way].results)]

        def judgements(points: Sequence[Point]) -> dict[tuple[str, Way], Judgement]:
            how: dict[str, Any] = {"by_blocks": self._by_blocks, "gaps": before.gaps, "progress": self.progress}
            # If that does not run, only the effect of optimisation measures the original's rounding.
            variants = [old.results, *noisy(self.original, before.cases, points, ways[0], **how)]
            return {
                (output, way): compared(output, plain.results, variants, after.ways[way].results, self.tolerance)
                for output in dict.fromkeys(name for case in results for name in case)
                if any(output == name or output.startswith(f"{name}[") for name in outputs)  # B may have more
                for way in ways
            }

        judged = strict = judgements(points)
        if any(each.error for each in points) and any(each.proves_nothing for each in judged.values()):
            # The certified error is not an excuse if it is as large as the output, and rounding is not.
            strict = judgements([replace(point, error=0.0) for point in points])
        failures: list[str] = []
        found: dict[str, Judgement] = {}
        for (output, way), each in judged.items():
            exact = strict[output, way]
            where = "" if exact.case is None else f", input '{before.cases[exact.case].name}'"
            floats = any(is_float(case[output]) for case in old.results if output in case)
            if floats and each.proves_nothing and not exact.holds:
                place = max(points, key=lambda point: point.error).place
                coarsest = next((claim.name for claim in self.claims if claim.place == place), place[1])
                failures.append(f"output {output} {exact.reason} on {way}{where}; {_COARSE.format(coarsest)}")
            elif not each.holds:
                failures.append(f"output {output} {each.reason} on {way}{where}")
            if output not in found or each.error > found[output].error:
                found[output] = each
        nothing = {output: uncompared([case[output] for case in old.results if output in case]) for output in found}
        if failures and (coarse := _coarse_operators(provider, self.rewritten)):
            failures.append(_ROUNDED.format(provider, ", ".join(coarse)))
        told = old.cpu_nodes is not None and new.cpu_nodes is not None
        there = _without_shapes(old.cpu_nodes, self.original)
        fallen = _without_shapes(new.cpu_nodes, self.rewritten)
        return ProviderRun(
            compared=found,
            error_ratio=_error_ratio(before, after, ways),
            cpu_nodes=tuple(node for node in fallen if told and node not in there),
            cpu_nodes_of_original=len(there) if told else None,
            failures=tuple(dict.fromkeys(failures)),
            uncompared=tuple(f"nothing could be compared: output {name} {why}" for name, why in nothing.items() if why),
        )


def _foreign(claims: Sequence[Claim], rewritten: LoadedModel) -> Iterator[str]:
    for claim in (each for each in claims if each.exposed):
        view = rewritten.views[claim.path]
        inside = [view.nodes[index] for index in between(view, claim.reads, claim.makes)]
        softmaxes = [node for node in inside if node.op_type == "Softmax"]
        used = {name for node in inside for name in reads(node)}
        right = {
            "scores": used & {node.input[0] for node in softmaxes},
            "pattern": used & {node.output[0] for node in softmaxes},
        }
        for name in claim.exposed:
            if name not in right.get(name.rpartition("/")[2].partition("_")[0], used):
                yield f"{claim.name}: the exposed '{name}' is not what its heads compute with"


def _by_definition(before: ModelRuns, after: ModelRuns) -> Iterator[str]:
    """Operators without an onnxruntime kernel, and whether the rewritten model still has them."""
    old, new = ({name for ran in runs.ways.values() for name in ran.defined} for runs in (before, after))
    for name in sorted(old | new):
        rest = "the rewritten model has it too" if name in new else "the rewritten model runs"
        yield f"onnxruntime has no kernel for {name}; run by its definition; {rest}"


def _domains(claims: Sequence[Claim], certificate: Certificate) -> Iterator[tuple[str, tuple[str, float]]]:
    """Pre-activations that must stay within a domain: tensor to block and domain."""
    for region in certificate.regions:
        if not region.path and region.bound.domain is not None and region.leaves:
            yield region.leaves[0], (region.original, region.bound.domain)
    for claim in claims:  # last: these know the names of blocks
        if not claim.path and claim.held.domain is not None:
            yield claim.gate, (claim.name, claim.held.domain)


def _left_domain(watched: Mapping[str, tuple[str, float]], reached: Mapping[str, float]) -> Iterator[str]:
    """Blocks whose pre-activations left the domain of their program on some input."""
    for tensor, (name, domain) in watched.items():
        if (largest := reached.get(tensor, 0.0)) > domain:
            fault = f"{name}: pre-activations reach {largest:.4g}, its program holds up to {domain:.4g}"
            yield f"{fault}; exclude it with --skip, or fit it on a larger one with --option domain=R"


def _noise(certificate: Certificate, claims: Sequence[Claim], model: LoadedModel) -> Iterator[Point]:
    """The tensors of the original that get noise: certified activations, mixtures of experts, replaced activations."""
    for region in certificate.regions:
        ends = region.leaves[0], region.linear_in or ""
        yield Point(region.original, region.path, region.elem_type, region.bound.bound, *ends)
    for view, node in _nodes(model):
        if key_of(node) in EXPERTS:
            yield Point(node.output[0], view.path, view.type_of(node.output[0]).elem_type)
    for each in claims:  # a certificate lists no activation whose replacement is equal by value
        yield Point(each.output, each.path, each.elem_type, argument=each.gate)


def _nodes(model: LoadedModel) -> Iterator[tuple[GraphView, onnx.NodeProto]]:
    return ((view, node) for view in model.views.values() for node in view.nodes)


def _coarse_operators(provider: str, model: LoadedModel) -> list[str]:
    """The operators in a model whose float64 kernels round to float32 on a provider."""
    kinds, double = parse_provider(provider).coarse, onnx.TensorProto.DOUBLE
    nodes = ((view, node) for view, node in _nodes(model) if node.op_type in kinds)
    return sorted({node.op_type for view, node in nodes if view.type_of(node.output[0]).elem_type == double})


def _without_shapes(nodes: Sequence[str] | None, model: LoadedModel) -> list[str]:
    """The nodes, as a session names them, except nodes that compute 64-bit integers only; none if it names none."""
    of_shapes = {
        f"{node.op_type} '{node.name}'" for view, node in (_nodes(model) if nodes else ())
        if all(view.type_of(name).elem_type == onnx.TensorProto.INT64 for name in node.output if name)
    }  # fmt: skip
    return [each for each in nodes or () if each not in of_shapes]


def _error_ratio(before: ModelRuns, after: ModelRuns, ways: Sequence[Way]) -> float | None:
    """The distance from the original in float64, rewritten over original: the largest of outputs and both ways.

    Distances are Euclidean, over all cases, as in `rule`: the largest error of an entry is a matter of chance.
    """
    truth, ratios = before.truth or ({},), list[float]()
    every = [*truth, *(case for runs in (before, after) for way in ways for case in runs.ways[way].results)]
    shared = (each for each in truth[0] if all(each in case for case in every))
    for output in (each for each in shared if truth[0][each].dtype.kind == "f"):
        exact = [case[output] for case in truth]
        for way in ways:
            own, theirs = ([case[output] for case in runs.ways[way].results] for runs in (before, after))
            size = hypot(*map(norm, exact))
            least = 0.5 * float(ml_dtypes.finfo(own[0].dtype).eps) * size
            old, new = (max(hypot(*map(relative_error, exact, values, repeat(1.0))), least) for values in (own, theirs))
            # An evaluation far from the original, because an operator decides by rounding, is not informative.
            ratios += [new / old] if 0.0 < old * old < least * size else []
    return max(ratios, default=None)
