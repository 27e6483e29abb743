"""`bench`: how fast models run beside the original. Nothing is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rewriter.api.run import Run, name_of, silent
from rewriter.api.timing.bench_inputs import Inputs, inputs_of
from rewriter.compare.signature import signature_differences
from rewriter.errors import UsageError
from rewriter.files.load import LoadedModel, Source, load_model
from rewriter.options import build, values_of
from rewriter.ort.providers import chosen_providers
from rewriter.proof.inputs.given import Inputs as GivenInputs
from rewriter.proof.inputs.given import as_given
from rewriter.proof.validate import Progress
from rewriter.report.benchmark import Benchmark, KindRow, ModelRow, TimeRow
from rewriter.report.environment import environment
from rewriter.timing.options import BenchOptions
from rewriter.timing.profile import kind_times, nodes_of
from rewriter.timing.requests import Start
from rewriter.timing.rounds import Field
from rewriter.timing.statistics import ratio

CONTROL = "control"
"""Name of the original as its own competitor."""

_LARGEST = 2**31
"""Bytes that protobuf serialises."""


def bench(
    original: Source,
    rewritten: Source,
    *more: Source,
    tokens: int | Sequence[int] = (),
    batch: int = BenchOptions.batch,
    past: int = BenchOptions.past,
    repeat: int = BenchOptions.repeat,
    threads: int = BenchOptions.threads,
    kinds: bool = BenchOptions.kinds,
    providers: Sequence[str] | None = None,
    inputs: GivenInputs | None = None,
    dims: Mapping[str, int] | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> Benchmark:
    """Measure models against the original: times, memory, and time by kind of node.

    Each model runs in a process of its own, and they take turns. The original is also its own competitor, `control`,
    whose ratio is the noise.

    Args:
        original: path of an ONNX file, or a model in memory.
        rewritten: path of the model to compare it with, or a model in memory.
        *more: further models.
        tokens: lengths of the sequences; default: 128, or what the model fixes.
        batch: number of sequences.
        past: number of tokens in the key-value cache, if the model takes one.
        repeat: number of rounds.
        threads: threads per operator; 0 for one per core.
        kinds: also measure time by kind of node, with onnxruntime's profiler.
        providers: execution providers, `cpu` and `cuda`; default: cpu, and cuda where it works.
        inputs: inputs to use instead of generated ones: an npz file, arrays by name, or a list of those.
        dims: sizes for symbolic dimensions of the generated inputs.
        seed: random seed of the generated inputs.
        progress: called with (current activity, steps done, total steps).

    Raises:
        UsageError: an option is invalid, or the models take different inputs.
        ModelError: a model is unreadable, malformed or unsafe.
        ProviderError: a requested execution provider is not available.
        ValidationError: a model does not run.
    """
    given = {"tokens": tokens, "batch": batch, "past": past, "repeat": repeat, "threads": threads, "kinds": kinds}
    options = build(BenchOptions, given)
    run = Run(progress)
    with run.step("load", "loading"):
        models = [load_model(model) for model in (original, rewritten, *more)]
        names = _names([name_of(model) for model in (original, rewritten, *more)])
        _check_inputs(models, names)
        path = as_given(inputs)
        cases = inputs_of(models[0].proto, options, path, dict(dims or {}), seed)
    chosen = chosen_providers(tuple(providers or ()))
    rows = [_Bench(models, names, cases, options, provider, run).measured() for provider in chosen]
    return Benchmark(
        original=names[0],
        others=tuple(names[1:]),
        control=CONTROL,
        models=tuple(row for each in rows for row in each.models),
        times=tuple(row for each in rows for row in each.times),
        kinds=tuple(row for each in rows for row in each.kinds),
        options={**values_of(options), "providers": chosen, "dims": dict(dims or {}), "seed": seed},
        environment=environment(),
        seconds=run.seconds(),
    )


def _names(paths: Sequence[str]) -> list[str]:
    """What the reports call the models: their paths, with a number where one occurs twice."""
    return [path if path not in paths[:place] else f"{path} ({place})" for place, path in enumerate(paths)]


def _check_inputs(models: Sequence[LoadedModel], names: Sequence[str]) -> None:
    for model, name in zip(models[1:], names[1:], strict=True):
        differences = [
            text for text in signature_differences(models[0].proto, model.proto) if text.startswith("input ")
        ]
        if differences:
            raise UsageError(f"{name} (B) takes other inputs than {names[0]} (A): {'; '.join(differences)}")


@dataclass(frozen=True)
class _Rows:
    models: tuple[ModelRow, ...]
    times: tuple[TimeRow, ...]
    kinds: tuple[KindRow, ...]


@dataclass(frozen=True, eq=False)
class _Bench:
    """One provider."""

    models: Sequence[LoadedModel]
    names: Sequence[str]
    cases: Sequence[Inputs]
    options: BenchOptions
    provider: str
    run: Run

    def measured(self) -> _Rows:
        """All models on all inputs."""
        starts = {name: self._start(model) for name, model in zip(self.names, self.models, strict=True)}
        times: list[TimeRow] = []
        with (
            self.run.step("measure", f"loading on {self.provider}"),
            Field({**starts, CONTROL: starts[self.names[0]]}) as field,
        ):
            for case in self.cases:
                times += self._times(field, case)
            models = tuple(
                ModelRow(
                    name,
                    self.provider,
                    process.loaded["load_seconds"],
                    None if process.peak_bytes is None else 1e-6 * process.peak_bytes,
                    None if process.loaded["cpu_nodes"] is None else tuple(process.loaded["cpu_nodes"]),
                )
                for name, process in field.processes.items()
            )
        kinds: list[KindRow] = []
        if self.options.kinds:
            with self.run.step("profile", "measuring by kind of node"):
                kinds = [row for case in self.cases for row in self._kinds(starts, case)]
        return _Rows(models, tuple(times), tuple(kinds))

    def _start(self, model: LoadedModel) -> Start:
        if model.path is None and model.file_size >= _LARGEST:
            raise UsageError("a model in memory of 2 GiB or more cannot be measured: save it, and give its path")
        source = model.path if model.path is not None else model.proto.SerializeToString()
        return Start(source, self.provider, self.options.threads)

    def _times(self, field: Field, case: Inputs) -> Iterator[TimeRow]:
        repeat = self.options.repeat

        def told(done: int) -> None:
            self.run.progress(f"measuring {case.name} on {self.provider}", done, repeat)

        found = field.measure(case.feeds, repeat, told)
        baseline = found[self.names[0]]
        for name, seconds in found.items():
            low, middle, high = (float(each) for each in np.percentile(seconds, [25, 50, 75]))
            yield TimeRow(
                model=name,
                provider=self.provider,
                inputs=case.name,
                milliseconds=1e3 * middle,
                low=1e3 * low,
                high=1e3 * high,
                over_original=None if name == self.names[0] else ratio(seconds, baseline),
                tokens_per_second=None if case.tokens is None else case.tokens / middle,
                rounds=tuple(1e3 * each for each in seconds),
            )

    def _kinds(self, starts: Mapping[str, Start], case: Inputs) -> Iterator[KindRow]:
        profiles = {name: nodes_of(name, start, case.feeds) for name, start in starts.items()}
        first, rest = self.names[0], self.names[1:]
        for name, own in profiles.items():
            against = [profiles[other] for other in (rest if name == first else [first])]
            yield from (KindRow(case.name, self.provider, each) for each in kind_times(name, own, against))
