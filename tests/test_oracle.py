"""The oracle against onnxruntime: every operator, the committed models, and their rewrites."""

import re
from typing import Any

import numpy as np
import onnx
import pytest

from tests.attention import Array
from tests.cases import run
from tests.committed import ACTIVATIONS, FOLDER, feeds
from tests.headmath import tapped
from tests.oracle import evaluate, tensors
from tests.oracle_operators import OPERATORS
from tests.textmodels import integers, text_model

GIVEN: dict[str, Any] = {
    **integers(zero=0, one=1, two=2, axis=[1], pads=[0, 1, 0, 2], negative=[-1, -7, 7], pick=[[[1, 0, 3]]], to=[0, 2]),
    **integers(axes=[1, 2], minus=[-1]),
    "scales": np.linspace(0.5, 2.0, 4),
    "K": np.random.default_rng(3).normal(size=(6, 2, 3)),
    "K2d": np.random.default_rng(4).normal(size=(6, 1, 2, 3)),
    "Kb": np.arange(6.0),
    "wq": onnx.numpy_helper.from_array(np.arange(-16, 16, dtype=np.int8).reshape(4, 8), "wq"),
    "wz": onnx.numpy_helper.from_array(np.array([3, -2, 0, 9], np.int8), "wz"),
    "ws": np.array([0.5, 0.25, 2.0, 1.0]),
    "B": onnx.numpy_helper.from_array(np.random.default_rng(5).integers(0, 255, (8, 2, 8)).astype(np.uint8), "B"),
    "nbits": np.random.default_rng(6).normal(size=16),
}
MS = {"domains": {"com.microsoft": 1}}
WIDE = {"inputs": "float[2, 3, 32] x"}
PLANE = {"inputs": "float[2, 2, 9, 11] x"}
FLAT = {"inputs": "float[7, 4] x"}

CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    *((f"out = {name}(x)", {}) for name in (
        "Abs", "Ceil", "Cos", "Erf", "Exp", "HardSwish", "Identity", "Neg", "Reciprocal", "Relu", "Sigmoid", "Sign",
        "Sin", "Softplus", "Softsign", "Tanh", "Elu", "Selu", "HardSigmoid", "LeakyRelu", "Dropout", "Softmax",
        "Transpose", "Flatten", "Clip",
    )),
    *((f"y = Neg(x) z = Add(y, scales) out = {name}(x, z)", {}) for name in (
        "Add", "Div", "Mul", "Sub", "Max", "Min", "Sum"
    )),
    ("a = Cast<to = 7>(x) b = Equal(a, one) out = Cast<to = 1>(b)", {}),
    ("a = Mul(x, $9.0) b = Cast<to = 7>(a) c = Div(b, two) out = Cast<to = 1>(c)", {}),
    ("a = Div(negative, two) out = Cast<to = 1>(a)", {}),
    ("a = Abs(x) b = Log(a) c = Sqrt(a) d = Pow(a, $1.7) e = Pow(x, two) out = Sum(b, c, d, e)", {}),
    ("out = Mish(x)", {"opset": 18}),
    ("out = PRelu(x, scales)", {}),
    (("a = Elu<alpha = 0.7>(x) b = Selu<alpha = 1.2, gamma = 1.3>(x) c = LeakyRelu<alpha = 0.3>(x) "
     "d = HardSigmoid<alpha = 0.4, beta = 0.1>(x) out = Sum(a, b, c, d)"), {}),
    ("out = Clip(x, $-0.5, $0.25)", {}),
    ("out = Clip<min = -0.5>(x)", {"opset": 10, "ir": 5}),
    ("out = Gelu(x)", {"opset": 20, "ir": 9}),
    ('out = Gelu<approximate = "tanh">(x)', {"opset": 20, "ir": 9}),
    ("out = com.microsoft.Gelu(x)", MS),
    ("out = com.microsoft.BiasGelu(x, scales)", MS),
    ("a = com.microsoft.FastGelu(x) b = com.microsoft.FastGelu(x, scales) out = Add(a, b)", MS),
    ("a = com.microsoft.QuickGelu(x) b = com.microsoft.QuickGelu<alpha = 1.1>(x) out = Add(a, b)", MS),
    ('out = com.microsoft.FusedGemm<activation = "Relu", transB = 1, alpha = 0.5>(x, W1t, b1)', {**MS, **FLAT}),
    ("out = com.microsoft.MatMulNBits<K = 32, N = 8, bits = 4, block_size = 16>(x, B, nbits)", {**MS, **WIDE}),
    ("a = MatMul(x, W1) out = Add(a, b1)", {}),
    (('a = Einsum<equation = "bsd,df->bsf">(x, W1) b = Einsum<equation = "fd,bsf->bsd">(W2, a) '
     'c = Einsum<equation = "bsd,btd->bst">(b, x) out = MatMul(c, a)'), {}),
    (("a = Gemm<alpha = 0.5, beta = 2.0>(x, W1, b1) b = Gemm<transA = 1>(x, x) c = MatMul(a, W2) d = MatMul(c, b) "
     "e = Gemm<transB = 1>(x, W1t) f = MatMul(e, W2) out = Add(d, f)"), FLAT),
    ("w = DequantizeLinear<axis = 0>(wq, ws, wz) v = DequantizeLinear(wq, $0.1) s = Add(w, v) out = MatMul(x, s)", {}),
    ("a = Softmax<axis = 1>(x) b = Softmax<axis = -1>(x) out = Add(a, b)", {}),
    ("a = Softmax<axis = 1>(x) b = Softmax<axis = 2>(x) out = Add(a, b)", {"opset": 12, "ir": 7}),
    (("a = LayerNormalization<axis = -1, epsilon = 0.1>(x, scales, ws) b = LayerNormalization<axis = -1>(x, scales) "
     "out = Add(a, b)"), {}),
    ("out = Conv<group = 2, pads = [1, 2], strides = [2], dilations = [2]>(x, K, Kb)", {"inputs": "float[3, 4, 17] x"}),
    ("out = Conv<group = 2, pads = [1, 0, 2, 1], strides = [2, 1], dilations = [1, 2]>(x, K2d)", PLANE),
    ("a = CumSum(x, one) out = CumSum(a, minus)", {}),
    ("out = GatherElements<axis = 2>(x, pick)", {"inputs": "float[1, 1, 4] x"}),
    ("s = Shape(x) a = ConstantOfShape(s) b = ConstantOfShape<value = float[1] {2.5}>(s) out = Sum(a, b, x)", {}),
    (("a = Constant<value = float {2.5}>() b = Constant<value_float = 1.5>() "
     "c = Constant<value_floats = [1.5, 2, 3, 4]>() d = Constant<value_ints = [2]>() "
     "e = Cast<to = 1>(d) out = Sum(a, b, c, e, x)"), {}),
    (("a = Unsqueeze(x, axis) m = Less(x, $0.0) n = Transpose<perm = [0, 2, 1]>(x) k = MatMul(x, n) "
     "l = Less(k, $0.2) out = Attention<scale = 0.7>(a, a, a, l)"),
     {"opset": 23, "ir": 10, "inputs": "float[1, 4, 4] x"}),
    ("a = Unsqueeze(x, axis) out = Attention(a, a, a)", {"opset": 23, "ir": 10}),
    (("s = ReduceSum<keepdims = 0>(x) c = Less(s, $0.0) "
     "out = If (c) <then_branch = a () => (float[] p) { p = Neg(x) }, "
     "else_branch = b () => (float[] q) { q = Exp(x) }>"), {}),
    (("yes = Less(zero, one) state, parts = Loop(two, yes, x) <body = chunk (int64 i, bool go, float[] s) => "
     "(bool on, float[] t, float[] part) { on = Identity(go) k = Cast<to = 1>(i) t = Add(s, k) part = Mul(t, x) }> "
     "out = Concat<axis = 0>(state, state)"), {}),
    ("a = local.Scaled<by = 3.0>(x) b = local.Scaled(x) out = Sub(a, b)",
     {"domains": {"local": 1}, "ir": 9, "functions":
      '<domain: "local", opset_import: ["": 17]> Scaled <by: float = 2.0> (x) => (y) '
      "{ k = Constant<value_float: float = @by>() y = Mul(k, x) }"}),
)  # fmt: skip
"""Nodes that make `out` of x, float32 and by default [3, 5, 4], and options of `text_model`."""


def case(number: int) -> tuple[onnx.ModelProto, dict[str, Array]]:
    text, options = CASES[number]
    names = re.findall(r"\w+", text)
    given = {name: value for name, value in GIVEN.items() if name in names}
    made = text_model(
        text, **{"outputs": "float[] out", **options, "constants": {**given, **options.get("constants", {})}}
    )
    dims = made.graph.input[0].type.tensor_type.shape.dim
    shape = [dim.dim_value or {"batch": 3}.get(dim.dim_param, 5) for dim in dims]
    return made, {"x": np.random.default_rng(0).normal(size=shape).astype(np.float32)}


@pytest.mark.parametrize("number", range(len(CASES)), ids=[text for text, _ in CASES])
def test_operators_compute_what_onnxruntime_does(number: int) -> None:
    """Within 4 units in the last place of the largest entry; the worst case is 1.1 off."""
    made, feeds = case(number)
    ours, theirs = evaluate(made, feeds)["out"], run(made, **feeds)["out"]
    assert ours.shape == theirs.shape
    assert ours.dtype == np.float64
    assert np.max(np.abs(ours - theirs)) <= 2.0**-21 * max(1.0, np.max(np.abs(theirs)))


def used(number: int) -> set[tuple[str, str]]:
    made, _ = case(number)
    pending = [*made.graph.node, *(node for function in made.functions for node in function.node)]
    pending += [inner for node in pending for attribute in node.attribute for inner in attribute.g.node]
    return {(node.domain, node.op_type) for node in pending} & set(OPERATORS)


def test_every_operator_is_compared() -> None:
    compared = set[tuple[str, str]]().union(*map(used, range(len(CASES))))
    assert set(OPERATORS) - compared == {("", "Swish")}


def test_operators_that_onnxruntime_does_not_have() -> None:
    x = np.linspace(-4.0, 4.0, 9)
    model = text_model("out = Swish<alpha = 1.5>(x)", opset=24, ir=10)
    np.testing.assert_allclose(evaluate(model, {"x": x})["out"], x / (1.0 + np.exp(-1.5 * x)), rtol=1e-15)


@pytest.mark.sample(4)
@pytest.mark.parametrize("file", sorted(ACTIVATIONS))
def test_every_tensor_of_the_committed_models(file: str) -> None:
    """Within 8e-6 of the largest entry; 4.2e-6 was measured, where Erf is steep. Integers and masks are equal."""
    model = onnx.load(FOLDER / file)
    fed = feeds(model)
    ours = tensors(model, fed)
    names = [name for node in model.graph.node for name in node.output if name]
    theirs = tapped(model, fed, names)
    for name in names:
        if theirs[name].dtype.kind != "f":
            np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)
            continue
        finite = np.isfinite(theirs[name])
        np.testing.assert_array_equal(ours[name][~finite], theirs[name][~finite], err_msg=name)
        largest = np.abs(ours[name][finite]).max(initial=0.0)
        assert np.abs(ours[name] - theirs[name])[finite].max(initial=0.0) <= 8e-6 * largest, name
