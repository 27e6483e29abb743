"""`python -m benchmarks.estimating`: measures runs, fits the factors of the estimate, and says how far off it is.

Writes `results/estimate.json` and `rewriter/estimate/factors.json`. A further run goes on where the results end.
`--model FILE` adds models of your own, such as exports; `--fit` only fits again. How far off the estimate is for a
model is measured with factors that were fitted without any run of that model.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from math import ceil
from pathlib import Path
from typing import Any

import click

from benchmarks.common import RESULTS, print_table, write_json
from benchmarks.estimating.child import measure
from benchmarks.estimating.fitting import Row, fitted, off
from benchmarks.estimating.subjects import Subject, subjects
from passes.plan import make_plan
from rewriter.api.estimating.counting import counts_for
from rewriter.api.run import checked_options, parted, settings_of
from rewriter.estimate.counts import Counts
from rewriter.estimate.formula import FACTORS, estimate
from rewriter.files.load import load_model

RESULT = RESULTS / "estimate.json"


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--model", "models", type=click.Path(path_type=Path, exists=True), multiple=True, help="Also this one.")
@click.option("--fit", is_flag=True, help="Measure nothing.")
@click.option("--limit", type=float, default=900.0, help="Seconds that a run may take.")
def main(*, models: tuple[Path, ...], fit: bool, limit: float) -> None:
    """Measure, fit, and print estimate and measurement side by side."""
    known = json.loads(RESULT.read_text(encoding="utf-8"))["rows"] if RESULT.exists() else []
    with tempfile.TemporaryDirectory() as folder:
        given = (Subject(path.stem, path, {"form": "local"}) for path in models)
        for subject in () if fit else chain(subjects(Path(folder)), given):
            if any((row["name"], row["keywords"]) == (subject.name, subject.keywords) for row in known):
                continue
            click.echo(f"{subject.name} {subject.keywords}", err=True)
            found = measure(subject.path, subject.keywords, limit)
            if found is not None:
                known.append({**asdict_of(subject), **found, "counts": asdict(counts_of(subject))})
                write_json(RESULT, "estimate", {}, known)
    rows = [row_of(each) for each in known]
    compared = list(left_out(rows))
    worst = {key: max(each[key] for each in compared) for key in ("cpu_off", "memory_off")}
    factors = {
        **fitted(rows),
        "off": {"cpu_seconds": rounded_up(worst["cpu_off"]), "memory_bytes": rounded_up(worst["memory_off"])},
    }
    FACTORS.write_text(json.dumps(factors, indent=2) + "\n", encoding="utf-8")
    header = ("model and options", "CPU s", "estimate", "off", "peak MB", "estimate", "off")
    print_table("Runs, and estimates by factors that were fitted without the model", header, [*map(cells, compared)])


def rounded_up(factor: float) -> float:
    """To one digit behind the point."""
    return ceil(10 * factor) / 10


def asdict_of(subject: Subject) -> dict[str, Any]:
    """What identifies a run."""
    return {"name": subject.name, "keywords": subject.keywords}


def counts_of(subject: Subject) -> Counts:
    """The counts of a run."""
    of_rewriting, of_proof = parted(subject.keywords)
    source = load_model(subject.path, mapped=True)
    plan = make_plan(source.proto, checked_options(**of_rewriting))
    return counts_for(source, plan, settings_of(of_proof))


def row_of(entry: dict[str, Any]) -> Row:
    """A row of the results."""
    return Row(entry["name"], Counts(**entry["counts"]), entry["seconds"], entry["memory_bytes"], entry["keywords"])


def left_out(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """For each run the estimate by factors that are fitted to the other models."""
    for name in dict.fromkeys(row.name for row in rows):
        factors = fitted([row for row in rows if row.name != name])
        for row in rows:
            if row.name == name:
                found = estimate(row.counts, factors={**factors, "off": {"cpu_seconds": 1.0, "memory_bytes": 1.0}})
                yield {
                    "row": row,
                    "estimate": found,
                    "cpu_off": off(row.cpu_seconds, found.cpu_seconds),
                    "memory_off": off(row.memory_bytes, found.memory_bytes),
                }


def cells(compared: dict[str, Any]) -> tuple[str, ...]:
    """One line of the table."""
    row, found = compared["row"], compared["estimate"]
    words = " ".join(str(value) if key == "form" else f"{key}={value}" for key, value in row.keywords.items())
    return (
        f"{row.name}, {words}",
        *(f"{row.cpu_seconds:.1f}", f"{found.cpu_seconds:.1f}", f"{compared['cpu_off']:.2f}"),
        *(f"{row.memory_bytes / 1e6:.0f}", f"{found.memory_bytes / 1e6:.0f}", f"{compared['memory_off']:.2f}"),
    )


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.estimating")
