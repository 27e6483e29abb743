"""Pages as self-contained HTML, deterministically: the report of a rewriting, and heads (`rewriter.head_pictures`).

Templates escape every text; characters that could change the page's layout or direction are replaced here. Long lists
are truncated or folded, so that the page of a model with a hundred blocks and thousands of candidates opens at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rewriter.files.atomic import write_text
from rewriter.report.html.rendering import filled, resource
from rewriter.report.report import Report
from rewriter.report.sections import certainty, sections, summary_lines, warnings
from rewriter.report.tables import Cell, Column, written
from rewriter.text import shortened

_LONGEST, _LONGEST_SENTENCE = 240, 600
"""Characters of a name on the page, and of a sentence; of longer ones both ends are shown."""
_TIMES = re.compile(r"(?<=\d)x(?=\d)")


def write_page(report: Report, path: Path) -> None:
    """Write the page to `path` atomically. Raises UsageError if jinja2 is missing or the path cannot be written."""
    write_text(path, render(report))


def render(report: Report) -> str:
    """The page of a report; what it lacks (blocks, proof) gets no section.

    Raises:
        UsageError: jinja2 is missing.
    """
    verdict, _, meaning = report.summary.partition("  ")
    found = sections(report)
    context = {
        "verdict": verdict.capitalize(),
        "kind": {"PASSED": "good", "FAILED": "bad"}.get(verdict, "open"),
        "meaning": meaning,
        "model": report.model,
        "certainty": list(certainty(report)),
        "lines": list(summary_lines(report, proof=False)),
        "notes": warnings(report),
        "sections": found,
        "anchors": [anchor for anchor, _, _ in found],
    }
    sentence = partial(shortened, limit=_LONGEST_SENTENCE)
    filters: dict[str, Callable[..., Any]] = {"shown": shown, "short": short, "sentence": sentence}
    return filled("page.html.j2", resource("style.css"), resource("script.js"), context, filters)


def short(text: str) -> str:
    """A name as the page shows it."""
    return shortened(text, _LONGEST)


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
