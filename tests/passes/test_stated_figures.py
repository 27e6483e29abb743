"""Bounds and certificates are the stored ones, to six digits."""

from __future__ import annotations

import json
import math

import pytest

from tests.passes.figures import FIGURES, STORED

KNOWN = json.loads(STORED.read_text())


@pytest.mark.parametrize("room", FIGURES)
def test_figures(room: str) -> None:
    found = FIGURES[room]()
    assert list(found) == list(KNOWN[room])
    for name, numbers in found.items():
        assert numbers == pytest.approx(KNOWN[room][name], rel=1e-6, abs=0.0), name
        assert all(map(math.isfinite, numbers)), "NaN equals nothing, and infinity hides a change"
