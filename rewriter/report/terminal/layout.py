"""The common layout of all tables."""

from __future__ import annotations

import rich.box
from rich.table import Table
from rich.text import Text

from rewriter.text import clean


def new_table(title: str) -> Table:
    """An empty table."""
    return Table(title=title, box=rich.box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)


def add_columns(table: Table, *, text: tuple[str, ...] = (), numbers: tuple[str, ...] = ()) -> None:
    """Add columns of text, then columns of numbers."""
    for name in text:
        table.add_column(name, overflow="fold", ratio=None)
    for name in numbers:
        table.add_column(name, justify="right", overflow="fold")


def plain(text: str, style: str = "") -> Text:
    """Text without markup."""
    return Text(clean(text), style=style)


def count(number: int | None) -> str:
    """A number with separated thousands; `?` if it is unknown."""
    return "?" if number is None else f"{number:,}"


def size(nbytes: int) -> str:
    """A size in bytes, in a suitable unit."""
    amount = float(nbytes)
    for unit in ("B", "kB", "MB"):
        if amount < 1000:
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.2f} GB"
