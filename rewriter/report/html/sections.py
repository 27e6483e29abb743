"""The contents of the page, section by section, as data for the template.

Long lists are truncated or folded here, so that the page of a model with a hundred blocks and thousands of candidates
opens at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from rewriter.proof.validate import Validation
from rewriter.report.details import ProgramDetails
from rewriter.report.html import numbers
from rewriter.report.html.rendering import short
from rewriter.report.html.tables import Shown, key_table, name
from rewriter.report.report import Report
from rewriter.report.table import Table
from rewriter.text import counted

MOST_PROGRAMS = 12


@dataclass(frozen=True)
class Fact:
    """One key figure: its label, the number, and a remark."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class ProgramSection:
    """One head program: its names, a summary, and its coefficients."""

    program: Shown
    activation: str
    summary: str
    tables: tuple[Table, ...]


def key_figures(report: Report) -> list[Fact]:
    """The numbers that matter most."""
    converted, candidates = len(report.converted), len(report.blocks)
    facts = []
    if candidates or report.validation is None:
        label = "blocks to convert" if converted and report.after is None else "blocks converted"
        facts.append(Fact(label, numbers.count(converted), f"of {counted(candidates, 'candidate')}"))
    if converted:
        heads = sum(row.heads or 0 for row in report.converted)
        tokens = sorted({row.bias_tokens for row in report.converted if row.bias_tokens})
        note = f"with {' or '.join(map(str, tokens))} bias token{'' if tokens == [1] else 's'} each" if tokens else ""
        facts.append(Fact("attention heads", numbers.count(heads), note))
    if report.validation is not None:
        facts += _proof_facts(report.validation)
    if report.after is not None:
        change = numbers.change(report.after.nodes - report.before.nodes)
        facts.append(Fact("nodes", numbers.count(report.after.nodes), f"{change} against the original"))
    else:
        facts.append(Fact("nodes", numbers.count(report.before.nodes), "in the original"))
    if report.after is not None and report.after.bytes:
        facts.append(Fact("file size", numbers.size(report.after.bytes), f"was {numbers.size(report.before.bytes)}"))
    return facts


def _proof_facts(validation: Validation) -> list[Fact]:
    ratios = [proof.error_ratio for proof in validation.providers.values() if proof.error_ratio is not None]
    stats = [each for proof in validation.providers.values() for each in proof.outputs.values()]
    facts = []
    if ratios:
        facts.append(
            Fact("error over original’s", f"{numbers.small(max(ratios), 3)} ×", "largest distances from float64")
        )
    if stats:
        largest = max(each.max_abs for each in stats)
        tolerance = max(each.min_tolerance for each in stats)
        note = f"passes at atol = rtol = {numbers.small(tolerance)}" if isfinite(tolerance) else "no tolerance passes"
        facts.append(Fact("largest difference", numbers.small(largest), note))
    return facts


# -- programs --------------------------------------------------------------------------------------------------------


def program_sections(programs: Sequence[ProgramDetails]) -> list[ProgramSection]:
    """Sections for the first programs of a model, which rarely has more than two."""
    return [_program(each) for each in programs[:MOST_PROGRAMS]]


def _program(each: ProgramDetails) -> ProgramSection:
    bound = numbers.small(each.certified)
    error = (
        f"measured on a dense grid: off by at most {bound}" if each.measured else f"certified: off by at most {bound}"
    )
    same = "heads and activation are the same function"
    summary = (
        f"{counted(each.count, 'head')} per neuron, {counted(each.tokens, 'bias token')}, in "
        f"{counted(each.blocks, 'block')}; {f'{error}, over max(1, |f|)' if each.certified else same}."
    )
    tables = tuple(key_table(head, each.program) for head in each.heads)
    return ProgramSection(name(each.program), short(each.activation), summary, tables)


# -- the rest --------------------------------------------------------------------------------------------------------

_STEPS = {
    "load": "load and check",
    "plan": "find the blocks",
    "apply": "replace them",
    "save": "save",
    "validate": "prove",
    "total": "in all",
}


def times(report: Report) -> dict[str, str]:
    """Seconds per step, in the order in which they happen."""
    known = [key for key in _STEPS if key in report.seconds]
    others = [key for key in report.seconds if key not in _STEPS]
    return {_STEPS.get(key, key): numbers.seconds(report.seconds[key]) for key in (*others, *known)}
