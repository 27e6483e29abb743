"""The page of heads as one self-contained HTML file, from plain data (`rewriter.head_pictures`).

The data are JSON in the page, with every character escaped that could end their element; the script writes them as text
only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rewriter.report.html.rendering import filled, policy, resource, short


def write_heads_page(data: Mapping[str, Any], path: Path) -> None:
    """Write the page to `path` atomically. Raises UsageError if jinja2 is missing or the path cannot be written."""
    from rewriter.files.atomic import write_text

    write_text(path, render_heads(data))


def render_heads(data: Mapping[str, Any]) -> str:
    """The page. Raises UsageError if jinja2 is missing."""
    style = f"{resource('style.css')}\n{resource('heads.css')}"
    script = resource("heads.js")
    context = {
        "style": style,
        "script": script,
        "policy": policy(style, script),
        "data": _shortened(data),
    }
    return filled("heads.html.j2", context)


def _shortened(value: Any) -> Any:
    """The data with all text printable and short."""
    if isinstance(value, str):
        return short(value)
    if isinstance(value, Mapping):
        return {key: _shortened(each) for key, each in value.items()}
    if isinstance(value, Sequence):
        return [_shortened(each) for each in value]
    return value
