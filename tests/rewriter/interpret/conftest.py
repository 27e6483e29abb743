"""Indexes of the committed models, which most functions of interpretation begin with, are made once a process."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from rewriter.interpret.index import heads
from tests.committed import FOLDER


@pytest.fixture(scope="package", autouse=True)
def _indexed_once() -> Iterator[None]:
    kept = cache(heads)
    shared = lambda it, **more: (kept if isinstance(it, Path) and it.parent == FOLDER else heads)(it, **more)  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        for module in ("index", "attribute", "interventions"):
            patch.setattr(f"rewriter.interpret.{module}.heads", shared)
        yield
