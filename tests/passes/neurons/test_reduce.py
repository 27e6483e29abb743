"""Which neurons are not needed, on arrays by hand: directions, multiples that are exact, constants, the last two."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from passes.neurons import reduce as room
from passes.neurons.reduce import (
    Nature,
    Neurons,
    _at_rest,
    _directions,
    _fits,
    _held,
    _times,
    reduce_neurons,
)
from passes.programs.softmax import Array


def relu(gate: Array, value: Array) -> Array:
    return np.maximum(gate, 0.0)


def silu(gate: Array, value: Array) -> Array:
    return gate / (1.0 + np.exp(-gate))


def neurons(gate: Any, *rows: Any, value: Any = None, dtype: Any = np.float32, biases: int = 1) -> Neurons:
    """Neurons whose last column of weights is a bias."""
    matrix = np.asarray(gate, dtype)
    other = None if value is None else np.asarray(value, dtype)
    inputs = matrix.shape[1] - biases
    return Neurons(matrix, inputs, other, inputs, tuple(np.asarray(each, dtype) for each in rows))


def nature(count: int, function: Any = relu, degree: int | None = 1, off: Any = None, affine: Any = None) -> Nature:
    never = np.zeros(count, bool)
    return Nature(
        function, degree, never if off is None else np.array(off), never if affine is None else np.array(affine)
    )


@pytest.mark.parametrize(
    ("row", "sign", "exponent", "dtype", "expected"),
    [
        ([1.5, -3.0], 1.0, 2, np.float32, [6.0, -12.0]),
        ([1.5, -3.0], -1.0, -1, np.float32, [-0.75, 1.5]),
        ([0.0, 65504.0], 1.0, 0, np.float16, [0.0, 65504.0]),
        ([1.0, 65504.0], 1.0, 1, np.float16, None),  # infinite in float16
        ([1.0, 65504.0], 1.0, 1, np.float32, [2.0, 131008.0]),
        ([1.0 + 2.0**-10], 1.0, -14, np.float16, [(1.0 + 2.0**-10) * 2.0**-14]),
        ([1.0 + 2.0**-10], 1.0, -15, np.float16, None),  # a digit less
        ([1.0 + 2.0**-52], 1.0, -1022, np.float64, [(1.0 + 2.0**-52) * 2.0**-1022]),
        ([1.0 + 2.0**-52], 1.0, -1023, np.float64, None),
        ([1.0], 1.0, 1024, np.float64, None),
    ],
)
def test_multiples_of_a_row_are_exact_or_none(
    row: list[float], sign: float, exponent: int, dtype: Any, expected: list[float] | None
) -> None:
    found = _times(np.array(row, dtype), sign, exponent)
    assert (None if found is None else found.tolist()) == expected


def test_directions() -> None:
    """The largest entry in [1/2, 1), whatever its sign; rows of zeros and rows that would be rounded stay."""
    rows, exponents = _directions(np.array([[3.0, -12.0], [0.25, 0.0], [0.0, -0.0], [1.0, -0.5]]), scaled=True)
    assert rows.tolist() == [[0.1875, -0.75], [0.5, 0.0], [0.0, 0.0], [0.5, -0.25]]
    assert exponents.tolist() == [4, -1, 0, 1]
    assert not np.signbit(rows[2]).any()
    tiny = np.array([[2.0**1000, 2.0**-74 * (1.0 + 2.0**-52)]])
    rows, exponents = _directions(tiny, scaled=True)
    assert (rows.tolist(), exponents.tolist()) == (tiny.tolist(), [0])
    rows, exponents = _directions(np.array([[3.0, -0.0]], np.float16), scaled=False)
    assert (rows.tolist(), exponents.tolist()) == ([[3.0, 0.0]], [0])
    assert rows.dtype == np.float64
    assert not np.signbit(rows).any()


def test_what_no_input_moves() -> None:
    """Biases add up; a negative zero is a zero."""
    matrix = np.array([[0.0, -0.0, 1.5, 2.0], [0.0, 1e-30, 1.0, 1.0]], np.float32)
    at_rest, still = _at_rest(matrix, 2)
    assert (at_rest.tolist(), still.tolist()) == ([3.5, 2.0], [True, False])


@pytest.mark.parametrize(
    ("gate", "value", "held"),
    [
        ((0.0, 2.0), (0.0, 3.0), 6.0),
        ((0.0, -2.0), (0.0, 3.0), 0.0),
        ((0.0, -2.0), (1.0, 3.0), 0.0),  # the gate is closed
        ((1.0, 2.0), (0.0, 0.0), 0.0),  # there is nothing behind it
        ((1.0, 2.0), (0.0, 3.0), np.nan),
        ((0.0, 2.0), (1.0, 3.0), np.nan),
        ((1.0, -2.0), (1.0, 0.0), np.nan),
    ],
)
def test_what_a_gated_neuron_holds(gate: tuple[float, float], value: tuple[float, float], held: float) -> None:
    both = neurons([gate], [[1.0]], value=[value])
    np.testing.assert_array_equal(_held(both, lambda g, u: np.maximum(g, 0.0) * u), [held])


def test_what_a_plain_neuron_holds() -> None:
    np.testing.assert_array_equal(_held(neurons([[0.0, 2.0], [0.0, -2.0], [1.0, 2.0]], []), relu), [2.0, 0.0, np.nan])


W = [[1.0, 2.0, 0.5], [-1.0, 3.0, 0.25], [2.0, -5.0, 1.0], [0.5, 0.75, -2.0]]
"""Four neurons of two inputs and a bias, of different directions."""
R = [[1.0, 2.0], [3.0, 5.0], [7.0, 11.0], [13.0, 17.0]]


def test_all_are_needed() -> None:
    found = reduce_neurons(neurons(W, R), nature(4, affine=[True, False, True, False]))
    assert found.kept.tolist() == [0, 1, 2, 3]
    assert (found.dead, found.constant, found.duplicate, found.proportional, found.affine) == (0, 0, 0, 0, 2)
    assert (found.removed, found.rows, found.shifts) == (0, ({},), (None,))


def test_each_kind_is_counted() -> None:
    """Seven neurons: of each kind one, and those that stay; what is affine counts only if it stays."""
    gate = [*W[:3], [0.0, 0.0, 2.0], W[0], [4.0, -10.0, 2.0], W[3]]
    rows = [*R[:3], [1.0, -1.0], [10.0, 20.0], [100.0, 200.0], [0.0, 0.0]]
    found = reduce_neurons(neurons(gate, rows), nature(7, affine=[True, True, False, True, True, True, True]))
    assert found.kept.tolist() == [0, 1, 5]
    assert (found.dead, found.constant, found.duplicate, found.proportional, found.affine) == (1, 1, 1, 1, 3)
    assert found.removed == 4
    assert {index: row.tolist() for index, row in found.rows[0].items()} == {0: [11.0, 22.0], 5: [103.5, 205.5]}
    assert [None if shift is None else shift.tolist() for shift in found.shifts] == [[2.0, -2.0]]


def test_what_is_proved_to_be_off_is_dead() -> None:
    found = reduce_neurons(neurons(W, R), nature(4, off=[False, True, False, False], affine=[True] * 4))
    assert (found.kept.tolist(), found.dead, found.affine) == ([0, 2, 3], 1, 3)


def test_the_largest_keeps_the_others() -> None:
    """Of equal ones the first; a factor of t^n, with n the degree."""
    gate = [W[0], W[1], [2.0, 4.0, 1.0], [4.0, 8.0, 2.0], [4.0, 8.0, 2.0]]
    rows = [[1.0], [9.0], [1.0], [1.0], [1.0]]
    for degree, total in ((1, 1 / 4 + 1 / 2 + 2), (2, 1 / 16 + 1 / 4 + 2)):
        found = reduce_neurons(neurons(gate, rows), nature(5, degree=degree))
        assert (found.kept.tolist(), found.duplicate, found.proportional) == ([1, 3], 1, 2)
        assert found.rows[0][3].tolist() == [total]


def test_signs_and_scales_of_values() -> None:
    """They are pulled out of any activation; the gates must be equal unless it is homogeneous."""
    value = [[1.0, 0.0, 0.5], [1.0, 1.0, 1.0], [-2.0, 0.0, -1.0], [1.0, 0.0, 0.5]]
    gated = neurons([W[0], W[1], W[0], W[0]], [[1.0], [9.0], [10.0], [100.0]], value=value)
    found = reduce_neurons(gated, nature(4, lambda g, u: silu(g, g) * u, None))
    assert (found.kept.tolist(), found.duplicate, found.proportional) == ([1, 2], 0, 2)
    assert found.rows[0][2].tolist() == [10.0 - 0.5 - 50.0]


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_groups_span_chunks(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_CHUNK", chunk)
    found = reduce_neurons(neurons([*W, *W], [*R, *R]), nature(8))
    assert (found.kept.tolist(), found.duplicate) == ([0, 1, 2, 3], 4)


def test_rows_that_cancel_leave_a_dead_neuron() -> None:
    """In all second operators; else it stays."""
    gate, rows = [*W[:3], W[0]], [*R[:3], [-1.0, -2.0]]
    found = reduce_neurons(neurons(gate, rows), nature(4))
    assert (found.kept.tolist(), found.dead, found.duplicate, found.rows) == ([1, 2], 1, 1, ({},))
    found = reduce_neurons(neurons(gate, rows, R), nature(4))
    assert (found.kept.tolist(), found.dead, found.duplicate) == ([0, 1, 2], 0, 1)
    assert [each[0].tolist() for each in found.rows] == [[0.0, 0.0], [14.0, 19.0]]


def test_all_second_operators_must_agree() -> None:
    """A neuron that one of them still reads is not dead, and one whose row overflows in one of them stays."""
    zero = [[0.0, 0.0], *R[1:]]
    assert reduce_neurons(neurons(W, zero, R), nature(4)).removed == 0
    assert reduce_neurons(neurons(W, zero, zero), nature(4)).dead == 1
    large = [[6e4, 1.0], *R[1:3], [6e4, 1.0]]
    gate = [*W[:3], W[0]]
    for rows in ((R, large), (large, R)):
        assert reduce_neurons(neurons(gate, *rows, dtype=np.float16), nature(4)).removed == 0
        assert reduce_neurons(neurons(gate, *rows), nature(4)).duplicate == 1


def test_constants_whose_sum_overflows_all_stay() -> None:
    gate = [[0.0, 0.0, 2.0], [0.0, 0.0, 2.0], W[0], W[1]]
    rows = [[2e4, 1.0], [2e4, 1.0], *R[:2]]
    found = reduce_neurons(neurons(gate, rows), nature(4))
    assert (found.constant, found.kept.tolist()) == (2, [2, 3])
    assert found.shifts[0] is not None
    assert found.shifts[0].tolist() == [8e4, 4.0]
    narrow = reduce_neurons(neurons(gate, rows, dtype=np.float16), nature(4))
    assert (narrow.constant, narrow.shifts) == (0, (None,))
    assert narrow.duplicate == 1, "they are still equal"


@pytest.mark.parametrize("dead", [2, 3, 4])
def test_two_neurons_always_stay(dead: int) -> None:
    """The first ones that could go, with rows of zeros: what they did is nothing, or done elsewhere."""
    rows = [*[[0.0, 0.0]] * dead, *R[dead:]]
    found = reduce_neurons(neurons(W, rows, rows), nature(4))
    spared = max(0, 2 - (4 - dead))
    assert found.kept.tolist() == [*range(spared), *range(dead, 4)]
    assert found.dead == dead - spared
    for each in found.rows:
        assert {index: row.tolist() for index, row in each.items()} == {index: [0.0, 0.0] for index in range(spared)}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["gate", "value", "rows"])
def test_what_is_not_finite_is_never_touched(bad: float, where: str) -> None:
    gate, value, rows = (np.array([each[0], *each[1:3], each[0]]) for each in (W, W, R))
    assert reduce_neurons(neurons(gate, rows, value=value), nature(4)).duplicate == 1
    {"gate": gate, "value": value, "rows": rows}[where][3, 0] = bad
    assert reduce_neurons(neurons(gate, rows, value=value), nature(4)).removed == 0


def test_what_fits_a_type() -> None:
    assert _fits(np.array([65504.0, -65504.0]), np.float16)
    assert not _fits(np.array([65536.0]), np.float16)
    assert not _fits(np.array([np.nan]), np.float32)
    assert not _fits(np.array([1e39]), np.float32)
