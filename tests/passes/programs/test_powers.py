"""Heads whose weights are powers of one exponential: proved in ball arithmetic, and against plain heads in numpy."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from flint import arb, ctx

from passes.programs.program import Powers, Program, fitted_programs, in_powers
from tests.attention import neurons

EACH = pytest.mark.parametrize(
    ("activation", "program"), fitted_programs("powers"), ids=[program.name for _, program in fitted_programs("powers")]
)


def powers_of(program: Program) -> Powers:
    assert program.powers is not None
    return program.powers


@EACH
def test_powers_are_heads(activation: str, program: Program) -> None:
    powers = powers_of(program)
    y = np.linspace(-18.0 / powers.step, 18.0 / powers.step, 4001)
    r = np.exp(powers.step * y)
    z, h = r + 1.0 / r, np.full_like(r, powers.base)
    for (part, shift), *below in powers.fractions:
        h = h + part / (z + shift + sum(inner / (z + other) for inner, other in below))
    for found in (neurons(program, y, y), program.evaluate(y)):
        np.testing.assert_allclose(found, y * (r + h) / (z + 2.0 * h), rtol=1e-12, atol=1e-11)
    keys = {tuple(sorted([head.beta, *(t.slope for t in head.bias_tokens)])) for head in program.heads}
    (slopes,) = keys
    np.testing.assert_allclose(np.diff(slopes), powers.step, rtol=1e-12)
    assert len(slopes) == 2 * len(powers.parts) + 3
    assert len(program.heads) == len(slopes) - (1 if powers.base else 2)


@EACH
@pytest.mark.parametrize("inner", [1.0 + 1.7e-8, 1.1, -0.7, 3.0])
def test_change_from_rounding(activation: str, program: Program, inner: float) -> None:
    scaled = program.scaled(inner=inner, outer=1.0 / inner)
    rounded = scaled.rounded(np.float32)
    y = np.concatenate([np.linspace(-15.0, 15.0, 30001), np.geomspace(1.0, 1e20, 50)])
    before, after = scaled.evaluate(y), rounded.evaluate(y)
    # Rounding of the two evaluations in float64 comes on top: a step may happen to be all but a float32 number.
    assert np.max(np.abs(after - before) / np.maximum(1.0, np.abs(before))) <= rounded.coefficient_error + 1e-15
    assert rounded.coefficient_error <= 2e-7 * max(1.0, 1.0 / abs(inner))


@EACH
def test_nothing_that_is_divided_by_is_small(activation: str, program: Program) -> None:
    """For z >= 2, so that no provider divides by 0 at any pre-activation. Beyond 10^6 a level is z, all but."""
    with ctx.workprec(200):
        for near, far in pairwise(np.geomspace(2.0, 1e6, 4001)):
            z = arb(float(near + far) / 2.0, float(far - near) / 2.0)
            for fraction in powers_of(program).fractions:
                below = arb(0)
                for part, shift in reversed(fraction):
                    level = z + arb(shift) + below
                    assert level > 0.25
                    below = arb(part) / level


def test_tolerance_selects_the_number_of_keys() -> None:
    tolerances = (1e-3, 1e-5, 2e-7, 1.2e-7)
    names = {tolerance: found.name for tolerance in tolerances if (found := in_powers("gelu", tolerance))}
    assert names == {1e-3: "gelu_erf_k5", 1e-5: "gelu_erf_k7", 2e-7: "gelu_erf_k9", 1.2e-7: "gelu_erf_k11"}
    assert in_powers("gelu", 1e-9) is in_powers("silu", 1.0) is None


@pytest.mark.parametrize("value", [1.7e308, -1.7e308, 3e38, -3e38, 0.0, -0.0, 5e-324])
@EACH
def test_nothing_finite_gives_nan(activation: str, program: Program, value: float) -> None:
    y = np.array([value])
    assert np.isfinite(program.evaluate(y)).all()
    assert value >= 0.0 or program.evaluate(y)[0] == pytest.approx(0.0, abs=1e-300)
    assert value <= 0.0 or program.evaluate(y)[0] == pytest.approx(value if value > 1.0 else value / 2.0)


def test_scaling_and_rounding_of_each_coefficient() -> None:
    powers = Powers(0.1, (0.3, -0.7), (1.1, 2.3), 1, 0.7, 0.9)
    scaled = powers.scaled(inner=-3.0, outer=0.5)
    assert scaled == Powers(0.1 * -3.0, (0.3, -0.7), (1.1, 2.3), 1, 0.7, 0.9 * -3.0 * 0.5)
    y = np.linspace(-3.0, 3.0, 7)
    np.testing.assert_allclose(0.5 * -3.0 * powers.head.mean(-3.0 * y)[1], scaled.head.mean(y)[1], rtol=1e-14)
    rounded = powers.rounded(np.float16)
    step, *rows, base, factor = [float(np.float16(number)) for number in (0.1, 0.3, -0.7, 1.1, 2.3, 0.7, 0.9)]
    assert rounded == Powers(step, (rows[0], rows[1]), (rows[2], rows[3]), 1, base, factor)


def test_the_mean_is_that_of_the_formula() -> None:
    """Powers of r = e^(c y) written out: (r P + R) / (z P + 2 R), with z = r + 1/r, times the factor."""
    powers = Powers(0.5, (2.0, 3.0), (5.0, 7.0), 1, 0.25, 1.5)
    both = Powers(0.5, (4.0, 2.0, 3.0), (1.0, 5.0, 7.0), 1, 0.25, 1.5)
    for made, *coefficients in (
        (powers, (1.0, 12.0, 38.0), (0.25, 5.0, 23.5)),  # 1/4 + 2 / (z + 5 + 3 / (z + 7))
        (replace(powers, pairs=0, base=0.0), (1.0, 12.0, 35.0), (0.0, 5.0, 29.0)),  # 2 / (z + 5) + 3 / (z + 7)
        (both, (1.0, 13.0, 50.0, 38.0), (0.25, 9.25, 76.5, 175.5)),  # 4 / (z + 1) and the first
    ):
        for y in (-3.0, -0.25, 0.0, 1.0, 4.0):
            r, found = np.exp(0.5 * y), made.head.mean(np.array(y))[1]
            z = r + 1.0 / r
            p, q = (np.polyval(each, z) for each in coefficients)
            np.testing.assert_allclose(found, 1.5 * (r * p + q) / (z * p + 2.0 * q), rtol=1e-14)
