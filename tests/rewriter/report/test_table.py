"""One table, written by the terminal and by the page."""

from __future__ import annotations

import math

import pytest
import rich.console

from rewriter.report.html.page import Shown, shown
from rewriter.report.table import Cell, Column, Kind, Table, columns
from rewriter.report.tables import operator_table
from rewriter.report.terminal.layout import drawn, written

TABLE = Table(
    "Sizes", (*columns("name", "block"), *columns("count", "heads", "keys")), (("a", 8, None), ("b", 1, None))
)


def test_columns_are_picked_in_order() -> None:
    picked = TABLE.pick("heads", "block")
    assert [column.name for column in picked.columns] == ["heads", "block"]
    assert picked.rows == ((8, "a"), (1, "b"))


def test_columns_without_values_are_left_out() -> None:
    assert [column.name for column in TABLE.filled().columns] == ["block", "heads"]
    assert TABLE.filled().rows == (("a", 8), ("b", 1))


def test_operators_that_changed_the_most_come_first() -> None:
    table = operator_table({"Mul": 2, "Add": 3, "Erf": 1}, {"Mul": 2, "Add": 1, "Softmax": 1})
    assert table.rows == (("Add", 3, 1, -2), ("Erf", 1, 0, -1), ("Softmax", 0, 1, 1))


@pytest.mark.parametrize(
    ("value", "kind", "terminal", "page"),
    [
        (None, "error", "-", Shown("–", -1.0)),
        (0.0, "error", "0", Shown("0", 0.0)),
        (3.14e-7, "error", "3.1e-07", Shown("3.1\u202f×\u202f10⁻⁷", 3.14e-7)),
        (math.inf, "error", "inf", Shown("∞", math.inf)),
        (1.234, "ratio", "1.23", Shown("1.23", 1.234)),
        (1024, "count", "1,024", Shown("1,024", 1024.0)),
        (-3, "change", "-3", Shown("−3", -3.0)),
        (0.5, "share", "50.0 %", Shown("50.0\u202f%", 0.5)),
        (0.99996, "agreement", "100.00 %", Shown("100.0\u202f%", 0.99996)),
        ("MatMul 4x8 -> 8x4", "operators", "MatMul 4x8 -> 8x4", Shown("MatMul 4×8 → 8×4")),
        ("h\x1b[31m", "name", "h\x1b[31m", Shown("h\N{REPLACEMENT CHARACTER}[31m", style="name")),
    ],
)
def test_values(value: str | float | None, kind: Kind, terminal: str, page: Shown) -> None:
    assert written(value, kind) == terminal
    assert shown(value, Column("x", kind)) == page


def test_a_cell_with_words_of_its_own() -> None:
    cell = Cell(0.0, "exact", "good")
    assert shown(cell, Column("x", "error")) == Shown("exact", 0.0, "good")


def test_the_terminal_shows_names_as_they_are() -> None:
    console = rich.console.Console(width=60)
    with console.capture() as taken:
        console.print(drawn(Table("Blocks", columns("name", "block"), (("[red]a\x1b[31m",),), totals=(("all",),))))
    assert "[red]a\N{REPLACEMENT CHARACTER}[31m" in taken.get()
    assert "\x1b" not in taken.get()
