"""`rewrite validate ORIGINAL REWRITTEN`: does one model compute what another does?

`rewriter.validate` does the work.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from rewriter.cli.options import MODELS, check_report, command, comparison_options, write_report
from rewriter.cli.streams import STANDARD


@command(
    MODELS,
    ok="REWRITTEN computes what ORIGINAL does, or agrees where it was run",
    failed="it does not, or nothing could be compared",
    usage="the given inputs left nothing to compare",
)
@click.argument("original", type=click.Path(path_type=Path))
@click.argument("rewritten", type=click.Path(path_type=Path))
@comparison_options
@click.option(
    "--taps",
    type=click.Choice(["blocks"]),
    help="Also compare the output of every block, and show how the error grows with depth.",
)
@click.option("--bisect", is_flag=True, help="If they differ, test every part alone and name the faulty ones.")
@click.option(
    "--generate",
    metavar="N",
    type=click.IntRange(1),
    help="Also generate N tokens with both, through the key-value cache if there is one.",
)
def validate(
    original: Path,
    rewritten: Path,
    *,
    taps: str | None,
    providers: tuple[str, ...],
    report: Path | None,
    verbose: bool,
    **options: Any,
) -> int:
    """Judge whether REWRITTEN computes what ORIGINAL does, on inputs made for the model.

    Any two models with the same inputs and outputs can be compared, whoever made them. PASSED: certified for every
    input, and a run agrees. AGREES: not proved, but both agree on the inputs that were run.
    """
    check_report(report, (original, rewritten))
    from rewriter import validate as judge
    from rewriter.report.terminal.comparison import VALIDATING, show_comparison
    from rewriter.report.terminal.console import Console

    console = Console(verbose=verbose, error=report == STANDARD)
    with console.progress() as progress:
        found = judge(
            original, rewritten, providers=providers or None, taps=taps is not None, progress=progress, **options
        )
    write_report(report, found.to_json)
    show_comparison(console, found, VALIDATING)
    return int(found.exit_status)
