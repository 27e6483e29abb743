"""A table as data, built once and written by the terminal and by the page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal, cast

_NUMBER = re.compile(r"(?<!\d)(0|[1-9]\d*)(?!\d)")  # not 01, whose zero would be lost in a range
_MAX_GROUPS = 3
_FORMATS = {"count": ",", "change": "+,", "error": ".1e", "ratio": ".2f"}
_LARGE_RATIO = 1e4
Kind = Literal["text", "name", "operators", "count", "change", "error", "ratio"]
"""Formats of values. A name comes from a model; operators are those around an activation."""


@dataclass(frozen=True)
class Cell:
    """A cell that is shown as `text`, and sorted by its value; `style` is `good`, `bad`, or one of the terminal."""

    value: str | float | None
    text: str = ""
    style: str = ""


Row = tuple[Cell | str | float | None, ...]


@dataclass(frozen=True)
class Column:
    """One column: its heading, and how its values are written."""

    name: str
    kind: Kind = "text"

    @property
    def numeric(self) -> bool:
        return self.kind not in ("text", "name", "operators")


def columns(*headings: str) -> tuple[Column, ...]:
    """Columns of text, or of another kind as `heading:kind`."""
    parts = (heading.partition(":") for heading in headings)
    return tuple(Column(name, cast("Kind", kind or "text")) for name, _, kind in parts)


@dataclass(frozen=True)
class Table:
    """Rows under headings, None where a row has no value; the first cell of a row names it."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]

    def filled(self) -> Table:
        used = [place for place in range(len(self.columns)) if any(row[place] is not None for row in self.rows)]
        rows = tuple(tuple(row[place] for place in used) for row in self.rows)
        return replace(self, columns=tuple(self.columns[place] for place in used), rows=rows)


def written(value: str | float | None, kind: Kind) -> str:
    """A value as text; a dash for None."""
    if value is None or isinstance(value, str):
        return "-" if value is None else value
    if kind == "error" and value == 0.0:
        return "0"
    if kind == "ratio" and abs(value) >= _LARGE_RATIO:
        return f"{value:.1e}"
    return f"{value:{_FORMATS[kind]}}"


def cells(table: Table) -> Iterator[list[Cell]]:
    """The cells of each row, with their text."""
    for row in table.rows:
        given = (each if isinstance(each, Cell) else Cell(each) for each in row)
        pairs = zip(given, table.columns, strict=True)
        yield [replace(each, text=each.text or written(each.value, of.kind)) for each, of in pairs]


def folded(names: Iterable[str]) -> str:
    """The names, as a range if they differ in one number; of many others the first and how many more."""
    groups: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
    for name in names:
        pieces = _NUMBER.split(name)
        groups.setdefault(tuple(pieces[::2]), []).append(tuple(map(int, pieces[1::2])))
    found = [text for fixed, numbers in groups.items() for text in _group(fixed, numbers)]
    if len(found) <= _MAX_GROUPS:
        return ", ".join(found)
    return f"{', '.join(found[: _MAX_GROUPS - 1])} and {len(found) - _MAX_GROUPS + 1} more"


def _group(fixed: Sequence[str], numbers: Sequence[tuple[int, ...]]) -> list[str]:
    varying = [place for place in range(len(fixed) - 1) if len({each[place] for each in numbers}) > 1]
    if len(varying) > 1:  # a range of the first varying number would include names that do not exist
        first = varying[0]
        parts: dict[int, list[tuple[int, ...]]] = {}
        for each in numbers:
            parts.setdefault(each[first], []).append(each)
        return [text for part in parts.values() for text in _group(fixed, part)]
    texts = [str(number) for number in numbers[0]]
    for place in varying:
        texts[place] = "{" + _ranges(sorted({each[place] for each in numbers})) + "}"
    return ["".join(piece for pair in zip(fixed, [*texts, ""], strict=True) for piece in pair)]


def _ranges(numbers: Sequence[int]) -> str:
    consecutive = groupby(enumerate(numbers), lambda placed: placed[1] - placed[0])
    runs = [[number for _, number in run] for _, run in consecutive]
    return ",".join(f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)
