"""Certificates: they hold, they are tight, they notice a wrong coefficient, and their formulas are right."""

from __future__ import annotations

import math
import os
from dataclasses import replace

import numpy as np
import pytest

from passes.certificates import certify as certify_module
from passes.certificates.certify import _bounds, _head, certify
from passes.certificates.curves import CURVES
from passes.programs.fitted import bounded_programs, fitted_programs, gate_programs
from passes.programs.head import BiasToken, Head
from passes.programs.program import Program
from passes.programs.softmax import Array
from tests.conftest import slow
from tests.passes.programs.balls import arb, arb_series, precision, program_at, upper

ENTRIES = [
    pytest.param(activation, program, id=program.name)
    for activation, program in (*fitted_programs(), *bounded_programs(), *gate_programs())
]
SLOW = bool(os.environ.get("ATTNONLY_SLOW"))
POINTS = 10_000_000 if SLOW else 200_000

NEURON = Head(0.7, (BiasToken(-1.0, 0.5, 2.0), BiasToken(0.25, -1.0, -3.0)), gamma=0.2, c=1.5, d=-0.25)


def errors(activation: str, program: Program, y: Array) -> Array:
    return np.abs(program.evaluate(y) - CURVES[activation].jet(y)[0])


@pytest.mark.parametrize(("activation", "program"), ENTRIES)
def test_stated_errors_are_proved(activation: str, program: Program) -> None:
    certificate = certify(program, activation, domain=program.domain)
    assert certificate.bound <= program.max_error
    assert certificate.bound <= 1.0201 * certificate.seen
    assert program.max_error <= 1.01 * certificate.bound, "three digits, rounded up"
    assert str(certificate.cells) in certificate.method


@pytest.mark.parametrize(
    ("activation", "program"),
    [
        pytest.param(*each.values, id=each.id, marks=() if place % 4 == 0 else slow)
        for place, each in enumerate(ENTRIES)
    ],
)
def test_the_bound_holds_at_random_points(activation: str, program: Program) -> None:
    """10^7 points if ATTNONLY_SLOW is set: half of them near 0, some far out, none on the grid of the cells."""
    rng, count = np.random.default_rng(5), 20_000  # arrays that stay in the cache
    for _ in range(POINTS // count):
        y = np.concatenate([rng.uniform(-8.0, 8.0, count // 2), 30.0 * rng.standard_cauchy(count // 2)])
        y = y[np.abs(y) <= min(program.domain, 1e6)]
        seen = errors(activation, program, y)
        above = seen > program.max_error  # by rounding of the program, and of the curve; its bound takes long
        rounding = program.float64_rounding(y[above]) + 8.0 * 2.0**-53 * np.abs(y[above])
        assert np.all(seen[above] <= program.max_error + rounding)


@pytest.mark.parametrize(("activation", "program"), ENTRIES)
@pytest.mark.parametrize("which", ["slope", "offset", "value"])
def test_a_wrong_coefficient_is_noticed(activation: str, program: Program, which: str) -> None:
    """One coefficient of the bias token with the largest weight at -0.5 is off by 1e-3 of its magnitude, or by 1e-3.

    For programs with errors of 1e-3 and more, whose largest error is elsewhere, by 20 times that.
    """
    head = program.heads[0]
    heaviest = int(np.argmax(head.keys.weights(np.array([-0.5]))[1:, 0]))
    token, amount = head.bias_tokens[heaviest], max(1e-3, 20.0 * program.max_error)
    moved = replace(token, **{which: getattr(token, which) + amount * max(1.0, abs(getattr(token, which)))})
    tokens = (*head.bias_tokens[:heaviest], moved, *head.bias_tokens[heaviest + 1 :])
    wrong = replace(program, heads=(replace(head, bias_tokens=tokens), *program.heads[1:]))
    bound = certify(wrong, activation, domain=program.domain).bound
    assert bound > 1.05 * program.max_error
    if program.max_error < 1e-5:
        assert bound > 10.0 * program.max_error


@pytest.mark.parametrize("name", CURVES)
def test_curves_know_their_derivatives(name: str) -> None:
    """Finite differences at points away from breaks; the bound on the third derivative holds on cells."""
    curve, step = CURVES[name], 1e-4
    y = np.linspace(-7.03, 6.97, 1001)
    y = y[np.all([np.abs(y - place) > 3.0 * step for place in curve.breaks], axis=0)]
    below, at, above = curve.jet(y - step), curve.jet(y), curve.jet(y + step)
    np.testing.assert_allclose((above[0] - below[0]) / (2.0 * step), at[1], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose((above[1] - below[1]) / (2.0 * step), at[2], rtol=1e-6, atol=1e-6)
    third = np.abs(above[2] - below[2]) / (2.0 * step)
    assert np.all(third <= curve.third(np.abs(y) - step, np.abs(y) + step, np.sign(y)) + 1e-6)


@pytest.mark.parametrize("name", CURVES)
def test_curves_tend_to_their_ends(name: str) -> None:
    for end, sign in ((CURVES[name].left, -1.0), (CURVES[name].right, 1.0)):
        if end is None:
            continue
        for start in (2.0, 3.0, 5.0, 9.0):
            y = sign * np.linspace(start, 40.0, 2001)
            gap = np.abs(CURVES[name].jet(y)[0] - end.slope * y - end.constant)
            assert np.max(gap) <= end.excess(start) + 1e-14 * 40.0


def test_derivatives_of_a_head() -> None:
    """The cumulant formulas against finite differences, and the bound on the third derivative over cells."""
    step, y = 1e-4, np.linspace(-6.0, 6.0, 601)
    (value, first, second), third, _, _ = _head(NEURON, y, np.full_like(y, step))
    np.testing.assert_allclose(value, NEURON.evaluate(y, y), rtol=1e-13)
    above, below = (_head(NEURON, y + shift, np.full_like(y, step))[0] for shift in (step, -step))
    np.testing.assert_allclose((above[0] - below[0]) / (2.0 * step), first, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose((above[1] - below[1]) / (2.0 * step), second, rtol=1e-6, atol=1e-7)
    assert np.all(np.abs(above[2] - below[2]) / (2.0 * step) <= third + 1e-6)


def test_bounds_hold_on_wide_cells() -> None:
    """Against the largest error at 1000 points in each cell."""
    program = Program("p", (NEURON,), linear=0.1)
    edges = np.linspace(-3.0, 3.0, 121)
    upper, seen = _bounds(program, CURVES["gelu"], edges[:-1], edges[1:])
    inside = edges[:-1, None] + (edges[1:] - edges[:-1])[:, None] * np.linspace(0.0, 1.0, 1000)
    largest = errors("gelu", program, inside.ravel()).reshape(inside.shape).max(axis=1)
    assert np.all(largest <= upper)
    assert np.all(seen <= largest + 1e-15)


def test_exact_program_is_certified_to_rounding() -> None:
    assert certify(Program("silu", (Head(1.0),)), "silu").bound <= 1e-12


@pytest.mark.parametrize(("activation", "program"), ENTRIES)
@pytest.mark.parametrize(("inner", "outer"), [(-1.5, 3.0), (1.0 + 1.7e-8, 1.0), (0.37, -1e-3), (70.0, 1e4)])
def test_factors(activation: str, program: Program, inner: float, outer: float) -> None:
    """The error is the outer factor times the program's, plus a sufficient allowance for rounding the coefficients."""
    scaled = program.scaled(inner=inner, outer=outer)
    assert scaled.max_error == abs(outer) * program.max_error + 2.0**-40 * max(1.0, abs(outer))
    y = np.random.default_rng(0).uniform(-12.0, 12.0, 40) / abs(inner)
    with precision(300):
        for value in y.tolist():
            ideal = arb(outer) * program_at(program, arb(inner) * arb(value), arb(inner) * arb(value))
            change = upper(program_at(scaled, arb(value), arb(value)) - ideal)
            assert change <= 2.0**-43 * max(1.0, abs(outer), float(abs(ideal).upper())), "an eighth of what is added"


def test_a_program_with_another_end_has_no_bound_over_all_reals() -> None:
    program = Program("silu", (Head(1.0),), linear=1e-9)
    assert math.isinf(certify(program, "silu").bound)
    assert 1e-8 <= certify(program, "silu", domain=10.0).bound <= 1.0201e-8


def test_quadratic_logits_are_refused() -> None:
    with pytest.raises(ValueError, match="quadratic self logit"):
        certify(Program("q", (Head(1.0, alpha=0.1),)), "silu")


def test_running_out_of_cells_keeps_the_bounds_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """With too few cells the bound is larger, never smaller: cells that are not split any more still count."""
    activation, program = next(row for row in fitted_programs() if row[1].name == "gelu_erf_m6")
    enough = certify(program, activation)
    for most in (1, 600, 1500):
        monkeypatch.setattr(certify_module, "_MOST_CELLS", most)
        assert certify(program, activation).bound >= enough.bound


# -- the whole proof again, in ball arithmetic -------------------------------------------------------------------


def series_of(activation: str, y: arb_series) -> arb_series:
    """The activations of the table that have programs, as Taylor series of balls."""
    if activation == "gelu":
        return y * (-y / arb(2).sqrt()).erfc() / 2
    if activation == "gelu_tanh":
        return y / (1 + (-2 * (2 / arb.pi()).sqrt() * (y + arb("0.044715") * y * y * y)).exp())
    assert activation == "softplus"
    return (1 + y.exp()).log() if float(y[0].mid()) < 0.0 else y + (1 + (-y).exp()).log()


def error_of(activation: str, program: Program, y: arb_series) -> arb_series:
    total = y * arb(program.linear) + arb(program.constant) - series_of(activation, y)
    for head in program.heads:
        logits = [y * arb(head.beta) + arb(head.gamma), *(y * arb(t.slope) + arb(t.offset) for t in head.bias_tokens)]
        values = [arb(token.value) for token in head.bias_tokens]
        top = max(logits, key=lambda logit: float(logit[0].mid()))
        weights = [(logit - top).exp() for logit in logits]
        whole, weight_of_all = weights[0] * (y * arb(head.c) + arb(head.d)), weights[0]
        for weight, value in zip(weights[1:], values, strict=True):
            whole, weight_of_all = whole + weight * value, weight_of_all + weight
        total = total + whole / weight_of_all
    return total


def bound_on(activation: str, program: Program, low: float, high: float) -> float:
    """A bound on the error over a cell: the Taylor polynomial of degree 8, and the ninth coefficient over the cell.

    Steep heads (beta above 200) change too much over a cell of width 1/32, so cells are halved until the ninth
    coefficient is small.
    """
    middle, half = (arb(low) + arb(high)) / 2, (arb(high) - arb(low)) / 2
    rest = error_of(activation, program, arb_series([arb(middle.mid(), half.upper()), 1], prec=10))[9] * half**9
    if not upper(rest) <= 1e-3 * program.max_error and high - low > 2.0**-20:
        centre = (low + high) / 2
        return max(bound_on(activation, program, low, centre), bound_on(activation, program, centre, high))
    exact = error_of(activation, program, arb_series([middle, 1], prec=9))
    parts, worst = 16, 0.0
    for part in range(parts):
        place = arb(half * (2 * part + 1 - parts) / parts, (half / parts).upper())
        value = arb(0)
        for power in range(8, -1, -1):
            value = value * place + exact[power]
        worst = max(worst, upper(value + arb(0, upper(rest))))
    return worst


PROVED_AGAIN = ENTRIES if SLOW else [entry for entry in ENTRIES if entry.id in {"gelu_erf_m8", "gelu_tanh_m4"}]


@pytest.mark.parametrize(("activation", "program"), PROVED_AGAIN)
def test_stated_errors_are_proved_in_ball_arithmetic(activation: str, program: Program) -> None:
    """Not by `certify`: up to |y| = 12, in cells of width 1/32, every third one by default."""
    edges = np.arange(-384, 385) / 32.0
    cells = list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))
    with precision(160):
        worst = max(bound_on(activation, program, *cell) for cell in cells[:: 1 if SLOW else 3])
    assert worst <= 1.005 * program.max_error
