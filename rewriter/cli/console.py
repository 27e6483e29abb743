"""What a person reads: progress, tables, and the last line.

Comes in: a `Report`. Goes out: text on standard output; progress on standard error where that is a terminal. Names from
a model are shown as plain text, never as markup or control characters.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import rich.box
import rich.console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from passes.accounting import Accounting
from rewriter.api import Inspection
from rewriter.errors import ExitStatus
from rewriter.proof.validate import Progress as Report_progress
from rewriter.report import BlockRow, Report, Shape

_PIPE_WIDTH = 140
_MOST_OPERATORS = 14


class Console:
    """Prints one report."""

    def __init__(self, *, quiet: bool, verbose: bool) -> None:
        self._quiet = quiet
        self._verbose = verbose
        width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _PIPE_WIDTH
        self._out = rich.console.Console(highlight=False, width=width)
        self._err = rich.console.Console(stderr=True, highlight=False)

    @contextmanager
    def progress(self) -> Iterator[Report_progress]:
        """A progress bar on standard error while the block runs; silent where nobody watches."""
        if self._quiet or not self._err.is_terminal:
            yield lambda _what, _done, _total: None
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(24), TimeElapsedColumn())
        with Progress(*columns, console=self._err, transient=True) as bar:
            task = bar.add_task("", total=1)

            def show(what: str, done: int, total: int) -> None:
                bar.update(task, description=_clean(what), completed=done, total=total)

            yield show

    def show(self, report: Report, *, proved: bool, planned_only: bool) -> None:
        """Print everything about a report."""
        if not self._quiet:
            self._blocks(report)
            for note in report.notes:
                self._out.print(Text(f"note: {_clean(note)}", style="yellow"))
            if report.after is not None:
                self._changes(report, report.after)
            if report.validation is not None:
                self._proof(report)
        self._verdict(report, proved=proved, planned_only=planned_only)

    def show_inspection(self, found: Inspection) -> None:
        """Print what `inspect` found."""
        self._blocks(found.report)
        accounting = found.accounting
        if accounting.blocks:
            self._out.print(_accounts(accounting))
            heads = accounting.attention_heads
            own = "not found" if accounting.head_dimension is None else str(accounting.head_dimension)
            self._out.print(Text(f"the model's own attention: {heads or '?'} heads per sublayer, head dimension {own}"))
            self._out.print(
                Text(
                    f"these blocks take {100 * accounting.share:.1f} % of the multiply-adds of linear operators per token"
                )
            )
        self._out.print(
            Text(_clean(f"nonlinearities besides softmax and normalisation, once converted: {accounting.purity}"))
        )
        self._verdict(found.report, proved=False, planned_only=True)

    # -- tables --------------------------------------------------------------------------------------------

    def _blocks(self, report: Report) -> None:
        if report.converted:
            table = _table(f"Blocks to attention heads, form {report.form}")
            for name in ("block", "first", "activation", "second", "program"):
                table.add_column(name, overflow="fold")
            for name in ("heads", "bias tokens", "certified error"):
                table.add_column(name, justify="right")
            for row in report.converted:
                table.add_row(*(Text(_clean(cell)) for cell in _converted_cells(row)))
            self._out.print(table)
        if report.left:
            table = _table("Left as they were")
            for name in ("block", "activation", "reason"):
                table.add_column(name, overflow="fold")
            for row in report.left:
                table.add_row(*(Text(_clean(cell)) for cell in (row.name, row.activation or "?", row.reason or "")))
            self._out.print(table)

    def _changes(self, report: Report, after: Shape) -> None:
        table = _table("Operators")
        table.add_column("")
        for name in ("before", "after", "change"):
            table.add_column(name, justify="right")
        for name, before, now in _operator_changes(report.before, after):
            table.add_row(Text(_clean(name)), str(before), str(now), f"{now - before:+d}")
        table.add_section()
        table.add_row("nodes", str(report.before.nodes), str(after.nodes), f"{after.nodes - report.before.nodes:+d}")
        if after.bytes:
            change = after.bytes - report.before.bytes
            table.add_row("size", _size(report.before.bytes), _size(after.bytes), f"{change:+,d} B")
        for name, proof in (report.validation.providers if report.validation else {}).items():
            old, new = proof.load_seconds
            table.add_row(
                f"load time, {name}", f"{old * 1e3:.0f} ms", f"{new * 1e3:.0f} ms", f"{(new - old) * 1e3:+.0f} ms"
            )
        self._out.print(table)

    def _proof(self, report: Report) -> None:
        validation = report.validation
        if validation is None:
            return
        table = _table("Proof, end to end: rewritten against original")
        for name in ("provider", "output"):
            table.add_column(name, overflow="fold")
        columns = ("max abs", "mean abs", "p99 abs", "max rel", "cosine", "top-1", "would pass at")
        for name in columns:
            table.add_column(name, justify="right")
        for provider, proof in validation.providers.items():
            for name, stats in proof.outputs.items():
                numbers = [f"{value:.2e}" for value in (stats.max_abs, stats.mean_abs, stats.p99_abs, stats.max_rel)]
                cosine = "-" if stats.cosine is None else f"{stats.cosine:.8f}"
                top1 = "-" if stats.top1 is None else f"{100 * stats.top1:.2f} %"
                table.add_row(provider, Text(_clean(name)), *numbers, cosine, top1, f"{stats.min_tolerance:.1e}")
        self._out.print(table)
        self._block_proofs(report)
        cases = "; ".join(validation.cases)
        self._out.print(Text(_clean(f"inputs: {cases}")))
        for skipped in validation.skipped:
            self._out.print(Text(_clean(f"input left out, the original refuses it: {skipped}"), style="yellow"))
        for provider, proof in validation.providers.items():
            ratio = "-" if proof.error_ratio is None else f"{proof.error_ratio:.2f}"
            self._out.print(
                Text(
                    f"error against float64, rewritten over original, on {provider}: {ratio}  ({validation.reference})"
                )
            )
            if proof.cpu_nodes:
                self._out.print(Text(f"ran on the CPU: {_clean(', '.join(proof.cpu_nodes))}", style="yellow"))

    def _block_proofs(self, report: Report) -> None:
        validation = report.validation
        if validation is None or not (self._verbose or any(not block.passed for block in validation.blocks)):
            return
        table = _table("Proof, block by block: error of the heads, and over that of the original")
        table.add_column("block", overflow="fold")
        for name in ("float64, worst point", "own type, worst point", "ratio", "real inputs", "ratio"):
            table.add_column(name, justify="right")
        for block in validation.blocks:
            exact = "-" if block.exact_error is None else f"{block.exact_error:.1e}"
            ratios = ["-" if value is None else f"{value:.2f}" for value in (block.region_ratio, block.block_ratio)]
            table.add_row(
                Text(_clean(block.name), style="" if block.passed else "red"),
                exact,
                f"{block.region_error:.1e}",
                ratios[0],
                f"{block.block_error:.1e}",
                ratios[1],
            )
        self._out.print(table)

    # -- the last line -------------------------------------------------------------------------------------

    def _verdict(self, report: Report, *, proved: bool, planned_only: bool) -> None:
        if report.exit_status is ExitStatus.NOTHING_TO_CONVERT:
            reasons = f"; {len(report.left)} candidates left, reasons above" if report.left and not self._quiet else ""
            self._out.print(
                Text(f"NOTHING TO CONVERT  no MLP block in {_clean(report.model)}{reasons}", style="yellow")
            )
            return
        count = len(report.converted)
        blocks = f"{count} block{'s' if count != 1 else ''}"
        heads = sum(row.heads or 0 for row in report.converted)
        what = f"{blocks}, {heads:,} attention heads"
        if planned_only:
            self._out.print(Text(f"PLANNED  {what} in {_clean(report.model)}; nothing was written"))
            return
        if report.exit_status is ExitStatus.VALIDATION_FAILED and report.validation is not None:
            for failure in report.validation.failures[: None if self._verbose else 5]:
                self._out.print(Text(_clean(failure), style="red"))
            more = len(report.validation.failures) - 5
            if more > 0 and not self._verbose:
                self._out.print(Text(f"and {more} more (-v shows them)", style="red"))
            self._out.print(Text(f"FAILED  {what}; nothing was written", style="bold red"))
            return
        seconds = report.seconds.get("total", 0.0)
        if not proved:
            line = f"NOT PROVED  {what} written to {report.output} in {seconds:.1f} s (--no-validate)"
            self._out.print(Text(_clean(line), style="yellow"))
            return
        providers = ", ".join(report.validation.providers) if report.validation else ""
        line = f"PASSED  {what}, proved on {providers}; written to {report.output} in {seconds:.1f} s"
        self._out.print(Text(_clean(line), style="bold green"))


def _table(title: str) -> Table:
    return Table(title=title, box=rich.box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)


def _accounts(accounting: Accounting) -> Table:
    table = _table("Accounting: heads of form local, and of the three sublayers of P3")
    table.add_column("block", overflow="fold")
    for name in ("d_model", "d_ff", "parameters", "share", "heads", "three sublayers"):
        table.add_column(name, justify="right")
    for block in accounting.blocks:
        staged = "?" if block.staged is None else " + ".join(f"{count:,}" for count in block.staged)
        sizes = ["?" if size is None else str(size) for size in (block.d_model, block.d_ff)]
        heads = "?" if block.heads is None else f"{block.heads:,}"
        table.add_row(
            Text(_clean(block.name)), *sizes, f"{block.parameters:,}", f"{100 * block.share:.1f} %", heads, staged
        )
    return table


def _converted_cells(row: BlockRow) -> tuple[str, ...]:
    error = "exact" if row.exact and not row.max_error else f"{row.max_error or 0.0:.1e}"
    heads = "?" if row.heads is None else f"{row.heads:,}"
    return (row.name, row.first, row.activation, row.second, row.program or "", heads, str(row.bias_tokens), error)


def _operator_changes(before: Shape, after: Shape) -> list[tuple[str, int, int]]:
    """Operators whose count changed, the largest changes first, then by name."""
    names = sorted(set(before.operators) | set(after.operators))
    rows = [(name, before.operators.get(name, 0), after.operators.get(name, 0)) for name in names]
    changed = [row for row in rows if row[1] != row[2]]
    return sorted(changed, key=lambda row: (-abs(row[2] - row[1]), row[0]))[:_MOST_OPERATORS]


def _size(count: int) -> str:
    amount = float(count)
    for unit in ("B", "kB", "MB"):
        if amount < 1000:
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.2f} GB"


def _clean(text: str) -> str:
    """Printable characters only: names come from the model."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
