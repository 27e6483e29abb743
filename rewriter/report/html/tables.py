"""The tables of the page, as data: text, and numbers to sort by.

The template turns them into HTML and escapes all text. Characters that could change the layout or the writing direction
of the page are replaced here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rewriter.proof.blocks.block import BlockProof
from rewriter.proof.validate import Validation
from rewriter.report.details import Details, DrawnHead
from rewriter.report.html import numbers
from rewriter.report.html.words import short
from rewriter.report.report import BlockRow, Shape

_LONGEST_REASON = 400
_TIMES = re.compile(r"(?<=\d)x(?=\d)")


@dataclass(frozen=True)
class Cell:
    """One cell: its text, its sort key (None sorts by the text), and its CSS class."""

    text: str
    sort: float | None = None
    style: str = ""


@dataclass(frozen=True)
class Column:
    """One column: its heading, and whether it contains numbers."""

    label: str
    numeric: bool = False


@dataclass(frozen=True)
class Table:
    """Rows under headings; the first cell of a row names it.

    Attributes:
        caption: the caption.
        columns: the columns.
        rows: the rows, with one cell per column.
        sortable: whether readers may sort the rows, because their order carries no meaning.
    """

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    sortable: bool = True


def name(text: str) -> Cell:
    """A name from the model, made printable and shortened."""
    return Cell(short(text), style="name")


def text(content: str, style: str = "") -> Cell:
    """Other text, made printable and shortened."""
    return Cell(short(content), style=style)


def integer(value: int | None) -> Cell:
    """A count."""
    return Cell(numbers.count(value), -1.0 if value is None else float(value))


def error(value: float | None, style: str = "") -> Cell:
    """An error or another number of any size."""
    return Cell(numbers.small(value), -1.0 if value is None else value, style)


def block_table(rows: Sequence[BlockRow], proofs: Mapping[str, BlockProof], numbered: Mapping[str, int]) -> Table:
    """The converted blocks, each with its proof."""
    columns = [Column("block")]
    columns += [Column("no.", numeric=True)] if numbered else []
    columns += [Column("linear operators"), Column("activation"), Column("program")]
    columns += [Column(label, numeric=True) for label in ("heads", "bias tokens", "certified error")]
    if proofs:
        columns += [Column("proof"), Column("block error", numeric=True), Column("over original", numeric=True)]
    cells = []
    for row in rows:
        line = [name(row.name)]
        line += [integer(numbered.get(row.name))] if numbered else []
        line += [text(_operators(row)), text(row.activation), text(row.program or "", "name")]
        line += [integer(row.heads), integer(row.bias_tokens), _certified(row)]
        if proofs:
            line += _proved(proofs.get(row.name))
        cells.append(tuple(line))
    return _without_empty(Table("Blocks that became attention heads", tuple(columns), tuple(cells)))


def left_tables(rows: Sequence[BlockRow]) -> list[tuple[str, Table]]:
    """The candidates that were not converted, by reason, the most frequent reason first."""
    groups: dict[str, list[BlockRow]] = {}
    for row in rows:
        groups.setdefault(short(row.reason or "no reason was recorded", _LONGEST_REASON), []).append(row)
    columns = tuple(map(Column, ("block", "activation", "linear operators", "where")))
    return [
        (
            reason,
            Table(
                f"Left: {reason}",
                columns,
                tuple(
                    (name(row.name), text(row.activation or "unknown"), text(_operators(row)), name(row.node or ""))
                    for row in group
                ),
            ),
        )
        for reason, group in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    ]


def output_table(validation: Validation) -> Table:
    """Rewritten against original, output by output."""
    columns = [Column("output"), Column("provider")]
    labels = ("elements", "largest difference", "mean", "99 % below", "largest relative", "1 − cosine", "top-1", "KL")
    columns += [Column(label, numeric=True) for label in (*labels, "passes at atol = rtol")]
    rows = []
    for provider, proof in validation.providers.items():
        for key, stats in proof.outputs.items():
            errors = (stats.max_abs, stats.mean_abs, stats.p99_abs, stats.max_rel)
            cosine = None if stats.cosine is None else max(1.0 - stats.cosine, 0.0)
            ranked = stats.top1 is not None and any(word in key.lower() for word in ("logit", "score", "prob"))
            top1 = Cell(numbers.percent(stats.top1), stats.top1) if ranked and stats.top1 is not None else error(None)
            line = [name(key), text(provider), integer(stats.elements), *map(error, errors)]
            line += [error(cosine), top1, error(stats.kl if ranked else None), error(stats.min_tolerance)]
            rows.append(tuple(line))
    return _without_empty(Table("Rewritten against original, output by output", tuple(columns), tuple(rows)))


def provider_table(validation: Validation) -> Table:
    """One line per execution provider."""
    labels = ("error over original's", "load, original", "load, rewritten")
    columns = (Column("provider"), Column("result"), *(Column(label, numeric=True) for label in labels))
    rows = tuple(
        (
            text(provider),
            Cell("held", style="good") if not proof.failures else Cell(f"{len(proof.failures)} failed", style="bad"),
            Cell(numbers.small(proof.error_ratio, 3), -1.0 if proof.error_ratio is None else proof.error_ratio),
            *(Cell(numbers.seconds(value), value) for value in proof.load_seconds),
        )
        for provider, proof in validation.providers.items()
    )
    return Table("Execution providers", columns, rows)


def operator_table(before: Shape, after: Shape) -> Table:
    """Operators whose number changed, the largest changes first."""
    names = sorted(set(before.operators) | set(after.operators))
    counts = [(each, before.operators.get(each, 0), after.operators.get(each, 0)) for each in names]
    changed = sorted((row for row in counts if row[1] != row[2]), key=lambda row: (-abs(row[2] - row[1]), row[0]))
    rows = [(name(each), integer(old), integer(new), _change(old, new)) for each, old, new in changed]
    columns = (Column("operator"), *(Column(label, numeric=True) for label in ("before", "after", "change")))
    return Table("Operators whose number changed", columns, tuple(rows))


def account_table(details: Details) -> Table:
    """The sizes of the blocks and their heads."""
    labels = ("d_model", "d_ff", "parameters", "share of multiply-adds", "heads", "as three sublayers")
    rows = []
    for each in details.counts:
        staged = numbers.NOTHING if each.staged is None else " + ".join(f"{count:,}" for count in each.staged)
        weight = (integer(each.d_model), integer(each.d_ff), integer(each.parameters))
        share = Cell(numbers.percent(each.share), each.share)
        total = -1.0 if each.staged is None else float(sum(each.staged))
        rows.append((name(each.name), *weight, share, integer(each.heads), Cell(staged, total)))
    columns = (Column("block"), *(Column(label, numeric=True) for label in labels))
    return Table("Head accounting, block by block", columns, tuple(rows))


def key_table(head: DrawnHead, program: str) -> Table:
    """The coefficients of one head."""
    columns = (Column("key"), *(Column(label, numeric=True) for label in ("y²", "y", "1")), Column("value"))
    rows = [
        (text(key.label), *(Cell(numbers.small(part, 9), part) for part in key.logit), text(key.value))
        for key in head.keys
    ]
    return Table(f"Logits of {short(program)}, by powers of y, and values", columns, tuple(rows), sortable=False)


def pair_table(caption: str, label: str, value: str, pairs: Mapping[str, str]) -> Table:
    """Two columns of our own text."""
    rows = tuple((Cell(key), Cell(entry)) for key, entry in pairs.items())
    return Table(caption, (Column(label), Column(value)), rows, sortable=False)


def _operators(row: BlockRow) -> str:
    """`MatMul 32×128 → 128×32` where both operators are of one kind, else both in full."""
    kind, _, size = row.first.partition(" ")
    other, _, second = row.second.partition(" ")
    both = (row.first, second if kind == other and size and second else row.second)
    return _TIMES.sub("×", " → ".join(part for part in both if part)) or numbers.NOTHING


def _without_empty(table: Table) -> Table:
    """The table without numeric columns that are empty."""
    kept = [
        place
        for place, column in enumerate(table.columns)
        if not column.numeric or any(row[place].text != numbers.NOTHING for row in table.rows)
    ]
    rows = tuple(tuple(row[place] for place in kept) for row in table.rows)
    return replace(table, columns=tuple(table.columns[place] for place in kept), rows=rows)


def _certified(row: BlockRow) -> Cell:
    return Cell("exact", 0.0) if row.exact and not row.max_error else error(row.max_error)


def _proved(proof: BlockProof | None) -> list[Cell]:
    if proof is None:
        return [Cell(numbers.NOTHING), error(None), error(None)]
    verdict = Cell("held", style="good") if proof.passed else Cell("failed", style="bad")
    return [verdict, error(proof.block_error), error(proof.block_ratio)]


def _change(old: int, new: int) -> Cell:
    return Cell(numbers.change(new - old), float(new - old))
