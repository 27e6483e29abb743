"""The table of elementwise operators against onnxruntime, which shares no code with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from rewriter.evaluate.arithmetic import sigmoid, softplus
from rewriter.graph import elementwise
from rewriter.ort.sessions import open_session

POINTS = np.concatenate([np.linspace(-6.0, 6.0, 241), [-30.0, 30.0, 0.0, 0.5, -0.5]])
POSITIVE = np.abs(POINTS) + 0.01

UNARY: tuple[tuple[str, dict[str, Any]], ...] = (
    *((name, {}) for name in ("Identity", "Neg", "Abs", "Exp", "Sin", "Cos", "Atan", "Sign", "Floor", "Ceil", "Round")),
    ("Sinh", {}),
    ("Cosh", {}),
    *((name, {}) for name in ("Erf", "Tanh", "Sigmoid", "Relu", "Softplus", "Softsign", "Mish", "HardSwish", "Gelu")),
    ("Gelu", {"approximate": "tanh"}),
    ("Gelu", {"approximate": "none"}),
    ("Elu", {}), ("Elu", {"alpha": 0.7}), ("Celu", {}), ("Celu", {"alpha": 0.7}),
    ("Selu", {}), ("Selu", {"alpha": 1.5, "gamma": 1.2}),
    ("HardSigmoid", {}), ("HardSigmoid", {"alpha": 0.3, "beta": 0.4}),
    ("LeakyRelu", {}), ("LeakyRelu", {"alpha": 0.3}),
    ("ThresholdedRelu", {}), ("ThresholdedRelu", {"alpha": 0.5}),
    ("Shrink", {}), ("Shrink", {"bias": 0.25, "lambd": 1.0}),
)  # fmt: skip
MICROSOFT: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Gelu", {}), ("FastGelu", {}), ("QuickGelu", {}), ("QuickGelu", {"alpha": 1.0}),
)  # fmt: skip
BINARY = ("Add", "Sub", "Mul", "Div", "Max", "Min", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal")


def by_onnxruntime(node: onnx.NodeProto, *arrays: Any) -> Any:
    names = [f"x{number}" for number in range(len(arrays))]
    node.input[:] = names
    inputs = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [len(POINTS)]) for name in names]
    kind = onnx.TensorProto.BOOL if node.op_type in BINARY[6:] else onnx.TensorProto.FLOAT
    output = onnx.helper.make_tensor_value_info("out", kind, [len(POINTS)])
    graph = onnx.helper.make_graph([node], "g", inputs, [output])
    imports = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=imports, ir_version=9)
    feeds = {name: array.astype(np.float32) for name, array in zip(names, arrays, strict=True)}
    return open_session(model, optimise=False).run(feeds)["out"]


def node(operator: str, domain: str = "", **attributes: Any) -> onnx.NodeProto:
    return onnx.helper.make_node(operator, [], ["out"], domain=domain, **attributes)


CASES: tuple[tuple[onnx.NodeProto, tuple[Any, ...]], ...] = (
    *((node(name, **attributes), (POINTS,)) for name, attributes in UNARY),
    *((node(name, "com.microsoft", **attributes), (POINTS,)) for name, attributes in MICROSOFT),
    *((node(name), (POSITIVE,)) for name in ("Sqrt", "Log", "Reciprocal")),
    *((node("Pow"), (POSITIVE, np.array(exponent))) for exponent in (2.0, 3.0, 0.5)),
    (node("PRelu"), (POINTS, np.array(0.2))),
)


@pytest.mark.parametrize(("made", "operands"), CASES)
def test_against_onnxruntime(made: onnx.NodeProto, operands: tuple[Any, ...]) -> None:
    found = elementwise.evaluate(made, operands)
    expected = by_onnxruntime(made, *(np.broadcast_to(each, POINTS.shape) for each in operands))
    np.testing.assert_allclose(found, expected, rtol=1e-5 if made.op_type == "Pow" else 3e-6, atol=2e-6)


@pytest.mark.parametrize("operator", BINARY)
def test_binary(operator: str) -> None:
    other = np.roll(POINTS, 7) + 0.125
    other[:9] = POINTS[:9]
    made = node(operator)
    expected = by_onnxruntime(made, POINTS, other)
    np.testing.assert_allclose(elementwise.evaluate(made, [POINTS, other]), expected, rtol=3e-6)


def test_clip() -> None:
    np.testing.assert_array_equal(
        elementwise.evaluate(node("Clip"), [POINTS, np.array(-1.0)]), np.maximum(POINTS, -1.0)
    )
    made = node("Clip", min=-1.0, max=2.0)
    np.testing.assert_array_equal(elementwise.evaluate(made, [POINTS]), np.clip(POINTS, -1.0, 2.0))


def test_swish() -> None:
    expected = POINTS / (1.0 + np.exp(-1.5 * POINTS))
    np.testing.assert_allclose(elementwise.evaluate(node("Swish", alpha=1.5), [POINTS]), expected, rtol=1e-12)


TRUTH = np.array([1.0, 1.0, 0.0, 0.0, -2.0])
OTHER = np.array([1.0, 0.0, 3.0, 0.0, 0.5])


@pytest.mark.parametrize(
    ("operator", "operands", "expected"),
    [
        ("Where", (TRUTH, OTHER, -OTHER), [1.0, 0.0, -3.0, 0.0, 0.5]),
        ("And", (TRUTH, OTHER), [1.0, 0.0, 0.0, 0.0, 1.0]),
        ("Or", (TRUTH, OTHER), [1.0, 1.0, 1.0, 0.0, 1.0]),
        ("Not", (TRUTH,), [0.0, 0.0, 1.0, 1.0, 0.0]),
        ("Sum", (TRUTH, OTHER, OTHER), [3.0, 1.0, 6.0, 0.0, -1.0]),
        ("Cast", (OTHER,), OTHER),
        ("CastLike", (OTHER, TRUTH), OTHER),
        ("Dropout", (OTHER, TRUTH), OTHER),
        ("Clip", (OTHER,), OTHER),
        ("Clip", (OTHER, np.array(0.25), np.array(1.5)), [1.0, 0.25, 1.5, 0.25, 0.5]),
    ],
)
def test_by_hand(operator: str, operands: tuple[Any, ...], expected: Any) -> None:
    result = elementwise.evaluate(node(operator), operands)
    np.testing.assert_array_equal(result, expected)
    assert result.dtype == np.float64


@pytest.mark.parametrize(("operator", "plain"), [("BiasGelu", "Gelu"), ("FastGelu", "FastGelu")])
def test_a_bias_is_added_before_the_activation(operator: str, plain: str) -> None:
    found = elementwise.evaluate(node(operator, "com.microsoft"), [POINTS, np.array(0.75)])
    expected = elementwise.evaluate(node(plain, "com.microsoft"), [POINTS + 0.75])
    np.testing.assert_array_equal(found, expected)
    without = elementwise.evaluate(node(operator, "com.microsoft"), [POINTS])
    np.testing.assert_array_equal(without, elementwise.evaluate(node(plain, "com.microsoft"), [POINTS]))


def test_tails_of_the_normal_distribution() -> None:
    """Phi(-10) to a relative error of float64, from a table; the error function at 0, 1/2 and 1."""
    np.testing.assert_allclose(elementwise.normal_cdf(np.array([-10.0])), [7.61985302416052e-24], rtol=1e-13)
    found = elementwise.evaluate(node("Erf"), [np.array([0.0, 0.5, 1.0])])
    np.testing.assert_allclose(found, [0.0, 0.5204998778130465, 0.8427007929497149], rtol=1e-15)


def test_defaults_are_those_of_float32() -> None:
    """An attribute is stored in float32, so the default of LeakyRelu is not the float64 0.01."""
    assert elementwise.evaluate(node("LeakyRelu"), [np.array(-1.0)]) == -float(np.float32(0.01))


def test_other_domains_are_unknown() -> None:
    assert not elementwise.is_elementwise(node("Sigmoid", "custom"))
    assert not elementwise.is_elementwise(node("QuickGelu"))
    assert not elementwise.is_elementwise(node("Softmax"))
    assert elementwise.is_elementwise(node("Sigmoid", "ai.onnx"))


@pytest.mark.parametrize("y", [-1e300, -800.0, -40.0, 40.0, 800.0, 1e300])
def test_no_overflow_in_the_tails(y: float) -> None:
    with np.errstate(over="raise"):
        assert sigmoid(np.array([y]))[0] == pytest.approx(float(y > 0), abs=1e-17)
        assert softplus(np.array([y]))[0] == pytest.approx(max(y, 0.0), abs=1e-17)
