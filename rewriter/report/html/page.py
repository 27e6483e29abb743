"""Pages as self-contained HTML, deterministically: the report of a rewriting, and heads (`rewriter.head_pictures`).

Templates escape every text; characters that could change the page's layout or direction are replaced here. Long lists
are truncated or folded, so that the page of a model with a hundred blocks and thousands of candidates opens at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

from rewriter.errors import ExitStatus
from rewriter.files.atomic import write_text
from rewriter.report.html.rendering import filled, resource, short
from rewriter.report.report import Report
from rewriter.report.sections import sections, warnings
from rewriter.report.tables import Cell, Column, written
from rewriter.text import counted, size

_LONGEST_SENTENCE = 600
_TIMES = re.compile(r"(?<=\d)x(?=\d)")


def write_page(report: Report, path: Path) -> None:
    """Write the page to `path` atomically. Raises UsageError if jinja2 is missing or the path cannot be written."""
    write_text(path, render(report))


def render(report: Report) -> str:
    """The page of a report; what it lacks (blocks, proof) gets no section.

    Raises:
        UsageError: jinja2 is missing.
    """
    context = {
        "verdict": verdict_of(report),
        "model": short(report.model),
        "output": None if report.output is None else short(report.output),
        "facts": list(key_figures(report)),
        "notes": [*report.notes, *warnings(report)],
        "sections": sections(report),
    }
    filters: dict[str, Callable[..., Any]] = {"shown": shown, "sentence": partial(short, longest=_LONGEST_SENTENCE)}
    return filled("page.html.j2", resource("style.css"), resource("script.js"), context, filters)


def verdict_of(report: Report) -> tuple[str, str, str]:
    """The verdict on a rewriting: a word, `good`, `bad` or `open`, and what it means."""
    validation, failures = report.validation, report.problems
    blocks, heads = counted(len(report.converted), "MLP block"), sum(row.heads or 0 for row in report.converted)
    became = f"{blocks} became {heads:,} attention heads" if heads else f"{blocks} became attention heads"
    if report.exit_status is ExitStatus.NOTHING_TO_CONVERT:
        count = len(report.left)
        stayed = f"{counted(count, 'candidate')} stayed as {'it was' if count == 1 else 'they were'}"
        why = f"{stayed}; the reasons are below." if count else "Nothing in the model looks like an MLP block."
        return ("Nothing to convert", "open", f"{why} Nothing was written.")
    if report.exit_status is ExitStatus.VALIDATION_FAILED:
        found = f": {counted(len(failures), 'check')} did not hold" if failures else ""
        meaning = f"The rewritten model does not compute what the original does{found}. Nothing was written."
        return ("Failed", "bad", meaning)
    if report.after is None:
        return ("Planned", "open", f"{blocks} would become {heads:,} attention heads. Nothing was written.")
    if validation is None:
        return ("Not proved", "open", f"{became}, but the proof was skipped: the two models were not compared.")
    where = " and ".join(name.upper() for name in validation.providers)
    run = f"it ran on {counted(len(validation.cases), 'input')} on {where}, and differed by rounding only"
    if validation.certified:
        proved = "For every input of every size the outputs are proved to be the original’s, over the reals and within"
        return ("Certified", "good", f"{became}. {proved} the bounds below; {run}.")
    return ("Tested", "good", f"{became}. They were tested, not proved, block by block; {run}.")


def key_figures(report: Report) -> Iterator[tuple[str, str, str]]:
    """The numbers that matter most: label, number, note."""
    converted, candidates = len(report.converted), len(report.blocks)
    if candidates or report.validation is None:
        label = "blocks to convert" if converted and report.after is None else "blocks converted"
        yield label, f"{converted:,}", f"of {counted(candidates, 'candidate')}"
    if converted:
        heads = sum(row.heads or 0 for row in report.converted)
        tokens = sorted({row.bias_tokens for row in report.converted if row.bias_tokens})
        note = f"with {' or '.join(map(str, tokens))} bias token{'' if tokens == [1] else 's'} each" if tokens else ""
        yield "attention heads", f"{heads:,}", note
    runs = [] if report.validation is None else [*report.validation.providers.values()]
    ratios = [run.error_ratio for run in runs if run.error_ratio is not None]
    if ratios:
        yield "error over original’s", f"{max(ratios):.2f} ×", "largest distances from float64"
    stats = [each for run in runs for each in run.outputs.values()]
    if stats:
        tolerance = max(each.min_tolerance for each in stats)
        passes = f"passes at atol = rtol = {written(tolerance, 'error')}"
        largest = written(max(each.max_abs for each in stats), "error")
        yield "largest difference", largest, passes if isfinite(tolerance) else "no tolerance passes"
    if report.after is None:
        yield "nodes", f"{report.before.nodes:,}", "in the original"
        return
    yield "nodes", f"{report.after.nodes:,}", f"{report.after.nodes - report.before.nodes:+,} against the original"
    if report.after.bytes:
        yield "file size", size(report.after.bytes), f"was {size(report.before.bytes)}"


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


# -- heads ---------------------------------------------------------------------------------------------------------


def write_heads_page(data: Mapping[str, Any], path: Path) -> None:
    """Write the page to `path` atomically. Raises UsageError if jinja2 is missing or the path cannot be written."""
    write_text(path, render_heads(data))


def render_heads(data: Mapping[str, Any]) -> str:
    """The page of heads; its script writes the data, JSON in the page, as text only.

    Raises:
        UsageError: jinja2 is missing.
    """
    style = f"{resource('style.css')}\n{resource('heads.css')}"
    return filled("heads.html.j2", style, resource("heads.js"), {"data": _shortened(data)})


def _shortened(value: Any) -> Any:
    """The data with all text printable and short."""
    if isinstance(value, str):
        return short(value)
    if isinstance(value, Mapping):
        return {key: _shortened(each) for key, each in value.items()}
    if isinstance(value, Sequence):
        return [_shortened(each) for each in value]
    return value
