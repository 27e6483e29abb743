"""Distances of outputs, by hand-made cases."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rewriter.proof.statistics import OutputStats, uncompared
from rewriter.proof.statistics import compare as compare_cases

INF, NAN = float("inf"), float("nan")


def array(*values: Any, dtype: Any = np.float32) -> Any:
    return np.array(values, dtype)


def compare(name: str, expected: Any, actual: Any) -> OutputStats:
    return compare_cases(name, [expected], [actual])


def test_every_figure() -> None:
    """The last two are no numbers."""
    expected = array(100, -10, 20, 0.05, 50, NAN, INF)
    actual = array(101, -10.5, 20, 0.0625, 40, NAN, INF)
    found = compare("y", expected[:, None], actual[:, None])
    assert (found.elements, found.finite) == (7, 5)
    assert found.max_abs == 10.0
    assert found.min_tolerance == pytest.approx(10.0 / 51.0)
    assert found.top1 is None


def test_several_cases() -> None:
    one = array([8, 1], [4, 4]), array([8, 2], [4, 4])
    none = np.zeros((0, 2), np.float32), np.zeros((0, 2), np.float32)
    two = array([NAN, 0], [5, 0], [0, 6]), array([NAN, 0], [5, 0.5], [3, 6])
    found = compare_cases("logits", *zip(one, none, two, strict=True))
    assert (found.elements, found.finite, found.max_abs, found.top1) == (10, 9, 3.0, 1.0)
    for bad in ((array(NAN), array(0)), (array(1), array(1, 2))):
        for pairs in ((bad, (array(1), array(1))), ((array(1), array(1)), bad)):
            spoilt = compare_cases("y", *zip(*pairs, strict=True))
            assert (spoilt.max_abs, spoilt.min_tolerance) == (INF, INF)


@pytest.mark.parametrize(
    ("expected", "actual"),
    [
        (array(1, 2), array([1, 2])),
        (array(1, NAN), array(1, 2)),
        (array(1, 2), array(1, NAN)),
        (array(1, INF), array(1, 2)),
        (array(1, INF), array(1, -INF)),
        (array(1, INF), array(1, NAN)),
        (np.array(["a", "b"], dtype=object), np.array(["a", "c"])),
    ],
)
def test_what_no_tolerance_forgives(expected: Any, actual: Any) -> None:
    found = compare("y", expected, actual)
    assert (found.max_abs, found.min_tolerance) == (INF, INF)
    assert bool(found.elements) is (expected.shape == actual.shape)


@pytest.mark.parametrize("dtype", [np.float16, np.float64, ml_dtypes.bfloat16, np.int8, np.int64, np.uint64])
def test_types(dtype: Any) -> None:
    assert compare("y", array(1, 2, 3, dtype=dtype), array(1, 2, 5, dtype=dtype)).max_abs == 2


def test_integers_beyond_the_mantissa() -> None:
    large = 2**62
    assert compare("y", array(large, dtype=np.int64), array(large + 1, dtype=np.int64)).max_abs == 1
    limits = np.iinfo(np.int64)
    assert compare("y", array(limits.min, dtype=np.int64), array(limits.max, dtype=np.int64)).max_abs == 2.0**64


def test_equal_booleans_strings_and_nothing() -> None:
    assert compare("y", array(True, False, dtype=bool), array(True, True, dtype=bool)).max_abs == 1
    words = np.array([["a", "b"], ["c", "d"]], dtype=object)
    same = compare("y", words, words.copy())
    assert (same.elements, same.finite, same.max_abs, same.min_tolerance) == (4, 4, 0, 0)
    equal = compare("y", array(1, NAN, INF, 0), array(1, NAN, INF, 0))
    assert (equal.max_abs, equal.min_tolerance) == (0, 0)
    for shape in ((0,), (2, 0), (0, 5)):
        none = compare("logits", np.zeros(shape, np.float32), np.zeros(shape, np.float32))
        assert (none.elements, none.max_abs, none.top1) == (0, 0, None)
    scalar = compare("loss", np.full((), 1, np.float32), np.full((), 1.5, np.float32))
    assert (scalar.max_abs, scalar.top1) == (0.5, None)


def test_why_nothing_was_compared() -> None:
    assert uncompared(compare("y", array(NAN, 1), array(NAN, 2))) is None
    assert uncompared(compare("y", array(), array())) == "has no elements in any case"
    assert uncompared(compare("y", array(NAN, INF), array(NAN, INF))) == "is NaN or infinite throughout, in every case"
    assert uncompared(compare("y", array(1), array(1, 2))) is None, "its shape is what is wrong"


def test_the_tolerance_is_the_smallest() -> None:
    rng = np.random.default_rng(0)
    expected = rng.standard_normal((40, 3))
    actual = expected + rng.standard_normal((40, 3)) * 1e-3
    least = compare("y", expected, actual).min_tolerance
    for tolerance, holds in ((least * (1 + 1e-12), True), (least * 0.999, False)):
        assert np.allclose(actual, expected, atol=tolerance, rtol=tolerance) is holds


# -- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "values", "ranked"),
    [
        ("y", array([1, 2]), True),
        ("y", array([1], [2]), False),
        ("logits", array([1], [2]), True),
        ("start_Scores", array([1], [2]), True),
        ("logits", array([1, 2], dtype=np.int64), False),
        ("logits", np.zeros((), np.float32), False),
    ],
)
def test_which_outputs_are_ranked(name: str, values: Any, ranked: bool) -> None:
    """Floats of more than one column, or by their name."""
    assert (compare(name, values, values).top1 == 1.0) is ranked


def test_rows_are_ranked_by_their_largest_entry() -> None:
    """Rows with NaN or infinity count for nothing."""
    expected = array([1, 2, 0], [3, 0, 0], [NAN, 0, 0], [-INF, 1, 0])
    actual = array([1, 2, 0], [0, 0, 3], [0, 0, 0], [-INF, 2, 0])
    assert compare("y", expected, actual).top1 == pytest.approx(2 / 3)
    for row in ([NAN, 0, 1], [INF, 0, 1], [-INF] * 3):
        assert compare("y", array(row), array(row)).top1 is None
