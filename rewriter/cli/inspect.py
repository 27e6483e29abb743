"""`rewrite inspect MODEL`: the blocks of a model as tables or JSON; `rewriter.inspect` does the work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from passes.options import Options
from rewriter.cli.options import SETTINGS, check_report, declared_options, links_option, report_option, write_report
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
