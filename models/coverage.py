"""`python -m models coverage`: what the plain command does with many files, and what it and `heads` find in them.

The configuration of a model says how many MLP blocks and attention layers each of its files has. Every file that
onnxruntime loads is rewritten, run and proved as `rewrite` does it without options, and certified from both files.
"""

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import onnx

from models.cells import Job
from models.files import Truth, file_of, load, truth_of
from models.tools.common import first_line
from models.variants import Refused, get_variant
from models.widen import widen
from rewriter import certify, heads, rewrite, validate
from rewriter.errors import RewriteError
from rewriter.interpret.sublayers import Attention

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

MOST_PROCESSES = 2

FEW_TOKENS = 32
"""`--max-tokens` of the judged forms, unless a model's sequences are longer."""

_TOO_FEW = re.compile(r"raise --max-tokens from \d+ to (\d+)")
_TOO_LONG = "sequence_longer_than_max_tokens"

UNMENTIONED = "`heads` does not mention it"

WIDENED_TOLERANCE = 2.0**-8
"""Of bfloat16 files that run in float32, as a share of an output's norm: one unit of bfloat16."""


@dataclass(frozen=True)
class Outcome:
    """The result for one model file.

    Attributes:
        job: the export.
        variant: the variant, empty for the export itself.
        group: the table that lists it.
        exist: MLP blocks that the configuration defines.
        converted: blocks converted.
        wrong: blocks converted by mistake, or whose conversion does not pass the proof.
        certified: whether what was converted is certified; None where nothing was.
        proved: whether the plain command passed, its run and proof included; None where nothing was run.
        attention: attention layers that the configuration defines.
        found: the ones that `heads` finds.
        lost: the reasons of `heads` for the others.
        refused: why the file does not exist: the tool's reason.
        unrun: why the file cannot be run.
        missed: where blocks are missing, the reason of each other rejected candidate; where the plain command failed
            or nothing is certified, the first reasons.
    """

    job: Job
    variant: str
    group: str
    exist: int = 0
    converted: int = 0
    wrong: int = 0
    certified: bool | None = None
    proved: bool | None = None
    attention: int = 0
    found: int = 0
    lost: tuple[str, ...] = ()
    refused: str = ""
    unrun: str = ""
    missed: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every block was converted, none is wrong, and the plain command passed."""
        return bool(self.refused) or (self.converted == self.exist and not self.wrong and self.proved is not False)


def run_jobs(
    jobs: Sequence[Job],
    processes: int = 1,
    done: Callable[[Outcome], None] = lambda _: None,
    kept: Path | None = None,
    folder: Path | None = None,
    *,
    form: str = "",
) -> list[Outcome]:
    """The outcomes of all jobs, in their order.

    Args:
        jobs: what to run.
        processes: how many run at once.
        done: called with each outcome as it arrives.
        kept: a file with a line of JSON for each finished job, which is not run again; new ones are added to it.
        folder: keeps the model files; without it they are temporary.
        form: judge what `--form FORM` does instead of the plain command.
    """
    known = {} if kept is None else _read(kept)
    left = [job for job in jobs if job not in known]
    run = partial(run_job, folder=folder, form=form)
    for job, outcomes in zip(left, _parallel(run, left, processes) if processes > 1 else map(run, left), strict=True):
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
        job = Job(**_tuples(entry["job"]))
        found[job] = [Outcome(job, **_tuples(each)) for each in entry["outcomes"]]
    return found


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def _entry(outcome: Outcome) -> dict[str, Any]:
    """An outcome without its job and its defaults."""
    return {
        each.name: getattr(outcome, each.name)
        for each in fields(outcome)
        if each.name != "job" and getattr(outcome, each.name) != each.default
    }


def _parallel(run: Callable[[Job], list[Outcome]], jobs: Sequence[Job], processes: int) -> Iterator[list[Outcome]]:
    with ProcessPoolExecutor(min(processes, MOST_PROCESSES), get_context("spawn"), _one_thread) as pool:
        yield from pool.map(run, jobs)


def _one_thread() -> None:
    """Limit a process to one thread, since the models are tiny."""
    import warnings

    import torch

    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


def run_job(job: Job, folder: Path | None = None, form: str = "") -> list[Outcome]:
    """Judge an export and its variants, from the files in a folder or from temporary ones."""
    if folder is None:
        with tempfile.TemporaryDirectory() as scratch:
            return run_job(job, Path(scratch), form)
    outcomes = []
    for name in ("", *job.variants):
        empty = Outcome(job, name, get_variant(name).group if name else job.group)
        try:
            path, truth = file_of(folder, job, name), truth_of(job)
            outcomes.append(judge_form(path, truth, empty, form) if form else judge(path, truth, empty))
        except Refused as refusal:
            outcomes.append(replace(empty, refused=str(refusal)))
            if not name:
                break
    return outcomes


def _copies(outcome: Outcome) -> int:
    """How many times a variant holds the model."""
    return get_variant(outcome.variant).copies if outcome.variant else 1


def judge(path: Path, truth: Truth, outcome: Outcome) -> Outcome:
    """Put a file through the plain command, certify what it writes, and count blocks and attention layers."""
    copies = _copies(outcome)
    outcome = replace(outcome, exist=truth.blocks * copies, attention=truth.attention * copies)
    try:
        load(path)
    except Refused as refusal:
        outcome = replace(outcome, unrun=str(refusal))
    with tempfile.TemporaryDirectory() as scratch:
        outcome = _rewritten(path, Path(scratch, path.name), truth, outcome)
    return _indexed(path, outcome)


def judge_form(path: Path, truth: Truth, outcome: Outcome, form: str) -> Outcome:
    """Put a file through `rewrite --form FORM`, with as many tokens as it needs."""
    outcome = replace(outcome, exist=truth.blocks * _copies(outcome))
    tokens: int | None = FEW_TOKENS
    with tempfile.TemporaryDirectory() as scratch:
        for _ in range(3):  # as many as it names, and the default
            try:
                report = rewrite(path, Path(scratch, path.name), form=form, max_tokens=tokens)
            except RewriteError as error:
                return replace(outcome, proved=False, missed=(f"{type(error).__name__}: {first_line(error)}",))
            reasons = sorted({row.reason or "" for row in report.left}, key=lambda reason: "network" not in reason)
            needed = [int(found[1]) for each in reasons if (found := _TOO_FEW.search(each))]
            # The sizes of images and waveforms decide the number of tokens too.
            longer = tokens is not None and any(_TOO_LONG in each for each in report.problems)
            if not needed and not longer:
                break
            tokens = max(needed, default=None)
    converted = sum(not row.part_of for row in report.converted)
    proof = report.proof
    certified = None if proof is None or proof.certificate is None else proof.certificate.certified
    missed = (*report.problems[:2], *reasons)
    proved = None if proof is None else proof.passed
    return replace(outcome, converted=converted, certified=certified, proved=proved, missed=missed)


def _rewritten(path: Path, target: Path, truth: Truth, outcome: Outcome) -> Outcome:
    failure: tuple[str, ...] = ()
    proved = None
    if not outcome.unrun:
        try:
            report = rewrite(path, target)
            proved = None if report.proof is None else report.proof.passed
            failure = tuple(report.problems[:2])
        except RewriteError as error:
            proved, failure = False, (f"{type(error).__name__}: {first_line(error)}",)
    try:
        if outcome.unrun or proved is False:
            report = rewrite(path, target, validate=False)
        found = certify(path, target) if report.converted else None
    except RewriteError as error:
        return replace(outcome, proved=proved, missed=failure or (f"{type(error).__name__}: {first_line(error)}",))
    expected = expected_labels(truth.activation, outcome)
    converted = [row for row in report.converted if not row.part_of]
    wrong = sum(row.activation.partition("(")[0] not in expected for row in converted)
    wrong += max(0, len(converted) - outcome.exist)
    if outcome.job.dtype == "bf16" and report.converted and not agrees_widened(path, target):
        wrong = len(converted)
    certified = None if found is None else found.certificate.certified
    missed = (*failure, *(() if found is None else tuple(found.problems[:2])))
    if len(converted) < outcome.exist:
        missed += tuple(_described(row) for row in report.left) or ("no candidate is reported",)
    return replace(outcome, converted=len(converted), wrong=wrong, certified=certified, proved=proved, missed=missed)


def _indexed(path: Path, outcome: Outcome) -> Outcome:
    """Count the attention layers that `heads` finds."""
    try:
        index = heads(path)
    except RewriteError as error:
        return replace(outcome, lost=(f"{type(error).__name__}: {first_line(error)}",))
    found = sum(isinstance(each, Attention) for each in index.sublayers)
    if found == outcome.attention:
        return replace(outcome, found=found)
    reasons = (f"{miss.reason} ({miss.node})" for miss in index.missed)
    lost = tuple(each for each in reasons if "attention" in each or ".attn" in each)
    return replace(outcome, found=found, lost=lost or (UNMENTIONED,))


def agrees_widened(original: Path, rewritten: Path) -> bool:
    """Whether two bfloat16 files agree in float32; onnxruntime has no bfloat16 kernels on the CPU."""
    wide = [rewritten.with_name(f"{name}.onnx") for name in ("original", "rewritten")]
    for path, to in zip((original, rewritten), wide, strict=True):
        onnx.save(widen(onnx.load(path)), to)
    run = validate(*wide, providers="cpu").validation.providers["cpu"]
    return all(each.error <= WIDENED_TOLERANCE for each in run.compared.values())


def expected_labels(activation: str, outcome: Outcome) -> frozenset[str]:
    """The labels that a converted block may have; half precisions cannot always distinguish the two GELUs."""
    label = LABELS[activation]
    labels = {label, *(new for old, new in _renamed(outcome.variant) if old == label)}
    if outcome.job.dtype != "fp32" or outcome.group == "precision" or outcome.variant.endswith("fp16"):
        if label in ("gelu", "gelu_tanh"):
            labels |= {"gelu", "gelu_tanh"}
        if label == "quick_gelu":
            labels.add("silu")
    if label == "silu_clipped":
        labels.add("clip")  # the clipped value, where onnxruntime took QuickGelu for the activation
    return frozenset(labels)


def _renamed(variant: str) -> tuple[tuple[str, str], ...]:
    return get_variant(variant).labels if variant else ()


def _described(row: Any) -> str:
    middle = row.activation or "?"
    return f"{row.first or '?'} -> {middle} -> {row.second or '?'}: {row.reason} ({row.node})"
