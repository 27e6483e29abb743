"""`python -m benchmarks.latency`: time of a rewritten model over that of the original, on onnxruntime.

Original, rewritten and the original a second time, each in its own process (`benchmarks.timing`); the ratio of the
second time is the noise. Writes a table and a JSON file.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx

from benchmarks.common import RESULTS, feeds_of, print_table, write_json
from benchmarks.decoder import ACTIVATIONS, GATED, Shape, decoder, mlp, random_weights
from benchmarks.timing import Ratio, measure, ratio, started
from rewriter import rewrite

PARTS = {"model": decoder, "mlp": mlp}


@dataclass(frozen=True)
class Row:
    """One model at one length.

    Attributes:
        blocks: number of converted MLP blocks.
        milliseconds: median time of `original`, `rewritten` and `control`.
        rewritten: ratio of the rewritten model to the original.
        control: ratio of the original to itself, which is the noise.
        rounds: milliseconds of every round.
    """

    model: str
    provider: str
    tokens: int
    blocks: int
    milliseconds: dict[str, float]
    rewritten: Ratio
    control: Ratio
    rounds: dict[str, tuple[float, ...]]


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--model", "file", type=click.Path(path_type=Path, exists=True), help="Measure this file instead.")
@click.option("--part", "parts", type=click.Choice(tuple(PARTS)), multiple=True, default=tuple(PARTS))
@click.option(
    "--activation",
    "activations",
    type=click.Choice((*ACTIVATIONS, *GATED)),
    multiple=True,
    default=("silu", "gelu"),
)
@click.option("--tokens", type=click.IntRange(min=1), multiple=True, default=(16, 128, 512), help="Sequence length.")
@click.option("--repeats", type=click.IntRange(min=3), default=10, help="Rounds per row.")
@click.option("--provider", type=click.Choice(("cpu", "cuda")), default="cpu")
@click.option("--inline", is_flag=True, help="Write the heads out instead of calling a model-local function.")
@click.option("--gate", type=click.Choice(("heads", "product")), default="heads", help="What a gate becomes.")
@click.option("--layers", type=click.IntRange(min=1), default=Shape.layers)
@click.option("--width", type=click.IntRange(min=8), default=Shape.width)
@click.option("--hidden", type=click.IntRange(min=8), default=Shape.hidden)
@click.option("--heads", type=click.IntRange(min=1), default=Shape.heads)
@click.option("--vocabulary", type=click.IntRange(min=8), default=Shape.vocabulary)
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path),
    help="Default: benchmarks/results/latency-PROVIDER.json",
)
def main(
    file: Path | None,
    parts: tuple[str, ...],
    activations: tuple[str, ...],
    tokens: tuple[int, ...],
    *,
    repeats: int,
    provider: str,
    inline: bool,
    gate: str,
    json_path: Path | None,
    **sizes: Any,
) -> None:
    """Measure the latency of rewritten over original models; the defaults are a GPT-2-small-sized decoder."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="attnonly-latency-") as folder:
        for name, path in _models(file, parts, activations, sizes, Path(folder)):
            click.echo(f"{name}: rewriting and loading", err=True)
            options = {"inline": inline, "gate": gate}
            for row in _measure(name, path, Path(folder), tokens, options, repeats=repeats, provider=provider):
                click.echo(f"  {row.tokens} tokens: {row.rewritten}", err=True)
                rows.append(row)
    settings = {"repeats": repeats, "inline": inline, "gate": gate, "provider": provider, **sizes}
    out = json_path or RESULTS / f"latency-{provider}.json"
    write_json(out, "latency", settings, [asdict(row) for row in rows])
    title = f"Latency on {provider}, {repeats} rounds; ratio of medians (median of paired ratios, quartiles)"
    header = (
        "model",
        "tokens",
        "original ms",
        "rewritten ms",
        "rewritten / original",
        "fastest",
        "control",
    )
    print_table(title, header, [_cells(row) for row in rows])


def _models(
    file: Path | None,
    parts: tuple[str, ...],
    activations: tuple[str, ...],
    sizes: dict[str, Any],
    folder: Path,
) -> Iterator[tuple[str, Path]]:
    """Names and paths of the models, written one at a time."""
    if file is not None:
        yield file.name, file
        return
    for part in parts:
        for activation in activations:
            path = folder / f"{part}-{activation}.onnx"
            model = PARTS[part](Shape(activation=activation, **sizes), random_weights())
            onnx.save(model, path, save_as_external_data=True, location=f"{path.stem}.data", size_threshold=1024)
            del model
            yield f"{activation} {part}", path
            path.unlink()
            path.with_suffix(".data").unlink(missing_ok=True)


def _measure(
    name: str,
    path: Path,
    folder: Path,
    tokens: tuple[int, ...],
    options: dict[str, Any],
    *,
    repeats: int,
    provider: str,
) -> Iterator[Row]:
    # Beside the original, whose weights are then referred to; a file of the user's stays untouched.
    out = path.with_name(f"{path.stem}-heads.onnx") if path.parent == folder else folder / "heads.onnx"
    report = rewrite(path, out, **options, validate=False)
    if not report.output:
        raise click.ClickException(
            f"{path} has no MLP block to convert: run `rewrite {path} --dry-run` for the reasons"
        )
    model = onnx.load(path, load_external_data=False)
    with started({"original": path, "rewritten": out, "control": path}, provider) as processes:
        for length in tokens:
            seconds = measure(processes, feeds_of(model, length), repeats)
            yield Row(
                model=name,
                provider=provider,
                tokens=length,
                blocks=len(report.converted),
                milliseconds={key: 1e3 * float(np.median(each)) for key, each in seconds.items()},
                rewritten=ratio(seconds["rewritten"], seconds["original"]),
                control=ratio(seconds["control"], seconds["original"]),
                rounds={key: tuple(1e3 * one for one in each) for key, each in seconds.items()},
            )
    out.unlink()


def _cells(row: Row) -> tuple[str, ...]:
    times = [f"{row.milliseconds[key]:.2f}" for key in ("original", "rewritten")]
    return (
        row.model,
        str(row.tokens),
        *times,
        str(row.rewritten),
        f"{row.rewritten.of_fastest:.3f}",
        str(row.control),
    )


if __name__ == "__main__":
    main()
