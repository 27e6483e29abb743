"""`rewrite`, from loading to the report: load, run the preparing passes, plan, run the rest, save, prove, rename.

This is the only module that knows the whole sequence. The passes are those of `rewriter.pipeline`; the proof judges the
saved file, which gets its final name only after it passed. A folder, such as optimum writes, is converted model by
model in a copy, which gets its name when all of them passed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Unpack

import onnx

from passes.options import Options
from passes.plan import Plan, apply
from rewriter.api.rows import claims_of, domain_notes, exposed_by, planned_report, shape_of
from rewriter.api.run import RewriteKeywords, Run, checked_options, described, name_of, settings_of, taken
from rewriter.errors import ExitStatus, RewriteError, UsageError, ValidationError
from rewriter.files.atomic import check_new_folder, copied_folder, files_of, publish
from rewriter.files.load import LoadedModel, Source, like, load_model, read_tensor
from rewriter.files.save import check_output, staged_output
from rewriter.pipeline import Pass, Unit, keeps_signature, pipeline, run_passes, split
from rewriter.proof.claims import Claim, Side
from rewriter.proof.inputs.accepted import run_accepted
from rewriter.proof.run import Way
from rewriter.proof.settings import LARGE, Settings, checked
from rewriter.proof.validate import Judge, Progress
from rewriter.report.folder import FolderReport
from rewriter.report.report import Report, write_json
from rewriter.text import quoted

Arrange = Callable[[tuple[Pass, ...]], Sequence[Pass]]
"""Gets the passes that the options ask for, and returns those to run."""


@described(RewriteKeywords, Options, Settings)
def rewrite(
    model: Source,
    output: str | os.PathLike[str] | None = None,
    *,
    passes: Arrange | None = None,
    dry_run: bool = False,
    validate: bool | Literal["certificate"] = True,
    force: bool = False,
    progress: Progress | None = None,
    **options: Unpack[RewriteKeywords],
) -> Report:
    """Replace the MLP blocks of a model by attention heads, and prove that the outputs stay the same.

    Args:
        model: path of an ONNX file, or a model in memory, which is not modified: an onnx.ModelProto, the bytes of
            a file, or an onnx_ir.Model. Or a folder: all models in it are converted, in a copy of it.
        output: where to write the result, which appears there only if the proof passes. Without it nothing is
            written, and `Report.rewritten` holds the result. For a folder: the folder to write, which must not exist.
        passes: called with the pipeline that the options ask for; returns the one to run, such as
            `lambda passes: (*passes, MyPass())`; see `rewriter.pipeline`.
        dry_run: stop after the plan.
        validate: run the proof, or leave the result unproved; "certificate": run no model, every block is certified.
        force: replace existing files.
        progress: called with (current activity, steps done, total steps).
        **options: the options of the rewriting (`passes.options`) and the proof (`rewriter.proof.settings`), below.

    Returns:
        The report, which is true if the model was converted (and proved). `Report.exit_status` is 1 if the proof
        failed, 3 if there is nothing to convert; then nothing is written. Of a folder, a `FolderReport`.

    Raises:
        UsageError: an option is invalid.
        ModelError: the model is unreadable, malformed or unsafe.
        ProviderError: a requested execution provider is not available, or lacks the float64 that the heads need.
        ValidationError: the proof cannot be carried out, for example because the original does not run.
        TypeError: an option does not exist.
    """
    of_rewriting, of_proof = taken(options, Options, Settings)
    choices, settings, run = checked_options(**of_rewriting), settings_of(of_proof), Run(progress)
    runs, proves = validate != "certificate", bool(validate) and not dry_run
    if not runs and (settings.inputs is not None or settings.providers or settings.dims):
        raise UsageError("--certificate-only runs no model: leave out --inputs, --provider and --dim")
    if isinstance(model, (str, os.PathLike)) and Path(model).is_dir():
        unfit = {"passes": passes, "--force": force, "--inputs": settings.inputs, "--expose": choices.forms.expose}
        return _folder(Path(model), output, options, unfit, run.progress, dry_run=dry_run, validate=validate)
    settings = checked(settings) if proves and runs else settings
    with run.step("load", "loading"):
        source = load_model(model, mapped=output is not None or dry_run)  # a result in memory must not need the file
    out = None if output is None else Path(output)
    if out is not None:
        check_output(out, source=source, force=force)
    choices, applying, unit = _planned(run, source, passes or (lambda each: each), choices, settings if runs else None)
    if proves and (source.size <= LARGE or not runs):
        unit = _noted(unit, domain_notes(unit.plan, run=runs))
    report = planned_report(name_of(model), source, unit.plan, choices)
    if dry_run or not report.converted:
        return run.finish(report)
    models, claims, report = _applied(run, report, source, applying, unit, choices)
    report = _finished(run, report, models, claims, settings if validate else None, out, force=force, run_models=runs)
    if report.in_memory is not None:
        report = replace(report, in_memory=like(model, source.complete(report.in_memory)))
    return run.finish(report)


def made(unit: Unit) -> onnx.ModelProto:
    """The model that the passes built; tests plant errors here."""
    return unit.model


_Models = tuple[LoadedModel, onnx.ModelProto, LoadedModel, LoadedModel | None]
"""The original; the result; the lowered original; and heads that can be cut out, if those of the result cannot."""


def _applied(
    run: Run, report: Report, source: LoadedModel, applying: Sequence[Pass], unit: Unit, choices: Options
) -> tuple[_Models, tuple[Claim, ...], Report]:
    """The models of the proof, the claims about them, and the report with a note where nothing is exposed."""
    with run.step("apply", "replacing them by attention heads"):
        unit = run_passes(applying, unit)
        rewritten, alone = made(unit), _alone(unit)
    plan, added = unit.plan, unit.added
    if not keeps_signature(source.proto, rewritten, added):
        raise ValidationError(
            "the passes changed inputs, outputs, opset or IR version; this is a bug, please report it"
        )
    claims = (replace(claim, exposed=exposed_by(claim.name, added)) for claim in claims_of(plan, choices.accuracy))
    if choices.forms.expose and not added:
        report = replace(report, notes=(*report.notes, "--expose: no converted block of the main graph matches"))
    lowered = replace(source, proto=plan.model, path=None)
    apart = None if alone is None else replace(source, proto=alone, path=None)
    return (source, rewritten, lowered, apart), tuple(claims), report


def _planned(
    run: Run, source: LoadedModel, arrange: Arrange, choices: Options, settings: Settings | None
) -> tuple[Options, Sequence[Pass], Unit]:
    """The options, the passes that apply the plan, and the plan, repeated if pre-activations had to be measured.

    Without settings nothing is measured.
    """
    start = Unit(source.proto, partial(read_tensor, source))

    def planned() -> tuple[Sequence[Pass], Unit]:
        planning, applying = split(tuple(arrange(pipeline(choices))))
        return applying, run_passes(planning, start)

    with run.step("plan", "finding the MLP blocks"):
        applying, unit = planned()
    notes: tuple[str, ...] = ()
    if unit.plan.undetermined and settings is not None:
        with run.step("calibrate", "measuring pre-activations"):
            choices, notes = _calibrated(run, source, unit.plan, choices, settings)
            applying, unit = planned()
    return choices, applying, _noted(unit, notes)


def _alone(unit: Unit) -> onnx.ModelProto | None:
    """A model whose heads can be cut out block by block; None if those of the result can."""
    if unit.plan.whole is not None:
        # The network's own heads are as they were; what the blocks share are constants.
        model = apply(replace(unit.plan, whole=None))
        model.graph.initializer.extend(unit.plan.whole.constants())
        return made(replace(unit, model=model))
    return None if unit.heads is unit.model else unit.heads


def _noted(unit: Unit, notes: tuple[str, ...]) -> Unit:
    return replace(unit, planned=replace(unit.plan, notes=(*unit.plan.notes, *notes)))


def _calibrated(
    run: Run, source: LoadedModel, plan: Plan, options: Options, settings: Settings
) -> tuple[Options, tuple[str, ...]]:
    """The options, with the largest |entry| of the pre-activations whose activations must be fitted; and notes.

    Fitted programs hold on a bounded domain, which is chosen from these. If the model does not run, its plan has no
    fits, and the proof will report why it does not run.
    """
    model = replace(source, proto=plan.model, path=None)
    side, way = Side.of(model), Way("cpu", optimise=True)
    gates = dict.fromkeys(each.gate for each in plan.undetermined if not each.path)
    inside = tuple(name for name in gates if name in side.main.producer)
    if not inside:
        return options, ()
    try:
        runs = run_accepted(
            side, [way], settings, beside=source.path, outputs=inside,
            by_blocks=settings.by_blocks(model.size), progress=run.progress, what="the original",
        )  # fmt: skip
    except ValidationError as error:
        return options, (f"pre-activations could not be measured: {error}",)
    return replace(options, reached=runs.largest()), ()


def _finished(
    run: Run,
    report: Report,
    models: _Models,
    claims: tuple[Claim, ...],
    settings: Settings | None,
    out: Path | None,
    *,
    force: bool,
    run_models: bool,
) -> Report:
    """Prove the rewritten model; with `out` the file that is saved beside it, and only then renamed to it."""
    source, rewritten, lowered, alone = models
    with ExitStack() as stack:
        staged = None
        if out is not None:
            with run.step("save", "saving"):
                staged = stack.enter_context(staged_output(rewritten, out, source=source, force=force))
        report = replace(report, made=shape_of(rewritten, staged.size if staged is not None else 0))
        if settings is not None:
            with run.step("validate", "proving"):
                in_memory = replace(source, proto=rewritten, path=None)
                result = in_memory if staged is None else load_model(staged.path, mapped=True)
                judge = Judge(source, result, claims, settings, run.progress, lowered, alone, run=run_models)
                validation = judge.verdict()
            status = ExitStatus.CONVERTED if validation.passed else ExitStatus.VALIDATION_FAILED
            report = replace(report, proof=validation, exit_status=status)
        if report.exit_status is not ExitStatus.CONVERTED:
            return report
        if staged is None or out is None:
            return replace(report, in_memory=rewritten)
        staged.commit()
        return replace(report, output=str(out), files=tuple(str(out.with_name(each)) for each in staged.files))


# -- a folder ------------------------------------------------------------------------------------------------------

REPORT = "attnonly-report.json"
"""The reports of all models, in the folder that is written."""


def _folder(
    source: Path,
    output: str | os.PathLike[str] | None,
    options: Mapping[str, Any],
    unfit: Mapping[str, object],
    progress: Progress,
    *,
    dry_run: bool,
    validate: bool | Literal["certificate"],
) -> FolderReport:
    """Convert and prove every ONNX file of a folder, and copy the others beside them; all of them or nothing.

    `unfit`: the options that are for one model.
    """
    one = next((name for name, given in unfit.items() if given), None)
    if one is not None:
        raise UsageError(f"{one} is for one model, not for a folder; leave it out, or convert its files one by one")
    out = None if output is None else Path(output)
    if out is None and not dry_run:
        raise UsageError("a folder needs an output; pass one, or --dry-run")
    if out is not None:
        check_new_folder(out, source)
    files = files_of(source)
    names = [path for path in files if path.suffix.lower() == ".onnx"]
    if not names:
        raise UsageError(
            f"there is no .onnx file in {quoted(source)}; export the model first (optimum-cli export onnx)"
        )

    def converted(path: Path, to: Path | None, name: Path, **further: Any) -> Report:
        def named(what: str, done: int, total: int) -> None:
            progress(f"{name}: {what}", done, total)

        try:
            return rewrite(path, to, validate=validate, progress=named, **options, **further)
        except RewriteError as error:
            raise type(error)(f"{quoted(name)}: {error.args[0]}") from error

    models = {str(name): converted(source / name, None, name, dry_run=True) for name in names}
    wanted = [name for name in names if models[str(name)].converted]
    if out is None or dry_run or not wanted:
        return FolderReport.of(str(source), "", models)
    with copied_folder(source, files, out) as staged:
        for name in wanted:
            new = staged / name.with_name(f"{name.name}.new")
            report = replace(converted(staged / name, new, name), model=str(source / name))
            if report:
                new.replace(staged / name)
                report = replace(report, output=str(out / name), files=(str(out / name),))
            models[str(name)] = report
            if not report:
                return FolderReport.of(str(source), "", models)
        others = tuple(str(path) for path in files if path not in names)
        result = FolderReport.of(str(source), str(out), models, others)
        write_json(staged / REPORT, result.to_json())
        publish(staged, out)
    return result
