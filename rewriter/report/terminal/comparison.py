"""Print results about given models: a comparison, a certificate, a benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isfinite

from rewriter.compare.graphs import GraphDifference
from rewriter.compare.parts import Part
from rewriter.proof.validate import Validation
from rewriter.report.certification import Certification
from rewriter.report.comparison import Comparison
from rewriter.report.sections import proved, skipped, tested
from rewriter.report.tables import (
    Cell,
    Column,
    Row,
    Table,
    columns,
    operator_table,
    region_table,
    rule_table,
    tests_table,
)
from rewriter.report.terminal.console import Console
from rewriter.text import shortened

_MAX_ROWS = 12  # of a table, unless verbose
_MAX_METADATA_LENGTH = 60
_SHOWN_NODES = 8
_STYLES = {"same": "bold green", "agrees": "bold yellow", "not proved": "bold red", "different": "bold red"}


def show_comparison(console: Console, found: Comparison) -> None:
    """Print everything about a comparison."""
    if found.files is not None:
        _show_graphs(console, found.files)
    if found.proof is not None:
        _show_proof(console, found, found.proof)
    if found.faults:
        console.part(_guilty_table(found.faults))
    for note in found.notes:
        console.line(f"note: {note}", "yellow")
    console.failures(found.problems if found.proof or found.signature else ())  # for graphs the last line is enough
    console.line(f"{found.summary}, in {found.seconds['total']:.1f} s", _STYLES[found.verdict])


def _show_proof(console: Console, found: Comparison, proof: Validation) -> None:
    if console.verbose and proof.certificate is not None:
        console.part(region_table(proof.certificate))
    if proof.blocks:
        console.part(tests_table(proof.blocks))
    if proof.providers:
        console.part(rule_table(proof, tolerated=found.tolerance is not None))
        console.line(f"inputs: {'; '.join(proof.cases)}")
    if proof.certificate is not None:
        console.line(f"proved: {proved(proof.certificate)}")
    if proof.blocks:
        console.line(f"tested: {tested(proof)}")
    for text in (
        *(each for each in proof.unproved if each not in found.undecided),
        *skipped(proof, verbose=console.verbose),
    ):
        console.line(text, "yellow")
    for provider, each in proof.providers.items():
        if each.cpu_nodes:
            console.line(f"on {provider}, ran on the CPU: {', '.join(each.cpu_nodes[:_SHOWN_NODES])}", "yellow")


def _guilty_table(faults: Sequence[Part]) -> Table:
    heads = (*columns("text", "part", "up to"), *columns("error", "error", "allowed"), Column("what differs there"))
    rows: list[Row] = []
    for fault in faults:
        found = fault.found
        errors = (found.error, found.allowed) if isfinite(found.error) else (None, None)
        rows.append((Cell(fault.label, style="bad"), found.name, *errors, "; ".join(fault.causes)))
    return Table("Guilty parts of B, each fed with what A computes", heads, tuple(rows))


def _show_graphs(console: Console, found: GraphDifference) -> None:
    def short(text: str | None) -> str | None:
        return text and shortened(text, _MAX_METADATA_LENGTH)

    before, after = ({name: counts[side] for name, counts in found.operators.items()} for side in (0, 1))
    operators = operator_table(before, after)
    fields = [(each.what, each.name, short(each.a), short(each.b)) for each in (*found.fields, *found.remarks)]
    nodes = [(each.a, each.b, each.how or None) for each in found.regions]
    weights = [(each.name, each.a, each.b, each.how or None) for each in found.tensors]
    for table in (
        Table("Models", columns("text", "", "", "A", "B"), tuple(fields)),
        replace(operators, title="Operators whose number differs: before in A, after in B"),
        Table("Nodes that differ", columns("text", "A", "B", "differ in"), tuple(nodes)),
        Table("Weights that differ", columns("text", "", "A", "B", "differ in"), tuple(weights)),
    ):
        most = None if console.verbose or table.title == "Models" else _MAX_ROWS
        if table.rows:
            console.part(replace(table, rows=table.rows[:most]))
        if len(table.rows) > len(table.rows[:most]):
            console.line(f"and {len(table.rows) - _MAX_ROWS:,} more, -v shows them", "yellow")
    console.line(
        f"the same in both: {found.same_nodes:,} nodes, {found.same_tensors:,} weights bit for bit"
        f"{'; only remarks differ' if found.same and found.remarks else ''}"
    )


def show_certification(console: Console, found: Certification) -> None:
    """Print everything about a certificate."""
    certificate = found.certificate
    if found.wrong is None and certificate.regions:
        console.part(region_table(certificate))
    for what, sentences in (("assumed", certificate.assumed), ("not claimed", certificate.not_claimed)):
        if found.wrong is None and certificate.certified:
            console.line(f"{what}: {'; '.join(sentences)}")
    console.failures(found.problems, "in the JSON of -o")
    console.line(f"{found.summary}, in {certificate.seconds:.1f} s", "bold green" if found else "bold red")
