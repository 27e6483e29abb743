"""One table, written by the terminal and by the page, and the lines of a long run that nobody watches."""

import io
import math

import pytest
import rich.console

from rewriter.report.html import shown
from rewriter.report.sections import Cell, Column, Kind, Table, written
from rewriter.report.terminal import drawn
from rewriter.report.terminal import shown as progress
from tests.counting import Clock


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (None, "error", "-"),
        (0.0, "error", "0"),
        (3.14e-7, "error", "3.1e-07"),
        (math.inf, "error", "inf"),
        (1.234, "ratio", "1.23"),
        (1024, "count", "1,024"),
        (-3, "change", "-3"),
    ],
)
def test_numbers(value: float | None, kind: Kind, text: str) -> None:
    assert written(value, kind) == text
    (row,) = Table.of("Numbers", f"name, x:{kind}", [("a", value), ("b", 1.0)]).rows[:1]
    assert shown(row[1], Column("x", kind)) == Cell(-1.0 if value is None else value, text)


def test_words_on_the_page() -> None:
    assert shown(Cell("MatMul 4x8 -> 8x4"), Column("x", "operators")) == Cell(None, "MatMul 4×8 → 8×4")
    assert shown(Cell("h\x1b[31m"), Column("x", "name")) == Cell(None, "h\N{REPLACEMENT CHARACTER}[31m", "name")


def test_a_cell_with_words_of_its_own() -> None:
    cell = Cell(0.0, "exact", "good")
    assert shown(cell, Column("x", "error")) == Cell(0.0, "exact", "good")


def test_the_terminal_shows_names_as_they_are() -> None:
    console = rich.console.Console(width=60)
    with console.capture() as taken:
        console.print(drawn(Table.of("Blocks", "block:name", [("[red]a\x1b[31m",)])))
    assert "[red]a\N{REPLACEMENT CHARACTER}[31m" in taken.get()
    assert "\x1b" not in taken.get()


def test_lines_off_a_terminal() -> None:
    clock, out = Clock(), io.StringIO()
    console = rich.console.Console(file=out, width=40)
    with progress(console, clock) as show:
        show("loading", 0, 1)
        show("running the original", 0, 1000)
        clock.now += 9.0
        show("running the original", 100, 1000)
        clock.now += 6.0
        show("proving a block with a name that is longer than the line", 250, 1000)
        clock.now += 5.0
        show("proving", 300, 1000)
    assert out.getvalue().splitlines() == ["25%, proving a block with a name that is longer than the line"]
