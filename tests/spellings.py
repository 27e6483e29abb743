"""Tables: the spellings of activations and of linear operators that exporters, and people, produce.

Each text is a part of a model of `tests.textmodels.mlp`: an activation makes `h` of `y` (and `u`), a linear operator
makes `y` of `x`.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx

from tests.textmodels import SILU, integers, tensor

MICROSOFT = {"com.microsoft": 1}
ROWS: dict[str, Any] = {"inputs": "float[tokens, 4] x", "outputs": "float[tokens, 4] out"}
PLANES: dict[str, Any] = {"inputs": "float[batch, 4, tokens] x", "outputs": "float[batch, 4, tokens] out"}


def erf_gelus() -> Iterator[tuple[str, str, str]]:
    """Every spelling of the erf-GELU from: argument of erf, place of the half, order of the factors."""
    arguments = {
        "div": "d = Div(y, $1.4142135623730951)",
        "mul": "d = Mul(y, $0.7071067811865476)",
        "mul-left": "d = Mul($0.7071067811865476, y)",
        "live-sqrt": "r = Sqrt($2.0) d = Div(y, r)",
        "live-reciprocal": "t = Sqrt($2.0) r = Reciprocal(t) d = Mul(y, r)",
    }
    halves = {
        "half-first": "g = Mul(y, $0.5) h = Mul(g, p)",
        "half-last": "g = Mul(y, p) h = Mul(g, $0.5)",
        "half-on-sum": "g = Mul(p, $0.5) h = Mul(y, g)",
        "half-on-sum-swapped": "g = Mul($0.5, p) h = Mul(g, y)",
        "half-by-div": "g = Mul(p, y) h = Div(g, $2.0)",
    }
    sums = {"one-right": "p = Add(e, $1.0)", "one-left": "p = Add($1.0, e)"}
    for (a, argument), (s, one), (h, half) in itertools.product(arguments.items(), sums.items(), halves.items()):
        yield f"{a}-{s}-{h}", "gelu", f"{argument} e = Erf(d) {one} {half}"


def tanh_gelus() -> Iterator[tuple[str, str, str]]:
    """Every spelling of the tanh-GELU from: the cube, and the place of the half."""
    tail = "i = Mul(z, $0.7978845608028654) t = Tanh(i) p = Add(t, $1.0)"
    cubes = {
        "pow": "c = Pow(y, $3.0) a = Mul(c, $0.044715) z = Add(y, a)",
        "mul-mul": "q = Mul(y, y) c = Mul(q, y) a = Mul($0.044715, c) z = Add(y, a)",
        "factored": "q = Mul(y, y) a = Mul(q, $0.044715) b = Add($1.0, a) z = Mul(y, b)",
        "left-to-right": "a = Mul($0.044715, y) b = Mul(a, y) c = Mul(b, y) z = Add(c, y)",
    }
    halves = {"half-first": "g = Mul($0.5, y) h = Mul(g, p)", "half-last": "g = Mul(y, p) h = Mul(g, $0.5)"}
    for (c, cube), (h, half) in itertools.product(cubes.items(), halves.items()):
        yield f"{c}-{h}", "gelu_tanh", f"{cube} {tail} {half}"


SPELLINGS: tuple[tuple[str, str, str], ...] = (
    ("sigmoid-right", "silu", SILU),
    ("sigmoid-left", "silu", "s = Sigmoid(y) h = Mul(s, y)"),
    ("exp", "silu", "n = Neg(y) e = Exp(n) d = Add($1.0, e) h = Div(y, d)"),
    ("reciprocal", "silu", "n = Neg(y) e = Exp(n) d = Add(e, $1.0) s = Reciprocal(d) h = Mul(y, s)"),
    ("half-tanh", "silu", "g = Mul(y, $0.5) t = Tanh(g) p = Add(t, $1.0) h = Mul(g, p)"),
    ("identity-and-dropout", "silu", "i = Identity(y) s = Sigmoid(i) m1 = Mul(y, s) h = Dropout(m1)"),
    ("quick-gelu", "quick_gelu", "b = Mul(y, $1.702) s = Sigmoid(b) h = Mul(y, s)"),
    ("quick-gelu-left", "quick_gelu", "b = Mul($1.702, y) s = Sigmoid(b) h = Mul(s, y)"),
    ("beta", "silu(beta=1.5, factor=1)", "b = Mul(y, $1.5) s = Sigmoid(b) h = Mul(y, s)"),
    ("negative-beta", "silu(beta=-1.5, factor=1)", "b = Mul(y, $-1.5) s = Sigmoid(b) h = Mul(y, s)"),
    ("factor", "silu(beta=1, factor=0.25)", "s = Sigmoid(y) a = Mul(y, s) h = Mul(a, $0.25)"),
    *erf_gelus(),
    *tanh_gelus(),
    ("max", "relu", "h = Max(y, $0.0)"),
    ("max-left", "relu", "h = Max($0.0, y)"),
    ("clip", "relu", "h = Clip(y, $0.0)"),
    ("where", "relu", "c = Greater(y, $0.0) h = Where(c, y, $0.0)"),
    ("mask", "relu", "c = Greater(y, $0.0) k = Cast<to = 1>(c) h = Mul(k, y)"),
    ("abs", "relu", "a = Abs(y) b = Add(y, a) h = Mul(b, $0.5)"),
    ("relu", "relu", "h = Relu(y)"),
    ("leaky", "leaky_relu(right=1, left=0.1)", "h = LeakyRelu<alpha = 0.1>(y)"),
    ("leaky-default", "leaky_relu(right=1, left=0.01)", "h = LeakyRelu(y)"),
    ("prelu", "leaky_relu(right=1, left=0.25)", "h = PRelu(y, $0.25)"),
    ("leaky-max", "leaky_relu(right=1, left=0.2)", "a = Mul(y, $0.2) h = Max(y, a)"),
    ("abs-itself", "leaky_relu(right=1, left=-1)", "h = Abs(y)"),
    ("mish", "mish", "p = Softplus(y) t = Tanh(p) h = Mul(y, t)"),
    ("mish-left", "mish", "p = Softplus(y) t = Tanh(p) h = Mul(t, y)"),
    ("mish-log", "mish", "e = Exp(y) o = Add(e, $1.0) p = Log(o) t = Tanh(p) h = Mul(y, t)"),
    ("tanh", "tanh", "h = Tanh(y)"),
    ("lecun-tanh", "tanh(steepness=1.5, height=2.5, low=-1.25)", "a = Mul(y, $0.75) t = Tanh(a) h = Mul(t, $1.25)"),
    ("sigmoid", "sigmoid", "h = Sigmoid(y)"),
    ("sigmoid-steep", "sigmoid(steepness=2, height=1, low=0)", "a = Mul(y, $2.0) h = Sigmoid(a)"),
    ("relu-squared-pow", "relu_squared", "r = Relu(y) h = Pow(r, $2.0)"),
    ("relu-squared-mul", "relu_squared", "r = Relu(y) h = Mul(r, r)"),
    ("relu6", "relu6", "h = Clip(y, $0.0, $6.0)"),
    ("hard-swish", "hard_swish", "a = Add(y, $3.0) c = Clip(a, $0.0, $6.0) m1 = Mul(y, c) h = Div(m1, $6.0)"),
    ("hard-sigmoid", "hard_sigmoid", "h = HardSigmoid<alpha = 0.16666667>(y)"),
    ("elu", "elu", "h = Elu(y)"),
    ("selu", "selu", "h = Selu(y)"),
    ("softplus", "softplus", "h = Softplus(y)"),
    ("softsign", "softsign", "h = Softsign(y)"),
    ("exp-itself", "exp", "h = Exp(y)"),
    ("square", "square", "h = Mul(y, y)"),
)
"""Name, how reports call the activation, text."""

OPERATORS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("swish", "silu", "h = Swish(y)", {"opset": 24, "ir": 10}),
    ("swish-alpha", "silu(beta=1.5, factor=1)", "h = Swish<alpha = 1.5>(y)", {"opset": 24, "ir": 10}),
    ("gelu", "gelu", "h = Gelu(y)", {"opset": 20, "ir": 9}),
    ("gelu-none", "gelu", 'h = Gelu<approximate = "none">(y)', {"opset": 20, "ir": 9}),
    ("gelu-tanh", "gelu_tanh", 'h = Gelu<approximate = "tanh">(y)', {"opset": 20, "ir": 9}),
    ("mish", "mish", "h = Mish(y)", {"opset": 18}),
    ("hard-swish", "hard_swish", "h = HardSwish(y)", {"opset": 17}),
    ("microsoft-gelu", "gelu", "h = com.microsoft.Gelu(y)", {"domains": MICROSOFT}),
    ("microsoft-fast-gelu", "gelu_tanh", "h = com.microsoft.FastGelu(y)", {"domains": MICROSOFT}),
    ("microsoft-quick-gelu", "quick_gelu", "h = com.microsoft.QuickGelu(y)", {"domains": MICROSOFT}),
    ("microsoft-silu", "silu", "h = com.microsoft.QuickGelu<alpha = 1.0>(y)", {"domains": MICROSOFT}),
    ("clip-attributes", "relu", "h = Clip<min = 0.0>(y)", {"opset": 10, "ir": 5}),
    ("relu6-attributes", "relu6", "h = Clip<min = 0.0, max = 6.0>(y)", {"opset": 10, "ir": 5}),
    ("pow-integer", "relu_squared", "r = Relu(y) h = Pow(r, two)", {"constants": {"two": tensor("two", 2, "int32")}}),
    ("prelu-one", "leaky_relu(right=1, left=0.25)", "h = PRelu(y, a)", {"constants": {"a": np.array([0.25])}}),
    ("casts", "silu", "d = Cast<to = 11>(y) s = Sigmoid(d) p = Mul(d, s) h = Cast<to = 1>(p)", {}),
)
"""Single operators, and spellings that need another opset or constant: name, label, text, options of `mlp`."""

GATES: tuple[tuple[str, str, str], ...] = (
    ("split", "m = MatMul(x, W1wide) y, u = Split<axis = -1>(m)", "sigmoid(gate) * value"),
    ("split-biased", "m = MatMul(x, W1wide) a = Add(m, b1wide) y, u = Split<axis = 2>(a)", "sigmoid(gate) * value"),
    ("two-matmuls", "y = MatMul(x, W1) u = MatMul(x, V1)", "sigmoid(gate) * value"),
    ("two-biased", "a = MatMul(x, W1) y = Add(a, b1) b = MatMul(x, V1) u = Add(c1, b)", "sigmoid(gate) * value"),
)

FIRSTS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("matmul", "y = MatMul(x, W1)", "MatMul 4x8", {}),
    ("bias-right", "m = MatMul(x, W1) y = Add(m, b1)", "MatMul 4x8", {}),
    ("bias-left", "m = MatMul(x, W1) y = Add(b1, m)", "MatMul 4x8", {}),
    ("bias-sub", "m = MatMul(x, W1) y = Sub(m, b1)", "MatMul 4x8", {}),
    ("per-channel-scale", "m = MatMul(x, W1) k = Mul(m, c1) y = Add(k, b1)", "MatMul 4x8", {}),
    ("live-transpose", "w = Transpose<perm = [1, 0]>(W1t) m = MatMul(x, w) y = Add(m, b1)", "MatMul 4x8", {}),
    (
        "dequantised",
        "w = DequantizeLinear(wq, $0.05, wz) m = MatMul(x, w) y = Add(m, b1)",
        "MatMul 4x8",
        {"constants": {"wq": onnx.numpy_helper.from_array(np.arange(32, dtype=np.int8).reshape(4, 8), "wq"),
                       "wz": onnx.numpy_helper.from_array(np.array(16, np.int8), "wz")}},
    ),
    (
        "reshape-gemm-reshape",
        "f = Reshape(x, flat) g = Gemm(f, W1, b1) y = Reshape(g, back)",
        "Gemm 4x8",
        {"inputs": "float[3, 5, 4] x", "outputs": "float[3, 5, 4] out",
         "constants": integers(flat=[-1, 4], back=[3, 5, 8])},
    ),
    (
        "reshape-gemm-reshape-live",
        ("i = Shape(x) j = Slice(i, zero, two) k = Concat<axis = 0>(j, eight) "
         "f = Reshape(x, flat) g = Gemm<transB = 1>(f, W1t, b1) y = Reshape(g, k)"),
        "Gemm 4x8",
        {"constants": integers(flat=[-1, 4], zero=[0], two=[2], eight=[8])},
    ),
    ("lora", "m = MatMul(x, W1) a = MatMul(x, A1) b = MatMul(a, B1) y = Add(m, b)", "MatMul 4x8 + MatMul 2x8", {}),
    ("lora-scaled-and-biased",
     "m = MatMul(x, W1) n1 = Add(m, b1) a = MatMul(x, A1) b = MatMul(a, B1) c = Mul(b, $2.0) y = Add(n1, c)",
     "MatMul 4x8 + MatMul 2x8", {}),
    ("two-sum", "m = MatMul(x, W1) n = MatMul(x, V1) y = Sum(m, n)", "MatMul 4x8", {}),
    ("two-sum-biased", "m = MatMul(x, W1) n = MatMul(x, V1) y = Sum(m, n, b1)", "MatMul 4x8", {}),
    ("constant-node", "w = Identity(W1) m = MatMul(x, w) y = Add(m, b1)", "MatMul 4x8", {}),
)  # fmt: skip
"""Ways to make the pre-activation on rank 3: name, text, kinds as reports print them, options of `mlp`."""
