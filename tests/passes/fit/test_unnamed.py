"""Activations without a program: which of their fits become gates, and what is said of the others."""

import numpy as np
import onnx
import pytest

from passes.fit import fitted
from passes.match.identify import Identified
from passes.programs.activations import Activation
from passes.programs.program import ARITHMETIC, Function, Program

FLOAT, HALF = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16


def gate_of(function: Function, domain: float, elem_type: int, *, quick: bool = True) -> Program | str:
    activation = Activation("f", (), lambda y, _: function(y), lambda _: None, None, usual=())
    return fitted(Identified(activation, (), 0.0), domain, ARITHMETIC[elem_type], gated=True, strict=False, quick=quick)


def two_kinks(y: np.ndarray) -> np.ndarray:
    return np.asarray(np.abs(y) - 2.0 * np.abs(y - 1.5))


def test_a_gate() -> None:
    made = gate_of(two_kinks, 4.0, FLOAT)
    assert isinstance(made, Program)
    g = np.linspace(-4.0, 4.0, 4001)
    assert np.abs(made.evaluate(g, np.ones_like(g)) - two_kinks(g)).max() <= 1e-6


def test_a_function_with_large_values_is_fitted_as_closely_as_is_allowed() -> None:
    activation = Activation("f", (), lambda y, _: y * y, lambda _: None, None, usual=())
    made = fitted(Identified(activation, (), 0.0), 4.0, ARITHMETIC[HALF], gated=False, strict=False)
    assert isinstance(made, Program)
    assert made.max_error <= ARITHMETIC[HALF].tolerance


def test_several_heads_are_no_gate_of_a_form_that_pays_for_each() -> None:
    assert gate_of(two_kinks, 4.0, FLOAT, quick=False) == (
        "its fit has several heads, which cannot become a gate; keep its product in the graph with --gate product"
    )


@pytest.mark.parametrize("elem_type", [FLOAT, HALF])
def test_a_gate_that_would_be_far_off(elem_type: int) -> None:
    """In float16 the fit of a sine is a difference of large terms, which the limit of a gate changes."""
    made = gate_of(np.sin, 8.0, elem_type)
    if elem_type == FLOAT:
        assert isinstance(made, Program)
        assert made.max_error <= 1e-5
    else:
        assert isinstance(made, str)
        assert made.startswith("as a gate, its closest fit on |y| <= 8 is off by 0.0")
        assert made.endswith("; keep its product in the graph with --gate product")
