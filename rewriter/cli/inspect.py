"""`rewrite inspect MODEL` and `rewrite doctor`: what is in a model, and whether this machine can work on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from passes.options import Options
from rewriter.cli.options import (
    MODEL,
    SETTINGS,
    check_report,
    command,
    declared_options,
    links_option,
    report_option,
    write_report,
)
from rewriter.cli.streams import STANDARD, from_standard_input


@click.command(context_settings=SETTINGS)
@click.argument("model", type=click.Path(path_type=Path))
@declared_options(
    Options,
    only=("scope",),
    scope={"help": "Look for MLP blocks, or for every elementwise activation of a linear operator's output."},
)
@click.option(
    "--tokens",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    help="Sequence length for which heads, keys and patterns of each form are counted.",
)
@links_option
@report_option("what was found")
def inspect(
    model: Path,
    scope: str,
    *,
    tokens: int,
    allow_links: bool,
    report: Path | None,
) -> int:
    """Print the MLP blocks of MODEL, their size, and the heads that they would become; write nothing.

    Exit status: 0 if some block can be converted, 3 if none can; 2 and 4 as for `rewrite`.
    """
    check_report(report, (model,))
    from rewriter import inspect as look
    from rewriter.cli.accounting import show_inspection
    from rewriter.report.terminal.console import Console

    with from_standard_input(model) as source:
        found = look(source, scope=scope, tokens=tokens, allow_links=allow_links)
    found = replace(found, report=replace(found.report, model=str(model)))
    write_report(report, found.to_json)
    show_inspection(found, Console(error=report == STANDARD))
    return int(found.report.exit_status)


@command(MODEL, ok="nothing is wrong", failed="something is; each problem is a line that says what to do")
@click.argument("model", type=click.Path(path_type=Path), required=False)
@report_option("what was found")
def doctor(model: Path | None, *, report: Path | None) -> int:
    """Look at versions, execution providers, memory and disk, and say how to mend what is wrong.

    Every execution provider is started in a process of its own. With MODEL, its size is compared with memory and disk.
    """
    check_report(report, (model,))
    from rewriter.api.diagnosing import doctor as look
    from rewriter.report.terminal.console import Console
    from rewriter.text import size

    found, console = look(model), Console(error=report == STANDARD)
    write_report(report, found.to_json)
    for label, value in found.environment.items():
        console.line(f"{label:18}{value}")
    for name, reason in found.providers.items():
        console.line(f"{name:18}{reason or 'works'}")
    console.line(f"{'memory':18}{'unknown' if found.memory is None else f'{size(found.memory)} available'}")
    console.line(f"{'disk':18}{size(found.disk)} free")
    if found.model_bytes is not None:
        console.line(f"{'model':18}{size(found.model_bytes)} with its weights")
    for problem in found.problems:
        console.line(f"{'problem':18}{problem}", "red")
    console.line("see the problems above" if found.problems else "FINE  nothing is wrong", "bold")
    return found.exit_status
