"""Pages as self-contained HTML, deterministically: the report of a rewriting, and heads (`rewriter.head_pictures`).

Templates escape every text; characters that could change the page's layout or direction are replaced here. A content
security policy with hashes of style and script forbids everything else, so that a page can neither load nor send
anything. Long lists are truncated or folded. This is the only file that imports jinja2.
"""

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

from rewriter.errors import UsageError
from rewriter.files.atomic import write_text
from rewriter.report.report import Report
from rewriter.report.sections import Cell, Column, certainty, sections, summary_lines, warnings
from rewriter.text import shortened

_MAX_NAME, _MAX_SENTENCE = 240, 600  # characters; of longer texts both ends are shown
_TIMES = re.compile(r"(?<=\d)x(?=\d)")
short = partial(shortened, limit=_MAX_NAME)  # a name as shown on the page


def write_page(report: Report, path: Path) -> None:
    """Write the page to `path` atomically. Raises UsageError if jinja2 is missing or the path cannot be written."""
    write_text(path, render(report))


def require_jinja() -> Any:
    """jinja2. Raises UsageError if it is missing, before the long work."""
    try:
        import jinja2
    except ImportError as error:
        raise UsageError("a page needs jinja2, which is not installed; run: pip install 'attnonly[report]'") from error
    return jinja2


def render(report: Report) -> str:
    """The page of a report, without sections that would be empty. Raises UsageError if jinja2 is missing."""
    verdict, _, meaning = report.summary.partition("  ")
    return _filled(
        "page.html.j2",
        resource("style.css"),
        resource("script.js"),
        verdict=verdict.capitalize(),
        kind={"PASSED": "good", "FAILED": "bad"}.get(verdict, "open"),
        meaning=meaning,
        model=report.model,
        certainty=list(certainty(report)),
        lines=list(summary_lines(report, proof=False)),
        notes=warnings(report),
        sections=sections(report),
    )


def _filled(template: str, style: str, script: str, **context: Any) -> str:
    jinja = require_jinja()
    strict = {"autoescape": True, "undefined": jinja.StrictUndefined}
    made = jinja.Environment(loader=jinja.FunctionLoader(resource), trim_blocks=True, lstrip_blocks=True, **strict)
    made.filters |= {"shown": shown, "short": short, "sentence": partial(shortened, limit=_MAX_SENTENCE), "json": _json}
    allowed = f"style-src '{_hash(style)}'; script-src '{_hash(script)}'; img-src data:"
    policy = f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
    return str(made.get_template(template).render(style=style, script=script, policy=policy, **context)).strip() + "\n"


def resource(name: str) -> str:
    """A template, a style sheet or a script, without white space around it."""
    return files("rewriter.report.html").joinpath("templates", name).read_text(encoding="utf-8").strip()


def _json(data: Any) -> str:
    """JSON inside a script element; jinja's `tojson` would escape the apostrophes around tokens too."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return re.sub("[<>&]", lambda found: f"\\u{ord(found[0]):04x}", text)


def _hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode("utf-8")).digest()).decode("ascii")


def shown(cell: Cell, column: Column) -> Cell:
    """A cell of the page: its text, what to sort it by (None: the text), and a class."""
    if column.numeric:
        return Cell(-1.0 if cell.value is None else float(cell.value), cell.text, cell.style)
    text = short(str(cell.value or "–"))
    if column.kind == "operators":
        text = _TIMES.sub("×", text).replace(" -> ", " → ")
    return Cell(None, text, cell.style or ("name" if column.kind == "name" else ""))


def render_heads(data: Mapping[str, Any]) -> str:
    """The page of heads; its script writes the data, JSON in the page, as text only."""
    # Patterns are most of the page.
    packed = [{**head, "pattern": [[*map(_packed, rows)] for rows in head["pattern"]]} for head in data["heads"]]
    style = f"{resource('style.css')}\n{resource('heads.css')}"
    return _filled("heads.html.j2", style, resource("heads.js"), data=_shortened({**data, "heads": packed}))


def _packed(weights: Sequence[float]) -> list[int]:
    """Weights as integers, where -n is n zeros."""
    runs = ((some, [*run]) for some, run in groupby(weights, bool))
    return [number for some, run in runs for number in ([round(1e4 * each) for each in run] if some else [-len(run)])]


def _shortened(value: Any) -> Any:
    if isinstance(value, str):
        return short(value)
    if isinstance(value, dict):
        return {key: _shortened(each) for key, each in value.items()}
    return [_shortened(each) for each in value] if isinstance(value, list | tuple) else value
