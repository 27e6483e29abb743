"""The table of activations: how each is recognised from its values, and its head program.

Matching is semantic: however a graph spells GELU, its values are GELU's. Parameters (SiLU's beta, a leaky slope, an
outer factor) are solved for (`passes.programs.solve`), then checked on the whole grid (`passes.match.identify`).
Programs are in closed form (`passes.programs.closed_forms`), fitted (`passes.programs.fitted`), or gates
(`passes.programs.gates`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import NormalDist

import numpy as np

from passes.programs import closed_forms, solve
from passes.programs.arithmetic import Arithmetic
from passes.programs.fitted import cheapest, cheapest_gate, in_powers
from passes.programs.gates import gate, line, needs_line, with_line
from passes.programs.head import Array
from passes.programs.program import Program
from passes.programs.solve import Function, Parameters, Solve
from rewriter.evaluate.arithmetic import sigmoid, softplus
from rewriter.graph.elementwise import gelu_tanh, normal_cdf

Values = Callable[[Array, Parameters], Array]
Make = Callable[[Parameters, Arithmetic], Program]


@dataclass(frozen=True)
class Activation:
    """One entry of the table."""

    name: str
    parameters: tuple[str, ...]
    function: Values
    solve: Solve  # parameters from the values of an unknown function; None if it is another activation
    program: Make | None  # None where it is unknown
    usual: Parameters = (1.0,)  # the parameters of the plain activation, which reports omit
    gate: Make | None = None  # the program of h(g) u; None where `passes.programs.gates.gate` derives it
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


def _silu(y: Array, p: Parameters) -> Array:
    return p[1] * y * sigmoid(p[0] * y)


def _gelu(y: Array, p: Parameters) -> Array:
    return p[1] * y * normal_cdf(p[0] * y)


def _mish(y: Array, p: Parameters) -> Array:
    return p[0] * y * np.tanh(softplus(y))


def _two_slopes(y: Array, p: Parameters) -> Array:
    return np.where(y >= 0, p[0], p[1]) * y


def _logistic(y: Array, p: Parameters) -> Array:
    return p[2] + p[1] * sigmoid(p[0] * y)


def _clip(y: Array, p: Parameters) -> Array:
    slope, offset, left, right = p
    return np.clip(slope * y + offset, min(left, right), max(left, right))


def _bent(y: Array, p: Parameters) -> Array:
    return np.where(y > 0, p[0] * y, p[1] * np.expm1(p[2] * np.minimum(y, 0.0)))


def _softplus(y: Array, p: Parameters) -> Array:
    return p[1] * softplus(p[0] * y)


def _exp(y: Array, p: Parameters) -> Array:
    return p[1] * np.exp(p[0] * y)


def _softsign(y: Array, p: Parameters) -> Array:
    return p[1] * p[0] * y / (1.0 + np.abs(p[0] * y))


def _times(function: Function) -> Values:
    return lambda y, p: p[0] * function(y)


def _inside(function: Values) -> Values:
    return lambda y, p: function(np.clip(y, p[-2], p[-1]), p[:-2])


def _hard_swish(y: Array) -> Array:
    return y * np.clip(y / 6.0 + 0.5, 0.0, 1.0)


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


_GATE_TOLERANCE = 1.1  # a gate may have a tenth more error if that saves a head


def _gelu_gate(p: Parameters, arithmetic: Arithmetic) -> Program:
    name, tolerance, scale = _gelu_of(p, arithmetic)
    return gate(cheapest_gate(name, _GATE_TOLERANCE * tolerance).scaled(**scale), arithmetic)


def _softplus_program(p: Parameters, arithmetic: Arithmetic) -> Program:
    return cheapest("softplus", arithmetic.tolerance / abs(p[1])).scaled(inner=p[0], outer=p[1])


def _relu_squared_program(p: Parameters, arithmetic: Arithmetic) -> Program:
    relu = closed_forms.two_slopes((p[0], 0.0), arithmetic)
    return replace(gate(relu, arithmetic), name="relu_squared")


def _quick_relu_squared(p: Parameters, arithmetic: Arithmetic) -> Program:
    return replace(with_line(closed_forms.two_slopes((p[0], 0.0), arithmetic), arithmetic), name="relu_squared")


def _quick_square(p: Parameters, arithmetic: Arithmetic) -> Program:
    return replace(with_line(_linear(p), arithmetic), name="square")


def _quick_hard_swish(p: Parameters, arithmetic: Arithmetic) -> Program:
    """Y times a clipped line; y, which has |y| <= 3 or |p y| > 1, multiplies the error over max(1, |h|)."""
    gate = with_line(closed_forms.clip((p[0] / 6.0, p[0] / 2.0, 0.0, p[0]), arithmetic), arithmetic)
    return replace(gate, name="hard_swish", max_error=max(3.0, 1.0 / abs(p[0])) * (1.0 + 1e-6) * gate.max_error)


def _linear(p: Parameters) -> Program:
    return Program("linear", (), linear=p[0])


def _within(make: Make) -> Make:
    def clipped(p: Parameters, arithmetic: Arithmetic) -> Program:
        return closed_forms.clipped(make(p[:-2], arithmetic), p[-2], p[-1], arithmetic)

    return clipped


def _only(solve: Solve, allowed: Callable[[Parameters], bool]) -> Solve:
    """`solve`, where `allowed` accepts the parameters, some to a few digits (the grid decides)."""

    def checked(f: Function) -> Parameters | None:
        solved = solve(f)
        return solved if solved is not None and allowed(solved) else None

    return checked


def _near(*wanted: float | None) -> Callable[[Parameters], bool]:
    """Whether parameters are about these numbers; None matches any."""
    tolerance = partial(math.isclose, rel_tol=1e-3, abs_tol=1e-3)
    return lambda p: all(number is None or tolerance(value, number) for value, number in zip(p, wanted, strict=True))


_PROBIT = NormalDist().inv_cdf
_BETA, _INNER, _FACTOR, _ENDS = ("beta", "factor"), ("inner", "factor"), ("factor",), ("low", "high")
_SLOPES, _LINE, _BELOW = ("right", "left"), ("slope", "offset", "left", "right"), ("right", "depth", "rate")
_LOGISTIC = ("steepness", "height", "low")
_UNIT, _ONES = (1.0, 1.0), (1.0, 1.0, 1.0)
_HARD = (0.1667, 0.5, 0.0, 1.0)
_SELU = (1.0507, 1.7581, 1.0)
_BENT, _BENT_GATE = closed_forms.exponential_linear, closed_forms.exponential_linear_gate
_FLAT_BELOW = _only(solve.two_slopes, lambda p: p[1] == 0.0)
_FROM_ZERO = _only(solve.logistic, lambda p: p[2] == 0.0)
_CLIPPED_SILU = solve.clipped(solve.self_gated(solve.logit), _silu)
_CLIPPED_GELU = solve.clipped(solve.self_gated(_PROBIT), _gelu)


def _factored(
    name: str,
    function: Function,
    program: Make | None,
    place: float = 1.0,
    gate: Make | None = None,
    quick: Make | None = None,
) -> Activation:
    """An activation whose only parameter, a factor, is read at one place."""
    return Activation(name, _FACTOR, _times(function), solve.factor(function, place), program, gate=gate, quick=quick)


ACTIVATIONS: tuple[Activation, ...] = (
    Activation("relu", _SLOPES, _two_slopes, _FLAT_BELOW, closed_forms.two_slopes, (1.0, 0.0)),
    Activation("leaky_relu", _SLOPES, _two_slopes, solve.two_slopes, closed_forms.two_slopes),
    Activation("silu", _BETA, _silu, solve.self_gated(solve.logit), closed_forms.silu, _UNIT),
    Activation("gelu", _INNER, _gelu, solve.self_gated(_PROBIT), _gelu_program, _UNIT, _gelu_gate, _quick_gelu),
    _factored("gelu_tanh", gelu_tanh, _gelu_program, gate=_gelu_gate, quick=_quick_gelu),
    Activation("mish", _FACTOR, _mish, solve.factor(lambda y: _mish(y, (1.0,))), closed_forms.mish),
    Activation("sigmoid", _LOGISTIC, _logistic, _FROM_ZERO, closed_forms.logistic, (1.0, 1.0, 0.0)),
    Activation("tanh", _LOGISTIC, _logistic, solve.logistic, closed_forms.logistic, (2.0, 2.0, -1.0)),
    _factored("relu_squared", lambda y: np.maximum(y, 0.0) ** 2, _relu_squared_program, quick=_quick_relu_squared),
    Activation(
        "relu6", _LINE, _clip, _only(solve.clip, _near(1.0, 0.0, 0.0, 6.0)), closed_forms.clip, (1.0, 0.0, 0.0, 6.0)
    ),
    Activation("hard_sigmoid", _LINE, _clip, _only(solve.clip, _near(None, 0.5, 0.0, 1.0)), closed_forms.clip, _HARD),
    Activation("clip", _LINE, _clip, solve.clip, closed_forms.clip),
    _factored("hard_swish", _hard_swish, closed_forms.hard_swish, 4.0, quick=_quick_hard_swish),
    Activation("elu", _BELOW, _bent, _only(solve.exponential_linear, _near(1.0, None, 1.0)), _BENT, _ONES, _BENT_GATE),
    Activation("selu", _BELOW, _bent, _only(solve.exponential_linear, _near(*_SELU)), _BENT, _SELU, _BENT_GATE),
    Activation("celu", _BELOW, _bent, solve.exponential_linear, _BENT, _ONES, _BENT_GATE),
    Activation("silu_clipped", (*_BETA, *_ENDS), _inside(_silu), _CLIPPED_SILU, _within(closed_forms.silu)),
    Activation("gelu_clipped", (*_INNER, *_ENDS), _inside(_gelu), _CLIPPED_GELU, _within(_gelu_program)),
    Activation("softplus", _INNER, _softplus, solve.softplus, _softplus_program, _UNIT),
    Activation("softsign", _INNER, _softsign, solve.softsign, None, _UNIT),
    Activation("exp", ("rate", "factor"), _exp, solve.exponential, closed_forms.exponential, _UNIT),
    _factored("square", lambda y: y * y, lambda p, a: line(p[0], a, "square"), quick=_quick_square),
)

LINEAR = _factored(
    "linear", lambda y: y, None, gate=lambda p, a: line(p[0], a, "bilinear"), quick=lambda p, _: _linear(p)
)
"""The gate of a bilinear layer, g u. It is not in the table, since alone it is not an activation."""
