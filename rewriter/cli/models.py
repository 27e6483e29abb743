"""`rewrite inspect` and `doctor`: one model, this machine; `certify`, `validate`, `diff`, `bench`: models compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from passes.options import ALREADY
from rewriter.cli.options import (
    MODEL,
    MODELS,
    carried_out,
    check_report,
    command,
    declared_options,
    file_option,
    report_option,
    with_options,
)
from rewriter.compare import CompareOptions
from rewriter.errors import UsageError
from rewriter.proof.settings import Settings
from rewriter.text import size

if TYPE_CHECKING:
    from passes.accounting import Accounting
    from rewriter.api.benching import Benchmark
    from rewriter.api.diagnosing import Diagnosis
    from rewriter.api.inspection import Inspection
    from rewriter.report.comparison import Certification, Comparison, RuntimeCertification
    from rewriter.report.tables import Table
    from rewriter.report.terminal import Console


@command(MODEL, ok="some block can be converted", nothing="none can")
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "--tokens",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    help="Sequence length for which heads, keys and patterns of each form are counted.",
)
@report_option("what was found")
def inspect(model: Path, *, tokens: int, report: Path | None) -> int:
    """Print the MLP blocks of MODEL, their size, and the heads that they would become; write nothing."""
    check_report(report, (model,))
    from rewriter import inspect as look

    return carried_out(report, lambda _: look(model, tokens=tokens), _show)


def _show(console: Console, found: Inspection) -> None:
    from rewriter.report.sections import block_parts
    from rewriter.report.terminal import show_verdict

    for part in block_parts(found.report):
        console.part(part)
    for note in found.report.notes:
        console.line(f"note: {note}", "yellow")
    accounting = found.accounting
    if accounting.blocks:
        console.part(_forms(accounting))
        refused = Counter(reason for block in accounting.blocks for reason in block.refused)
        for (form, reason), number in refused.items():
            console.line(f"form {form} cannot take {number} of the blocks: {reason}", "yellow")
        share = f"{100 * accounting.share:.1f} %"
        console.line(f"these blocks take {share} of the multiply-adds of linear operators per token")
    if accounting.head_dimension is not None:
        heads = "" if accounting.attention_heads is None else f"{accounting.attention_heads} heads per sublayer, "
        console.line(f"the model's own attention: {heads}head dimension {accounting.head_dimension}")
    console.line(f"purity once converted, nonlinearities that remain: {accounting.purity}")
    made = Counter(row.activation for row in found.report.left if row.reason == ALREADY)
    for activation, count in made.most_common():
        console.line(f"{count} {'MLP is' if count == 1 else 'MLPs are'} attention already: {activation}")
    if not found.report.converted:
        show_verdict(console, found.report)


def _forms(accounting: Accounting) -> Table:
    from passes.forms import FORMS
    from rewriter.report.tables import Column, Table, columns

    heads = columns("count", "blocks", "heads", "keys", "pattern of all heads")
    rows = []
    for form, blocks in Counter(form for block in accounting.blocks for form in block.forms).items():
        count = " + ".join(f"{number:,}" for number in form.heads)
        rows.append((form.form, blocks, count, form.keys, size(form.pattern_bytes), FORMS[form.form].help))
    title = f"Forms: one block at {accounting.tokens:,} tokens"
    return Table(title, (Column("form"), *heads, Column("in the graph")), tuple(rows))


@command(MODEL, ok="nothing is wrong", failed="something is; each problem is a line that says what to do")
@click.argument("model", type=click.Path(path_type=Path), required=False)
@report_option("what was found")
def doctor(model: Path | None, *, report: Path | None) -> int:
    """Look at versions, execution providers, memory and disk, and say how to mend what is wrong.

    Every execution provider is started. With MODEL, its size is compared with memory and disk.
    """
    check_report(report, (model,))
    from rewriter import doctor as look

    return carried_out(report, lambda _: look(model), _show_diagnosis)


def _show_diagnosis(console: Console, found: Diagnosis) -> None:
    lines = [*found.environment.items(), *((name, reason or "works") for name, reason in found.providers.items())]
    lines.append(("memory", "unknown" if found.memory is None else f"{size(found.memory)} available"))
    lines.append(("disk", f"{size(found.disk)} free"))
    if found.model_bytes is not None:
        lines.append(("model", f"{size(found.model_bytes)} with its weights"))
    for label, value in lines:
        console.line(f"{label:18}{value}")
    for problem in found.problems:
        console.line(f"{'problem':18}{problem}", "red")
    console.line(found.summary, "bold")


# -- models beside each other ------------------------------------------------------------------------------------------

_model = click.Path(path_type=Path)
_pair = with_options((click.argument("original", type=_model), click.argument("rewritten", type=_model)))
_SHOWN = with_options(
    (
        report_option("the comparison"),
        click.option("-v", "--verbose", is_flag=True, help="Print everything: all nodes and weights."),
    )
)


@command(
    MODELS,
    ok="CERTIFIED or AGREES: REWRITTEN computes what ORIGINAL does, or agrees where it was run",
    failed="DIFFERENT or NOT PROVED: it does not, or neither proof nor run decides it",
    usage="the given inputs left nothing to compare",
)
@_pair
@declared_options(Settings, only=("providers", "inputs", "dims"))
@declared_options(CompareOptions)
@_SHOWN
def validate(original: Path, rewritten: Path, **options: Any) -> int:
    """Judge whether REWRITTEN computes what ORIGINAL does, on inputs made for the model.

    Any two models with the same inputs and outputs can be compared, whoever wrote them. CERTIFIED: proved, and a run
    agrees. AGREES: not proved, but both agree on the inputs that were run. DIFFERENT: there is a counterexample.
    """
    from rewriter import validate as judge

    return _compared(judge, original, rewritten, **options)


@command(
    MODELS,
    ok="CERTIFIED or AGREES: B computes what A does, or agrees where both were run",
    failed="DIFFERENT or NOT PROVED: they differ, or neither proof nor run decides it",
    usage="the given inputs left nothing to compare",
)
@click.argument("a", type=_model)
@click.argument("b", type=_model)
@click.option("--markdown", is_flag=True, help="Print Markdown, for a pull request.")
@declared_options(Settings, only=("providers", "inputs"))
@declared_options(CompareOptions, only=("names",))
@_SHOWN
def diff(a: Path, b: Path, **options: Any) -> int:
    """Compare two models: operators, metadata, weights bit for bit, and what they compute.

    Tensors are matched by value, so names and operators do not matter: the first node of B that computes what A does
    not is named, with what A makes of the same operands, and the regions that differ, the largest first. The verdict is
    that of `rewrite validate`, which also takes sizes and a tolerance; `rewrite certify` runs nothing.
    """
    from rewriter import diff as compare

    return _compared(compare, a, b, **options)


def _compared(
    compare: Callable[..., Comparison],
    a: Path,
    b: Path,
    *,
    report: Path | None,
    verbose: bool,
    markdown: bool = False,
    **options: Any,
) -> int:
    check_report(report, (a, b))
    from rewriter.report import compared
    from rewriter.report.terminal import show

    def shown(console: Console, found: Comparison) -> None:
        parts = compared.compared(found, verbose=verbose and not markdown)
        if markdown:
            for line in compared.markdown(found.summary, found.problems, (part for part, _ in parts)):
                console.line(line)
        else:
            show(console, found, parts, found.seconds["total"])

    return carried_out(report, lambda told: compare(a, b, progress=told, **options), shown, verbose=verbose)


@command(
    {4: "a model is unreadable, malformed or unsafe"},
    ok="CERTIFIED, for every size or at the sizes tried (with --check: the certificate holds)",
    failed="NOT PROVED or DIFFERENT (with --check: the certificate does not hold)",
    usage="FILE is no certificate",
)
@click.argument("original", type=_model)
@click.argument("rewritten", type=_model, required=False)
@file_option(
    "--check",
    metavar="FILE.json",
    help="Compute the certificate afresh, and compare it with the one in this file.",
)
@declared_options(CompareOptions, only=("accuracy", "names"))
@report_option("the certificate", "-o")
def certify(original: Path, rewritten: Path | None, *, check: Path | None, report: Path | None, **options: Any) -> int:
    """Prove that REWRITTEN computes what ORIGINAL does, over the reals.

    No inputs are run. All tensors of both models are compared by value, in exact arithmetic; activations that are
    computed otherwise are bounded for all real numbers, or in a domain that is named. Any two models can be judged.

    Without REWRITTEN, what this onnxruntime makes of ORIGINAL is judged, at its levels basic, extended and all; where
    one is not certified, its optimisers are disabled one at a time, and the one at fault is named.
    """
    check_report(report, (original, rewritten, check))
    from rewriter import certify as prove
    from rewriter.report.compared import at_levels, certified
    from rewriter.report.comparison import read_certificate
    from rewriter.report.terminal import show

    if rewritten is None:
        if check is not None:
            raise UsageError("--check is for two models; name the rewritten one, too")

        def show_levels(console: Console, found: RuntimeCertification) -> None:
            show(console, found, at_levels(found), sum(each.certificate.seconds for each in found.levels))

        return carried_out(report, lambda told: prove(original, progress=told, **options), show_levels)
    stated = None if check is None else read_certificate(check)

    def proved(_progress: object) -> Certification:
        found = prove(original, rewritten, **options)
        return found if check is None else found.checked(stated)

    def show_proof(console: Console, found: Certification) -> None:
        show(console, found, certified(found), found.certificate.seconds, "in the JSON of -o")

    return carried_out(report, proved, show_proof)


@command(MODELS, ok="measured", failed="a model does not run", usage="the models take different inputs")
@_pair
@click.argument("more", type=_model, nargs=-1)
@click.option("--tokens", type=int, metavar="N", multiple=True, help="Tokens of a sequence (repeatable). Default: 128.")
@declared_options(Settings, only=("providers",), providers={"help": "Execution provider, as for rewrite (repeatable)."})
@report_option("the measurement")
def bench(original: Path, rewritten: Path, more: tuple[Path, ...], *, report: Path | None, **options: Any) -> int:
    """Measure how long REWRITTEN, and MORE models, take beside ORIGINAL; they take turns.

    ORIGINAL, given again among MORE, shows the noise. A run includes copying inputs and outputs.
    """
    models = (original, rewritten, *more)
    check_report(report, models)
    from rewriter import bench as measure

    return carried_out(report, lambda told: measure(*models, progress=told, **options), _show_times)


def _show_times(console: Console, found: Benchmark) -> None:
    from rewriter.report.tables import Table, columns

    heads = (*columns("text", "inputs", "provider", "model"), *columns("ratio", "ms", "from", "over original", "to"))
    rows = [(row.inputs, row.provider, row.model, row.milliseconds, *row.over_original) for row in found.times]
    console.part(Table("Median time of one run, and quartiles of the ratio within a round", heads, tuple(rows)))
    console.line(found.summary, "bold green")
