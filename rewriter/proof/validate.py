"""The proof that a rewritten model computes what the original does.

Comes in: both models, the claims about the replaced blocks, and how to try them. Goes out: `Validation`, with numbers
also when it passes. First each block by itself (`rewriter.proof.blocks`), then end to end (`rewriter.proof.endtoend`),
on every execution provider asked for, with onnxruntime's default optimisation and with none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import onnx

from rewriter.errors import ValidationError
from rewriter.files.load import LoadedModel
from rewriter.graph.extract import with_outputs
from rewriter.proof.blocks import BlockProof, block_needs, made_inputs, prove_block
from rewriter.proof.cases import Case
from rewriter.proof.claims import Claim, Side
from rewriter.proof.distance import Array
from rewriter.proof.endtoend import ProviderProof, Results, Truth, prove_end_to_end
from rewriter.proof.float64 import NoReference, open_reference
from rewriter.proof.inputs import load_cases, make_cases
from rewriter.proof.sessions import open_session

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many steps are done, and how many there are."""

_TAPPED_CASES = 2
"""How many cases give the real inputs of the blocks."""

Taps = dict[str, list[Mapping[str, Array]]]


@dataclass(frozen=True)
class Settings:
    """How to validate.

    Attributes:
        providers: execution providers, `cpu` or `cuda`.
        seed: of the generated inputs.
        dims: sizes for symbolic dimensions.
        inputs: an npz file to use instead of generated inputs.
    """

    providers: tuple[str, ...] = ("cpu",)
    seed: int = 0
    dims: Mapping[str, int] = field(default_factory=dict)
    inputs: Path | None = None


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
    """

    passed: bool
    providers: Mapping[str, ProviderProof]
    blocks: tuple[BlockProof, ...]
    cases: tuple[str, ...]
    skipped: tuple[str, ...]
    reference: str
    failures: tuple[str, ...]


def validate(
    original: LoadedModel,
    rewritten: LoadedModel,
    claims: Sequence[Claim],
    settings: Settings,
    progress: Progress = lambda _what, _done, _total: None,
    lowered: LoadedModel | None = None,
    alone: LoadedModel | None = None,
) -> Validation:
    """Prove `rewritten` against `original`.

    `lowered` is the form of the original that the claims name tensors of, where that is not the original itself.
    `alone` is the rewritten model with blocks that can be cut out, where those of `rewritten` cannot: they are then
    proved in it, and `rewritten` end to end.

    Raises:
        ValidationError: the original does not run on any of the inputs, or a model cannot be loaded.
        ProviderError: a provider is not available.
        UsageError: the inputs do not fit the model.
    """
    old, new = Side.of(original), Side.of(rewritten)
    apart = new if alone is None else Side.of(alone)
    named = old if lowered is None else Side.of(lowered)
    cases, taps, skipped = _real_inputs(named, claims, _cases(original, settings), settings, progress)
    blocks: list[BlockProof] = []
    for number, claim in enumerate(claims):
        progress(f"proving {claim.name}", number, len(claims))
        blocks.append(prove_block(named, apart, claim, taps[claim.name], settings.providers))
    # What certified errors amount to is taken from the model whose blocks were proved: what else is different in
    # `rewritten` is no certified error.
    reference, truth = _truth(old, apart, cases, progress)
    certified = sum(claim.max_error + claim.rounding for claim in claims)
    providers: dict[str, ProviderProof] = {}
    for number, name in enumerate(settings.providers):
        progress(f"end to end on {name}", number, len(settings.providers))
        providers[name] = prove_end_to_end(old, new, cases, truth, certified, name)
    failures = [failure for block in blocks for failure in block.failures]
    failures += [failure for proof in providers.values() for failure in proof.failures]
    return Validation(
        passed=not failures,
        providers=providers,
        blocks=tuple(blocks),
        cases=tuple(case.name for case in cases),
        skipped=tuple(skipped),
        reference=reference,
        failures=tuple(failures),
    )


def _cases(original: LoadedModel, settings: Settings) -> tuple[Case, ...]:
    if settings.inputs is not None:
        return load_cases(settings.inputs, original.proto)
    return make_cases(original.proto, seed=settings.seed, dims=settings.dims)


def _real_inputs(
    original: Side, claims: Sequence[Claim], cases: Sequence[Case], settings: Settings, progress: Progress
) -> tuple[list[Case], Taps, list[str]]:
    """The cases that the original accepts, what its blocks read in the first of them, and the cases it refuses."""
    needs = {claim.name: block_needs(original, claim) for claim in claims if not claim.path}
    wanted = dict.fromkeys(name for names in needs.values() for name in names if name not in original.main.inputs)
    tapped = with_outputs(original.model.proto, original.main, list(wanted))
    try:
        session = open_session(tapped, settings.providers[0], optimise=False, base_dir=original.model.base_dir)
    except ValidationError as error:
        raise ValidationError(_refused(original, error)) from error
    runnable: list[Case] = []
    taps: Taps = {name: [] for name in needs}
    taps |= {claim.name: made_inputs(original, claim, seed=settings.seed) for claim in claims if claim.path}
    skipped = []
    for number, case in enumerate(cases):
        progress(f"running the original: {case.name}", number, len(cases))
        try:
            values = {**case.feeds, **session.run(case.feeds)}
        except ValidationError as error:
            skipped.append(f"{case.name}: {error}")
            continue
        runnable.append(case)
        if len(runnable) <= _TAPPED_CASES:
            for block, names in needs.items():
                taps[block].append({name: values[name] for name in names})
    if not runnable:
        raise ValidationError(
            f"the original model runs on none of the {len(cases)} inputs tried; give some with --inputs or sizes with "
            f"--dim ({skipped[0]})"
        )
    return runnable, taps, skipped


def _refused(original: Side, error: ValidationError) -> str:
    """Why nothing can be proved, and what to do."""
    types = {tensor.data_type for tensor in original.model.proto.graph.initializer}
    if onnx.TensorProto.BFLOAT16 in types and "NOT_IMPLEMENTED" in str(error):
        return (
            "nothing can be proved here: onnxruntime lacks bfloat16 kernels on this provider; prove a float32 "
            f"export of the model, or skip the proof with --no-validate ({error})"
        )
    return f"the original model does not run, so nothing can be proved; --no-validate skips the proof: {error}"


def _truth(old: Side, new: Side, cases: Sequence[Case], progress: Progress) -> tuple[str, Truth | None]:
    """What computes in float64, or why nothing does; and the evaluations of both models."""
    evaluated: list[Results] = []
    how = ""
    try:
        for side in (old, new):
            reference = open_reference(side.model.proto, side.model.base_dir)
            how = how or reference.how
            results: list[dict[str, Array]] = []
            for case in cases:
                progress(
                    f"evaluating in float64: {case.name}", len(evaluated) * len(cases) + len(results), 2 * len(cases)
                )
                results.append(reference.run(case.feeds))
            evaluated.append(results)
    except NoReference as reason:
        return f"no float64 reference: {reason}", None
    return how, Truth(*evaluated)
