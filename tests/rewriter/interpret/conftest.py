"""Indexes of the committed models, which most functions of interpretation begin with, are made once a process."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rewriter.interpret.index import HeadIndex, heads
from tests.committed import FOLDER


@pytest.fixture(scope="package", autouse=True)
def _indexed_once() -> Iterator[None]:
    kept = cache(heads)

    def shared(model: Any, **options: Any) -> HeadIndex:
        return (kept if isinstance(model, Path) and model.parent == FOLDER else heads)(model, **options)

    with pytest.MonkeyPatch.context() as patch:
        for module in ("index", "attribute", "interventions"):
            patch.setattr(f"rewriter.interpret.{module}.heads", shared)
        yield
