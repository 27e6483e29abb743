"""`rewrite doctor [MODEL]`: what is installed, what works, and what to do where it does not."""

from __future__ import annotations

from pathlib import Path

import click

from rewriter.cli.options import MODEL, check_report, command, report_option, write_report
from rewriter.cli.streams import STANDARD


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
