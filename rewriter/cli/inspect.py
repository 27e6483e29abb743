"""`rewrite inspect` and `rewrite doctor`: a model's blocks, and this machine's abilities. Nothing is written."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rewriter.cli.options import MODEL, carried_out, check_report, command, report_option
from rewriter.text import size

if TYPE_CHECKING:
    from passes.accounting import Accounting
    from rewriter.api.diagnosing import Diagnosis
    from rewriter.api.inspection import Inspection
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
    made = Counter(row.activation for row in found.report.left if row.reason == "it is attention heads already")
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
