"""Shared keys whose slopes are an arithmetic progression: when they are one, with which numbers."""

from __future__ import annotations

import numpy as np
import pytest

from passes.programs.sharing import Key, Progression, progression_of

MISH = (Key(2.0, 0.0, 1.0, 1.0), Key(1.0, 0.0, 2.0, 2.0), Key(0.0, 0.0, 2.0, 0.0))
"""y (r^2 + 2 r) / (r^2 + 2 r + 2) with r = e^y."""


def test_mish() -> None:
    assert progression_of(MISH, np.float32) == Progression(1.0, (2.0, 2.0), 0.0)
    assert progression_of(MISH[::-1], np.float64) == Progression(1.0, (2.0, 2.0), 0.0)


def test_slopes_that_go_down() -> None:
    """The key with the highest power is the one with multiple and weight 1, on either side."""
    keys = (Key(0.5, 0.0, 3.0, -1.5), Key(-0.25, 0.0, 1.0, 1.0))
    assert progression_of(keys, np.float32) == Progression(-0.75, (3.0,), -1.5)


def test_numbers_are_those_of_the_type() -> None:
    keys = (Key(0.0, 0.0, 1.0, 0.1), Key(4.0, 0.0, 1.0, 1.0 + 1e-12))
    assert progression_of(keys, np.float32) == Progression(4.0, (1.0,), float(np.float32(0.1)))
    assert progression_of(keys, np.float64) is None


@pytest.mark.parametrize(
    "keys",
    [
        (Key(0.0, 0.0, 1.0, 0.0), Key(1.0, 0.0, 2.0, 2.0), Key(2.5, 0.0, 1.0, 1.0)),
        (Key(0.0, 0.0, 1.0, 0.0), Key(1.0, 0.0, 2.0, 2.0)),
        (Key(0.0, 0.0, 1.0, 0.0), Key(1.0, 0.0, 1.0, 0.5)),
        (Key(0.0, 0.0, 1.0, 0.0), Key(1.0, 0.0, 2.0, 1.0), Key(2.0, 0.0, 1.0, 1.0)),
        (Key(0.0, 30.0, 1.0, 0.0), Key(1.0, 0.0, 1.0, 1.0)),
        (Key(0.1, 0.0, 1.0, 0.0), Key(1.0, 0.0, 1.0, 1.0)),
    ],
    ids=["uneven", "last-weight", "last-multiple", "inner-multiple", "offset", "step-rounded"],
)
def test_what_is_none(keys: tuple[Key, ...]) -> None:
    assert progression_of(keys, np.float32) is None
