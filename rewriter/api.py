"""The way through the program: load, plan, apply, save to a temporary file, prove that file, rename, report.

Comes in: a model (path or ModelProto) and options. Goes out: a `Report`, and the file where one was asked for and
proved. This is the composition root: beside the command line it is the only module of `rewriter` that imports `passes`.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import onnx

from passes.accounting import Accounting, account
from passes.conversion import Conversion
from passes.find import SCOPES, Left, kinds
from passes.forms import FORMS
from passes.plan import Options, Plan, apply, make_plan
from rewriter.errors import ExitStatus, UsageError, ValidationError
from rewriter.files.load import LoadedModel, load_model
from rewriter.files.save import check_output, staged_output
from rewriter.graph.view import ONNX_DOMAINS
from rewriter.proof.claims import Claim
from rewriter.proof.sessions import available_providers, require_provider
from rewriter.proof.validate import Progress, Settings, Validation, validate
from rewriter.report import BlockRow, Report, Shape


def _silent(_what: str, _done: int, _total: int) -> None:
    """Show no progress."""


def rewrite(
    model: str | os.PathLike[str] | onnx.ModelProto,
    output: str | os.PathLike[str] | None = None,
    *,
    form: str = "local",
    scope: str = "mlp",
    inline: bool = False,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    dry_run: bool = False,
    validate: bool = True,
    providers: Sequence[str] | None = None,
    inputs: str | os.PathLike[str] | None = None,
    dims: Mapping[str, int] | None = None,
    seed: int = 0,
    force: bool = False,
    progress: Progress = _silent,
) -> Report:
    """Replace the MLP blocks of a model by attention heads, and prove that the outputs stay the same.

    Args:
        model: path of an ONNX file, or a model in memory (which stays as it is).
        output: where to write the result. It appears there only when the proof passed. Without it nothing is
            written, and `Report.rewritten` holds the result.
        form: how heads become nodes: `local`.
        scope: `mlp`: MLP blocks; `all`: every elementwise activation of a linear operator's output.
        inline: write the heads out as plain operators instead of calling a model-local function.
        only: globs of block names; only these are converted.
        skip: globs of block names to leave.
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
    options = _options(form=form, scope=scope, inline=inline, only=only, skip=skip)
    settings = Settings(
        providers=_providers(providers) if validate and not dry_run else (),
        seed=seed,
        dims=dict(dims or {}),
        inputs=None if inputs is None else Path(inputs),
    )
    run = _Run(progress)
    with run.step("load", "loading"):
        source = load_model(model)
    out = None if output is None else Path(output)
    if out is not None:
        check_output(out, source=source, force=force)
    with run.step("plan", "finding the MLP blocks"):
        plan = make_plan(source.proto, options)
    report = _planned(source, plan, options)
    if dry_run or not plan.conversions:
        return run.finish(report)
    with run.step("apply", "replacing them by attention heads"):
        rewritten = apply(plan)
    _check_signature(source.proto, rewritten)
    claims = tuple(claim_of(conversion) for conversion in plan.conversions)
    proof = settings if validate else None
    models = _Models(source, replace(source, proto=plan.model, path=None), rewritten)
    if out is None:
        return run.finish(_in_memory(run, report, models, claims, proof))
    return run.finish(_to_file(run, report, models, claims, proof, out, force=force))


@dataclass(frozen=True)
class Inspection:
    """What `inspect` found.

    Attributes:
        report: as a dry run gives it.
        accounting: weights, heads, and what remains.
    """

    report: Report
    accounting: Accounting

    def to_json(self) -> dict[str, Any]:
        """As JSON-ready data: the report's, with `accounting` and `purity`."""
        return {**self.report.to_json(), "accounting": asdict(self.accounting), "purity": self.accounting.purity}


def inspect(
    model: str | os.PathLike[str] | onnx.ModelProto, *, scope: str = "mlp", head_dimension: int | None = None
) -> Inspection:
    """Find the blocks of a model and account for them; write nothing.

    Args:
        model: path of an ONNX file, or a model in memory.
        scope: `mlp` or `all`, as for `rewrite`.
        head_dimension: d_head for the head accounting; default: that of the model's own attention.

    Raises:
        UsageError: an option cannot be followed.
        ModelError: the model is unreadable, malformed or unsafe.
    """
    run = _Run(_silent)
    with run.step("load", "loading"):
        source = load_model(model)
    options = _options(scope=scope)
    with run.step("plan", "finding the MLP blocks"):
        plan = make_plan(source.proto, options)
    return Inspection(run.finish(_planned(source, plan, options)), account(plan, head_dimension))


def _options(
    *, form: str = "local", scope: str = "mlp", inline: bool = False, only: Sequence[str] = (), skip: Sequence[str] = ()
) -> Options:
    if form not in FORMS:
        raise UsageError(f"unknown form '{form}'; known are: {', '.join(FORMS)}")
    if scope not in SCOPES:
        raise UsageError(f"unknown scope '{scope}'; known are: {', '.join(SCOPES)}")
    return Options(form=form, scope=scope, inline=inline, only=tuple(only), skip=tuple(skip))


def claim_of(conversion: Conversion) -> Claim:
    """What the conversion claims of its block, in the terms of the proof."""
    block, program = conversion.block, conversion.program
    return Claim(
        name=block.name,
        inputs=tuple(dict.fromkeys((block.gate, block.value))),
        output=block.output,
        block_inputs=tuple(dict.fromkeys(operator.data for operator in block.first)),
        block_outputs=tuple(operator.output for operator in block.second) or (block.output,),
        max_error=conversion.max_error,
        rounding=program.rounding,
        elem_type=block.elem_type,
        path=block.path,
        width=next((operator.in_features for operator in block.first), None),
    )


@dataclass(frozen=True)
class _Models:
    """The model that came in, its lowered form (often the same proto), and the result."""

    source: LoadedModel
    lowered: LoadedModel
    rewritten: onnx.ModelProto


@dataclass
class _Run:
    """The clock and the progress of one call."""

    progress: Progress

    def __post_init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextmanager
    def step(self, name: str, what: str) -> Iterator[None]:
        """Time one step."""
        self.progress(what, 0, 1)
        start = time.perf_counter()
        yield
        self._seconds[name] = time.perf_counter() - start

    def finish(self, report: Report) -> Report:
        """The report with the times in it."""
        return replace(report, seconds={**self._seconds, "total": time.perf_counter() - self._start})


def _providers(wanted: Sequence[str] | None) -> tuple[str, ...]:
    if wanted is None:
        return available_providers()
    for name in wanted:
        require_provider(name)
    return tuple(dict.fromkeys(wanted)) or available_providers()


def _planned(source: LoadedModel, plan: Plan, options: Options) -> Report:
    rows = [_converted_row(conversion) for conversion in plan.conversions]
    rows += [_left_row(left) for left in plan.left]
    return Report(
        model="<memory>" if source.path is None else str(source.path),
        output=None,
        form=options.form,
        blocks=tuple(rows),
        before=_shape(source.proto, source.size),
        after=None,
        validation=None,
        seconds={},
        notes=plan.notes,
        exit_status=ExitStatus.CONVERTED if plan.conversions else ExitStatus.NOTHING_TO_CONVERT,
    )


def _in_memory(
    run: _Run,
    report: Report,
    models: _Models,
    claims: tuple[Claim, ...],
    settings: Settings | None,
) -> Report:
    rewritten = models.rewritten
    result = replace(models.lowered, proto=rewritten)
    report = replace(report, after=_shape(rewritten, 0))
    if settings is not None:
        with run.step("validate", "proving"):
            report = _proved(report, validate(models.source, result, claims, settings, run.progress, models.lowered))
    return replace(report, rewritten=rewritten if report.exit_status is ExitStatus.CONVERTED else None)


def _to_file(
    run: _Run,
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
        report = replace(report, after=_shape(models.rewritten, staged.size))
        if settings is not None:
            with run.step("validate", "proving"):
                saved = load_model(staged.path)
                report = _proved(report, validate(models.source, saved, claims, settings, run.progress, models.lowered))
        if report.exit_status is ExitStatus.CONVERTED:
            staged.commit()
            report = replace(report, output=str(out))
    return report


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


def _converted_row(conversion: Conversion) -> BlockRow:
    block, program = conversion.block, conversion.program
    return BlockRow(
        name=block.name,
        status="converted",
        activation=block.identified.label,
        first=kinds(block.first),
        second=kinds(block.second),
        program=program.name,
        exact=program.exact,
        heads=conversion.heads,
        bias_tokens=program.bias_tokens,
        max_error=conversion.max_error,
    )


def _left_row(left: Left) -> BlockRow:
    return BlockRow(
        name=left.name,
        status="left",
        activation=left.activation,
        first=left.first,
        second=left.second,
        reason=left.miss.reason,
        node=left.miss.node,
    )


def _shape(model: onnx.ModelProto, size: int) -> Shape:
    operators = Counter(
        node.op_type if node.domain in ONNX_DOMAINS else f"{node.domain}::{node.op_type}" for node in model.graph.node
    )
    return Shape(dict(sorted(operators.items())), len(model.graph.node), size)
