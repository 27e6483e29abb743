"""Elementwise operators on float64 numbers alone: what is not a number becomes one, and the digits of the tails.

The operators themselves are held to onnxruntime in `tests/rewriter/evaluate/test_scalar.py`.
"""

from typing import Any

import numpy as np
import onnx
import pytest

from passes.programs import activations
from rewriter.evaluate.arithmetic import sigmoid, softplus
from rewriter.evaluate.table import ELEMENTWISE
from rewriter.graph.constants import evaluate
from rewriter.graph.view import key_of


def node(operator: str, domain: str = "", **attributes: Any) -> onnx.NodeProto:
    return onnx.helper.make_node(operator, [], ["out"], domain=domain, **attributes)


TRUTH = np.array([1.0, 1.0, 0.0, 0.0, -2.0])
OTHER = np.array([1.0, 0.0, 3.0, 0.0, 0.5])


@pytest.mark.parametrize(
    ("operator", "operands", "expected"),
    [
        ("Where", (TRUTH, OTHER, -OTHER), [1.0, 0.0, -3.0, 0.0, 0.5]),
        ("And", (TRUTH, OTHER), [1.0, 0.0, 0.0, 0.0, 1.0]),
        ("Or", (TRUTH, OTHER), [1.0, 1.0, 1.0, 0.0, 1.0]),
        ("Not", (TRUTH,), [0.0, 0.0, 1.0, 1.0, 0.0]),
        ("Cast", (OTHER,), OTHER),
        ("CastLike", (OTHER, TRUTH), OTHER),
        ("Dropout", (OTHER, TRUTH), OTHER),
    ],
)
def test_by_hand(operator: str, operands: tuple[Any, ...], expected: Any) -> None:
    result = evaluate(node(operator), operands)
    np.testing.assert_array_equal(result, expected)
    assert result.dtype == np.float64


def test_tails_of_the_normal_distribution() -> None:
    """Phi(-10) to a relative error of float64, from a table; the error function at 0, 1/2 and 1."""
    np.testing.assert_allclose(activations.normal_cdf(np.array([-10.0])), [7.61985302416052e-24], rtol=1e-13)
    found = evaluate(node("Erf"), [np.array([0.0, 0.5, 1.0])])
    np.testing.assert_allclose(found, [0.0, 0.5204998778130465, 0.8427007929497149], rtol=1e-15)


def test_defaults_are_those_of_float32() -> None:
    """An attribute is stored in float32, so the default of LeakyRelu is not the float64 0.01."""
    assert evaluate(node("LeakyRelu"), [np.array(-1.0)]) == -float(np.float32(0.01))
    assert evaluate(node("Selu"), [np.array(1.0)]) == float(np.float32(1.0507009873554805))


def test_other_domains_are_unknown() -> None:
    for unknown in (node("Sigmoid", "custom"), node("QuickGelu"), node("Softmax")):
        assert key_of(unknown) not in ELEMENTWISE
    assert key_of(node("Sigmoid", "ai.onnx")) in ELEMENTWISE


@pytest.mark.parametrize("y", [-1e300, -800.0, -40.0, 40.0, 800.0, 1e300])
def test_no_overflow_in_the_tails(y: float) -> None:
    with np.errstate(over="raise"):
        assert sigmoid(np.array([y]))[0] == pytest.approx(float(y > 0), abs=1e-17)
        assert softplus(np.array([y]))[0] == pytest.approx(max(y, 0.0), abs=1e-17)
