"""`python -m benchmarks.composition`: time and peak memory of all compositions of a GPT-2-small-sized model.

The model has random weights in a file beside it; the compositions of all heads and neurons are computed in a process of
its own, `python -m benchmarks.composition --child MODEL KINDS TOP`. Writes a table and a JSON file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import onnx

from benchmarks.common import RESULTS, ROOT, print_table, write_json
from benchmarks.decoder import ACTIVATIONS, Shape, decoder, random_weights

_CHILD = "--child"


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--layers", type=click.IntRange(min=2), default=12)
@click.option("--width", type=click.IntRange(min=8), default=768)
@click.option("--heads", type=click.IntRange(min=1), default=12)
@click.option("--activation", type=click.Choice(tuple(ACTIVATIONS)), default="gelu")
@click.option("--top", type=click.IntRange(min=1), default=10)
@click.option(
    "--threads", type=click.IntRange(min=1), default=1, help="Of BLAS. With one, CPU time is work, not waiting."
)
@click.option("--json", "json_path", type=click.Path(path_type=Path), default=RESULTS / "composition.json")
def main(*, activation: str, top: int, threads: int, json_path: Path, **sizes: Any) -> None:
    """Measure how long the compositions of all heads and neurons take, and how much memory."""
    shape = Shape(hidden=4 * sizes["width"], activation=activation, vocabulary=64, **sizes)
    with tempfile.TemporaryDirectory(prefix="attnonly-composition-") as folder:
        click.echo("making the model", err=True)
        model = Path(folder) / "model.onnx"
        onnx.save(decoder(shape, random_weights()), model, save_as_external_data=True, location="model.data")
        rows = [_measured(model, top, threads)]
    settings = {**sizes, "activation": activation, "top": top, "threads": threads}
    write_json(json_path, "composition", settings, rows)
    title = f"{shape.layers} layers of width {shape.width}, {rows[0]['members']:,} heads and neurons, top {top}"
    print_table(title, ("scores", "seconds", "CPU s", "peak MB"), [_cells(row) for row in rows])


def _measured(model: Path, top: int, threads: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.composition", _CHILD, str(model), str(top)]
    limits = {f"{library}_NUM_THREADS": str(threads) for library in ("OPENBLAS", "MKL", "OMP")}
    environment = {**os.environ, **limits}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"measuring failed: {done.stderr.strip()[-2000:]}")
    return dict(json.loads(done.stdout))


def _child(model: Path, top: int) -> dict[str, Any]:
    from rewriter import compositions
    from rewriter.timing.measure import resident_peak

    start, busy = time.perf_counter(), time.process_time()
    found = compositions(model, top=top)
    seconds, cpu = time.perf_counter() - start, time.process_time() - busy
    return {
        "members": len(found.heads),
        "scores": found.compared,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "peak_mb": (resident_peak() or 0) / 1e6,
        "strongest": found.strongest(1)[0].score,
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{row['scores']:,}",
        f"{row['seconds']:.1f}",
        f"{row['cpu_seconds']:.1f}",
        f"{row['peak_mb']:.0f}",
    )


if __name__ == "__main__":
    if sys.argv[1:2] == [_CHILD]:
        json.dump(_child(Path(sys.argv[2]), int(sys.argv[3])), sys.stdout)
    else:
        main()
