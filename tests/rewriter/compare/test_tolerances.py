"""Tolerances that users give, and agreement of the best entries."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import DTypeLike

from rewriter.compare.tolerances import Rule, Tolerance
from rewriter.proof.rule import Results
from rewriter.proof.statistics import compare, top_k_agreement


def results(*values: float) -> Results:
    return [{"out": np.asarray(values, np.float32)}]


def test_a_tolerance_takes_the_place_of_the_rule() -> None:
    a, b = results(1.0, 2.0), results(1.0, 2.5)
    assert not Rule()("out", a, [], b).holds
    found = Rule({"out": Tolerance(0.6)})("out", a, [], b)
    assert (found.holds, found.error, found.allowed) == (True, 0.5, 0.6)
    found = Rule({None: Tolerance(0.25, 0.05)})("out", a, [], b)
    assert found.reason == "error 0.5 exceeds atol 0.25, rtol 0.05 by 0.15"


def test_no_tolerance_excuses_other_places_of_nan_or_another_shape() -> None:
    loose = Rule({None: Tolerance(1e9)})
    a = results(1.0, 2.0)
    assert "finite in one model only" in loose("out", a, [], results(1.0, np.nan)).reason
    assert "finite in one model only" in loose("out", a, [], results(1.0, np.inf)).reason
    assert loose("out", a, [], results(1.0)).reason == "has shape [1] instead of [2]"


def test_values_that_are_no_floats_must_be_equal() -> None:
    a, b = ([{"out": np.asarray([1, each])}] for each in (2, 3))
    assert not Rule({None: Tolerance(100.0)})("out", a, [], b).holds


def test_ranks_are_those_of_the_worst_run() -> None:
    rule = Rule(top_k=1)
    a = [{"out": np.asarray([[1.0, 2.0], [1.0, 2.0]])}]
    rule("out", a, [], a)
    rule("out", a, [], [{"out": np.asarray([[1.0, 2.0], [2.0, 1.0]])}])
    rule("out", a, [], a)
    assert rule.ranks == {"out": 0.5}


@pytest.mark.parametrize(
    ("tolerance", "excess"),
    [(Tolerance(0.1), 0.1), (Tolerance(0.2), 0.0), (Tolerance(0.0, 0.1), 0.1), (Tolerance(0.1, 0.1), 0.0)],
)
def test_tolerances_add_up(tolerance: Tolerance, excess: float) -> None:
    a, b = np.asarray([1.0, 2.0]), np.asarray([1.2, 2.0])
    assert tolerance.excess(a, b) == pytest.approx(excess)


def test_a_named_tolerance_goes_before_that_of_all() -> None:
    rule = Rule({None: Tolerance(1.0), "x": Tolerance(2.0)})
    assert rule.tolerance("x") == Tolerance(2.0)
    assert rule.tolerance("y") == Tolerance(1.0)
    assert Rule({"x": Tolerance(2.0)}).tolerance("y") is None


# -- statistics ------------------------------------------------------------------------------------------------------


def test_relative_differences_near_zero_are_not_told() -> None:
    expected, actual = np.asarray([1e-30, 1e-4, 0.5, 1.0, -np.inf]), np.asarray([1e-2, 2e-4, 0.6, 1.0, -np.inf])
    stats = compare("y", expected, actual)
    assert stats.max_rel == pytest.approx(0.2)
    assert stats.worst_rel == (2,)
    assert stats.max_abs == pytest.approx(0.1)
    assert compare("y", np.zeros(3), np.ones(3)).max_rel == 0.0


def test_relative_differences() -> None:
    expected = np.asarray([[0.0, 1.0, -2.0, 100.0]])
    actual = np.asarray([[5.0, 1.5, -2.0, 101.0]])
    stats = compare("x", expected, actual)
    assert stats.max_rel == 0.5
    assert stats.worst_rel == (0, 1)
    assert stats.worst == (0, 0)
    assert stats.mean_rel == pytest.approx((0.5 + 0.0 + 0.01) / 3)
    assert stats.p99_rel == pytest.approx(0.5)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_top_k(dtype: DTypeLike) -> None:
    a = np.asarray([[5, 4, 3, 2, 1], [1, 2, 3, 4, 5]], dtype)
    b = np.asarray([[4, 5, 3, 2, 1], [5, 2, 3, 4, 1]], dtype)
    found = [top_k_agreement(a, b, k) for k in (1, 2, 5, 9)]
    assert found == [(0.0, 2), (0.75, 2), (1.0, 2), (1.0, 2)]


def test_top_k_of_what_is_no_ranking() -> None:
    assert top_k_agreement(np.zeros((2, 3), np.int64), np.zeros((2, 3), np.int64), 1) is None
    assert top_k_agreement(np.zeros((2, 3)), np.zeros((3, 2)), 1) is None
    assert top_k_agreement(np.full((1, 3), np.nan), np.zeros((1, 3)), 1) is None
