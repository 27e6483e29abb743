"""`python -m benchmarks.gates`: the accuracy of several ways to compute a gate h(g) u by attention.

For each way it reports the largest error over max(1, |h|) |u|, against float64, for |g| <= 10, 30 and 100, evaluated in
float32 and in float64, as a table and a JSON file. docs/decisions/0008 chooses between these ways. No model is run:
this is the arithmetic alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.common import RESULTS, print_table, write_json

Array = NDArray[Any]
Weight = Callable[[Array], Array]
"""Weight of the value u, as a function of the gate's pre-activation; computed in the type of its argument."""

FITS = json.loads(Path(__file__).with_name("gate_fits.json").read_text(encoding="utf-8"))["fits"]
REACHES = (10.0, 30.0, 100.0)
_POINTS = 400_001


@dataclass(frozen=True)
class Row:
    """One way to compute a SiLU gate.

    Attributes:
        way: its description.
        sublayers: attention sublayers.
        heads: heads per neuron.
        keys: keys per head.
        float32: reach to error when evaluated in float32; None beyond the domain of a fit.
        float64: the same in float64.
    """

    way: str
    sublayers: int
    heads: int
    keys: int
    float32: dict[str, float | None]
    float64: dict[str, float | None]


def _sigmoid(y: Array) -> Array:
    one = y.dtype.type(1)
    with np.errstate(over="ignore"):
        return np.asarray(one / (one + np.exp(-y)))


def silu(g: Array) -> Array:
    """The reference, SiLU."""
    return g * _sigmoid(g)


def limit(small: float) -> Weight:
    """One sublayer, two heads over the same keys e g, -e g and ln 2 - g."""

    def weight(g: Array) -> Array:
        e, two = g.dtype.type(small), g.dtype.type(2)
        logits = (e * g, -e * g, -g)
        top = np.maximum(np.maximum(logits[0], logits[1]), logits[2])
        plus, minus, bias = (np.exp(logit - top) for logit in logits)
        return np.asarray((plus - minus) / e / (plus + minus + two * bias))

    return weight


def fitted(fit: dict[str, Any]) -> Weight:
    """One sublayer, a fit on a bounded domain."""

    def weight(g: Array) -> Array:
        kind = g.dtype.type
        total = np.full_like(g, kind(fit["constant"]))
        for head in fit["heads"]:
            logits = [np.zeros_like(g), *(kind(a) * g + kind(b) for a, b in head["bias_tokens"])]
            top = np.max(logits, axis=0)
            shares = [np.exp(logit - top) for logit in logits]
            total = total + kind(head["value"]) * shares[0] / np.sum(shares, axis=0, dtype=kind)
        return total

    return weight


def two_sublayers(small: float) -> Weight:
    """First h, then its product with u: 4/e (sigma(e h) - 1/2) u."""

    def weight(g: Array) -> Array:
        kind = g.dtype.type
        return np.asarray(kind(4.0 / small) * (_sigmoid(kind(small) * silu(g)) - kind(0.5)))

    return weight


def richardson(small: float) -> Weight:
    """The same with two heads that cancel the cubic term."""

    def weight(g: Array) -> Array:
        kind = g.dtype.type
        h = silu(g)
        near, far = (kind(4.0 / e) * (_sigmoid(kind(e) * h) - kind(0.5)) for e in (small, 2.0 * small))
        return np.asarray((kind(4.0) * near - far) / kind(3.0))

    return weight


def _error(weight: Weight, reach: float, dtype: type[np.floating[Any]]) -> float:
    g = np.linspace(-reach, reach, _POINTS).astype(dtype)
    expected = silu(g.astype(np.float64))
    return float(np.max(np.abs(weight(g).astype(np.float64) - expected) / np.maximum(1.0, np.abs(expected))))


def _row(way: str, shape: tuple[int, int, int], narrow: Weight, wide: Weight, domain: float = np.inf) -> Row:
    def errors(weight: Weight, dtype: type[np.floating[Any]]) -> dict[str, float | None]:
        return {f"{reach:g}": _error(weight, reach, dtype) if reach <= domain else None for reach in REACHES}

    return Row(way, *shape, errors(narrow, np.float32), errors(wide, np.float64))


def rows() -> list[Row]:
    """All ways; a way with a free number e gets the best power of two for |g| <= 30 in each arithmetic."""
    result = [_row("limit, two heads", (1, 2, 3), *_best(limit))]
    for fit in FITS:
        keys = 1 + max(len(head["bias_tokens"]) for head in fit["heads"])
        result.append(_row(fit["name"], (1, len(fit["heads"]), keys), fitted(fit), fitted(fit), fit["domain"]))
    result.append(_row("h, then a product", (2, 2, 2), *_best(two_sublayers)))
    result.append(_row("h, then a product by Richardson", (2, 3, 2), *_best(richardson)))
    result.append(_row("h, then the product itself", (1, 1, 2), silu, silu))
    return result


def _best(make: Callable[[float], Weight]) -> tuple[Weight, Weight]:
    sizes = [2.0**-n for n in range(1, 32)]

    def best(dtype: type[np.floating[Any]]) -> Weight:
        return make(min(sizes, key=lambda size: _error(make(size), 30.0, dtype)))

    return best(np.float32), best(np.float64)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--json", "json_path", type=click.Path(path_type=Path), default=RESULTS / "gates.json")
def main(json_path: Path) -> None:
    """Measure how accurately a SiLU gate can be made of attention."""
    found = rows()
    write_json(json_path, "gates", {"points": _POINTS, "reaches": list(REACHES)}, [asdict(row) for row in found])
    header = ("way", "sublayers", "heads x keys", *(f"{kind} |g| <= {r:g}" for kind in ("f32", "f64") for r in REACHES))
    cells = [
        (
            row.way,
            str(row.sublayers),
            f"{row.heads} x {row.keys}",
            *map(_cell, (*row.float32.values(), *row.float64.values())),
        )
        for row in found
    ]
    print_table("Errors of a SiLU gate over max(1, |h|) |u|", header, cells)


def _cell(error: float | None) -> str:
    return "-" if error is None else f"{error:.1e}"


if __name__ == "__main__":
    main()
