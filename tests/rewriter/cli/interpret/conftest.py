"""Inputs of the small decoder, on which the commands for heads are tested."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tests.committed import FOLDER, feeds


@pytest.fixture
def given(tmp_path: Path) -> Path:
    """An npz file with one case."""
    path = tmp_path / "x.npz"
    arrays: dict[str, Any] = dict(feeds(onnx.load(FOLDER / "silu-decoder.onnx"), tokens=6))
    np.savez(path, **arrays)
    return path
