"""The line g as attention, and gates made with it: against the formulas in numpy; the certificate proves them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from passes.programs.activations import ACTIVATIONS, LINEAR, needs_line, with_line
from passes.programs.program import ARITHMETIC, Line, Parameters, Program, lines
from tests.attention import neurons
from tests.passes.programs.test_programs import PARAMETERS

TABLE = [
    line for arithmetic in ("single", "narrow single", "double", "double pairs", "half") for line in lines(arithmetic)
]
FLOAT = ARITHMETIC[1]


@pytest.mark.parametrize("line", TABLE, ids=[line.name for line in TABLE])
def test_line_is_odd_and_smooth_far_out(line: Line) -> None:
    assert np.flatnonzero(line.head.constants).tolist() == [0, 1]
    inside = np.geomspace(1e-6, min(line.domain, abs(line.lowest)), 1000)
    rounding = 1e-15 / abs(line.step)
    np.testing.assert_allclose(line.evaluate(-inside), -line.evaluate(inside), rtol=1e-9, atol=rounding)
    np.testing.assert_array_equal(replace(line, step=-line.step).evaluate(inside), -line.evaluate(-inside))
    far = np.concatenate([-np.geomspace(1.0, 1e300, 4000)[::-1], np.geomspace(1.0, 1e300, 4000)])
    values = line.evaluate(far)
    assert np.all(np.isfinite(values))
    assert np.all(np.diff(values) >= -1e-12 * np.abs(values[1:]))


GATES = ("silu", "gelu", "gelu_tanh", "relu", "leaky_relu", "mish", "relu6", "clip", "elu", "selu", "celu")
ENTRIES = {entry.name: entry for entry in ACTIVATIONS}


def made(name: str, parameters: Parameters, elem_type: int = 1, **options: bool) -> Program:
    program = ENTRIES[name].program_for(parameters, ARITHMETIC[elem_type], **options)
    assert program is not None
    return program


def quick(name: str) -> Program:
    return made(name, PARAMETERS[name], gated=True, quick=True)


@pytest.mark.parametrize("name", GATES)
def test_gates_are_heads_over_pairs_of_keys(name: str) -> None:
    """The heads, each with its own self key, against the spelling with a line; neither knows the other's formula."""
    program = quick(name)
    rng = np.random.default_rng(0)
    g, u = rng.normal(0.0, 4.0, 4000), rng.normal(0.0, 2.0, 4000)
    heads = program.as_heads
    assert (heads.line, heads.linear, heads.constant) == (None, 0.0, 0.0)
    assert all(token.value == 0.0 for head in heads.heads for token in head.bias_tokens)
    np.testing.assert_allclose(neurons(heads, g, u), program.evaluate(g, u), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("parameters", "step"), [((1.0, 1.0), 0.25), ((-1.0, 1.0), -0.25), ((1.702, 1.0), 0.25), ((-0.3, 2.0), -0.25)]
)
def test_the_line_is_constant_first_where_the_gate_is_zero(parameters: tuple[float, float], step: float) -> None:
    program: Any = made("silu", parameters, gated=True, quick=True)
    assert program.line.step == step
    assert program.max_error <= 2e-7


def test_a_gate_that_is_zero_nowhere_reaches_far_on_both_sides() -> None:
    program: Any = LINEAR.program_for((1.0,), FLOAT, gated=True, quick=True)
    g = np.linspace(-500.0, 500.0, 20001)
    error = np.abs(program.evaluate(g, np.ones_like(g)) - g) / np.maximum(1.0, np.abs(g))
    assert error.max() <= program.max_error <= 1e-7


def test_what_is_bounded_needs_no_line() -> None:
    for name in ("sigmoid", "tanh"):
        program = quick(name)
        assert (program.line, program.max_error) == (None, 0.0)
    assert not needs_line(quick("silu"))
    assert not needs_line(replace(quick("silu"), line=None, double=True))
    assert needs_line(Program("line", (), linear=-1.0))


def test_a_line_that_reaches_less_far_costs_error() -> None:
    assert with_line(made("silu", (0.01, 1.0)), FLOAT).line == lines("single")[1]


@pytest.mark.parametrize("factor", [1.0, 0.01, 1e-3])
@pytest.mark.parametrize("name", ["square", "relu_squared"])
def test_squares_of_small_numbers_are_judged_by_their_squares(name: str, factor: float) -> None:
    program = made(name, (factor,), quick=True)
    y = np.linspace(-508.0, 508.0, 100_001)
    f = ENTRIES[name].function(y, (factor,))
    error = np.abs(program.evaluate(y) - f) / np.maximum(1.0, np.abs(f))
    assert error.max() <= program.max_error <= 1.1 * error.max()


@pytest.mark.parametrize("value", [1.7e308, -1.7e308, 3e38, -3e38, 1e30, -1e30, 0.0, -0.0, 5e-324])
@pytest.mark.parametrize("name", GATES)
def test_nothing_finite_gives_nan(name: str, value: float) -> None:
    program, g = quick(name), np.array([value])
    assert np.isfinite(program.evaluate(g, np.ones(1))).all()
