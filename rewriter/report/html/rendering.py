"""Templates, style and script as one self-contained page; the only file that imports jinja2.

A content security policy with hashes of style and script forbids everything else, so that a page can neither load nor
send anything, whatever names the model contains.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any

from rewriter.errors import UsageError


def require_jinja() -> None:
    """Raise UsageError if jinja2 is missing; called early, so that nobody waits for a page that cannot be made."""
    try:
        import jinja2  # noqa: F401
    except ImportError as error:
        raise UsageError("a page needs jinja2, which is not installed; run: pip install 'attnonly[report]'") from error


def filled(
    template: str,
    style: str,
    script: str,
    context: Mapping[str, Any],
    filters: Mapping[str, Callable[..., Any]] | None = None,
) -> str:
    """A template with its style, script and variables, all text escaped. Raises UsageError if jinja2 is missing."""
    require_jinja()
    import jinja2

    made = jinja2.Environment(
        loader=jinja2.FunctionLoader(_read),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(filters or {})
    fixed = {"style": style, "script": script, "policy": policy(style, script)}
    return made.get_template(template).render(**fixed, **context).strip() + "\n"


def resource(name: str) -> str:
    """A style sheet or a script, without white space around it."""
    return _read(name).strip()


def policy(style: str, script: str) -> str:
    """The content security policy that allows one style sheet and one script."""
    return (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _read(name: str) -> str:
    return files("rewriter.report.html").joinpath("templates", name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode("utf-8")).digest()).decode("ascii")
