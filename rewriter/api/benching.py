"""`bench`: how long models take beside the original. Nothing is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Unpack

import numpy as np
import onnx

from rewriter.api.run import Run, RunKeywords, described, environment, name_of, settings_of
from rewriter.compare.graphs import signature_differences
from rewriter.errors import ExitStatus, UsageError
from rewriter.files.load import LoadedModel, Source, load_model
from rewriter.ort.timing import Ratio, measure, ratio, started
from rewriter.proof.inputs.cases import Case, Maker
from rewriter.proof.inputs.read import load_cases
from rewriter.proof.inputs.specs import Kind
from rewriter.proof.settings import Settings, checked
from rewriter.proof.validate import Progress
from rewriter.report.report import Result

CONTROL = "control"  # the original as its own competitor
_TOKENS = 128
_MAX_PROTOBUF_BYTES = 2**31


@dataclass(frozen=True)
class TimeRow:
    """One model on one set of inputs."""

    model: str  # its path; `control` for the second process of the original.
    provider: str
    inputs: str  # size of the inputs, or the name of their case
    rounds: tuple[float, ...]  # the median in each round, in milliseconds; `milliseconds` is the median of these.
    over_original: Ratio | None  # None for the original
    load_seconds: float
    # the peak memory of loading and all runs, in 10^6 bytes; None where the system does not report it.
    peak_mb: float | None
    cpu_nodes: Sequence[str] | None  # on another provider, the nodes on the CPU; None if unknown.
    also: ClassVar = ("milliseconds",)

    @property
    def milliseconds(self) -> float:
        """The median time of one run."""
        return float(np.median(self.rounds))


@dataclass(frozen=True, repr=False)
class Benchmark(Result):
    """What `bench` measured; `options` are keywords of `rewriter.bench`, and `seconds` the time by step."""

    original: str
    others: tuple[str, ...]
    control: str
    times: tuple[TimeRow, ...]
    options: Mapping[str, Any]
    environment: Mapping[str, str]
    seconds: Mapping[str, float]

    exit_status = ExitStatus.CONVERTED

    @property
    def summary(self) -> str:
        """How long each model takes beside the original, and the control."""
        parts = [f"{name} takes {self._over(name)} times as long as {self.original}" for name in self.others]
        return f"MEASURED  {'; '.join(parts)} (control {self._over(self.control)}), in {self.seconds['total']:.1f} s"

    def _over(self, name: str) -> str:
        values = [row.over_original.paired for row in self.times if row.model == name and row.over_original]
        low, high = f"{min(values):.2f}", f"{max(values):.2f}"
        return low if low == high else f"{low} to {high}"


@described(RunKeywords, Settings)
def bench(
    original: Source,
    rewritten: Source,
    *more: Source,
    tokens: int | Sequence[int] = (),
    repeat: int = 10,
    threads: int = 0,
    progress: Progress | None = None,
    **options: Unpack[RunKeywords],
) -> Benchmark:
    """Measure models against the original: times and memory.

    Each model runs in its own process, and they take turns. The original is also its own competitor, `control`,
    whose ratio is the noise.

    Args:
        original: path of an ONNX file, or a model in memory.
        rewritten: path of the model to compare it with, or a model in memory.
        *more: further models.
        tokens: numbers of tokens of a sequence; default: 128, or what the model fixes.
        repeat: number of rounds, in which each model has one turn.
        threads: threads per operator; 0: one per core, as onnxruntime does.
        progress: called with (current activity, steps done, total steps).
        **options: listed below.

    Raises:
        UsageError: an option is invalid, or the models take different inputs.
        ModelError: a model is unreadable, malformed or unsafe.
        ProviderError: a requested execution provider is not available.
        ValidationError: a model does not run.
    """
    lengths = (tokens,) if isinstance(tokens, int) else tuple(tokens)
    for name, value, least in (*(("tokens", each, 1) for each in lengths), ("repeat", repeat, 3)):
        if value < least:
            raise UsageError(f"{name} is {value}; it must be an integer of at least {least}")
    settings, run = checked(settings_of(options)), Run(progress)
    with run.step("load", "loading"):
        sources = (original, rewritten, *more)
        loaded = [load_model(model) for model in sources]
        paths = [name_of(model) for model in sources]
        names = [each if each not in paths[:place] else f"{each} ({place})" for place, each in enumerate(paths)]
        models = dict(zip(names, loaded, strict=True))
        _check_inputs(models)
        cases = inputs_of(loaded[0].proto, settings, lengths)
        files = {name: _file(model) for name, model in models.items()}
    rows = [
        row
        for provider in settings.providers
        for row in _rows({**files, CONTROL: files[names[0]]}, provider, threads, cases, repeat, run)
    ]
    asked = {"tokens": lengths, "repeat": repeat, "threads": threads}
    asked |= {name: getattr(settings, name) for name in ("providers", "dims", "seed")}
    return Benchmark(names[0], tuple(names[1:]), CONTROL, tuple(rows), asked, environment(), run.seconds())


def _rows(
    files: Mapping[str, Path | bytes], provider: str, threads: int, cases: Sequence[Case], repeat: int, run: Run
) -> Iterator[TimeRow]:
    with run.step("measure", f"loading on {provider}"), started(files, provider, threads) as processes:
        for case in cases:
            progress = partial(run.progress, f"measuring {case.name} on {provider}")
            found = measure(processes, case.feeds, repeat, progress)
            baseline = next(iter(found.values()))
            for name, seconds in found.items():
                known = processes[name].known
                yield TimeRow(
                    model=name,
                    provider=provider,
                    inputs=case.name,
                    rounds=tuple(1e3 * each for each in seconds),
                    over_original=None if seconds is baseline else ratio(seconds, baseline),
                    load_seconds=known["load_seconds"],
                    peak_mb=None if known["peak_bytes"] is None else 1e-6 * known["peak_bytes"],
                    cpu_nodes=known["cpu_nodes"],
                )


def _check_inputs(models: Mapping[str, LoadedModel]) -> None:
    first, *others = models
    for name in others:
        differences = signature_differences(models[first].proto, models[name].proto)
        found = [text for text in differences if text.startswith("input ")]
        if found:
            raise UsageError(f"{name} (B) takes other inputs than {first} (A): {'; '.join(found)}")


def _file(model: LoadedModel) -> Path | bytes:
    if model.mapped:
        raise UsageError("the weights of a model are links of a cache; copy it with `cp -rL`, and measure the copy")
    if model.path is None and model.file_size >= _MAX_PROTOBUF_BYTES:
        raise UsageError("a model in memory of 2 GiB or more cannot be measured: save it, and give its path")
    return model.proto.SerializeToString() if model.path is None else model.path


def inputs_of(model: onnx.ModelProto, settings: Settings, tokens: Sequence[int] = (), past: int = 0) -> list[Case]:
    """The inputs of a measurement: of each number of `tokens`, or those of the file. Raises UsageError."""
    if settings.inputs is not None:
        if tokens or settings.dims:
            raise UsageError("sizes come with the inputs of a file: leave out tokens and dim")
        return list(load_cases(settings.inputs, model))
    maker = Maker(model, seed=settings.seed, dims=settings.dims)
    for asked in tokens:
        if Kind.SEQUENCE not in maker.varied:
            raise UsageError(f"tokens {asked}: no input of the model has an open dimension for it; leave tokens out")
        got = maker.sizes((1, asked, past))[1][Kind.SEQUENCE]
        if got != asked:
            raise UsageError(f"tokens {asked}: the model's inputs and tables allow {got}")
    return [maker.case((1, each, past)) for each in tokens or (_TOKENS,)]
