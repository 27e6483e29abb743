"""`python -m benchmarks.interpretation`: time and peak memory of looking into a GPT-2-small-sized model.

The model has random weights in a file beside it. Each task is a process of its own, `python -m
benchmarks.interpretation --child MODEL TASK TOKENS`: the compositions of all heads and neurons, a logit in parts, why a
neuron and a head of the last layer do what they do, the attribution graph. Writes a table and a JSON file.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx

from benchmarks.common import RESULTS, ROOT, print_table, write_json
from benchmarks.decoder import ACTIVATIONS, Shape, decoder, random_weights
from rewriter import attribute, attribution_graph, compositions, why

_CHILD = "--child"

Feeds = Mapping[str, np.ndarray]
TASKS: Mapping[str, Callable[[Path, Feeds, int], float]] = {
    "compositions": lambda model, _, __: compositions(model).strongest(1)[0].score,
    "attribute": lambda model, feeds, _: attribute(model, feeds, 5).residuals["paths"],
    "why a neuron": lambda model, feeds, last: why(model, feeds, f"blocks.{last}.mlp_heads[7]").residual,
    "why a score": lambda model, feeds, last: why(model, feeds, f"blocks.{last}.attn[7]").residual,
    "graph": lambda model, feeds, _: float(np.abs(attribution_graph(model, feeds, 5).residuals).max()),
}
"""Task to what it does; the result is the strongest score, or how far the sums are off."""


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--layers", type=click.IntRange(min=2), default=12)
@click.option("--width", type=click.IntRange(min=8), default=768)
@click.option("--heads", type=click.IntRange(min=8), default=12)
@click.option("--activation", type=click.Choice(tuple(ACTIVATIONS)), default="gelu")
@click.option("--tokens", type=click.IntRange(min=1), default=16, help="Of the sequence that is looked at.")
@click.option(
    "--threads", type=click.IntRange(min=1), default=1, help="Of BLAS. With one, CPU time is work, not waiting."
)
@click.option("--json", "json_path", type=click.Path(path_type=Path), default=RESULTS / "interpretation.json")
def main(*, activation: str, tokens: int, threads: int, json_path: Path, **sizes: Any) -> None:
    """Measure how long heads and neurons take to be compared, and a logit to be taken apart."""
    shape = Shape(hidden=4 * sizes["width"], activation=activation, **sizes)
    with tempfile.TemporaryDirectory(prefix="attnonly-interpretation-") as folder:
        click.echo("making the model", err=True)
        model = Path(folder) / "model.onnx"
        onnx.save(decoder(shape, random_weights()), model, save_as_external_data=True, location="model.data")
        rows = [_measured(model, task, tokens, threads) for task in TASKS]
    settings = {**sizes, "activation": activation, "tokens": tokens, "threads": threads}
    write_json(json_path, "interpretation", settings, rows)
    title = f"{shape.layers} layers of width {shape.width}, {tokens} tokens"
    print_table(title, ("task", "seconds", "CPU s", "peak MB"), [_cells(row) for row in rows])


def _measured(model: Path, task: str, tokens: int, threads: int) -> dict[str, Any]:
    click.echo(task, err=True)
    command = [sys.executable, "-m", "benchmarks.interpretation", _CHILD, str(model), task, str(tokens)]
    limits = {f"{library}_NUM_THREADS": str(threads) for library in ("OPENBLAS", "MKL", "OMP")}
    environment = {**os.environ, **limits}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"measuring failed: {done.stderr.strip()[-2000:]}")
    return {"task": task, **json.loads(done.stdout)}


def _child(path: Path, task: str, tokens: int) -> dict[str, Any]:
    from benchmarks.timing import resident_peak

    model = onnx.load(path, load_external_data=False)
    vocabulary = Shape().vocabulary
    ids = np.random.default_rng(0).integers(0, vocabulary, (1, tokens))
    last = sum(node.op_type == "Softmax" for node in model.graph.node) - 1
    start, busy = time.perf_counter(), time.process_time()
    result = TASKS[task](path, {model.graph.input[0].name: ids}, last)
    seconds, cpu = time.perf_counter() - start, time.process_time() - busy
    return {"seconds": seconds, "cpu_seconds": cpu, "peak_mb": (resident_peak() or 0) / 1e6, "result": result}


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (row["task"], f"{row['seconds']:.1f}", f"{row['cpu_seconds']:.1f}", f"{row['peak_mb']:.0f}")


if __name__ == "__main__":
    if sys.argv[1:2] == [_CHILD]:
        json.dump(_child(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])), sys.stdout)
    else:
        main()
