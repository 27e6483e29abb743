"""`rewrite run`: what it writes, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from rewriter import run_with_cache
from rewriter.cli import run
from tests.committed import FOLDER, feeds

MODEL = FOLDER / "silu-decoder.onnx"


@pytest.fixture
def given(tmp_path: Path) -> Path:
    path = tmp_path / "x.npz"
    arrays: dict[str, Any] = dict(feeds(onnx.load(MODEL)))
    np.savez(path, **arrays)
    return path


def test_the_file_holds_what_python_gives(given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "cache.npz"
    arguments = ["run", str(MODEL), "--inputs", str(given), "--cache", str(out), "--names", "blocks.1.mlp_heads.*"]
    assert run(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["blocks.1.mlp_heads.hook_pre", "[3,", "19,", "128]"]
    assert lines[-1] == f"{len(lines) - 1} arrays written to {out}"
    wanted = run_with_cache(MODEL, given, names="blocks.1.mlp_heads.*")
    with np.load(out) as archive:
        assert set(archive.files) == {*wanted.cache, *(f"outputs/{name}" for name in wanted.outputs), "__metadata__"}
        for name, array in wanted.cache.items():
            np.testing.assert_array_equal(archive[name], array)
        for name, array in wanted.outputs.items():
            np.testing.assert_array_equal(archive[f"outputs/{name}"], array)
    assert run(arguments) == 2
    assert "exists; remove it, or choose another output" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (["--cache", "cache.bin"], 2, "must end in .npz"),
        (["--cache", "missing/cache.npz"], 2, "does not exist"),
        (["--cache", "cache.npz", "--names", "nothing"], 2, "no hook matches 'nothing'"),
        (["--cache", "cache.npz", "--provider", "cpu", "--provider", "cpu"], 2, "one execution provider"),
    ],
)
def test_refusals(
    options: list[str],
    status: int,
    message: str,
    given: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["run", str(MODEL), "--inputs", str(given), *options]) == status
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert [each.name for each in tmp_path.iterdir()] == ["x.npz"]


def test_a_failed_run_leaves_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A token outside of the embedding table: onnxruntime refuses it in the middle of the writing."""
    bad: dict[str, Any] = dict(feeds(onnx.load(MODEL)))
    bad["input_ids"] = bad["input_ids"] + 10**6
    np.savez(tmp_path / "x.npz", **bad)
    out = tmp_path / "cache.npz"
    assert run(["run", str(MODEL), "--inputs", str(tmp_path / "x.npz"), "--cache", str(out)]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert [each.name for each in tmp_path.iterdir()] == ["x.npz"]
