"""Elementwise operators, evaluated in float64: to fold small constants, and to compare an activation region on a grid.

Exactly the operators in `OPERATORS` count as elementwise. Most are evaluated by onnx's reference implementation; the
others, which it lacks or only has in float32, are numpy functions here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from rewriter.graph.view import attributes, key_of

Array = NDArray[np.float64]
Evaluate = Callable[[Sequence[Array], Mapping[str, Any]], Array]

MICROSOFT = "com.microsoft"


def _each(function: Callable[[float], float], x: Array) -> Array:
    # Nearly twice as fast as numpy.vectorize, and no list in memory; numpy itself has no erf.
    return np.fromiter(map(function, x.flat), np.float64, x.size).reshape(x.shape)


def erf(x: Array) -> Array:
    """Error function, entry by entry, to the last bit of float64 (math.erf)."""
    return _each(math.erf, x)


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), with a small relative error on both tails."""
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, small) / (1.0 + small)  # exp of a non-positive number cannot overflow


def softplus(x: Array) -> Array:
    """log(1 + exp(x)) without overflow."""
    return np.logaddexp(0.0, x)


def normal_cdf(x: Array) -> Array:
    """The normal distribution function Phi(x); erfc keeps the left tail accurate."""
    return 0.5 * _each(math.erfc, -x / math.sqrt(2.0))


def gelu_erf(x: Array) -> Array:
    """GELU: x Phi(x)."""
    return x * normal_cdf(x)


def gelu_tanh(x: Array) -> Array:
    """The tanh approximation of GELU, as x sigmoid(2 z) with z = sqrt(2/pi) (x + 0.044715 x^3)."""
    return x * sigmoid(2.0 * math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))


def _clip(args: Sequence[Array], given: Mapping[str, Any]) -> Array:
    low = args[1] if len(args) > 1 else given.get("min", -math.inf)
    high = args[2] if len(args) > 2 else given.get("max", math.inf)
    return np.minimum(np.maximum(args[0], low), high)


def _gelu(args: Sequence[Array], given: Mapping[str, Any]) -> Array:
    return gelu_tanh(args[0]) if given.get("approximate") == b"tanh" else gelu_erf(args[0])


def _swish(alpha: float) -> Evaluate:
    return lambda args, given: args[0] * sigmoid(given.get("alpha", alpha) * args[0])


def _with_bias(function: Callable[[Array], Array]) -> Evaluate:
    return lambda args, _: function(args[0] + args[1] if len(args) > 1 else args[0])


OWN: dict[tuple[str, str], Evaluate] = {
    # Casts are exact here: the region's function is identified in float64, and the proof measures its rounding.
    **dict.fromkeys((("", "Cast"), ("", "CastLike"), ("", "Dropout")), lambda args, _: args[0]),
    ("", "Clip"): _clip,
    ("", "Erf"): lambda args, _: erf(args[0]),
    ("", "Gelu"): _gelu,
    ("", "HardSwish"): lambda args, _: args[0] * np.clip(args[0] / 6.0 + 0.5, 0.0, 1.0),
    ("", "Swish"): _swish(1.0),
    (MICROSOFT, "Gelu"): lambda args, _: gelu_erf(args[0]),
    (MICROSOFT, "FastGelu"): _with_bias(gelu_tanh),
    (MICROSOFT, "BiasGelu"): _with_bias(gelu_erf),
    (MICROSOFT, "QuickGelu"): _swish(1.7020000219345093),
}

OPERATORS = frozenset(OWN) | {
    ("", name)
    for name in (
        *("Identity", "Neg", "Add", "Sum", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Abs", "Sqrt", "Reciprocal"),
        *("Exp", "Log", "Sin", "Cos", "Sinh", "Cosh", "Atan", "Sign", "Floor", "Ceil", "Round", "Tanh", "Sigmoid"),
        *("Relu", "Softplus", "Softsign", "Mish", "Elu", "Celu", "Selu", "HardSigmoid", "LeakyRelu", "PRelu"),
        *("ThresholdedRelu", "Shrink", "Where", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal", "And"),
        *("Or", "Not"),
    )
}


NONLINEAR = frozenset(
    [
        *("Relu", "LeakyRelu", "PRelu", "Elu", "Selu", "Celu", "ThresholdedRelu", "Clip", "Shrink"),
        *("Gelu", "QuickGelu", "FastGelu", "BiasGelu", "Erf", "Tanh", "Sigmoid", "HardSigmoid", "HardSwish"),
        *("Swish", "SwiGLU", "Mish", "Softplus", "Softsign", "Exp"),
    ]
)
"""Activation operators, and operators that occur almost only inside expanded activations."""


def is_elementwise(node: onnx.NodeProto) -> bool:
    """Whether `node` applies an elementwise operator."""
    return key_of(node) in OPERATORS


def evaluate(node: onnx.NodeProto, args: Sequence[Array]) -> Array:
    """Apply an elementwise node to float64 inputs, in float64; truth values are 0 and 1. Raises KeyError for others."""
    if not is_elementwise(node):
        raise KeyError(node.op_type)
    own = OWN.get(key_of(node))
    with np.errstate(all="ignore"):
        if own is not None:
            return np.asarray(own(args, attributes(node)), dtype=np.float64)
        named = {f"x{place}": np.asarray(arg, dtype=np.float64) for place, arg in enumerate(args)}
        plain = onnx.helper.make_node(node.op_type, list(named), ["y"])
        plain.attribute.extend(node.attribute)
        return np.asarray(_evaluator(plain.SerializeToString())(None, named)[0], dtype=np.float64)


@cache
def _evaluator(node: bytes) -> Any:
    from onnx.reference import ReferenceEvaluator  # slow to import

    made, helper = onnx.NodeProto.FromString(node), onnx.helper
    given = [helper.make_tensor_value_info(name, onnx.TensorProto.DOUBLE, None) for name in made.input]
    graph = helper.make_graph([made], "node", given, [onnx.ValueInfoProto(name="y")])
    imports = [helper.make_opsetid("", onnx.defs.onnx_opset_version())]
    return ReferenceEvaluator(helper.make_model(graph, opset_imports=imports)).run
