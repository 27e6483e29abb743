"""`python -m benchmarks.playground`: the coefficients in docs/playground.html, from the table of activations.

The page is written by hand, but for the JSON between its marks: the head programs with the fewest heads, and the exact
activation at evenly spaced points. `--check` writes nothing and reports whether anything would change.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.program_figures import FLOAT, example
from passes.programs.activations import ACTIVATIONS
from passes.programs.arithmetic import ARITHMETIC
from passes.programs.program import Program

PAGE = Path(__file__).resolve().parents[1] / "docs" / "playground.html"
POINTS = np.linspace(-8.0, 8.0, 161)

SHOWN = {
    "silu": ("silu", "SiLU", False),
    "gelu": ("gelu", "GELU", False),
    "swiglu": ("silu", "SwiGLU: SiLU(y) u", True),
}
"""Key in the page to the activation, its title, and whether it is a gate."""

_PART = re.compile(r'(<script id="programs" type="application/json">\n).*?(</script>)', re.DOTALL)


def programs() -> dict[str, dict[str, Any]]:
    """What the page needs of each program."""
    entries = {entry.name: entry for entry in ACTIVATIONS}
    made = {}
    for key, (name, title, gate) in SHOWN.items():
        entry = entries[name]
        parameters = example(entry)
        program = entry.program_for(parameters, ARITHMETIC[FLOAT], gated=gate)
        if program is None:
            sys.exit(f"{name} has no program")
        exact = [float(f"{value:.7g}") for value in entry.function(POINTS, parameters)]
        made[key] = {"title": title, "gate": gate, "exact": exact, **_plain(program)}
    return made


def _plain(program: Program) -> dict[str, Any]:
    heads = [
        {
            **{name: getattr(head, name) for name in ("alpha", "beta", "gamma", "c", "d")},
            "tokens": [[token.slope, token.offset, token.value] for token in head.bias_tokens],
        }
        for head in program.attention
    ]
    return {"heads": heads, "linear": program.as_heads.linear, "constant": program.as_heads.constant}


def made(text: str) -> str:
    """The page with its coefficients made anew."""
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in programs().items())
    found, count = _PART.subn(lambda match: f"{match[1]}{{\n{lines}\n}}\n{match[2]}", text)
    if count != 1:
        sys.exit("the page has no place for the coefficients")
    return found


def main() -> None:
    """Write the page, or check it."""
    text = PAGE.read_text(encoding="utf-8")
    new = made(text)
    if "--check" in sys.argv[1:]:
        sys.exit("docs/playground.html is out of date: run python -m benchmarks.playground" if new != text else 0)
    PAGE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
