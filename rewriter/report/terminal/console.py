"""The terminal: tables and lines, progress on standard error, and what `rewrite` prints.

Names from a model are plain text, never markup or control characters. Progress is a bar with the remaining time on a
terminal, otherwise a plain line from time to time.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import rich.box
import rich.console
import rich.table
from rich.text import Text

from rewriter.errors import ExitStatus
from rewriter.proof.validate import Progress as Callback
from rewriter.report.folder import FolderReport
from rewriter.report.report import Report
from rewriter.report.sections import sections, summary, warnings
from rewriter.report.tables import Cell, Kind, Table, written
from rewriter.text import clean, counted

_PIPE_WIDTH, _NARROW = 140, 80
_LONGEST = 600
"""Characters of a line, or of a line of a cell."""
_COLOURS = {"good": "green", "bad": "red"}

_EVERY = 10.0
"""Seconds between plain lines; a call that takes less prints none."""

Clock = Callable[[], float]


class Console:
    """Prints tables and lines, and shows progress."""

    def __init__(self, *, quiet: bool = False, verbose: bool = False, error: bool = False) -> None:
        """`error`: print to standard error, because standard output carries data."""
        self._quiet = quiet
        self._verbose = verbose
        width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _PIPE_WIDTH
        self._out = rich.console.Console(stderr=error, highlight=False, width=width)
        self._err = rich.console.Console(stderr=True, highlight=False)

    @property
    def quiet(self) -> bool:
        """Whether to print the last line only."""
        return self._quiet

    @property
    def width(self) -> int:
        """The width to which lines are wrapped, in characters."""
        return self._out.width if self._out.is_terminal else _NARROW

    @property
    def verbose(self) -> bool:
        """Whether to print everything."""
        return self._verbose

    def print(self, part: Table | Text) -> None:
        """Print one table or line."""
        if isinstance(part, Text) or self._out.is_terminal:
            self._out.print(drawn(part) if isinstance(part, Table) else part)
            return
        # A table's cells are padded to their column; in a pipe nobody sees that, and blanks at line ends disturb.
        with self._out.capture() as capture:
            self._out.print(drawn(part))
        for line in capture.get().splitlines():
            self._out.print(plain(line.rstrip()), soft_wrap=True)

    def part(self, part: str | Sequence[str] | Table) -> None:
        """Print a part of a report: a table, a paragraph, or the entries of a list."""
        if isinstance(part, Table):
            self.print(part)
            return
        for text in [part] if isinstance(part, str) else [f"  {each}" for each in part]:
            self.line(text)

    @contextmanager
    def progress(self) -> Iterator[Callback]:
        """Show progress on standard error while the block runs."""
        if self._quiet:
            yield lambda _what, _done, _total: None
            return
        with shown(self._err) as show:
            yield show

    def line(self, text: str, style: str = "", *, always: bool = False) -> None:
        """Print one line, with `always` also if only the last line was asked for."""
        if always or not self._quiet:
            self._line(plain(text, style))

    def _line(self, text: Text) -> None:
        """A line; only a terminal wraps it, so that what reads a pipe finds it whole."""
        self._out.print(text, soft_wrap=not self._out.is_terminal)


def drawn(table: Table) -> rich.table.Table:
    """A table in characters."""
    made = rich.table.Table(
        title=table.title, box=rich.box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False
    )
    for column in table.columns:
        made.add_column(column.name, justify="right" if column.numeric else "left", overflow="fold")
    for row in table.rows:
        made.add_row(*(_cell(value, column.kind) for value, column in zip(row, table.columns, strict=True)))
    return made


def _cell(value: Cell | str | float | None, kind: Kind) -> Text:
    cell = value if isinstance(value, Cell) else Cell(value)
    lines = (cell.text or written(cell.value, kind)).split("\n")
    return Text("\n").join(plain(line, _COLOURS.get(cell.style, cell.style)) for line in lines)


def plain(text: str, style: str = "") -> Text:
    """Text without markup; a long one keeps its start and its end, because a name may have megabytes."""
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]}…{text[-_LONGEST // 2 :]}"
    return Text(clean(text), style=style)


@contextmanager
def shown(console: rich.console.Console, clock: Clock = time.monotonic) -> Iterator[Callback]:
    """Show progress on `console` while the block runs."""
    if not console.is_terminal:
        yield _lines(console, clock)
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    text = TextColumn("{task.description}", markup=False)
    columns = (SpinnerColumn(), text, BarColumn(24), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=1)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=clean(what), completed=done, total=total)

        yield show


def _lines(console: rich.console.Console, clock: Clock) -> Callback:
    last = clock()

    def show(what: str, done: int, total: int) -> None:
        nonlocal last
        if clock() - last >= _EVERY:
            last = clock()
            console.print(plain(f"{done / max(total, 1):.0%}, {what}"), soft_wrap=True)

    return show


# -- what `rewrite` prints ---------------------------------------------------------------------------------------------

_FEW_FAILURES = 5
_VERDICTS = {ExitStatus.CONVERTED: "bold green", ExitStatus.VALIDATION_FAILED: "bold red"}


def show_rewriting(console: Console, report: Report, *, model: str = "") -> None:
    """Print a rewriting: a few lines, with -v tables, failures, and the verdict.

    Without the verdict, and under its name, if it is the `model` of a folder.
    """
    if model:
        console.line(model, "bold")
    if model and not report.converted:
        console.line(f"copied    as it is: {_unconverted(report)}")
    else:
        for text in summary(report, console.width):
            console.line(text)
        for text in warnings(report, verbose=console.verbose):
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


def _unconverted(report: Report) -> str:
    if not report.left:
        return "there is no MLP block to convert"
    return f"{counted(len(report.left), 'candidate')} left: {report.left[0].reason}"


def show_folder(console: Console, report: FolderReport) -> None:
    """Print what became of a folder: each model under its name, what was copied, and the verdict."""
    for name, each in report.models.items():
        show_rewriting(console, each, model=name)
    if report.copied:
        console.line(f"copied    {', '.join(report.copied)}")
    console.line(report.summary, _VERDICTS.get(report.exit_status, "yellow"), always=True)


def show_verdict(console: Console, report: Report) -> None:
    """Print the last line."""
    certain = report.proof is not None
    planned = report.exit_status is ExitStatus.CONVERTED and report.made is None
    colour = "" if planned else _VERDICTS.get(report.exit_status, "yellow")
    console.line(report.summary, "yellow" if report.made is not None and not certain else colour, always=True)
