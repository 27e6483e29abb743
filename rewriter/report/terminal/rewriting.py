"""What `rewrite` prints: a few lines with labels that fit 80 columns, however many blocks there are; with -v tables."""

from __future__ import annotations

from rewriter.errors import ExitStatus
from rewriter.report.report import Report
from rewriter.report.sections import sections, summary, warnings
from rewriter.report.terminal.console import Console

_FEW_FAILURES = 5
_COLOURS = {ExitStatus.CONVERTED: "bold green", ExitStatus.VALIDATION_FAILED: "bold red"}


def show(console: Console, report: Report, *, model: str = "") -> None:
    """Print a rewriting: a few lines, with -v tables, failures, and the verdict.

    Without the verdict, and under its name, if it is the `model` of a folder.
    """
    if model:
        console.line(model, "bold")
    if model and not report.converted:
        console.line("copied    as it is: there is no MLP block to convert")
    else:
        for text in summary(report, console.width):
            console.line(text)
        for text in warnings(report):
            console.line(text, "yellow")
    if console.verbose and not console.quiet:
        for anchor, _, parts in sections(report):
            for part in parts if anchor != "failures" else ():
                console.part(part)
    shown = report.problems if console.verbose else report.problems[:_FEW_FAILURES]
    for failure in shown:
        console.line(failure, "red", always=not model)
    if len(report.problems) > len(shown):
        console.line(f"and {len(report.problems) - len(shown)} more, -v shows them", "red", always=not model)
    if not model:
        show_verdict(console, report)


def show_verdict(console: Console, report: Report) -> None:
    """Print the last line."""
    certain = report.validation is not None
    planned = report.exit_status is ExitStatus.CONVERTED and report.after is None
    colour = "" if planned else _COLOURS.get(report.exit_status, "yellow")
    console.line(report.summary, "yellow" if report.after is not None and not certain else colour, always=True)
