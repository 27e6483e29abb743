"""Tables and lines for the terminal. Names from a model are plain text, never markup or control characters."""

from __future__ import annotations

import rich.box
import rich.table
from rich.text import Text

from rewriter.report.table import Cell, Kind, Table
from rewriter.text import clean

_FORMATS = {"count": ",", "change": "+,", "error": ".1e", "ratio": ".2f", "share": ".1f", "agreement": ".2f"}
_LARGE_RATIO = 1e4
_LONGEST = 600
"""Characters of a line, or of a line of a cell."""
_COLOURS = {"good": "green", "bad": "red"}


def drawn(table: Table) -> rich.table.Table:
    """A table in characters."""
    made = rich.table.Table(
        title=table.title, box=rich.box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False
    )
    for column in table.columns:
        made.add_column(column.name, justify="right" if column.numeric else "left", overflow="fold")
    for place, row in enumerate((*table.rows, *table.totals), start=1):
        cells = (_cell(value, column.kind) for value, column in zip(row, table.columns, strict=True))
        made.add_row(*cells, end_section=place == len(table.rows))
    return made


def _cell(value: Cell | str | float | None, kind: Kind) -> Text:
    cell = value if isinstance(value, Cell) else Cell(value)
    lines = (cell.text or written(cell.value, kind)).split("\n")
    return Text("\n").join(plain(line, _COLOURS.get(cell.style, cell.style)) for line in lines)


def written(value: str | float | None, kind: Kind) -> str:
    """A value; a dash where there is none."""
    if value is None or isinstance(value, str):
        return "-" if value is None else value
    if kind in ("share", "agreement"):
        return f"{100 * value:{_FORMATS[kind]}} %"
    if kind == "error" and value == 0.0:
        return "0"
    if kind == "ratio" and abs(value) >= _LARGE_RATIO:
        return f"{value:.1e}"
    return f"{value:{_FORMATS[kind]}}"


def plain(text: str, style: str = "") -> Text:
    """Text without markup; a long one keeps its start and its end, because a name may have megabytes."""
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]}…{text[-_LONGEST // 2 :]}"
    return Text(clean(text), style=style)
