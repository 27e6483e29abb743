"""Activations as certificates need them: values, two derivatives, a bound on the third, and asymptotes.

A curve is smooth except at its `breaks`, and states how fast it approaches its asymptotes. `CURVES` is keyed by the
names of the table of activations. Values are accurate to a few units in the last place (glibc's erfc and exp, numpy's
exp).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from passes.programs.softmax import Array
from rewriter.graph import elementwise

Jet = tuple[Array, Array, Array]


@dataclass(frozen=True)
class End:
    """An asymptote: the curve is within `excess(Y)` of the line `slope y + constant` wherever |y| >= Y >= 2."""

    slope: float
    constant: float
    excess: Callable[[float], float]


@dataclass(frozen=True)
class Curve:
    """One activation.

    Attributes:
        jet: f, f' and f'' at points.
        third: a bound on |f'''| over cells, given the least and the largest |y| in each cell and the sign of y.
        left: the asymptote as y falls; None where there is none, or it is approached too slowly.
        right: the asymptote as y grows.
        breaks: points at which a derivative up to the third jumps; cells end there.
    """

    jet: Callable[[Array], Jet]
    third: Callable[[Array, Array, Array], Array]
    left: End | None
    right: End | None
    breaks: tuple[float, ...] = (0.0,)


_PHI = 1.0 / math.sqrt(2.0 * math.pi)
_ZERO = End(0.0, 0.0, lambda _: 0.0)


def _gelu(y: Array) -> Jet:
    density = _PHI * np.exp(-0.5 * y * y)
    share = elementwise.normal_cdf(y)
    return y * share, share + y * density, (2.0 - y * y) * density


def _gelu_third(near: Array, far: Array, _: Array) -> Array:
    return (far**3 + 4.0 * far) * _PHI * np.exp(-0.5 * near * near)  # |y^3 - 4 y| phi(y)


def _density(y: float) -> float:
    return _PHI * math.exp(-0.5 * y * y)  # y (1 - Phi(y)) <= phi(y)


_CUBE, _TANH_SCALE = 0.044715, 2.0 * math.sqrt(2.0 / math.pi)


def _gelu_tanh(y: Array) -> Jet:
    u1, u2 = _TANH_SCALE * (1.0 + 3.0 * _CUBE * y * y), _TANH_SCALE * 6.0 * _CUBE * y
    s, s1, s2 = _sigmoid(_TANH_SCALE * (y + _CUBE * y**3))
    return y * s, s + y * s1 * u1, 2.0 * s1 * u1 + y * (s2 * u1 * u1 + s1 * u2)


def _gelu_tanh_third(near: Array, far: Array, _: Array) -> Array:
    u1, u2, u3 = _TANH_SCALE * (1.0 + 3.0 * _CUBE * far**2), _TANH_SCALE * 6.0 * _CUBE * far, _TANH_SCALE * 6.0 * _CUBE
    s1 = np.minimum(0.25, np.exp(-_TANH_SCALE * (near + _CUBE * near**3)))  # bounds |s''| and |s'''| as well
    return 3.0 * s1 * (u1**2 + u2) + far * s1 * (u1**3 + 3.0 * u1 * u2 + u3)


def _gelu_tanh_excess(y: float) -> float:
    return y * math.exp(-_TANH_SCALE * (y + _CUBE * y**3))


def _sigmoid(y: Array) -> Jet:
    s, other = elementwise.sigmoid(y), elementwise.sigmoid(-y)
    return s, s * other, s * other * (other - s)


def _sigmoid_third(near: Array, far: Array, _: Array) -> Array:
    return np.minimum(0.125, np.exp(-near)) + 0.0 * far  # |s'''| = s' |1 - 6 s'|, at most 1/8


def _silu(y: Array) -> Jet:
    s, s1, s2 = _sigmoid(y)
    return y * s, s + y * s1, 2.0 * s1 + y * s2


def _silu_third(near: Array, far: Array, _: Array) -> Array:
    s1 = np.minimum(0.25, np.exp(-near))
    return 3.0 * s1 + far * s1


def _softplus(y: Array) -> Jet:
    s, s1, _ = _sigmoid(y)
    return elementwise.softplus(y), s, s1


def _softplus_third(near: Array, far: Array, _: Array) -> Array:
    return np.minimum(0.1, np.exp(-near)) + 0.0 * far  # |s''| is at most 1 / (6 sqrt 3)


def _softsign(y: Array) -> Jet:
    t = 1.0 + np.abs(y)
    return y / t, 1.0 / t**2, -2.0 * np.sign(y) / t**3


def _softsign_third(near: Array, far: Array, _: Array) -> Array:
    return 6.0 / (1.0 + near) ** 4 + 0.0 * far


def _elu(y: Array) -> Jet:
    left = np.exp(np.minimum(y, 0.0))
    right = y > 0.0
    return np.where(right, y, np.expm1(np.minimum(y, 0.0))), np.where(right, 1.0, left), np.where(right, 0.0, left)


def _elu_third(near: Array, far: Array, sign: Array) -> Array:
    return np.where(sign > 0.0, 0.0, np.exp(-near)) + 0.0 * far


def _square(y: Array) -> Jet:
    above = np.maximum(y, 0.0)
    return above**2, 2.0 * above, np.where(y > 0.0, 2.0, 0.0)


def _hard_swish(y: Array) -> Jet:
    inside = np.abs(y) < 3.0
    slope = np.where(inside, y / 3.0 + 0.5, np.where(y > 0.0, 1.0, 0.0))
    return y * np.clip(y / 6.0 + 0.5, 0.0, 1.0), slope, np.where(inside, 1.0 / 3.0, 0.0)


def _no_third(near: Array, _far: Array, _sign: Array) -> Array:
    return np.zeros_like(near)


def _fall(y: float) -> float:
    return math.exp(-y)


def _slow(y: float) -> float:
    return 1.0 / (1.0 + y)


_LINE = End(1.0, 0.0, lambda _: 0.0)
CURVES: dict[str, Curve] = {
    "gelu": Curve(_gelu, _gelu_third, End(0.0, 0.0, _density), End(1.0, 0.0, _density)),
    "gelu_tanh": Curve(
        _gelu_tanh, _gelu_tanh_third, End(0.0, 0.0, _gelu_tanh_excess), End(1.0, 0.0, _gelu_tanh_excess)
    ),
    "silu": Curve(
        _silu, _silu_third, End(0.0, 0.0, lambda y: y * math.exp(-y)), End(1.0, 0.0, lambda y: y * math.exp(-y))
    ),
    "sigmoid": Curve(_sigmoid, _sigmoid_third, End(0.0, 0.0, _fall), End(0.0, 1.0, _fall)),
    "softplus": Curve(_softplus, _softplus_third, End(0.0, 0.0, _fall), End(1.0, 0.0, _fall)),
    "softsign": Curve(_softsign, _softsign_third, End(0.0, -1.0, _slow), End(0.0, 1.0, _slow)),
    "elu": Curve(_elu, _elu_third, End(0.0, -1.0, _fall), _LINE),
    "relu_squared": Curve(_square, _no_third, _ZERO, None),
    "hard_swish": Curve(
        _hard_swish,
        _no_third,
        End(0.0, 0.0, lambda y: 0.0 if y >= 3.0 else 1.0),
        End(1.0, 0.0, lambda y: 0.0 if y >= 3.0 else 1.0),
        (-3.0, 0.0, 3.0),
    ),
}
