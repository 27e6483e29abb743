"""The fitted head programs, read from `programs.json` beside this file.

`python -m benchmarks.fit` writes the entries; the slow tests prove every stated error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from passes.programs.head import BiasToken, Head
from passes.programs.line import Line
from passes.programs.powers import Powers
from passes.programs.program import Program

Entry = dict[str, object]


@cache
def fitted_programs() -> tuple[tuple[str, Program], ...]:
    """The fitted programs that hold for all reals, as (activation, program), in the order of the table.

    Programs made for gates are in `gate_programs`.
    """
    return tuple(row for row in _table(gate=False) if math.isinf(row[1].domain))


@cache
def bounded_programs() -> tuple[tuple[str, Program], ...]:
    """The fitted programs that hold on a domain, as (activation, program)."""
    return tuple(row for row in _table(gate=False) if math.isfinite(row[1].domain))


@cache
def precise_programs() -> tuple[tuple[str, Program], ...]:
    """One-head programs for float64, as (activation, program), with errors below float64's rounding."""
    return tuple((entry["activation"], _program(entry)) for entry in _file()["precise"])


@cache
def gate_programs() -> tuple[tuple[str, Program], ...]:
    """One-head programs with few nonzero values: in a gate each nonzero value costs a head, and self costs two."""
    return _table(gate=True)


def cheapest(activation: str, tolerance: float) -> Program:
    """The program of `activation` with the fewest keys whose `max_error` is at most `tolerance`.

    Ties go to the smallest float32 rounding; if no program reaches the tolerance, the closest one is returned.
    `tolerance` is absolute, in units of the activation's output.
    """
    known = [program for name, program in (*fitted_programs(), *precise_programs()) if name == activation]
    return _first(known, tolerance, lambda program: (program.bias_tokens, program.rounding))


def cheapest_gate(activation: str, tolerance: float) -> Program:
    """The program of `activation` that gives the cheapest gate with `max_error` at most `tolerance`.

    It has the fewest nonzero values, then the fewest keys; if none reaches the tolerance, the closest is returned.
    """
    table = (*gate_programs(), *fitted_programs(), *precise_programs())
    known = [program for name, program in table if name == activation and len(program.heads) == 1]
    return _first(known, tolerance, lambda program: (values(program), program.bias_tokens, program.max_error))


def _first(known: Sequence[Program], tolerance: float, cost: Callable[[Program], tuple[float, ...]]) -> Program:
    """The program of the lowest cost that reaches the tolerance; the closest where none does."""
    close = [program for program in known if program.max_error <= tolerance]
    return min(close, key=cost) if close else min(known, key=lambda program: program.max_error)


_NEARLY = 1.15
"""Programs in powers of one exponential may have this much more error than asked for: the next closer one costs three
more operations."""


@cache
def power_programs() -> tuple[tuple[str, Program], ...]:
    """The programs whose weights are powers of one exponential, as (activation, program)."""
    return tuple((entry["activation"], _in_powers(entry)) for entry in _file()["powers"])


def in_powers(activation: str, tolerance: float) -> Program | None:
    """The program of `activation` in the fewest powers with `max_error` at most about `tolerance`; None if none is."""
    known = [program for name, program in power_programs() if name == activation]
    close = [program for program in known if program.max_error <= _NEARLY * tolerance]
    return min(close, key=lambda program: len(program.heads), default=None)


@cache
def lines(arithmetic: str) -> tuple[Line, ...]:
    """The lines of one kind (`passes.programs.arithmetic.Arithmetic`), the most precise first."""
    return tuple(_line(entry) for entry in _file()["lines"] if entry["arithmetic"] == arithmetic)


def values(program: Program) -> int:
    """The number of bias tokens with a nonzero value."""
    return sum(token.value != 0.0 for head in program.heads for token in head.bias_tokens)


@cache
def _table(*, gate: bool) -> tuple[tuple[str, Program], ...]:
    rows = [entry for entry in _file()["programs"] if bool(entry.get("gate")) == gate]
    return tuple((entry["activation"], _program(entry)) for entry in rows)


@cache
def _file() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(files("passes.programs").joinpath("programs.json").read_text(encoding="utf-8"))
    return loaded


def _in_powers(entry: dict[str, Any]) -> Program:
    powers = Powers(entry["step"], tuple(entry["parts"]), tuple(entry["shifts"]), entry["pairs"], entry["base"])
    return Program(
        name=entry["name"],
        heads=powers.heads,
        max_error=entry["max_error"],
        rounding=entry["float32_error"],
        powers=powers,
    )


def _line(entry: dict[str, Any]) -> Line:
    pairs = tuple((rate, weight) for rate, weight in entry["pairs"])
    sizes = {key: entry[key] for key in ("name", "step", "end", "middle", "domain", "max_error")}
    return Line(pairs=pairs, **sizes)


def _program(entry: Entry) -> Program:
    rows = entry.get("heads", [entry])
    heads = tuple(_head(row) for row in rows) if isinstance(rows, list) else ()
    if not (
        entry.get("float32") or entry.get("precise")
    ):  # a shift would round coefficients that must stay as they are
        heads = tuple(head.conditioned() for head in heads)
    return Program(
        name=str(entry["name"]),
        heads=heads,
        linear=_number(entry.get("linear", 0.0)),
        constant=_number(entry.get("constant", 0.0)),
        max_error=_number(entry["max_error"]),
        rounding=_number(entry["float32_error"]),
        domain=_number(entry.get("domain", math.inf)),
    )


def _head(row: Entry) -> Head:
    beta, gamma = _numbers(row["self_key"])
    c, d = _numbers(row.get("self_value", [1.0, 0.0]))
    rows = row["bias_tokens"]
    tokens = tuple(BiasToken(*_numbers(token)) for token in rows) if isinstance(rows, list) else ()
    return Head(beta=beta, gamma=gamma, c=c, d=d, bias_tokens=tokens)


def _number(value: object) -> float:
    return float(str(value))


def _numbers(row: object) -> list[float]:
    return [float(number) for number in row] if isinstance(row, list) else []
