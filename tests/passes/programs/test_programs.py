"""Head programs: their arithmetic in float32, what they cost, and what conversions state of them."""

import math
from collections.abc import Mapping

import numpy as np
import pytest

from benchmarks.fit import float32
from passes.forms.local import by_keys
from passes.programs.activations import ACTIVATIONS, gate
from passes.programs.program import ARITHMETIC, Arithmetic, BiasToken, Head, Program, cheapest, fitted_programs

FLOAT = ARITHMETIC[1]


FAR = np.logspace(-30, 30, 6001)
POINTS = np.concatenate([np.linspace(-24.0, 24.0, 96001), FAR, -FAR, [0.0, -0.0]])
"""More than 10^5: dense where the heads' weights change, and far out on both sides."""

PARAMETERS: Mapping[str, tuple[float, ...]] = {
    "silu": (1.0, 1.0),
    "gelu": (1.0, 1.0),
    "gelu_tanh": (1.0,),
    "relu": (1.0, 0.0),
    "leaky_relu": (1.0, 0.1),
    "mish": (1.0,),
    "sigmoid": (1.0, 1.0, 0.0),
    "tanh": (2.0, 2.0, -1.0),
    "relu_squared": (1.0,),
    "relu6": (1.0, 0.0, 0.0, 6.0),
    "hard_sigmoid": (0.2, 0.5, 0.0, 1.0),
    "clip": (0.5, -1.0, -3.0, math.inf),
    "hard_swish": (1.0,),
    "elu": (1.0, 1.0, 1.0),
    "selu": (1.0507, 1.7581, 1.0),
    "celu": (1.0, 2.0, 0.5),
    "silu_clipped": (1.0, 1.0, -9.0, 7.0),
    "square": (1.0,),
}


def table_program(activation: str, arithmetic: Arithmetic = FLOAT) -> Program:
    entry = next(entry for entry in ACTIVATIONS if entry.name == activation)
    assert entry.program is not None
    return entry.program(PARAMETERS[activation], arithmetic)


FITTED = [pytest.param(activation, program, id=program.name) for activation, program in fitted_programs()]
TABLE = [pytest.param(activation, table_program(activation), id=activation) for activation in PARAMETERS]
IN_FLOAT = [param for param in TABLE if not table_program(str(param.id)).double]


@pytest.mark.parametrize(("activation", "program"), TABLE)
def test_which_programs_are_exact(activation: str, program: Program) -> None:
    assert (program.max_error == 0.0) == (activation in {"silu", "mish", "sigmoid", "tanh"})


@pytest.mark.parametrize(("activation", "program"), FITTED)
def test_float32_error(activation: str, program: Program) -> None:
    """The sum of all stated errors bounds the error in float32; any NaN would fail the comparison.

    How accurate the graphs of all programs are is tested in `tests/passes/test_same_function.py`.
    """
    narrow = program.rounded(np.float32)
    inside = np.abs(POINTS) < 2.0**60  # the graph clips queries there, so that no logit is infinite
    y = POINTS[inside].astype(np.float32)
    entry = next(entry for entry in ACTIVATIONS if entry.name == activation)
    expected = entry.function(y.astype(np.float64), PARAMETERS.get(activation, entry.usual))
    error = np.abs(float32.evaluate(narrow, y).astype(np.float64) - expected) / np.maximum(1.0, np.abs(expected))
    assert error.max() <= narrow.max_error + narrow.coefficient_error + 1.05 * narrow.rounding + 2.0**-24


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_fitted_programs_improve_with_every_key(activation: str) -> None:
    rows = [(program.bias_tokens, program.max_error) for name, program in fitted_programs() if name == activation]
    assert rows == sorted(rows, key=lambda row: (row[0], -row[1]))
    assert [error for _, error in rows] == sorted((error for _, error in rows), reverse=True)


@pytest.mark.parametrize(
    ("activation", "tolerance", "name"),
    [
        ("gelu", 1e-2, "gelu_erf_m3"),
        ("gelu", 1.5e-3, "gelu_erf_m3"),
        ("gelu", 1.4e-3, "gelu_erf_m4"),
        ("gelu", 1e-6, "gelu_erf_m6"),
        ("gelu_tanh", 1e-6, "gelu_tanh_m7"),
        ("gelu", 0.0, "gelu_erf_m24"),
    ],
)
def test_cheapest_reaches_the_tolerance(activation: str, tolerance: float, name: str) -> None:
    assert cheapest(activation, tolerance).name == name


def test_relu_is_exact_in_float32() -> None:
    """Every exponent from 1e-9 up to the largest float32: the weight of self is exactly 0 or 1."""
    mantissas = np.linspace(1.0, 2.0, 512, endpoint=False)
    positive = np.concatenate([np.ldexp(mantissas, power) for power in range(-29, 128)]).astype(np.float32)
    y = np.concatenate([positive, -positive])
    assert np.min(np.abs(y)) > 1e-9
    head = table_program("relu").rounded(np.float32).heads[0]
    with np.errstate(over="ignore"):
        weighted = np.float32(head.c) * y / (np.float32(1) + np.exp(-(y * np.float32(head.beta))))
    assert weighted.dtype == np.float32
    np.testing.assert_array_equal(weighted, np.maximum(y, np.float32(0)))


CURVED = Head(beta=0.7, gamma=0.2, c=1.5, d=-0.25, bias_tokens=(BiasToken(-1.0, 0.5, 2.0), BiasToken(0.25, -1.0, -3.0)))
NEAR = np.linspace(-30.0, 30.0, 2001)


@pytest.mark.parametrize(("slope", "offset"), [(1.0, 0.0), (0.0, 5.0), (-2.5, 1.25)])
def test_shift_is_invisible_to_softmax(slope: float, offset: float) -> None:
    shifted = CURVED.shifted(slope, offset)
    assert shifted != CURVED
    np.testing.assert_allclose(shifted.evaluate(NEAR, NEAR), CURVED.evaluate(NEAR, NEAR), rtol=0, atol=1e-12)


@pytest.mark.parametrize("head", [CURVED, *(program.heads[0] for _, program in fitted_programs())])
def test_conditioning_keeps_the_function(head: Head) -> None:
    moved = head.shifted(-1.5, 4.0)
    conditioned = moved.conditioned()
    np.testing.assert_allclose(conditioned.evaluate(NEAR, NEAR), moved.evaluate(NEAR, NEAR), rtol=0, atol=2e-12)
    offsets = [conditioned.gamma, *(token.offset for token in conditioned.bias_tokens)]
    assert max(offsets) == 0.0


@pytest.mark.parametrize(("activation", "program"), [*FITTED, *IN_FLOAT])
def test_rounded_states_what_it_changes(activation: str, program: Program) -> None:
    """Measured at other points than those of the program's own bound."""
    rounded = program.rounded(np.float32)
    points = np.random.default_rng(1).normal(0.0, 6.0, 50_000)
    expected = program.evaluate(points)
    change = np.abs(rounded.evaluate(points) - expected)
    rounding = 4e-9 if program.double else 2.0**-25 * program.rounding  # of evaluation in float64
    assert np.all(change <= (rounded.coefficient_error + rounding) * np.maximum(1.0, np.abs(expected)))
    again = rounded.rounded(np.float32)
    np.testing.assert_allclose(again.evaluate(points), rounded.evaluate(points), rtol=1e-12, atol=1e-12)
    assert (rounded == program) == (rounded.coefficient_error == 0.0)


def test_heads_of_a_gate_share_their_keys() -> None:
    (keys,), linear = by_keys(gate(table_program("silu"), FLOAT))
    assert isinstance(keys, tuple)
    assert ([key.part != 0.0 for key in keys], linear) == ([True, True, False], 0.0)
