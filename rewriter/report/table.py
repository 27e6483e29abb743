"""A table as data: built once, written by the terminal and by the page, each in its own way."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["text", "name", "operators", "count", "change", "error", "ratio", "share", "agreement"]
"""How values are written. A name is one from a model; operators are those around an activation; a share of 1 is written
in per cent, an agreement with two more digits."""


@dataclass(frozen=True)
class Cell:
    """A cell that is not written as its column is.

    Attributes:
        value: what it is sorted by.
        text: what is shown, our own words; empty for the value itself.
        style: `good`, `bad`, or a style of the terminal.
    """

    value: str | float | None
    text: str = ""
    style: str = ""


Row = tuple[Cell | str | float | None, ...]


@dataclass(frozen=True)
class Column:
    """One column: its heading, how its values are written, and the heading on the page where there is more room."""

    name: str
    kind: Kind = "text"
    page: str = ""

    @property
    def numeric(self) -> bool:
        """Whether it holds numbers."""
        return self.kind not in ("text", "name", "operators")


def columns(kind: Kind, *names: str) -> tuple[Column, ...]:
    """Columns of one kind."""
    return tuple(Column(name, kind) for name in names)


@dataclass(frozen=True)
class Table:
    """Rows under headings; the first cell of a row names it.

    Attributes:
        title: what the rows are.
        columns: headings.
        rows: values, as many per row as columns; None where there is none.
        totals: rows below a line.
        sortable: whether the order of the rows says nothing.
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    totals: tuple[Row, ...] = ()
    sortable: bool = True

    def pick(self, *names: str) -> Table:
        """The table with these columns only, in this order."""
        places = [place for name in names for place, column in enumerate(self.columns) if column.name == name]
        columns = tuple(self.columns[place] for place in places)
        return replace(self, columns=columns, rows=tuple(tuple(row[place] for place in places) for row in self.rows))

    def filled(self) -> Table:
        """The table without columns in which no row has a value."""
        used = (any(row[place] is not None for row in self.rows) for place in range(len(self.columns)))
        return self.pick(*(column.name for column, any_value in zip(self.columns, used, strict=True) if any_value))
