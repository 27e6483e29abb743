"""The pass rule: channels, their scales, what counts as rounding, and what a failure says."""

from __future__ import annotations

import numpy as np
import pytest

from rewriter.proof.pass_rule import CAP, FACTOR, LUCK, SLACK, Channels, exact_rounding, worst

EPS = float(np.finfo(np.float32).eps)


def _truth(*shapes: tuple[int, ...], seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape) for shape in shapes]


@pytest.mark.parametrize(
    ("shapes", "channels"),
    [
        ([(1, 17, 8), (3, 2, 8)], (8,)),  # batch and tokens vary
        ([(1, 4, 17, 8), (3, 4, 2, 8)], (4, 8)),  # a cache: heads and channels
        ([(2, 5, 8), (2, 5, 8)], (5, 8)),  # fixed sizes: the first axis counts samples all the same
        ([(7,), (7,)], ()),
        ([(), ()], ()),
        ([(2, 3), (2, 3, 4)], ()),  # nothing in common
        ([(0, 3, 8), (2, 3, 8)], (3, 8)),  # an empty case
    ],
)
def test_channels(shapes: list[tuple[int, ...]], channels: tuple[int, ...]) -> None:
    truth = _truth(*shapes)
    found = Channels.of(truth)
    assert found.scale.shape == channels
    assert found.errors([value + 1.0 for value in truth], truth).max() == pytest.approx(1.0)


def test_the_numbers_are_those_of_the_decision() -> None:
    """docs/decisions/0004-pass-rule.md; a larger one lets more pass."""
    assert (FACTOR, LUCK, SLACK, CAP) == (4.0, 2.0, 16.0, 1e-3)


def test_the_error_of_a_channel_is_the_largest_over_all_cases() -> None:
    truth = _truth((1, 17, 4), (3, 2, 4))
    values = [value.copy() for value in truth]
    values[0][0, 3, 1] += 0.25
    values[1][2, 1, 1] -= 0.5
    values[1][0, 0, 3] += 0.125
    np.testing.assert_allclose(Channels.of(truth).errors(values, truth), [0.0, 0.5, 0.0, 0.125])


def test_one_huge_channel_buys_nothing_for_the_others() -> None:
    truth = _truth((3, 17, 64), (1, 5, 64))
    for value in truth:
        value[..., 7] -= 1e9
    channels = Channels.of(truth)
    assert channels.scale[7] > 9e8
    assert np.delete(channels.scale, 7).max() < 10.0
    old = [value.astype(np.float32) for value in truth]
    rounding = channels.rounding(channels.errors(old, truth), EPS)
    wrong = [value.copy() for value in truth]
    wrong[0][0, 0, 3] += 1e-4  # far below the spacing of floats at 1e9
    found = worst(channels.errors(wrong, truth), rounding)
    assert not found.holds
    assert found.channel == (3,)
    assert found.allowed < 1e-5


def test_two_channels_one_of_them_huge() -> None:
    channels = Channels.of([np.asarray([[3.0, -1e9]]), np.asarray([[2.0, -1e9], [1.0, 1e9]])])
    np.testing.assert_array_equal(channels.scale, [3.0, 1e9])


def test_a_small_channel_has_the_scale_of_the_median_one() -> None:
    truth = [np.asarray([[1e-20, 2.0, 3.0, 4.0, 0.0]])] * 2
    np.testing.assert_array_equal(Channels.of(truth).scale, [2.0, 2.0, 3.0, 4.0, 2.0])


def test_rounding_is_the_originals_or_its_typical_value_or_the_spacing_of_floats() -> None:
    channels = Channels.of([np.ones((2, 5))] * 2)
    errors = np.asarray([0.0, 1e-5, 1e-5, 1e-5, 1e-3])
    np.testing.assert_allclose(channels.rounding(errors, EPS), [LUCK * 1e-5] * 4 + [1e-3])
    np.testing.assert_allclose(channels.rounding(np.zeros(5), EPS), [EPS] * 5)


def test_in_float64_rounding_shrinks_with_the_spacing_of_floats() -> None:
    scaled = exact_rounding(np.asarray([EPS]), EPS)
    np.testing.assert_allclose(scaled, [SLACK * 2.0**-52])


@pytest.mark.parametrize(("error", "holds"), [(4e-6, True), (4.1e-6, False), (np.inf, False), (np.nan, False)])
def test_the_factor(error: float, holds: bool) -> None:
    found = worst(np.asarray([0.0, error]), np.asarray([1e-6, 1e-6]))
    assert found.holds is holds
    assert FACTOR == 4.0
    assert found.channel == ((1,) if error else (0,))


def test_certified_errors_are_added_channel_by_channel() -> None:
    rounding, certified = np.full(2, 1e-6), np.asarray([0.0, 1.0])
    assert worst(np.asarray([0.0, 1.0]), rounding, certified).holds
    assert not worst(np.asarray([1.0, 0.0]), rounding, certified).holds


def test_the_failure_says_where_and_what_was_allowed() -> None:
    text = worst(np.asarray([0.0, 0.5]), np.full(2, 1e-6), 1e-3).text
    assert text == (
        "error 0.5 in channel 1 exceeds the allowed 0.001 = 4 x 1e-06 (the original's rounding) + 0.001 (certified)"
    )


def test_where_the_channel_is_all_zero_nothing_is_allowed() -> None:
    channels = Channels.of([np.zeros((2, 3))] * 2)
    rounding = channels.rounding(np.zeros(3), EPS)
    assert worst(np.zeros(3), rounding).holds
    assert not worst(np.asarray([0.0, 1e-30, 0.0]), rounding).holds


def test_a_wrong_shape_is_infinitely_far() -> None:
    truth = _truth((2, 3, 4), (1, 5, 4))
    assert np.isinf(Channels.of(truth).errors([truth[0], truth[1][:, :4]], truth)).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_infinitely_far_unless_the_original_is_not_either(bad: float) -> None:
    truth = [np.ones((2, 3))] * 2
    values = [np.ones((2, 3)), np.ones((2, 3))]
    values[1][0, 1] = bad
    channels = Channels.of(truth)
    np.testing.assert_array_equal(channels.errors(values, truth), [0.0, np.inf, 0.0])
    np.testing.assert_array_equal(channels.errors(values, truth, known=values), [0.0, 0.0, 0.0])


def test_an_overflow_of_the_original_allows_nothing_elsewhere_in_its_channel() -> None:
    truth = [np.full((4, 2), 2.0)] * 2
    old = [np.full((4, 2), 2.0), np.full((4, 2), 2.0)]
    old[0][0, 0] = np.inf
    channels = Channels.of(truth)
    rounding = channels.rounding(channels.errors(old, truth, old), EPS)
    wrong = [value.copy() for value in old]
    wrong[0][1, 0] = 2.1
    assert not worst(channels.errors(wrong, truth, old), rounding).holds


def test_a_channel_that_noise_moved_little_by_luck_counts_as_the_median_one() -> None:
    channels = Channels(samples=(0,), scale=np.array([1.0, 2.0, 4.0]))
    moved = np.array([1e-9, 4e-6, 1e-4])
    np.testing.assert_array_equal(channels.not_by_luck(moved), [2e-6, 4e-6, 1e-4])
    assert channels.not_by_luck(np.zeros(3)).tolist() == [0.0] * 3


def test_a_stated_channel_axis_tells_channels_from_samples() -> None:
    """All other axes count samples, though a single case does not vary them."""
    truth = _truth((2, 5, 8))
    assert Channels.of(truth).scale.shape == (5, 8)
    for axis, sizes, samples in ((-1, (8,), (0, 1)), (-2, (5,), (0, 2)), (-3, (2,), (1, 2))):
        found = Channels.of(truth, axis)
        assert found.scale.shape == sizes
        assert found.samples == samples
    np.testing.assert_array_equal(
        Channels.of(truth, -1).scale,
        np.maximum(np.abs(truth[0]).max((0, 1)), np.sort(np.abs(truth[0]).max((0, 1)))[3]),
    )
    assert Channels.of(_truth((2, 3), (2, 3, 4)), -1).samples is None


def test_without_ranks_in_common_all_is_one_channel() -> None:
    truth = [np.array([1.0, -3.0]), np.array([[2.0]]), np.zeros((0, 4))]
    channels = Channels.of(truth)
    assert channels.scale.shape == ()
    assert float(channels.scale) == 3.0
    assert float(channels.errors([np.array([1.5, -3.0]), np.array([[4.0]]), np.zeros((0, 4))], truth)) == 2.0
    nothing = [np.zeros((0,)), np.zeros((0, 4))]
    assert float(Channels.of(nothing).scale) == float(Channels.of(nothing).errors(nothing, nothing)) == 0.0


def test_scales_are_never_negative() -> None:
    """Nothing but zeros, infinities and NaN: there is no scale to speak of."""
    truth = [np.array([[0.0, np.inf, np.nan, -0.0]])] * 2
    np.testing.assert_array_equal(Channels.of(truth).scale, np.zeros(4))


def test_zeros_are_no_share_of_anything() -> None:
    channels = Channels(samples=(0,), scale=np.array([0.0, 2.0]))
    assert channels.share(np.array([0.0, 1.0])) == 0.5
    assert channels.share(np.array([1e-9, 0.0])) == np.inf
    np.testing.assert_array_equal(channels.rounding(np.zeros(2), EPS), [0.0, 2.0 * EPS])
    np.testing.assert_array_equal(channels.not_by_luck(np.array([0.0, 1.0])), [0.0, 1.0])


def test_outputs_without_elements() -> None:
    channels = Channels.of([np.zeros((0, 3, 0)), np.zeros((2, 3, 0))])
    none = np.zeros((3, 0))
    assert channels.share(none) == 0.0
    assert channels.rounding(none, EPS).shape == (3, 0)
    assert channels.not_by_luck(none).shape == (3, 0)
    found = worst(none, none)
    assert (found.channel, found.error, found.allowed, found.rounding) == ((), 0.0, 0.0, 0.0)
    assert found.holds


@pytest.mark.parametrize(
    ("errors", "rounding", "certified", "place"),
    [
        ([1.0, 3.0, 2.0], [1.0, 1.0, 1.0], 0.0, 1),  # all hold: the largest share
        ([1.0, 3.0, 2.0], [0.25, 1.0, 1.0], 0.0, 0),
        ([0.0, 1e-9, 5.0], [1.0, 0.0, 2.0], 0.0, 1),  # where nothing is allowed, any error is worst
        ([9.0, 9.0, 4.0], [2.0, 1.0, 1.0], 0.0, 1),  # 9 of 4 exceeds more than 9 of 8
        ([4.1, 3.9, 0.0], [1.0, 1.0, 1.0], 0.0, 0),  # an excess ranks above what holds
        ([1.0, np.nan, 100.0], [1.0, 1.0, 1.0], 0.0, 1),
        ([1.0, 100.0, np.inf], [1.0, 1.0, 1.0], 0.0, 2),
        ([3.0, 4.0, 1.0], [0.5, 1.0, 1.0], [2.0, 0.0, 0.0], 1),
        ([0.0, 0.0, 0.0], [0.0, 0.0, 0.0], 0.0, 0),
    ],
)
def test_the_channel_with_the_least_room(
    errors: list[float], rounding: list[float], certified: object, place: int
) -> None:
    given = np.asarray(certified, np.float64)
    found = worst(np.asarray(errors), np.asarray(rounding), given)
    assert found.channel == (place,)
    np.testing.assert_equal(found.error, errors[place])
    assert found.rounding == rounding[place]
    assert found.allowed == 4.0 * rounding[place] + float(np.broadcast_to(given, 3)[place])


def test_places_of_several_axes_and_one_rounding_for_all() -> None:
    errors = np.zeros((2, 3))
    errors[1, 2] = 7.0
    found = worst(errors, np.asarray(0.5), np.zeros((2, 3)))
    assert (found.channel, found.error, found.allowed, found.rounding) == ((1, 2), 7.0, 2.0, 0.5)
    assert found.text == "error 7 in channel 1, 2 exceeds the allowed 2 = 4 x 0.5 (the original's rounding)"


@pytest.mark.parametrize(("certified", "said"), [(0.0, False), (0.0049, False), (0.0052, True)])
def test_a_certified_part_of_half_a_percent_is_said(certified: float, said: bool) -> None:
    text = worst(np.asarray(9.0), np.asarray(0.25), certified).text
    assert text.startswith("error 9 exceeds the allowed 1")
    assert ("(certified)" in text) is said
