"""Makes the checkout importable, and shares exported models among all tests of a session."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

ROOT = str(Path(__file__).resolve().parents[1])
if ROOT not in sys.path:
    sys.path.append(ROOT)

if TYPE_CHECKING:
    from models.entry import Dtype, Exporter

Export = Callable[..., Path]
"""Entry name, exporter and element type (fp32 by default) to the exported file."""


@pytest.fixture(scope="session")
def export(tmp_path_factory: pytest.TempPathFactory) -> Export:
    """A function that gives the file of an entry, exported once, at its smallest size.

    Workers of pytest-xdist share the files: an export appears under its name only when it is complete.
    """
    from models.entry import DEFAULT_OPSETS
    from models.export import export_model
    from models.registry import get

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    folder = folder / "exports"
    folder.mkdir(exist_ok=True)

    def exported(name: str, exporter: Exporter, dtype: Dtype = "fp32") -> Path:
        path = folder / f"{name}-{exporter}-{dtype}.onnx"
        if not path.exists():
            entry = get(name)
            done = export_model(entry, path, size=entry.default_size, exporter=exporter, dtype=dtype)
            assert done.opset == DEFAULT_OPSETS[exporter]
            assert done.size_bytes == path.stat().st_size
            assert done.difference < (1e-5 if dtype == "fp32" else 3e-2)
        return path

    return exported
