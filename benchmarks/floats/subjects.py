"""The activations of the README's table: as ONNX nodes from y (and a value u) to f, and in float64."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]
Exact = Callable[[Doubles], Doubles]

_TINY, _LEFT, _RIGHT = 2.0**-18, -6.0, 27.3


def erfc(x: Doubles) -> Doubles:
    """The complementary error function, by `math.erfc` where it is neither 2, nor 0, nor a line within 2^-54."""
    result = np.where(x > 0.0, 0.0, 2.0)
    tiny = np.abs(x) <= _TINY
    result[tiny] = 1.0 - 2.0 / math.sqrt(math.pi) * x[tiny]
    between = ~tiny & (x > _LEFT) & (x < _RIGHT)
    result[between] = np.fromiter(map(math.erfc, x[between].tolist()), float)
    return result


def _sigmoid(y: Doubles) -> Doubles:
    return 1.0 / (1.0 + np.exp(-y))


def _silu(y: Doubles) -> Doubles:
    return y * _sigmoid(y)


def _gelu(y: Doubles) -> Doubles:
    return 0.5 * y * erfc(y * -math.sqrt(0.5))


def _gelu_tanh(y: Doubles) -> Doubles:
    return y * _sigmoid(math.sqrt(8.0 / math.pi) * y * (1.0 + 0.044715 * (y * y)))


def _mish(y: Doubles) -> Doubles:
    """Y tanh(ln(1 + e^y)), without the difference of nearly equal numbers that this is for small e^y."""
    power = np.exp(np.minimum(y, 60.0))
    power *= power + 2.0
    return y * (power / (power + 2.0))


def _relu(y: Doubles) -> Doubles:
    return np.maximum(y, 0.0)


def _softplus(y: Doubles) -> Doubles:
    return np.maximum(y, 0.0) + np.log1p(np.exp(-np.abs(y)))


def _bent(alpha: float, scale: float = 1.0, rate: float = 1.0) -> Exact:
    return lambda y: scale * np.where(y < 0.0, alpha * np.expm1(rate * np.minimum(y, 0.0)), y)


def _leaky(slope: float) -> Exact:
    return lambda y: np.where(y < 0.0, slope * y, y)


@dataclass(frozen=True)
class Subject:
    """An activation, or the gate of a block, which multiplies a value.

    Attributes:
        nodes: from y (and u) to f, as `onnx.parser` reads them; names in capitals are those of `constants`.
        exact: f at u = 1, of the numbers in the nodes, within 2^-46 max(1, |f|).
        constants: numbers that are the same in float16, bfloat16 and float32.
        gated: whether there is a value u.
    """

    nodes: str
    exact: Exact
    constants: Mapping[str, float] = field(default_factory=dict)
    gated: bool = False


def _gate(nodes: str, exact: Exact) -> Subject:
    return Subject(f"{nodes} f = Mul (h, u)", exact, gated=True)


def _single(value: float) -> float:
    """An attribute as ONNX stores it."""
    return float(np.float32(value))


_SELU: dict[str, Any] = {"alpha": _single(1.67326319217681884765625), "scale": _single(1.05070102214813232421875)}
_SIXTH = _single(1.0 / 6.0)
_ENDS = {"LOW": -10.0, "HIGH": 10.0}

SUBJECTS: dict[str, Subject] = {
    "SiLU": Subject("s = Sigmoid (y) f = Mul (y, s)", _silu),
    "GELU, by erf": Subject("f = Gelu (y)", _gelu),
    "GELU, by tanh": Subject('f = Gelu <approximate = "tanh"> (y)', _gelu_tanh),
    "ReLU": Subject("f = Relu (y)", _relu),
    "SwiGLU": _gate("s = Sigmoid (y) h = Mul (y, s)", _silu),
    "QuickGELU": Subject(
        "b = Mul (y, B) s = Sigmoid (b) f = Mul (y, s)", lambda y: y * _sigmoid(1.703125 * y), {"B": 1.703125}
    ),
    "squared ReLU": Subject("r = Relu (y) f = Mul (r, r)", lambda y: np.square(_relu(y))),
    "hard swish": Subject("f = HardSwish (y)", lambda y: y * np.clip((y + 3.0) / 6.0, 0.0, 1.0)),
    "tanh": Subject("f = Tanh (y)", np.tanh),
    "softplus": Subject("f = Softplus (y)", _softplus),
    "Mish": Subject("f = Mish (y)", _mish),
    "sigmoid": Subject("f = Sigmoid (y)", _sigmoid),
    "leaky ReLU": Subject("f = LeakyRelu <alpha = 0.01> (y)", _leaky(_single(0.01))),
    "ReLU6": Subject("f = Clip (y, LOW, HIGH)", lambda y: np.clip(y, 0.0, 6.0), {"LOW": 0.0, "HIGH": 6.0}),
    "hard sigmoid": Subject(
        f"f = HardSigmoid <alpha = {_SIXTH!r}, beta = 0.5> (y)", lambda y: np.clip(_SIXTH * y + 0.5, 0.0, 1.0)
    ),
    "ELU": Subject("f = Elu (y)", _bent(1.0)),
    "SELU": Subject("f = Selu (y)", _bent(**_SELU)),
    "CELU": Subject("f = Celu <alpha = 0.5> (y)", _bent(0.5, rate=2.0)),
    "PReLU": Subject("f = PRelu (y, B)", _leaky(0.25), {"B": 0.25}),
    "clip": Subject("f = Clip (y, LOW, HIGH)", lambda y: np.clip(y, -1.0, 1.0), {"LOW": -1.0, "HIGH": 1.0}),
    "Swish": Subject("b = Mul (y, B) s = Sigmoid (b) f = Mul (y, s)", lambda y: y * _sigmoid(1.5 * y), {"B": 1.5}),
    "square": Subject("f = Mul (y, y)", np.square),
    "ReGLU": _gate("h = Relu (y)", _relu),
    "GLU": _gate("h = Sigmoid (y)", _sigmoid),
    "tanh gate": _gate("h = Tanh (y)", np.tanh),
    "bilinear": Subject("f = Mul (y, u)", np.positive, gated=True),
    "exp": Subject("f = Exp (y)", np.exp),
    "SiLU, clipped": Subject(
        "c = Clip (y, LOW, HIGH) s = Sigmoid (c) f = Mul (c, s)", lambda y: _silu(np.clip(y, -10.0, 10.0)), _ENDS
    ),
    "GEGLU, by erf": _gate("h = Gelu (y)", _gelu),
    "GEGLU, by tanh": _gate('h = Gelu <approximate = "tanh"> (y)', _gelu_tanh),
    "GELU, clipped": Subject("c = Clip (y, LOW, HIGH) f = Gelu (c)", lambda y: _gelu(np.clip(y, -10.0, 10.0)), _ENDS),
    "softsign": Subject("f = Softsign (y)", lambda y: y / (1.0 + np.abs(y))),
}
"""By name. The order is that of the runs: most used first, where every float32 takes minutes."""
