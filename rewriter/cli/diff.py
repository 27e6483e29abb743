"""`rewrite diff A B`: where two models differ; `rewriter.diff` does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from rewriter.cli.options import MODELS, check_report, command, comparison_options, write_report
from rewriter.cli.streams import STANDARD


@command(
    MODELS,
    ok="both compute the same, or agree where they were run (with --graph-only: the same graph and weights)",
    failed="they differ, or nothing could be compared",
    usage="the given inputs left nothing to compare",
)
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option("--graph-only", is_flag=True, help="Compare the files, run nothing.")
@comparison_options
def diff(
    a: Path,
    b: Path,
    *,
    graph_only: bool,
    providers: tuple[str, ...],
    report: Path | None,
    verbose: bool,
    **options: Any,
) -> int:
    """Compare two models: operators, nodes, metadata, weights bit for bit, and what they compute.

    Nodes are matched by name and by structure, so a renamed node does not count as different. Outputs are judged as
    by `rewrite validate`. Two different graphs may compute the same, so the outputs decide the exit status, and the
    graphs only where nothing is run.
    """
    check_report(report, (a, b))
    from rewriter import diff as compare
    from rewriter.report.terminal.comparison import DIFFING, show_comparison
    from rewriter.report.terminal.console import Console

    console = Console(verbose=verbose, error=report == STANDARD)
    with console.progress() as progress:
        found = compare(
            a,
            b,
            outputs=not graph_only,
            providers=providers or None,
            progress=progress,
            **options,
        )
    write_report(report, found.to_json)
    show_comparison(console, found, DIFFING)
    return int(found.exit_status)
