"""The committed example is a page of today's templates, made as the documentation says."""

import re
import shlex
from pathlib import Path

import pytest

from rewriter.cli import run
from rewriter.report.html import resource

ROOT = Path(__file__).resolve().parents[4]
EXAMPLE = ROOT / "docs" / "example-report.html"


def documented() -> list[str]:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"`rewrite (.* --html docs/example-report\.html)`", text)
    return shlex.split(command)


@pytest.mark.slow
def test_example_is_current(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committed = EXAMPLE.read_text(encoding="utf-8")
    assert f"<style>{resource('style.css')}</style>" in committed
    assert f"<script>{resource('script.js')}</script>" in committed
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").symlink_to(ROOT / "models")
    (tmp_path / "docs").mkdir()
    assert run([*documented(), "-q", "--provider", "cpu"]) == 0
    made = (tmp_path / "docs" / EXAMPLE.name).read_text(encoding="utf-8")
    headings = re.compile(r"<h[1-3].*?</h[1-3]>|<caption>.*?</caption>|<th scope=\"col\".*?</th>")
    assert headings.findall(made) == headings.findall(committed)
    assert re.findall("<dt>.*?</dt>", made) == re.findall("<dt>.*?</dt>", committed)


def test_example_is_small_and_tells_nothing_of_its_machine() -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    assert len(text) < 100_000
    assert not re.search(r"(?<![<\w.])/(?:home|root|tmp|work|usr)\b", text)
