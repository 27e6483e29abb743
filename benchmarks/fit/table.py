"""Entries of `programs.json`: computed from programs, with errors proved and measured, and written.

Everything that an entry states is measured here, for the coefficients as stored and rounded up: `max_error` in float64
on a dense grid, `float32_error` by `benchmarks.fit.float32`. The slow tests prove `max_error`.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.fit import float32
from passes import programs
from passes.programs.activations import ACTIVATIONS
from passes.programs.program import Array, Head, Program, grid

Entry = dict[str, object]

PATH = Path(programs.__file__).with_name("programs.json")

_REACH = 20.0
_POINTS = 1_000_001

FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    entry.name: partial(lambda entry, y: entry.function(y, entry.usual), entry) for entry in ACTIVATIONS
}
"""The activations of the table with their usual parameters."""


@dataclass(frozen=True)
class Made:
    """An entry with its program's figures."""

    entry: Entry
    max_error: float
    float32_error: float


def make(program: Program, activation: str, *, single: bool, gate: bool) -> Made:
    """The entry of a program of `activation`.

    Args:
        program: its heads; `domain` is where it is meant to hold.
        activation: a name in `FUNCTIONS`.
        single: whether its coefficients are on the float32 grid.
        gate: whether it is meant for gates, with few nonzero values.
    """
    truth = FUNCTIONS[activation]
    places = np.concatenate(
        [grid(program.domain, program), np.linspace(-1.0, 1.0, _POINTS) * min(_REACH, program.domain)]
    )
    bound = float(np.max(np.abs(program.evaluate(places) - truth(places))))
    reach = min(_REACH, program.domain)
    y = float32.points(-reach, reach, _POINTS)
    expected = truth(y.astype(float))
    error = _up(float32.error_at(float32.on_grid(program), y, expected))
    entry: Entry = {"name": program.name, "activation": activation, "max_error": _up(bound)}
    entry |= {"float32_error": error}
    entry |= {"float32": True} if single else {}
    entry |= {"gate": True} if gate else {}
    entry |= {"domain": program.domain} if math.isfinite(program.domain) else {}
    if len(program.heads) == 1 and not program.linear and not program.constant:
        entry |= _head(program.heads[0])
    else:
        entry |= {"linear": program.linear, "constant": program.constant}
        entry["heads"] = [_head(head) for head in program.heads]
    return Made(entry, bound, error)


def write(entries: list[Entry], path: Path = PATH) -> None:
    """Replace entries with the same names; new ones follow the others of their activation."""
    table = json.loads(path.read_text(encoding="utf-8"))
    names = {entry["name"] for entry in entries}
    rows: list[Entry] = [row for row in table["programs"] if row["name"] not in names] + entries
    order = list(dict.fromkeys(row["activation"] for row in [*table["programs"], *entries]))
    rows.sort(key=lambda row: (order.index(row["activation"]), bool(row.get("gate")), _size(row), str(row["name"])))
    head = {key: value for key, value in table.items() if key != "programs"}
    lines = [f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items()]
    body = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    path.write_text("{\n" + "".join(lines) + ' "programs": [\n' + body + "\n ]\n}\n", encoding="utf-8")


def _head(head: Head) -> Entry:
    entry: Entry = {"self_key": [head.beta, head.gamma]}
    if (head.c, head.d) != (1.0, 0.0):
        entry["self_value"] = [head.c, head.d]
    rows = sorted((token.slope, token.offset, token.value) for token in head.bias_tokens)
    return entry | {"bias_tokens": [list(row) for row in rows]}


def _size(row: Entry) -> tuple[int, int]:
    heads = row.get("heads", [row])
    tokens = [head["bias_tokens"] for head in heads] if isinstance(heads, list) else []
    return len(tokens), max((len(row) for row in tokens), default=0)


def _up(number: float) -> float:
    """Three digits, rounded up."""
    if number == 0.0:
        return 0.0
    power = 10.0 ** (math.floor(math.log10(number)) - 2)
    return float(f"{math.ceil(number / power * (1.0 - 1e-12)) * power:.3g}")
