"""`python -m benchmarks.plan_scaling`: time of planning per node, for graphs of growing size.

The models are decoders of tiny width and many layers, so that the time is that of the graph and not of weights. Steps:
`view` (type inference and index), of it `types`; `find` (all blocks); `plan` (view, find and the decision about every
block); `apply` (the rewritten proto). Linear time shows as a constant cost per node. Writes a table and a JSON file.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
import numpy as np
import onnx

from benchmarks.common import RESULTS, print_table, write_json
from benchmarks.decoder import ACTIVATIONS, Shape, decoder, random_weights
from passes.match.blocks import Block, Finder
from passes.match.names import Namer
from passes.options import Options
from passes.plan import apply, make_plan
from rewriter.graph.types import inferred_graph
from rewriter.graph.view import GraphView, all_views

T = TypeVar("T")

STEPS = ("types", "view", "find", "plan", "apply")


@dataclass(frozen=True)
class Row:
    """One graph: its size, and the seconds of each step, median over the repeats."""

    nodes: int
    blocks: int
    seconds: dict[str, float]
    all_seconds: dict[str, list[float]]

    def microseconds(self, step: str) -> float:
        """Microseconds per node of one step."""
        return 1e6 * self.seconds[step] / self.nodes


def chain(nodes: int, activation: str) -> onnx.ModelProto:
    """A decoder of about `nodes` nodes."""
    short, long = (len(_decoder(layers, activation).graph.node) for layers in (1, 2))
    per_layer = long - short
    return _decoder(max(1, round((nodes - short + per_layer) / per_layer)), activation)


def _decoder(layers: int, activation: str) -> onnx.ModelProto:
    shape = Shape(layers, width=8, hidden=32, heads=2, vocabulary=16, positions=16, activation=activation)
    return decoder(shape, random_weights())


def measure(model: onnx.ModelProto, repeats: int) -> Row:
    """Time every step on one model."""
    seconds: dict[str, list[float]] = {step: [] for step in STEPS}
    blocks = 0
    for _ in range(repeats):
        _timed(seconds["types"], inferred_graph, model)
        (view,) = _timed(seconds["view"], all_views, model)
        blocks = len(_timed(seconds["find"], _found, view))
        plan = _timed(seconds["plan"], make_plan, model, Options())
        _timed(seconds["apply"], apply, plan)
    medians = {step: float(np.median(times)) for step, times in seconds.items()}
    return Row(len(model.graph.node), blocks, medians, seconds)


def _found(view: GraphView) -> tuple[Block, ...]:
    return Finder(view, Namer(), Options()).run()[0]


def _timed(into: list[float], step: Callable[..., T], *arguments: Any) -> T:
    gc.collect()
    start = time.perf_counter()
    result = step(*arguments)
    into.append(time.perf_counter() - start)
    return result


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--nodes", type=click.IntRange(min=10), multiple=True, default=(1_000, 10_000, 100_000))
@click.option("--activation", type=click.Choice(tuple(ACTIVATIONS)), default="silu")
@click.option("--repeats", type=click.IntRange(min=1), default=3)
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path),
    default=RESULTS / "plan-scaling.json",
    show_default=False,
)
def main(nodes: tuple[int, ...], activation: str, repeats: int, json_path: Path) -> None:
    """Measure the time of planning per node."""
    rows = []
    for count in nodes:
        click.echo(f"{count} nodes", err=True)
        rows.append(measure(chain(count, activation), repeats))
    write_json(
        json_path,
        "plan_scaling",
        {"activation": activation, "repeats": repeats},
        [asdict(row) for row in rows],
    )
    header = ("nodes", "blocks", "plan s", *(f"{step} us/node" for step in STEPS))
    cells = [
        (
            str(row.nodes),
            str(row.blocks),
            f"{row.seconds['plan']:.3f}",
            *(f"{row.microseconds(step):.1f}" for step in STEPS),
        )
        for row in rows
    ]
    print_table(f"Planning, median of {repeats}", header, cells)


if __name__ == "__main__":
    main()
