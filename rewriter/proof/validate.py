"""The judge: PASS is a certificate and a run.

The certificate (`rewriter.proof.certificate`) proves, for every input of every size, that the rewritten model computes
what the original does, up to a bound at each activation. The run looks for what no certificate can see: both models on
a few inputs, on each provider, with and without optimisation, compared by the one rule of `rewriter.proof.rule`.

Where the certificate does not reach (forms with attention between all tokens), everything outside the blocks is shown
to be the original's, and each block is tested by itself (`rewriter.proof.tested`). Reports call these blocks tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import ml_dtypes
import numpy as np
import onnx

from rewriter.arrays import magnitude
from rewriter.errors import ValidationError
from rewriter.files.load import LoadedModel
from rewriter.ort.providers import parse_provider
from rewriter.proof.certificate.certify import Certificate, Claimed, ReplacedBlock, certify
from rewriter.proof.claims import NO_VARIANTS, Claim, Side, Variants
from rewriter.proof.inputs.cases import LARGEST, Case, Maker, make_cases
from rewriter.proof.inputs.read import load_cases
from rewriter.proof.inputs.roles import is_float
from rewriter.proof.nudge import DRAWS, Point, feeds, nudged
from rewriter.proof.rule import Judgement, Results, compared
from rewriter.proof.run import ModelRuns, Progress, Ran, Wanted, Way, open_model, run_model
from rewriter.proof.settings import LARGE, Settings
from rewriter.proof.statistics import OutputStats, compare, uncompared
from rewriter.proof.tested import BlockTest, needs, tested_block
from rewriter.proof.unwritten import gaps, told, united, without

__all__ = ["Progress", "ProviderRun", "Settings", "Validation", "validate"]

Rule = Callable[[str, Results, Sequence[Results], Results], Judgement]
"""[output, the original's results, its variants, the rewritten results] Whether they agree."""

CPU = Way("cpu", optimise=True)
"""The control that other providers are compared with."""

CEILINGS: Mapping[int, float] = {
    onnx.TensorProto.FLOAT: 1e-5,
    onnx.TensorProto.DOUBLE: 1e-5,
    onnx.TensorProto.FLOAT16: 2.0**-10,
    onnx.TensorProto.BFLOAT16: 2.0**-7,
}
"""The largest error over max(1, |f|) that a pass may claim for an activation unless the user asked for more, by element
type: what a program may be off by that is fitted while planning (those of the table are off by 1e-7 at most), and for
half precision the spacing of its numbers, to which constants round. What is claimed is then proved."""

CHEAP = 2**26
"""Models of at most this many bytes are evaluated in float64 too, for the figure `error_ratio`."""


@dataclass(frozen=True)
class ProviderRun:
    """A run on one execution provider.

    Attributes:
        outputs: maps an output to statistics of rewritten against original, both optimised, over all cases.
        compared: the rule, output by output; the worse of both optimisation levels.
        error_ratio: largest error against float64, rewritten over original; None where that was not evaluated.
        load_seconds: how long onnxruntime took to load the original and the rewritten model, optimised.
        cpu_nodes: nodes that fell back to the CPU, but for those that do in the original too.
        cpu_nodes_of_original: how many nodes of the original do; None where onnxruntime cannot tell.
        control: on a provider other than the CPU: the *original* there against the original on the CPU.
        failures: what did not hold.
    """

    outputs: Mapping[str, OutputStats]
    compared: Mapping[str, Judgement]
    error_ratio: float | None
    load_seconds: tuple[float, float]
    cpu_nodes: tuple[str, ...]
    cpu_nodes_of_original: int | None = 0
    control: Mapping[str, OutputStats] = field(default_factory=dict)
    failures: tuple[str, ...] = ()


@dataclass(frozen=True)
class Validation:
    """The verdict.

    Attributes:
        passed: whether everything held.
        certificate: what was proved for every input; None if the models could not be compared at all.
        providers: the runs, by execution provider as requested: cpu, cuda:device_id=1.
        blocks: the tests of the blocks that are not certified, in graph order.
        cases: the inputs that were run.
        skipped: inputs that the original model itself refused, with the reason.
        failures: the checks that failed, in words.
        by_blocks: whether neither model was ever loaded as a whole.
        segments: number of consecutive parts in which original and rewritten model were run; 1 if loaded as a whole.
        notes: what the reader of a verdict should know, such as outputs whose run proves nothing.
    """

    passed: bool
    certificate: Certificate | None
    providers: Mapping[str, ProviderRun]
    blocks: tuple[BlockTest, ...]
    cases: tuple[str, ...]
    skipped: tuple[str, ...]
    failures: tuple[str, ...]
    by_blocks: bool = False
    segments: tuple[int, int] = (1, 1)
    notes: tuple[str, ...] = ()

    @property
    def certified(self) -> bool:
        """Whether the rewritten model is proved for every input."""
        return self.certificate is not None and self.certificate.certified


def validate(
    original: LoadedModel,
    rewritten: LoadedModel,
    claims: Sequence[Claim],
    settings: Settings,
    progress: Progress = lambda _what, _done, _total: None,
    variants: Variants = NO_VARIANTS,
    rule: Rule = compared,
    noise: Sequence[Point] = (),
) -> Validation:
    """Judge `rewritten` against `original`.

    Args:
        original: the specification.
        rewritten: what is judged.
        claims: what the passes say of the blocks that they replaced; empty for models from elsewhere.
        settings: inputs and providers.
        progress: called with (activity, steps done, total steps).
        variants: other forms of the two to which the claims refer.
        rule: compares an output of both; with tolerances, another one than that of `rewriter.proof.rule`.
        noise: further tensors of the original that get noise of one unit in the last place.

    Raises:
        ValidationError: the original does not run on any of the inputs, or a model cannot be loaded.
        ProviderError: a provider is not available.
        UsageError: the inputs do not fit the model.
    """
    progress("certifying", 0, 4)
    held = {
        each.output: Claimed(
            min(each.max_error, max(each.accuracy, CEILINGS.get(each.elem_type, 0.0))),
            each.domain if np.isfinite(each.domain) else None,
            each.inputs,
        )
        for each in claims
    }
    # Blocks whose bias tokens the network carries can only be seen in a model where each has its own.
    judged = variants.alone or rewritten
    certificate = certify(original, judged, claims=held, blocks=replaced(claims))
    lowered = variants.lowered
    if not certificate.certified and claims and lowered is not None and lowered.proto is not original.proto:
        # The names of the blocks are those of the lowered form, which must then be the same as the original.
        first, second = certify(original, lowered), certify(lowered, judged, claims=held, blocks=replaced(claims))
        certificate = second if first.certified else certificate
    if variants.alone is not None:
        certificate = replace(certificate, certified=False, left=tuple(each.name for each in claims))
    # Only tensors that kept their names, and what replaced a block, are surely meant to be the same.
    names = {output: f"{each.name}: " for each in claims for output in (each.output, *each.block_outputs)}
    of_blocks = {each.name for each in claims}
    told = [each for each in certificate.refusals if claims or (each.refuted and each.tensor == each.original)]
    known = [
        each.text if each.node in of_blocks else f"{names.get(each.original, '')}not certified: {each.text}"
        for each in ([each for each in told if each.refuted] or told)  # the others may follow from what is refuted
    ]
    try:
        return _judged(original, rewritten, claims, settings, progress, variants, certificate, known, rule, noise)
    except (ValidationError, LookupError, ValueError):
        # The file may be so wrong that it does not run; what is known already says more than that.
        if not known:
            raise
        return Validation(False, certificate, {}, (), (), (), tuple(dict.fromkeys(known)))


def replaced(claims: Sequence[Claim]) -> tuple[ReplacedBlock, ...]:
    """Where the blocks are: a region, or, where the heads do the work of the linear operators too, the whole block."""
    return tuple(
        ReplacedBlock(
            each.name,
            each.path,
            each.block_inputs if each.heads else each.inputs,
            (*each.block_outputs, *each.shapes) if each.heads else (each.output,),
            each.inputs,
            each.output,
            each.entrywise,
        )
        for each in claims
    )


def _judged(
    original: LoadedModel,
    rewritten: LoadedModel,
    claims: Sequence[Claim],
    settings: Settings,
    progress: Progress,
    variants: Variants,
    certificate: Certificate,
    known: Sequence[str],
    rule: Rule,
    noise: Sequence[Point],
) -> Validation:
    by_blocks = settings.by_blocks(max(original.size, rewritten.size))
    old, new = Side.of(original), Side.of(rewritten)
    named = old if variants.lowered is None or variants.lowered.proto is original.proto else Side.of(variants.lowered)
    # The certificate is about the original's outputs; what else a block shows is tested.
    tested = tuple(claim for claim in claims if claim.exposed or claim.name in certificate.left)
    ways = tuple(Way(name, optimise) for name in settings.providers for optimise in (False, True))
    both = (
        tuple(dict.fromkeys((*ways, CPU))) if any(parse_provider(n).name != "cpu" for n in settings.providers) else ways
    )
    wide = original.size <= CHEAP
    longest = 0 if variants.alone is None else max((claim.longest or 0 for claim in claims), default=0)
    taps = {claim.name: needs(named, claim) for claim in tested if not claim.path}
    watched = dict(_domains(claims, certificate))
    read = tuple(dict.fromkeys(name for names in taps.values() for name in names))
    inside = (read, tuple(watched))
    # What is certified needs few inputs; blocks to be tested, and pre-activations that must stay in a domain, need all.
    cases = cases_of(original, settings, longest, few=certificate.certified and not watched)
    try:
        own = inside if named is old else ((), ())
        again = tuple(Way(name, optimise=False, again=True) for name in settings.providers)
        wanted = Wanted((*both, *again), *own, wide=wide, may_refuse=True, what="the original")
        before = run_accepted(old, cases, wanted, settings, progress, by_blocks=by_blocks)
        if named is not old:
            # Only the lowered form, which computes the same, has the tensors under these names.
            wanted = Wanted(both[:1], *inside, what="the original")
            found = run_model(named, before.cases, wanted, progress, by_blocks=by_blocks)
            before = replace(before, taps=found.taps, reached=found.reached)
    except NoCases:
        raise
    except ValidationError as error:
        raise ValidationError(_refused(original, error)) from error
    try:
        wanted = Wanted(ways, wide=wide, what="the rewritten model")
        after = run_model(new, before.cases, wanted, progress, by_blocks=by_blocks)
    except ValidationError as error:
        raise ValidationError(f"the rewritten model does not run: {error}") from error
    points = noise_points(certificate, tested, noise)
    left_out = united([gaps(before.ways[replace(way, again=False)].results, before.ways[way].results) for way in again])
    for ran in (*before.ways.values(), *after.ways.values()):
        ran.results = without(ran.results, left_out)
    truth = None if before.truth is None else without(before.truth, left_out)
    before = replace(before, truth=truth)

    def with_noise(points: Sequence[Point]) -> dict[str, list[Results]]:
        found = _with_noise(original, before.cases, points, settings.providers, progress, by_blocks=by_blocks)
        return {name: [without(each, left_out) for each in draws] for name, draws in found.items()}

    noisy = with_noise(points)
    rounding: dict[str, list[Results]] = {}
    coarsest = max(points, key=lambda point: point.error).tensor if points else ""
    names = {claim.output: claim.name for claim in claims}
    judged = {name: _judgements(name, before, after, noisy.get(name, []), rule) for name in settings.providers}
    vague = any(each.proves_nothing for found in judged.values() for each in found.values())
    if vague and any(point.error for point in points):
        # What a certificate allows is no excuse where it is as large as the output, and rounding is not.
        exact = [replace(point, error=0.0) for point in points]
        rounding = with_noise(exact)
    apart = new if variants.alone is None else Side.of(variants.alone)
    blocks = []
    for number, claim in enumerate(tested):
        progress(f"testing {claim.name}", number, len(tested))
        seen = [] if claim.path else [{name: each[name] for name in taps[claim.name]} for each in before.taps]
        blocks.append(tested_block(named, apart, claim, seen, ways, settings.seed))
    runs = {
        name: _provider(
            name,
            before,
            after,
            found,
            _judgements(name, before, after, rounding[name], rule) if name in rounding else {},
            names.get(coarsest, coarsest),
        )
        for name, found in judged.items()
    }
    failures = [
        *known,
        *(failure for block in blocks for failure in block.failures),
        *_beyond(watched, before),
        *(failure for each in runs.values() for failure in each.failures),
    ]
    return Validation(
        passed=not failures,
        certificate=certificate,
        providers=runs,
        blocks=tuple(blocks),
        cases=tuple(case.name for case in before.cases),
        skipped=before.skipped,
        failures=tuple(dict.fromkeys(failures)),
        by_blocks=by_blocks,
        segments=(before.segments, after.segments),
        notes=(*told(before.ways[ways[0]].results, left_out), *_notes(runs, certified=certificate.certified)),
    )


def _domains(claims: Sequence[Claim], certificate: Certificate) -> Iterator[tuple[str, tuple[str, float]]]:
    """Pre-activations that must stay within a domain: tensor to block and domain."""
    for region in certificate.regions:
        if not region.path and region.bound.domain is not None and region.leaves:
            yield region.leaves[0], (region.original, region.bound.domain)
    for claim in claims:  # last: these know the names of blocks
        if not claim.path and np.isfinite(claim.domain):
            yield claim.gate, (claim.name, claim.domain)


def _beyond(watched: Mapping[str, tuple[str, float]], before: ModelRuns) -> Iterator[str]:
    """Blocks whose pre-activations left the domain of their program on some input."""
    for tensor, (name, domain) in watched.items():
        largest = before.reached.get(tensor, 0.0)
        if largest > domain:
            yield (
                f"{name}: pre-activations reach {largest:.4g}, its program holds up to {domain:.4g}; exclude it with "
                "--skip, or fit it on a larger one with --option domain=R"
            )


def cases_of(original: LoadedModel, settings: Settings, longest: int, *, few: bool = False) -> tuple[Case, ...]:
    """The inputs that were given, or generated ones, one with a sequence of `longest` tokens; `few`: three of them.

    Raises:
        UsageError: the inputs do not fit the model, or none can be made.
    """
    if settings.inputs is not None:
        return load_cases(settings.inputs, original.proto)
    return make_cases(original.proto, seed=settings.seed, dims=settings.dims, longest=longest, few=few)


_COARSE = (
    "the bound of the activation of {} allows that, but is coarse beside values so small: ask for less with "
    "--accuracy, or keep the products of gates in the graph with --gate product"
)


class NoCases(ValidationError):  # noqa: N818 - says what is missing
    """The original accepts none of the inputs."""


def run_accepted(
    side: Side, cases: Sequence[Case], wanted: Wanted, settings: Settings, progress: Progress, *, by_blocks: bool
) -> ModelRuns:
    """The runs of the original on the cases that it accepts; of other sizes, if it accepts none of the generated ones.

    Raises:
        ValidationError: the original cannot be loaded, or accepts nothing.
    """
    runs = run_model(side, cases, wanted, progress, by_blocks=by_blocks)
    if runs.cases:
        return runs
    others = other_cases(side.model, settings)
    if others:
        return replace(run_model(side, others, wanted, progress, by_blocks=by_blocks), skipped=runs.skipped)
    tried = others is not None and Maker(side.model.proto, dims=settings.dims).lengths
    more = f"; other sizes were tried too, up to {LARGEST:,}" if tried else ""
    raise NoCases(
        f"the original model runs on none of the {len(cases)} inputs tried{more}; give some with --inputs or sizes "
        f"with --dim ({runs.skipped[0]})"
    )


def other_cases(model: LoadedModel, settings: Settings) -> tuple[Case, ...] | None:
    """Cases of sizes that the model accepts; None for models above `LARGE` bytes, and instead of given inputs."""
    if settings.inputs is not None or model.size > LARGE:
        return None
    session = open_model(model, "cpu", optimise=False)

    def accepts(case: Case) -> bool:
        try:
            session.run(case.feeds)
        except ValidationError:
            return False
        return True

    return Maker(model.proto, seed=settings.seed, dims=settings.dims).searched(accepts)


def largest_magnitudes(
    model: LoadedModel, tensors: Sequence[str], settings: Settings, progress: Progress
) -> dict[str, float]:
    """The largest finite |entry| of each tensor over all inputs that the model accepts.

    A fitted head program holds on a bounded domain, which is chosen from the largest pre-activations.

    Raises:
        ValidationError: the model runs on none of them.
    """
    side = Side.of(model)
    taps = tuple(name for name in dict.fromkeys(tensors) if name in side.main.producer)
    if not taps:
        return {}
    wanted = Wanted((CPU,), watched=taps, may_refuse=True, what="the original")
    cases, by_blocks = cases_of(model, settings, 0), settings.by_blocks(model.size)
    return dict(run_accepted(side, cases, wanted, settings, progress, by_blocks=by_blocks).reached)


def noise_points(
    certificate: Certificate | None, tested: Sequence[Claim], further: Sequence[Point] = ()
) -> tuple[Point, ...]:
    """Where the original gets noise: the activations that are certified, those that are tested, and further ones."""
    found = [
        Point(each.original, each.path, each.elem_type, each.bound.bound, each.leaves[0], each.linear_in or "")
        for each in (() if certificate is None else certificate.regions)
    ]
    found += [
        Point(each.output, each.path, each.elem_type, each.max_error, each.gate, each.value if each.gated else "")
        for each in tested
    ]
    unique: dict[str, Point] = {}
    for point in (*found, *further):
        unique.setdefault(point.tensor, point)
    return tuple(unique.values())


def _with_noise(
    original: LoadedModel,
    cases: Sequence[Case],
    points: Sequence[Point],
    providers: Sequence[str],
    progress: Progress,
    *,
    by_blocks: bool,
) -> dict[str, list[Results]]:
    """By provider, the original's results with noise at the outputs of the blocks, draw by draw."""
    proto, prefix = nudged(original.proto, points)
    if not prefix:
        return {}
    side = Side.of(replace(original, proto=proto, path=None))
    drawn = [Case(case.name, {**case.feeds, **feeds(proto, prefix, draw)}) for draw in DRAWS for case in cases]
    ways = tuple(Way(name, optimise=False) for name in providers)
    try:
        runs = run_model(side, drawn, Wanted(ways, what="the original with noise"), progress, by_blocks=by_blocks)
    except ValidationError:
        return {}  # then what optimisation changes in the original is all that is known of its rounding
    starts = range(0, len(drawn), len(cases))
    return {way.provider: [runs.ways[way].results[k : k + len(cases)] for k in starts] for way in ways}


def _judgements(
    name: str, before: ModelRuns, after: ModelRuns, noisy: Sequence[Results], rule: Rule
) -> dict[tuple[Way, str], Judgement]:
    """The rule on every output, without and with optimisation."""
    plain, optimised = (before.ways[Way(name, optimise)].results for optimise in (False, True))
    ways = Way(name, optimise=False), Way(name, optimise=True)
    return {
        (way, output): rule(output, plain, [optimised, *noisy], after.ways[way].results)
        for way in ways
        for output in plain[0]
    }


def _provider(
    name: str,
    before: ModelRuns,
    after: ModelRuns,
    judged: Mapping[tuple[Way, str], Judgement],
    by_rounding: Mapping[tuple[Way, str], Judgement],
    coarsest: str,
) -> ProviderRun:
    """What the runs on one provider show.

    `by_rounding` are judgements with noise that leaves out the bounds of the certificate, of which that of `coarsest`
    is the largest: they decide about numbers of which `judged` proves nothing.
    """
    optimised = before.ways[Way(name, optimise=True)]
    failures: list[str] = []
    found: dict[str, Judgement] = {}
    for (way, output), each in judged.items():
        strict = by_rounding.get((way, output), each)
        if each.proves_nothing and not strict.holds and is_float(optimised.results[0][output].dtype):
            failures.append(f"output {output} {strict.reason} on {way}; {_COARSE.format(coarsest)}")
        elif not each.holds:
            failures.append(f"output {output} {each.reason} on {way}")
        if output not in found or each.error > found[output].error:
            found[output] = each
    rewritten = after.ways[Way(name, optimise=True)]
    fallen, there = _fallen(optimised, rewritten)
    outputs = _statistics(optimised.results, rewritten.results)
    for output, stats in outputs.items():
        nothing = uncompared(stats)
        failures += [] if nothing is None else [f"nothing could be compared: output {output} {nothing}"]
    return ProviderRun(
        outputs=outputs,
        compared=found,
        error_ratio=_error_ratio(before, after, name),
        load_seconds=(optimised.load_seconds, rewritten.load_seconds),
        cpu_nodes=fallen,
        cpu_nodes_of_original=there,
        control={} if parse_provider(name).name == "cpu" else _statistics(before.ways[CPU].results, optimised.results),
        failures=tuple(dict.fromkeys(failures)),
    )


def _error_ratio(before: ModelRuns, after: ModelRuns, name: str) -> float | None:
    """The largest error against the original in float64, rewritten over original, over outputs and both ways."""
    ratios = []
    truth = before.truth or ()
    for output in (name for name, values in (truth[0] if truth else {}).items() if values.dtype.kind == "f"):
        largest = max(magnitude(case[output]) for case in truth)
        for optimise in (False, True):
            way = Way(name, optimise)
            eps = 0.5 * float(ml_dtypes.finfo(before.ways[way].results[0][output].dtype).eps)
            old, new = (_gap(runs.ways[way].results, truth, output) for runs in (before, after))
            if max(old, eps * largest) > 0:
                ratios.append(max(new, eps * largest) / max(old, eps * largest))
    return max(ratios, default=None)


def _gap(results: Results, truth: Results, output: str) -> float:
    """The largest finite difference from the truth."""
    pairs = [(case[output], right[output]) for case, right in zip(results, truth, strict=True)]
    with np.errstate(all="ignore"):
        return max(magnitude(a.astype(np.float64) - b) if a.shape == b.shape else 0.0 for a, b in pairs)


def _statistics(old: Results, new: Results) -> dict[str, OutputStats]:
    return {name: compare(name, *([case[name] for case in side] for side in (old, new))) for name in old[0]}


def _fallen(before: Ran, after: Ran) -> tuple[tuple[str, ...], int | None]:
    """CPU nodes of the rewritten model that are not CPU nodes of the original, and the number of the latter."""
    if before.cpu_nodes is None or after.cpu_nodes is None:
        return (), None
    there = set(before.cpu_nodes)
    return tuple(node for node in after.cpu_nodes if node not in there), len(before.cpu_nodes)


def _notes(runs: Mapping[str, ProviderRun], *, certified: bool) -> Iterator[str]:
    """Outputs on which the run proves nothing, since rounding moves the original's own as far as they are large."""
    names = dict.fromkeys(name for each in runs.values() for name, c in each.compared.items() if c.proves_nothing)
    if names:
        rest = "the verdict rests on the certificate" if certified else "the verdict rests on the tests of the blocks"
        yield f"the run proves nothing about {', '.join(names)}: rounding alone moves it as far as it is large; {rest}"


def _refused(original: LoadedModel, error: ValidationError) -> str:
    """The message that says why nothing can be proved, and what to do."""
    types = {tensor.data_type for tensor in original.proto.graph.initializer}
    if onnx.TensorProto.BFLOAT16 in types and "NOT_IMPLEMENTED" in str(error):
        return (
            "nothing can be proved here: onnxruntime lacks bfloat16 kernels on this provider; prove a float32 "
            f"export of the model, or skip the proof with --no-validate ({error})"
        )
    return f"the original model does not run, so nothing can be proved; --no-validate skips the proof: {error}"
