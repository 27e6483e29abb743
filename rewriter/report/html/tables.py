"""The tables of the page, and how it writes their values.

The template escapes every text; characters that could change the page's layout or direction are replaced here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rewriter.proof.end_to_end import ProviderProof
from rewriter.proof.validate import Validation
from rewriter.report.details import Key
from rewriter.report.html import numbers
from rewriter.report.html.rendering import short
from rewriter.report.report import BlockRow
from rewriter.report.table import Cell, Column, Kind, Row, Table, columns
from rewriter.report.tables import operators, proof_table

_LONGEST_REASON = 400
_TIMES = re.compile(r"(?<=\d)x(?=\d)")


@dataclass(frozen=True)
class Shown:
    """One cell as it stands on the page: its text, what to sort it by (the text, where None), and a class."""

    text: str
    sort: float | None = None
    style: str = ""


def shown(value: Cell | str | float | None, column: Column) -> Shown:
    """A cell."""
    cell = value if isinstance(value, Cell) else Cell(value)
    if not column.numeric:
        text = cell.text or short(str(cell.value or numbers.NOTHING))
        if column.kind == "operators":
            text = _TIMES.sub("×", text).replace(" -> ", " → ")
        return Shown(text, style=cell.style or ("name" if column.kind == "name" else ""))
    number = None if cell.value is None else float(cell.value)
    return Shown(cell.text or _written(number, column.kind), -1.0 if number is None else number, cell.style)


def _written(value: float | None, kind: Kind) -> str:
    if value is None or kind in ("error", "ratio"):
        return numbers.small(value, 3 if kind == "ratio" else 2)
    if kind in ("share", "agreement"):
        return numbers.percent(value)
    return numbers.change(int(value)) if kind == "change" else numbers.count(int(value))


def name(text: str) -> Shown:
    """A name from the model: printable, and no longer than a reader follows."""
    return Shown(short(text), style="name")


def left_tables(rows: Sequence[BlockRow]) -> list[tuple[str, Table]]:
    """The candidates that were not converted, by reason, the most frequent reason first."""
    groups: dict[str, list[BlockRow]] = {}
    for row in rows:
        groups.setdefault(short(row.reason or "no reason was recorded", _LONGEST_REASON), []).append(row)
    first, last = columns("name", "block", "where")
    heads = (first, Column("activation"), Column("linear operators", "operators"), last)
    return [
        (reason, Table(f"Left: {reason}", heads, tuple(map(_left, group))))
        for reason, group in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    ]


def _left(row: BlockRow) -> Row:
    return (row.name, row.activation or "unknown", operators(row), row.node)


def outputs(validation: Validation) -> Table:
    """Rewritten against original, output by output."""
    table = proof_table("Rewritten against original, output by output", validation)
    left_out = {"abs at", "mean rel", "p99 rel", "rel at"}
    return table.pick(*(each.name for each in table.columns if each.name not in left_out)).filled()


def provider_table(validation: Validation) -> Table:
    """One line per execution provider."""
    heads = (Column("provider"), Column("result"), Column("error over original's", "ratio"))
    return Table(
        "Execution providers",
        (*heads, *columns("count", "load, original", "load, rewritten")),
        tuple(_provider(provider, proof) for provider, proof in validation.providers.items()),
    )


def _provider(name: str, proof: ProviderProof) -> Row:
    failed = len(proof.failures)
    result = Cell(f"{failed} failed", style="bad") if failed else Cell("held", style="good")
    return (name, result, proof.error_ratio, *(Cell(value, numbers.seconds(value)) for value in proof.load_seconds))


def key_table(keys: Sequence[Key], program: str) -> Table:
    """The coefficients of one head."""
    heads = (Column("key"), *columns("error", "y²", "y", "1"), Column("value"))
    rows: list[Row] = [
        (key.label, *(Cell(part, numbers.small(part, 9)) for part in key.logit), key.value) for key in keys
    ]
    title = f"Logits of {short(program)}, by powers of y, and values"
    return Table(title, heads, tuple(rows), sortable=False)


def pair_table(title: str, label: str, value: str, pairs: Mapping[str, str]) -> Table:
    """Two columns of our own text."""
    rows = tuple((key, Cell(None, entry)) for key, entry in pairs.items())
    return Table(title, columns("text", label, value), rows, sortable=False)
