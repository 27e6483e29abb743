"""Distances of outputs, by hand-made cases."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rewriter.proof.statistics import compare, measure, merge, top_k_agreement, top_k_share, uncompared

INF, NAN = float("inf"), float("nan")

FLAWS = ("same_shape", "same_dtype", "nan_parity", "inf_parity")


def array(*values: Any, dtype: Any = np.float32) -> Any:
    return np.array(values, dtype)


def test_numbers() -> None:
    stats = compare("y", array([1, 2], [0, -4]), array([1, 2.5], [0, -5]))
    assert (stats.elements, stats.max_abs, stats.mean_abs, stats.worst) == (4, 1, 0.375, (1, 1))
    assert stats.max_rel == 0.25
    assert stats.min_tolerance == pytest.approx(0.2)
    assert stats.cosine == pytest.approx(26 / math.sqrt(21 * 32.25))
    assert stats.comparable


def test_every_figure_of_a_measurement() -> None:
    """The fourth is near 0, the last two are no numbers."""
    expected = array(100, -10, 20, 0.05, 50, NAN, INF)
    actual = array(101, -10.5, 20, 0.0625, 40, NAN, INF)
    found = measure("y", expected, actual, ranked=False)
    assert (found.elements, found.finite) == (7, 5)
    assert (found.max_abs, found.worst) == (10.0, (4,))
    assert found.mean_abs == pytest.approx((1 + 0.5 + 0.0 + 0.0125 + 10.0) / 5, rel=1e-6)
    assert found.p99_abs == 10.0
    # 0.05 is below a thousandth of the largest value.
    assert found.max_rel == pytest.approx(0.2)
    assert found.mean_rel == pytest.approx((0.01 + 0.05 + 0.0 + 0.2) / 4)
    assert found.p99_rel == pytest.approx(0.2)
    assert found.worst_rel == (4,)
    assert found.min_tolerance == pytest.approx(10.0 / 51.0)
    e, a = (each[:5].astype(np.float64) for each in (expected, actual))
    assert found.cosine == pytest.approx(e @ a / math.sqrt((e @ e) * (a @ a)), rel=1e-12)
    assert (found.nan_parity, found.inf_parity) == (True, True)
    assert (found.top1, found.kl, found.rows) == (None, None, 0)


def test_nothing_to_measure() -> None:
    for expected in (array(), array(NAN, INF)):
        found = measure("y", expected, expected, ranked=False)
        assert (found.finite, found.max_abs, found.mean_abs, found.p99_abs, found.worst) == (0, 0.0, 0.0, 0.0, None)
        assert (found.max_rel, found.mean_rel, found.p99_rel, found.worst_rel) == (0.0, 0.0, 0.0, None)
        assert (found.min_tolerance, found.cosine) == (0.0, None)
    zeros = measure("y", array(0, 0), array(1, 0), ranked=False)
    assert (zeros.max_abs, zeros.mean_abs, zeros.max_rel, zeros.mean_rel, zeros.worst_rel) == (1.0, 0.5, 0.0, 0.0, None)
    assert zeros.cosine is None


def test_the_first_of_equal_differences_is_named() -> None:
    found = measure("y", array(1, 1, 1, 1, 1), array(1, 2, 1, 2, 0), ranked=False)
    assert (found.worst, found.worst_rel) == ((1,), (1,))


def test_rows_are_ranked_by_their_largest_entry() -> None:
    """Rows with NaN or infinity count for nothing; the divergence is the mean over the others."""
    expected = array([1, 2, 0], [3, 0, 0], [NAN, 0, 0], [-INF, 1, 0])
    actual = array([1, 2, 0], [0, 0, 3], [0, 0, 0], [-INF, 2, 0])
    found = measure("y", expected, actual, ranked=True)
    assert found.rows == 3
    assert found.top1 == pytest.approx(2 / 3)

    def divergence(e: list[float], a: list[float]) -> float:
        p, q = (np.exp(each) / np.sum(np.exp(each)) for each in (e, a))
        return float(np.sum(p * np.log(p / q)))

    expected_kl = (divergence([3, 0, 0], [0, 0, 3]) + divergence([1, 0], [2, 0])) / 3
    assert found.kl == pytest.approx(expected_kl, rel=1e-12)


def test_equal_outputs_need_no_tolerance() -> None:
    stats = compare("y", array(1, NAN, INF, 0), array(1, NAN, INF, 0))
    assert (stats.max_abs, stats.min_tolerance, stats.comparable) == (0, 0, True)


@pytest.mark.parametrize(
    ("expected", "actual", "flaw"),
    [
        (array(1, 2), array([1, 2]), "same_shape"),
        (array(1, 2), array(1, 2, dtype=np.float64), "same_dtype"),
        (array(1, NAN), array(1, 2), "nan_parity"),
        (array(1, 2), array(1, NAN), "nan_parity"),
        (array(1, INF), array(1, 2), "inf_parity"),
        (array(1, INF), array(1, -INF), "inf_parity"),
        (array(1, INF), array(1, NAN), "nan_parity"),
    ],
)
def test_what_no_tolerance_forgives(expected: Any, actual: Any, flaw: str) -> None:
    stats = compare("y", expected, actual)
    assert not getattr(stats, flaw)
    assert not stats.comparable
    assert flaw == "same_dtype" or stats.min_tolerance == INF


@pytest.mark.parametrize("dtype", [np.float16, np.float64, ml_dtypes.bfloat16, np.int8, np.int64, np.uint64])
def test_types(dtype: Any) -> None:
    stats = compare("y", array(1, 2, 3, dtype=dtype), array(1, 2, 5, dtype=dtype))
    assert (stats.max_abs, stats.worst) == (2, (2,))


def test_integers_beyond_the_mantissa() -> None:
    large = 2**62
    assert compare("y", array(large, dtype=np.int64), array(large + 1, dtype=np.int64)).max_abs == 1
    limits = np.iinfo(np.int64)
    stats = compare("y", array(limits.min, dtype=np.int64), array(limits.max, dtype=np.int64))
    assert stats.max_abs == 2.0**64


def test_booleans_and_strings() -> None:
    assert compare("y", array(True, False, dtype=bool), array(True, True, dtype=bool)).max_abs == 1
    words = np.array(["a", "b"], dtype=object)
    assert compare("y", words, words.copy()).min_tolerance == 0
    assert compare("y", words, np.array(["a", "c"])).comparable  # of one shape and type, and without NaN
    assert compare("y", words, np.array(["a", "c"])).min_tolerance == INF
    assert compare("y", words, np.array(["a", "c"])).worst == (1,)


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 5)])
def test_empty(shape: tuple[int, ...]) -> None:
    stats = compare("logits", np.zeros(shape, np.float32), np.zeros(shape, np.float32))
    assert (stats.elements, stats.max_abs, stats.worst, stats.cosine, stats.top1) == (0, 0, None, None, None)
    assert stats.comparable


def test_scalar() -> None:
    stats = compare("loss", np.full((), 1, np.float32), np.full((), 1.5, np.float32))
    assert (stats.max_abs, stats.worst, stats.top1) == (0.5, (), None)


def test_top1_and_divergence() -> None:
    stats = compare("logits", array([0, 1], [1, 0]), array([0, 1], [0, 1]))
    assert stats.top1 == 0.5
    e = math.e
    assert stats.kl == pytest.approx((e / (1 + e) - 1 / (1 + e)) / 2)
    masked = array([0, 1, -INF])
    assert compare("logits", masked, masked).kl == 0
    assert compare("ids", array([0, 1], dtype=np.int64), array([0, 1], dtype=np.int64)).top1 is None


def test_percentile() -> None:
    actual = np.zeros(1000, np.float32)
    actual[:5], actual[5:20] = 9, 1
    stats = compare("y", np.zeros(1000, np.float32), actual)
    assert (stats.max_abs, stats.p99_abs) == (9, 1)


def test_huge_doubles_do_not_overflow() -> None:
    stats = compare("y", array(1e308, 1, dtype=np.float64), array(-1e308, 1, dtype=np.float64))
    assert stats.max_abs == INF
    assert stats.nan_parity


def test_the_tolerance_is_the_smallest() -> None:
    rng = np.random.default_rng(0)
    expected = rng.standard_normal((40, 3))
    actual = expected + rng.standard_normal((40, 3)) * 1e-3
    least = compare("y", expected, actual).min_tolerance
    for tolerance, holds in ((least * (1 + 1e-12), True), (least * 0.999, False)):
        assert np.allclose(actual, expected, atol=tolerance, rtol=tolerance) is holds


def test_merge() -> None:
    one = compare("logits", array([0, 1]), array([0, 1.5]))
    two = compare("logits", array([0, 1], [1, 0], [1, 0]), array([0, 1], [0, 2], [1, 0]))
    both = merge([one, two])
    assert (both.elements, both.max_abs, both.worst, both.worst_case) == (8, 2, (1, 1), 1)
    assert both.mean_abs == pytest.approx((0.5 + 1 + 2) / 8)
    assert both.top1 == pytest.approx(3 / 4)
    assert both.min_tolerance == two.min_tolerance
    assert not merge([one, compare("logits", array(NAN), array(0))]).nan_parity
    with pytest.raises(ValueError, match="no statistics to merge"):
        merge([])


def test_top_k_of_wide_rows() -> None:
    """Beside plain sorting; no two entries of a row are alike."""
    random = np.random.default_rng(4)
    a = random.permuted(np.tile(np.arange(3000.0), (50, 1)), axis=1)
    b = a + random.normal(size=a.shape) * 400
    for k in (1, 2, 3, 7, 59):
        tops = [np.argsort(-each, axis=1)[:, :k] for each in (a, b)]
        shared = [len(set(one) & set(other)) / k for one, other in zip(*tops, strict=True)]
        found = top_k_agreement(a, b, k)
        assert found is not None
        assert found[0] == pytest.approx(np.mean(shared))
        assert found[1] == 50


def test_every_figure_of_a_merger() -> None:
    """Distances are the worst of the cases', means weighted; what one case lacks, the others still have."""
    one = compare("logits", array([8, 1], [4, 4]), array([8, 2], [4, 4]))
    two = compare("logits", array([NAN, 0], [5, 0], [0, 6]), array([NAN, 0], [5, 0.5], [3, 6]))
    none = compare("logits", np.zeros((0, 2), np.float32), np.zeros((0, 2), np.float32))
    both = merge([one, none, two])
    assert (both.name, both.elements, both.finite, both.rows) == ("logits", 10, 9, 4)
    assert (both.max_abs, both.worst, both.worst_case) == (3.0, (2, 0), 2)
    assert (both.max_rel, both.worst_rel, both.worst_rel_case) == (1.0, (0, 1), 0)
    assert both.mean_abs == pytest.approx((1 + 0.5 + 3) / 9)
    assert (both.p99_abs, both.p99_rel) == (3.0, 1.0)
    assert (one.mean_rel, two.mean_rel, both.mean_rel) == (0.25, 0.0, 0.25)
    assert both.cosine == min(one.cosine or 0, two.cosine or 0) < max(one.cosine or 0, two.cosine or 0)
    assert both.top1 == 1.0
    assert both.kl == pytest.approx(((one.kl or 0) * 2 + (two.kl or 0) * 2) / 4)
    assert (both.same_shape, both.same_dtype, both.nan_parity, both.inf_parity) == (True, True, True, True)
    assert uncompared(both) is None


@pytest.mark.parametrize(
    ("other", "flaw"),
    [
        (array(1, 2), "same_shape"),
        (array(1, dtype=np.float64), "same_dtype"),
        (array(NAN), "nan_parity"),
        (array(INF), "inf_parity"),
    ],
)
def test_one_case_that_disagrees_spoils_the_whole(other: Any, flaw: str) -> None:
    same = compare("y", array(1), array(1))
    for stats in ([same, compare("y", array(1), other)], [compare("y", array(1), other), same]):
        found = merge(stats)
        assert [name for name in FLAWS if not getattr(found, name)] == [flaw]
        assert (found.min_tolerance, found.max_abs, found.max_rel) == (
            (0, 0, 0) if flaw == "same_dtype" else (INF,) * 3
        )
        assert found.mean_abs == (INF if flaw == "same_shape" else 0.0)


def test_other_shapes_are_infinitely_far() -> None:
    found = compare("y", array(1, 2), array(1))
    assert (found.elements, found.finite, found.worst, found.worst_rel, found.worst_case) == (0, 0, None, None, 0)
    assert (found.max_abs, found.mean_abs, found.p99_abs, found.max_rel, found.min_tolerance) == (INF,) * 5
    assert (found.cosine, found.top1, found.kl, found.rows) == (None, None, None, 0)
    assert [name for name in FLAWS if not getattr(found, name)] == ["same_shape"]
    assert not compare("y", array(1, 2), array(1, dtype=np.float64)).same_dtype
    for one, two in ((np.float32, np.float64), (np.float64, np.float32), (np.int64, np.int32), (np.float32, bool)):
        assert not compare("y", array(1, dtype=one), array(1, dtype=two)).same_dtype


def test_strings_count_as_compared() -> None:
    words = np.array([["a", "b"], ["c", "d"]], dtype=object)
    same, other = compare("y", words, words.copy()), compare("y", words, np.array([["a", "b"], ["x", "y"]]))
    assert (same.elements, same.finite, same.worst_case, same.comparable) == (4, 4, 0, True)
    assert (same.max_abs, same.mean_abs, same.p99_abs, same.max_rel, same.min_tolerance) == (0.0,) * 5
    assert (other.max_abs, other.mean_abs, other.p99_abs, other.max_rel, other.min_tolerance) == (INF,) * 5
    assert other.worst == (1, 0)
    none = compare("y", words[:0], words[:0])
    assert (none.elements, none.max_abs, none.worst) == (0, 0.0, None)
    numbers = compare("y", words, np.zeros((2, 2), np.float32))
    assert (numbers.same_dtype, numbers.comparable) == (False, False)


def test_why_nothing_was_compared() -> None:
    assert uncompared(compare("y", array(NAN, 1), array(NAN, 2))) is None
    assert uncompared(compare("y", array(), array())) == "has no elements in any case"
    assert uncompared(compare("y", array(NAN, INF), array(NAN, INF))) == "is NaN or infinite throughout, in every case"
    assert uncompared(compare("y", array(1), array(1, 2))) is None, "its shape is what is wrong"


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
    assert (compare(name, values, values).rows > 0) is ranked


def test_a_thousandth_of_the_largest_value_is_not_near_zero() -> None:
    assert measure("y", array(1000, 1), array(1000, 1.5), ranked=False).max_rel == 0.5
    assert measure("y", array(1024, 1), array(1024, 1.5), ranked=False).max_rel == 0.0
    assert measure("y", array(-1000, 1, INF), array(-1000, 1.5, INF), ranked=False).worst_rel == (1,)


@pytest.mark.parametrize(("count", "rank"), [(1, 0), (2, 1), (99, 98), (100, 98), (101, 99), (200, 197), (201, 198)])
def test_ninety_nine_percent_are_at_most_the_percentile(count: int, rank: int) -> None:
    differences = np.random.default_rng(0).permutation(count).astype(np.float32)
    found = measure("y", np.ones(count, np.float32), 1 + differences, ranked=False)
    assert (found.p99_abs, found.p99_rel) == (rank, rank)


def test_cosines_stay_within_one() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        vector = rng.normal(size=7)
        for factor in (3.0, -3.0):
            cosine = measure("y", vector, factor * vector, ranked=False).cosine
            assert cosine is not None
            assert 1.0 >= abs(cosine) > 1.0 - 1e-12
            assert (cosine > 0) is (factor > 0)
    assert measure("y", array(1, 0), array(0, 1), ranked=False).cosine == 0.0
    assert measure("y", array(0, 0), array(0, 1), ranked=False).cosine is None
    assert measure("y", array(0, 1), array(0, 0), ranked=False).cosine is None
    huge = array(1e300, 1e300, dtype=np.float64)
    assert measure("y", huge, huge, ranked=False).cosine is None


def test_rows_that_cannot_be_ranked_are_left_out() -> None:
    """NaN or +infinity somewhere, or nothing finite; on either side."""
    sound, unsound = [0, 2, 1, 0], ([NAN, 0, 1, 2], [INF, 0, 1, 2], [-INF] * 4)
    for row in unsound:
        for e, a in ((array(sound, row, sound), array(sound, sound, [9, 2, 1, 0])),
                     (array(sound, sound, sound), array(sound, row, [9, 2, 1, 0]))):  # fmt: skip
            found = measure("y", e, a, ranked=True)
            assert (found.rows, found.top1) == (2, 0.5)
        alone = measure("y", array(row), array(row), ranked=True)
        assert (alone.rows, alone.top1, alone.kl) == (0, None, None)


def test_top_k_counts_what_both_have() -> None:
    expected = array([5, 4, 3, 2], [9, 8, 7, 6], [NAN, 3, 2, 1])
    actual = array([5, 3, 4, 2], [6, 7, 8, 9], [4, 3, 2, 1])
    assert top_k_agreement(expected, actual, 1) == (0.5, 2)
    assert top_k_agreement(expected, actual, 2) == (0.25, 2)
    assert top_k_agreement(expected, actual, 4) == top_k_agreement(expected, actual, 9) == (1.0, 2)
    assert top_k_agreement(expected[2:], actual[2:], 1) is None
    assert top_k_agreement(actual[2:], expected[2:], 1) is None
    assert top_k_agreement(expected, actual[:2], 1) is None
    assert top_k_agreement(expected[:0], actual[:0], 1) is None
    ids = array([1, 2], dtype=np.int64)
    assert top_k_agreement(ids, ids, 1) is None


def test_the_share_over_all_cases_is_by_rows() -> None:
    one, two = array([1, 0]), array([1, 0], [1, 0], [1, 0])
    other = array([0, 1])
    assert top_k_share([one, two], [one, two], 1) == 1.0
    assert top_k_share([one, two], [other, two], 1) == 0.75
    assert top_k_share([one, two[:0]], [other, two[:0]], 1) == 0.0
    assert top_k_share([two[:0]], [two[:0]], 1) is None
    assert top_k_share([], [], 1) is None


def test_a_single_element() -> None:
    found = measure("y", array(2), array(5), ranked=False)
    assert (found.elements, found.finite, found.max_abs, found.mean_abs, found.p99_abs) == (1, 1, 3.0, 3.0, 3.0)
    assert (found.max_rel, found.mean_rel, found.p99_rel, found.min_tolerance) == (1.5, 1.5, 1.5, 1.0)
    assert (found.worst, found.worst_rel) == ((0,), (0,))
    one, none = compare("y", array(2), array(5)), compare("y", array(), array())
    for merged in (merge([one]), merge([one, none]), merge([none, one])):
        assert (merged.finite, merged.mean_abs, merged.max_rel, merged.mean_rel) == (1, 3.0, 1.5, 1.5)
    assert (merge([none]).mean_abs, merge([none]).finite) == (0.0, 0)


def test_nothing_in_common_and_everything() -> None:
    """Shares and divergences of 0 stay 0."""
    same, other = compare("y", array([1, 0]), array([1, 0])), compare("y", array([1, 0]), array([0, 1]))
    assert (merge([same]).top1, merge([same]).kl, merge([same, same]).kl) == (1.0, 0.0, 0.0)
    assert (merge([other]).top1, merge([other, other]).top1, merge([same, other]).top1) == (0.0, 0.0, 0.5)
    assert merge([same, other]).kl == pytest.approx((other.kl or 0) / 2)
