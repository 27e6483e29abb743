"""The way through the program: load, plan, apply, save to a temporary file, prove that file, rename, report.

Comes in: a model (path or ModelProto) and options. Goes out: a `Report`, and the file where one was
asked for and proved.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import onnx

from passes.options import DEFAULT_MAX_TOKENS, DEFAULT_PATTERN_MB, FormOptions
from passes.plan import Options, Plan, apply, make_plan, sublayers_only
from rewriter.api.details import details_of
from rewriter.api.rows import claim_of, domain_notes, planned_report, shape_of
from rewriter.api.run import Run, checked_options, name_of, silent
from rewriter.errors import ExitStatus, ValidationError
from rewriter.files.load import LoadedModel, load_model, read_tensor
from rewriter.files.save import check_output, staged_output
from rewriter.proof.calibrate import largest_magnitudes
from rewriter.proof.claims import Claim, Variants
from rewriter.proof.sandbox import prove
from rewriter.proof.settings import LARGE, Settings, checked
from rewriter.proof.validate import Progress, Validation
from rewriter.report.report import Report


def rewrite(
    model: str | os.PathLike[str] | onnx.ModelProto,
    output: str | os.PathLike[str] | None = None,
    *,
    form: str = "local",
    scope: str = "mlp",
    inline: bool = False,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    merge: bool = False,
    gate: str = "heads",
    fit: bool = True,
    accuracy: float | None = None,
    domain: float | None = None,
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
    proof: str = "auto",
    jobs: int = 1,
    joblib_backend: str | None = None,
    isolate: bool = False,
    memory_limit_mb: int | None = None,
    time_limit: float | None = None,
    force: bool = False,
    details: bool = False,
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
        merge: first remove neurons that are proved not to be needed (dead, constant, duplicate, proportional ones);
            this reads the weights of the blocks, which nothing else does before the proof.
        gate: `heads`: a gated block h(g) u becomes heads of value u; `product`: heads compute h(g), and the product
            with u stays in the graph.
        fit: fit heads to activations that no table entry names, on the values that the model reaches.
        accuracy: largest error of a head program over max(1, |f|); default: the rounding of the block's type.
        domain: largest |pre-activation| of a fit; default: what the model reaches on the inputs, and half as much more.
        max_pattern_mb: largest attention pattern at run time, in units of 2^20 bytes (not in form `local`).
        attention_op: use `ai.onnx.Attention` nodes (form `masked`, opset 23).
        max_tokens: longest sequence of forms with one-hot position columns (`maskless`, `staged`).
        omega: what form `maskless` lowers the logits of forbidden pairs by; default from program and type.
        bias_token: `sublayer`: each sublayer of form `masked` appends its own; `network`: appended once behind the
            embeddings, carried through the whole network and dropped in front of its head.
        dry_run: stop after the plan.
        validate: run the proof. Without it the result is written unproved.
        providers: execution providers to prove on, such as `cpu` and `cuda:device_id=1`; default cpu, and cuda where
            it works.
        inputs: an npz file with inputs, instead of generated ones.
        dims: sizes for symbolic dimensions of the generated inputs.
        seed: seed of the generated inputs.
        proof: `whole` loads whole models, `blocks` one block and one segment of a model at a time, `auto` decides by
            size.
        jobs: how many blocks are proved at once; more than one needs joblib.
        joblib_backend: where joblib runs them, such as `dask`.
        isolate: run the models in a process of its own.
        memory_limit_mb: what that process may allocate, in megabytes.
        time_limit: how long it may take, in seconds.
        force: replace an existing output.
        details: also count the heads and draw the programs, for a page (`rewriter.report.html.write_page`).
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
    options = checked_options(
        form=form,
        scope=scope,
        inline=inline,
        only=only,
        skip=skip,
        gate=gate,
        fit=fit,
        accuracy=accuracy,
        domain=domain,
        merge=merge,
        forms=forms,
    )
    settings = Settings(
        providers=tuple(providers or ()),
        seed=seed,
        dims=dict(dims or {}),
        inputs=None if inputs is None else Path(inputs),
        proof=proof,
        jobs=jobs,
        joblib_backend=joblib_backend,
        isolate=isolate,
        memory_limit_mb=memory_limit_mb,
        time_limit=time_limit,
    )
    if validate and not dry_run:
        settings = checked(settings)
    run = Run(progress)
    with run.step("load", "loading"):
        source = load_model(model)
    out = None if output is None else Path(output)
    if out is not None:
        check_output(out, source=source, force=force)
    with run.step("plan", "finding the MLP blocks"):
        plan = make_plan(source.proto, options, partial(read_tensor, source))
    if plan.undetermined:
        with run.step("calibrate", "measuring pre-activations"):
            plan = _calibrated(run, source, plan, options, settings)
    if validate and not dry_run and source.size <= LARGE:
        plan = replace(plan, notes=(*plan.notes, *domain_notes(plan, partial(read_tensor, source))))
    report = planned_report(name_of(model), source, plan, options)
    if details:
        report = replace(report, details=details_of(plan))
    if dry_run or not plan.conversions:
        return run.finish(report)
    with run.step("apply", "replacing them by attention heads"):
        rewritten = apply(plan)
    _check_signature(source.proto, rewritten)
    claims = tuple(claim_of(each, plan.ends, options.accuracy.error) for each in plan.conversions)
    wanted = settings if validate else None
    variants = Variants(
        lowered=replace(source, proto=plan.reference, path=None),
        reweighted=None if plan.unmerged is None else replace(source, proto=plan.model, path=None),
        alone=None if plan.route is None else replace(source, proto=apply(sublayers_only(plan)), path=None),
    )
    models = _Models(source, rewritten, variants)
    if out is None:
        return run.finish(_in_memory(run, report, models, claims, wanted))
    return run.finish(_to_file(run, report, models, claims, wanted, out, force=force))


def _calibrated(run: Run, source: LoadedModel, plan: Plan, options: Options, settings: Settings) -> Plan:
    """The plan with activations fitted that no table entry names, on the values that they see.

    A model that does not run is planned without them; the proof will say why it does not.
    """
    tensors = [block.gate for block in plan.undetermined if not block.path]
    try:
        reached = largest_magnitudes(replace(source, proto=plan.model, path=None), tensors, settings, run.progress)
    except ValidationError as error:
        note = f"pre-activations could not be measured: {error}"
        return replace(plan, notes=(*plan.notes, note))
    options = replace(options, accuracy=replace(options.accuracy, reached=reached))
    return make_plan(source.proto, options, partial(read_tensor, source))


@dataclass(frozen=True)
class _Models:
    """The model that came in, the result, and other forms of both that the proof needs."""

    source: LoadedModel
    rewritten: onnx.ModelProto
    variants: Variants


def _in_memory(
    run: Run,
    report: Report,
    models: _Models,
    claims: tuple[Claim, ...],
    settings: Settings | None,
) -> Report:
    rewritten = models.rewritten
    result = replace(models.source, proto=rewritten, path=None)
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
    return prove(models.source, result, claims, settings, run.progress, models.variants)


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
