"""Elementwise operators as numpy functions in float64.

The table `OPERATORS` defines what counts as elementwise: an operator that is not in it is not. It serves to fold small
constants and to evaluate an activation region on a grid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray

from rewriter.graph.view import key_of

Array = NDArray[np.float64]
Attributes = Mapping[str, float]
Evaluate = Callable[[Sequence[Array], Attributes], Array]

MICROSOFT = "com.microsoft"


@dataclass(frozen=True)
class Elementwise:
    """One elementwise operator.

    Attributes:
        evaluate: maps operands (float64; trailing optional ones may be missing) and attributes to the result.
        defaults: attribute defaults of the ONNX specification.
    """

    evaluate: Evaluate
    defaults: tuple[tuple[str, float], ...] = ()


_erf_scalar = np.frompyfunc(math.erf, 1, 1)


def erf(x: Array) -> Array:
    """Error function, entry by entry, to the last bit of float64 (math.erf)."""
    return np.asarray(_erf_scalar(x), dtype=np.float64)


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), with a small relative error on both tails."""
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, small) / (1.0 + small)  # exp of a non-positive number cannot overflow


def softplus(x: Array) -> Array:
    """log(1 + exp(x)) without overflow."""
    return np.logaddexp(0.0, x)


_erfc_scalar = np.frompyfunc(math.erfc, 1, 1)


def normal_cdf(x: Array) -> Array:
    """The normal distribution function Phi(x); erfc keeps the left tail accurate."""
    return 0.5 * np.asarray(_erfc_scalar(-x / math.sqrt(2.0)), dtype=np.float64)


def gelu_erf(x: Array) -> Array:
    """GELU: x Phi(x)."""
    return x * normal_cdf(x)


def gelu_tanh(x: Array) -> Array:
    """The tanh approximation of GELU, as x sigmoid(2 z) with z = sqrt(2/pi) (x + 0.044715 x^3)."""
    return x * sigmoid(2.0 * math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))


def _unary(function: Callable[[Array], Array]) -> Elementwise:
    return _with_attributes(lambda x, _: function(x))


def _with_attributes(function: Callable[[Array, Attributes], Array], **defaults: float) -> Elementwise:
    """An operator of its first operand."""
    return Elementwise(lambda args, attributes: function(args[0], attributes), tuple(defaults.items()))


def _fold(function: Callable[[Array, Array], Array]) -> Elementwise:
    def evaluate(args: Sequence[Array], _: Attributes) -> Array:
        result = args[0]
        for arg in args[1:]:
            result = function(result, arg)
        return result

    return Elementwise(evaluate)


def _clip(args: Sequence[Array], attributes: Attributes) -> Array:
    low = args[1] if len(args) > 1 else attributes["min"]
    high = args[2] if len(args) > 2 else attributes["max"]
    return np.minimum(np.maximum(args[0], low), high)


def _elu(x: Array, attributes: Attributes) -> Array:
    return np.where(x > 0, x, attributes["alpha"] * np.expm1(np.minimum(x, 0.0)))


def _celu(x: Array, attributes: Attributes) -> Array:
    alpha = attributes["alpha"]
    return np.maximum(x, 0.0) + np.minimum(alpha * np.expm1(np.minimum(x, 0.0) / alpha), 0.0)


def _selu(x: Array, attributes: Attributes) -> Array:
    return attributes["gamma"] * _elu(x, attributes)


def _hard_sigmoid(x: Array, attributes: Attributes) -> Array:
    return np.clip(attributes["alpha"] * x + attributes["beta"], 0.0, 1.0)


def _leaky(x: Array, attributes: Attributes) -> Array:
    return np.where(x >= 0, x, attributes["alpha"] * x)


def _swish(x: Array, attributes: Attributes) -> Array:
    return x * sigmoid(attributes["alpha"] * x)


def _thresholded(x: Array, attributes: Attributes) -> Array:
    return np.where(x > attributes["alpha"], x, 0.0)


def _shrink(x: Array, attributes: Attributes) -> Array:
    bias, threshold = attributes["bias"], attributes["lambd"]
    return np.where(x < -threshold, x + bias, np.where(x > threshold, x - bias, 0.0))


def _gelu(x: Array, attributes: Attributes) -> Array:
    return gelu_tanh(x) if attributes["approximate"] else gelu_erf(x)


def _with_bias(function: Callable[[Array], Array]) -> Evaluate:
    return lambda args, _: function(args[0] + args[1] if len(args) > 1 else args[0])


def _truth(function: Callable[[Array, Array], NDArray[np.bool_]]) -> Elementwise:
    return Elementwise(lambda args, _: function(args[0], args[1]).astype(np.float64))


_IDENTITY = _unary(lambda x: x)

_ONNX: dict[str, Elementwise] = {
    # Casts are exact here: what a region computes is identified in float64, and its rounding is measured by the proof.
    "Identity": _IDENTITY,
    "Cast": _IDENTITY,
    "CastLike": _IDENTITY,
    "Dropout": _IDENTITY,
    "Neg": _unary(np.negative),
    "Add": _fold(np.add),
    "Sum": _fold(np.add),
    "Sub": _fold(np.subtract),
    "Mul": _fold(np.multiply),
    "Div": _fold(np.divide),
    "Pow": _fold(np.power),
    "Max": _fold(np.maximum),
    "Min": _fold(np.minimum),
    "Abs": _unary(np.abs),
    "Sqrt": _unary(np.sqrt),
    "Reciprocal": _unary(np.reciprocal),
    "Exp": _unary(np.exp),
    "Log": _unary(np.log),
    "Sin": _unary(np.sin),
    "Cos": _unary(np.cos),
    "Sinh": _unary(np.sinh),
    "Cosh": _unary(np.cosh),
    "Atan": _unary(np.arctan),
    "Sign": _unary(np.sign),
    "Floor": _unary(np.floor),
    "Ceil": _unary(np.ceil),
    "Round": _unary(np.rint),
    "Erf": _unary(erf),
    "Tanh": _unary(np.tanh),
    "Sigmoid": _unary(sigmoid),
    "Relu": _unary(lambda x: np.maximum(x, 0.0)),
    "Softplus": _unary(softplus),
    "Softsign": _unary(lambda x: x / (1.0 + np.abs(x))),
    "Mish": _unary(lambda x: x * np.tanh(softplus(x))),
    "HardSwish": _unary(lambda x: x * np.clip(x / 6.0 + 0.5, 0.0, 1.0)),
    "Swish": _with_attributes(_swish, alpha=1.0),
    "Gelu": _with_attributes(_gelu, approximate=0.0),
    "Clip": Elementwise(_clip, defaults=(("min", -math.inf), ("max", math.inf))),
    "Elu": _with_attributes(_elu, alpha=1.0),
    "Celu": _with_attributes(_celu, alpha=1.0),
    "Selu": _with_attributes(_selu, alpha=1.67326319217681884765625, gamma=1.05070102214813232421875),
    "HardSigmoid": _with_attributes(_hard_sigmoid, alpha=0.2, beta=0.5),
    "LeakyRelu": _with_attributes(_leaky, alpha=0.01),
    "PRelu": Elementwise(lambda args, _: np.where(args[0] >= 0, args[0], args[1] * args[0])),
    "ThresholdedRelu": _with_attributes(_thresholded, alpha=1.0),
    "Shrink": _with_attributes(_shrink, bias=0.0, lambd=0.5),
    "Where": Elementwise(lambda args, _: np.where(args[0] != 0, args[1], args[2])),
    "Greater": _truth(np.greater),
    "GreaterOrEqual": _truth(np.greater_equal),
    "Less": _truth(np.less),
    "LessOrEqual": _truth(np.less_equal),
    "Equal": _truth(np.equal),
    "And": _truth(np.logical_and),
    "Or": _truth(np.logical_or),
    "Not": _unary(lambda x: (x == 0).astype(np.float64)),
}

_MICROSOFT: dict[str, Elementwise] = {
    "Gelu": _unary(gelu_erf),
    "FastGelu": Elementwise(_with_bias(gelu_tanh)),
    "BiasGelu": Elementwise(_with_bias(gelu_erf)),
    "QuickGelu": _with_attributes(_swish, alpha=1.7020000219345093),
}

OPERATORS: dict[tuple[str, str], Elementwise] = {
    **{("", name): operator for name, operator in _ONNX.items()},
    **{(MICROSOFT, name): operator for name, operator in _MICROSOFT.items()},
}


NONLINEAR = frozenset(
    [
        *("Relu", "LeakyRelu", "PRelu", "Elu", "Selu", "Celu", "ThresholdedRelu", "Clip", "Shrink"),
        *("Gelu", "QuickGelu", "FastGelu", "BiasGelu", "Erf", "Tanh", "Sigmoid", "HardSigmoid", "HardSwish"),
        *("Swish", "SwiGLU", "Mish", "Softplus", "Softsign", "Exp"),
    ]
)
"""Operators that are activations, or that activations are spelled with and hardly anything else is."""


def lookup(node: onnx.NodeProto) -> Elementwise | None:
    """The elementwise operator that `node` applies, or None."""
    return OPERATORS.get(key_of(node))


def evaluate(node: onnx.NodeProto, args: Sequence[Array]) -> Array:
    """Apply an elementwise node to float64 inputs, in float64.

    Raises:
        KeyError: the node is not elementwise.
    """
    operator = OPERATORS[key_of(node)]
    # ONNX stores float attributes in float32, so a default of 0.01 is the float32 nearest to it.
    attributes = {name: float(np.float32(value)) for name, value in operator.defaults}
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.FLOAT:
            attributes[attribute.name] = attribute.f
        elif attribute.name == "approximate":
            attributes["approximate"] = float(attribute.s == b"tanh")
    with np.errstate(all="ignore"):
        return np.asarray(operator.evaluate(args, attributes), dtype=np.float64)
