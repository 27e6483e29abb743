"""The fitted head programs, read from `programs.json` beside this file.

Comes in: an activation's name and the error that is small enough. Goes out: the cheapest `Program` that reaches it.
The coefficients were fitted in float64; `tests/passes/test_programs.py` checks every stated error.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files

from passes.programs import BiasToken, Head, Program


@cache
def fitted_programs() -> tuple[tuple[str, Program], ...]:
    """All fitted programs as (activation, program), in the order of the table."""
    table = json.loads(files("passes").joinpath("programs.json").read_text(encoding="utf-8"))
    return tuple((entry["activation"], _program(entry)) for entry in table["programs"])


def cheapest(activation: str, tolerance: float) -> Program:
    """The program of `activation` with the fewest keys whose `max_error` is at most `tolerance`.

    Where none is that close, the closest one. `tolerance` is absolute, in units of the activation's output.
    """
    known = [program for name, program in fitted_programs() if name == activation]
    close = [program for program in known if program.max_error <= tolerance]
    if close:
        return min(close, key=lambda program: program.bias_tokens)
    return min(known, key=lambda program: program.max_error)


def _program(entry: dict[str, object]) -> Program:
    beta, gamma = _numbers(entry["self_key"])
    rows = entry["bias_tokens"]
    tokens = tuple(BiasToken(*_numbers(row)) for row in rows) if isinstance(rows, list) else ()
    max_error = float(str(entry["max_error"]))
    return Program(
        name=str(entry["name"]),
        heads=(Head(beta=beta, gamma=gamma, bias_tokens=tokens).conditioned(),),
        max_error=max_error,
        rounding=float(str(entry["float32_error"])),
    )


def _numbers(row: object) -> list[float]:
    return [float(number) for number in row] if isinstance(row, list) else []
