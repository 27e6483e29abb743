"""`rewrite page REPORT.json -o PAGE.html`: paths, and what is printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from rewriter.cli import run
from tests.rewriter.report.html.samples import REPORTS


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory to work in, with report.json in it."""
    monkeypatch.chdir(tmp_path)
    REPORTS["hostile"]().write(tmp_path / "report.json")
    return tmp_path


def test_page(room: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["page", "report.json", "-o", "page.html"]) == 0
    assert capsys.readouterr().out == "WRITTEN  page.html, the page of report.json\n"
    assert run(["page", "report.json", "-o", "page.html", "-q"]) == 0  # a page may be replaced
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report.json"], "give -o PAGE.html"),
        (["report.json", "-o", "-"], "give -o PAGE.html"),
        (["report.json", "-o", "report.json"], "would replace"),
        (["report.json", "-o", "none/page.html"], "does not exist; create it first"),
        (["report.json", "-o", "notes.txt"], "pass --force to replace it"),
        (["none.json", "-o", "page.html"], "cannot be read: No such file or directory"),
        ([".", "-o", "page.html"], "cannot be read: Is a directory"),
    ],
)
def test_refusals(arguments: list[str], message: str, room: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (room / "notes.txt").write_text("notes", encoding="utf-8")
    before = {path.name for path in room.iterdir()}
    assert run(["page", *arguments]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1
    assert {path.name for path in room.iterdir()} == before
