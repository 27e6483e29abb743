"""`python -m benchmarks.latency`: time of a rewritten model over that of the original, on onnxruntime.

Original, rewritten and a second session of the original run interleaved in one process (`benchmarks.common`); the
second session's ratio is the noise. Writes a table and a JSON file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
from numpy.typing import NDArray

from benchmarks.common import RESULTS, Ratio, interleaved, print_table, ratio, write_json
from benchmarks.decoder import ACTIVATIONS, GATED, Shape, decoder, mlp, random_weights
from rewriter.api import rewrite
from rewriter.files.load import load_model
from rewriter.ort.sessions import Session, open_session
from rewriter.proof.inputs.generate import make_cases

PARTS = {"model": decoder, "mlp": mlp}


@dataclass(frozen=True)
class Row:
    """One model at one length.

    Attributes:
        blocks: number of converted MLP blocks.
        milliseconds: median time of `original`, `rewritten` and `control`.
        rewritten: ratio of the rewritten model to the original.
        control: ratio of a second session of the original to the first, which is the noise.
        max_difference: largest absolute difference of the outputs, in units of the output.
        max_output: largest absolute output of the original.
        seconds: every measurement.
    """

    model: str
    provider: str
    tokens: int
    blocks: int
    milliseconds: dict[str, float]
    rewritten: Ratio
    control: Ratio
    max_difference: float
    max_output: float
    seconds: dict[str, list[float]]


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
@click.option("--repeats", type=click.IntRange(min=3), default=30, help="Rounds per row.")
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
    **sizes: int,
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
        "max difference",
    )
    print_table(title, header, [_cells(row) for row in rows])


def _models(
    file: Path | None,
    parts: tuple[str, ...],
    activations: tuple[str, ...],
    sizes: dict[str, int],
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
    if report.output is None:
        raise click.ClickException(
            f"{path} has no MLP block to convert: run `rewrite {path} --dry-run` for the reasons"
        )
    sessions = {
        "original": open_session(path, provider, spin=True),
        "rewritten": open_session(out, provider, spin=True),
        "control": open_session(path, provider, spin=True),
    }
    proto = load_model(path).proto
    for length in tokens:
        feeds = make_cases(proto, dims=_dims(proto, length))[0].feeds
        yield _row(name, sessions, feeds, length, len(report.converted), repeats, provider)
    out.unlink()


def _dims(proto: onnx.ModelProto, length: int) -> dict[str, int]:
    """Sizes of symbolic dimensions: one row and `length` tokens; `make_cases` chooses the others."""
    dims = [dim.dim_param for value in proto.graph.input for dim in value.type.tensor_type.shape.dim if dim.dim_param]
    wanted = {name: 1 for name in dims if "batch" in name}
    return wanted | {name: length for name in dims if "seq" in name and "past" not in name}


def _row(
    name: str,
    sessions: dict[str, Session],
    feeds: Any,
    length: int,
    blocks: int,
    repeats: int,
    provider: str,
) -> Row:
    expected, actual = sessions["original"].run(feeds), sessions["rewritten"].run(feeds)
    seconds = interleaved({key: _bind(session, feeds) for key, session in sessions.items()}, repeats=repeats)
    return Row(
        model=name,
        provider=provider,
        tokens=length,
        blocks=blocks,
        milliseconds={key: 1e3 * float(np.median(times)) for key, times in seconds.items()},
        rewritten=ratio(seconds["rewritten"], seconds["original"]),
        control=ratio(seconds["control"], seconds["original"]),
        max_difference=max(_largest(expected[key] - actual[key]) for key in expected),
        max_output=max(_largest(values) for values in expected.values()),
        seconds=seconds,
    )


def _bind(session: Session, feeds: Any) -> Any:
    return lambda: session.run(feeds)


def _largest(values: NDArray[Any]) -> float:
    return float(np.abs(values).max()) if values.size else 0.0


def _cells(row: Row) -> tuple[str, ...]:
    times = [f"{row.milliseconds[key]:.2f}" for key in ("original", "rewritten")]
    return (
        row.model,
        str(row.tokens),
        *times,
        str(row.rewritten),
        f"{row.rewritten.of_fastest:.3f}",
        str(row.control),
        f"{row.max_difference:.1e}",
    )


if __name__ == "__main__":
    main()
