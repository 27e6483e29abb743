"""Gates: the programs that they come from, what they compute, and bounds on the error of the limit."""

import math
from dataclasses import replace

import numpy as np
import pytest

from passes.programs.activations import gate, limit_error, line
from passes.programs.program import ARITHMETIC, BiasToken, Head, Program

FLOAT = ARITHMETIC[1]
SMALL = 2.0**-10
G = np.linspace(-6.0, 6.0, 49)
SILU = Program("silu", (Head(beta=1.0, bias_tokens=(BiasToken(0.0, 0.0, 0.0),), c=1.0),))


def test_the_gate_of_a_bounded_function_is_exact() -> None:
    sigmoid = Program("sigmoid", (Head(beta=1.0, bias_tokens=(BiasToken(0.0, 0.0, 0.0),), c=0.0, d=1.0),), constant=2.0)
    made = gate(sigmoid, FLOAT)
    assert (made.name, made.linear, made.constant) == ("sigmoid_gate", 2.0, 0.0)
    assert (made.max_error, made.double) == (0.0, False)
    u = np.linspace(-3.0, 3.0, len(G))
    np.testing.assert_allclose(made.evaluate(G, u), u * (1.0 / (1.0 + np.exp(-G)) + 2.0), rtol=1e-13)


@pytest.mark.parametrize("linear", [0.0, 0.5])
@pytest.mark.parametrize("c", [0.0, 1.0])
def test_a_gate_multiplies_what_the_values_read(linear: float, c: float) -> None:
    head = Head(beta=1.0, bias_tokens=(BiasToken(0.0, 0.0, 0.25),), c=c, d=0.5)
    program = Program("p", (head,), linear=linear, constant=-1.0)
    made = gate(program, FLOAT)
    u = np.linspace(-3.0, 3.0, len(G))
    h = (np.exp(G) * (c * G + 0.5) + 0.25) / (np.exp(G) + 1.0) + linear * G - 1.0
    error = np.abs(made.evaluate(G, u) - h * u) / (np.maximum(1.0, np.abs(h)) * np.maximum(np.abs(u), 1e-300))
    allowed = made.max_error + 2.0**-26  # of which float64's rounding over e is a tenth
    assert np.max(error) <= max(allowed, 1e-14)
    assert made.max_error <= 4.0 * FLOAT.limit
    assert made.double is bool(c or linear)
    if made.double:
        assert made.domain == min(math.sqrt(3.0 * FLOAT.limit), 0.5) / FLOAT.small


def test_gates_of_other_programs_are_refused() -> None:
    for heads in (SILU.heads * 2, ()):
        with pytest.raises(ValueError, match="values to unpack"):
            gate(replace(SILU, heads=heads), FLOAT)


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
