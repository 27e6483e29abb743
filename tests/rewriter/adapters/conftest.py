"""A rewriter that is wrong, which every adapter must notice."""

import pytest

from tests.cases import plant
from tests.changes import change_values, weight


@pytest.fixture
def wrong_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bias of the second operator comes out 0.01 too large."""
    plant(monkeypatch, lambda model: change_values(weight(model, "b2"), "v += 1e-2"))
