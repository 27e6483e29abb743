"""The judge: PASS is a certificate and a run.

The certificate (`rewriter.proof.certificate`) proves, for every input of every size, that the rewritten model computes
the function of the original, up to a bound at each activation. The run checks the runtime, which no certificate covers:
both models on a few inputs, on each provider, with and without optimisation, compared by the rule of
`rewriter.proof.rule`.

If a block cannot be certified (forms with attention between all tokens), everything outside the blocks is shown to be
unchanged, and each block is tested separately (`rewriter.proof.tested`). Reports call these blocks tested.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan
from typing import Any

import ml_dtypes
import numpy as np
import onnx

from rewriter.errors import ValidationError
from rewriter.files.load import LoadedModel
from rewriter.graph.extract import cut
from rewriter.graph.mixtures import EXPERTS
from rewriter.graph.view import GraphView, Place, key_of
from rewriter.graph.walk import reads
from rewriter.ort.providers import parse_provider
from rewriter.proof.certificate.certify import Certificate, Claimed, certify
from rewriter.proof.claims import Claim, Side
from rewriter.proof.inputs.accepted import run_accepted
from rewriter.proof.inputs.cases import Case
from rewriter.proof.inputs.specs import is_float
from rewriter.proof.nudge import Point, noisy, rounds_to_bytes
from rewriter.proof.rule import Judgement, compared, largest_gap, magnitude, names_in, uncompared
from rewriter.proof.run import ModelRuns, Progress, Way, misdeclared, run_model, told
from rewriter.proof.settings import Settings
from rewriter.proof.tested import BlockTest, point_of, tested_block

__all__ = ["Judge", "Progress", "ProviderRun", "Settings", "Validation"]

CHEAP = 2**26
"""Models of at most this many bytes are evaluated in float64 too, for the figure `error_ratio`."""


_COARSE = (
    "the bound of the activation of {} allows that, but is too coarse for values of this magnitude; lower "
    "--accuracy, or keep the products of gates in the graph with --gate product"
)

_ROUNDS_TO_BYTES = (
    "activations are rounded to 8 bits, where one unit in the last place can change individual rounding decisions, so "
    "generated tokens may differ, as on another processor"
)

_EMPTY = "the run proves nothing about {}: rounding alone changes it by its own magnitude; the verdict rests on {}"

_RUN_ADVICE = "leave out --certificate-only to have it run, or use form local, compact, masked or maskless"
_NOT_RUN = "neither model was run, so errors of a runtime are not detected"

_ROUNDED = "{} rounds {} in float64 to float32, which these heads do not tolerate: use form local, or --gate product"


@dataclass(frozen=True)
class ProviderRun:
    """A run on one execution provider.

    Attributes:
        compared: the rule, output by output; the worse of both optimisation levels.
        failures: differences, with the input.
        uncompared: outputs that cannot be compared, and why.
        error_ratio: largest error against float64, rewritten over original; None where that was not evaluated.
        cpu_nodes: nodes that fell back to the CPU, except nodes that do in the original too, and nodes that compute
            shapes, which onnxruntime leaves there on purpose.
        cpu_nodes_of_original: number of such nodes in the original; None if onnxruntime does not report them.
    """

    compared: Mapping[str, Judgement]
    error_ratio: float | None
    cpu_nodes: tuple[str, ...]
    cpu_nodes_of_original: int | None = 0
    failures: tuple[str, ...] = ()
    uncompared: tuple[str, ...] = ()


@dataclass(frozen=True)
class Validation:
    """The verdict.

    Attributes:
        certificate: the proof for every input; None if the models could not be compared at all.
        providers: the runs, by execution provider as requested: cpu, cuda:device_id=1.
        blocks: the tests of the blocks that are not certified, in graph order.
        cases: inputs that were run.
        skipped: inputs that the original model itself refused, with the reason.
        failures: differences, each with a counterexample: an input that was run, or a number that refutes a region.
        unproved: requirements of a rewriting that were neither proved nor refuted.
        uncompared: outputs that the run should have compared, and could not.
        by_blocks: whether neither model was ever loaded as a whole.
        segments: number of consecutive parts in which original and rewritten model were run; 1 if loaded as a whole.
        notes: remarks on the verdict, such as outputs whose run proves nothing.
    """

    certificate: Certificate | None
    providers: Mapping[str, ProviderRun]
    blocks: tuple[BlockTest, ...]
    cases: tuple[str, ...]
    skipped: tuple[str, ...]
    failures: tuple[str, ...] = ()
    unproved: tuple[str, ...] = ()
    uncompared: tuple[str, ...] = ()
    by_blocks: bool = False
    segments: tuple[int, int] = (1, 1)
    notes: tuple[str, ...] = ()
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
        return self.certificate is not None and self.certificate.certified

    @property
    def error_ratio(self) -> float:
        """The largest `error_ratio` of the providers; NaN where nothing was evaluated in float64."""
        return max((each.error_ratio for each in self.providers.values() if each.error_ratio is not None), default=nan)


@dataclass(frozen=True)
class Judge:
    """Judges a rewritten model against its original.

    Attributes:
        claims: the passes' claims about the blocks that they replaced; empty for models from elsewhere.
        lowered: the form of the original whose tensors the claims name, if that is not the original itself; its
            equivalence is proved too.
        alone: the rewritten model in a form whose blocks can be cut out, if its own cannot: the blocks are judged in
            this form, and the rewritten model itself end to end.
        tolerance: atol and rtol, if they replace the rule.
        noise: further tensors of the original that get noise of one unit in the last place.
        run: whether anything is run; if not, every block must be certified.
        longest: the longest sequence that the rewritten model takes, if no claim says so.
    """

    original: LoadedModel
    rewritten: LoadedModel
    claims: Sequence[Claim]
    settings: Settings
    progress: Progress = lambda _what, _done, _total: None
    lowered: LoadedModel | None = None
    alone: LoadedModel | None = None
    tolerance: tuple[float, float] | None = None
    noise: Sequence[Point] = ()
    run: bool = True
    longest: int | None = None

    def verdict(self) -> Validation:
        """The certificate, the run, and the tests of blocks that are not certified. Raises as `run_accepted`."""
        self.progress("certifying", 0, 4)
        certificate = self._certificate()
        # Only tensors that kept their names, and replaced blocks, are certainly meant to be the same.
        names = {
            (each.path, name): f"{each.name}: " for each in self.claims for name in (each.output, *each.block_outputs)
        }
        of_blocks = {each.name for each in self.claims}
        refusals = [each for each in certificate.refusals if self.claims or each.refuted]
        refused: dict[bool, dict[str, None]] = {True: {}, False: {}}
        for each in [each for each in refusals if each.settled] or refusals:  # others may follow from these
            told = f"{'refuted' if each.refuted else 'not proved'}: {each.text}"
            text = each.text if each.node in of_blocks else f"{names.get((each.path, each.original), '')}{told}"
            # A tolerance excuses refuted regions, unless they are claimed.
            refused[each.refuted and bool(self.claims or self.tolerance is None)][text] = None
        refuted, unproved = (tuple(refused[each]) for each in (True, False))
        if not self.run:
            unproved += tuple(f"{name} cannot be certified, only tested; {_RUN_ADVICE}" for name in certificate.left)
            return Validation(certificate, {}, (), (), (), refuted, unproved, notes=(_NOT_RUN,))
        try:
            return self._judged(certificate, refuted, unproved)
        except (ValidationError, LookupError, ValueError) as error:
            # The file may be too broken to run; the refutation is more informative.
            if not (refuted or unproved):
                raise
            return Validation(certificate, {}, (), (), (), refuted, unproved, (str(error),))

    @property
    def _named(self) -> LoadedModel:
        """The form of the original whose tensors the claims name."""
        lowered = self.lowered
        return self.original if lowered is None or lowered.proto is self.original.proto else lowered

    @property
    def _by_blocks(self) -> bool:
        return self.settings.by_blocks(max(self.original.size, self.rewritten.size))

    def _certificate(self) -> Certificate:
        held = {
            each.place: Claimed(
                each.max_error, each.domain if np.isfinite(each.domain) else None, each.inputs, each.accuracy
            )
            for each in self.claims
        }
        # Blocks whose bias tokens the network carries can only be judged in a model where each has its own.
        judged = self.alone or self.rewritten
        found = certify(self.original, judged, claims=held, blocks=self.claims)
        if not found.certified and self.claims and self._named is not self.original:
            # The names of the blocks are those of the lowered form, which must then be the same as the original.
            second = certify(self._named, judged, claims=held, blocks=self.claims)
            found = second if certify(self.original, self._named).certified else found
        if self.alone is not None:
            found = replace(found, certified=False, left=tuple(each.name for each in self.claims))
        return found

    def _judged(self, certificate: Certificate, refuted: Sequence[str], unproved: Sequence[str]) -> Validation:
        providers, claims = self.settings.providers, self.claims
        old, named = Side.of(self.original), Side.of(self._named)
        tested = tuple(claim for claim in claims if claim.name in certificate.left)
        ways = tuple(Way(name, optimise) for name in providers for optimise in (False, True))
        again = tuple(Way(name, optimise=False, again=True) for name in providers)
        watched = dict(_domains(claims, certificate))
        # Certified blocks need few inputs; tested blocks, and pre-activations in a domain, need all.
        wide = self.original.size <= CHEAP
        before = run_accepted(
            old, (*ways, *again), self.settings,
            most=self.longest or longest_of(claims), full=self.alone is not None,
            few=certificate.certified and not watched, wide=wide, by_blocks=self._by_blocks,
            progress=self.progress, what="the original",
        )  # fmt: skip
        reached = self._run(named, before.cases, ways[:1], outputs=tuple(watched)).largest() if watched else {}
        try:
            new = Side.of(self.rewritten)
            after = self._run(new, before.cases, ways, wide=wide, gaps=before.gaps, what="the rewritten model")
        except ValidationError as error:
            raise ValidationError(f"the rewritten model does not run: {error}") from error
        points = noise_points(certificate, tested, (*_mixtures(old), *self.noise))
        blocks, uncompared = [], list[str]()
        apart = new if self.alone is None else Side.of(self.alone)
        for number, claim in enumerate(tested):
            self.progress(f"testing {claim.name}", number, len(tested))
            try:
                test = tested_block(named, apart, claim, ways, self.settings.seed, before.cases, self._by_blocks)
            except ValidationError as error:
                uncompared.append(f"{claim.name} could not be tested: {error}")
                test = BlockTest(claim.name, (), None, None, (uncompared[-1],))
            blocks.append(test)
        runs = {name: self._provider(name, (old, new), before, after, points) for name in providers}
        failures = [
            *refuted,
            *(failure for block in blocks for failure in block.failures if failure not in uncompared),
            *(failure for each in runs.values() for failure in each.failures),
        ]
        uncompared += [text for each in runs.values() for text in each.uncompared]
        coarse = [_ROUNDS_TO_BYTES] if any(rounds_to_bytes(node) for _, node in _nodes(old)) else []
        notes = [*_by_definition(before, after), *misdeclared(old, before), *told(before), *coarse]
        empty = {each.name: 0 for run in runs.values() for each in run.compared.values() if each.proves_nothing}
        if empty:
            rest = "the certificate" if certificate.certified else "the tests of the blocks"
            notes.append(_EMPTY.format(", ".join(empty), rest))
        return Validation(
            certificate=certificate,
            providers=runs,
            blocks=tuple(blocks),
            cases=tuple(case.name for case in before.cases),
            skipped=before.skipped,
            failures=tuple(dict.fromkeys(failures)),
            unproved=(*unproved, *_left_domain(watched, reached), *_foreign(claims, new)),
            uncompared=tuple(dict.fromkeys(uncompared)),
            by_blocks=self._by_blocks,
            segments=(before.segments, after.segments),
            notes=tuple(notes),
        )

    def _run(self, side: Side, cases: Sequence[Case], ways: Sequence[Way], **options: Any) -> ModelRuns:
        return run_model(side, cases, ways, by_blocks=self._by_blocks, progress=self.progress, **options)

    def _provider(
        self, provider: str, sides: tuple[Side, Side], before: ModelRuns, after: ModelRuns, points: Sequence[Point]
    ) -> ProviderRun:
        """Judge the runs on one provider; noise at `points` measures how rounding affects the original's outputs."""
        ways = [Way(provider, optimise) for optimise in (False, True)]
        (plain, old), new = (before.ways[way] for way in ways), after.ways[ways[1]]
        outputs = [value.name for value in self.original.proto.graph.output]

        def judgements(points: Sequence[Point]) -> dict[tuple[str, Way], Judgement]:
            noise = noisy(
                self.original, before.cases, points, ways[:1],
                by_blocks=self._by_blocks, gaps=before.gaps, progress=self.progress,
            )  # fmt: skip
            # If that does not run, only the effect of optimisation measures the original's rounding.
            variants = [old.results, *noise.get(ways[0], ())]
            return {
                (output, way): compared(output, plain.results, variants, after.ways[way].results, self.tolerance)
                for output in names_in(plain.results, *(after.ways[way].results for way in ways))
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
            floats = any(is_float(case[output].dtype) for case in old.results if output in case)
            if floats and each.proves_nothing and not exact.holds:
                place = max(points, key=lambda point: point.error).place
                coarsest = next((claim.name for claim in self.claims if claim.place == place), place[1])
                failures.append(f"output {output} {exact.reason} on {way}{where}; {_COARSE.format(coarsest)}")
            elif not each.holds:
                failures.append(f"output {output} {each.reason} on {way}{where}")
            if output not in found or each.error > found[output].error:
                found[output] = each
        nothing = {output: uncompared([case[output] for case in old.results if output in case]) for output in found}
        coarse = _coarse_operators(provider, sides[1]) if failures else ()
        if coarse:
            failures.append(_ROUNDED.format(provider, ", ".join(coarse)))
        told = old.cpu_nodes is not None and new.cpu_nodes is not None
        there, fallen = (
            _without_shapes(ran.cpu_nodes or (), side) for ran, side in zip((old, new), sides, strict=True)
        )
        return ProviderRun(
            compared=found,
            error_ratio=_error_ratio(before, after, ways),
            cpu_nodes=tuple(node for node in fallen if told and node not in there),
            cpu_nodes_of_original=len(there) if told else None,
            failures=tuple(dict.fromkeys(failures)),
            uncompared=tuple(f"nothing could be compared: output {name} {why}" for name, why in nothing.items() if why),
        )


def _foreign(claims: Sequence[Claim], rewritten: Side) -> Iterator[str]:
    for claim in (each for each in claims if each.exposed):
        view = rewritten.views[claim.path]
        inside = [view.nodes[index] for index in cut(view, claim.reads, claim.makes).nodes]
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
        if not claim.path and np.isfinite(claim.domain):
            yield claim.gate, (claim.name, claim.domain)


def _left_domain(watched: Mapping[str, tuple[str, float]], reached: Mapping[str, float]) -> Iterator[str]:
    """Blocks whose pre-activations left the domain of their program on some input."""
    for tensor, (name, domain) in watched.items():
        largest = reached.get(tensor, 0.0)
        if largest > domain:
            yield (
                f"{name}: pre-activations reach {largest:.4g}, its program holds up to {domain:.4g}; exclude it with "
                "--skip, or fit it on a larger one with --option domain=R"
            )


def longest_of(claims: Sequence[Claim]) -> int | None:
    """The longest sequence that all blocks accept; None for any."""
    return min((claim.longest for claim in claims if claim.longest), default=None)


def noise_points(
    certificate: Certificate | None, tested: Sequence[Claim], further: Sequence[Point] = ()
) -> tuple[Point, ...]:
    """The points of the original that get noise: certified activations, tested ones, and further ones."""
    certified = (
        Point(each.original, each.path, each.elem_type, each.bound.bound, each.leaves[0], each.linear_in or "")
        for each in (() if certificate is None else certificate.regions)
    )
    unique: dict[Place, Point] = {}
    for point in (*certified, *map(point_of, tested), *further):
        unique.setdefault(point.place, point)
    return tuple(unique.values())


def _mixtures(side: Side) -> Iterator[Point]:
    for view, node in _nodes(side):
        if key_of(node) in EXPERTS:
            yield Point(node.output[0], view.path, view.type_of(node.output[0]).elem_type)


def _nodes(side: Side) -> Iterator[tuple[GraphView, onnx.NodeProto]]:
    return ((view, node) for view in side.views.values() for node in view.nodes)


def _coarse_operators(provider: str, side: Side) -> list[str]:
    """The operators in a model whose float64 kernels round to float32 on a provider."""
    kinds = parse_provider(provider).coarse
    nodes = ((view, node) for view, node in _nodes(side) if node.op_type in kinds)
    found = {node.op_type for view, node in nodes if view.type_of(node.output[0]).elem_type == onnx.TensorProto.DOUBLE}
    return sorted(found)


def _without_shapes(nodes: Sequence[str], side: Side) -> list[str]:
    """The nodes, as a session names them, except nodes that compute 64-bit integers only."""
    of_shapes = {
        f"{node.op_type} '{node.name}'" for view, node in (_nodes(side) if nodes else ())
        if all(view.type_of(name).elem_type == onnx.TensorProto.INT64 for name in node.output if name)
    }  # fmt: skip
    return [each for each in nodes if each not in of_shapes]


def _error_ratio(before: ModelRuns, after: ModelRuns, ways: Sequence[Way]) -> float | None:
    """The largest error against the original in float64, rewritten over original, over outputs and both ways."""
    truth, ratios = before.truth or ({},), list[float]()
    every = [*truth, *(case for runs in (before, after) for way in ways for case in runs.ways[way].results)]
    shared = (each for each in truth[0] if all(each in case for case in every))
    for output in (each for each in shared if truth[0][each].dtype.kind == "f"):
        exact = [case[output] for case in truth]
        for way in ways:
            own, theirs = ([case[output] for case in runs.ways[way].results] for runs in (before, after))
            least = 0.5 * float(ml_dtypes.finfo(own[0].dtype).eps) * max(map(magnitude, exact))
            old, new = (max(largest_gap(exact, values), least) for values in (own, theirs))
            # An evaluation far from the original, because an operator decides by rounding, is not informative.
            ratios += [new / old] if 0.0 < old * old < least * max(map(magnitude, exact)) else []
    return max(ratios, default=None)
