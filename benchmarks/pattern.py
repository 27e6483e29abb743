"""`python -m benchmarks.pattern`: what a pattern in the graph costs in a decoder, and which operators.

The original, forms of it, and models that something else wrote take turns in this process, on one thread. Its CPU time
is measured, which others on a shared machine hardly change; the second original is the noise. Each node of the heads
then has its fastest time of several runs, from onnxruntime's profile at the shortest length: that is no CPU time, and
only short nodes end before something else gets the processor. Writes tables and a JSON file.
"""

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx

from benchmarks.common import RESULTS, interleaved, print_table, write_json
from benchmarks.decoder import ACTIVATIONS, Shape, decoder, random_weights
from benchmarks.kinds import nodes_of
from benchmarks.timing import Ratio, ratio
from passes.forms import FORMS
from rewriter import rewrite
from rewriter.ort import open_session

ORIGINAL, CONTROL = "original", "control"
_HEADS, _FIRST = "/heads/", "h.0."
_LEAST = 0.05
"""Nanoseconds per neuron and token below which the table leaves a node out."""


@dataclass(frozen=True)
class Row:
    """One model at one length.

    Attributes:
        model: `original`, `control` for the original once more, a form, or the name of a model that was given.
        milliseconds: fastest CPU time of a run.
        over_original: the ratio to the original.
        nodes: how many nodes of its heads run in a block; 0 for the original, and without a profile.
        costs: operator and name of each of them to its fastest time in nanoseconds, and the bytes that it reads and
            writes, per neuron and token.
    """

    activation: str
    model: str
    tokens: int
    milliseconds: float
    over_original: Ratio
    nodes: int
    costs: Mapping[str, tuple[float, float]]


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option(
    "--activation", "activations", type=click.Choice(tuple(ACTIVATIONS)), multiple=True, default=("silu", "gelu")
)
@click.option("--form", "forms", type=click.Choice(tuple(FORMS)), multiple=True, default=("local", "compact"))
@click.option("--tokens", type=click.IntRange(min=1), multiple=True, default=(16, 128, 512), help="Sequence length.")
@click.option("--repeats", type=click.IntRange(min=3), default=15, help="Rounds per row.")
@click.option("--layers", type=click.IntRange(min=1), default=4)
@click.option("--width", type=click.IntRange(min=8), default=Shape.width)
@click.option("--hidden", type=click.IntRange(min=8), default=Shape.hidden)
@click.option("--heads", type=click.IntRange(min=1), default=Shape.heads)
@click.option("--vocabulary", type=click.IntRange(min=8), default=2048)
@click.option(
    "--beside",
    multiple=True,
    metavar="NAME=FILE",
    help="Also a model with the same inputs, such as what an earlier version wrote; `{activation}` is filled in.",
)
@click.option("--json", "json_path", type=click.Path(path_type=Path), default=RESULTS / "pattern-cpu.json")
def main(
    activations: tuple[str, ...],
    forms: tuple[str, ...],
    tokens: tuple[int, ...],
    repeats: int,
    beside: tuple[str, ...],
    json_path: Path,
    **sizes: Any,
) -> None:
    """Measure forms of a decoder, by default 4 layers as in GPT-2 small, over the original on one thread."""
    rows: list[Row] = []
    given = dict(each.split("=", 1) for each in beside)
    for activation in activations:
        further = {name: Path(file.replace("{activation}", activation)) for name, file in given.items()}
        with tempfile.TemporaryDirectory(prefix="attnonly-pattern-") as folder:
            models = _written(Path(folder), Shape(activation=activation, **sizes), forms) | further
            for row in measured(activation, models, tokens, repeats, sizes):
                click.echo(f"{activation}, {row.model}, {row.tokens} tokens: {row.over_original}", err=True)
                rows.append(row)
    settings = {"repeats": repeats, "threads": 1, "beside": [*given], **sizes}
    write_json(json_path, "pattern", settings, [asdict(row) for row in rows])
    title = "CPU time over the original's: ratio of medians (median of paired ratios, quartiles), one thread"
    header = ("activation", "model", "tokens", "ms", "over original", "fastest")
    print_table(title, header, [_cells(row) for row in rows])
    costs = [
        (row.activation, row.model, str(row.nodes), name, *(f"{each:.2f}" for each in cost))
        for row in rows
        for name, cost in row.costs.items()
        if cost[0] >= _LEAST
    ]
    columns = ("activation", "model", "nodes per block", "node", "ns", "bytes")
    print_table(f"Nodes of the heads, per neuron and token, at {min(tokens)} tokens", columns, costs)


def _written(folder: Path, shape: Shape, forms: Sequence[str]) -> dict[str, Path]:
    """The files of the decoder and its forms."""
    original = folder / "original.onnx"
    onnx.save(decoder(shape, random_weights()), original)
    found = {ORIGINAL: original, CONTROL: original}
    for form in forms:
        found[form] = folder / f"{form}.onnx"
        report = rewrite(original, found[form], form=form, validate=False)
        if not report.converted:
            raise click.ClickException(f"form {form}: {[row.reason for row in report.left]}")
    return found


def measured(
    activation: str, models: Mapping[str, Path], tokens: Sequence[int], repeats: int, sizes: Mapping[str, int]
) -> Iterator[Row]:
    """Times and operators of every model but the first, which is the original, for each length."""
    sessions = {name: open_session(path, threads=1, spin=True) for name, path in models.items()}
    for length in tokens:
        ids = np.random.default_rng(0).integers(0, sizes["vocabulary"], (1, length))
        runs = {name: partial(session.run, {"input_ids": ids}) for name, session in sessions.items()}
        seconds = interleaved(runs, repeats=repeats, clock=time.thread_time)
        entries = sizes["hidden"] * length
        profiles = {
            name: nodes_of(path, "cpu", {"input_ids": ids}, 1, min)
            for name, path in models.items()
            if path != models[ORIGINAL] and length == min(tokens)
        }
        for name, times in seconds.items():
            costs: dict[str, tuple[float, float]] = {}
            for path, node in profiles.get(name, {}).items():
                if _HEADS in path and path.startswith(_FIRST):
                    key = f"{node.kind} {path.partition(_HEADS)[2].split('/')[0]}"
                    costs[key] = 1e9 * node.seconds / entries, node.bytes / entries
            slowest = dict(sorted(costs.items(), key=lambda cost: -cost[1][0]))
            yield Row(activation, name, length, 1e3 * min(times), ratio(times, seconds[ORIGINAL]), len(costs), slowest)


def _cells(row: Row) -> tuple[str, ...]:
    over = row.over_original
    times = (f"{row.milliseconds:.1f}", str(over), f"{over.of_fastest:.3f}")
    return (row.activation, row.model, str(row.tokens), *times)


if __name__ == "__main__":
    main()
