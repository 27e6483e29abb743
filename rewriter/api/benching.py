"""`bench`: how long models take beside the original; nothing is written."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rewriter.api.comparing import stated
from rewriter.api.run import Run, environment, name_of
from rewriter.compare.graphs import signature_differences
from rewriter.errors import ExitStatus, RewriteError, UsageError
from rewriter.files.load import Source, load_model
from rewriter.inputs.cases import Case, Maker
from rewriter.inputs.specs import Kind
from rewriter.ort.providers import chosen_providers
from rewriter.ort.sessions import Session, open_session
from rewriter.proof.validate import Progress
from rewriter.report.report import Result

_TOKENS, _ROUNDS = 128, 10
_TURN, _PAUSE = 0.1, 0.05  # seconds; after the pause onnxruntime's idle threads have stopped spinning


@dataclass(frozen=True)
class TimeRow:
    """One model on inputs of one size: the median time, and the quartiles of its ratio to the original in a round."""

    model: str
    provider: str
    inputs: str
    milliseconds: float
    over_original: tuple[float, float, float]


@dataclass(frozen=True, repr=False)
class Benchmark(Result):
    """What `bench` measured: for every provider and size a row of each model, the original first."""

    times: tuple[TimeRow, ...]
    environment: Mapping[str, str]
    seconds: Mapping[str, float]
    exit_status = ExitStatus.CONVERTED

    @property
    def summary(self) -> str:
        original, *others = dict.fromkeys(row.model for row in self.times)
        parts = []
        for name in others:
            ratios = sorted(f"{row.over_original[1]:.2f}" for row in self.times if row.model == name)
            parts.append(f"{name} takes {' to '.join(dict.fromkeys((ratios[0], ratios[-1])))} times as long")
        return f"MEASURED  {', '.join(parts)} as {original}, in {self.seconds['total']:.1f} s"


def bench(
    original: Source,
    rewritten: Source,
    *more: Source,
    tokens: int | Sequence[int] = (),
    providers: str | Sequence[str] = (),
    progress: Progress | None = None,
) -> Benchmark:
    """Measure how long models, files or in memory, take beside the original, on onnxruntime; they take turns.

    Args:
        original: given again, its ratio is the noise.
        rewritten: the model to compare it with.
        *more: further models.
        tokens: numbers of tokens of a sequence; default: 128, or what the models take.
        providers: execution providers; default: cpu, and cuda where it works.
        progress: called with (current activity, steps done, total steps).

    Raises:
        UsageError: the models take different inputs, or not so many tokens.
        ModelError: a model is unreadable, malformed or unsafe.
        ProviderError: a requested execution provider is not available.
        ValidationError: a model does not run.
    """
    run, given, rows = Run(progress), (original, rewritten, *more), list[TimeRow]()
    chosen = chosen_providers((providers,) if isinstance(providers, str) else providers)
    with run.step("load", "loading"):
        models = [load_model(model, mapped=True) for model in given]
        paths = [name_of(model) for model in given]
        names = [each if each not in paths[:place] else f"{each} ({place})" for place, each in enumerate(paths)]
        for name, model in zip(names, models, strict=True):
            differences = signature_differences(models[0].proto, model.proto)
            if found := [text for text in differences if text.startswith("input ")]:
                raise UsageError(f"{name} (B) takes other inputs than {names[0]} (A): {'; '.join(found)}")
        maker = Maker(models[0].proto)
        longest = min(stated(model.proto, None).longest or sys.maxsize for model in models)
        cases = [_case(maker, asked, longest) for asked in ((tokens,) if isinstance(tokens, int) else tokens)]
    for provider in chosen:
        with run.step("measure", f"measuring on {provider}"):
            opened = [open_session(each.proto, provider, base_dir=each.base_dir, spin=True) for each in models]
            for case in cases or [maker.case((1, min(_TOKENS, longest), 0))]:
                times = _rounds(dict(zip(names, opened, strict=True)), case)
                for name, taken in times.items():
                    low, middle, high = np.percentile(np.divide(taken, times[names[0]]), [25, 50, 75]).tolist()
                    rows.append(TimeRow(name, provider, case.name, 1e3 * float(np.median(taken)), (low, middle, high)))
    return Benchmark(tuple(rows), environment(), run.seconds())


def _case(maker: Maker, tokens: int, longest: int) -> Case:
    taken = 1 <= tokens <= longest and Kind.SEQUENCE in maker.varied
    if not taken or maker.sizes((1, tokens, 0))[1][Kind.SEQUENCE] != tokens:
        raise UsageError(f"the models do not take {tokens} tokens; give another number, or none")
    return maker.case((1, tokens, 0))


def _rounds(sessions: Mapping[str, Session], case: Case) -> dict[str, list[float]]:
    """The median seconds of a run per round, in turns, since the speed of a shared machine drifts."""
    found: dict[str, list[float]] = {name: [] for name in sessions}
    for done in range(_ROUNDS + 1):
        for name in [*sessions][:: -1 if done % 2 else 1]:
            runs, end = list[float](), time.perf_counter() + _TURN
            while not runs or time.perf_counter() < end:
                start = time.perf_counter()
                try:
                    sessions[name].run(case.feeds)
                except RewriteError as error:
                    raise type(error)(f"{name}: {error.args[0]}") from error
                runs.append(time.perf_counter() - start)
            time.sleep(_PAUSE)
            found[name].append(float(np.median(runs[len(runs) // 5 :])))  # threads wake up in the first ones
    return {name: times[1:] for name, times in found.items()}  # the first round warms up
