"""A rewriting imports what it needs and no more: a call on a small model spends much of its time in imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

_SLOW = {"rewriter.compare", "rewriter.api.comparing", "rich.progress", "onnx.reference", "jinja2", "torch", "joblib"}


@pytest.mark.parametrize("imported", ["rewriter.api.rewriting", "rewriter.report.terminal.console", "rewriter.cli"])
def test_what_a_rewriting_does_not_need(imported: str) -> None:
    code = f"import sys, {imported}; print(*sys.modules, sep=chr(10))"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert _SLOW.isdisjoint(found.stdout.split())


def test_every_verb_is_found() -> None:
    import rewriter.api

    for name in rewriter.__all__:
        assert getattr(rewriter.api, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        rewriter.api.nothing  # noqa: B018 - reading it must fail
