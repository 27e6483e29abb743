"""The proof that a rewritten model computes what the original does.

Comes in: both models, the claims about the replaced blocks, and how to try them. Goes out: `Validation`, with numbers
also when it passes. First each block by itself (`rewriter.proof.blocks`), then end to end
(`rewriter.proof.endtoend`), on every execution provider asked for, with onnxruntime's default optimisation and with
none. A large model is never loaded as a whole: blocks are cut out of it, and end to end it runs in consecutive
segments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx

from rewriter.errors import ValidationError
from rewriter.files.load import LoadedModel
from rewriter.proof.blocks import BlockItem, BlockProof, block_item, block_needs, made_inputs, prove_block
from rewriter.proof.cases import Case
from rewriter.proof.claims import NO_VARIANTS, Claim, Side, Variants
from rewriter.proof.distance import Array
from rewriter.proof.endtoend import CPU, ProviderProof, judge_end_to_end
from rewriter.proof.inputs import load_cases, make_cases
from rewriter.proof.jobs import run_jobs
from rewriter.proof.providers import parse_provider
from rewriter.proof.runs import TAPPED, ModelRuns, Progress, Wanted, Way, run_whole
from rewriter.proof.segments import run_in_segments
from rewriter.proof.settings import Settings
from rewriter.proof.unchanged import unexplained_changes

__all__ = ["Progress", "Settings", "Validation", "validate"]

Runner = Callable[[Side, Sequence[Case], Wanted, Progress], ModelRuns]


@dataclass(frozen=True)
class _Asked:
    """How models are run, and which tensors the proof of each block needs."""

    ways: tuple[Way, ...]
    needs: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Validation:
    """The result of the proof.

    Attributes:
        passed: whether everything held.
        providers: by execution provider.
        blocks: by block, in graph order.
        cases: the inputs that were run.
        skipped: inputs that the original model itself refused, with the reason.
        reference: what computed the float64 evaluation, or why there is none.
        failures: what did not hold.
        by_blocks: whether neither model was ever loaded as a whole.
        segments: in how many consecutive parts original and rewritten model were run; 1 where loaded as a whole.
    """

    passed: bool
    providers: Mapping[str, ProviderProof]
    blocks: tuple[BlockProof, ...]
    cases: tuple[str, ...]
    skipped: tuple[str, ...]
    reference: str
    failures: tuple[str, ...]
    by_blocks: bool = False
    segments: tuple[int, int] = (1, 1)


def validate(
    original: LoadedModel,
    rewritten: LoadedModel,
    claims: Sequence[Claim],
    settings: Settings,
    progress: Progress = lambda _what, _done, _total: None,
    variants: Variants = NO_VARIANTS,
) -> Validation:
    """Prove `rewritten` against `original`; `variants` are other forms of the two that the claims are about.

    Raises:
        ValidationError: the original does not run on any of the inputs, or a model cannot be loaded.
        ProviderError: a provider is not available.
        UsageError: the inputs do not fit the model, or the jobs cannot be done as asked for.
    """
    if settings.isolate:
        from rewriter.proof.isolated import validate_isolated

        return validate_isolated(original, rewritten, claims, settings, progress, variants)
    by_blocks = settings.by_blocks(max(original.size, rewritten.size))
    run = run_in_segments if by_blocks else run_whole
    old, new = Side.of(original), Side.of(rewritten)
    lowered, reweighted = variants.lowered, variants.reweighted
    named = old if lowered is None or lowered.proto is original.proto else Side.of(lowered)
    between = None if reweighted is None else Side.of(reweighted)
    apart = new if variants.alone is None else Side.of(variants.alone)
    ways = tuple(Way(name, optimise) for name in settings.providers for optimise in (False, True))
    needs = {claim.name: block_needs(named, claim) for claim in claims if not claim.path}
    before = _run_original(run, old, named, _cases(original, settings), _Asked(ways, needs), progress)

    def items() -> Iterator[BlockItem]:
        for number, claim in enumerate(claims):
            progress(f"proving {claim.name}", number, len(claims))
            yield block_item(named, apart, claim, _seen(named, claim, needs, before, settings), ways, between)

    blocks = run_jobs(prove_block, items(), settings.jobs, settings.joblib_backend)
    wanted = Wanted(ways, wide=before.truth is not None, what="the rewritten model")
    after = run(new, before.cases, wanted, progress)
    if apart is not new and before.truth is not None:
        # What certified errors amount to is taken from the model whose blocks were proved.
        wanted = Wanted(wide=True, what="the rewritten model with blocks alone")
        after = replace(after, truth=run(apart, before.cases, wanted, progress).truth)
    certain = None
    if between is not None and before.truth is not None:
        certain = run(between, before.cases, Wanted(wide=True, what="the original with fewer neurons"), progress).truth
    certified = sum(claim.max_error + claim.rounding for claim in claims)
    providers: dict[str, ProviderProof] = {}
    for number, name in enumerate(settings.providers):
        progress(f"end to end on {name}", number, len(settings.providers))
        providers[name] = judge_end_to_end(original.proto, (before, after), certain, certified, name)
    failures = unexplained_changes(between or named, apart, claims) if claims else []
    failures += [failure for block in blocks for failure in block.failures]
    failures += [failure for proof in providers.values() for failure in proof.failures]
    return Validation(
        passed=not failures,
        providers=providers,
        blocks=tuple(blocks),
        cases=tuple(case.name for case in before.cases),
        skipped=before.skipped,
        reference=before.reference if before.truth is None else after.reference,
        failures=tuple(failures),
        by_blocks=by_blocks,
        segments=(before.segments, after.segments),
    )


def _cases(original: LoadedModel, settings: Settings) -> tuple[Case, ...]:
    if settings.inputs is not None:
        return load_cases(settings.inputs, original.proto)
    return make_cases(original.proto, seed=settings.seed, dims=settings.dims)


def _run_original(
    run: Runner, original: Side, named: Side, cases: Sequence[Case], asked: _Asked, progress: Progress
) -> ModelRuns:
    """The runs of the original on the cases that it accepts, and what the blocks read."""
    ways = asked.ways
    if any(parse_provider(way.provider).name != "cpu" for way in ways):
        ways = tuple(dict.fromkeys((*ways, CPU)))
    taps = tuple(dict.fromkeys(name for names in asked.needs.values() for name in names))
    tapped_here = named is original
    wanted = Wanted(ways, taps if tapped_here else (), wide=True, may_refuse=True, what="the original")
    try:
        runs = run(original, cases, wanted, progress)
        if not tapped_here and runs.cases:
            # The lowered form names the tensors; it computes the same.
            wanted = Wanted(ways[:1], taps, what="the original")
            runs = replace(runs, taps=run(named, runs.cases[:TAPPED], wanted, progress).taps)
    except ValidationError as error:
        raise ValidationError(_refused(original, error)) from error
    if not runs.cases:
        raise ValidationError(
            f"the original model runs on none of the {len(cases)} inputs tried; give some with --inputs or sizes with "
            f"--dim ({runs.skipped[0]})"
        )
    return runs


def _seen(
    named: Side, claim: Claim, needs: Mapping[str, tuple[str, ...]], runs: ModelRuns, settings: Settings
) -> list[Mapping[str, Array]]:
    """What a block really reads; made values for one in a body of control flow."""
    if claim.path:
        return made_inputs(named, claim, seed=settings.seed)
    return [{name: values[name] for name in needs[claim.name]} for values in runs.taps]


def _refused(original: Side, error: ValidationError) -> str:
    """Why nothing can be proved, and what to do."""
    types = {tensor.data_type for tensor in original.model.proto.graph.initializer}
    if onnx.TensorProto.BFLOAT16 in types and "NOT_IMPLEMENTED" in str(error):
        return (
            "nothing can be proved here: onnxruntime lacks bfloat16 kernels on this provider; prove a float32 "
            f"export of the model, or skip the proof with --no-validate ({error})"
        )
    return f"the original model does not run, so nothing can be proved; --no-validate skips the proof: {error}"
