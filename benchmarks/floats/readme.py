"""`python -m benchmarks.floats.readme`: the measured columns of the README's table of activations, from the results.

The other columns are written by hand and stay. A cell has the largest errors of the functions of its row, of the
original and of the heads; what was not measured is called so. The same numbers by program, for reports, are written to
`rewriter/report/floats.json`.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
FLOATS = _ROOT / "rewriter" / "report" / "floats.json"
_PLACE = re.compile(
    r"(<!-- measured columns made by python -m benchmarks.floats.readme -->\n)(.*?)(<!-- end -->)", re.DOTALL
)
_KINDS = ("float32", "float16", "bfloat16")
_INSTRUCTIONS = {"avx512f": "AVX-512", "avx2": "AVX2", "avx": "AVX", "sse2": "SSE2", "asimd": "NEON"}

ROWS: dict[str, tuple[tuple[str, ...], ...]] = {
    "SiLU, Swish (any beta), QuickGELU; sigmoid, tanh": (("SiLU", "Swish", "QuickGELU", "sigmoid", "tanh"),),
    "sigmoid(gate)·value (GLU), tanh(gate)·value": (("GLU", "tanh gate"),),
    "Mish": (("Mish",),),
    "ReLU, leaky ReLU, PReLU with one slope": (("ReLU", "leaky ReLU", "PReLU"),),
    "ReLU6, hard sigmoid, clips; ELU, SELU, CELU": (("ReLU6", "hard sigmoid", "clip", "ELU", "SELU", "CELU"),),
    "SiLU / GELU of a clipped input": (("SiLU, clipped",), ("GELU, clipped",)),
    "hard swish": (("hard swish",),),
    "square / squared ReLU": (("square",), ("squared ReLU",)),
    "SwiGLU, ReGLU / bilinear gate·value": (("SwiGLU", "ReGLU"), ("bilinear",)),
    "GELU, by erf / by tanh": (("GELU, by erf",), ("GELU, by tanh",)),
    "GEGLU: gelu(gate)·value, by erf / by tanh": (("GEGLU, by erf",), ("GEGLU, by tanh",)),
    "softplus; exp": (("softplus",), ("exp",)),
    "softsign, and elementwise functions without a name": (("softsign",),),
}
"""First cell of a row to the activations of `SUBJECTS` in it, by the parts that its other cells have."""


def made(text: str, content: Mapping[str, Any]) -> str:
    """The README's text with the measured columns made anew from the results."""
    found, count = _PLACE.subn(lambda match: f"{match[1]}{_table(match[2], content)}{match[3]}", text)
    if count != 1:
        sys.exit("README.md has no place for the measured columns")
    return found


def _table(present: str, content: Mapping[str, Any]) -> str:
    rows = [row for row in content["rows"] if row["type"] in _KINDS]
    title, rule, *lines = (line for line in present.splitlines() if line.startswith("|"))
    made = [
        f"{_by_hand(title)} float32: original → heads | float16: original → heads | bfloat16: heads |",
        f"{_by_hand(rule)} --- | --- | --- |",
    ]
    for line in lines:
        name = line.split(" | ")[0].removeprefix("| ")
        if name not in ROWS:
            sys.exit(f"benchmarks/floats/readme.py does not know the row {name!r}")
        cells = (" / ".join(_cell(part, kind, rows) for part in ROWS[name]) for kind in _KINDS)
        made.append(f"{_by_hand(line)} {' | '.join(cells)} |")
    return "\n".join([*made, "", *_caption(rows), ""])


def _by_hand(line: str) -> str:
    """The first four columns."""
    return "|".join(line.split("|")[:5]) + "|"


def _cell(names: Sequence[str], kind: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """The largest errors of some activations in a type."""
    found = [row for row in rows if row["type"] == kind and row["activation"] in names]
    missing = [name for name in names if all(row["activation"] != name for row in found)]
    if not found:
        return "not measured"
    heads = number(max(row["rewritten"]["relative"] for row in found))
    originals = [row["original"]["relative"] for row in found if row["original"] is not None]
    shown = f"{number(max(originals))} → {heads}" if originals else heads
    return f"{shown} ({', '.join(missing)}: not measured)" if missing else shown


def number(value: float) -> str:
    """Two digits, rounded up."""
    if value < 2.0**-46:  # the error of the float64 values
        return "0" if not value else "below 1.5e-14"
    power = math.floor(math.log10(value))
    digits = math.ceil(value / 10.0 ** (power - 1) - 1e-9)
    return f"{digits / 10:.1f}e{power}" if digits < 100 else f"1.0e{power + 1}"


def _caption(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    sources = sorted({(row["source"]["onnxruntime"], row["source"]["instructions"]) for row in rows})
    where = ", ".join(f"{version} with {_INSTRUCTIONS.get(name, name)}" for version, name in sources)
    yield "*Error at most* is over the reals. Measured, with rounding: the largest error over max(1, |f|), at every"
    yield f"finite number in the program's domain, onnxruntime {where} ([all](benchmarks/results/floats.json))."


def errors(content: Mapping[str, Any]) -> dict[str, Any]:
    """By element type and program, the largest errors of the heads and of the original's nodes (null: not run)."""
    rows = [row for row in content["rows"] if not row["measured"]]
    ((version, instructions),) = {(row["source"]["onnxruntime"], row["source"]["instructions"]) for row in rows}
    found: dict[str, dict[str, list[float | None]]] = {kind: {} for kind in _KINDS}
    for row in rows:
        pair = found[row["type"]].setdefault(row["program"], [0.0, None])
        for place, side in enumerate((row["rewritten"], row["original"])):
            if side is not None:
                pair[place] = max(pair[place] or 0.0, side["relative"])
    return {"onnxruntime": version, "instructions": _INSTRUCTIONS[instructions], "errors": found}


def main() -> None:
    """Write the columns into the README, and the errors for reports."""
    page = _ROOT / "README.md"
    content = json.loads((_ROOT / "benchmarks" / "results" / "floats.json").read_text(encoding="utf-8"))
    page.write_text(made(page.read_text(encoding="utf-8"), content), encoding="utf-8")
    FLOATS.write_text(json.dumps(errors(content)).replace('"silu"', '\n"silu"') + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
