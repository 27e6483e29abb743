"""`rewrite`, from loading to the report: load, plan, apply, save, prove, rename, with the user's passes around.

This is the only module that knows the whole sequence. The proof judges the saved file, which gets its final name only
after it passed. A folder, such as optimum writes, is converted model by model in a copy, likewise.
"""

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from math import inf, isfinite
from pathlib import Path
from typing import Any, Literal, Unpack

import onnx

from passes.accounting import DEFAULT_TOKENS, Accounting, account
from passes.conversion import Conversion
from passes.match.blocks import kinds
from passes.options import Options
from passes.plan import Plan, apply, make_plan
from rewriter.api.run import RewriteKeywords, Run, check_exposed, described, name_of, options_among
from rewriter.errors import ExitStatus, ModelError, RewriteError, UsageError, ValidationError
from rewriter.files.atomic import check_new_folder, copied_folder, files_of, publish
from rewriter.files.load import LoadedModel, Source, check_structure, like, load_model, read_tensor
from rewriter.files.save import check_output, staged_output
from rewriter.graph.view import operator_of
from rewriter.graph.walk import all_graphs, iter_nodes
from rewriter.options import build, values_of
from rewriter.ort import chosen_providers
from rewriter.proof.accepted import run_accepted
from rewriter.proof.records import Claim, Claimed
from rewriter.proof.run import Progress, Way
from rewriter.proof.settings import LARGE, Settings
from rewriter.proof.validate import Judge
from rewriter.report.report import BlockRow, FolderReport, Report, Shape
from rewriter.text import counted, first_of, quoted

Pass = Callable[[onnx.ModelProto], onnx.ModelProto]  # of the user: it returns another model, and leaves its own as is


@described(RewriteKeywords, Options, Settings)
def rewrite(
    model: Source,
    output: str | os.PathLike[str] | None = None,
    *,
    before: Sequence[Pass] = (),
    after: Sequence[Pass] = (),
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
        before: functions from a model to another one, applied before the blocks are looked for.
        after: the same, applied to the model with the heads.
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
    (choices, settings), run = options_among(options, Options), Run(progress)
    check_exposed(choices)
    runs, proves = validate != "certificate", bool(validate) and not dry_run
    if not runs and (settings.inputs is not None or settings.providers or settings.dims):
        raise UsageError("--certificate-only runs no model: leave out --inputs, --provider and --dim")
    out = None if output is None else Path(output)
    if isinstance(model, (str, os.PathLike)) and Path(model).is_dir():
        unfit = {"before": before, "after": after, "--force": force}
        unfit |= {"--inputs": settings.inputs, "--expose": choices.expose}
        alone = partial(rewrite, validate=validate, **options)
        return _folder(Path(model), out, alone, unfit, run.progress, dry_run=dry_run)
    settings = replace(settings, providers=chosen_providers(settings.providers)) if proves and runs else settings
    with run.step("load", "loading"):
        source = load_model(model, mapped=out is not None or dry_run)  # a result in memory must not need the file
    if out is not None:
        check_output(out, source=source, force=force)
    plan = _planned(run, source, before, choices, settings if runs else None)
    if proves and (source.size <= LARGE or not runs):
        plan = replace(plan, notes=(*plan.notes, *domain_notes(plan, run=runs)))
    report = planned_report(name_of(model), source, plan)
    if dry_run or not report.converted:
        return run.finish(report)
    with run.step("apply", "replacing them by attention heads"):
        made, added = with_heads(plan)
        rewritten = reduce(passed, after, made)
        if not same_signature(source.proto, rewritten, len(added)):
            fault = "the passes changed inputs, outputs, opset or IR version"
            raise ValidationError(f"{fault}; this is a bug, please report it")
    if choices.expose and not added:
        report = replace(report, notes=(*report.notes, "--expose: no converted block of the main graph matches"))
    with ExitStack() as stack:
        staged = None
        if out is not None:
            with run.step("save", "saving"):
                staged = stack.enter_context(staged_output(rewritten, out, source=source, force=force))
        report = replace(report, made=shape_of(rewritten, staged.size if staged is not None else 0))
        if proves:
            with run.step("validate", "proving"):
                result = source.with_proto(rewritten) if staged is None else load_model(staged.path, mapped=True)
                claims = tuple(claim_of(each, choices.accuracy, added) for each in plan.conversions)
                lowered, longest = source.with_proto(plan.model), longest_of(plan.conversions)
                judge = Judge(source, result, claims, settings, run.progress, lowered, run=runs, longest=longest)
                proof = judge.verdict()
            status = ExitStatus.CONVERTED if proof.passed else ExitStatus.VALIDATION_FAILED
            report = replace(report, proof=proof, exit_status=status)
        if report.exit_status is ExitStatus.CONVERTED and staged is not None and out is not None:
            staged.commit()
            report = replace(report, output=str(out), files=tuple(str(out.with_name(each)) for each in staged.files))
        elif report.exit_status is ExitStatus.CONVERTED:
            report = replace(report, in_memory=like(model, source.complete(rewritten)))
    return run.finish(report)


def passed(model: onnx.ModelProto, step: Pass) -> onnx.ModelProto:
    """The model after a pass. Raises ValidationError where that has another signature, or is unsound."""
    made, name = step(model), getattr(step, "__name__", type(step).__name__)
    if not same_signature(model, made):
        raise ValidationError(f"pass '{name}' changed the model's inputs, outputs, opset or IR version")
    try:
        check_structure(made)
    except ModelError as error:
        raise ValidationError(f"pass '{name}' produced an invalid model: {error}") from error
    return made


def same_signature(old: onnx.ModelProto, new: onnx.ModelProto, added: int = 0) -> bool:
    """Whether inputs, outputs (except the last `added` ones of the new model), opset and IR version are the same."""
    outputs, opsets = new.graph.output[: len(new.graph.output) - added], new.opset_import[: len(old.opset_import)]
    stated = [*old.graph.input], [*old.graph.output], old.ir_version, [*old.opset_import]
    return stated == ([*new.graph.input], outputs, new.ir_version, opsets)


def with_heads(plan: Plan) -> tuple[onnx.ModelProto, list[str]]:
    """The model with the heads, every planned block among them, and its further outputs; tests plant errors here."""
    made = apply(plan)
    check_structure(made)
    nodes = {node.name.partition("/heads/")[0] for graph in all_graphs(made.graph) for node in graph.node}
    if missing := [one.block.name for one in plan.conversions if one.block.name not in nodes]:
        raise ValidationError(f"{missing[0]} has no nodes in the result; this is a bug, please report it")
    return made, [value.name for value in made.graph.output[len(plan.model.graph.output) :]]


def _planned(
    run: Run, source: LoadedModel, before: Sequence[Pass], choices: Options, settings: Settings | None
) -> Plan:
    """The plan, made again once pre-activations are measured; without settings none are.

    If the model does not run, its plan has no fits, and the proof will report why it does not run.
    """
    with run.step("plan", "finding the MLP blocks"):
        model = reduce(passed, before, source.proto)
        plan = make_plan(model, choices, partial(read_tensor, source))
    if plan.undetermined and settings is not None:
        with run.step("calibrate", "measuring pre-activations"):
            lowered, notes = source.with_proto(plan.model), tuple[str, ...]()
            if gates := tuple(dict.fromkeys(each.gate for each in plan.undetermined if not each.path)):
                try:
                    runs = run_accepted(
                        lowered, [Way("cpu", optimise=True)], settings, outputs=gates,
                        by_blocks=settings.by_blocks(source.size), progress=run.progress, what="the original",
                    )  # fmt: skip
                    choices = replace(choices, reached=runs.largest())
                except ValidationError as error:
                    notes = (f"pre-activations could not be measured: {error}",)
            plan = make_plan(model, choices, partial(read_tensor, source))
            plan = replace(plan, notes=(*plan.notes, *notes))
    return plan


# -- a plan in the terms of report and proof ---------------------------------------------------------------------------


def planned_report(name: str, source: LoadedModel, plan: Plan) -> Report:
    """The report after planning; `name` is the model's path as the caller gave it."""
    about = ((each, (each.activation, each.first, each.second)) for each in plan.left)
    left = (BlockRow(x.name, "left", *of, reason=x.miss.reason, node=x.miss.node) for x, of in about)
    names = first_of([function.name for function in source.fallbacks])
    note = f"local functions that onnxruntime has operators for are ignored, as it ignores them, and kept: {names}"
    return Report(
        model=name,
        output="",
        form=plan.options.form,
        blocks=(*map(_converted, plan.conversions), *left),
        before=shape_of(source.proto, source.size),
        notes=(note, *plan.notes) if names else plan.notes,
        exit_status=ExitStatus.CONVERTED if plan.conversions else ExitStatus.NOTHING_TO_CONVERT,
        options=values_of(plan.options),
    )


def domain_notes(plan: Plan, *, run: bool) -> tuple[str, ...]:
    """A note on blocks whose heads are valid up to some pre-activation, which an input may exceed."""
    domains = {each.block.name: each.program.domain for each in plan.conversions if isfinite(each.program.domain)}
    if not domains:
        return ()
    blocks = f"{counted(len(domains), 'block')} ({first_of(list(domains))})"
    where = "is checked only on the inputs of the run" if run else "is not checked, since nothing was run"
    most = min(domains.values())
    return (f"the heads of {blocks} hold for |pre-activation| up to {most:.6g}; that the model stays there {where}",)


def claim_of(conversion: Conversion, accuracy: float | None = None, added: Collection[str] = ()) -> Claim:
    """The claim about one block; `accuracy` is the error that the user asked for, `added` are outputs of the model."""
    block, whole = conversion.block, conversion.projections
    held = held_by(conversion, accuracy)
    return Claim(
        name=block.name,
        path=block.path,
        output=block.output,
        reads=held.leaves if whole is None else (whole.query.data,),
        makes=(block.output,) if whole is None else (whole.result, *whole.shapes),
        held=held,
        elem_type=block.coarsest,
        exposed=tuple(sorted(name for name in added if name.startswith(f"{block.name}/heads/"))),
    )


def held_by(conversion: Conversion, accuracy: float | None, narrowest: float = 0.0) -> Claimed:
    """What the heads of a block are held to, on a domain of at least `narrowest`."""
    block, domain = conversion.block, conversion.program.domain
    leaves = tuple(dict.fromkeys((block.gate, block.value)))
    return Claimed(conversion.max_error, domain if narrowest <= domain < inf else None, leaves, accuracy or 0.0)


def longest_of(conversions: Iterable[Conversion]) -> int | None:
    """The longest sequence that all blocks accept; None for any."""
    return min((each.longest for each in conversions if each.longest), default=None)


def _converted(conversion: Conversion) -> BlockRow:
    block, program = conversion.block, conversion.program
    return BlockRow(
        name=block.name,
        status="converted",
        activation=block.identified.label,
        first=kinds(block.first),
        second=kinds(block.second),
        program=program.name,
        exact=program.max_error == 0.0,
        heads=conversion.heads,
        bias_tokens=program.bias_tokens,
        experts=next((operator.experts for operator in block.first if operator.experts), None),
        type=onnx.helper.tensor_dtype_to_np_dtype(block.coarsest).name,
        max_error=conversion.max_error,
        measured=program.measured,
        domain=program.domain if isfinite(program.domain) else None,
        part_of=block.part_of,
    )


def shape_of(model: onnx.ModelProto, size: int) -> Shape:
    """Operator counts over the main graph and the bodies of control flow, and the size on disk."""
    operators = Counter(map(operator_of, iter_nodes(model.graph.node)))
    return Shape(dict(sorted(operators.items())), operators.total(), size)


# -- only the plan -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Inspection(Report):
    """What `inspect` found, the report of a dry run with its accounting: true if some block can be converted."""

    accounting: Accounting = field(kw_only=True)
    also = ("purity",)

    @property
    def report(self) -> Report:
        return self

    @property
    def purity(self) -> str:
        return self.accounting.purity


def inspect(model: Source, *, scope: str = "mlp", gate: str = "heads", tokens: int = DEFAULT_TOKENS) -> Inspection:
    """Find the blocks of a model and account for them; write nothing.

    Args:
        model: path of an ONNX file, or a model in memory.
        scope: `mlp` or `all`, as for `rewrite`.
        gate: `heads` or `product`, as for `rewrite`.
        tokens: sequence length for which the costs of the forms are computed.

    Raises:
        UsageError: an option is invalid.
        ModelError: the model is unreadable, malformed or unsafe.
    """
    run = Run()
    with run.step("load", "loading"):
        source = load_model(model)
    plan = _planned(run, source, (), build(Options, {"scope": scope, "gate": gate}), None)
    accounting = account(plan, tokens)
    return Inspection(**vars(run.finish(planned_report(name_of(model), source, plan))), accounting=accounting)


# -- a folder ----------------------------------------------------------------------------------------------------------

REPORT = "attnonly-report.json"  # in a folder that is written, the reports of all models


def _folder(
    source: Path, out: Path | None, alone: Callable[..., Report], unfit: Mapping[str, object], progress: Progress, *,
    dry_run: bool,
) -> FolderReport:  # fmt: skip
    """Convert every ONNX file of a folder by `alone`, and copy the others; `unfit` are options for one model only."""
    if one := next((name for name, given in unfit.items() if given), ""):
        raise UsageError(f"{one} is for one model, not for a folder; leave it out, or convert its files one by one")
    if out is None and not dry_run:
        raise UsageError("a folder needs an output; pass one, or --dry-run")
    if out is not None:
        check_new_folder(out, source)
    files = files_of(source)
    names = [path for path in files if path.suffix.lower() == ".onnx"]
    if not names:
        advice = "export the model first (optimum-cli export onnx)"
        raise UsageError(f"there is no .onnx file in {quoted(source)}; {advice}")

    def converted(path: Path, to: Path | None, name: Path, **further: Any) -> Report:
        try:
            return alone(path, to, progress=lambda what, *steps: progress(f"{name}: {what}", *steps), **further)
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
            models[str(name)] = report
            if not report:
                return FolderReport.of(str(source), "", models)
            new.replace(staged / name)
            models[str(name)] = replace(report, output=str(out / name), files=(str(out / name),))
        result = FolderReport.of(str(source), str(out), models, tuple(str(path) for path in files if path not in names))
        result.write(staged / REPORT)
        publish(staged, out)
    return result
