"""Programs as values: what is evaluated, scaled, rounded and bounded, against formulas written out in numpy."""

import math
from dataclasses import replace

import numpy as np
import pytest

from passes.forms.local import SharedKey, progression_of
from passes.programs.activations import gate, limit_error, line
from passes.programs.program import ARITHMETIC, BiasToken, Head, Program

# One key at rest and one that follows y: the weight of the second is a logistic function.
HEAD = Head(beta=1.0, bias_tokens=(BiasToken(0.0, 0.0, 0.5),), c=2.0, d=0.25)
OTHER = Head(beta=-2.0, bias_tokens=(BiasToken(0.0, 1.0, 0.0), BiasToken(1.0, 0.0, -1.0)), c=1.0)
BOTH = Program("both", (HEAD, OTHER), linear=0.75, constant=-3.0, max_error=1e-3, domain=8.0)

Y = np.array([-3.0, -0.5, 0.0, 1.0, 4.0])
Z = np.array([2.0, -1.0, 3.0, 0.5, -4.0])


def by_hand(y: np.ndarray, z: np.ndarray) -> np.ndarray:
    own = np.exp(y)
    first = (own * (2.0 * z + 0.25) + 0.5) / (own + 1.0)
    parts = [np.exp(-2.0 * y), np.full_like(y, np.e), np.exp(y)]
    second = (parts[0] * z - parts[2]) / sum(parts)
    return np.asarray(first + second + 0.75 * z - 3.0)


def test_a_program_is_its_heads_and_a_line() -> None:
    np.testing.assert_allclose(BOTH.evaluate(Y), by_hand(Y, Y), rtol=1e-14)
    np.testing.assert_allclose(BOTH.evaluate(Y, Z), by_hand(Y, Z), rtol=1e-14)
    grid = BOTH.evaluate(Y[:, None], Z[None])
    np.testing.assert_allclose(grid, by_hand(*np.broadcast_arrays(Y[:, None], Z[None])), rtol=1e-14)
    line = Program("line", (), linear=2.0, constant=1.0)
    np.testing.assert_array_equal(line.evaluate(Y), 2.0 * Y + 1.0)
    assert BOTH.bias_tokens == 2


def test_where_two_keys_weigh_the_same() -> None:
    found = np.concatenate([head.crossings for head in BOTH.heads])
    assert found.ndim == 1
    for place in (0.0, -0.5, 1.0):
        assert np.min(np.abs(found - place)) < 1e-12
    assert Head(beta=0.0, bias_tokens=()).crossings.shape == (0,)


@pytest.mark.parametrize(("inner", "outer"), [(2.0, 1.0), (1.0, -0.5), (-3.0, 0.25), (0.5, 4.0)])
def test_scaling(inner: float, outer: float) -> None:
    """`outer f(inner y)`, with self values that read y; the error scales with the output, the domain with the input."""
    scaled = BOTH.scaled(inner=inner, outer=outer)
    np.testing.assert_allclose(scaled.evaluate(Y), outer * BOTH.evaluate(inner * Y), rtol=1e-13, atol=1e-13)
    assert scaled.max_error == pytest.approx(1e-3 * abs(outer) + 2.0**-40 * max(1.0, abs(outer)), rel=1e-12)
    assert scaled.domain == 8.0 / abs(inner)


def test_nothing_to_scale() -> None:
    assert BOTH.scaled() is BOTH
    assert BOTH.scaled(inner=1.0, outer=2.0) is not BOTH


def test_rounding_to_a_type() -> None:
    rough = replace(BOTH, linear=0.1, constant=1.0 / 3.0)
    for dtype in (np.float32, np.float16):
        rounded = rough.rounded(dtype)
        assert (rounded.linear, rounded.constant) == (float(dtype(0.1)), float(dtype(1.0 / 3.0)))
        difference = np.abs(rounded.evaluate(Y) - rough.evaluate(Y)) / np.maximum(1.0, np.abs(rough.evaluate(Y)))
        assert 0.0 < np.max(difference) <= rounded.coefficient_error
        assert rounded.coefficient_error <= 4.0 * float(np.finfo(dtype).eps)
    assert rough.rounded(np.float64) is rough
    plain = replace(BOTH, heads=(HEAD,))
    assert plain.rounded(np.float32) is plain, "all of its coefficients are float32 numbers"


@pytest.mark.parametrize(
    "keys",
    [
        (SharedKey(0.0, 0.0, 1.0, 0.0), SharedKey(1.0, 0.0, 2.0, 2.0), SharedKey(2.5, 0.0, 1.0, 1.0)),
        (SharedKey(0.0, 0.0, 1.0, 0.0), SharedKey(1.0, 0.0, 2.0, 2.0)),
        (SharedKey(0.0, 0.0, 1.0, 0.0), SharedKey(1.0, 0.0, 1.0, 0.5)),
        (SharedKey(0.0, 0.0, 1.0, 0.0), SharedKey(1.0, 0.0, 2.0, 1.0), SharedKey(2.0, 0.0, 1.0, 1.0)),
        (SharedKey(0.0, 30.0, 1.0, 0.0), SharedKey(1.0, 0.0, 1.0, 1.0)),
        (SharedKey(0.1, 0.0, 1.0, 0.0), SharedKey(1.0, 0.0, 1.0, 1.0)),
    ],
    ids=["uneven", "last-weight", "last-multiple", "inner-multiple", "offset", "step-rounded"],
)
def test_what_is_no_progression(keys: tuple[SharedKey, ...]) -> None:
    assert progression_of(keys, np.float32) is None


# -- gates: what programs become, and bounds on the error of the limit -------------------------------------------------

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
