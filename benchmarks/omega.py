"""How far form `maskless` is from the activation, against omega: what the mask in the weights costs.

    python -m benchmarks.omega -o benchmarks/results/omega.json

Comes in: nothing; the sublayers of `passes.forms.alone` are made for each omega. Goes out: JSON with one row per
program, element type and omega: the largest error of the heads on normal pre-activations, against the program in
float64.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from passes.forms.alone import activation_sublayer
from passes.programs import Head, Program

PROGRAMS = (Program("silu", (Head(beta=1.0),)), Program("relu_k40", (Head(beta=2.0**40),)))
OMEGAS: tuple[float | None, ...] = (*(2.0**power for power in range(11)), 1e4, 1e8, 1e16, None)
TOKENS, WIDTH = 20, 30
"""The setting of the sources: 20 tokens, a stream of 30 columns."""


def measure(program: Program, *, double: bool, omega: float | None) -> dict[str, Any]:
    """One row. `omega` None is the form's default."""
    dtype = np.float64 if double else np.float32
    x = np.random.default_rng(0).normal(0.0, 2.0, (1, TOKENS, WIDTH)).astype(dtype)
    model = activation_sublayer(program, WIDTH, double=double, max_tokens=TOKENS, omega=omega)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    result = session.run(None, {"x": x})[0].astype(np.float64)
    error = float(np.max(np.abs(result - program.evaluate(x.astype(np.float64)))))
    return {
        "program": program.name,
        "type": np.dtype(dtype).name,
        "omega": "default" if omega is None else omega,
        "max_error": error,
    }


def curve() -> dict[str, Any]:
    """All rows."""
    rows = [
        measure(program, double=double, omega=omega)
        for program in PROGRAMS
        for double in (False, True)
        for omega in OMEGAS
    ]
    return {"tokens": TOKENS, "width": WIDTH, "rows": rows}


def main() -> None:
    """Write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("-o", "--output", type=Path, required=True)
    output: Path = parser.parse_args().output
    output.write_text(json.dumps(curve(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
