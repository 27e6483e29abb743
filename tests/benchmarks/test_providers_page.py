"""docs/performance.md: kinds of nodes are what the emitters give, and what it says in words follows from the lists."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import providers
from benchmarks.providers import PAGE, emitted, main


@pytest.fixture(scope="module")
def kinds() -> dict[str, dict[str, bool]]:
    return emitted()


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
