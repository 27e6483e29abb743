"""`python -m benchmarks.cuda` on the CPU: its rows, its time limit, and what it says without CUDA; no times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from benchmarks import cuda
from benchmarks.decoder import Shape
from benchmarks.performance.subjects import Subject
from rewriter.ort.providers import available_providers

TINY = Shape(layers=1, width=16, hidden=32, heads=2, vocabulary=50, positions=64)
FEW = (Subject("one", "the first", TINY, tokens=(3, 5), halves=(False, True)),)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "SUBJECTS", FEW)
    monkeypatch.setattr(cuda, "_TURN", 0.0)


def invoke(path: Path, *arguments: str) -> Result:
    return CliRunner().invoke(cuda.main, ["--repeat", "3", "--json", str(path / "cuda.json"), *arguments])


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return list(json.loads((folder / "cuda.json").read_text(encoding="utf-8"))["rows"])


@pytest.mark.skipif("cuda" in available_providers(), reason="CUDA is there")
def test_without_cuda(tmp_path: Path) -> None:
    result = invoke(tmp_path)
    assert result.exit_code == 2
    (line,) = result.output.splitlines()
    assert "execution provider 'cuda' is not available" in line


def test_rows(tmp_path: Path) -> None:
    result = invoke(tmp_path, "--on", "cpu", "--only", "one", "--tokens", "5", "--tokens", "7")
    assert result.exit_code == 0, result.output
    times = [row for row in rows_of(tmp_path) if "mode" in row]
    assert [(row["type"], row["mode"], row["tokens"]) for row in times] == [
        (kind, mode, tokens)
        for kind in ("float32", "float16")
        for mode, tokens in (("prefill", 5), ("prefill", 7), ("decode", 1))
    ]
    assert all(set(row["milliseconds"]) == {"original", "rewritten", "control"} for row in times)
    placed = [row for row in rows_of(tmp_path) if "per_block" in row]
    assert [row["side"] for row in placed] == ["original", "rewritten"] * 2
    assert all(list(row["nodes"]) == ["CPUExecutionProvider"] for row in placed)
    assert placed[1]["per_block"]["Exp"] == 1.0, "one block, SiLU in one head"
