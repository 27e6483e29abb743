"""Bounds on the effect of changed coefficients, against ball arithmetic: they hold and are sharp."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from passes.certificates.changes import largest_change
from passes.certificates.intervals import affine, largest, least_size, product, size, weighted
from passes.programs.activations import ACTIVATIONS
from passes.programs.arithmetic import ARITHMETIC
from passes.programs.fitted import fitted_programs, gate_programs
from passes.programs.head import BiasToken, Head
from passes.programs.program import Program
from passes.programs.softmax import Array
from tests.passes.programs.balls import arb, ball_points, evaluator, narrow, precision, upper

COUNT = 2000 if os.environ.get("ATTNONLY_SLOW") else 150
ENTRIES = {entry.name: entry for entry in ACTIVATIONS}


def table(name: str, *parameters: float) -> Program:
    make = ENTRIES[name].program
    assert make is not None
    return make(parameters, ARITHMETIC[1])


def in_float32(program: Program) -> Program:
    """The coefficients as stored in a float32 graph."""
    heads = tuple(head.rounded(np.float32) for head in program.heads)
    linear, constant = (float(np.float32(number)) for number in (program.linear, program.constant))
    return replace(program, heads=heads, linear=linear, constant=constant)


def seen(program: Program, other: Program, *, gated: bool = False) -> float:
    """The largest change at many points, over max(1, |program|)."""
    worst, old, new = 0.0, evaluator(program), evaluator(other)

    def change(y: arb) -> arb:
        z = arb(1) if gated else y
        before = old(y, z)
        return (new(y, z) - before) / max(arb(1), abs(before).lower())

    with precision():
        for y in [
            *ball_points(program, np.random.default_rng(0), COUNT),
            *ball_points(other, np.random.default_rng(1), 8),
        ]:
            if abs(y) < 2.0**128:
                worst = max(worst, upper(narrow(partial(change, y), 1e-30, 1e-12)))
    return worst


PROGRAMS = [
    *(program for _, program in (*fitted_programs(), *gate_programs()) if in_float32(program) != program),
    *(program.scaled(inner=1.0 + 1.7e-8, outer=0.3) for name, program in fitted_programs() if name == "gelu"),
    table("silu", 1.7021, 0.37),
    table("silu", 50.3, 1.0),
    table("leaky_relu", 1.0, 0.013),
    table("sigmoid", 0.3, 1.1, 0.0),
    table("tanh", 2.3, 1.7, -0.1),
    table("clip", 0.3, 0.1, -1.1, 2.3),
    table("hard_sigmoid", 1.0 / 6.0, 0.5, 0.0, 1.0),
    table("silu_clipped", 50.0, 1.0, -1.0, 0.5),
    table("silu_clipped", 1.3, 1.0, -1.1, math.inf),
    table("gelu_clipped", 1.0, 1.0, -1.1, 2.3),
    table("celu", 1.0, 1.0, 1.0),
    table("celu", 1.0, 100.0, 0.01),
]
NAMES = [f"{number}-{program.name}" for number, program in enumerate(PROGRAMS)]


@pytest.mark.parametrize("program", PROGRAMS, ids=NAMES)
def test_rounded_coefficients(program: Program) -> None:
    other = in_float32(program)
    bound = largest_change(program, other, enough=1e-12)
    found = seen(program, other)
    if all(head.multiples is not None for head in program.heads) and program.constant == 0.0:
        found = max(found, seen(program, other, gated=True))
    # Around a kink that moves, both means are compared with the same value, which doubles the bound.
    assert found <= bound <= (2.0 if "clipped" in program.name else 1.2) * found + 1e-12


@pytest.mark.parametrize("which", ["slope", "offset", "value"])
@pytest.mark.parametrize("amount", [1e-9, 1e-3, 0.3])
def test_a_changed_bias_token(which: str, amount: float) -> None:
    program = Program(
        "p", (Head(1.0, (BiasToken(-1.0, 0.5, 2.0), BiasToken(3.0, -4.0, -3.0)), gamma=0.2, c=1.5, d=-0.25),)
    )
    (head,) = program.heads
    token = head.bias_tokens[0]
    moved = replace(token, **{which: getattr(token, which) + amount})
    other = replace(program, heads=(replace(head, bias_tokens=(moved, head.bias_tokens[1])),))
    bound, found = largest_change(program, other, enough=1e-14), seen(program, other)
    assert found <= bound <= 1.5 * found


def test_changes_of_several_heads_and_the_line_add_up_with_their_signs() -> None:
    """c and the linear term change by opposite amounts and cancel far to the right; without signs: 2e-6 of 11 y."""
    program = Program("p", (Head(1.0), Head(2.0, (BiasToken(0.0, 0.0, 1.0),), c=0.0, d=3.0)), linear=10.0)
    first, second = program.heads
    other = replace(program, heads=(replace(first, c=1.0 + 1e-6), second), linear=10.0 - 1e-6)
    bound, found = largest_change(program, other, enough=1e-14), seen(program, other)
    assert found <= bound <= 1.7e-7
    shifted = replace(program, constant=1e-5)
    assert largest_change(program, shifted, enough=1e-14) == pytest.approx(1e-5, rel=0.1)


def test_a_shift_of_all_logits_changes_nothing() -> None:
    program = Program("p", (Head(1.0, (BiasToken(-1.0, 0.5, 2.0),)),))
    assert largest_change(program, replace(program, heads=(program.heads[0].shifted(2.0, -4.0),)), enough=0.0) == 0.0


def test_multiples_are_compared_as_a_gate_as_well() -> None:
    """Near 0 a changed weight shows in h(g) u, but not in y h(y)."""
    program, other = (Program("p", (Head(0.0, (BiasToken(0.0, offset),)),), domain=1e-3) for offset in (0.0, 1e-6))
    assert largest_change(program, other, enough=1e-14) == pytest.approx(0.25e-6, rel=0.1)


def test_the_domain_is_what_counts() -> None:
    program, other = (Program("p", (Head(0.0, (BiasToken(1.0, -30.0, v),)),), domain=5.0) for v in (1.0, 2.0))
    assert largest_change(program, other, enough=1e-14) < 1e-10
    assert largest_change(replace(program, domain=40.0), other, enough=1e-14) == pytest.approx(0.9995 / 1.0, rel=0.2)


def test_quadratic_logits_have_no_bound() -> None:
    program = Program("q", (Head(1.0, alpha=0.1),))
    assert largest_change(program, program, enough=0.0) == math.inf


def test_rounded_states_the_bound() -> None:
    program = table("celu", 1.0, 1.0, 1.0)
    rounded = program.rounded(np.float32)
    assert rounded.coefficient_error == largest_change(program, in_float32(program), enough=1e-12)
    assert rounded.heads == in_float32(program).heads


# -- intervals ---------------------------------------------------------------------------------------------------


def interval(rng: np.random.Generator, *, positive: bool = False) -> tuple[Array, Array]:
    ends = np.sort(np.abs(rng.normal(size=(2, 500))) if positive else rng.normal(size=(2, 500)), axis=0)
    return ends[0], ends[1]


def test_interval_arithmetic_encloses() -> None:
    rng = np.random.default_rng(0)
    a, b, p = interval(rng), interval(rng), interval(rng, positive=True)
    for at, by in ((0.0, 1.0), (1.0, 0.0), (0.3, 0.8)):
        x, y, w = ((1.0 - t) * i[0] + t * i[1] for t, i in ((at, a), (by, b), (at, p)))
        for (low, high), value in (
            (product(a, b), x * y),
            (weighted(p, b), w * y),
            (affine(-2.0, 0.5, a), 0.5 - 2.0 * x),
        ):
            assert np.all((low <= value + 1e-15) & (value <= high + 1e-15))
        assert np.all((least_size(a) <= np.abs(x)) & (np.abs(x) <= size(a)))


def test_intervals_are_sharp() -> None:
    rng = np.random.default_rng(0)
    a, b, p = interval(rng), interval(rng), interval(rng, positive=True)
    corners = np.stack([x * y for x in a for y in b])
    np.testing.assert_array_equal(product(a, b), (np.min(corners, axis=0), np.max(corners, axis=0)))
    corners = np.stack([x * y for x in p for y in b])
    np.testing.assert_array_equal(weighted(p, b), (np.min(corners, axis=0), np.max(corners, axis=0)))
    assert least_size((np.array([-2.0, 1.0, -3.0]), np.array([1.0, 3.0, -2.0]))).tolist() == [0.0, 1.0, 2.0]


def bounds(low: Array, high: Array) -> tuple[Array, Array]:
    """Bounds of |y|^3 that are loose on wide cells."""
    middle = (low + high) / 2.0
    return np.maximum(np.abs(low), np.abs(high)) ** 3, np.abs(middle) ** 3


def test_cells_are_split_until_the_bound_is_tight() -> None:
    bound, value, cells = largest(bounds, np.array([-2.0, 0.0, 1.0]), tight=1.01, enough=0.0, most=10_000)
    assert 8.0 <= bound <= 1.01 * value
    assert value <= 8.0
    assert 10 < cells < 200


def test_bounds_of_cells_that_are_not_split_count() -> None:
    """A first cell is tight and kept; the others are still being split when the number of cells runs out."""

    def of(low: Array, high: Array) -> tuple[Array, Array]:
        kept = low < -1.0
        return np.where(kept, 5.0, 3.0), np.where(kept, 4.99, 0.0) * (high - low > 0.9)

    assert largest(of, np.array([-2.0, -1.0, 0.0]), tight=1.1, enough=1.0, most=1)[0] == 5.0

    def later(low: Array, high: Array) -> tuple[Array, Array]:
        first = high - low > 0.9
        return np.where(first & (low < -1.0), 2.0, 9.0), np.where(first & (low < -1.0), 1.9, 1.0)

    bound, _, cells = largest(later, np.array([-2.0, -1.0, 0.0]), tight=1.1, enough=1.0, most=50)
    assert bound == 9.0
    assert 50 < cells < 400


def test_an_infinite_bound_ends_the_search() -> None:
    def of(low: Array, high: Array) -> tuple[Array, Array]:
        return np.where(low < 0.0, np.inf, 1.0), np.zeros_like(high)

    assert largest(of, np.array([-1.0, 0.0, 1.0]), tight=1.1, enough=0.0, most=100)[0] == math.inf


def test_a_cell_of_a_few_numbers_stands() -> None:
    """A jump does not go away when cells are split."""

    def of(low: Array, high: Array) -> tuple[Array, Array]:
        return np.where((low <= 0.3) & (high >= 0.3), 7.0, 1.0), np.ones_like(low)

    bound, _, cells = largest(of, np.array([0.0, 1.0]), tight=1.1, enough=0.0, most=10_000)
    assert bound == 7.0
    assert cells < 500
