"""docs/heads.md: its Python prints what it says, and its list of heads is that of the committed model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rewriter.cli import run

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "heads.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", TEXT, re.DOTALL)


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 4


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_python(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, wanted = EXAMPLES[number]
    (tmp_path / "models").symlink_to(ROOT / "models")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "docs/heads.md", "exec"), {})  # noqa: S102 - the page's own code
    assert capsys.readouterr().out == wanted


def test_ranking(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["rank", str(ROOT / "models" / "silu-decoder.onnx"), "--top", "3"]) == 0
    assert f"```\n{capsys.readouterr().out}```" in TEXT


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["heads", str(ROOT / "models" / "silu-decoder.onnx")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line in TEXT for line in lines[:-1])
    assert f"{lines[-1]}, written to heads.safetensors" in TEXT
