"""docs/programs.md and its drawings, and the kinds of nodes in docs/performance.md: what the generators give."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import programs_page, providers
from benchmarks.program_figures import portraits

PAGE = programs_page.PAGE.read_text(encoding="utf-8")


def part(text: str, name: str) -> list[str]:
    found = re.search(rf"<!-- generated: {name} -->\n(.*?)<!-- end -->", text, re.DOTALL)
    assert found is not None
    return found[1].splitlines()


def test_the_committed_page_is_what_the_generator_gives() -> None:
    assert programs_page.page(PAGE) == PAGE


def test_no_drawing_is_left_over() -> None:
    assert {path.stem for path in programs_page.FIGURES.glob("*.svg")} == set(portraits())


@pytest.mark.slow
def test_kinds_of_nodes_are_what_the_emitters_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m benchmarks.providers` writes it."""
    kinds = providers.emitted()
    monkeypatch.setattr(providers, "emitted", lambda: kinds)
    assert CliRunner().invoke(providers.main, ["--check"]).exit_code == 0
    path = tmp_path / "page.md"
    path.write_text(providers.PAGE.read_text(encoding="utf-8").replace("**Exp**", "**Log**"), encoding="utf-8")
    result = CliRunner().invoke(providers.main, ["--check", "--page", str(path)])
    assert result.exit_code == 1
    assert "run python -m benchmarks.providers" in result.output
    assert CliRunner().invoke(providers.main, ["--page", str(path)]).exit_code == 0
    assert path.read_text(encoding="utf-8") == providers.PAGE.read_text(encoding="utf-8")
