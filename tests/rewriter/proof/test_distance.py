"""Distances by hand; functions of single entries are evaluated a piece at a time."""

from __future__ import annotations

import numpy as np
import pytest

from rewriter.arrays import Array
from rewriter.proof.distance import PIECE, gap, in_pieces, largest, magnitude, ratio

INF, NAN = np.inf, np.nan
SHAPES: list[tuple[int, ...]] = [(), (0,), (3,), (PIECE,), (2, PIECE + 5), (2 * PIECE + 1,)]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_in_bounded_pieces(shape: tuple[int, ...]) -> None:
    sizes: list[int] = []

    def function(x: Array, y: Array | None, z: Array) -> Array:
        assert y is None
        sizes.append(x.size)
        return np.asarray(np.exp(x) * z)

    rng = np.random.default_rng(0)
    x, z = rng.normal(size=shape), rng.normal(size=shape[-1:])
    made = in_pieces(function, x, None, z)
    assert made.shape == shape
    np.testing.assert_array_equal(made, np.exp(x) * z)
    assert sum(sizes) == x.size
    assert max(sizes, default=0) <= PIECE


def test_a_piece_is_full() -> None:
    sizes: list[int] = []
    in_pieces(lambda x: sizes.append(x.size) or x, np.zeros(2 * PIECE + 1))  # type: ignore[func-returns-value]
    assert sizes == [PIECE, PIECE, 1]


@pytest.mark.parametrize(
    ("value", "truth", "distance"),
    [
        (3.0, 1.0, 2.0),
        (1.0, 3.0, 2.0),
        (-1.0, 2.0, 3.0),
        (NAN, 1.0, INF),
        (INF, 1.0, INF),
        (1.0, NAN, 0.0),
        (1.0, -INF, 0.0),
        (INF, -INF, 0.0),
        (NAN, NAN, 0.0),
        (1e308, -1e308, INF),
    ],
)
def test_distance_from_the_truth(value: float, truth: float, distance: float) -> None:
    """Nothing where the truth is not finite; infinite where only the value is not."""
    assert gap(np.asarray([value, 0.0]), np.asarray([truth, 0.0])).tolist() == [distance, 0.0]


def test_distances_broadcast_and_are_of_float64() -> None:
    found = gap(np.ones((2, 3), np.float16), np.asarray([1.0, np.nan, 1.0 + 2.0**-40]))
    np.testing.assert_array_equal(found, [[0.0, 0.0, 2.0**-40]] * 2)


def test_largest_and_magnitude() -> None:
    assert (largest(np.asarray([-3.0, -2.0])), largest(np.zeros(0))) == (-2.0, 0.0)
    assert magnitude(np.asarray([1.0, -5.0, INF, NAN], np.float16)) == 5.0
    assert magnitude(np.asarray([INF, NAN])) == magnitude(np.zeros(0)) == 0.0


def test_ratios_have_a_floor() -> None:
    assert (ratio(6.0, 2.0, 1.0), ratio(6.0, 1.0, 2.0), ratio(0.0, 0.0, 0.0)) == (3.0, 3.0, 0.0)
    assert ratio(1.0, 0.0, 0.0) > 1e300
