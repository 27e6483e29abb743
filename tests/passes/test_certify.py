"""Certificates: they hold, they are tight, they notice a wrong coefficient, and their formulas are right."""

from __future__ import annotations

import math
import os
from dataclasses import replace

import numpy as np
import pytest

from passes.certify import _bounds, _head, certify
from passes.curves import CURVES
from passes.fitted import bounded_programs, fitted_programs, gate_programs
from passes.programs import Array, BiasToken, Head, Program

ENTRIES = [
    pytest.param(activation, program, id=program.name)
    for activation, program in (*fitted_programs(), *bounded_programs(), *gate_programs())
]
POINTS = 10_000_000 if os.environ.get("ATTNONLY_SLOW") else 400_000

NEURON = Head(0.7, (BiasToken(-1.0, 0.5, 2.0), BiasToken(0.25, -1.0, -3.0)), gamma=0.2, c=1.5, d=-0.25)


def errors(activation: str, program: Program, y: Array) -> Array:
    return np.abs(program.evaluate(y) - CURVES[activation].jet(y)[0])


@pytest.mark.parametrize(("activation", "program"), ENTRIES)
def test_stated_errors_are_proved(activation: str, program: Program) -> None:
    certificate = certify(program, activation, domain=program.domain)
    assert certificate.bound <= program.max_error
    assert certificate.bound <= 1.3 * certificate.seen
    assert str(certificate.cells) in certificate.method


@pytest.mark.parametrize(("activation", "program"), ENTRIES)
def test_the_bound_holds_at_random_points(activation: str, program: Program) -> None:
    """10^7 points where ATTNONLY_SLOW is set: half of them near 0, some far out, none on the cells' grid."""
    rng = np.random.default_rng(5)
    for _ in range(max(1, POINTS // 1_000_000)):
        count = min(POINTS, 1_000_000)
        y = np.concatenate([rng.uniform(-8.0, 8.0, count // 2), 30.0 * rng.standard_cauchy(count // 2)])
        y = y[np.abs(y) <= min(program.domain, 1e6)]
        assert np.all(errors(activation, program, y) <= program.max_error + 1e-14 * np.maximum(1.0, np.abs(y)))


@pytest.mark.parametrize(("activation", "program"), ENTRIES)
@pytest.mark.parametrize("which", ["slope", "offset", "value"])
def test_a_wrong_coefficient_is_noticed(activation: str, program: Program, which: str) -> None:
    """One coefficient of the heaviest bias token off by 1e-3 of its size, or by 1e-3."""
    head = program.heads[0]
    heaviest = max(range(len(head.bias_tokens)), key=lambda j: head.bias_tokens[j].offset)
    token = head.bias_tokens[heaviest]
    moved = replace(token, **{which: getattr(token, which) + 1e-3 * max(1.0, abs(getattr(token, which)))})
    tokens = (*head.bias_tokens[:heaviest], moved, *head.bias_tokens[heaviest + 1 :])
    wrong = replace(program, heads=(replace(head, bias_tokens=tokens), *program.heads[1:]))
    bound = certify(wrong, activation, domain=program.domain).bound
    assert bound > 1.001 * certify(program, activation, domain=program.domain).bound or program.max_error > 1e-3
    if program.max_error < 1e-5:
        assert bound > 10.0 * program.max_error


@pytest.mark.parametrize("name", CURVES)
def test_curves_know_their_derivatives(name: str) -> None:
    """Differences at points away from breaks; the bound on the third holds on cells."""
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
    """The cumulant formulas against differences, and the bound on the third derivative over cells."""
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
    assert np.all(seen <= largest * (1.0 + 1e-6) + 1e-12)


def test_exact_program_is_certified_to_rounding() -> None:
    assert certify(Program("silu", (Head(1.0),)), "silu").bound < 1e-11


def test_factors() -> None:
    activation, program = fitted_programs()[0]
    bound = certify(program, activation).bound
    scaled = certify(program.scaled(inner=-1.5, outer=3.0), activation, inner=-1.5, outer=3.0).bound
    assert scaled == pytest.approx(3.0 * bound, rel=0.05)


def test_a_program_with_another_end_has_no_bound_over_all_reals() -> None:
    program = Program("silu", (Head(1.0),), linear=1e-9)
    assert math.isinf(certify(program, "silu").bound)
    assert certify(program, "silu", domain=10.0).bound == pytest.approx(1e-8, rel=0.03)


def test_quadratic_logits_are_refused() -> None:
    with pytest.raises(ValueError, match="quadratic self logit"):
        certify(Program("q", (Head(1.0, alpha=0.1),)), "silu")
