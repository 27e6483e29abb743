"""The terminal: tables, lines and results, and progress on standard error. Names from models are never markup."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import rich.box
import rich.console
import rich.table
from rich.text import Text

from rewriter.proof.run import Progress as Callback
from rewriter.proof.run import silent
from rewriter.report.report import FolderReport, Report, Result
from rewriter.report.sections import Parts, Table, sections, summary, warnings
from rewriter.text import clean, counted, shortened

_PIPE_WIDTH, _NARROW = 140, 80
_MAX_LINE_LENGTH = 600  # also of a cell
_SHOWN_FAILURES = 5
_COLOURS = {"good": "green", "bad": "red"}
_STYLES = {"PASSED": "bold green", "FAILED": "bold red", "PLANNED": ""}
_SECONDS_BETWEEN_LINES = 10.0  # a call that takes less prints none


class Console:
    """Prints tables and lines, and shows progress."""

    def __init__(self, *, quiet: bool = False, verbose: bool = False, error: bool = False) -> None:
        """`error`: print to standard error, because standard output carries data."""
        self.quiet, self.verbose = quiet, verbose
        width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _PIPE_WIDTH
        self._out = rich.console.Console(stderr=error, highlight=False, width=width)
        self._err = rich.console.Console(stderr=True, highlight=False)

    def part(self, part: str | Sequence[str] | Table, style: str = "") -> None:
        if not isinstance(part, Table):
            for text in [part] if isinstance(part, str) else [f"  {each}" for each in part]:
                self.line(text, style)
            return
        # A table's cells are padded to their column; in a pipe, trailing blanks are removed.
        with self._out.capture() as capture:
            self._out.print(drawn(part))
        for line in capture.get().splitlines():
            self._out.print(Text.from_ansi(line.rstrip()), soft_wrap=True)

    def line(self, text: str, style: str = "", *, always: bool = False) -> None:
        """Print one line; if `always`, also in quiet mode."""
        if always or not self.quiet:
            # Only a terminal wraps it, so that what reads a pipe finds it whole.
            self._out.print(plain(text, style), soft_wrap=not self._out.is_terminal)

    def failures(self, failures: Sequence[str], where: str = "-v shows them") -> None:
        shown = failures if self.verbose else failures[:_SHOWN_FAILURES]
        more = [f"and {len(failures) - len(shown)} more, {where}"] * (len(failures) > len(shown))
        for failure in (*shown, *more):
            self.line(failure, "red", always=True)

    def progress(self) -> AbstractContextManager[Callback]:
        """Show progress on standard error while the block runs."""
        return nullcontext(silent) if self.quiet else shown(self._err)

    def report(self, report: Report) -> None:
        """Print a rewriting: a few lines, tables with -v, failures, and the verdict; for a folder, model by model."""
        if isinstance(report, FolderReport):
            for name, each in report.models.items():
                self.line(name, "bold")
                if each.converted:
                    self._lines(each)
                else:
                    left = f"{counted(len(each.left), 'candidate')} left: {each.left[0].reason}" if each.left else ""
                    self.line(f"copied    as is: {left or 'there is no MLP block to convert'}")
            if report.copied:
                self.line(f"copied    {', '.join(report.copied)}")
        else:
            self._lines(report)
        self.verdict(report)

    def _lines(self, report: Report) -> None:
        for text in summary(report, self._out.width if self._out.is_terminal else _NARROW):
            self.line(text)
        for text in warnings(report, verbose=self.verbose):
            self.line(text, "yellow")
        for anchor, _, parts in sections(report) if self.verbose and not self.quiet else ():
            for part in parts if anchor != "failures" else ():
                self.part(part)
        self.failures(report.problems)

    def verdict(self, report: Report) -> None:
        self.line(report.summary, _STYLES.get(report.summary.partition("  ")[0], "yellow"), always=True)

    def result(self, found: Result, parts: Parts, seconds: float, where: str = "-v shows them") -> None:
        """Print a result about given models: parts with their styles, problems, the verdict and how long it took."""
        for part, style in parts:
            self.part(part, style)
        self.failures(found.problems, where)
        style = "bold red" if not found else "bold yellow" if found.summary.startswith("AGREES") else "bold green"
        self.line(f"{found.summary}, in {seconds:.1f} s", style)


def drawn(table: Table) -> rich.table.Table:
    """A table in characters."""
    title: dict[str, Any] = {"title": table.title, "title_justify": "left", "title_style": "bold"}
    made = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False, **title)
    for column in table.columns:
        longest = max(map(len, column.name.split()), default=0)
        made.add_column(column.name, justify="right" if column.numeric else "left", overflow="fold", min_width=longest)
    for row in table.rows:
        made.add_row(*(plain(each.text, _COLOURS.get(each.style, each.style)) for each in row))
    return made


def plain(text: str, style: str = "") -> Text:
    """Text without markup; a long one keeps its start and its end, because a name may have megabytes."""
    return Text(shortened(text, _MAX_LINE_LENGTH), style=style)


@contextmanager
def shown(console: rich.console.Console, clock: Callable[[], float] = time.monotonic) -> Iterator[Callback]:
    """Show progress on `console` while the block runs."""
    if not console.is_terminal:
        last = clock()

        def print_line(what: str, done: int, total: int) -> None:
            nonlocal last
            if clock() - last >= _SECONDS_BETWEEN_LINES:
                last = clock()
                console.print(plain(f"{done / max(total, 1):.0%}, {what}"), soft_wrap=True)

        yield print_line
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    text = TextColumn("{task.description}", markup=False)
    columns = (SpinnerColumn(), text, BarColumn(24), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=1)
        yield lambda what, done, total: bar.update(task, description=clean(what), completed=done, total=total)
