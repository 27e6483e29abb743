"""`python -m models coverage`: how many of the existing MLP blocks `rewrite` finds, over many files.

The number of blocks that a configuration defines is the truth for the plan of each of its files. Every file is
converted and certified; all exports and a sample of the variants are run as well.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import onnx

from models.cells import Job
from models.entry import Entry
from models.export import export_model
from models.registry import get
from models.tools.common import random_feeds
from models.variants import Hints, Refused, get_variant, make_variant
from models.widen import widen
from rewriter import certify, rewrite
from rewriter.errors import RewriteError

LABELS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "relu2": "relu_squared",
    "quick_gelu": "quick_gelu",
    "silu_clipped": "silu_clipped",
}
"""Activation name in transformers to its label in the rewriter."""

NO_PROGRAM = "no head program"
"""Part of the reason why a block whose activation has no head program yet is left."""

MOST_PROCESSES = 2

RUN = ("gpt2-silu", "bert", "t5", "convnext", "wav2vec2-conformer")
"""Entries whose variants are run too; those of others are certified alone. All exports are run."""

WIDENED_TOLERANCE = 2.0**-8
"""Tolerance for bfloat16 files that run in float32, relative to the largest output: one unit of bfloat16."""


@dataclass(frozen=True)
class Outcome:
    """The result for one model file.

    Attributes:
        job: the export.
        variant: the variant, empty for the export itself.
        group: the table that lists it.
        exist: MLP blocks that the configuration defines.
        converted: blocks converted.
        recognised: blocks found with their activation, but left for want of a head program.
        wrong: blocks converted by mistake, or whose conversion does not pass the proof.
        certified: whether what was converted is certified; None where nothing was.
        proved: whether the proof, with its run, passed; None where nothing was run.
        refused: why the file does not exist: the tool's reason.
        missed: where blocks are missing, the reason of each other rejected candidate; where the proof failed or there
            is no certificate, the first reasons.
    """

    job: Job
    variant: str
    group: str
    exist: int = 0
    converted: int = 0
    recognised: int = 0
    wrong: int = 0
    certified: bool | None = None
    proved: bool | None = None
    refused: str = ""
    missed: tuple[str, ...] = ()

    @property
    def found(self) -> int:
        """The number of blocks converted or recognised."""
        return self.converted + self.recognised

    @property
    def complete(self) -> bool:
        """Whether every block was found and none is wrong."""
        return bool(self.refused) or (self.found == self.exist and self.wrong == 0)


def run_jobs(
    jobs: Sequence[Job],
    processes: int = 1,
    done: Callable[[Outcome], None] = lambda _: None,
    kept: Path | None = None,
) -> list[Outcome]:
    """The outcomes of all jobs, in their order.

    Args:
        jobs: what to run.
        processes: how many run at once.
        done: called with each outcome as it arrives.
        kept: a file with a line of JSON for each finished job, which is not run again; new ones are added to it.
    """
    known = {} if kept is None else _read(kept)
    left = [job for job in jobs if job not in known]
    for job, outcomes in zip(left, _parallel(left, processes) if processes > 1 else map(run_job, left), strict=True):
        known[job] = outcomes
        for outcome in outcomes:
            done(outcome)
        if kept is not None:
            with kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"job": asdict(job), "outcomes": [_entry(each) for each in outcomes]}) + "\n")
    return [outcome for job in jobs for outcome in known[job]]


def _read(kept: Path) -> dict[Job, list[Outcome]]:
    """The outcomes of finished jobs."""
    found = {}
    for line in kept.read_text(encoding="utf-8").splitlines() if kept.exists() else ():
        entry = json.loads(line)
        job = Job(**{**entry["job"], "variants": tuple(entry["job"]["variants"])})
        found[job] = [Outcome(job, **{**each, "missed": tuple(each.get("missed", ()))}) for each in entry["outcomes"]]
    return found


def _entry(outcome: Outcome) -> dict[str, Any]:
    """An outcome without its job and its defaults."""
    return {
        each.name: getattr(outcome, each.name)
        for each in fields(outcome)
        if each.name != "job" and getattr(outcome, each.name) != each.default
    }


def _parallel(jobs: Sequence[Job], processes: int) -> Iterator[list[Outcome]]:
    with ProcessPoolExecutor(min(processes, MOST_PROCESSES), get_context("spawn"), _one_thread) as pool:
        yield from pool.map(run_job, jobs)


def _one_thread() -> None:
    """Limit a process to one thread, since the models are tiny."""
    import warnings

    import torch

    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


def run_job(job: Job) -> list[Outcome]:
    """Export, make the variants, and compare what `rewrite` finds in each with the configuration."""
    entry = get(job.entry)
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "model.onnx")
        try:
            export_model(entry, source, exporter=job.exporter, opset=job.opset, dtype=job.dtype)
        except Exception as error:  # noqa: BLE001 - whatever an exporter or the check of its file raises
            return [Outcome(job, "", job.group, refused=_first_line(error))]
        outcomes = [judge(source, entry, Outcome(job, "", job.group))]
        for name in job.variants:
            variant = get_variant(name)
            target = Path(scratch, f"{name}.onnx")
            empty = Outcome(job, name, variant.group)
            try:
                make_variant(variant, source, target, hints_of(entry))
                load(target)
            except Refused as refusal:
                outcomes.append(Outcome(job, name, variant.group, refused=str(refusal)))
                continue
            outcomes.append(judge(target, entry, empty))
        return outcomes


def hints_of(entry: Entry) -> Hints:
    """What optimisers need to know: architecture, heads and width."""
    config = entry.config("tiny")
    heads = next((config[key] for key in ("num_attention_heads", "n_head", "num_heads", "heads") if key in config), 0)
    width = next((config[key] for key in ("hidden_size", "n_embd", "d_model", "dim", "width") if key in config), 0)
    return Hints(entry.name, heads if isinstance(heads, int) else 0, width)


def load(path: Path) -> None:
    """Raise `Refused` where the tool wrote a file that onnxruntime does not load."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions have no common base class
        text = _first_line(error).replace(f"{path.parent}{os.sep}", "")
        raise Refused(f"onnxruntime does not load what the tool wrote: {text}") from error


def judge(path: Path, entry: Entry, outcome: Outcome) -> Outcome:
    """Convert and prove the file, and count its blocks."""
    variant = get_variant(outcome.variant) if outcome.variant else None
    exist = entry.mlp_blocks("tiny") * (variant.copies if variant else 1)
    outcome = replace(outcome, exist=exist)
    run = outcome.job.dtype != "bf16" and (not outcome.variant or outcome.job.entry in RUN)
    rewritten = path.with_name("rewritten.onnx")
    try:
        if run:
            report = rewrite(path, rewritten, providers=("cpu",), force=True)
        else:
            report = rewrite(path, rewritten, validate=False, force=True)
        proved = None if report.proof is None else report.proof.passed
        found = certify(path, rewritten) if report.converted and proved is not False else None
    except RewriteError as error:
        return replace(outcome, missed=(f"{type(error).__name__}: {_first_line(error)}",))
    recognised = [row for row in report.left if NO_PROGRAM in (row.reason or "")]
    expected = expected_labels(entry, outcome)
    converted = [row for row in report.converted if not row.part_of]
    wrong = sum(row.activation.partition("(")[0] not in expected for row in converted)
    wrong += max(0, len(converted) + len(recognised) - exist)
    if outcome.job.dtype == "bf16" and report.converted:
        proved = agrees_widened(path, rewritten, entry)
    outcome = replace(
        outcome,
        converted=len(converted),
        recognised=len(recognised),
        wrong=len(report.converted) if proved is False else wrong,
        certified=None if found is None else found.certificate.certified,
        proved=proved,
    )
    if outcome.found == exist:
        failures = (*report.problems, *(() if found is None else found.problems))
        return replace(outcome, missed=tuple(failures[:2]))
    others = [row for row in report.left if row not in recognised]
    return replace(outcome, missed=tuple(_described(row) for row in others) or ("no candidate is reported",))


def agrees_widened(original: Path, rewritten: Path, entry: Entry) -> bool:
    """Whether two bfloat16 files agree in float32; onnxruntime has no bfloat16 kernels on the CPU."""
    import numpy as np
    import onnxruntime

    outputs = []
    for path in (original, rewritten):
        wide = path.with_name("widened.onnx")
        onnx.save(widen(onnx.load(path)), wide)
        session = onnxruntime.InferenceSession(str(wide), providers=["CPUExecutionProvider"])
        outputs.append(session.run(None, random_feeds(onnx.load(wide), hints_of(entry), seed=0)))
    return all(
        np.abs(after - before).max() <= WIDENED_TOLERANCE * np.abs(before).max()
        for before, after in zip(*outputs, strict=True)
    )


def expected_labels(entry: Entry, outcome: Outcome) -> frozenset[str]:
    """The labels that a converted block may have; half precisions cannot always distinguish the two GELUs."""
    label = LABELS[entry.activation]
    labels = {label, *(new for old, new in _renamed(outcome.variant) if old == label)}
    if outcome.job.dtype != "fp32" or outcome.group == "precision" or outcome.variant.endswith("fp16"):
        if label in ("gelu", "gelu_tanh"):
            labels |= {"gelu", "gelu_tanh"}
        if label == "quick_gelu":
            labels.add("silu")
    return frozenset(labels)


def _renamed(variant: str) -> tuple[tuple[str, str], ...]:
    return get_variant(variant).labels if variant else ()


def _described(row: Any) -> str:
    middle = row.activation or "?"
    return f"{row.first or '?'} -> {middle} -> {row.second or '?'}: {row.reason} ({row.node})"


def _first_line(error: Exception) -> str:
    """The first line of an error, without traces and paths of this machine."""
    line = (str(error).strip() or repr(error)).splitlines()[0]
    line = re.sub(r"\s*\[Caused by.*|/onnxruntime_src/\S+\s", "", line)
    return re.sub(r"\S*/(?=[\w.-]+\.onnx)", "", line)
