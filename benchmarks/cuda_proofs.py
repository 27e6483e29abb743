"""`python -m benchmarks.cuda_proofs`: the example models rewritten and proved on an NVIDIA GPU, in every form and type.

Each model of `models/` in each form in float32, and in the forms that keep the model's type in float16 and bfloat16;
float32 without TF32. Beside the verdict stands how far the outputs are from the original's, what rounding moves in the
original itself, and the nodes that ran on the CPU though those of the original did not. Without CUDA it says so in one
line and exits with 2. `--on cpu` runs the same table on the CPU, to test this file.
"""

import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import onnx

from benchmarks.common import RESULTS, ROOT, demand, gpu_name, print_table, write_json
from models.widen import retyped
from passes.forms import FORMS
from rewriter import rewrite
from rewriter.errors import RewriteError
from rewriter.text import one_line

_TYPES = {
    "float32": onnx.TensorProto.FLOAT,
    "float16": onnx.TensorProto.FLOAT16,
    "bfloat16": onnx.TensorProto.BFLOAT16,
}
_KEEP_TYPE = ("local", "compact")


@dataclass(frozen=True)
class Row:
    """One model in one form and type.

    Attributes:
        blocks: MLP blocks converted and found.
        certified: whether it is proved for every input.
        passed: whether the run agrees as well; None if the model does not run.
        error: largest ||B - A|| / ||A|| of an output.
        rounding: what rounding moves in the original there, in the same unit.
        cpu_nodes: nodes on the CPU; those of the original are not counted.
        reason: why it did not pass.
    """

    model: str
    type: str
    form: str
    blocks: tuple[int, int]
    certified: bool
    passed: bool | None
    error: float | None
    rounding: float | None
    cpu_nodes: tuple[str, ...]
    seconds: float
    reason: str


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--on", type=click.Choice(("cuda", "cpu")), default="cuda", help="cpu: only to test this command.")
@click.option("--only", metavar="NAME", multiple=True, help="Only models of this name (repeatable).")
@click.option("--type", "types", type=click.Choice(tuple(_TYPES)), multiple=True, default=tuple(_TYPES))
@click.option("--form", "forms", type=click.Choice(tuple(FORMS)), multiple=True, default=tuple(FORMS))
@click.option("--minutes", type=click.FloatRange(min=0.0, min_open=True), default=4.0, help="Begin no row after that.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), default=RESULTS / "cuda-proofs.json")
def main(
    *, on: str, only: tuple[str, ...], types: tuple[str, ...], forms: tuple[str, ...], minutes: float, json_path: Path
) -> None:
    """Rewrite and prove every example model on a GPU."""
    demand(on, "benchmarks.cuda_proofs")
    until = time.monotonic() + 60.0 * minutes
    found: list[Row] = []
    for name, kind, form, model in _subjects(only, types, forms):
        if time.monotonic() > until:
            click.echo(f"{name} {kind} {form}: skipped, {minutes:g} minutes are over", err=True)
            continue
        found.append(_row(name, kind, form, model, on))
        row = found[-1]
        click.echo(f"{name} {kind} {form}: {'passed' if row.passed else row.reason or 'failed'}", err=True)
    write_json(json_path, "cuda-proofs", {"on": on, "device": gpu_name(on)}, [asdict(row) for row in found])
    header = ("model", "type", "form", "blocks", "certified", "run", "error", "rounding", "on the CPU", "s")
    print_table(f"Proved on {on}", header, [_cells(row) for row in found])


def _subjects(
    only: Sequence[str], types: Sequence[str], forms: Sequence[str]
) -> Iterator[tuple[str, str, str, onnx.ModelProto]]:
    for path in (*sorted((ROOT / "models").glob("*.onnx")), *sorted((ROOT / "models" / "trained").glob("*.onnx"))):
        if only and path.stem not in only:
            continue
        for kind in types:
            model = retyped(onnx.load(path), onnx.TensorProto.FLOAT, _TYPES[kind])
            for form in forms:
                if kind == "float32" or form in _KEEP_TYPE:
                    yield path.stem, kind, form, model


def _row(name: str, kind: str, form: str, model: onnx.ModelProto, on: str) -> Row:
    start = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory(prefix="attnonly-cuda-") as folder:
            original = Path(folder) / "original.onnx"
            onnx.save(model, original)
            report = rewrite(original, Path(folder) / "heads.onnx", form=form, providers=[on])
    except RewriteError as error:
        seconds = time.perf_counter() - start
        return Row(name, kind, form, (0, 0), False, None, None, None, (), seconds, one_line(error, 200))
    seconds, proof = time.perf_counter() - start, report.proof
    blocks = (len(report.converted), len(report.blocks))
    if proof is None:
        return Row(name, kind, form, blocks, False, None, None, None, (), seconds, "no block was converted")
    run = proof.providers.get(on)
    worst = max(run.compared.values(), key=lambda each: each.error, default=None) if run else None
    return Row(
        *(name, kind, form, blocks, proof.certified, proof.passed),
        worst.error if worst and math.isfinite(worst.error) else None,
        worst.rounding if worst else None,
        run.cpu_nodes if run else (),
        seconds,
        one_line("; ".join(proof.problems), 300),
    )


def _cells(row: Row) -> tuple[str, ...]:
    numbers = ["-" if each is None else f"{each:.2g}" for each in (row.error, row.rounding)]
    verdict = "-" if row.passed is None else "passed" if row.passed else "FAILED"
    certified = "yes" if row.certified else "no"
    left = str(len(row.cpu_nodes))
    return (
        row.model,
        row.type,
        row.form,
        "{} of {}".format(*row.blocks),
        certified,
        verdict,
        *numbers,
        left,
        f"{row.seconds:.1f}",
    )


if __name__ == "__main__":
    main()
