"""The measurement, parent side: every model has its turn, round after round; ratios are taken within a round.

The speed of a shared machine drifts, so nothing is compared across runs. Every model has one turn per round, in
changing order. Each is in a process of its own, because onnxruntime's worker threads spin for a while after a run: in
one process every run competes with the other sessions' workers (docs/decisions/0023).
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import IO, Any, Self

import numpy as np

from rewriter.errors import ModelError, ProviderError, RewriteError, UsageError, ValidationError
from rewriter.timing.worker import Feeds, Start, Turn

TURN, WARM = 0.1, 0.02
"""Seconds of a turn, and those at its start that do not count: threads wake up and caches fill."""

_ERRORS: dict[str, type[RewriteError]] = {
    kind.__name__: kind for kind in (UsageError, ModelError, ProviderError, ValidationError)
}
"""The errors that a child may hand to its parent, by name."""


@dataclass(frozen=True)
class Ratio:
    """One candidate over the baseline.

    Attributes:
        of_medians: median time over the baseline's median time.
        paired: median over the rounds of the ratio within the round.
        low: lower quartile of these ratios.
        high: upper quartile.
        of_fastest: fastest time over the baseline's fastest, which excludes disturbances that only add time.
    """

    of_medians: float
    paired: float
    low: float
    high: float
    of_fastest: float

    def __str__(self) -> str:
        return f"{self.of_medians:.3f} ({self.paired:.3f}, {self.low:.3f} to {self.high:.3f})"


def ratio(candidate: Sequence[float], baseline: Sequence[float]) -> Ratio:
    """Statistics of a candidate's times relative to the baseline's, round by round."""
    low, middle, high = np.percentile(np.divide(candidate, baseline), [25, 50, 75])
    return Ratio(
        of_medians=float(np.median(candidate) / np.median(baseline)),
        paired=float(middle),
        low=float(low),
        high=float(high),
        of_fastest=min(candidate) / min(baseline),
    )


def rounds(names: Sequence[str], number: int) -> Iterator[tuple[str, ...]]:
    """The order of the turns in each of `number` rounds: all rotations, each followed by its reverse.

    No candidate always follows the same other one, and even two rounds are balanced: ABC CBA BCA ACB CAB BAC.
    """
    forward = [(*names[start:], *names[:start]) for start in range(len(names))]
    return islice(cycle([tuple(order) for each in forward for order in (each, each[::-1])]), number)


@dataclass(eq=False)
class Process:
    """A model, loaded in its own process.

    Attributes:
        name: how errors call the model.
        child: the process.
        loaded: what the child said when it had loaded the model.
        peak_bytes: the most memory that the model has taken so far, in bytes; None if unknown.
    """

    name: str
    child: subprocess.Popen[bytes]
    loaded: dict[str, Any] = field(default_factory=dict)
    peak_bytes: int | None = None

    def turn(self, turn: Turn) -> list[float]:
        """Run the model for a while: the seconds of each run. Raises ValidationError where it does not run."""
        answer = self.ask(turn)
        self.peak_bytes = answer["peak_bytes"]
        return [float(each) for each in answer["seconds"]]

    def ask(self, request: Start | Turn) -> dict[str, Any]:
        """Send a request and wait for the answer."""
        stdin, stdout = _pipes(self.child)
        with suppress(BrokenPipeError):
            pickle.dump(request, stdin, protocol=pickle.HIGHEST_PROTOCOL)
            stdin.flush()
        try:
            answer: dict[str, Any] = json.loads(stdout.readline())
        except ValueError:
            status = self.child.wait()
            how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
            said = f"{self.name}: its process was ended {how}: the model crashes onnxruntime, or memory ran out"
            raise ValidationError(said) from None
        if "error" in answer:
            message = answer["message"] or "out of memory"
            raise _ERRORS.get(answer["error"], ValidationError)(f"{self.name}: {message}")
        return answer


@contextmanager
def started(name: str, start: Start) -> Iterator[Process]:
    """A process that has loaded a model; it is killed, with all that it started, at the end of the block.

    Raises:
        ValidationError: onnxruntime cannot load the model.
        ProviderError: the execution provider is not available.
    """
    # The child must import this very package, which may have come onto `sys.path` in ways that it does not inherit. Its
    # own session makes it the leader of a process group, so that what it starts can be killed with it.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    child = subprocess.Popen(
        [sys.executable, "-m", "rewriter.timing.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=environment,
    )
    try:
        process = Process(name, child)
        process.loaded = process.ask(start)
        yield process
    finally:
        if child.returncode is None:  # not reaped yet, so no other process can have its id
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        for pipe in _pipes(child):
            with suppress(BrokenPipeError):
                pipe.close()


def _pipes(child: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    if child.stdin is None or child.stdout is None:
        raise ValidationError("a process could not be started")
    return child.stdin, child.stdout


class Field:
    """Models that are measured against each other, each in its own process. Use it in a `with` statement."""

    def __init__(self, starts: Mapping[str, Start]) -> None:
        self._starts = starts
        self._stack = ExitStack()
        self.processes: dict[str, Process] = {}

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.processes = {name: stack.enter_context(started(name, start)) for name, start in self._starts.items()}
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *details: object) -> None:
        self._stack.close()

    def measure(
        self, feeds: Feeds, repeat: int, told: Callable[[int], None] = lambda _done: None, *, seconds: float = TURN
    ) -> dict[str, list[float]]:
        """The median seconds of a run in each turn: one per model and round.

        Args:
            feeds: the inputs.
            repeat: number of rounds.
            told: called with the number of rounds done.
            seconds: length of a turn.
        """
        for process in self.processes.values():
            process.turn(Turn(feeds, 0.0, runs=2))
        found: dict[str, list[float]] = {name: [] for name in self.processes}
        for done, order in enumerate(rounds(tuple(self.processes), repeat), start=1):
            for name in order:
                found[name].append(float(np.median(self.processes[name].turn(Turn(None, seconds, WARM)))))
            told(done)
        return found
