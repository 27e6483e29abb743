"""Print results about given models: a comparison, a certificate, a benchmark."""

from __future__ import annotations

from rewriter.proof.records import Certificate
from rewriter.report.certification import Certification, RuntimeCertification
from rewriter.report.compared import compared, markdown
from rewriter.report.comparison import Comparison
from rewriter.report.report import loud
from rewriter.report.sections import proved
from rewriter.report.tables import region_table
from rewriter.report.terminal.console import Console

_STYLES = {
    "certified": "bold green",
    "certified at the sizes tried": "bold green",
    "agrees": "bold yellow",
    "not proved": "bold red",
    "different": "bold red",
}


def show_comparison(console: Console, found: Comparison) -> None:
    """Print everything about a comparison."""
    for part, style in compared(found, verbose=console.verbose):
        if isinstance(part, str):
            console.line(part, style)
        else:
            console.part(part)
    console.failures(found.problems)
    console.line(f"{found.summary}, in {found.seconds['total']:.1f} s", _STYLES[found.verdict])


def show_markdown(console: Console, found: Comparison) -> None:
    """Print a comparison as Markdown."""
    for line in markdown(found.summary, found.problems, (part for part, _ in compared(found))):
        console.line(line)


def _show_proof(console: Console, certificate: Certificate) -> None:
    if certificate.certified:
        console.line(f"proved: {proved(certificate)}")
    for note in certificate.notes:
        console.line(f"note: {note}", "yellow")
    for line in () if certificate.departure is None else certificate.departure.lines():
        console.line(line, "yellow")


def show_certification(console: Console, found: Certification) -> None:
    """Print everything about a certificate."""
    certificate = found.certificate
    if found.wrong is None:
        if certificate.regions:
            console.part(region_table(certificate))
        if certificate.certified:
            console.line(f"assumed: {'; '.join(certificate.assumed)}")
            console.line(f"not claimed: {'; '.join(certificate.not_claimed)}")
        _show_proof(console, certificate)
    console.failures(found.problems, "in the JSON of -o")
    console.line(f"{found.summary}, in {certificate.seconds:.1f} s", "bold green" if found else "bold red")


def show_runtime(console: Console, found: RuntimeCertification) -> None:
    """Print what was proved about the files of onnxruntime."""
    for each in found.levels:
        console.line(f"level {each.level}: {loud(each.verdict)}, {found.nodes:,} -> {each.nodes:,} nodes")
        _show_proof(console, each.certificate)
    console.failures(found.problems)
    seconds = sum(each.certificate.seconds for each in found.levels)
    console.line(f"{found.summary}, in {seconds:.1f} s", "bold green" if found else "bold red")
