"""docs/performance.md: kinds of nodes are what the emitters give, and what it says in words follows from the lists."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import providers
from benchmarks.providers import LISTS, PAGE, emitted, main
from passes.forms import FORMS
from tests.conftest import slow


@pytest.fixture(scope="module")
def kinds() -> dict[str, dict[str, bool]]:
    return emitted()


@slow
def test_every_form_emits_something(kinds: dict[str, dict[str, bool]]) -> None:
    assert {form for forms in kinds.values() for form in forms} == set(FORMS)
    assert "local" in kinds["Exp"]
    assert "local" not in kinds["MatMul"], "form local keeps the linear operators"


@slow
def test_what_the_page_says_in_words(kinds: dict[str, dict[str, bool]]) -> None:
    assert set(kinds) <= LISTS["CUDA"].double
    assert set(kinds) <= LISTS["TensorRT"].single
    assert set(kinds) - LISTS["DirectML"].double - LISTS["DirectML"].single == {"Loop"}
    for text in ("**CUDA** lists every kind", "**TensorRT** lists every kind", "**DirectML** has no Loop"):
        assert text in PAGE.read_text(encoding="utf-8")


def test_the_table_is_what_the_emitters_give(
    tmp_path: Path, kinds: dict[str, dict[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python -m benchmarks.providers` writes it."""
    monkeypatch.setattr(providers, "emitted", lambda: kinds)
    assert CliRunner().invoke(main, ["--check"]).exit_code == 0
    path = tmp_path / "page.md"
    path.write_text(PAGE.read_text(encoding="utf-8").replace("| Exp |", "| Log |"), encoding="utf-8")
    result = CliRunner().invoke(main, ["--check", "--page", str(path)])
    assert result.exit_code == 1
    assert "run python -m benchmarks.providers" in result.output
    assert CliRunner().invoke(main, ["--page", str(path)]).exit_code == 0
    assert path.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8")
