"""The way through the program: load, plan, apply, save to a temporary file, prove that file, rename, report.

Comes in: a model (path or ModelProto) and options. Goes out: a `Report`, and the file where one was
asked for and proved.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import onnx

from passes.formoptions import DEFAULT_MAX_TOKENS, DEFAULT_PATTERN_MB, FormOptions
from passes.plan import apply, make_plan, sublayers_only
from rewriter.api.rows import claim_of, planned_report, shape_of
from rewriter.api.run import Run, checked_options, name_of, silent
from rewriter.errors import ExitStatus, ValidationError
from rewriter.files.load import LoadedModel, load_model
from rewriter.files.save import check_output, staged_output
from rewriter.proof.claims import Claim
from rewriter.proof.sessions import available_providers, require_provider
from rewriter.proof.validate import Progress, Settings, Validation, validate
from rewriter.report import Report


def rewrite(
    model: str | os.PathLike[str] | onnx.ModelProto,
    output: str | os.PathLike[str] | None = None,
    *,
    form: str = "local",
    scope: str = "mlp",
    inline: bool = False,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    max_pattern_mb: float = DEFAULT_PATTERN_MB,
    attention_op: bool = False,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    omega: float | None = None,
    bias_token: str = "sublayer",
    dry_run: bool = False,
    validate: bool = True,
    providers: Sequence[str] | None = None,
    inputs: str | os.PathLike[str] | None = None,
    dims: Mapping[str, int] | None = None,
    seed: int = 0,
    force: bool = False,
    progress: Progress = silent,
) -> Report:
    """Replace the MLP blocks of a model by attention heads, and prove that the outputs stay the same.

    Args:
        model: path of an ONNX file, or a model in memory (which stays as it is).
        output: where to write the result. It appears there only when the proof passed. Without it nothing is
            written, and `Report.rewritten` holds the result.
        form: how heads become nodes: `local`, `masked`, `maskless` or `staged`.
        scope: `mlp`: MLP blocks; `all`: every elementwise activation of a linear operator's output.
        inline: write the heads out as plain operators instead of calling a model-local function.
        only: globs of block names; only these are converted.
        skip: globs of block names to leave.
        max_pattern_mb: largest attention pattern at run time, in units of 2^20 bytes (not in form `local`).
        attention_op: use `ai.onnx.Attention` nodes (form `masked`, opset 23).
        max_tokens: longest sequence of forms with one-hot position columns (`maskless`, `staged`).
        omega: what form `maskless` lowers the logits of forbidden pairs by; default from program and type.
        bias_token: `sublayer`: each sublayer of form `masked` appends its own; `network`: appended once behind the
            embeddings, carried through the whole network and dropped in front of its head.
        dry_run: stop after the plan.
        validate: run the proof. Without it the result is written unproved.
        providers: execution providers to prove on, `cpu` and `cuda`; default cpu, and cuda where it works.
        inputs: an npz file with inputs, instead of generated ones.
        dims: sizes for symbolic dimensions of the generated inputs.
        seed: seed of the generated inputs.
        force: replace an existing output.
        progress: called with (what is being done, steps done, steps in all).

    Returns:
        The report; `Report.exit_status` is 0 when converted (and proved), 1 when the proof failed, 3 when there is
        nothing to convert. In the last two cases nothing is written.

    Raises:
        UsageError: an option cannot be followed.
        ModelError: the model is unreadable, malformed or unsafe.
        ProviderError: a requested execution provider is not available.
        ValidationError: the proof cannot be carried out, for example since the original does not run.
    """
    forms = FormOptions(
        max_pattern_mb=max_pattern_mb,
        attention_op=attention_op,
        max_tokens=max_tokens,
        omega=omega,
        bias_token=bias_token,
    )
    options = checked_options(form=form, scope=scope, inline=inline, only=only, skip=skip, forms=forms)
    settings = Settings(
        providers=_providers(providers) if validate and not dry_run else (),
        seed=seed,
        dims=dict(dims or {}),
        inputs=None if inputs is None else Path(inputs),
    )
    run = Run(progress)
    with run.step("load", "loading"):
        source = load_model(model)
    out = None if output is None else Path(output)
    if out is not None:
        check_output(out, source=source, force=force)
    with run.step("plan", "finding the MLP blocks"):
        plan = make_plan(source.proto, options)
    report = planned_report(name_of(model), source, plan, options)
    if dry_run or not plan.conversions:
        return run.finish(report)
    with run.step("apply", "replacing them by attention heads"):
        rewritten = apply(plan)
    _check_signature(source.proto, rewritten)
    claims = tuple(claim_of(conversion) for conversion in plan.conversions)
    proof = settings if validate else None
    alone = None
    if plan.route is not None and validate:
        alone = replace(source, proto=apply(sublayers_only(plan)), path=None)
    models = _Models(source, replace(source, proto=plan.model, path=None), rewritten, alone)
    if out is None:
        return run.finish(_in_memory(run, report, models, claims, proof))
    return run.finish(_to_file(run, report, models, claims, proof, out, force=force))


@dataclass(frozen=True)
class _Models:
    """The model that came in, its lowered form (often the same proto), and the result.

    `alone` is the result with blocks that stand by themselves, where those of the result share a bias token.
    """

    source: LoadedModel
    lowered: LoadedModel
    rewritten: onnx.ModelProto
    alone: LoadedModel | None = None


def _providers(wanted: Sequence[str] | None) -> tuple[str, ...]:
    if wanted is None:
        return available_providers()
    for name in wanted:
        require_provider(name)
    return tuple(dict.fromkeys(wanted)) or available_providers()


def _in_memory(
    run: Run,
    report: Report,
    models: _Models,
    claims: tuple[Claim, ...],
    settings: Settings | None,
) -> Report:
    rewritten = models.rewritten
    result = replace(models.lowered, proto=rewritten)
    report = replace(report, after=shape_of(rewritten, 0))
    if settings is not None:
        with run.step("validate", "proving"):
            report = _proved(report, _validated(run, models, result, claims, settings))
    return replace(report, rewritten=rewritten if report.exit_status is ExitStatus.CONVERTED else None)


def _to_file(
    run: Run,
    report: Report,
    models: _Models,
    claims: tuple[Claim, ...],
    settings: Settings | None,
    out: Path,
    *,
    force: bool,
) -> Report:
    """Save beside OUT, prove the saved file, and rename it only then."""
    with ExitStack() as stack:
        with run.step("save", "saving"):
            output = staged_output(models.rewritten, out, source=models.source, force=force)
            staged = stack.enter_context(output)
        report = replace(report, after=shape_of(models.rewritten, staged.size))
        if settings is not None:
            with run.step("validate", "proving"):
                saved = load_model(staged.path)
                report = _proved(report, _validated(run, models, saved, claims, settings))
        if report.exit_status is ExitStatus.CONVERTED:
            staged.commit()
            report = replace(report, output=str(out))
    return report


def _validated(
    run: Run, models: _Models, result: LoadedModel, claims: tuple[Claim, ...], settings: Settings
) -> Validation:
    return validate(models.source, result, claims, settings, run.progress, models.lowered, models.alone)


def _proved(report: Report, validation: Validation) -> Report:
    status = ExitStatus.CONVERTED if validation.passed else ExitStatus.VALIDATION_FAILED
    return replace(report, validation=validation, exit_status=status)


def _check_signature(before: onnx.ModelProto, after: onnx.ModelProto) -> None:
    """The result must be a drop-in replacement: same inputs, outputs, opset and IR version."""
    same = (
        list(before.graph.input) == list(after.graph.input)
        and list(before.graph.output) == list(after.graph.output)
        and before.ir_version == after.ir_version
        and list(after.opset_import)[: len(before.opset_import)] == list(before.opset_import)
    )
    if not same:
        raise ValidationError("the rewritten model has another signature; this is a bug, please report it")
