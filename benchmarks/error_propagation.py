"""`python -m benchmarks.error_propagation`: how the error of each form grows through 1 to 48 layers.

It writes a JSON file, a plot and a part of docs/programs.md. The sources say of such errors: "I have not tested how
such errors propagate through multiple layers." Here they are measured: for one decoder (`benchmarks.decoder`) per
activation, the residual stream after every layer, in float32, is compared with a float64 evaluation of the original.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
from numpy.typing import NDArray

from benchmarks.common import RESULTS, ROOT, environment, print_table, write_json
from benchmarks.decoder import ACTIVATIONS, Shape, decoder, random_weights
from benchmarks.figures import Curve, Panel, drawing
from passes.forms import FORMS
from rewriter import rewrite
from rewriter.graph.extract import with_outputs
from rewriter.graph.view import all_views
from rewriter.ort.sessions import open_session
from rewriter.proof.reference import open_reference

_FORMS = tuple(name for name in FORMS if name != "whole")
"""Those whose residual stream has the rows of the original's; form `whole` has bias tokens in it."""

Values = NDArray[Any]

ORIGINAL = "original"
_SHOWN = (1, 2, 4, 8, 16, 32, 48)
_TABLED = (1, 8, 48)
_DOCS = ROOT / "docs"
PAGE = _DOCS / "programs.md"
_MARKED = re.compile(r"(<!-- made by python -m benchmarks.error_propagation -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Row:
    """One form of one model after one layer.

    Attributes:
        largest: largest absolute error of the residual stream, over its largest value.
        typical: root mean square error, over the root mean square of the stream.
    """

    activation: str
    form: str
    layer: int
    largest: float
    typical: float


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--layers", type=click.IntRange(min=1), default=48)
@click.option("--tokens", type=click.IntRange(min=1), default=12, help="Length of the sequence.")
@click.option("--sequences", type=click.IntRange(min=1), default=4)
@click.option("--width", type=click.IntRange(min=8), default=32)
@click.option("--hidden", type=click.IntRange(min=8), default=64)
@click.option(
    "--activation", "activations", type=click.Choice(tuple(ACTIVATIONS)), multiple=True, default=("silu", "gelu")
)
@click.option("--form", "forms", type=click.Choice(_FORMS), multiple=True, default=_FORMS)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Directory; default: the repository.")
def main(
    layers: int,
    tokens: int,
    sequences: int,
    width: int,
    hidden: int,
    activations: tuple[str, ...],
    forms: tuple[str, ...],
    out: Path | None,
) -> None:
    """Measure how rounding and program errors propagate through the layers of a decoder, for each form."""
    shape = Shape(layers=layers, width=width, hidden=hidden, heads=4, vocabulary=64, positions=max(64, tokens))
    ids = np.random.default_rng(1).integers(0, 64, (sequences, tokens))
    rows: list[Row] = []
    for activation in activations:
        rows += depth_errors(Shape(**{**vars(shape), "activation": activation}), ids, forms)
    settings = {"layers": layers, "tokens": tokens, "sequences": sequences, "width": width, "hidden": hidden}
    results, docs = (RESULTS, _DOCS) if out is None else (out, out)
    write_json(results / "error-propagation.json", "error propagation", settings, [asdict(row) for row in rows])
    (docs / "figures").mkdir(parents=True, exist_ok=True)
    (docs / "figures" / "error-propagation.svg").write_text(_depth_plot(rows, layers), encoding="utf-8")
    if out is None:
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(
            _MARKED.sub(lambda found: f"{found[1]}{_part(settings, rows)}{found[2]}", text), encoding="utf-8"
        )
    else:
        (out / "error-propagation.md").write_text(_part(settings, rows), encoding="utf-8")
    header, cells = _table(rows)
    print_table("Largest error of the residual stream, over its largest value", header, cells)


def depth_errors(shape: Shape, ids: Values, forms: Sequence[str]) -> list[Row]:
    """The errors of the original and of each form after every layer."""
    model = decoder(shape, random_weights())
    streams = [f"/h.{layer}/mlp/residual/output" for layer in range(shape.layers)]
    feeds = {"input_ids": ids}
    truth = open_reference(_tapped(model, streams)).run(feeds)
    rows = []
    for form in (ORIGINAL, *forms):
        click.echo(f"{shape.activation}, {form}", err=True)
        built = model if form == ORIGINAL else _built(model, form, ids.shape[1])
        values = open_session(_tapped(built, streams), "cpu").run(feeds)
        for number, name in enumerate(streams, start=1):
            largest, typical = relative_errors(values[name], truth[name])
            rows.append(Row(shape.activation, form, number, largest, typical))
    return rows


def relative_errors(values: Values, truth: Values) -> tuple[float, float]:
    """Largest error over the largest value, and root mean square error over the root mean square."""
    error = values.astype(np.float64) - truth
    largest = float(np.abs(error).max() / np.abs(truth).max())
    return largest, float(np.sqrt(np.mean(error**2) / np.mean(truth**2)))


def _built(model: onnx.ModelProto, form: str, tokens: int) -> onnx.ModelProto:
    report = rewrite(model, form=form, validate=False, max_tokens=tokens)
    if not report or report.left:
        raise click.ClickException(f"form {form}: {[row.reason for row in report.left]}")
    return report.rewritten


def _tapped(model: onnx.ModelProto, names: list[str]) -> onnx.ModelProto:
    return with_outputs(model, all_views(model)[0], names)


# -- what is written ---------------------------------------------------------------------------------------------


def _depth_plot(rows: Sequence[Row], layers: int) -> str:
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        found.setdefault(row.activation, {}).setdefault(row.form, []).append((row.layer, row.largest))
    largest = [row.largest for row in rows]
    panels = [
        Panel(
            f"{activation}: largest error over largest value",
            tuple(
                Curve(points[:, 0], points[:, 1], form, dashed=place % 2 == 1)
                for place, (form, points) in enumerate((form, np.array(points)) for form, points in forms.items())
            ),
            low=min(largest),
            high=max(largest),
            logarithmic="xy",
            labels=("layers", ""),
            ticks=tuple(layer for layer in _SHOWN if layer <= layers),
        )
        for activation, forms in found.items()
    ]
    return drawing(panels, "Error of the residual stream, float32 against float64")


def _table(rows: Sequence[Row]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    shown = [layer for layer in _TABLED if any(row.layer == layer for row in rows)]
    found: dict[tuple[str, str], dict[int, float]] = {}
    for row in rows:
        found.setdefault((row.activation, row.form), {})[row.layer] = row.largest
    cells = [
        (activation, form, *(f"{errors[layer]:.1e}" for layer in shown), f"{_growth(errors):.2f}")
        for (activation, form), errors in found.items()
    ]
    return ("activation", "form", *(f"layer {layer}" for layer in shown), "growth"), cells


def _growth(errors: Mapping[int, float]) -> float:
    """The exponent p of layers^p that fits the errors best."""
    if len(errors) < 2:
        return 0.0
    return float(np.polyfit(np.log(list(errors)), np.log(list(errors.values())), 1)[0])


def _markdown(header: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _part(settings: Mapping[str, int], rows: Sequence[Row]) -> str:
    where = environment()
    base = {(row.activation, row.layer): row.largest for row in rows if row.form == ORIGINAL}
    ratios = {row: row.largest / base[row.activation, row.layer] for row in rows if row.form != ORIGINAL}
    worst = max(ratios, key=lambda row: ratios[row])
    return _TEXT.format(
        **settings,
        table=_markdown(*_table(rows)),
        worst=f"{ratios[worst]:.2f} (form {worst.form}, {worst.activation}, after layer {worst.layer})",
        onnxruntime=where.get("onnxruntime"),
        date=where["date"],
    )


_TEXT = """\
The post that this project builds on says of the errors of its construction: "I have not tested how such errors
propagate through multiple layers." Here a decoder with {layers} layers, width {width}, {hidden} neurons per MLP and
random weights reads {sequences} sequences of {tokens} tokens. The residual stream is read after every layer, in
float32, and compared with a float64 evaluation of the *original*: the largest error over the largest value of the
stream. The rows `original` are the model before rewriting. *growth* is the exponent p of the best fit layers^p.

{table}

The largest ratio of a form's error to the original's at the same layer is {worst}.
Measured on {date} with onnxruntime {onnxruntime} on a CPU by `python -m benchmarks.error_propagation`; all
numbers are in `benchmarks/results/error-propagation.json`.

![Error of the residual stream after each layer](figures/error-propagation.svg)
"""

if __name__ == "__main__":
    main()
