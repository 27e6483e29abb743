"""Activations that are not in the table, or have no program there: fitted at run time.

The function is evaluated by the region's own nodes. It is fitted once for each domain.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np

from passes.fit.runtime import fit_function
from passes.match.identify import Identified, Unknown
from passes.programs.activations import Activation
from passes.programs.arithmetic import Arithmetic
from passes.programs.gates import gate, needs_line, with_line
from passes.programs.program import Program
from passes.programs.solve import Function, Parameters

UNNAMED = Activation("f", (), lambda y, _: np.full_like(y, np.nan), lambda _: None, None, usual=())
"""Of a function that is known by its values alone, which `function` gives."""
MAX_DEFAULT_ERROR = 1e-5  # over max(1,
_MAX_FLOAT32_ROUNDING = 4.0  # in tolerances; a fit that rounds by more is evaluated in float64
_GATE_TOLERANCE = 8.0  # in tolerances: the bound on a gate's additional error is not sharp
_ADVICE = "keep its product in the graph with --gate product"  # if a fit is not a gate
DOMAIN_MARGIN = 1.5  # The domain of a fit relative to the largest |y| seen


def unnamed(unknown: Unknown) -> Identified | None:
    """An unknown function as an unnamed activation; None if heads cannot be fitted to it."""
    if unknown.function is None:
        return None
    return Identified(_activation(unknown.function), (), 0.0, unknown.gated)


def domain_of(reached: float) -> float:
    """The domain of a fit for |y| up to `reached`: at least `DOMAIN_MARGIN` times as far, as 2^n or 1.5 2^n."""
    # Rounded, so that blocks with similar reaches share one fit.
    wanted = max(DOMAIN_MARGIN * reached, 1.0)
    power = 2.0 ** math.floor(math.log2(wanted))
    return next(size for size in (power, 1.5 * power, 2.0 * power) if size >= wanted)


@cache
def fitted(
    activation: Activation,
    parameters: Parameters,
    domain: float,
    arithmetic: Arithmetic,
    *,
    gated: bool,
    strict: bool,
    quick: bool = False,
) -> Program | str:
    """The program of an activation on |y| <= `domain`, or why there is none.

    It uses float64 where float32's rounding would exceed the arithmetic's tolerance by far. `strict` requires that
    tolerance; otherwise `MAX_DEFAULT_ERROR` is enough where it cannot be reached. `quick` is as in `decide`.
    """
    name = f"{activation.name}_fitted"
    allowed = arithmetic.tolerance if strict else max(arithmetic.tolerance, MAX_DEFAULT_ERROR)
    program = fit_function(lambda y: activation.function(y, parameters), domain, arithmetic.tolerance, name, allowed)
    if isinstance(program, str):
        return program
    if program.rounding > _MAX_FLOAT32_ROUNDING * arithmetic.tolerance:
        program = replace(program, double=True)
    if program.max_error > allowed:
        return (
            f"the closest fit on |y| <= {domain:g} has error {program.max_error:.2g}; accept it with "
            f"--accuracy {_rounded_up(program.max_error)}, or give a smaller --option domain=R"
        )
    if not gated:
        return program
    lined = quick and needs_line(program)
    if not lined and len(program.heads) != 1:
        return f"its fit has several heads, which cannot become a gate; {_ADVICE}"
    made = with_line(program, arithmetic) if lined else gate(program, arithmetic)
    if made.max_error > max(allowed, _GATE_TOLERANCE * arithmetic.tolerance):
        return f"as a gate, its closest fit on |y| <= {domain:g} is off by {made.max_error:.2g}; {_ADVICE}"
    return made


def _rounded_up(error: float) -> str:
    power = 10.0 ** math.floor(math.log10(error))
    return f"{math.ceil(error / power) * power:.0e}"


@cache
def _activation(function: Function) -> Activation:
    return replace(UNNAMED, function=lambda y, _: function(y))
