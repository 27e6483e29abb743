"""Print a measurement in the terminal."""

from __future__ import annotations

from rewriter.report.benchmark import Benchmark, TimeRow
from rewriter.report.table import Column, Row, Table
from rewriter.report.terminal.console import Console
from rewriter.report.terminal.layout import plain

_FEW_NODES = 8


def show_benchmark(console: Console, found: Benchmark) -> None:
    """Print everything about a measurement."""
    if not console.quiet:
        for table in (_times(found), _models(found)):
            if table.rows:
                console.print(_relevant(table, found))
        for row in found.models:
            if row.cpu_nodes:
                nodes = ", ".join(row.cpu_nodes[:_FEW_NODES])
                more = f" and {len(row.cpu_nodes) - _FEW_NODES} more" if len(row.cpu_nodes) > _FEW_NODES else ""
                console.print(plain(f"{row.model} on {row.provider}, ran on the CPU: {nodes}{more}", "yellow"))
    console.print(plain(f"MEASURED  {_verdict(found)}", "bold green"))


def _relevant(table: Table, found: Benchmark) -> Table:
    """The table without the provider if there is only one."""
    several = len({row.provider for row in found.times}) > 1
    return table if several else table.pick(*(each.name for each in table.columns if each.name != "provider"))


def _times(found: Benchmark) -> Table:
    words = ("ms", "quartiles", "over original", "its quartiles", "of fastest")
    heads = (Column("inputs"), Column("provider"), Column("model", "name"), *map(Column, words))
    title = f"Time of one run: median of {found.options['repeat']} rounds; ratios within a round"
    return Table(title, (*heads, Column("tokens/s", "count")), tuple(map(_time, found.times)), sortable=False)


def _time(row: TimeRow) -> Row:
    over = row.over_original
    ratios = (f"{over.paired:.3f}", f"{over.low:.3f} to {over.high:.3f}", f"{over.of_fastest:.3f}") if over else ()
    rate = None if row.tokens_per_second is None else round(row.tokens_per_second)
    times = (f"{row.milliseconds:.3f}", f"{row.low:.3f} to {row.high:.3f}")
    return (row.inputs, row.provider, row.model, *times, *(ratios or (None, None, None)), rate)


def _models(found: Benchmark) -> Table:
    heads = (Column("model", "name"), Column("provider"), Column("load s", "ratio"), Column("peak memory MB", "count"))
    rows = (
        (row.model, row.provider, row.load_seconds, None if row.peak_mb is None else round(row.peak_mb))
        for row in found.models
    )
    return Table("Loading, and memory beyond that of the empty process", heads, tuple(rows), sortable=False)


def _verdict(found: Benchmark) -> str:
    """The last line, without its first word."""

    def over(name: str) -> str:
        values = [row.over_original.paired for row in found.times if row.model == name and row.over_original]
        low, high = f"{min(values):.2f}", f"{max(values):.2f}"
        return low if low == high else f"{low} to {high}"

    parts = [f"{name} takes {over(name)} times as long as {found.original}" for name in found.others]
    return f"{'; '.join(parts)} (control {over(found.control)}), in {found.seconds['total']:.1f} s"
