"""A place to work in."""

from pathlib import Path

import onnx
import pytest

from tests.textmodels import SILU, mlp


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory to work in, with a wide terminal, and model.onnx in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    onnx.save(mlp(SILU), tmp_path / "model.onnx")
    return tmp_path
