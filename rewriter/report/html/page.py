"""Render a report as one self-contained HTML file, deterministically.

Style and script are inline. A content security policy with their hashes forbids everything else, so the page can
neither load nor send anything, whatever names the model contains. The template escapes every text; characters that
could change the page's layout or direction are replaced here. Long lists are truncated or folded, so that the page of a
model with a hundred blocks and thousands of candidates opens at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from rewriter.errors import ExitStatus
from rewriter.proof.validate import ProviderRun, Validation
from rewriter.report.details import Key, ProgramDetails
from rewriter.report.html import numbers
from rewriter.report.html.rendering import filled, policy, resource, short
from rewriter.report.report import BlockRow, Report
from rewriter.report.table import Cell, Column, Kind, Row, Table, columns
from rewriter.report.tables import account_table, converted_table, operator_table, operators, proof_table, region_table
from rewriter.text import counted

_MOST_FAILURES = 200
_LONGEST_SENTENCE = 600


def write_page(report: Report, path: Path) -> None:
    """Write the page to `path` atomically. Raises UsageError if jinja2 is missing or the path cannot be written."""
    from rewriter.files.atomic import write_text

    write_text(path, render(report))


def render(report: Report) -> str:
    """The page of a report; parts that it lacks (blocks, proof, details) get no section.

    Raises:
        UsageError: jinja2 is missing.
    """
    return filled("page.html.j2", _context(report), {"shown": shown})


def _context(report: Report) -> dict[str, Any]:
    """All variables of the template."""
    style, script = resource("style.css"), resource("script.js")
    return {
        "style": style,
        "script": script,
        "policy": policy(style, script),
        "verdict": verdict_of(report),
        "model": _name(report.model),
        "output": None if report.output is None else _name(report.output),
        "facts": key_figures(report),
        "notes": [short(note, _LONGEST_SENTENCE) for note in report.notes],
        "times": pair_table("Time by step", "step", "time", times(report)),
        "environment": pair_table("Made with", "what", "version", report.environment),
        **_blocks(report),
        **_proof(report),
        **_details(report),
        "operators": None if report.after is None else operator_table(report.before.operators, report.after.operators),
    }


def _blocks(report: Report) -> dict[str, Any]:
    proofs = () if report.validation is None else report.validation.blocks
    return {
        "converted": converted_table(report.converted, proofs) if report.converted else None,
        "left": left_tables(report.left),
        "left_count": len(report.left),
    }


def _proof(report: Report) -> dict[str, Any]:
    validation = report.validation
    if validation is None:
        return {"proof": None, "failures": [], "more_failures": 0}
    return {
        "proof": {
            "outputs": _outputs(validation),
            "providers": provider_table(validation),
            "cases": [short(case, _LONGEST_SENTENCE) for case in validation.cases],
            "skipped": [short(case, _LONGEST_SENTENCE) for case in validation.skipped],
            "regions": None
            if validation.certificate is None or not validation.certificate.regions
            else region_table(validation.certificate),
            "fallen": sorted({short(node) for proof in validation.providers.values() for node in proof.cpu_nodes}),
        },
        "failures": [short(failure, _LONGEST_SENTENCE) for failure in validation.failures[:_MOST_FAILURES]],
        "more_failures": max(len(validation.failures) - _MOST_FAILURES, 0),
    }


def _details(report: Report) -> dict[str, Any]:
    details = report.details
    if details is None:
        return {"programs": [], "more_programs": 0, "account": None}
    programs = program_sections(details.programs)
    account = {
        "table": account_table("Head accounting, block by block", details.counts),
        "share": numbers.percent(details.share),
        "remaining": short(details.remaining, _LONGEST_SENTENCE),
        "head_dimension": details.head_dimension,
        "attention_heads": details.attention_heads,
    }
    return {
        "programs": programs,
        "more_programs": len(details.programs) - len(programs),
        "account": account if details.counts else None,
    }


# -- the verdict -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """The text at the top of the page.

    Attributes:
        word: the verdict.
        kind: good, bad, or neither.
        meaning: what it means, in a sentence or two.
    """

    word: str
    kind: Literal["good", "bad", "open"]
    meaning: str


def verdict_of(report: Report) -> Verdict:
    """The verdict on a rewriting."""
    validation = report.validation
    blocks = counted(len(report.converted), "MLP block")
    heads = sum(row.heads or 0 for row in report.converted)
    became = f"{blocks} became {heads:,} attention heads" if heads else f"{blocks} became attention heads"
    if report.exit_status is ExitStatus.NOTHING_TO_CONVERT:
        left = len(report.left)
        reasons = (
            f"{counted(left, 'candidate')} stayed as {'it was' if left == 1 else 'they were'}; the reasons are below."
        )
        why = reasons if left else "Nothing in the model looks like an MLP block."
        return Verdict("Nothing to convert", "open", f"{why} Nothing was written.")
    if report.exit_status is ExitStatus.VALIDATION_FAILED or (validation is not None and not validation.passed):
        failures = () if validation is None else validation.failures
        found = f": {counted(len(failures), 'check')} did not hold" if failures else ""
        meaning = f"The rewritten model does not compute what the original does{found}. Nothing was written."
        return Verdict("Failed", "bad", meaning)
    if validation is None and report.after is None:
        return Verdict("Planned", "open", f"{blocks} would become {heads:,} attention heads. Nothing was written.")
    if validation is None:
        return Verdict("Not proved", "open", f"{became}, but the proof was skipped: the two models were not compared.")
    where = " and ".join(name.upper() for name in validation.providers)
    run = f"it ran on {counted(len(validation.cases), 'input')} on {where}, and differed by rounding only"
    if validation.certified:
        meaning = (
            f"{became}. For every input of every size the outputs are proved to be the original’s, over the reals "
        )
        return Verdict("Certified", "good", f"{meaning}and within the bounds below; {run}.")
    return Verdict("Tested", "good", f"{became}. They were tested, not proved, block by block; {run}.")


# -- sections --------------------------------------------------------------------------------------------------------

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
    error = f"measured on a dense grid: off by at most {bound}" if each.measured else f"claimed: off by at most {bound}"
    same = "heads and activation are the same function"
    summary = (
        f"{counted(each.count, 'head')} per neuron, {counted(each.tokens, 'bias token')}, in "
        f"{counted(each.blocks, 'block')}; {f'{error}, over max(1, |f|)' if each.certified else same}."
    )
    tables = tuple(key_table(head, each.program) for head in each.heads)
    return ProgramSection(_name(each.program), short(each.activation), summary, tables)


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


# -- tables ----------------------------------------------------------------------------------------------------------

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


def _name(text: str) -> Shown:
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


def _outputs(validation: Validation) -> Table:
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


def _provider(name: str, proof: ProviderRun) -> Row:
    failed = len(proof.failures)
    result = Cell(f"{failed} failed", style="bad") if failed else Cell("held", style="good")
    return (name, result, proof.error_ratio, *(Cell(value, numbers.seconds(value)) for value in proof.load_seconds))


def key_table(keys: Sequence[Key], program: str) -> Table:
    """The coefficients of one head."""
    heads = (Column("key"), *columns("error", "y", "1"), Column("value"))
    rows: list[Row] = [
        (key.label, *(Cell(part, numbers.small(part, 9)) for part in key.logit), key.value) for key in keys
    ]
    title = f"Logits of {short(program)}, by powers of y, and values"
    return Table(title, heads, tuple(rows), sortable=False)


def pair_table(title: str, label: str, value: str, pairs: Mapping[str, str]) -> Table:
    """Two columns of our own text."""
    rows = tuple((key, Cell(None, entry)) for key, entry in pairs.items())
    return Table(title, columns("text", label, value), rows, sortable=False)
