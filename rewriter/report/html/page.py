"""Render a report as one self-contained HTML file, deterministically.

Style and script are inline. A content security policy with their hashes forbids everything else, so the page can
neither load nor send anything, whatever names the model contains. The template escapes every text; characters that
could change the page's layout or direction are replaced here. Long lists are truncated or folded, so that the page of a
model with a hundred blocks and thousands of candidates opens at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from rewriter.errors import ExitStatus
from rewriter.files.atomic import write_text
from rewriter.proof.validate import ProviderRun, Validation
from rewriter.report.html.rendering import filled, policy, resource, short
from rewriter.report.report import BlockRow, Report
from rewriter.report.tables import (
    Cell,
    Column,
    Row,
    Table,
    columns,
    converted_table,
    operator_table,
    operators,
    proof_table,
    region_table,
    written,
)
from rewriter.text import counted, size

_FOLDED, _FEW_LEFT, _FEW_FAILURES, _MOST_FAILURES = 40, 12, 10, 200
_LONGEST_SENTENCE, _LONGEST_REASON = 600, 400
_TIMES = re.compile(r"(?<=\d)x(?=\d)")
_PROVED = (
    "Over the reals, at every input of every size, each activation is within this bound of the original’s, over "
    "max(1, |f|); every other operator, weight and connection is the original’s. Rounding is not part of this "
    "statement."
)


@dataclass(frozen=True)
class Passage:
    """What stands in a section: a paragraph, lines, or a table; folded under `summary` if there is one.

    Attributes:
        words: a paragraph.
        lines: the entries of a list.
        table: a table.
        summary: what is shown of a folded part; `count` stands before it.
        count: how many entries the folded part has.
        unfolded: whether it is open to begin with.
    """

    words: str = ""
    lines: Sequence[str] = ()
    table: Table | None = None
    summary: str = ""
    count: int | None = None
    unfolded: bool = False


Sections = list[tuple[str, str, list[Passage]]]
"""Anchor, heading and parts of each section."""


def write_page(report: Report, path: Path) -> None:
    """Write the page to `path` atomically. Raises UsageError if jinja2 is missing or the path cannot be written."""
    write_text(path, render(report))


def render(report: Report) -> str:
    """The page of a report; what it lacks (blocks, proof) gets no section.

    Raises:
        UsageError: jinja2 is missing.
    """
    style, script = resource("style.css"), resource("script.js")
    context = {
        "style": style,
        "script": script,
        "policy": policy(style, script),
        "verdict": verdict_of(report),
        "model": short(report.model),
        "output": None if report.output is None else short(report.output),
        "facts": key_figures(report),
        "notes": _sentences(report.notes),
        "sections": [each for each in sections(report) if each[2]],
    }
    return filled("page.html.j2", context, {"shown": shown})


def sections(report: Report) -> Sections:
    """The sections of a page, empty ones included."""
    validation, after = report.validation, report.after
    tests = () if validation is None else validation.blocks
    blocks = [_folded(converted_table(report.converted, tests))] if report.converted else []
    if report.left:
        blocks.append(Passage(f"Left as they were: {counted(len(report.left), 'candidate')}, by reason."))
        few = len(report.left) <= _FEW_LEFT
        blocks += [
            Passage(table=table, summary=reason, count=len(table.rows), unfolded=few)
            for reason, table in left_tables(report.left)
        ]
    proved = None if validation is None else validation.certificate
    regions = [Passage(_PROVED), _folded(region_table(proved))] if proved and proved.regions else []
    changed = [] if after is None else [_folded(operator_table(report.before.operators, after.operators))]
    return [
        ("failures", "What failed", list(_failures(validation))),
        ("proved", "Proved for every input", regions),
        ("outputs", "Outputs", [] if validation is None else [_folded(_outputs(validation))]),
        ("blocks", "Blocks", blocks),
        ("operators", "Operators", changed),
        ("conditions", "Conditions", list(_conditions(report))),
    ]


def _failures(validation: Validation | None) -> Iterator[Passage]:
    failures = () if validation is None else validation.failures
    texts = _sentences(failures[:_MOST_FAILURES])
    if texts:
        yield Passage(lines=texts[:_FEW_FAILURES])
    if texts[_FEW_FAILURES:]:
        yield Passage(lines=texts[_FEW_FAILURES:], summary="more", count=len(texts) - _FEW_FAILURES)
    if len(failures) > _MOST_FAILURES:
        yield Passage(f"And {len(failures) - _MOST_FAILURES:,} more; the JSON report holds them all.")


def _conditions(report: Report) -> Iterator[Passage]:
    validation = report.validation
    if validation is not None:
        fallen = sorted({node for proof in validation.providers.values() for node in proof.cpu_nodes})
        for what, texts in (
            ("Inputs of the proof:", validation.cases),
            ("Inputs left out, because the original refuses them:", validation.skipped),
            ("Ran on the CPU instead:", fallen),
        ):
            if texts:
                yield Passage(what, _sentences(texts))
        yield Passage(table=provider_table(validation))
    yield Passage(table=_pairs("Time by step", "step", "time", times(report)))
    if report.environment:
        yield Passage(table=_pairs("Made with", "what", "version", report.environment))


def _folded(table: Table) -> Passage:
    many = len(table.rows) > _FOLDED
    return Passage(table=table, summary=f"{table.title}: {len(table.rows):,} rows" if many else "")


def _sentences(texts: Sequence[str]) -> list[str]:
    return [short(text, _LONGEST_SENTENCE) for text in texts]


def verdict_of(report: Report) -> tuple[str, str, str]:
    """The verdict on a rewriting: a word, `good`, `bad` or `open`, and what it means."""
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
        return ("Nothing to convert", "open", f"{why} Nothing was written.")
    if report.exit_status is ExitStatus.VALIDATION_FAILED or (validation is not None and not validation.passed):
        failures = () if validation is None else validation.failures
        found = f": {counted(len(failures), 'check')} did not hold" if failures else ""
        meaning = f"The rewritten model does not compute what the original does{found}. Nothing was written."
        return ("Failed", "bad", meaning)
    if validation is None and report.after is None:
        return ("Planned", "open", f"{blocks} would become {heads:,} attention heads. Nothing was written.")
    if validation is None:
        return ("Not proved", "open", f"{became}, but the proof was skipped: the two models were not compared.")
    where = " and ".join(name.upper() for name in validation.providers)
    run = f"it ran on {counted(len(validation.cases), 'input')} on {where}, and differed by rounding only"
    if validation.certified:
        meaning = (
            f"{became}. For every input of every size the outputs are proved to be the original’s, over the reals "
        )
        return ("Certified", "good", f"{meaning}and within the bounds below; {run}.")
    return ("Tested", "good", f"{became}. They were tested, not proved, block by block; {run}.")


def key_figures(report: Report) -> list[tuple[str, str, str]]:
    """The numbers that matter most."""
    converted, candidates = len(report.converted), len(report.blocks)
    facts = []
    if candidates or report.validation is None:
        label = "blocks to convert" if converted and report.after is None else "blocks converted"
        facts.append((label, f"{converted:,}", f"of {counted(candidates, 'candidate')}"))
    if converted:
        heads = sum(row.heads or 0 for row in report.converted)
        tokens = sorted({row.bias_tokens for row in report.converted if row.bias_tokens})
        note = f"with {' or '.join(map(str, tokens))} bias token{'' if tokens == [1] else 's'} each" if tokens else ""
        facts.append(("attention heads", f"{heads:,}", note))
    if report.validation is not None:
        facts += _proof_facts(report.validation)
    if report.after is not None:
        change = f"{report.after.nodes - report.before.nodes:+,}"
        facts.append(
            (
                "nodes",
                f"{report.after.nodes:,}",
                f"{change} against the original",
            )
        )
    else:
        facts.append(("nodes", f"{report.before.nodes:,}", "in the original"))
    if report.after is not None and report.after.bytes:
        facts.append(("file size", size(report.after.bytes), f"was {size(report.before.bytes)}"))
    return facts


def _proof_facts(validation: Validation) -> list[tuple[str, str, str]]:
    ratios = [proof.error_ratio for proof in validation.providers.values() if proof.error_ratio is not None]
    stats = [each for proof in validation.providers.values() for each in proof.outputs.values()]
    facts = []
    if ratios:
        facts.append(("error over original’s", f"{max(ratios):.2f} ×", "largest distances from float64"))
    if stats:
        largest = max(each.max_abs for each in stats)
        tolerance = max(each.min_tolerance for each in stats)
        note = (
            f"passes at atol = rtol = {written(tolerance, 'error')}" if isfinite(tolerance) else "no tolerance passes"
        )
        facts.append(("largest difference", written(largest, "error"), note))
    return facts


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
    return {_STEPS.get(key, key): f"{report.seconds[key]:.2f} s" for key in (*others, *known)}


# -- tables ----------------------------------------------------------------------------------------------------------


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
        text = cell.text or short(str(cell.value or "–"))
        if column.kind == "operators":
            text = _TIMES.sub("×", text).replace(" -> ", " → ")
        return Shown(text, style=cell.style or ("name" if column.kind == "name" else ""))
    number = None if cell.value is None else float(cell.value)
    return Shown(cell.text or written(cell.value, column.kind), -1.0 if number is None else number, cell.style)


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
    return table.pick(*(each.name for each in table.columns if each.name != "abs at")).filled()


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
    return (name, result, proof.error_ratio, *(Cell(value, f"{value:.2f} s") for value in proof.load_seconds))


def _pairs(title: str, label: str, value: str, pairs: Mapping[str, str]) -> Table:
    """Two columns of our own text."""
    rows = tuple((key, Cell(None, entry)) for key, entry in pairs.items())
    return Table(title, columns("text", label, value), rows, sortable=False)
