"""The fitted head programs, read from `programs.json` beside this file.

`python -m benchmarks.fit` writes the entries; the slow tests prove every stated error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from passes.programs.program import BiasToken, Head, Line, Powers, Program


@cache
def fitted_programs(kind: str = "plain") -> tuple[tuple[str, Program], ...]:
    """The fitted programs of one kind, as (activation, program), in the order of the table.

    `plain` hold for all reals; `gate`: one head with few nonzero values (each costs a head, self two); `precise`: one
    head below float64's rounding; `powers`: weights are powers of one exponential.
    """
    rows = _file()[kind if kind in ("precise", "powers") else "programs"]
    chosen = (entry for entry in rows if bool(entry.get("gate")) is (kind == "gate"))
    return tuple((entry["activation"], _program(entry)) for entry in chosen if "domain" not in entry)


def cheapest(activation: str, tolerance: float) -> Program:
    """The program with the fewest keys (then the smallest rounding) of absolute error `tolerance`, else the closest."""
    known = [program for name, program in (*fitted_programs(), *fitted_programs("precise")) if name == activation]
    return _first(known, tolerance, lambda program: (program.bias_tokens, program.rounding))


def cheapest_gate(activation: str, tolerance: float) -> Program:
    """The program with the fewest nonzero values, then keys, of error `tolerance`, else the closest one."""
    table = (*fitted_programs("gate"), *fitted_programs(), *fitted_programs("precise"))
    known = [program for name, program in table if name == activation and len(program.heads) == 1]
    values = {each: sum(token.value != 0.0 for head in each.heads for token in head.bias_tokens) for each in known}
    return _first(known, tolerance, lambda each: (values[each], each.bias_tokens, each.max_error))


def _first(known: Sequence[Program], tolerance: float, cost: Callable[[Program], tuple[float, ...]]) -> Program:
    close = [program for program in known if program.max_error <= tolerance]
    return min(close, key=cost) if close else min(known, key=lambda program: program.max_error)


def in_powers(activation: str, tolerance: float) -> Program | None:
    """The program of `activation` in the fewest powers with `max_error` at most about `tolerance`; None if none is."""
    known = [program for name, program in fitted_programs("powers") if name == activation]
    close = [each for each in known if each.max_error <= 1.15 * tolerance]  # a closer one has three more operations
    return min(close, key=lambda program: len(program.heads), default=None)


@cache
def lines(arithmetic: str) -> tuple[Line, ...]:
    """The lines of one kind (`passes.programs.program.Arithmetic`), the most precise first."""
    entries = ({**entry, "pairs": tuple(map(tuple, entry["pairs"]))} for entry in _file()["lines"])
    return tuple(Line(**entry) for entry in entries if entry.pop("arithmetic") == arithmetic)


@cache
def _file() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(files("passes.programs").joinpath("programs.json").read_text(encoding="utf-8"))
    return loaded


def _program(entry: dict[str, Any]) -> Program:
    stated = {"name": entry["name"], "max_error": entry["max_error"], "rounding": entry["float32_error"]}
    if "parts" in entry:
        powers = Powers(entry["step"], tuple(entry["parts"]), tuple(entry["shifts"]), entry["pairs"], entry["base"])
        return Program(heads=powers.heads, powers=powers, **stated)
    heads = tuple(map(_head, entry.get("heads", [entry])))
    # A shift would round coefficients that must stay as they are.
    stays = entry.get("float32") or entry.get("precise")
    return Program(
        heads=heads if stays else tuple(head.conditioned() for head in heads),
        linear=entry.get("linear", 0.0),
        constant=entry.get("constant", 0.0),
        **stated,
    )


def _head(row: dict[str, Any]) -> Head:
    beta, gamma = row["self_key"]
    c, d = row.get("self_value", [1.0, 0.0])
    tokens = tuple(BiasToken(*map(float, token)) for token in row["bias_tokens"])
    return Head(beta=float(beta), gamma=float(gamma), c=float(c), d=float(d), bias_tokens=tokens)
