"""How all tables look.

Comes in: titles and names of columns. Goes out: empty rich tables.
"""

from __future__ import annotations

import rich.box
from rich.table import Table


def new_table(title: str) -> Table:
    """An empty table."""
    return Table(title=title, box=rich.box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)


def add_columns(table: Table, *, text: tuple[str, ...] = (), numbers: tuple[str, ...] = ()) -> None:
    """Add columns of text, then columns of numbers."""
    for name in text:
        table.add_column(name, overflow="fold", ratio=None)
    for name in numbers:
        table.add_column(name, justify="right", overflow="fold")
