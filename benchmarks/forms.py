"""`python -m benchmarks.forms`: time and memory of each form against the length of the sequence.

Time: one MLP in every form beside the original, each in its own process (`benchmarks.timing`): medians and ratios; a
second process of the original gives the noise. Memory: the peak of one run in a separate process
(`benchmarks.memory`). Writes tables and a JSON file.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np
import onnx

from benchmarks.common import RESULTS, print_table, write_json
from benchmarks.decoder import ACTIVATIONS, Shape, mlp, random_weights
from benchmarks.memory import available, peak_bytes
from benchmarks.timing import Ratio, measure, ratio, started
from passes.forms import FORMS
from rewriter import rewrite

ORIGINAL, CONTROL = "original", "control"
_MEGABYTE = 2**20


@dataclass(frozen=True)
class TimeRow:
    """One form at one length: median milliseconds, and the ratio to the original."""

    activation: str
    form: str
    tokens: int
    milliseconds: float
    over_original: Ratio


@dataclass(frozen=True)
class MemoryRow:
    """One form at one length: peak of one run in MiB."""

    activation: str
    form: str
    tokens: int
    width: int
    hidden: int
    measured: float


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--tokens", type=click.IntRange(min=1), multiple=True, default=(16, 64, 128), help="Sequence length.")
@click.option("--width", type=click.IntRange(min=8), default=128)
@click.option("--hidden", type=click.IntRange(min=8), default=512)
@click.option("--repeats", type=click.IntRange(min=3), default=9, help="Rounds per row.")
@click.option("--activation", "activations", type=click.Choice(tuple(ACTIVATIONS)), multiple=True, default=("silu",))
@click.option("--form", "forms", type=click.Choice(tuple(FORMS)), multiple=True, default=tuple(FORMS))
@click.option("--memory-tokens", type=click.IntRange(min=1), multiple=True, default=(1024,), help="For the memory.")
@click.option("--memory-width", type=click.IntRange(min=8), default=768)
@click.option("--memory-hidden", type=click.IntRange(min=8), default=3072)
@click.option(
    "--memory-form", "memory_forms", type=click.Choice(tuple(FORMS)), multiple=True, default=("local", "compact")
)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Default: benchmarks/results/forms-cpu.json")
def main(
    tokens: tuple[int, ...],
    width: int,
    hidden: int,
    *,
    repeats: int,
    activations: tuple[str, ...],
    forms: tuple[str, ...],
    memory_tokens: tuple[int, ...],
    memory_width: int,
    memory_hidden: int,
    memory_forms: tuple[str, ...],
    json_path: Path | None,
) -> None:
    """Measure time and memory of one MLP in each form against the length of the sequence."""
    times: list[TimeRow] = []
    memories: list[MemoryRow] = []
    for activation in activations:
        small = Shape(width=width, hidden=hidden, activation=activation)
        for row in time_rows(small, forms, tokens, repeats):
            click.echo(f"{activation}, {row.form}, {row.tokens} tokens: {row.over_original}", err=True)
            times.append(row)
        large = Shape(width=memory_width, hidden=memory_hidden, activation=activation)
        if available():
            memories += memory_rows(large, memory_forms, memory_tokens)
    settings = {"repeats": repeats, "width": width, "hidden": hidden}
    rows = [*map(asdict, times), *map(asdict, memories)]
    write_json(json_path or RESULTS / "forms-cpu.json", "forms", settings, rows)
    title = f"One MLP, width {width}, {hidden} neurons: ratio of medians (median of paired ratios, quartiles)"
    cells = [
        (row.activation, row.form, str(row.tokens), f"{row.milliseconds:.2f}", str(row.over_original)) for row in times
    ]
    print_table(title, ("activation", "form", "tokens", "ms", "over original"), cells)
    title = "Memory of one run in MiB"
    header = ("activation", "form", "tokens", "neurons", "measured")
    print_table(title, header, [_memory_cells(row) for row in memories])


def time_rows(shape: Shape, forms: Sequence[str], tokens: Sequence[int], repeats: int) -> Iterator[TimeRow]:
    """Times of every form, and of the original's second process, for each length."""
    model = mlp(shape, random_weights())
    built = {form: _built(model, form, max(tokens)) for form in forms}
    models = {ORIGINAL: model, CONTROL: model, **built}
    with started(models, "cpu") as processes:
        for length in tokens:
            x = np.random.default_rng(0).normal(0.0, 1.0, (1, length, shape.width)).astype(np.float32)
            seconds = measure(processes, {"hidden_states": x}, repeats)
            for form in (CONTROL, *forms):
                over = ratio(seconds[form], seconds[ORIGINAL])
                yield TimeRow(shape.activation, form, length, 1e3 * float(np.median(seconds[form])), over)


def memory_rows(shape: Shape, forms: Sequence[str], tokens: Sequence[int]) -> Iterator[MemoryRow]:
    """Peak memory of every form, in a separate process."""
    model = mlp(shape, random_weights())
    with tempfile.TemporaryDirectory(prefix="attnonly-forms-") as folder:
        for form in forms:
            path = Path(folder) / f"{form}.onnx"
            onnx.save(_built(model, form, max(tokens)), path)
            for length in tokens:
                click.echo(f"memory: {shape.activation}, {form}, {length} tokens", err=True)
                measured = peak_bytes(path, length) / _MEGABYTE
                yield MemoryRow(shape.activation, form, length, shape.width, shape.hidden, measured)


def _built(model: onnx.ModelProto, form: str, tokens: int) -> onnx.ModelProto:
    report = rewrite(model, form=form, validate=False, max_tokens=tokens)
    if not report:
        raise click.ClickException(f"form {form}: {[row.reason for row in report.left]}")
    return report.rewritten


def _memory_cells(row: MemoryRow) -> tuple[str, ...]:
    return (row.activation, row.form, str(row.tokens), str(row.hidden), f"{row.measured:,.1f}")


if __name__ == "__main__":
    main()
