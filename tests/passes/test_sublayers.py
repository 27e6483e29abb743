"""The sublayers of form `staged` alone (Theorems 7 and 8), also in the sources' own setting."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from passes.programs.head import BiasToken, Head
from passes.programs.program import Program
from passes.sublayers import activation_sublayer, linear_sublayer
from rewriter.ort.sessions import open_session

RNG = np.random.default_rng(0)
SILU = Program("silu", (Head(beta=1.0),))
PROGRAMS = (
    SILU,
    Program("sigmoid", (Head(beta=1.0, c=0.0, d=1.0),)),
    Program(
        "two",
        (Head(beta=2.0, gamma=0.5), Head(beta=-1.0, bias_tokens=(BiasToken(), BiasToken(0.5, 1.0, 2.0)))),
        0.5,
        0.25,
    ),
)


def run(model: onnx.ModelProto, x: NDArray[Any]) -> NDArray[Any]:
    onnx.checker.check_model(model, full_check=True)
    return open_session(model, optimise=False).run({"x": x})["out"]


@pytest.mark.parametrize("head_dimension", [1, 7, 12, 64])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_map(head_dimension: int, bias: bool) -> None:
    weight, b, x = RNG.normal(size=(30, 17)), RNG.normal(size=17), RNG.normal(size=(2, 20, 30))
    model = linear_sublayer(weight, b if bias else None, head_dimension=head_dimension, max_tokens=20)
    np.testing.assert_allclose(run(model, x), x @ weight + (b if bias else 0.0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("program", PROGRAMS, ids=[program.name for program in PROGRAMS])
def test_activation(program: Program) -> None:
    """n_ctx 20, d_model 30, Omega 1000: the setting of the sources."""
    x = RNG.normal(0.0, 3.0, size=(1, 20, 30))
    for omega in (1000.0, None):
        result = run(activation_sublayer(program, 30, double=True, max_tokens=20, omega=omega), x)
        np.testing.assert_allclose(result, program.evaluate(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("silu", lambda x: x / (1.0 + np.exp(-x))),
        ("relu", lambda x: np.maximum(x, 0.0)),
        ("tanh", np.tanh),
    ],
)
def test_activations_by_name(name: str, values: Any) -> None:
    x = RNG.normal(0.0, 3.0, size=(2, 9, 5))
    result = run(activation_sublayer(name, 5, double=True, max_tokens=20), x)
    np.testing.assert_allclose(result, values(x), rtol=0, atol=1e-12)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no activation of the table is called 'swosh'; known are: .*silu"):
        activation_sublayer("swosh", 5)
    with pytest.raises(ValueError, match="'leaky_relu'"):
        activation_sublayer("leaky_relu", 5)  # its slope is not known


def test_float32_and_shorter_sequences() -> None:
    weight = RNG.normal(size=(5, 6)).astype(np.float32)
    x = RNG.normal(size=(3, 4, 5)).astype(np.float32)
    np.testing.assert_allclose(run(linear_sublayer(weight, max_tokens=64), x), x @ weight, rtol=0, atol=1e-5)
    result = run(activation_sublayer(SILU, 5, max_tokens=64), x)
    np.testing.assert_allclose(result, SILU.evaluate(x.astype(np.float64)), rtol=0, atol=1e-6)


def test_what_they_refuse() -> None:
    with pytest.raises(ValueError, match="must be a float32 or float64 matrix, not int64"):
        linear_sublayer(np.zeros((2, 2), dtype=np.int64))
    with pytest.raises(ValueError, match=r"the bias has shape \[3\], and the weight \[2, 2\]"):
        linear_sublayer(np.zeros((2, 2)), np.zeros(3))
