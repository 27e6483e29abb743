"""The table of activations: how each is recognised from its values, and its head program.

Comes in: a function given by its values, and the arithmetic of the block. Goes out: a `Recognised` activation
with its parameters, or the nearest miss. Matching is semantic: however a graph spells GELU, its values are
GELU's. Parameters (SiLU's beta, a leaky slope, an outer factor) are solved for, then checked on the whole grid.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from passes.fitted import cheapest
from passes.programs import Array, BiasToken, Head, Program
from rewriter.graph import elementwise

Function = Callable[[Array], Array]
Parameters = tuple[float, ...]

RELU_GAP = 0.27846454276107379
"""max over x > 0 of x / (1 + e^x): the error of SiLU(k y) / k against ReLU is this over k."""


@dataclass(frozen=True)
class Arithmetic:
    """The arithmetic that a block's heads are evaluated in.

    Attributes:
        steepness: factor k of the limit ReLU(y) = lim SiLU(k y) / k: a power of two, so that k y is exact.
        tolerance: error of a program that this arithmetic cannot tell from 0.
    """

    steepness: float
    tolerance: float


@dataclass(frozen=True)
class Activation:
    """One entry of the table.

    Attributes:
        name: canonical name.
        parameters: names of the solved parameters.
        function: values of the activation, given points and parameters.
        solve: parameters from the values of an unknown function; None when it cannot be this activation.
        program: the head program; None when the table has no program for it yet.
    """

    name: str
    parameters: tuple[str, ...]
    function: Callable[[Array, Parameters], Array]
    solve: Callable[[Function], Parameters | None]
    program: Callable[[Parameters, Arithmetic], Program] | None


# -- y S(k y) times a factor: SiLU and GELU ------------------------------------------------------------------


def _solve_self_gated(quantile: Callable[[float], float]) -> Callable[[Function], Parameters | None]:
    """(k, a) of a y S(k y) with S a distribution function symmetric about 0: f(1) - f(-1) = a, f(1) = a S(k)."""

    def solve(f: Function) -> Parameters | None:
        above, below = _at(f, 1.0), _at(f, -1.0)
        factor = above - below
        if not math.isfinite(factor) or factor == 0.0 or not 0.0 < above / factor < 1.0 or above == -below:
            return None  # the last case is a straight line: S(k) = 1/2, k = 0
        return quantile(above / factor), factor

    return solve


def _logit(p: float) -> float:
    return math.log(p / (1.0 - p))


def _silu(y: Array, p: Parameters) -> Array:
    return p[1] * y * elementwise.sigmoid(p[0] * y)


def _silu_program(p: Parameters, _: Arithmetic) -> Program:
    return Program("silu", (Head(beta=p[0], c=p[1]),))


def _gelu(y: Array, p: Parameters) -> Array:
    return p[1] * y * elementwise.normal_cdf(p[0] * y)


def _gelu_program(p: Parameters, arithmetic: Arithmetic) -> Program:
    return cheapest("gelu", arithmetic.tolerance * abs(p[0] / p[1])).scaled(inner=p[0], outer=p[1] / p[0])


def _gelu_tanh(y: Array, p: Parameters) -> Array:
    return p[0] * elementwise.gelu_tanh(y)


def _gelu_tanh_program(p: Parameters, arithmetic: Arithmetic) -> Program:
    return cheapest("gelu_tanh", arithmetic.tolerance / abs(p[0])).scaled(outer=p[0])


def _solve_factor(reference: Function, at: float = 1.0) -> Callable[[Function], Parameters | None]:
    """The factor a of a h(y), from one point."""

    def solve(f: Function) -> Parameters | None:
        factor = _at(f, at) / _at(reference, at)
        return (factor,) if math.isfinite(factor) and factor != 0.0 else None

    return solve


def _mish(y: Array, p: Parameters) -> Array:
    return p[0] * y * np.tanh(elementwise.softplus(y))


def _mish_program(p: Parameters, _: Arithmetic) -> Program:
    # 1 - tanh(softplus(y)) = 2 / (e^2y + 2 e^y + 2): the weight of self at logit ln 2 against 2y and y + ln 2.
    ln2 = math.log(2.0)
    head = Head(beta=0.0, gamma=ln2, c=-p[0], bias_tokens=(BiasToken(slope=2.0), BiasToken(slope=1.0, offset=ln2)))
    return Program("mish", (head,), linear=p[0])


# -- piecewise linear with one kink: ReLU and leaky ReLU -----------------------------------------------------


def _two_slopes(y: Array, p: Parameters) -> Array:
    return np.where(y >= 0, p[0], p[1]) * y


def _solve_relu(f: Function) -> Parameters | None:
    right, left = _at(f, 1.0), -_at(f, -1.0)
    return (right, 0.0) if right != 0.0 and left == 0.0 else None


def _solve_two_slopes(f: Function) -> Parameters | None:
    right, left = _at(f, 1.0), -_at(f, -1.0)
    return (right, left) if math.isfinite(right) and math.isfinite(left) and right != left else None


def _two_slopes_program(p: Parameters, arithmetic: Arithmetic) -> Program:
    right, left = p
    k = arithmetic.steepness
    error = abs(right - left) * RELU_GAP / k
    name = "relu" if left == 0.0 else "leaky_relu"
    return Program(name, (Head(beta=k, c=right - left),), linear=left, max_error=error)


# -- sigmoid-shaped: c + a sigmoid(k y) ----------------------------------------------------------------------

_FAR = 1e4


def _logistic(y: Array, p: Parameters) -> Array:
    return p[2] + p[1] * elementwise.sigmoid(p[0] * y)


def _solve_logistic(f: Function) -> Parameters | None:
    low, high, middle = _at(f, -_FAR), _at(f, _FAR), _at(f, 1.0)
    if not all(math.isfinite(value) for value in (low, high, middle)) or high == low:
        return None
    share = (middle - low) / (high - low)
    return (_logit(share), high - low, low) if 0.0 < share < 1.0 else None


def _solve_sigmoid(f: Function) -> Parameters | None:
    solved = _solve_logistic(f)
    return solved if solved is not None and solved[2] == 0.0 else None


def _logistic_program(p: Parameters, _: Arithmetic) -> Program:
    k, height, low = p
    name = "sigmoid" if low == 0.0 else "tanh"
    return Program(name, (Head(beta=k, c=0.0, d=height),), constant=low)


# -- recognised by name, no program yet ----------------------------------------------------------------------


def _known_only(name: str, function: Function, at: float = 1.0) -> Activation:
    def values(y: Array, p: Parameters) -> Array:
        return p[0] * function(y)

    return Activation(name, ("factor",), values, _solve_factor(function, at), None)


def _elu(y: Array) -> Array:
    return np.where(y > 0, y, np.expm1(np.minimum(y, 0.0)))


_SELU_ALPHA, _SELU_SCALE = 1.67326319217681884765625, 1.05070102214813232421875


def _selu(y: Array) -> Array:
    return _SELU_SCALE * np.where(y > 0, y, _SELU_ALPHA * np.expm1(np.minimum(y, 0.0)))


_MISH = _solve_factor(lambda y: _mish(y, (1.0,)))
_GELU_TANH = _solve_factor(elementwise.gelu_tanh)
_PROBIT = NormalDist().inv_cdf

ACTIVATIONS: tuple[Activation, ...] = (
    Activation("relu", ("right", "left"), _two_slopes, _solve_relu, _two_slopes_program),
    Activation("leaky_relu", ("right", "left"), _two_slopes, _solve_two_slopes, _two_slopes_program),
    Activation("silu", ("beta", "factor"), _silu, _solve_self_gated(_logit), _silu_program),
    Activation("gelu", ("inner", "factor"), _gelu, _solve_self_gated(_PROBIT), _gelu_program),
    Activation("gelu_tanh", ("factor",), _gelu_tanh, _GELU_TANH, _gelu_tanh_program),
    Activation("mish", ("factor",), _mish, _MISH, _mish_program),
    Activation("sigmoid", ("steepness", "height", "low"), _logistic, _solve_sigmoid, _logistic_program),
    Activation("tanh", ("steepness", "height", "low"), _logistic, _solve_logistic, _logistic_program),
    _known_only("relu_squared", lambda y: np.maximum(y, 0.0) ** 2),
    _known_only("relu6", lambda y: np.clip(y, 0.0, 6.0)),
    _known_only("hard_swish", lambda y: y * np.clip(y / 6.0 + 0.5, 0.0, 1.0)),
    _known_only("hard_sigmoid", lambda y: np.clip(y / 6.0 + 0.5, 0.0, 1.0)),
    _known_only("elu", _elu),
    _known_only("selu", _selu),
    _known_only("softplus", elementwise.softplus),
    _known_only("softsign", lambda y: y / (1.0 + np.abs(y))),
    _known_only("exp", np.exp),
    _known_only("square", lambda y: y * y),
)


def _at(f: Function, point: float) -> float:
    return float(f(np.array([point]))[0])
