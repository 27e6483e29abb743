"""The table of activations: how each is recognised from its values, and its head program.

Parameters (SiLU's beta, a leaky slope, an outer factor) are solved for, then checked on the whole grid
(`passes.match.identify`). Programs are in closed form (`passes.programs.closed_forms`) or fitted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import NormalDist
from typing import Any

import numpy as np

from passes.programs import closed_forms
from passes.programs.closed_forms import gate, line, needs_line, with_line
from passes.programs.program import (
    Arithmetic,
    Array,
    Function,
    Parameters,
    Program,
    cheapest,
    cheapest_gate,
    in_powers,
)
from rewriter.evaluate.arithmetic import each, sigmoid, softplus

Values = Callable[[Array, Parameters], Array]
Make = Callable[[Parameters, Arithmetic], Program]
Solve = Callable[[Function], Parameters | None]


@dataclass(frozen=True)
class Activation:
    """One entry of the table."""

    name: str
    parameters: tuple[str, ...]
    function: Values
    solve: Solve  # parameters from the values of an unknown function; None if it is another activation
    program: Make | None  # None where it is unknown
    usual: Parameters = (1.0,)  # the parameters of the plain activation, which reports omit
    gate: Make | None = None  # the program of h(g) u; None where `passes.programs.closed_forms.gate` derives it
    quick: Make | None = None  # the program with the fewest operations in form `local`, if another one

    def label(self, parameters: Parameters) -> str:
        rounded = tuple(round(value, 4) for value in parameters)
        if self.name == "silu" and rounded == (1.702, 1.0):
            return "quick_gelu"
        stated = ", ".join(f"{name}={value:.6g}" for name, value in zip(self.parameters, parameters, strict=True))
        return self.name if rounded == self.usual else f"{self.name}({stated})"

    def program_for(
        self, parameters: Parameters, arithmetic: Arithmetic, *, gated: bool = False, quick: bool = False
    ) -> Program | None:
        """The program of h(y), or of h(g) u, with the fewest heads (if `quick` operations); None if unknown."""
        make = (quick and self.quick) or self.program
        program = None if make is None else make(parameters, arithmetic)
        if program is not None and quick and gated and needs_line(program):
            return with_line(program, arithmetic)
        if gated and self.gate is not None:
            return self.gate(parameters, arithmetic)
        if program is None or not gated:
            return program
        program = self.program(parameters, arithmetic) if quick and self.program is not None else program
        return gate(program, arithmetic) if len(program.heads) == 1 else None


def _gelu_of(p: Parameters, arithmetic: Arithmetic) -> tuple[str, float, dict[str, float]]:
    """GELU's name in the table of programs, the tolerance there, and how its program is scaled."""
    name, (inner, factor) = ("gelu", p) if len(p) == 2 else ("gelu_tanh", (1.0, *p))
    return name, arithmetic.tolerance * abs(inner / factor), {"inner": inner, "outer": factor / inner}


def _gelu_program(p: Parameters, arithmetic: Arithmetic) -> Program:
    """A scaled SiLU where that is close enough, which only --accuracy asks for; else the one with the fewest keys."""
    name, tolerance, scale = _gelu_of(p, arithmetic)
    coarse = closed_forms.scaled_silu(name)
    return (coarse if coarse.max_error <= tolerance else cheapest(name, tolerance)).scaled(**scale)


def _quick_gelu(p: Parameters, arithmetic: Arithmetic) -> Program:
    name, tolerance, scale = _gelu_of(p, arithmetic)
    coarse, program = _gelu_program(p, arithmetic), in_powers(name, tolerance)
    return coarse if program is None or coarse.bias_tokens == 1 else program.scaled(**scale)


def _gelu_gate(p: Parameters, arithmetic: Arithmetic) -> Program:
    name, tolerance, scale = _gelu_of(p, arithmetic)
    # A gate may have a tenth more error if that saves a head.
    return gate(cheapest_gate(name, 1.1 * tolerance).scaled(**scale), arithmetic)


def _squared(derive: Callable[[Program, Arithmetic], Program]) -> Make:
    """ReLU squared, as a gate of ReLU whose value is y."""
    return lambda p, a: replace(derive(closed_forms.two_slopes((p[0], 0.0), a), a), name="relu_squared")


def _quick_hard_swish(p: Parameters, arithmetic: Arithmetic) -> Program:
    """Y times a clipped line; y, which has |y| <= 3 or |p y| > 1, multiplies the error over max(1, |h|)."""
    gate = with_line(closed_forms.clip((p[0] / 6.0, p[0] / 2.0, 0.0, p[0]), arithmetic), arithmetic)
    return replace(gate, name="hard_swish", max_error=max(3.0, 1.0 / abs(p[0])) * (1.0 + 1e-6) * gate.max_error)


def _linear(p: Parameters) -> Program:
    return Program("linear", (), linear=p[0])


def _clip(y: Array, p: Parameters) -> Array:
    slope, offset, left, right = p
    return np.clip(slope * y + offset, min(left, right), max(left, right))


def normal_cdf(x: Array) -> Array:
    """The normal distribution function Phi(x); erfc keeps the left tail accurate."""
    return 0.5 * each(math.erfc, -x / math.sqrt(2.0))


def _gelu_tanh(x: Array) -> Array:
    """As x sigmoid(2 z) with z = sqrt(2/pi) (x + 0.044715 x^3)."""
    return x * sigmoid(2.0 * math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))


# -- parameters, from a few values of an unknown function -------------------------------------------------------------
#
# A solver returns candidates, which `passes.match.identify` tests on a whole grid. For another activation it returns
# None or raises one of `UNSOLVED`.

UNSOLVED = (ArithmeticError, ValueError, StopIteration)  # quotients and logarithms without a value; no bend
FAR = 1e4  # where sigmoid-shaped functions have reached their limits


def _at(f: Function, point: float) -> float:
    """The value of `f` at one point."""
    return float(f(np.array([point]))[0])


def _logit(p: float) -> float:
    """The inverse of sigmoid."""
    return math.log(p / (1.0 - p))


def _bend(share: Callable[[float], float]) -> tuple[float, float]:
    """A y > 0 at which the sigmoid is numerically away from both asymptotes, and its value. Raises StopIteration."""
    places = [1.0, *(2.0 ** (sign * power) for power in range(1, 21) for sign in (-1, 1))]
    shares = ((place, share(place)) for place in places)
    return next((place, found) for place, found in shares if 0.02 < found < 0.98)


def _solve_self_gated(quantile: Callable[[float], float]) -> Solve:
    """(k, a) of a y S(k y), S a distribution function symmetric about 0: f(y) - f(-y) = a y, f(y) = a y S(k y)."""

    def solve(f: Function) -> Parameters | None:
        height = _at(f, 1.0) - _at(f, -1.0)
        place, found = _bend(lambda y: _at(f, y) / (height * y))
        return None if found == 0.5 else (quantile(found) / place, height)  # a straight line has S(k y) = 1/2, k = 0

    return solve


def _solve_two_slopes(f: Function) -> Parameters | None:
    """(right, left) of a kink at 0."""
    right, left = _at(f, 1.0), -_at(f, -1.0)
    return (right, left) if math.isfinite(right) and math.isfinite(left) and right != left else None


def _solve_logistic(f: Function) -> Parameters | None:
    """(k, height, low) of low + height sigmoid(k y)."""
    low, high = _at(f, -FAR), _at(f, FAR)
    place, found = _bend(lambda y: (_at(f, y) - low) / (high - low))
    return _logit(found) / place, high - low, low


_PROBES = np.concatenate([-np.logspace(2, -4, 400), [0.0], np.logspace(-4, 2, 400)])


def _solve_clip(f: Function) -> Parameters | None:
    """(slope, offset, left, right) of slope y + offset, clipped to the values left and right (may be infinite)."""
    ends = [_at(f, side * FAR) if _at(f, side * FAR) == _at(f, 2 * side * FAR) else math.inf for side in (-1.0, 1.0)]
    if not all(np.isnan(end) == 0 for end in ends) or ends == [math.inf, math.inf]:
        return None
    values = f(_PROBES)
    inner = np.flatnonzero((values != ends[0]) & (values != ends[1]) & np.isfinite(values))
    if inner.size < 2:
        return None
    first, last = int(inner[0]), int(inner[-1])
    slope = float((values[last] - values[first]) / (_PROBES[last] - _PROBES[first]))
    if slope == 0.0 or not math.isfinite(slope):
        return None
    nearest = int(inner[np.argmin(np.abs(_PROBES[inner]))])
    offset = float(values[nearest] - slope * _PROBES[nearest])
    left = -math.copysign(math.inf, slope) if math.isinf(ends[0]) else ends[0]
    right = math.copysign(math.inf, slope) if math.isinf(ends[1]) else ends[1]
    return slope, offset, left, right


def _solve_exponential_linear(f: Function) -> Parameters | None:
    """(right, depth, rate) of right y above 0 and depth (e^(rate y) - 1) below."""
    right, depth = _at(f, 1.0), -_at(f, -FAR)
    place, found = _bend(lambda y: 1.0 + _at(f, -y) / depth)
    return (right, depth, -math.log(found) / place) if math.isfinite(right) else None


def _solve_exponential(f: Function) -> Parameters | None:
    """(rate, factor) of factor e^(rate y)."""
    start, rate = _at(f, 0.0), math.log(_at(f, 1.0) / _at(f, 0.0))
    return (rate, start) if rate != 0.0 and math.isfinite(rate) else None


def _solve_softplus(f: Function) -> Parameters | None:
    """(inner, factor) of factor ln(1 + e^(inner y))."""
    scale, slopes = _at(f, 0.0) / math.log(2.0), (_at(f, FAR) / FAR, _at(f, -FAR) / -FAR)
    slope = max(slopes, key=abs)
    return (slope / scale, scale) if scale != 0.0 and slope != 0.0 and math.isfinite(slope) else None


def _solve_softsign(f: Function) -> Parameters | None:
    """(inner, factor) of factor inner y / (1 + |inner y|)."""
    one, three = _at(f, 1.0), _at(f, 3.0)
    if one == 0.0 or not 1.0 < three / one < 3.0:
        return None
    inner = (3.0 - three / one) / (3.0 * three / one - 3.0)
    return inner, one * (1.0 + inner) / inner


def _solve_clipped(solve: Solve, function: Callable[[Array, Parameters], Array]) -> Solve:
    """(parameters..., low, high) of h(clip(y, low, high)); `solve` reads h at -1 and 1, which must not be clipped."""

    def cut_off(f: Function) -> Parameters | None:
        inside = solve(f)
        if inside is None or inside[0] <= 0.0:
            return None
        ends = [_last_agreement(f, lambda y: function(y, inside), side) for side in (-1.0, 1.0)]
        return None if ends == [-math.inf, math.inf] else (*inside, *ends)

    return cut_off


def _last_agreement(f: Function, h: Function, side: float) -> float:
    """The point on one side up to which f equals h and beyond which f is constant; infinite if they always agree."""
    y = side * np.logspace(0, 4, 400)
    apart = np.flatnonzero(np.abs(f(y) - h(y)) > 1e-6 * np.maximum(1.0, np.abs(h(y))))
    if apart.size == 0:
        return side * math.inf
    end = _at(f, side * FAR)
    outer, inner = float(y[apart[0]]), float(y[max(int(apart[0]) - 1, 0)])
    start = _at(h, inner) - end
    while (middle := 0.5 * (inner + outer)) not in (inner, outer):
        inside = (_at(h, middle) - end) * start > 0.0
        inner, outer = (middle, outer) if inside else (inner, middle)
    return middle


# -- the table ----------------------------------------------------------------------------------------------------

_UNIT, _ONES = (1.0, 1.0), (1.0, 1.0, 1.0)
_LEAKY_RELU = Activation(
    "leaky_relu", ("right", "left"), lambda y, p: np.where(y >= 0, p[0], p[1]) * y, _solve_two_slopes,
    closed_forms.two_slopes,
)  # fmt: skip
_SILU = Activation(
    "silu", ("beta", "factor"), lambda y, p: p[1] * y * sigmoid(p[0] * y), _solve_self_gated(_logit),
    closed_forms.silu, _UNIT,
)  # fmt: skip
_GELU = Activation(
    "gelu", ("inner", "factor"), lambda y, p: p[1] * y * normal_cdf(p[0] * y), _solve_self_gated(NormalDist().inv_cdf),
    _gelu_program, _UNIT, _gelu_gate, _quick_gelu,
)  # fmt: skip
_TANH = Activation(
    "tanh", ("steepness", "height", "low"), lambda y, p: p[2] + p[1] * sigmoid(p[0] * y), _solve_logistic,
    closed_forms.logistic, (2.0, 2.0, -1.0),
)  # fmt: skip
_CLIP = Activation("clip", ("slope", "offset", "left", "right"), _clip, _solve_clip, closed_forms.clip)
_CELU = Activation(
    "celu", ("right", "depth", "rate"),
    lambda y, p: np.where(y > 0, p[0] * y, p[1] * np.expm1(p[2] * np.minimum(y, 0.0))), _solve_exponential_linear,
    closed_forms.exponential_linear, _ONES, closed_forms.exponential_linear_gate,
)  # fmt: skip


def _factored(name: str, function: Function, program: Make | None, place: float = 1.0, **further: Any) -> Activation:
    """An activation whose only parameter, a factor, is read at one place."""
    return Activation(
        name, ("factor",), lambda y, p: p[0] * function(y), lambda f: (_at(f, place) / _at(function, place),),
        program, **further,
    )  # fmt: skip


def _within(whole: Activation, name: str, usual: Parameters, *wanted: float | None, off: float = 1e-3) -> Activation:
    """The part of an activation whose parameters are these numbers, or about (the grid decides); None is any."""

    def found(f: Function) -> Parameters | None:
        p = whole.solve(f)
        near = partial(math.isclose, rel_tol=off, abs_tol=off)
        fits = p is not None and all(each is None or near(one, each) for one, each in zip(p, wanted, strict=True))
        return p if fits else None

    return replace(whole, name=name, solve=found, usual=usual)


def _clipped(whole: Activation, make: Make) -> Activation:
    return Activation(
        f"{whole.name}_clipped",
        (*whole.parameters, "low", "high"),
        lambda y, p: whole.function(np.clip(y, p[-2], p[-1]), p[:-2]),
        _solve_clipped(whole.solve, whole.function),
        lambda p, a: closed_forms.clipped(make(p[:-2], a), p[-2], p[-1], a),
    )


ACTIVATIONS: tuple[Activation, ...] = (
    _within(_LEAKY_RELU, "relu", (1.0, 0.0), None, 0.0, off=0.0),
    _LEAKY_RELU,
    _SILU,
    _GELU,
    _factored("gelu_tanh", _gelu_tanh, _gelu_program, gate=_gelu_gate, quick=_quick_gelu),
    _factored("mish", lambda y: y * np.tanh(softplus(y)), closed_forms.mish),
    _within(_TANH, "sigmoid", (1.0, 1.0, 0.0), None, None, 0.0, off=0.0),
    _TANH,
    _factored("relu_squared", lambda y: np.maximum(y, 0.0) ** 2, _squared(gate), quick=_squared(with_line)),
    _within(_CLIP, "relu6", (1.0, 0.0, 0.0, 6.0), 1.0, 0.0, 0.0, 6.0),
    _within(_CLIP, "hard_sigmoid", (0.1667, 0.5, 0.0, 1.0), None, 0.5, 0.0, 1.0),
    _CLIP,
    _factored(
        "hard_swish", lambda y: y * np.clip(y / 6.0 + 0.5, 0.0, 1.0), closed_forms.hard_swish, 4.0,
        quick=_quick_hard_swish,
    ),
    _within(_CELU, "elu", _ONES, 1.0, None, 1.0),
    _within(_CELU, "selu", (1.0507, 1.7581, 1.0), 1.0507, 1.7581, 1.0),
    _CELU,
    _clipped(_SILU, closed_forms.silu),
    _clipped(_GELU, _gelu_program),
    Activation(
        "softplus", ("inner", "factor"), lambda y, p: p[1] * softplus(p[0] * y), _solve_softplus,
        lambda p, a: cheapest("softplus", a.tolerance / abs(p[1])).scaled(inner=p[0], outer=p[1]), _UNIT,
    ),
    Activation(
        "softsign", ("inner", "factor"), lambda y, p: p[1] * p[0] * y / (1.0 + np.abs(p[0] * y)), _solve_softsign,
        None, _UNIT,
    ),
    Activation(
        "exp", ("rate", "factor"), lambda y, p: p[1] * np.exp(p[0] * y), _solve_exponential, closed_forms.exponential,
        _UNIT,
    ),
    _factored(
        "square", lambda y: y * y, lambda p, a: line(p[0], a, "square"),
        quick=lambda p, a: replace(with_line(_linear(p), a), name="square"),
    ),
)  # fmt: skip

LINEAR = _factored(
    "linear", lambda y: y, None, gate=lambda p, a: line(p[0], a, "bilinear"), quick=lambda p, _: _linear(p)
)
"""The gate of a bilinear layer, g u. It is not in the table, since alone it is not an activation."""
