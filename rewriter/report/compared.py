"""Results about given models, comparisons and certificates, as tables and lines with their styles, and as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from rewriter.compare.graphs import GraphDifference
from rewriter.proof.records import Certificate
from rewriter.proof.validate import Validation
from rewriter.report.comparison import Certification, Comparison, RuntimeCertification
from rewriter.report.report import loud
from rewriter.report.sections import proved, skipped
from rewriter.report.tables import Table, columns, operator_table, region_table, rule_table, texts
from rewriter.text import clean, first_of, shortened

_MAX_ROWS = 12  # rows of a table, unless all are to be shown
_MAX_LENGTH = 60  # characters of an entry of a file
_PLAIN = re.compile(r"[^A-Za-z0-9\s.,:;()+=/'^%-]")
Parts = Iterator[tuple[str | Table, str]]  # tables and lines, each with a style


def compared(found: Comparison, *, verbose: bool = False) -> Parts:
    """A comparison but for its verdict and problems."""
    if found.files is not None:
        yield from _files(found.files, verbose=verbose)
    if found.proof is not None:
        yield from _proof(found, found.proof, verbose=verbose)
    for note in found.notes:
        yield f"note: {note}", "yellow"


def certified(found: Certification) -> Parts:
    """A certificate of two models."""
    certificate = found.certificate
    if found.wrong is None:
        if certificate.regions:
            yield region_table(certificate), ""
        if certificate.certified:
            yield f"assumed: {'; '.join(certificate.assumed)}", ""
            yield f"not claimed: {'; '.join(certificate.not_claimed)}", ""
        yield from _certificate(certificate)


def at_levels(found: RuntimeCertification) -> Parts:
    """The certificates of the files of onnxruntime."""
    for each in found.levels:
        yield f"level {each.level}: {loud(each.verdict)}, {found.nodes:,} -> {each.nodes:,} nodes", ""
        yield from _certificate(each.certificate)


def _certificate(certificate: Certificate) -> Parts:
    if certificate.certified:
        yield f"proved: {proved(certificate)}", ""
    for note in certificate.notes:
        yield f"note: {note}", "yellow"
    yield from _departure(certificate)


def _departure(certificate: Certificate) -> Parts:
    for line in () if certificate.departure is None else certificate.departure.lines():
        yield line, "yellow"


def _proof(found: Comparison, proof: Validation, *, verbose: bool) -> Parts:
    certificate = proof.certificate
    if verbose and certificate is not None:
        yield region_table(certificate), ""
    if proof.providers:
        yield rule_table(proof, tolerated=found.tolerance is not None), ""
        yield f"inputs: {'; '.join(proof.cases)}", ""
    if certificate is not None:
        yield f"proved: {proved(certificate)}", ""
        yield from _departure(certificate)
    unproved = (each for each in proof.unproved if each not in found.undecided)
    for text in (*unproved, *skipped(proof, verbose=verbose)):
        yield text, "yellow"
    for provider, each in proof.providers.items():
        if each.cpu_nodes:
            yield f"on {provider}, ran on the CPU: {first_of(each.cpu_nodes)}", "yellow"


def _files(found: GraphDifference, *, verbose: bool) -> Parts:
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
            yield from (*([] if listed else [""]), f"- {_escaped(part)}")
        else:
            yield from ("", f"{_escaped(part.title)}:", "")
            rows = [[column.name for column in part.columns], *texts(part)]
            lines = [f"| {' | '.join(map(_escaped, row))} |" for row in rows]
            yield from (lines[0], "| --- " * len(part.columns) + "|", *lines[1:])
        listed = isinstance(part, str)
    yield from ("", "</details>")


def _escaped(text: str) -> str:
    """Text that means nothing in Markdown: names come from models."""
    return _PLAIN.sub(lambda match: f"&#{ord(match[0])};", " ".join(clean(text).split()))
