"""The proof that a rewritten model computes what the original does.

Each block is proved by itself (`rewriter.proof.blocks.block`), then the model end to end (`rewriter.proof.end_to_end`),
on every requested execution provider, with onnxruntime's default optimisation and without any. A large model is never
loaded as a whole: blocks are cut out of it, and end to end it runs in consecutive segments. The `Validation` holds the
measured numbers even if everything passed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise

import numpy as np
import onnx

from rewriter.arrays import Array
from rewriter.errors import ValidationError
from rewriter.files.load import LoadedModel
from rewriter.ort.providers import parse_provider
from rewriter.proof.blocks.block import BlockItem, BlockProof, block_item, block_needs, made_inputs, prove_block
from rewriter.proof.blocks.exposed import not_weights
from rewriter.proof.claims import NO_VARIANTS, Claim, Side, Variants
from rewriter.proof.diagnosis.blame import first_astray
from rewriter.proof.diagnosis.doubt import doubt
from rewriter.proof.end_to_end import CPU, Evaluations, ProviderProof, judge_end_to_end
from rewriter.proof.inputs.cases import Case
from rewriter.proof.inputs.generate import load_cases, make_cases
from rewriter.proof.inputs.search import other_cases, tried_sizes
from rewriter.proof.planned import planned_side, reached, shaken
from rewriter.proof.run.jobs import run_jobs
from rewriter.proof.run.model import run_model
from rewriter.proof.run.whole import ModelRuns, Progress, Results, Wanted, Way, within
from rewriter.proof.settings import Settings
from rewriter.proof.unchanged.model import unexplained_changes

__all__ = ["Progress", "Settings", "Validation", "validate"]

Runner = Callable[[Side, Sequence[Case], Wanted, Progress], ModelRuns]


_SHARES = (0.2, 0.5, 0.75, 0.9, 1.0)
"""Where these end, as shares of the time of a typical proof: the runs of the original, the proofs of the blocks, the
runs of the rewritten model, the evaluations of the plan, the comparison. For the progress bar."""


@dataclass(frozen=True)
class _Asked:
    """How to run the models, which tensors the proof of each block needs, and which must stay within a domain."""

    ways: tuple[Way, ...]
    needs: Mapping[str, tuple[str, ...]]
    watched: tuple[str, ...] = ()


@dataclass(frozen=True)
class Validation:
    """The result of the proof.

    Attributes:
        passed: whether every check passed.
        providers: the proofs end to end, by execution provider as requested: cpu, cuda:device_id=1.
        blocks: the proofs of the blocks, in graph order.
        cases: the inputs that were run.
        skipped: inputs that the original model itself refused, with the reason.
        reference: what computed the float64 evaluation, or why nothing could.
        failures: the checks that failed, in words.
        by_blocks: whether neither model was ever loaded as a whole.
        segments: number of consecutive parts in which original and rewritten model were run; 1 if loaded as a whole.
        quick: whether the model was proved end to end on two cases alone: the first and a small one.
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
    quick: bool = False


def validate(
    original: LoadedModel,
    rewritten: LoadedModel,
    claims: Sequence[Claim],
    settings: Settings,
    progress: Progress = lambda _what, _done, _total: None,
    variants: Variants = NO_VARIANTS,
) -> Validation:
    """Prove `rewritten` against `original`; `variants` are other forms of the two to which the claims refer.

    Raises:
        ValidationError: the original does not run on any of the inputs, or a model cannot be loaded.
        ProviderError: a provider is not available.
        UsageError: the inputs do not fit the model, or `Settings.jobs` cannot be followed.
    """
    changed = _changed(original, rewritten, claims, variants)
    try:
        return _measured(original, rewritten, claims, settings, progress, variants, changed)
    except (ValidationError, LookupError, ValueError):
        # The file differs from the claims so much that it cannot even be measured; the differences say more than
        # the error does.
        if not changed:
            raise
        return Validation(False, {}, (), (), (), "nothing could be measured", tuple(changed), quick=settings.quick)


def _changed(original: LoadedModel, rewritten: LoadedModel, claims: Sequence[Claim], variants: Variants) -> list[str]:
    """Differences from the original that no claim explains, read from the files without running them."""
    if not claims:
        return []
    old = variants.lowered or original
    return unexplained_changes(Side.of(old), Side.of(variants.alone or rewritten), claims)


def _measured(
    original: LoadedModel,
    rewritten: LoadedModel,
    claims: Sequence[Claim],
    settings: Settings,
    progress: Progress,
    variants: Variants,
    changed: Sequence[str],
) -> Validation:
    """Run everything; `changed` are the failures that are known already."""
    by_blocks = settings.by_blocks(max(original.size, rewritten.size))
    run: Runner = partial(run_model, by_blocks=by_blocks)
    old, new = Side.of(original), Side.of(rewritten)
    lowered = variants.lowered
    named = old if lowered is None or lowered.proto is original.proto else Side.of(lowered)
    apart = new if variants.alone is None else Side.of(variants.alone)
    planned = planned_side(named, claims)
    ways = tuple(Way(name, optimise) for name in settings.providers for optimise in (False, True))
    needs = {claim.name: block_needs(named, claim) for claim in claims if not claim.path}
    watched = tuple(claim.gate for claim in claims if not claim.path and np.isfinite(claim.domain))
    asked = _Asked(ways, needs, watched)
    # Positions that all blocks share are proved end to end, up to the last one; those of a block are proved with it.
    longest = 0 if variants.alone is None else max((claim.longest or 0 for claim in claims), default=0)
    to_blocks, to_rewritten, to_plan, to_verdict = (within(progress, *ends) for ends in pairwise(_SHARES))
    before = _run_original(run, old, named, settings, longest, asked, within(progress, 0.0, _SHARES[0]))

    def items() -> Iterator[BlockItem]:
        for number, claim in enumerate(claims):
            to_blocks(f"proving {claim.name}", number, len(claims))
            yield block_item(named, apart, planned, claim, _seen(named, claim, needs, before, settings), ways)

    blocks = run_jobs(prove_block, items(), settings.jobs, settings.joblib_backend)

    def wide(side: Side, what: str) -> Results | None:
        return run(side, before.cases, Wanted(wide=True, what=what), to_plan).truth

    exact = before.truth is not None
    after = run(new, before.cases, Wanted(ways, wide=exact, what="the rewritten model"), to_rewritten)
    runs = Evaluations(
        before,
        after,
        planned=wide(planned, "the plan") if exact else None,
        shaken=wide(shaken(planned), "the plan, shaken") if exact and any(c.unstable for c in claims) else None,
        lowered=wide(named, "the lowered original") if exact and named is not old else None,
    )
    why = cache(partial(doubt, original, before))
    providers: dict[str, ProviderProof] = {}
    for number, name in enumerate(settings.providers):
        to_verdict(f"end to end on {name}", number, len(settings.providers))
        providers[name] = judge_end_to_end(original, runs, claims, name, why)
    shown = [failure for run in after.ways.values() for case in run.results for failure in not_weights(claims, case)]
    local = [
        *changed,
        *shown,
        *(failure for block in blocks for failure in block.failures),
        *_beyond(claims, planned, before),
    ]
    whole = [failure for proof in providers.values() for failure in proof.failures]
    failures = [*local, *whole]
    if whole and not local and exact and variants.alone is None and not by_blocks:
        astray = first_astray(planned, new, claims, before.cases)
        failures = ([] if astray is None else [astray]) + whole
    return Validation(
        passed=not failures,
        providers=providers,
        blocks=tuple(blocks),
        cases=tuple(case.name for case in before.cases),
        skipped=before.skipped,
        reference=before.reference if before.truth is None else after.reference,
        failures=tuple(dict.fromkeys(failures)),
        by_blocks=by_blocks,
        segments=(before.segments, after.segments),
        quick=settings.quick,
    )


def _beyond(claims: Sequence[Claim], planned: Side, before: ModelRuns) -> list[str]:
    """Failures of blocks whose pre-activations left the domain of their program on some input."""
    seen = reached(planned, claims)
    failures = []
    for claim in claims:
        largest = max(seen.get(claim.name, 0.0), before.reached.get(claim.gate, 0.0) if not claim.path else 0.0)
        if largest > claim.domain:
            failures.append(
                f"{claim.name}: pre-activations reach {largest:.4g}, its program holds up to {claim.domain:.4g}; "
                "convert it with a larger --option domain=R, or exclude it with --skip"
            )
    return failures


def cases_of(original: LoadedModel, settings: Settings, longest: int) -> tuple[Case, ...]:
    """The inputs of the proof: those that were given, or generated ones, one with a sequence of `longest` tokens.

    Raises:
        UsageError: the inputs do not fit the model, or none can be made.
    """
    if settings.inputs is not None:
        return load_cases(settings.inputs, original.proto)
    return make_cases(original.proto, seed=settings.seed, dims=settings.dims, longest=longest)


def few_of(cases: Sequence[Case]) -> tuple[Case, ...]:
    """The cases of the quick proof: the first, and the smallest of the others.

    A single case would not tell samples from channels (`rewriter.proof.pass_rule`): every token would be a channel.
    """
    others = sorted(cases[1:], key=lambda case: sum(array.size for array in case.feeds.values()))
    return (*cases[:1], *others[:1])


def _run_original(
    run: Runner, original: Side, named: Side, settings: Settings, longest: int, asked: _Asked, progress: Progress
) -> ModelRuns:
    """The runs of the original on the cases that it accepts, with the tensors that the blocks read.

    If it accepts none of the generated ones, other sizes are searched.
    """
    ways = asked.ways
    if any(parse_provider(way.provider).name != "cpu" for way in ways):
        ways = tuple(dict.fromkeys((*ways, CPU)))
    taps = tuple(dict.fromkeys(name for names in asked.needs.values() for name in names))
    tapped_here = named is original
    watched = asked.watched
    wanted = Wanted(
        ways, *((taps, watched) if tapped_here else ((), ())), wide=True, may_refuse=True, what="the original"
    )
    first = partial(_run_few, run) if settings.quick else run
    cases = cases_of(original.model, settings, longest)
    try:
        runs = first(original, cases, wanted, progress)
        if not runs.cases and (others := other_cases(original.model, settings)):
            runs = replace(first(original, others, wanted, progress), skipped=runs.skipped)
        if not tapped_here and runs.cases:
            # Only the lowered form, which computes the same, has the tensors under these names.
            found = run(named, runs.cases, Wanted(ways[:1], taps, watched, what="the original"), progress)
            runs = replace(runs, taps=found.taps, reached=found.reached)
    except ValidationError as error:
        raise ValidationError(_refused(original, error)) from error
    if not runs.cases:
        more = tried_sizes(original.model, settings)
        raise ValidationError(
            f"the original model runs on none of the {len(cases)} inputs tried{more}; give some with --inputs or sizes "
            f"with --dim ({runs.skipped[0]})"
        )
    return runs


def _run_few(run: Runner, original: Side, cases: Sequence[Case], wanted: Wanted, progress: Progress) -> ModelRuns:
    """The runs on the first case that the model accepts, and on the smallest of the others if it accepts that too."""
    skipped: list[str] = []
    for place in range(len(cases)):
        runs = run(original, few_of(cases[place:]), wanted, progress)
        skipped += runs.skipped
        if runs.cases:
            break
    return replace(runs, skipped=tuple(dict.fromkeys(skipped)))


def _seen(
    named: Side, claim: Claim, needs: Mapping[str, tuple[str, ...]], runs: ModelRuns, settings: Settings
) -> list[Mapping[str, Array]]:
    """The values that a block reads in the runs; generated ones for a block in a body of control flow."""
    if claim.path:
        return made_inputs(named, claim, seed=settings.seed)
    return [{name: values[name] for name in needs[claim.name]} for values in runs.taps]


def _refused(original: Side, error: ValidationError) -> str:
    """The message that says why nothing can be proved, and what to do."""
    types = {tensor.data_type for tensor in original.model.proto.graph.initializer}
    if onnx.TensorProto.BFLOAT16 in types and "NOT_IMPLEMENTED" in str(error):
        return (
            "nothing can be proved here: onnxruntime lacks bfloat16 kernels on this provider; prove a float32 "
            f"export of the model, or skip the proof with --no-validate ({error})"
        )
    return f"the original model does not run, so nothing can be proved; --no-validate skips the proof: {error}"
