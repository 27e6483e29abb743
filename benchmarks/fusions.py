"""What other tools make of exports, judged by values: `python -m benchmarks.fusions FOLDER [-o docs/comparing.md]`.

Each entry of `models.registry` is exported by one of the two exporters in turn; each tool changes the export, and the
result is compared with it. Pairs are exports of the same weights by both exporters. Files are kept in FOLDER, which may
be that of `python -m models coverage`, and results in a file of one line each: what is in it is not compared again.
"""

import importlib
import itertools
import json
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import onnx

from models.cells import QUICK, Job
from models.entry import DEFAULT_OPSETS, Exporter
from models.files import file_of, hints_of, load
from models.registry import ENTRIES, get
from models.tools.common import Hints, Refused
from models.variants import Variant, make_variant
from rewriter.compare import renamed
from rewriter.errors import RewriteError
from rewriter.files.load import LoadedModel, load_model
from rewriter.proof.values.compare import prove
from rewriter.text import one_line

ROOT = Path(__file__).resolve().parents[1]
_MARKED = re.compile(r"(<!-- made by python -m benchmarks.fusions -->\n).*?(<!-- end -->)", re.DOTALL)
TOOLS = {
    "ort-basic": "onnxruntime, basic",
    "ort-extended": "onnxruntime, extended",
    "ort-all": "onnxruntime, all",
    "ort-transformers-only": "onnxruntime, transformers optimizer",
    "ort-transformers": "the same behind basic",
    "onnxslim": "onnxslim",
    "onnxsim": "onnxsim",
    "onnxscript": "onnxscript",
    "onnxoptimizer": "onnxoptimizer",
    "opset-21": "onnx, opset 21",
    "opset-24": "onnx, opset 24",
}
"""Variant to its name in the table."""
PAIR = "TorchScript, against dynamo"
_REASONS = 12


def _by_onnxscript(source: Path, target: Path, _: Hints) -> None:
    from onnxscript import optimizer

    onnx.save(optimizer.optimize(onnx.load(source)), target)


def _by_onnxoptimizer(source: Path, target: Path, _: Hints) -> None:
    onnxoptimizer = importlib.import_module("onnxoptimizer")  # untyped

    onnx.save(onnxoptimizer.optimize(onnx.load(source)), target)


_OTHERS = {
    "onnxscript": Variant("onnxscript", "", _by_onnxscript, ("onnxscript",)),
    "onnxoptimizer": Variant("onnxoptimizer", "", _by_onnxoptimizer, ("onnxoptimizer",)),
}
"""Tools that the coverage matrix does not have."""


class Cell(NamedTuple):
    """An export, and the variant or the other export that is compared with it."""

    export: Job
    other: str | Job

    @property
    def tool(self) -> str:
        """The row of the table."""
        return TOOLS[self.other] if isinstance(self.other, str) else PAIR

    @property
    def key(self) -> str:
        """The name of the comparison in the results."""
        return f"{self.export.name} {self.other if isinstance(self.other, str) else self.other.name}"


def cells(*, quick: bool) -> Iterator[Cell]:
    """Everything that is compared; of three entries if `quick`."""
    entries = [each for each in ENTRIES if "tiny" in each.sizes and (not quick or each.name in QUICK)]
    for number, entry in enumerate(entries):
        exporter = entry.exporters[number % len(entry.exporters)]
        yield from (Cell(_export(entry.name, exporter), tool) for tool in TOOLS)
    for entry in entries:
        if len(entry.exporters) > 1:
            theirs = _export(entry.name, "dynamo")
            yield from (Cell(theirs, _export(entry.name, "torchscript", opset)) for opset in (None, 13))


def _export(entry: str, exporter: Exporter, opset: int | None = None) -> Job:
    return Job(entry, exporter, opset or DEFAULT_OPSETS[exporter], "fp32", "exports")


def file_of_other(folder: Path, cell: Cell) -> Path:
    """The file that is compared with the export. Raises Refused where a tool does not write it."""
    job, other = cell
    if isinstance(other, Job):
        return file_of(folder, other)
    if other not in _OTHERS:
        return file_of(folder, job, other)
    target = folder / job.name / f"{other}.onnx"
    if not target.exists():
        made = make_variant(_OTHERS[other], file_of(folder, job), target.with_suffix(".part"), hints_of(get(job.entry)))
        load(made)
        made.replace(target)
    return target


def judged(a: LoadedModel, b: LoadedModel) -> dict[str, Any]:
    """What the values of two models say, as a row of the results."""
    found = prove(a, renamed(a, b, _by_position(a.proto.graph, b.proto.graph)))
    first = found.departure.first if found.departure is not None else None
    return {
        "same": found.certified,
        "bits": found.bits,
        "folded": len(found.folded),
        "reason": one_line("; ".join([*(each.text for each in found.refusals), *([first] if first else [])]), 240),
        "seconds": round(found.seconds, 2),
    }


def _by_position(a: onnx.GraphProto, b: onnx.GraphProto) -> dict[str, str]:
    """Inputs and outputs that exporters call otherwise, where there are as many."""
    names: dict[str, str] = {}
    for ours, theirs in ((a.input, b.input), (a.output, b.output)):
        if len(ours) == len(theirs) and {each.name for each in ours} != {each.name for each in theirs}:
            names |= {x.name: y.name for x, y in zip(ours, theirs, strict=True) if x.name != y.name}
    return names


def row_of(folder: Path, cell: Cell) -> dict[str, Any]:
    """One line of the results: a verdict, or why there is no file."""
    row: dict[str, Any] = {"key": cell.key, "tool": cell.tool}
    try:
        files = file_of(folder, cell.export), file_of_other(folder, cell)
    except Refused as error:
        return row | {"refused": one_line(str(error), 160)}
    try:
        return row | judged(*map(load_model, files))
    except RewriteError as error:
        return row | {"same": False, "folded": 0, "reason": one_line(str(error), 240)}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each tool: its files, how many are the same, and how."""
    lines = [
        "| tool | files | same | with constants folded in float32 | undecided |",
        "| --- | --- | --- | --- | --- |",
    ]
    for tool in (*TOOLS.values(), PAIR):
        found = [row for row in rows if row["tool"] == tool and "refused" not in row]
        same = [row for row in found if row["same"]]
        if found:
            folds = sum(row["folded"] > 0 for row in same)
            lines.append(f"| {tool} | {len(found)} | {len(same)} | {folds} | {len(found) - len(same)} |")
    return "\n".join(lines)


def reasons(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What is undecided, for each tool, the most frequent reasons first; then what tools refused."""
    for tool, group in itertools.groupby(sorted(rows, key=lambda row: row["tool"]), lambda row: row["tool"]):
        listed = list(group)
        undecided = [row for row in listed if "refused" not in row and not row["same"]]
        for row in undecided[:_REASONS]:
            yield f"{tool}: {row['key']}: {row['reason']}"
        if len(undecided) > _REASONS:
            yield f"{tool}: and {len(undecided) - _REASONS} more"
        for reason, count in Counter(row["refused"] for row in listed if "refused" in row).most_common(3):
            yield f"{tool}: refused {count} times: {reason}"


def read(results: Path) -> list[dict[str, Any]]:
    """The rows so far; a line that was cut short is left out."""
    found = []
    for line in results.read_text(encoding="utf-8").splitlines() if results.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--quick", is_flag=True, help="Three entries, some forty comparisons.")
@click.option("--results", type=click.Path(path_type=Path), default=ROOT / "benchmarks/results/fusions.jsonl")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The page that gets the table.")
def main(folder: Path, quick: bool, results: Path, output: Path | None) -> None:
    """Compare what other tools and exporters make of the entries in FOLDER with the exports."""
    warnings.simplefilter("ignore")
    wanted = list(cells(quick=quick))
    done = {row["key"]: row for row in read(results)}
    results.write_text("".join(f"{json.dumps(row)}\n" for row in done.values()), encoding="utf-8")
    with results.open("a", encoding="utf-8") as file:
        for cell in wanted:
            if cell.key not in done:
                row = done[cell.key] = row_of(folder, cell)
                file.write(f"{json.dumps(row)}\n")
                file.flush()
                said = "same" if row.get("same") else row.get("reason") or f"refused: {row.get('refused')}"
                click.echo(f"{cell.key}: {said}", err=True)
    rows = [done[cell.key] for cell in wanted]
    click.echo("\n".join([table(rows), "", *reasons(rows)]))
    if output is not None:
        text = output.read_text(encoding="utf-8")
        output.write_text(_MARKED.sub(lambda marks: f"{marks[1]}{table(rows)}\n{marks[2]}", text), encoding="utf-8")


if __name__ == "__main__":
    main()
