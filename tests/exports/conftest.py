"""Tests that export models with PyTorch: marked `exports` (in `tests/conftest.py`), offline, not there without it."""

from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("torch") and find_spec("transformers") else ["test_*.py"]


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
