"""`rewrite diff A B`: where two models differ; `rewriter.diff` does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from rewriter.cli.options import MODELS, check_report, command, comparison_options, write_report
from rewriter.cli.streams import STANDARD
from rewriter.errors import UsageError


@command(
    MODELS,
    ok="both compute the same (with --graph-only: graphs and weights are the same)",
    failed="they differ, or nothing could be compared",
    usage="the given inputs left nothing to compare",
)
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option("--graph-only", is_flag=True, help="Compare the files, run nothing.")
@click.option("--outputs-only", is_flag=True, help="Compare what they compute, not the files.")
@comparison_options
def diff(
    a: Path,
    b: Path,
    *,
    graph_only: bool,
    outputs_only: bool,
    taps: str | None,
    providers: tuple[str, ...],
    report: Path | None,
    quiet: bool,
    verbose: bool,
    **options: Any,
) -> int:
    """Compare two models: operators, nodes, metadata, weights bit for bit, and what they compute.

    Nodes are matched by name and by structure, so a renamed node does not count as different. Outputs are judged as
    by `rewrite validate`. Two different graphs may compute the same, so the graphs decide the exit status only with
    --graph-only.
    """
    if graph_only and outputs_only:
        raise UsageError("--graph-only and --outputs-only leave nothing to compare; give one of them")
    if graph_only and (taps or options["bisect"]):
        raise UsageError("--taps and --bisect run the models, --graph-only does not; leave one out")
    check_report(report, (a, b))
    from rewriter import diff as compare
    from rewriter.report.terminal.comparison import DIFFING, show_comparison
    from rewriter.report.terminal.console import Console

    console = Console(quiet=quiet, verbose=verbose, error=report == STANDARD)
    with console.progress() as progress:
        found = compare(
            a,
            b,
            graph=not outputs_only,
            outputs=not graph_only,
            providers=providers or None,
            taps=taps is not None,
            progress=progress,
            **options,
        )
    write_report(report, found.to_json)
    show_comparison(console, found, DIFFING)
    return int(found.exit_status)
