"""Tolerances that users give."""

from __future__ import annotations

import numpy as np
import pytest

from rewriter.compare.tolerances import Rule
from rewriter.proof.rule import Results


def results(*values: float) -> Results:
    return [{"out": np.asarray(values, np.float32)}]


def test_a_tolerance_takes_the_place_of_the_rule() -> None:
    a, b = results(1.0, 2.0), results(1.0, 2.5)
    assert not Rule.of(None, None)("out", a, [], b).holds
    found = Rule.of({"out": 0.6}, None)("out", a, [], b)
    assert (found.holds, found.error, found.allowed) == (True, 0.5, 0.6)
    found = Rule.of(0.25, 0.05)("out", a, [], b)
    assert found.reason == "error 0.5 exceeds atol 0.25, rtol 0.05 by 0.15"


def test_no_tolerance_excuses_other_places_of_nan_or_another_shape() -> None:
    loose = Rule.of(1e9, None)
    a = results(1.0, 2.0)
    assert "finite in one model only" in loose("out", a, [], results(1.0, np.nan)).reason
    assert "finite in one model only" in loose("out", a, [], results(1.0, np.inf)).reason
    assert loose("out", a, [], results(1.0)).reason == "has shape [1] instead of [2]"


def test_values_that_are_no_floats_must_be_equal() -> None:
    a, b = ([{"out": np.asarray([1, each])}] for each in (2, 3))
    assert not Rule.of(100, None)("out", a, [], b).holds


@pytest.mark.parametrize(
    ("atol", "rtol", "holds"), [(0.1, 0, False), (0.21, 0, True), (0, 0.1, False), (0.1, 0.11, True)]
)
def test_tolerances_add_up(atol: float, rtol: float, *, holds: bool) -> None:
    assert Rule.of(atol, rtol)("out", results(1.0, 2.0), [], results(1.2, 2.0)).holds is holds


def test_a_named_tolerance_goes_before_that_of_all() -> None:
    rule = Rule.of({None: 1.0, "x": 2.0}, 0.5)
    assert rule.tolerance("x") == (2.0, 0.5)
    assert rule.tolerance("y") == (1.0, 0.5)
    assert Rule.of({"x": 2.0}, None).tolerance("y") is None
