"""`bench`: how fast models run beside the original. Nothing is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Unpack

import numpy as np
import onnx

from rewriter.api.run import BenchKeywords, Run, described, environment, name_of, settings_of, taken
from rewriter.compare.graphs import signature_differences
from rewriter.errors import UsageError
from rewriter.files.load import LoadedModel, Source, load_model
from rewriter.options import build, values_of
from rewriter.proof.inputs.cases import Maker
from rewriter.proof.inputs.read import load_cases
from rewriter.proof.inputs.specs import Kind
from rewriter.proof.settings import Settings, checked
from rewriter.proof.validate import Progress
from rewriter.report.benchmark import Benchmark, ModelRow, TimeRow
from rewriter.timing import TOKENS, BenchOptions
from rewriter.timing.measure import Feeds, Process, Start, all_started, measure, ratio

CONTROL = "control"
"""Name of the original as its own competitor."""

Case = tuple[str, Feeds]

_LARGEST = 2**31
"""Bytes that protobuf serialises."""

_OPTION = {Kind.SEQUENCE: "tokens", Kind.BATCH: "batch", Kind.PAST: "past"}


@described(BenchKeywords, BenchOptions, Settings)
def bench(
    original: Source,
    rewritten: Source,
    *more: Source,
    progress: Progress | None = None,
    **options: Unpack[BenchKeywords],
) -> Benchmark:
    """Measure models against the original: times and memory.

    Each model runs in a process of its own, and they take turns. The original is also its own competitor, `control`,
    whose ratio is the noise.

    Args:
        original: path of an ONNX file, or a model in memory.
        rewritten: path of the model to compare it with, or a model in memory.
        *more: further models.
        progress: called with (current activity, steps done, total steps).
        **options: listed below.

    Raises:
        UsageError: an option is invalid, or the models take different inputs.
        ModelError: a model is unreadable, malformed or unsafe.
        ProviderError: a requested execution provider is not available.
        ValidationError: a model does not run.
    """
    of_bench, of_run = taken(options, BenchOptions, Settings)
    asked, settings, run = build(BenchOptions, of_bench), checked(settings_of(of_run)), Run(progress)
    with run.step("load", "loading"):
        models = [load_model(model) for model in (original, rewritten, *more)]
        names = _names([name_of(model) for model in (original, rewritten, *more)])
        _check_inputs(models, names)
        cases = inputs_of(models[0].proto, asked, settings)
    rows: list[ModelRow] = []
    times: list[TimeRow] = []
    for provider in settings.providers:
        starts = {name: _start(model, provider, asked) for name, model in zip(names, models, strict=True)}
        with (
            run.step("measure", f"loading on {provider}"),
            all_started({**starts, CONTROL: starts[names[0]]}) as processes,
        ):
            for case in cases:
                times += _times(processes, case, names[0], provider, asked.repeat, run)
            for name, process in processes.items():
                peak, left = process.peak_bytes, process.loaded["cpu_nodes"]
                megabytes = None if peak is None else 1e-6 * peak
                known = None if left is None else tuple(left)
                rows.append(ModelRow(name, provider, process.loaded["load_seconds"], megabytes, known))
    return Benchmark(
        original=names[0],
        others=tuple(names[1:]),
        control=CONTROL,
        models=tuple(rows),
        times=tuple(times),
        options={**values_of(asked), **{name: getattr(settings, name) for name in ("providers", "dims", "seed")}},
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


def _start(model: LoadedModel, provider: str, options: BenchOptions) -> Start:
    if model.mapped:
        raise UsageError("the weights of a model are links of a cache; copy it with `cp -rL`, and measure the copy")
    if model.path is None and model.file_size >= _LARGEST:
        raise UsageError("a model in memory of 2 GiB or more cannot be measured: save it, and give its path")
    source = model.path if model.path is not None else model.proto.SerializeToString()
    return Start(source, provider, options.threads)


def _times(
    processes: Mapping[str, Process], case: Case, original: str, provider: str, repeat: int, run: Run
) -> Iterator[TimeRow]:
    """All models on one set of inputs."""
    name, feeds = case

    def told(done: int) -> None:
        run.progress(f"measuring {name} on {provider}", done, repeat)

    found = measure(processes, feeds, repeat, told)
    for model, seconds in found.items():
        low, middle, high = (1e3 * float(each) for each in np.percentile(seconds, [25, 50, 75]))
        over = None if model == original else ratio(seconds, found[original])
        yield TimeRow(model, provider, name, middle, low, high, over, tuple(1e3 * each for each in seconds))


def inputs_of(model: onnx.ModelProto, options: BenchOptions, settings: Settings) -> list[Case]:
    """The inputs on which a model is measured, under the name of their size, or of their case in the file.

    Raises:
        UsageError: the model has no such dimension, or fixes it; or the file does not fit the model.
    """
    if settings.inputs is not None:
        if options.tokens or options.past or options.batch > 1 or settings.dims:
            raise UsageError("sizes come with the inputs of a file: leave out tokens, batch, past and dim")
        return [(case.name, case.feeds) for case in load_cases(settings.inputs, model)]
    maker = Maker(model, seed=settings.seed, dims=settings.dims)
    return [_made(maker, options, tokens) for tokens in options.tokens or (None,)]


def _made(maker: Maker, options: BenchOptions, tokens: int | None) -> Case:
    setting = options.batch, TOKENS if tokens is None else tokens, options.past
    _, sizes = maker.sizes(setting)
    asked = {Kind.SEQUENCE: tokens, Kind.BATCH: options.batch, Kind.PAST: options.past}
    for kind, size in asked.items():
        if size is not None and (kind is Kind.SEQUENCE or size != BenchOptions.batch * (kind is Kind.BATCH)):
            _check(kind, size, sizes[kind], has=kind in maker.varied)
    kinds = [kind for kind in (Kind.BATCH, Kind.SEQUENCE, Kind.PAST) if kind in maker.varied]
    shown = [f"{_OPTION[kind]} {sizes[kind]}" for kind in kinds if kind is not Kind.BATCH or options.batch > 1]
    return ", ".join(shown) or "fixed shapes", maker.case(setting).feeds


def _check(kind: Kind, asked: int, got: int, *, has: bool) -> None:
    option = _OPTION[kind]
    if not has:
        raise UsageError(f"{option} {asked}: no input of the model has an open dimension for it; leave {option} out")
    if got != asked:
        raise UsageError(f"{option} {asked}: the model's inputs and tables allow {got}")
