"""`python -m benchmarks.validation`: wall time of `rewrite validate` and `diff` over that of running the models.

*Plain inference* is the least that a comparison needs: load both models into onnxruntime, and run each once on the same
inputs. Every other row is stated as a multiple of it. All are measured in this process, in turn, repeatedly. Writes a
table and a JSON file.
"""

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx

from benchmarks.common import RESULTS, interleaved, print_table, write_json
from benchmarks.decoder import ACTIVATIONS, Shape, decoder, random_weights
from benchmarks.timing import Ratio, ratio
from rewriter import diff, rewrite, validate
from rewriter.files.load import load_model
from rewriter.inputs.cases import Maker
from rewriter.ort import open_session


@dataclass(frozen=True)
class Row:
    """One task.

    Attributes:
        task: its description.
        seconds: every measurement.
        over_plain: its time over that of plain inference.
        steps: seconds by step of the last run; empty for plain inference.
    """

    task: str
    seconds: list[float]
    over_plain: Ratio
    steps: dict[str, float]


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--original", type=click.Path(path_type=Path, exists=True), help="Compare this file instead, with ...")
@click.option("--rewritten", type=click.Path(path_type=Path, exists=True), help="... this one.")
@click.option("--activation", type=click.Choice(tuple(ACTIVATIONS)), default="silu")
@click.option("--repeats", type=click.IntRange(min=1), default=5, help="Rounds.")
@click.option("--layers", type=click.IntRange(min=1), default=6)
@click.option("--width", type=click.IntRange(min=8), default=256)
@click.option("--hidden", type=click.IntRange(min=8), default=1024)
@click.option("--heads", type=click.IntRange(min=1), default=8)
@click.option("--vocabulary", type=click.IntRange(min=8), default=8192)
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), default=RESULTS / "validation.json", show_default=False
)
def main(
    original: Path | None,
    rewritten: Path | None,
    activation: str,
    *,
    repeats: int,
    json_path: Path,
    **sizes: Any,
) -> None:
    """Measure how long comparing two models takes, against running them; by default a decoder of 6 layers."""
    if (original is None) != (rewritten is None):
        raise click.UsageError("give both --original and --rewritten, or neither")
    with tempfile.TemporaryDirectory(prefix="attnonly-validation-") as folder:
        if original is None or rewritten is None:
            original, rewritten = _made(Path(folder), Shape(activation=activation, **sizes))
        rows = _measure(original, rewritten, repeats)
    write_json(
        json_path, "validation", {"repeats": repeats, "activation": activation, **sizes}, [asdict(r) for r in rows]
    )
    header = ("task", "seconds", "over plain inference")
    cells = [(row.task, f"{float(np.median(row.seconds)):.2f}", str(row.over_plain)) for row in rows]
    print_table(
        f"Comparing two models, {repeats} rounds; ratio of medians (median of ratios, quartiles)", header, cells
    )


def _made(folder: Path, shape: Shape) -> tuple[Path, Path]:
    original, rewritten = folder / "original.onnx", folder / "rewritten.onnx"
    onnx.save(decoder(shape, random_weights()), original)
    rewrite(original, rewritten, validate=False)
    return original, rewritten


def _measure(original: Path, rewritten: Path, repeats: int) -> list[Row]:
    steps: dict[str, dict[str, float]] = {}
    cases = Maker(load_model(original).proto).usual()

    def plain() -> None:
        for path in (original, rewritten):
            session = open_session(path)
            for case in cases:
                session.run(case.feeds)

    def comparing(task: str, run: Callable[[], dict[str, float]]) -> Callable[[], None]:
        def once() -> None:
            steps[task] = run()

        return once

    compared: dict[str, Callable[[], dict[str, float]]] = {
        "diff(outputs=False)": lambda: dict(diff(original, rewritten, outputs=False).seconds),
        "validate": lambda: dict(validate(original, rewritten).seconds),
    }
    tasks = {"plain inference": plain, **{task: comparing(task, run) for task, run in compared.items()}}
    seconds = interleaved(tasks, repeats=repeats, warmup=1)
    base = seconds["plain inference"]
    return [Row(task, times, ratio(times, base), steps.get(task, {})) for task, times in seconds.items()]


if __name__ == "__main__":
    main()
