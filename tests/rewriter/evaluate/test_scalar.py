from typing import Any

import numpy as np
import pytest

from rewriter.evaluate.arithmetic import draw_prime
from tests.rewriter.evaluate.single import assert_same_law, in_field, in_floats, single, text_model

MICROSOFT, OF_OLD = {"domain": "com.microsoft", "without": "onnx"}, {"opset": 6, "without": "float64"}
POSITIVE = np.array([[0.25, 1, 3], [0.001, 2, 80]], np.float32)
WITHIN = np.array([[-0.75, 0, 0.125], [0.5, -1, 1]], np.float32)
SPECIAL = np.array([np.inf, -np.inf, np.nan, 0, -2.5, 1], np.float32)

RATIONAL = [
    ("Add", [(2, 3), (3,)], {}),
    ("Sub", [(2, 1), (3,)], {}),
    ("Sum", [(2, 3), (3,), (2, 1)], {}),
    ("Mean", [(2, 3), (3,), (2, 1), (1,)], {"without": "onnx"}),
    ("Mul", [(2, 3), (2, 1)], {}),
    ("Neg", [(2, 3)], {}),
    *(("Pow", [(2, 3), np.array(power, np.float32)], {"constants": [1]}) for power in (3, 0)),
    ("Pow", [(2, 3), np.array([[2, 2, 2]], np.int64)], {}),
    ("Equal", [np.array([1, 2, 0], np.float32), np.array([[1], [0]], np.float32)], {}),
]
FUNCTIONS = [
    *(("Div", [(2, 3), each], {}) for each in (POSITIVE, np.array([7, 7, 7], np.float32))),
    *((name, [POSITIVE], {}) for name in ("Reciprocal", "Sqrt", "Log")),
    ("Pow", [POSITIVE, np.array(0.5, np.float32)], {"constants": [1]}),
    ("Pow", [POSITIVE, np.array(-1.5, np.float32)], {"constants": [1], "atol": 0.1}),
    ("Pow", [POSITIVE, np.array(-2, np.float32)], {"constants": [1], "atol": 1}),
    ("Pow", [POSITIVE, np.array([0.3, 2, -1], np.float32)], {"constants": [1], "atol": 0.1}),
    ("Pow", [np.array([2, 0.5], np.float32), np.array([[1.5], [-2]], np.float32)], {}),
    *((name, [(2, 3)], {}) for name in ("Exp", "Sigmoid", "Tanh", "Relu", "Abs", "Sign", "Sin", "Cos", "Sinh", "Cosh")),
    *((name, [(2, 3)], {}) for name in ("Softplus", "Softsign", "Atan", "Asinh", "Floor", "Ceil", "Round", "Mish")),
    *((name, [(2, 3)], {}) for name in ("Elu", "Selu", "Celu", "LeakyRelu", "HardSigmoid", "Shrink")),
    *((name, [WITHIN], {}) for name in ("Tan", "Asin", "Acos")),
    ("Acosh", [POSITIVE + 1], {}),
    ("Atanh", [WITHIN * np.float32(0.5)], {}),
    ("Selu", [(2, 3)], {"alpha": 1.5, "gamma": 2.0}),
    *((name, [(2, 3)], {"alpha": alpha}) for name, alpha in (("Elu", 0.3), ("Celu", 0.7), ("LeakyRelu", 0.3))),
    *(("ThresholdedRelu", [(2, 3)], given) for given in ({}, {"alpha": 0.25})),
    ("HardSigmoid", [(2, 3)], {"alpha": 0.5, "beta": 0.6}),
    ("Shrink", [(2, 3)], {"lambd": 1.5, "bias": 0.5}),
    *((name, [(2, 3)], {"without": "float64"}) for name in ("HardSwish", "Erf")),
    ("PRelu", [(2, 3), (3,)], {}),
    *(("Gelu", [(2, 3)], {"without": "float64"} | given) for given in ({}, {"approximate": "tanh"})),
    *((name, [(2, 3)], MICROSOFT) for name in ("Gelu", "FastGelu")),
    *((name, [(2, 3), (3,)], MICROSOFT) for name in ("FastGelu", "BiasGelu")),
    *(("QuickGelu", [(2, 3)], MICROSOFT | given) for given in ({}, {"alpha": 1.0})),
    ("Swish", [(2, 3)], {"opset": 24, "alpha": 0.5, "without": "onnxruntime"}),
    ("SwiGLU", [(2, 3), (2, 3)], {"opset": 28, "alpha": 1.5, "without": "onnxruntime float64"}),
    ("Min", [(2, 3), (1,)], {}),
    *(("Max", given, {}) for given in ([(2, 3), (3,), (2, 1)], [(2, 3)])),
    ("Clip", [(2, 3), np.array(-1.5, np.float32), np.array(2, np.float32)], {"constants": [1, 2]}),
    ("Clip", [(2, 3), None, np.array(-1, np.float32)], {}),
    ("Clip", [(2, 3), np.array(2, np.float32), np.array(-2, np.float32)], {"opset": 13}),
    *(("Clip", [(2, 3)], OF_OLD | ends) for ends in ({"min": -1.0, "max": 0.5}, {"min": 0.0})),
    *((name, given, {}) for name in ("Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal")
        for given in ([(2, 3), (3,)], [SPECIAL, np.array([[np.inf], [0], [-np.inf]], np.float32)])),
    ("Mod", [(2, 3), POSITIVE], {"fmod": 1}),
    ("IsNaN", [SPECIAL], {}),
    *(("IsInf", [SPECIAL], given) for given in ({}, {"detect_negative": 0}, {"detect_positive": 0})),
]  # fmt: skip


PRECISE = {
    "Softplus": (-50.0, 1.9287498479639178e-22),
    "Sigmoid": (-40.0, 4.248354255291589e-18),
    "Erf": (1e-9, 1.1283791670955126e-09),
    "Elu": (-1e-9, -9.999999995e-10),
    "Mish": (-30.0, -2.8072868906518046e-12),
}


@pytest.mark.parametrize("operator", PRECISE)
def test_float64_keeps_its_digits(operator: str) -> None:
    """Where a formula that is right in the field cancels, or overflows, in floats."""
    x, right = PRECISE[operator]
    model, feeds = single(operator, [np.array([x])])
    np.testing.assert_allclose(in_floats(model, feeds)[0], right, rtol=1e-9)


LAWS = {  # beside the definitions of `test_defined_rows.py`
    "Gelu": ("y = Gelu(x)", "a = Div(x, root2) b = Erf(a) c = Add(b, one) d = Mul(x, c) y = Mul(d, half)"),
    "Gelu, scaled": ("y = Gelu(x)", "a = Mul(x, inverse) b = Erf(a) c = Add(one, b) d = Mul(x, half) y = Mul(c, d)"),
    "tanh GELU": (
        'y = Gelu <approximate = "tanh"> (x)',
        "c = Pow(x, three) d = Mul(c, k) e = Add(x, d) f = Mul(e, root2pi) g = Tanh(f) h = Add(g, one)"
        " i = Mul(x, half) y = Mul(i, h)"),
    "FastGelu": ('y = Gelu <approximate = "tanh"> (x)', "y = com.microsoft.FastGelu(x)"),
    "FastGelu by Sigmoid": (
        "y = com.microsoft.FastGelu(x)",
        "c = Mul(x, x) d = Mul(c, k) e = Add(d, one) f = Mul(x, e) g = Mul(f, twice) h = Sigmoid(g) y = Mul(x, h)"),
    "QuickGelu": ("y = com.microsoft.QuickGelu(x)", "a = Mul(x, quick) b = Sigmoid(a) y = Mul(x, b)"),
    "HardSwish by Clip": (
        "y = HardSwish(x)",
        "a = Add(x, three) z = Sub(one, one) s = Mul(three, two) b = Clip(a, z, s) c = Mul(x, b) y = Div(c, s)"),
    "Sigmoid": ("y = Sigmoid(x)", "a = Neg(x) b = Exp(a) c = Add(b, one) y = Reciprocal(c)"),
    "Sigmoid by Tanh": ("y = Sigmoid(x)", "a = Mul(x, half) b = Tanh(a) c = Mul(b, half) y = Add(c, half)"),
    "Tanh": ("y = Tanh(x)", "a = Mul(x, two) b = Sigmoid(a) c = Mul(b, two) y = Sub(c, one)"),
    "Relu": ("y = Relu(x)", "z = Sub(x, x) y = Max(x, z)"),
    "Relu by Clip": ("y = Relu(x)", "z = Sub(one, one) y = Clip(x, z)"),
    "Abs": ("y = Abs(x)", "a = Sign(x) y = Mul(x, a)"),
    "Reciprocal": ("a = Sqrt(x) y = Reciprocal(a)", "a = Sqrt(x) y = Div(one, a)"),
    "Pow": ("a = Mul(x, x) b = Add(a, one) y = Sqrt(b)", "a = Pow(x, two) b = Add(a, one) y = Pow(b, half)"),
    "Mean": ("y = Mean(x, w)", "a = Add(x, w) y = Mul(a, half)"),
    "Ceil": ("y = Ceil(x)", "a = Neg(x) b = Floor(a) y = Neg(b)"),
    "a bound that nothing exceeds": ("y = Relu(x)", "z = Sub(one, one) y = Clip(x, z, largest)"),
    "Clip of old": ("y = Clip(x, half, two)", "a = Max(x, half) y = Min(a, two)"),
    "a mask is below any bound": (
        "m = Add(x, low) a = Max(m, lowest) y = Softmax(a)",
        "m = Add(x, low) y = Softmax(m)"),
    "a mask that is scaled": (
        "m = Add(x, low) a = Div(m, two) y = Softmax(a)",
        "b = Div(x, two) m = Add(b, low) y = Softmax(m)"),
    "a mask has no exponential": ("m = Add(x, low) a = Exp(m) y = Mul(a, keep)", "m = Add(x, low) y = Exp(m)"),
    "a mask is found": (
        "m = Add(x, infinite) b = IsInf(m) y = Where(b, x, w)",
        "m = Add(x, infinite) b = Less(m, lowest) y = Where(b, x, w)"),
}  # fmt: skip
NUMBERS = {
    "one": 1.0, "two": 2.0, "three": 3.0, "half": 0.5, "root2": 1.4142135, "inverse": 0.70710677, "k": 0.044715,
    "root2pi": 0.7978846, "twice": 1.5957692, "quick": 1.702, "largest": 3.4028234663852886e38,
    "lowest": -3.4028234663852886e38,
}  # fmt: skip
ROWS = {"low": "0, -3e38, -3e38, 0", "infinite": "0, -inf, -inf, 0", "keep": "1, 0, 0, 1"}


def law(nodes: str) -> Any:
    numbers = " ".join(f"{name} = Constant <value_float = {each}> ()" for name, each in NUMBERS.items())
    rows = " ".join(f"{name} = Constant <value = float[4] {{{each}}}> ()" for name, each in ROWS.items())
    return text_model(f"{numbers} {rows} {nodes}", "float[2, 4] x, float[4] w")


@pytest.mark.parametrize(("one", "other"), LAWS.values(), ids=LAWS)
def test_laws_of_arithmetic(one: str, other: str) -> None:
    rng = np.random.default_rng(1)
    feeds = {"x": np.abs(rng.normal(size=(2, 4))).astype(np.float32), "w": rng.normal(size=4).astype(np.float32)}
    feeds["x"][0] *= 1 if "Sqrt" in one else -1
    assert_same_law(law(one), law(other), feeds)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("y = Gelu(x)", 'y = Gelu <approximate = "tanh"> (x)'),
        ("y = Relu(x)", "y = Elu(x)"),
        ("y = Softplus(x)", "y = Relu(x)"),
        ("a = Neg(x) y = Erf(a)", "y = Erf(x)"),
        ("y = Floor(x)", "y = Round(x)"),
        ("y = Sin(x)", "y = Cos(x)"),
    ],
)
def test_other_functions_differ(one: str, other: str) -> None:
    feeds = {"x": np.random.default_rng(1).normal(size=(16, 4)).astype(np.float32), "w": np.zeros(4, np.float32)}
    left, right = (in_field(law(each), feeds, snaps=True)[0] for each in (one, other))
    assert (left != right).any()


def test_small_primes_have_roots_modulo_the_prime_that_is_drawn() -> None:
    for p in (draw_prime() for _ in range(10)):
        assert [root for q in (2, 3, 5, 7, 11, 13, 17, 19, 23) if (root := pow(q, p // 2, p)) != 1] == []
