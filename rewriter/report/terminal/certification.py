"""Print a certificate in the terminal: the activations, what is assumed, and the verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx

from rewriter.errors import ExitStatus
from rewriter.proof.certificate.certify import CertifiedRegion
from rewriter.report.certification import Certification, domain_of
from rewriter.report.folding import folded
from rewriter.report.table import Cell, Column, Row, Table
from rewriter.report.terminal.console import Console
from rewriter.report.terminal.layout import plain

_FEW = 3


def show_certification(console: Console, found: Certification) -> None:
    """Print everything about a certificate."""
    certificate = found.certificate
    if not console.quiet:
        if certificate.regions:
            console.print(_regions(certificate.regions))
        for what, sentences in (("assumed", certificate.assumed), ("not claimed", certificate.not_claimed)):
            if certificate.certified:
                console.print(plain(f"{what}: {'; '.join(sentences)}"))
    shown = found.problems if console.verbose else found.problems[:_FEW]
    for problem in shown:
        console.print(plain(problem, "red"))
    if len(found.problems) > len(shown):
        console.print(plain(f"and {len(found.problems) - len(shown)} more, -v shows them", "red"))
    style = "bold green" if certificate.certified else "bold red"
    first, _, rest = found.summary.partition(" ")
    console.print(plain(f"{first}  {rest}, in {certificate.seconds:.1f} s", style))


def _regions(regions: Sequence[CertifiedRegion]) -> Table:
    """Activations, those of one proof in one row."""
    alike: dict[tuple[str, bool, int], list[CertifiedRegion]] = {}
    for region in regions:
        alike.setdefault((region.bound.key, region.linear_in is not None, region.elem_type), []).append(region)
    heads = (
        *(Column("activation", "name"), Column("type"), Column("within", "error")),
        *(Column("at least", "error"), Column("at y"), Column("|y| up to")),
    )
    title = "Activations computed otherwise: |f_B - f_A| / max(1, |f_A|), over the reals"
    return Table(title, heads, tuple(_row(group) for group in alike.values()), sortable=False)


def _row(group: Sequence[CertifiedRegion]) -> Row:
    first = group[0]
    bound = first.bound
    names = folded(region.original for region in group)
    known = (None, None) if bound.exact or bound.at is None else (bound.at_least, f"{bound.at:.6g}")
    within = Cell(0.0, "exact") if bound.exact or bound.bound == 0.0 else bound.bound
    kind = onnx.TensorProto.DataType.Name(first.elem_type).lower()
    return (names, kind if first.linear_in is None else f"{kind}, a gate", within, *known, domain_of(first))


def show_check(console: Console, found: Certification, stated: Mapping[str, Any]) -> ExitStatus:
    """Print whether a stated certificate is what was computed from the files, and how it differs."""
    differences = [*found.differences(stated), *(found.problems[:_FEW] if not found.certificate.certified else ())]
    for difference in differences:
        console.print(plain(difference, "red"))
    pair = f"{found.rewritten.path} against {found.original.path}"
    if differences:
        console.print(plain(f"DOES NOT HOLD  the certificate of {pair}", "bold red"))
        return ExitStatus.VALIDATION_FAILED
    console.print(plain(f"HOLDS  the certificate of {pair}: {found.accuracy}", "bold green"))
    return ExitStatus.CONVERTED
