"""The parts of gates: heads of each term, keys relative to the self key, and what the limit's error is bounded by."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from passes.programs.arithmetic import ARITHMETIC
from passes.programs.gates import (
    _centred,
    _constants,
    _line,
    _snapped,
    _split,
    _values,
    gate,
    limit_error,
    line,
    needs_line,
)
from passes.programs.head import FACTORED, BiasToken, Head
from passes.programs.program import Program, largest_change

FLOAT = ARITHMETIC[1]
SMALL = 2.0**-10
G = np.linspace(-6.0, 6.0, 49)
SILU = Program("silu", (Head(beta=1.0, bias_tokens=(BiasToken(0.0, 0.0, 0.0),), c=1.0),))


def mean(heads: tuple[Head, ...], g: np.ndarray, u: np.ndarray) -> np.ndarray:
    """The sum of heads whose self values are multiples of u."""
    return np.asarray(Program("p", heads).evaluate(g, u))


def test_a_line_is_a_hyperbolic_tangent() -> None:
    heads = _line(3.0, SMALL)
    assert len(heads) == 2
    np.testing.assert_allclose(
        mean(heads, G, np.ones_like(G)), 3.0 * np.tanh(SMALL * G) / SMALL, rtol=1e-12, atol=1e-12
    )


def test_constants_become_multiples_of_what_the_values_read() -> None:
    head = Head(beta=1.0, gamma=0.5, bias_tokens=(BiasToken(0.0, 0.0, -2.0), BiasToken(-1.0, 0.25, 4.0)), d=3.0, c=0.0)
    u = np.linspace(-2.0, 2.0, len(G))
    keys = np.exp([G + 0.5, np.zeros_like(G), 0.25 - G])
    expected = u * (3.0 * keys[0] - 2.0 * keys[1] + 4.0 * keys[2]) / keys.sum(0)
    np.testing.assert_allclose(mean(_constants(head), G, u), expected, rtol=1e-12, atol=1e-12)


def test_a_self_value_is_split_in_two() -> None:
    """c/e + d and -c/e + d, over two keys of half the weight each, at slopes of plus and minus e."""
    head = Head(beta=0.0, bias_tokens=(BiasToken(-1.0, 0.5, 2.0),), c=3.0, d=0.25)
    heads = _split(head, SMALL)
    assert len(heads) == 3
    keys = np.exp([SMALL * G, -SMALL * G]) / 2.0
    token = np.exp(0.5 - G)
    expected = ((3.0 / SMALL + 0.25) * keys[0] + (0.25 - 3.0 / SMALL) * keys[1] + 2.0 * token) / (keys.sum(0) + token)
    np.testing.assert_allclose(mean(heads, G, np.ones_like(G)), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("c", "d", "exact"),
    [(3.0, 0.25, True), (0.0, 0.1, True), (0.7, 0.1, False), (-0.7, 0.1, False), (-0.9995, 0.6, False)],
)
def test_the_rounding_of_two_split_values(c: float, d: float, exact: bool) -> None:
    found = _values(Head(beta=0.0, bias_tokens=(), c=c, d=d), SMALL)
    each = [
        abs(Fraction(c / SMALL + d) - Fraction(c) / Fraction(SMALL) - Fraction(d)),
        abs(Fraction(-c / SMALL + d) + Fraction(c) / Fraction(SMALL) - Fraction(d)),
    ]
    assert found == float(max(each))
    assert (found == 0.0) is exact


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        (BiasToken(0.5, 2.0, 7.0), (-1.5, 1.0)),  # relative to the self key
        (BiasToken(2.0, 50.0, 7.0), (0.0, 49.0)),
        (BiasToken(2.0, 90.0, 7.0), (0.0, 89.0)),  # without a slope it has no place to keep
        (BiasToken(1.0, 90.0, 7.0), (-1.0, 89.0)),
        (BiasToken(2.0 + 96.0, 1.0 + 60.0, 7.0), (96.0, 60.0)),
        (BiasToken(2.0 + 96.0, 1.0 - 60.0, 7.0), (96.0, -60.0)),
        (BiasToken(2.0 + 96.0, 1.0 + 960.0, 7.0), (128.0, 1280.0)),  # steep: the next power of two, the same place
        (BiasToken(2.0 - 90.0, 1.0 + 900.0, 7.0), (-64.0, 640.0)),
    ],
)
def test_tokens_relative_to_the_self_key(token: BiasToken, expected: tuple[float, float]) -> None:
    head = Head(beta=2.0, gamma=1.0, bias_tokens=(token,), c=1.0)
    found = _snapped(head, token)
    assert (found.slope, found.offset, found.value) == (*expected, 7.0)
    if abs(found.offset) > FACTORED and found.slope:
        assert math.log2(abs(found.slope)).is_integer()
        assert found.offset / found.slope == pytest.approx((token.offset - 1.0) / (token.slope - 2.0), rel=1e-15)


def test_centring_changes_nothing_but_the_keys() -> None:
    head = Head(beta=2.0, gamma=1.0, bias_tokens=(BiasToken(0.5, 2.0, 7.0),), c=1.0, d=0.5)
    program = Program("p", (head,), max_error=1e-3)
    found = _centred(program)
    (made,) = found.heads
    assert (made.beta, made.gamma, made.c, made.d) == (0.0, 0.0, 1.0, 0.5)
    assert made.bias_tokens == (BiasToken(-1.5, 1.0, 7.0),)
    np.testing.assert_allclose(found.evaluate(G), program.evaluate(G), rtol=1e-12)
    assert 1e-3 <= found.max_error <= 1e-3 + 1e-9


def test_what_centring_changes_counts() -> None:
    """A steep key whose slope becomes a power of two moves the output around its kink."""
    steep = Head(beta=0.0, bias_tokens=(BiasToken(96.0, 960.0, 2.0),), c=0.0, d=1.0)
    program = Program("p", (steep,), max_error=0.5)
    found = _centred(program)
    cost = largest_change(program, found)
    assert 0.01 < cost < 1.0
    assert found.max_error == pytest.approx(0.5 + cost * 1.5)


@pytest.mark.parametrize(
    ("program", "needs"),
    [
        (SILU, True),
        (Program("line", (), linear=1.0), True),
        (Program("line", (), linear=-1.0), True),
        (Program("constant", (), constant=1.0), False),
        (Program("sigmoid", (Head(beta=1.0, bias_tokens=(BiasToken(0.0, 0.0, 0.0),), c=0.0, d=1.0),)), False),
        (replace(SILU, double=True), False),
    ],
)
def test_which_programs_need_a_line(program: Program, needs: bool) -> None:
    assert needs_line(program) is needs


def test_the_gate_of_a_bounded_function_is_exact() -> None:
    """Its values are constants, and a constant of h is a multiple of u."""
    sigmoid = Program("sigmoid", (Head(beta=1.0, bias_tokens=(BiasToken(0.0, 0.0, 0.0),), c=0.0, d=1.0),), constant=2.0)
    made = gate(sigmoid, FLOAT)
    assert (made.name, made.linear, made.constant, made.max_error, made.double) == (
        "sigmoid_gate",
        2.0,
        0.0,
        0.0,
        False,
    )
    u = np.linspace(-3.0, 3.0, len(G))
    np.testing.assert_allclose(made.evaluate(G, u), u * (1.0 / (1.0 + np.exp(-G)) + 2.0), rtol=1e-13)


@pytest.mark.parametrize("linear", [0.0, 0.5])
@pytest.mark.parametrize("c", [0.0, 1.0])
def test_a_gate_multiplies_what_the_values_read(linear: float, c: float) -> None:
    """Within its stated error, over max(1, |h|), on its domain."""
    head = Head(beta=1.0, bias_tokens=(BiasToken(0.0, 0.0, 0.25),), c=c, d=0.5)
    program = Program("p", (head,), linear=linear, constant=-1.0)
    made = gate(program, FLOAT)
    u = np.linspace(-3.0, 3.0, len(G))
    h = (np.exp(G) * (c * G + 0.5) + 0.25) / (np.exp(G) + 1.0) + linear * G - 1.0
    error = np.abs(made.evaluate(G, u) - h * u) / (np.maximum(1.0, np.abs(h)) * np.maximum(np.abs(u), 1e-300))
    allowed = made.max_error + made.rounding
    assert np.max(error) <= max(allowed, 1e-14)
    assert made.max_error <= 4.0 * FLOAT.limit
    assert made.double is bool(c or linear)
    if made.double:
        assert made.domain == min(math.sqrt(3.0 * FLOAT.limit), 0.5) / FLOAT.small


def test_gates_of_other_programs_are_refused() -> None:
    for program in (
        replace(SILU, heads=SILU.heads * 2),
        replace(SILU, heads=()),
    ):
        with pytest.raises(ValueError, match="silu is not a program of one head"):
            gate(program, FLOAT)


def test_the_line_as_a_program() -> None:
    made = line(-2.0, FLOAT, "twice")
    assert (made.name, made.double, made.linear, made.constant) == ("twice", True, 0.0, 0.0)
    u = np.linspace(-3.0, 3.0, len(G))
    np.testing.assert_allclose(made.evaluate(G, u), -2.0 * G * u, rtol=2.0 * FLOAT.limit, atol=1e-6)


@pytest.mark.parametrize("domain", [4.0, 40.0])
def test_the_limits_error_is_bounded_and_nearly_reached(domain: float) -> None:
    """tanh(e g) / e in place of g alone: g - tanh(e g) / e = e^2 g^3 / 3 - ..., over max(1, |g|)."""
    bound = limit_error(Head(beta=0.0, bias_tokens=(), c=0.0), 1.0, SMALL, domain)
    exact = (domain - math.tanh(SMALL * domain) / SMALL) / domain
    assert exact <= bound <= 1.15 * exact


def test_the_limits_error_of_a_sigmoid_linear_unit() -> None:
    """The two halves of the self key, their values plus and minus 1/e: measured on a grid, and a little above."""
    head = SILU.heads[0]
    bound = limit_error(head, 0.0, SMALL, 40.0)
    g = np.linspace(-40.0, 40.0, 8001)
    x = SMALL * g
    split = (np.sinh(x) / SMALL) / (np.cosh(x) + np.exp(-g))
    plain = g / (1.0 + np.exp(-g))
    error = np.max(np.abs(split - plain) / np.maximum(1.0, np.abs(plain)))
    assert error <= bound <= 1.3 * error
