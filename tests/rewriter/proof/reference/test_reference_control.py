"""Calls of local functions in the float64 evaluation, against onnxruntime's own; control flow is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import parser

from rewriter.ort.sessions import open_session
from rewriter.proof.reference.float64 import NoReference, open_reference

X = np.array([[0.5, -1.5, 0.1], [2.0, 0.25, -0.7]], np.float32)


def parse(body: str, *, opset: int = 17, inputs: str = "", functions: str = "", outputs: str = "y") -> onnx.ModelProto:
    given = ", ".join(part for part in ("float[2, 3] x", inputs) if part)
    made = ", ".join(f"float {name}" for name in outputs.split())
    model = parser.parse_model(
        f'<ir_version: 9, opset_import: ["": {opset}, "local": 1]> g ({given}) => ({made}) {{ {body} }} {functions}'
    )
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    return model


def agree(model: onnx.ModelProto, **more: Any) -> dict[str, Any]:
    """The reference, which must be what onnxruntime makes of the model, to rounding."""
    feeds = {"x": X, **more}
    plain, exact = open_session(model, optimise=False).run(feeds), open_reference(model).run(feeds)
    for name, value in plain.items():
        assert exact[name].shape == value.shape
        assert value.dtype.kind != "f" or exact[name].dtype == np.float64
        np.testing.assert_allclose(value, exact[name], rtol=0, atol=1e-6 * max(np.abs(exact[name]).max(initial=0), 1))
    return exact


HEAD = '<domain: "local", opset_import: ["": 17, "local": 1]>'
LEAKY = f"{HEAD} f <alpha> (a) => (b) {{ e = Erf(a) b = LeakyRelu<alpha = @alpha>(e) }}"
TIMES = "{ e = Erf(a) k = Constant<value_float: float = @alpha>() b = Mul(e, k) }"
DEFAULT = f"{HEAD} f <alpha: float = 0.9> (a) => (b) {TIMES}"
NESTED = f"{HEAD} g <beta> (a) => (b) {{ c = local.f<alpha = @beta>(a) b = local.f<alpha = 0.2>(c) }} {LEAKY}"
FUNCTIONS: dict[str, tuple[str, str]] = {
    "attribute": ("y = local.f<alpha = 0.3>(x)", LEAKY),
    "default": ("p = local.f<alpha = 0.3>(x) q = local.f(x) y = Sub(p, q)", DEFAULT),
    "neither": ("y = local.f(x)", LEAKY),
    "nested": ("y = local.g<beta = 0.4>(x)", NESTED),
    "two-outputs": ("p, q = local.f(x, x) y = Sub(p, q)", f"{HEAD} f (a, b) => (c, d) {{ c = Erf(a) d = Exp(b) }}"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    body, function = FUNCTIONS[name]
    agree(parse(body, functions=function))


def test_a_function_of_another_opset_is_refused() -> None:
    """Up to opset 12 Softmax flattens what follows its axis; the function cannot be inlined as it is."""
    function = '<domain: "local", opset_import: ["": 11]> f (a) => (b) { b = Softmax<axis = 0>(a) }'
    with pytest.raises(NoReference, match=r"^local::f 'y' has no known float64 form$"):
        open_reference(parse("y = local.f(x)", functions=function))


def test_control_flow_is_refused() -> None:
    body = (
        "y = If (c) <then_branch = t () => (float[2, 3] p) { p = Abs(x) }, "
        "else_branch = e () => (float[2, 3] r) { r = Identity(x) }>"
    )
    with pytest.raises(NoReference, match=r"^If 'y' has no known float64 form$"):
        open_reference(parse(body, inputs="bool c"))


def test_an_operand_that_a_call_leaves_out() -> None:
    function = '<domain: "local", opset_import: ["": 17]> f (a, lo, hi) => (b) { e = Erf(a) b = Clip(e, lo, hi) }'
    model = parse("k = Constant<value = float {0.25}>() y = local.f(x, , k)", functions=function)
    made = open_reference(model).run({"x": X})["y"]
    assert made.max() == 0.25
    assert made.min() < -0.9
    trailing = parse("k = Constant<value = float {0.25}>() y = local.f(x, k)", functions=function)
    made = open_reference(trailing).run({"x": X})["y"]
    assert made.min() == 0.25
    assert made.max() > 0.9


def test_axes_that_a_call_leaves_out() -> None:
    """The operator runs in onnxruntime, which is told that the operand is absent."""
    function = (
        '<domain: "local", opset_import: ["": 17]> f (a, axes) => (b) '
        "{ e = Abs(a) b = ReduceSum<keepdims = 0>(e, axes) }"
    )
    model = parse("y = local.f(x)", functions=function)
    made = open_reference(model).run({"x": X})["y"]
    np.testing.assert_allclose(made, np.abs(X.astype(float)).sum(), rtol=1e-14)
    one = parse("k = Constant<value = int64[1] {1}>() y = local.f(x, k)", functions=function)
    made = open_reference(one).run({"x": X})["y"]
    np.testing.assert_allclose(made, np.abs(X.astype(float)).sum(1), rtol=1e-14)


def test_names_of_a_function_are_its_own() -> None:
    function = '<domain: "local", opset_import: ["": 17]> f (a) => (x) { e = Erf(a) x = Exp(e) }'
    agree(parse("e = Neg(x) z = local.f(e) y = Add(z, e)", functions=function))
