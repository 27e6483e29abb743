"""`python -m benchmarks.omega`: the error of form `maskless` against omega.

For each program, element type and omega: the largest error of the heads on normal pre-activations, against the program
in float64. This is the cost of the mask in the weights; the sublayers are those of `passes.sublayers`. Writes a
table, a JSON file and a plot, shown in docs/forms.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np

from benchmarks.common import RESULTS, ROOT, print_table, write_json
from benchmarks.figures import Curve, Panel, drawing
from passes.programs.fitted import cheapest
from passes.programs.head import Head
from passes.programs.program import Program
from passes.sublayers import activation_sublayer
from rewriter.ort.sessions import open_session

PROGRAMS = (
    Program("silu", (Head(beta=1.0),)),
    Program("relu_k40", (Head(beta=2.0**40),)),
    cheapest("gelu", 2.0**-23),
)
OMEGAS: tuple[float | None, ...] = (*(2.0**power for power in range(11)), 1e4, 1e8, 1e16, None)
TOKENS, WIDTH = 20, 30
"""The setting of the sources: 20 tokens, a stream of 30 columns."""

_FIGURE = ROOT / "docs" / "figures" / "error-omega.svg"


@dataclass(frozen=True)
class Row:
    """One program with one omega (None for the form's default); the error is absolute."""

    program: str
    type: str
    omega: float | None
    max_error: float


def measure(program: Program, *, double: bool, omega: float | None) -> Row:
    """One row: the largest error on 20 tokens of 30 columns, normal with a standard deviation of 2."""
    dtype = np.dtype(np.float64 if double else np.float32)
    x = np.random.default_rng(0).normal(0.0, 2.0, (1, TOKENS, WIDTH)).astype(dtype)
    model = activation_sublayer(program, WIDTH, double=double, max_tokens=TOKENS, omega=omega)
    result = open_session(model, "cpu").run({"x": x})["out"].astype(np.float64)
    error = float(np.max(np.abs(result - program.evaluate(x.astype(np.float64)))))
    return Row(program.name, dtype.name, omega, error)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--json", "path", type=click.Path(path_type=Path, dir_okay=False), default=RESULTS / "omega.json")
@click.option("--figure", type=click.Path(path_type=Path, dir_okay=False), default=_FIGURE)
def main(path: Path, figure: Path) -> None:
    """Measure the error of form maskless against omega."""
    rows = [
        measure(program, double=double, omega=omega)
        for program in PROGRAMS
        for double in (False, True)
        for omega in OMEGAS
    ]
    write_json(path, "omega", {"tokens": TOKENS, "width": WIDTH}, [asdict(row) for row in rows])
    figure.parent.mkdir(parents=True, exist_ok=True)
    figure.write_text(_drawn(rows), encoding="utf-8")
    columns = {f"{row.program}, {row.type}": row.program for row in rows}
    cells = [
        (
            "default" if omega is None else f"{omega:g}",
            *(f"{row.max_error:.1e}" for row in rows if row.omega == omega),
        )
        for omega in OMEGAS
    ]
    print_table("Largest error of the heads of form maskless", ("omega", *columns), cells)


def _drawn(rows: Sequence[Row]) -> str:
    curves = []
    for number, program in enumerate(PROGRAMS):
        for dtype in ("float32", "float64"):
            of = [row for row in rows if (row.program, row.type) == (program.name, dtype)]
            x, y = np.array([(row.omega, row.max_error) for row in of if row.omega is not None]).T
            curves.append(Curve(x, y, f"{program.name}, {dtype}", dtype == "float32", number))
    title = "Form maskless: error of the heads against omega"
    ticks = (1.0, 8.0, 32.0, 256.0, 1e4, 1e8, 1e16)
    labels = ("omega", "largest error")
    return drawing([Panel(title, tuple(curves), logarithmic="xy", labels=labels, ticks=ticks)], title)


if __name__ == "__main__":
    main()
