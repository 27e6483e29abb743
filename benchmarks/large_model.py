"""`python -m benchmarks.large_model`: time and peak memory of rewriting a model with gigabytes of weights.

The model is written to a temporary directory; each task runs in a process of its own (`benchmarks.child`), without
validation. Rewriting beside the original refers to its weights; rewriting into another directory streams them there.
`--prove` measures the proof instead, which never loads a model of this size as a whole. Writes a table and a JSON file.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx

from benchmarks.child import measure
from benchmarks.common import RESULTS, print_table, write_json
from benchmarks.decoder import ACTIVATIONS, GATED, Shape, WeightSource, decoder

_INLINE = 1024
_ALIGNED = 4096
_CHUNK = 16 * 2**20
_STRIPE = 2**18


class _ExternalWeights:
    """A weight source that writes large weights to a data file and keeps small ones inline."""

    def __init__(self, location: str) -> None:
        self.size = 0
        self._location = location
        self._generator = np.random.default_rng(0)

    def source(self, name: str, dims: tuple[int, ...], std: float) -> onnx.TensorProto:
        count = int(np.prod(dims))
        if count <= _INLINE:
            values = self._generator.standard_normal(dims, np.float32) * np.float32(std) + np.float32(std == 0.0)
            return onnx.numpy_helper.from_array(values, name)
        tensor = onnx.TensorProto(name=name, data_type=onnx.TensorProto.FLOAT, dims=dims)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        entries = {"location": self._location, "offset": str(self.size), "length": str(4 * count)}
        for key, value in entries.items():
            tensor.external_data.add(key=key, value=value)
        self.size += -(-4 * count // _ALIGNED) * _ALIGNED
        return tensor


def make_model(folder: Path, shape: Shape, *, sparse: bool) -> tuple[Path, int]:
    """Write `model.onnx` and `model.data` to `folder`.

    Args:
        folder: an existing directory.
        shape: sizes of the decoder.
        sparse: write a stripe of weights in each 16 MB and leave a hole of zeros after it, to save disk space.

    Returns:
        The model's path and the size of the data file in bytes.
    """
    external = _ExternalWeights("model.data")
    source: WeightSource = external.source
    onnx.save(decoder(shape, source), folder / "model.onnx")
    generator = np.random.default_rng(0)
    with (folder / "model.data").open("wb") as data:
        data.truncate(external.size)
        block = (generator.standard_normal(_CHUNK // 4, np.float32) * np.float32(0.02)).tobytes()
        for start in range(0, external.size, _CHUNK):
            data.seek(start)
            data.write(block[: min(external.size - start, _STRIPE if sparse else _CHUNK)])
        data.flush()
        os.fsync(data.fileno())
    return folder / "model.onnx", external.size


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--hidden", type=click.IntRange(min=8), help="Neurons per block.  [default: 4 times the width]")
@click.option("--layers", type=click.IntRange(min=1), default=20)
@click.option("--width", type=click.IntRange(min=8), default=2048)
@click.option("--heads", type=click.IntRange(min=1), default=16)
@click.option("--vocabulary", type=click.IntRange(min=8), default=8192)
@click.option("--activation", type=click.Choice((*ACTIVATIONS, *GATED)), default="silu")
@click.option(
    "--dense", is_flag=True, help="Write every weight: needs the disk twice, and times real reads and writes."
)
@click.option("--single-file", is_flag=True, help="Write the weights into the model file (below 2 GiB).")
@click.option("--prove", is_flag=True, help="Measure rewriting with its proof, once, and nothing else.")
@click.option("--repeats", type=click.IntRange(min=1), default=5, help="Processes per task; weights are streamed once.")
@click.option("--folder", type=click.Path(path_type=Path, exists=True), help="Where to make the temporary directory.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Where to write the numbers.")
def main(
    *,
    hidden: int | None,
    dense: bool,
    single_file: bool,
    prove: bool,
    repeats: int,
    activation: str,
    folder: Path | None,
    json_path: Path | None,
    **sizes: Any,
) -> None:
    """Measure time and peak memory of planning and rewriting a model with external data (4 GB by default)."""
    shape = Shape(hidden=hidden or 4 * sizes["width"], activation=activation, **sizes)
    with tempfile.TemporaryDirectory(prefix="attnonly-large-", dir=folder) as made:
        source, other = Path(made) / "source", Path(made) / "other"
        source.mkdir()
        other.mkdir()
        click.echo("making the model", err=True)
        model, data_bytes = make_model(source, shape, sparse=not dense)
        if single_file:
            onnx.save(onnx.load(model), model)
            (source / "model.data").unlink()
        beside, apart = source / "heads.onnx", other / "heads.onnx"
        tasks: list[tuple[str, int, str, Path | None]] = [
            ("import only", repeats, "import", None),
            ("plan only (--dry-run)", repeats, "plan", None),
            ("rewrite, same directory", repeats, "rewrite", beside),
            ("rewrite, other directory", 1, "rewrite", apart),
        ]
        tasks = [("rewrite and prove, same directory", 1, "prove", beside)] if prove else tasks
        rows = [_repeated(name, count, task, model, out) for name, count, task, out in tasks]
        model_bytes = model.stat().st_size
    settings = {
        **sizes,
        "hidden": shape.hidden,
        "activation": activation,
        "sparse": not dense,
        "model_bytes": model_bytes,
        "data_bytes": data_bytes,
    }
    default = RESULTS / ("large-model-proof.json" if prove else "large-model.json")
    write_json(json_path or default, "large_model", settings, rows)
    kind = ("dense" if dense else "sparse") + (", in the model file" if single_file else "")
    proof = "proved" if prove else "no validation"
    title = f"{data_bytes / 1e9:.2f} GB of weights ({kind}), {shape.layers} blocks, {proof}"
    header = ("task", "seconds", "slowest", "import s", "process s", "peak MB", "of it imports MB")
    print_table(title, header, [_cells(row) for row in rows])


def _repeated(name: str, repeats: int, task: str, model: Path, out: Path | None) -> dict[str, Any]:
    """Medians over processes, the largest peak memory, and every run."""
    click.echo(name, err=True)
    runs = []
    for _ in range(repeats):
        runs.append(measure(task, model, out))
        if out is not None:
            out.unlink()
    medians = {
        key: float(np.median([run[key] for run in runs])) for key in ("seconds", "seconds_import", "seconds_process")
    }
    peaks = {key: max(run[key] for run in runs) for key in ("peak_mb", "peak_mb_import")}
    return {"task": name, **medians, **peaks, "slowest": max(run["seconds"] for run in runs), "runs": runs}


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    seconds = [f"{row[key]:.3f}" for key in ("seconds", "slowest", "seconds_import", "seconds_process")]
    return (row["task"], *seconds, f"{row['peak_mb']:.0f}", f"{row['peak_mb_import']:.0f}")


if __name__ == "__main__":
    main()
