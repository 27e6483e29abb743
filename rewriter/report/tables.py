"""A table as data, built once and written by the terminal and by the page; the tables that both show."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import isfinite
from typing import Literal

from rewriter.proof.records import Certificate
from rewriter.proof.rule import Judgement
from rewriter.proof.validate import Validation
from rewriter.report.report import BlockRow, reach

_NUMBER = re.compile(r"(?<!\d)(0|[1-9]\d*)(?!\d)")  # not 01, whose zero would be lost in a range
_MAX_GROUPS = 3
_FORMATS = {"count": ",", "change": "+,", "error": ".1e", "ratio": ".2f", "share": ".1f"}
_LARGE_RATIO = 1e4
Kind = Literal["text", "name", "operators", "count", "change", "error", "ratio", "share"]
"""Formats of values. A name comes from a model; operators are those around an activation; a share is shown in per
cent."""


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


def columns(kind: Kind, *names: str) -> tuple[Column, ...]:
    """Columns of one kind."""
    return tuple(Column(name, kind) for name in names)


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
    if kind == "share":
        return f"{100 * value:{_FORMATS[kind]}} %"
    if kind == "error" and value == 0.0:
        return "0"
    if kind == "ratio" and abs(value) >= _LARGE_RATIO:
        return f"{value:.1e}"
    return f"{value:{_FORMATS[kind]}}"


def texts(table: Table) -> Iterator[list[str]]:
    """The cells of each row as text."""
    for row in table.rows:
        cells = (each if isinstance(each, Cell) else Cell(each) for each in row)
        yield [each.text or written(each.value, of.kind) for each, of in zip(cells, table.columns, strict=True)]


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


def converted_table(title: str, rows: Sequence[BlockRow]) -> Table:
    """The blocks that become heads."""
    heads = (
        *(Column("block", "name"), Column("linear operators", "operators"), Column("activation")),
        *(Column("program", "name"), *columns("count", "heads", "bias tokens"), Column("error at most", "error")),
        Column("for"),
    )

    def row(block: BlockRow) -> Row:
        error: Cell | float | None = Cell(0.0, "exact") if block.exact and not block.max_error else block.max_error
        if block.measured:
            error = Cell(block.max_error, f"{block.max_error:.1e} (measured)")
        where = None if block.domain is None else f"|y| <= {block.domain:g}"
        about = block.activation, block.program, block.heads, block.bias_tokens, error, where
        return (block.name, operators(block), *about)

    return Table(title, heads, tuple(map(row, rows))).filled()


def region_table(certificate: Certificate) -> Table:
    """The replaced activations, with their proof for every input; equal ones share a row."""
    alike: dict[Row, list[str]] = {}
    for each in certificate.regions:
        bound = each.bound
        proved = "equal, by algebra" if bound.exact else "bounded, by enclosure"
        where = "every y" if bound.domain is None else f"|y| <= {bound.domain:g}"
        least = None if bound.exact else bound.at_least
        alike.setdefault((each.nodes, proved, bound.bound, least, where), []).append(each.original)
    heads = (
        *(Column("activation", "name"), Column("nodes", "count"), Column("proved")),
        *(*columns("error", "error at most", "error at least"), Column("for")),
    )
    rows = tuple((folded(names), *row) for row, names in alike.items())
    return Table(f"Certified {reach(certificate)}", heads, rows).filled()


def operators(row: BlockRow) -> str:
    """`MatMul 32x128 -> 128x32` where both operators are of one kind, else both in full."""
    kind, _, size = row.first.partition(" ")
    other, _, second = row.second.partition(" ")
    both = (row.first, second if kind == other and size and second else row.second)
    return " -> ".join(part for part in both if part)


def rule_table(proof: Validation, *, tolerated: bool = False) -> Table:
    """The rule, output by output; providers are named if there are several."""
    errors = columns("error", "max abs", "error", "rounding", "allowed")
    heads = (Column("output", "name"), Column("provider"), *errors, *columns("text", "rule", "verdict"))

    def row(provider: str, each: Judgement) -> Row:
        verdict = Cell("agrees", style="good") if each.holds else Cell("differs", style="bad")
        if each.holds and each.proves_nothing and not tolerated:
            verdict = Cell("proves nothing")
        rule = "the tolerance given" if tolerated else "16 x rounding"
        shares = (each.error, each.rounding, each.allowed) if isfinite(each.error) else (None,) * 3
        return (each.name, provider if len(proof.providers) > 1 else None, each.max_abs, *shares, rule, verdict)

    title = "Errors as shares of the output's norm; with a tolerance, in its units"
    rows = tuple(row(name, each) for name, run in proof.providers.items() for each in run.compared.values())
    return Table(title, heads, rows).filled()


def operator_table(before: Mapping[str, int], after: Mapping[str, int]) -> Table:
    """Operators whose number changed, the largest changes first."""
    counts = [(name, before.get(name, 0), after.get(name, 0)) for name in {*before, *after}]
    changed = sorted((row for row in counts if row[1] != row[2]), key=lambda row: (-abs(row[2] - row[1]), row[0]))
    heads = (Column("operator", "name"), *columns("count", "before", "after"), Column("change", "change"))
    return Table("Operators whose number changed", heads, tuple((*row, row[2] - row[1]) for row in changed))
