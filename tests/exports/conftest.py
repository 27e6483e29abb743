"""One export of every model for the whole session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from models.entry import Dtype, Exporter

Export = Callable[[str, Exporter, Dtype], Path]


@pytest.fixture(scope="session")
def export(tmp_path_factory: pytest.TempPathFactory) -> Export:
    """A function that gives the file of an entry, exported once, at its smallest size."""
    from models.export import export_model
    from models.registry import get

    folder = tmp_path_factory.mktemp("exports")
    done: dict[tuple[str, str, str], Path] = {}

    def exported(name: str, exporter: Exporter, dtype: Dtype = "fp32") -> Path:
        key = (name, exporter, dtype)
        if key not in done:
            path = folder / f"{'-'.join(key)}.onnx"
            entry = get(name)
            export_model(entry, path, size=entry.default_size, exporter=exporter, dtype=dtype)
            done[key] = path
        return done[key]

    return exported
