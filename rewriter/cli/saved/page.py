"""`rewrite page REPORT.json -o PAGE.html`: the page of a report that was saved."""

from __future__ import annotations

from pathlib import Path

import click

from rewriter.cli.options import check_page, command, file_option
from rewriter.cli.streams import STANDARD
from rewriter.errors import UsageError


@command({}, ok="the page was written", usage="REPORT is not a report that `rewrite --report` wrote")
@click.argument("report", type=click.Path(path_type=Path))
@file_option("-o", "--output", metavar="PAGE.html", help="The page.  [required]")
@click.option("--force", is_flag=True, help="Replace a PAGE that is not an .html file.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing.")
def page(report: Path, output: Path | None, *, force: bool, quiet: bool) -> int:
    """Write the page of a report that `rewrite --report REPORT` saved. No model is run or read.

    It is the page of `rewrite --html`, without what the JSON does not hold: drawings of the head programs, and the
    accounting of heads.
    """
    if output is None or output == STANDARD:
        raise UsageError("where should the page go? give -o PAGE.html")
    check_page(output, (report,), report=None, force=force)
    from rewriter.report.html import write_page
    from rewriter.report.saved import read_report
    from rewriter.report.terminal.console import Console

    write_page(read_report(report), output)
    Console(quiet=quiet).line(f"WRITTEN  {output}, the page of {report}")
    return 0
