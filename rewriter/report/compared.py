"""A comparison in tables and lines, for the terminal and as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from rewriter.compare.graphs import GraphDifference
from rewriter.proof.validate import Validation
from rewriter.report.comparison import Comparison
from rewriter.report.sections import proved, skipped
from rewriter.report.tables import Cell, Table, columns, operator_table, region_table, rule_table, written
from rewriter.text import clean, shortened

_MAX_ROWS = 12
"""Rows of a table, unless all are to be shown."""
_MAX_LENGTH = 60
"""Characters of an entry of a file."""
_SHOWN_NODES = 8
_PLAIN = re.compile(r"[^A-Za-z0-9\s.,:;()+=/'^%-]")


def compared(found: Comparison, *, verbose: bool = False) -> Iterator[tuple[str | Table, str]]:
    """The parts of a comparison but for its verdict and problems, each with a style."""
    if found.files is not None:
        yield from _files(found.files, verbose=verbose)
    if found.proof is not None:
        yield from _proof(found, found.proof, verbose=verbose)
    for note in found.notes:
        yield f"note: {note}", "yellow"


def _proof(found: Comparison, proof: Validation, *, verbose: bool) -> Iterator[tuple[str | Table, str]]:
    certificate = proof.certificate
    if verbose and certificate is not None:
        yield region_table(certificate), ""
    if proof.providers:
        yield rule_table(proof, tolerated=found.tolerance is not None), ""
        yield f"inputs: {'; '.join(proof.cases)}", ""
    if certificate is not None:
        yield f"proved: {proved(certificate)}", ""
        for line in () if certificate.departure is None else certificate.departure.lines():
            yield line, "yellow"
    for text in (
        *(each for each in proof.unproved if each not in found.undecided),
        *skipped(proof, verbose=verbose),
    ):
        yield text, "yellow"
    for provider, each in proof.providers.items():
        if each.cpu_nodes:
            yield f"on {provider}, ran on the CPU: {', '.join(each.cpu_nodes[:_SHOWN_NODES])}", "yellow"


def _files(found: GraphDifference, *, verbose: bool) -> Iterator[tuple[str | Table, str]]:
    def short(text: str | None) -> str | None:
        return text and shortened(text, _MAX_LENGTH)

    before, after = ({name: counts[side] for name, counts in found.operators.items()} for side in (0, 1))
    operators = operator_table(before, after)
    fields = [(each.what, each.name, short(each.a), short(each.b)) for each in (*found.fields, *found.remarks)]
    weights = [(each.name, each.a, each.b, each.how or None) for each in found.tensors]
    for table in (
        Table("Models", columns("text", "", "", "A", "B"), tuple(fields)),
        replace(operators, title="Operators whose number differs: before in A, after in B"),
        Table("Weights that differ", columns("text", "", "A", "B", "differ in"), tuple(weights)),
    ):
        most = None if verbose or table.title == "Models" else _MAX_ROWS
        if table.rows:
            yield replace(table, rows=table.rows[:most]), ""
        if len(table.rows) > len(table.rows[:most]):
            yield f"and {len(table.rows) - _MAX_ROWS:,} more, -v shows them", "yellow"
    yield f"the same in both: {found.same_tensors:,} weights bit for bit", ""


def markdown(summary: str, problems: Sequence[str], parts: Iterable[str | Table]) -> Iterator[str]:
    """Lines of Markdown: the verdict, what differs, and the rest folded away."""
    yield from (f"**{_escaped(summary)}**", "", *(f"- {_escaped(each)}" for each in problems), "")
    yield from ("<details><summary>Details</summary>", "")
    listed = False
    for part in parts:
        if isinstance(part, str):
            yield from ([] if listed else [""])
            yield f"- {_escaped(part)}"
        else:
            heads = (_escaped(column.name) for column in part.columns)
            yield from (
                "",
                f"{_escaped(part.title)}:",
                "",
                f"| {' | '.join(heads)} |",
                "| --- " * len(part.columns) + "|",
            )
            for row in part.rows:
                cells = (each if isinstance(each, Cell) else Cell(each) for each in row)
                texts = (
                    each.text or written(each.value, column.kind)
                    for each, column in zip(cells, part.columns, strict=True)
                )
                yield f"| {' | '.join(map(_escaped, texts))} |"
        listed = isinstance(part, str)
    yield from ("", "</details>")


def _escaped(text: str) -> str:
    """Text that means nothing in Markdown: names come from models."""
    return _PLAIN.sub(lambda match: f"&#{ord(match[0])};", " ".join(clean(text).split()))
