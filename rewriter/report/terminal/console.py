"""Print a report in the terminal: tables and the verdict, and progress on standard error."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import rich.console
from rich.text import Text

from rewriter.errors import ExitStatus
from rewriter.proof.validate import Progress as Callback
from rewriter.report.report import Report
from rewriter.report.table import Table
from rewriter.report.tables import region_table
from rewriter.report.terminal import tables
from rewriter.report.terminal.layout import drawn, plain
from rewriter.report.terminal.progress import shown
from rewriter.report.terminal.summary import summary

_PIPE_WIDTH, _NARROW = 140, 80
_FEW_FAILURES = 5


class Console:
    """Prints one report."""

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

    @contextmanager
    def progress(self) -> Iterator[Callback]:
        """Show progress on standard error while the block runs."""
        if self._quiet:
            yield lambda _what, _done, _total: None
            return
        with shown(self._err) as show:
            yield show

    def show(self, report: Report, *, proved: bool, planned_only: bool) -> None:
        """Print everything about a rewriting."""
        if self._verbose and not self._quiet:
            self.blocks(report)
            if report.after is not None:
                self.print(tables.changes(report.before, report.after, report.validation))
            self._proof(report)
        elif not self._quiet:
            self._summary(report)
        if report.exit_status is ExitStatus.NOTHING_TO_CONVERT:
            self.nothing(report)
        elif planned_only:
            self._line(plain(f"PLANNED  {report.what} in {report.model}; nothing was written"))
        elif report.exit_status is ExitStatus.VALIDATION_FAILED:
            self._failed(report)
        else:
            self._done(report, proved=proved)

    def show_model(self, name: str, report: Report) -> None:
        """Print what became of one model of a folder, without a verdict."""
        if self._quiet:
            return
        self._line(plain(name, "bold"))
        if self._verbose:
            self.blocks(report)
            self._proof(report)
        elif report.converted:
            self._summary(report)
        else:
            self._line(plain("copied    as it is: there is no MLP block to convert"))
        self._failures(report)

    def line(self, text: str, style: str = "", *, always: bool = False) -> None:
        """Print one line, with `always` also if only the last line was asked for."""
        if always or not self._quiet:
            self._line(plain(text, style))

    # -- parts ---------------------------------------------------------------------------------------------

    def blocks(self, report: Report) -> None:
        """Print the converted blocks, the other candidates, and notes."""
        if report.converted:
            self.print(tables.converted(report.converted, report.form))
        if report.left:
            self.print(tables.left(report.left))
        for note in report.notes:
            self._line(plain(f"note: {note}", "yellow"))

    def _summary(self, report: Report) -> None:
        """The few lines that most people need; -v prints tables."""
        for line in summary(report, self._out.width if self._out.is_terminal else _NARROW):
            self._line(plain(line))
        for warning in tables.warnings(report):
            self._line(warning)
        if report.validation is not None and any(not block.passed for block in report.validation.blocks):
            self.print(tables.tests(report.validation.blocks))

    def _line(self, text: Text) -> None:
        """A line; only a terminal wraps it, so that what reads a pipe finds it whole."""
        self._out.print(text, soft_wrap=not self._out.is_terminal)

    def _proof(self, report: Report) -> None:
        validation = report.validation
        if validation is None:
            return
        self.print(tables.outputs(validation, verbose=self._verbose))
        if validation.certificate is not None and validation.certificate.regions:
            self.print(region_table(validation.certificate))
        if validation.blocks:
            self.print(tables.tests(validation.blocks))
        for line in (*tables.remarks(report), *tables.warnings(report)):
            self._line(line)

    # -- the last line -------------------------------------------------------------------------------------

    def nothing(self, report: Report) -> None:
        """Say that there is nothing to convert."""
        count = len(report.left)
        why = "no candidate was found"
        if count:
            where = "see -v" if self._quiet else "reasons above"
            why = f"{count} candidate{'s' if count != 1 else ''} left, {where}"
        self._line(plain(f"NOTHING TO CONVERT  in {report.model}: {why}", "yellow"))

    def _failed(self, report: Report) -> None:
        self._failures(report)
        self._line(plain(f"FAILED  {report.what}: the proof failed, nothing was written", "bold red"))

    def _failures(self, report: Report) -> None:
        failures = report.validation.failures if report.validation is not None else ()
        shown = failures if self._verbose else failures[:_FEW_FAILURES]
        for failure in shown:
            self._line(plain(failure, "red"))
        if len(failures) > len(shown):
            self._line(plain(f"and {len(failures) - len(shown)} more, -v shows them", "red"))

    def _done(self, report: Report, *, proved: bool) -> None:
        seconds = report.seconds.get("total", 0.0)
        if not proved:
            self._line(plain(f"NOT PROVED  {report.what}, written to {report.output} in {seconds:.1f} s", "yellow"))
            return
        validation = report.validation
        providers = ", ".join(validation.providers) if validation else ""
        how = "certified for every input" if validation and validation.certified else "tested, not certified"
        line = f"PASSED  {report.what}, {how}, run on {providers}; written to {report.output} in {seconds:.1f} s"
        self._line(plain(line, "bold green"))
