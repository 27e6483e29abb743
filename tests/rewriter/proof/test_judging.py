"""The rule for one tensor of two models: against float64, against the original, and what no tolerance forgives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rewriter.arrays import Array
from rewriter.proof.judging import Judged, Values, believed, disparity, judge, ratio_of
from rewriter.proof.pass_rule import FACTOR, Channels, Wide

EPS = 2.0**-23
COARSE = 256 * EPS
NAN, INF = float("nan"), float("inf")

ROWS = np.random.default_rng(0).uniform(0.5, 1.0, (2, 50, 3)).astype(np.float32)
"""Three channels of about the same scale: the two cases have 50 and 40 tokens."""


def cases(values: Array) -> list[Array]:
    return [values, values[:, :40]]


def moving(*by: float) -> Any:
    """Rounding moves the channels by so much."""
    return lambda channels: np.broadcast_to(by if len(by) > 1 else by[0], channels.scale.shape)


def never(_channels: Channels) -> Wide:
    raise AssertionError("nobody asked how far rounding moves the original")


def nothing_planned() -> Sequence[Sequence[Array]]:
    raise AssertionError("nobody asked for certified programs")


def with_truth(new: Array, *, old: Array = ROWS, right: Array | None = None, planned: Array | None = None) -> Judged:
    exact = ROWS.astype(np.float64) if right is None else right
    values = Values(cases(old), cases(old), cases(new), cases(exact))
    return judge(values, COARSE, never, lambda: [] if planned is None else [cases(planned)])


def without_truth(new: Array, moved: Any = never, *, old: Array = ROWS, plain: Array | None = None) -> Judged:
    values = Values(cases(old if plain is None else plain), cases(old), cases(new), None)
    return judge(values, COARSE, moved, nothing_planned)


def shifted(channel: int, by: float, rows: Array = ROWS) -> Array:
    """One value of one channel, that both cases have, is off."""
    result = rows.copy()
    result[1, 7, channel] += by
    return result


# -- against float64 -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channel", range(3))
def test_an_error_is_found_in_every_channel_and_named(channel: int) -> None:
    judged = with_truth(shifted(channel, 1e-4))
    assert (judged.rule, judged.channel) == ("float64", (channel,))
    assert judged.error_b == pytest.approx(1e-4, rel=1e-2)
    assert judged.reason is not None
    assert judged.reason.startswith(f"error {judged.error_b:.3g} in channel {channel} exceeds the allowed ")
    assert " = 4 x " in judged.reason
    assert "(the original's rounding)" in judged.reason


def test_the_original_itself_holds_with_ratio_one() -> None:
    judged = with_truth(ROWS)
    assert (judged.reason, judged.ratio, judged.error_a, judged.error_b) == (None, 1.0, 0.0, 0.0)


@pytest.mark.parametrize(("moved", "holds"), [(0.0, False), (2e-6, False), (3e-6, True)])
def test_one_run_may_show_too_little_rounding(moved: float, holds: bool) -> None:
    """Noise of the size of rounding moves the original further than a single run showed: four times that is allowed."""
    values = Values(cases(ROWS), cases(ROWS), cases(shifted(1, 1e-5)), cases(ROWS.astype(np.float64)))
    judged = judge(values, COARSE, never, list, moving(0.0, moved, 0.0))
    assert (judged.reason is None) is holds


def test_noise_counts_as_far_as_it_can_be_rounding() -> None:
    values = Values(cases(ROWS), cases(ROWS), cases(shifted(1, 0.01)), cases(ROWS.astype(np.float64)))
    judged = judge(values, COARSE, never, list, moving(0.0, 1.0, 0.0))
    assert judged.reason is not None
    assert judged.allowed == pytest.approx(FACTOR * COARSE, rel=0.05)


def test_noise_is_not_asked_for_where_rounding_explains_all() -> None:
    values = Values(cases(ROWS), cases(ROWS), cases(ROWS), cases(ROWS.astype(np.float64)))
    assert judge(values, COARSE, never, nothing_planned, never).reason is None


def test_a_huge_channel_buys_nothing_for_the_others() -> None:
    rows = ROWS.copy()
    rows[..., 0] = -1e9
    right = rows.astype(np.float64)
    assert with_truth(shifted(1, 0.5, rows), old=rows, right=right).channel == (1,)
    assert without_truth(shifted(1, 0.5, rows), moving(478.0, 1e-7, 1e-7), old=rows).channel == (1,)
    assert without_truth(shifted(0, 300.0, rows), moving(478.0, 1e-7, 1e-7), old=rows).reason is None


def test_errors_of_the_original_count_channel_by_channel() -> None:
    """Channel 2 of the original is off by 1e-5, which is no excuse for channel 0."""
    old = shifted(2, 1e-5)
    assert with_truth(shifted(2, 3.5e-5), old=old).reason is None
    assert with_truth(shifted(2, 4.5e-5), old=old).reason is not None
    assert with_truth(shifted(0, 3.5e-5), old=old).reason is not None


def test_certified_errors_are_allowed_for_where_they_arise() -> None:
    new = shifted(1, 1e-4)
    assert with_truth(new, planned=new).reason is None
    judged = with_truth(new, planned=shifted(0, 1e-4))
    assert judged.reason is not None
    judged = with_truth(shifted(1, 3e-4), planned=new)
    assert judged.reason is not None
    assert judged.reason.endswith(" + 0.0001 (certified)")


def test_certified_errors_are_capped() -> None:
    new = shifted(1, 0.05)
    assert with_truth(new, planned=new).reason is not None


@pytest.mark.parametrize(
    ("right", "is_believed"),
    [
        (ROWS.astype(np.float64), True),
        (ROWS + 1e-5, True),
        (ROWS + 1e-2, False),
        (np.where(np.arange(3) == 1, NAN, ROWS), False),
        (np.where(np.arange(3) == 1, INF, ROWS), False),
        (ROWS[:, :45].astype(np.float64), False),
    ],
    ids=["exact", "rounded", "another function", "NaN", "infinite", "another shape"],
)
def test_which_float64_evaluations_are_believed(right: Array, is_believed: bool) -> None:
    """One that is not finite where the original is would excuse whatever stands there."""
    assert believed([ROWS], [right], COARSE) is is_believed
    judged = judge(Values([ROWS], [ROWS], [shifted(1, 0.3)], [right]), COARSE, moving(0.0), list)
    assert judged.rule == ("float64" if is_believed else "original")
    assert judged.reason is not None


def test_infinite_truth_where_the_original_is_infinite_is_believed() -> None:
    old = np.where(np.arange(3) == 1, INF, ROWS).astype(np.float32)
    assert believed([old], [old.astype(np.float64)], COARSE)


# -- against the original --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("by", "holds"), [(0.9, True), (1.1, False)])
def test_four_times_what_rounding_moves_the_channel_by(by: float, holds: bool) -> None:
    moved = moving(1e-4, 1e-4, 1e-2)
    judged = without_truth(shifted(2, by * FACTOR * 1e-2), moved)
    assert (judged.rule, judged.error_a, judged.ratio) == ("original", None, None)
    assert (judged.reason is None) is holds
    assert judged.share == pytest.approx(FACTOR * 1e-2, rel=0.1)
    assert judged.allowed == pytest.approx(FACTOR * 1e-2)


def test_rounding_to_the_type_is_allowed_without_asking() -> None:
    """Nobody asks how far rounding moves the original where B is as close as the type can tell."""
    judged = without_truth(shifted(0, 2.0 * EPS))
    assert judged.reason is None
    assert judged.error_b == pytest.approx(2.0 * EPS, rel=0.5)
    assert judged.share == pytest.approx(FACTOR * EPS)


def test_what_optimisation_changes_in_the_original_is_rounding() -> None:
    plain = shifted(1, 1e-3)
    assert without_truth(shifted(1, 3.5e-3), moving(0.0), plain=plain).reason is None
    assert without_truth(shifted(1, 4.5e-3), moving(0.0), plain=plain).reason is not None
    assert without_truth(shifted(0, 3.5e-3), moving(0.0), plain=plain).reason is not None


# -- what no tolerance forgives --------------------------------------------------------------------------------------

FLOATS = np.asarray([1.0, NAN, INF, 2.0], np.float32)
DISPARITIES: dict[str, tuple[Array, str | None]] = {
    "shape": (FLOATS[:3], "has shape [3] instead of [4]"),
    "rank": (FLOATS[None], "has shape [1, 4] instead of [4]"),
    "type": (FLOATS.astype(np.float16), "is of type float16 instead of float32"),
    "a further NaN": (np.asarray([NAN, NAN, INF, 2.0], np.float32), "is NaN in other places"),
    "a NaN less": (np.asarray([1.0, 0.0, INF, 2.0], np.float32), "is NaN in other places"),
    "a further infinity": (np.asarray([1.0, NAN, INF, INF], np.float32), "is infinite in other places"),
    "an infinity less": (np.asarray([1.0, NAN, 1e30, 2.0], np.float32), "is infinite in other places"),
    "the other infinity": (np.asarray([1.0, NAN, -INF, 2.0], np.float32), "is infinite in other places"),
    "nothing": (FLOATS.copy(), None),
    "a value": (np.asarray([7.0, NAN, INF, 2.0], np.float32), None),
}


@pytest.mark.parametrize("what", DISPARITIES)
@pytest.mark.parametrize("truth", [True, False])
def test_what_no_tolerance_forgives(what: str, truth: bool) -> None:
    new, reason = DISPARITIES[what]
    fine = np.zeros(4, np.float32)
    assert disparity([fine, FLOATS], [fine, new]) == reason, "in the second case"
    right = [FLOATS.astype(np.float64)] if truth else None
    judged = judge(Values([FLOATS], [FLOATS], [new], right), COARSE, moving(1e9), list)
    if reason is not None:
        assert (judged.reason, judged.error_b, judged.ratio) == (reason, INF, None)


WORDS = np.asarray(["a", "b"], dtype=object)


@pytest.mark.parametrize(
    ("old", "new", "equal"),
    [
        (np.asarray([1, 2]), np.asarray([1, 2]), True),
        (np.asarray([1, 2]), np.asarray([1, 3]), False),
        (np.asarray([2**62]), np.asarray([2**62 + 1]), False),
        (np.asarray([True, False]), np.asarray([True, True]), False),
        (WORDS, np.asarray(["a", "b"]), True),
        (WORDS, np.asarray(["a", "c"]), False),
    ],
)
def test_other_values_must_be_equal(old: Array, new: Array, equal: bool) -> None:
    judged = judge(Values([old], [old], [new], None), COARSE, never, nothing_planned)
    assert (judged.rule, judged.reason is None, judged.error_b > 0.0) == ("equal", equal, not equal)


def test_a_ratio_of_equal_errors_is_one() -> None:
    assert [ratio_of(error, error, 1e-7) for error in (0.0, 1e-9, 1e-3)] == [1.0, 1.0, 1.0]
    assert ratio_of(1e-3, 0.0, 0.0) > 1e300
    assert ratio_of(1e-7, 0.0, 1e-7) == 2.0, "the original counts as rounded by half a unit in the last place"


def test_a_disparity_leaves_no_figures_but_the_rule() -> None:
    """Whether or not there is a float64 evaluation; nothing is allowed, and no channel is to blame."""
    for right, rule in (([ROWS.astype(np.float64)], "float64"), (None, "original"), ([ROWS + 1.0], "original")):
        judged = judge(Values([ROWS], [ROWS], [ROWS[:1]], right), COARSE, never, nothing_planned)
        assert (judged.rule, judged.channel, judged.error_a, judged.error_b) == (rule, (), None, INF)
        assert (judged.allowed, judged.ratio, judged.share) == (0.0, None, 0.0)
    other = judge(Values([WORDS], [WORDS], [WORDS[:1]], None), COARSE, never, nothing_planned)
    assert (other.rule, other.channel, other.error_b, other.allowed) == ("equal", (), INF, 0.0)
    assert other.reason == "has shape [1] instead of [2]"


def test_the_figures_against_float64() -> None:
    """Errors of both in the channel with the least room, and the ratio of the largest ones."""
    old, new = shifted(2, 2e-5), shifted(1, 4e-5)
    judged = with_truth(new, old=old)
    assert (judged.channel, judged.error_a) == ((1,), 0.0)
    assert judged.error_b == pytest.approx(4e-5, rel=1e-2)
    assert judged.ratio == pytest.approx(2.0, rel=1e-2)
    assert judged.allowed == pytest.approx(FACTOR * EPS, rel=1e-2)
    assert with_truth(shifted(2, 4e-5), old=old).error_a == pytest.approx(2e-5, rel=1e-2)
    assert judged.reason is not None
    none = np.zeros((2, 0, 3), np.float32)
    empty = judge(Values([none], [none], [none], [none.astype(np.float64)]), COARSE, never, nothing_planned)
    assert (empty.rule, empty.reason, empty.error_a, empty.error_b, empty.ratio) == ("float64", None, 0.0, 0.0, 1.0)


def test_a_float64_evaluation_is_believed_up_to_eight_times_the_coarsest_rounding() -> None:
    old = np.full((4, 1), 1.0)
    for by, is_believed in ((7.9, True), (8.1, False)):
        assert believed([old], [old + by * 2.0**-10], 2.0**-10) is is_believed
