"""The documentation site builds without a warning, fetches nothing, and its navigation leads to every page."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rewriter
from tests.conftest import slow

ROOT = Path(__file__).resolve().parents[1]
CONFIG = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
NAVIGATION = set(re.findall(r": ([\w/.-]+\.md)$", CONFIG, re.MULTILINE))
MADE = {
    "index.md",
    "api.md",
    "gallery.md",
    "models.md",
    "benchmarks.md",
    "contributing.md",
    "changelog.md",
    "security.md",
}


def test_every_page_is_in_the_navigation() -> None:
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    pages = {page for page in pages if not page.startswith("decisions/")}
    assert pages | MADE | {"decisions/index.md"} == NAVIGATION


@slow
def test_it_builds(tmp_path: Path) -> None:
    for package in ("mkdocs", "material", "docstring_parser"):
        if importlib.util.find_spec(package) is None:
            pytest.skip("needs the extra docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "NO_COLOR": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    pages = {path: path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.html")}
    fetched = {
        url for text in pages.values() for url in re.findall(r'(?:src|rel="stylesheet" href)="(https?:[^"]+)', text)
    }
    assert fetched == set()
    functions = pages[tmp_path / "api.html"]
    assert {name for name in {*dir(rewriter)} - {"__version__"} if f'id="{name.lower()}"' not in functions} == set()
    drawings = {path.name for path in (ROOT / "docs" / "figures" / "programs").glob("*.svg")}
    assert {name for name in drawings if f"figures/programs/{name}" not in pages[tmp_path / "gallery.html"]} == set()
