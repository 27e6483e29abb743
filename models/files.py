"""The files of the coverage matrix: exports and what tools make of them, kept in a folder for later runs."""

import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import click

from models.cells import Job
from models.entry import Entry, Exporter
from models.export import export_model
from models.extra import extras
from models.registry import get
from models.tools.common import first_line
from models.variants import Hints, Refused, get_variant, make_variant


@dataclass(frozen=True)
class Truth:
    """What a file contains.

    Attributes:
        activation: of its MLP blocks, in the spelling of transformers.
        blocks: number of MLP blocks.
        attention: number of attention layers.
        hints: what tools need to know about it.
    """

    activation: str
    blocks: int
    attention: int
    hints: Hints


def file_of(folder: Path, job: Job, variant: str = "") -> Path:
    """The file of an export or of one of its variants, created on first use.

    A refusal is kept too, as a text file with the tool's reason.

    Raises:
        Refused: the exporter or the tool cannot create it.
    """
    target = folder / job.name / f"{variant or 'export'}.onnx"
    refusal = target.with_suffix(".refused")
    if refusal.exists():
        raise Refused(refusal.read_text(encoding="utf-8"))
    if not target.exists():
        source = file_of(folder, job) if variant else None
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            made = Path(scratch, target.name)
            try:
                _create(made, job, variant, source)
            except Refused as error:
                refusal.write_text(str(error), encoding="utf-8")
                raise
            for path in (made.with_name(f"{made.name}.data"), made):
                if path.exists():
                    path.replace(target.with_name(path.name))
    return target


def create_files(folder: Path, jobs: Iterable[Job]) -> None:
    """Create the files of all jobs: default exports of every architecture first, then their variants, then others."""
    ordered = sorted(jobs, key=lambda job: job.opset and job.group != "exports")
    cells = [(job, "") for job in ordered if job.group == "exports" or not job.opset]
    cells += [(job, name) for job in ordered for name in ("", *job.variants)]
    for job, name in cells:
        try:
            click.echo(file_of(folder, job, name))
        except Refused as error:
            click.echo(f"{job.name} {name}: {error}")


def truth_of(job: Job) -> Truth:
    """What the files of a job contain."""
    if not job.opset:
        each = extras()[job.entry]
        return Truth(each.activation, each.blocks, each.attention, Hints(each.name))
    entry = get(job.entry)
    return Truth(entry.activation, entry.mlp_blocks("tiny"), entry.attention_layers("tiny"), hints_of(entry))


def hints_of(entry: Entry) -> Hints:
    """What optimisers need to know: architecture, heads and width."""
    config = entry.config("tiny")
    heads = next((config[key] for key in ("num_attention_heads", "n_head", "num_heads", "heads") if key in config), 0)
    width = next((config[key] for key in ("hidden_size", "n_embd", "d_model", "dim", "width") if key in config), 0)
    return Hints(entry.name, heads if isinstance(heads, int) else 0, width)


def _create(path: Path, job: Job, variant: str, source: Path | None) -> None:
    if source is not None:
        make_variant(get_variant(variant), source, path, truth_of(job).hints)
        load(path)
        return
    try:
        if job.opset:
            exporter = cast("Exporter", job.exporter)
            export_model(get(job.entry), path, exporter=exporter, opset=job.opset, dtype=job.dtype)
        else:
            extras()[job.entry].create(path)
    except Exception as error:  # exporters, and the check of their files, raise anything
        raise Refused(first_line(error)) from error


def load(path: Path) -> None:
    """Load a file in onnxruntime.

    Raises:
        Refused: it does not load.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions have no common base class
        text = first_line(error).replace(f"{path.parent}{os.sep}", "")
        raise Refused(f"onnxruntime does not load it: {text}") from error
