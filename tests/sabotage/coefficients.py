"""Heads with one wrong number: in the model that is written, or in the plan that it is made from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from passes.conversion import Conversion
from passes.programs.head import BiasToken, Head
from passes.programs.program import Program
from tests.sabotage.edits import applied
from tests.sabotage.harness import Part, Patch
from tests.sabotage.pieces import Change, constant, scaled, value_scaled
from tests.sabotage.sabotages import Expect, Sabotage
from tests.sabotage.subjects import on, square

_STEPS = ("1e-3", "1e-4", "1e-5", "1e-6")
_SILUS, _RELUS = ("silu-decoder", "conformer-encoder"), ("relu-decoder", "relu")
_GELUS, _GATES = ("gelu-encoder", "gelu-vision"), ("gated-decoder", "swiglu")

LOCAL: tuple[tuple[str, str, int, tuple[str, ...]], ...] = (
    ("silu key", "key", 0, _SILUS),
    ("gelu step", "step", 0, ("wide-gelu", "narrow-gelu")),
    ("gelu part", "parts", 2, _GELUS),
    ("gelu shift", "shifts", 1, _GELUS),
    ("gate line's step", "line_step", 0, _GATES),
    ("gate line's rate", "line_rates", 2, _GATES),
    ("gate line's weight", "line_weights", 0, _GATES),
    ("gate key", "key", 0, _GATES),
    ("elu bias key", "bias_key", 1, ("elu",)),
    ("elu bias weight", "bias_weight", 0, ("elu",)),
    ("clip value", "bias_part", 1, ("relu6",)),
    ("clip offset", "bias_offset", 1, ("relu6",)),
    ("tanh self value", "self_value", 0, ("tanh",)),
    ("tanh constant", "constant", 0, ("tanh",)),
)
"""What is off by a little in form `local`, the constant of the first block, its entry, and where."""

DOUBLE: tuple[tuple[str, str, int], ...] = (
    ("gate value", "parts", 1),
    ("gate weight", "weights", 2),
    ("gate key", "keys", 2),
)
"""The same for gates in float64 (`--option precision=double`)."""

SQUARE: tuple[tuple[str, str, int, tuple[str, ...]], ...] = (
    ("silu key", "W_K", -1, ("silu-decoder", "silu")),
    ("gelu bias key", "W_K", 6, ("gelu-vision", "gelu")),
    ("gelu bias value", "W_V_constants", 6, ("gelu-vision", "gelu")),
)
"""The same for forms with square patterns, where the entry is told by the rank of its value."""

WRONG: tuple[tuple[str, str, Change, tuple[str, ...]], ...] = (
    ("silu key negated", "key", scaled(-1.0), _SILUS),
    ("relu limit negated", "key", scaled(-1.0), _RELUS),
    ("relu limit a millionth as steep", "key", scaled(1e-6), _RELUS),
    ("relu limit as steep as silu", "key", lambda _: 1.0, _RELUS),
    ("gelu step negated", "step", scaled(-1.0), ("wide-gelu", "narrow-gelu")),
    ("gelu parts negated", "parts", scaled(-1.0), _GELUS),
    ("gelu parts rotated", "parts", lambda v: [*v[1:], v[0]], _GELUS),
    ("gelu shifts reversed", "shifts", lambda v: v[::-1], _GELUS),
    ("gate line's step negated", "line_step", scaled(-1.0), _GATES),
    ("gate line's step twice as long", "line_step", scaled(2.0), _GATES),
    ("gate line's weights rotated", "line_weights", lambda v: [*v[1:], v[0]], _GATES),
    ("gate line's rates reversed", "line_rates", lambda v: v[::-1], _GATES),
    ("gate line without an end", "line_weights", scaled(0.0, 0), _GATES),
)
"""What is quite wrong, the constant of the first block, how, and where."""

# -- the plan --------------------------------------------------------------------------------------------------------


def planned(change: Callable[[Program], Program]) -> Patch:
    """Every program of the plan is another one than its certificate is about."""

    def wrapper(right: Part) -> Part:
        def wrong(*arguments: Any, **options: Any) -> Any:
            found = right(*arguments, **options)
            if not isinstance(found, Conversion):
                return found
            # rounded again, so that the heads in the graph are those of the plan
            program = change(found.program).rounded(found.dtype, factored=found.form == "local")
            return replace(found, program=program)

        return wrong

    return {"choose": wrapper}


def each_head(change: Callable[[Head], Head]) -> Callable[[Program], Program]:
    """Every head of a program changed."""
    return lambda program: replace(program, heads=tuple(change(head) for head in program.heads), powers=None)


def _steeper(factor: float) -> Callable[[Program], Program]:
    return each_head(
        lambda head: replace(
            head,
            beta=head.beta * factor,
            bias_tokens=tuple(replace(token, slope=token.slope * factor) for token in head.bias_tokens),
        )
    )


def _one_fewer(head: Head) -> Head:
    return replace(head, bias_tokens=head.bias_tokens[:-1] or (BiasToken(value=1.0),))


def _swapped(head: Head) -> Head:
    tokens = tuple(replace(token, slope=token.value, value=token.slope) for token in head.bias_tokens)
    return replace(head, bias_tokens=tokens)


def _claiming(**claims: float) -> Callable[[Program], Program]:
    """An approximation that is off by some 10 %, with claims that would cover that."""
    return lambda program: replace(_steeper(0.8)(program), **claims)  # type: ignore[arg-type]


def _narrow(program: Program) -> Program:
    return replace(program, domain=1e-3)


_TWO = ("silu-decoder", "gelu-encoder")

PLANNED: tuple[tuple[str, Callable[[Program], Program], tuple[str, ...], tuple[str, ...]], ...] = (
    ("slopes a quarter of what they are", _steeper(0.25), (*_TWO, "gated-decoder"), ()),
    ("slopes times 1 + 1e-5", _steeper(1 + 1e-5), ("silu-decoder", "gelu-vision"), ()),
    ("a bias token missing", each_head(_one_fewer), _GELUS, ()),
    ("key and value of bias tokens swapped", each_head(_swapped), _GELUS, ()),
    ("an approximation with a certificate of 1/2", _claiming(max_error=0.5), _TWO, ("--accuracy",)),
    ("an approximation with a rounding of 1/2", _claiming(rounding=0.5), _TWO, ()),
    ("an approximation with a rounding of 1/2 in float64", _claiming(rounding=0.5, double=True), _TWO, ()),
    ("a certificate up to |y| = 1e-3 only", _narrow, _TWO, ("--option domain",)),
)
"""What is wrong with every program, how, where, and what a message must say."""

COEFFICIENTS = (
    *(
        Sabotage(f"{what} times 1 + {step}", applied(constant(name, scaled(1 + float(step), index))), on(*models))
        for what, name, index, models in LOCAL
        for step in _STEPS
    ),
    *(
        Sabotage(
            f"{what} times 1 + {step}, float64",
            applied(constant(name, scaled(1 + float(step), index))),
            on(*_GATES, precision="double"),
        )
        for what, name, index in DOUBLE
        for step in ("1e-3", "1e-5")
    ),
    *(
        Sabotage(
            f"{what} times 1 + {step}, form {form}",
            applied(constant(name, value_scaled(1 + float(step), rank))),
            square(form, *models),
        )
        for form, step in (("masked", "1e-3"), ("masked", "1e-5"), ("maskless", "1e-4"), ("staged", "1e-3"))
        for what, name, rank, models in SQUARE
    ),
    *(Sabotage(what, applied(constant(name, change)), on(*models)) for what, name, change, models in WRONG),
    *(
        Sabotage(f"{what}, in the plan", planned(change), on(*models), words=words)
        for what, change, models, words in PLANNED
    ),
    *(
        Sabotage(
            f"relu limit times 1 + {step}",
            applied(constant("key", scaled(1 + float(step)))),
            on(*_RELUS),
            Expect.HARMLESS,
            below=1e-6,
        )
        for step in _STEPS
    ),
)
