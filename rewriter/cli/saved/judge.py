"""`rewrite judge RUN`: other tolerances for a run that was saved; `rewriter.judge` does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from rewriter.cli.options import check_report, command, judging_options, write_report
from rewriter.cli.streams import STANDARD


@command(
    {},
    ok="all outputs are within their tolerances",
    failed="some are not, or nothing could be compared",
    usage="RUN is not a saved run",
)
@click.argument("run", type=click.Path(path_type=Path))
@judging_options
def judge(run: Path, *, report: Path | None, quiet: bool, verbose: bool, **options: Any) -> int:
    """Judge a run that `rewrite validate --save-run RUN` saved by other tolerances. No model is run.

    Every floating-point output needs a tolerance: --atol, --rtol or --expect.
    """
    check_report(report, (run,))
    from rewriter.api.comparing import judge as judged
    from rewriter.report.terminal.comparison import VALIDATING, show_comparison
    from rewriter.report.terminal.console import Console

    console = Console(quiet=quiet, verbose=verbose, error=report == STANDARD)
    found = judged(run, **options)
    write_report(report, found.to_json)
    show_comparison(console, found, VALIDATING)
    return int(found.exit_status)
