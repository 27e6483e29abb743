"""The measurement: every model in a process of its own has its turn, round after round; ratios are within a round.

The speed of a shared machine drifts, so nothing is compared across runs. Every model has one turn per round, in
changing order. Each is in a process of its own, because onnxruntime's worker threads spin for a while after a run: in
one process every run competes with the other sessions' workers (docs/decisions/0023).

The process runs `main`. It gets pickles, a `Start` and then one `Turn` after the other, and answers in JSON, since a
process that ran a hostile model is no longer trusted.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import cycle, islice
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rewriter.errors import ModelError, ProviderError, RewriteError, UsageError, ValidationError
from rewriter.ort.sessions import open_session
from rewriter.text import one_line

TURN, WARM = 0.1, 0.02
"""Seconds of a turn, and those at its start that do not count: threads wake up and caches fill."""

_SETTLE = 0.05
"""Seconds after a turn in which onnxruntime's idle threads stop spinning, which would slow down the next turn."""

_STATUS = Path("/proc/self/status")

_ERRORS: dict[str, type[RewriteError]] = {
    kind.__name__: kind for kind in (UsageError, ModelError, ProviderError, ValidationError)
}
"""The errors that a child may hand to its parent, by name."""

Feeds = Mapping[str, NDArray[Any]]


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
    low, middle, high = map(float, np.percentile(np.divide(candidate, baseline), [25, 50, 75]))
    medians = float(np.median(candidate) / np.median(baseline))
    return Ratio(medians, middle, low, high, min(candidate) / min(baseline))


def rounds(names: Sequence[str], number: int) -> Iterator[tuple[str, ...]]:
    """The order of the turns in each of `number` rounds: all rotations, each followed by its reverse.

    No candidate always follows the same other one, and even two rounds are balanced: ABC CBA BCA ACB CAB BAC.
    """
    forward = [(*names[start:], *names[:start]) for start in range(len(names))]
    return islice(cycle([tuple(order) for each in forward for order in (each, each[::-1])]), number)


# -- the parent ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """Load a model: its file or its bytes, on a provider, with threads per operator (0 for onnxruntime's default)."""

    model: Path | bytes
    provider: str
    threads: int


@dataclass(frozen=True)
class Turn:
    """Run the model for a while.

    Attributes:
        feeds: the inputs; None for those of the last turn.
        seconds: how long; a run that has started is finished.
        warm: seconds at the start whose runs do not count, unless none would be left.
        runs: at least so many runs.
    """

    feeds: Feeds | None
    seconds: float
    warm: float = 0.0
    runs: int = 1


@dataclass(eq=False)
class Process:
    """A model, loaded in its own process.

    Attributes:
        name: how errors call the model.
        child: the process.
        pipe: the way to it.
        loaded: what the child said when it had loaded the model.
        peak_bytes: the most memory that the model has taken so far, in bytes; None if unknown.
    """

    name: str
    child: subprocess.Popen[bytes]
    pipe: Connection
    loaded: dict[str, Any] = field(default_factory=dict)
    peak_bytes: int | None = None

    def turn(self, turn: Turn) -> list[float]:
        """Run the model for a while: the seconds of each run. Raises ValidationError where it does not run."""
        answer = self.ask(turn)
        self.peak_bytes = answer["peak_bytes"]
        return [float(each) for each in answer["seconds"]]

    def ask(self, request: Start | Turn) -> dict[str, Any]:
        """Send a request and wait for the answer."""
        try:
            with suppress(ConnectionError):
                self.pipe.send(request)
            answer: dict[str, Any] = json.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionError, ValueError):
            status = self.child.wait()
            how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
            said = f"{self.name}: its process was ended {how}: the model crashes onnxruntime, or memory ran out"
            raise ValidationError(said) from None
        if "error" in answer:
            raise _ERRORS.get(answer["error"], ValidationError)(f"{self.name}: {answer['message']}")
        return answer


@contextmanager
def started(name: str, start: Start) -> Iterator[Process]:
    """A process that has loaded a model; it is killed, with all that it started, at the end of the block.

    Raises:
        ValidationError: onnxruntime cannot load the model.
        ProviderError: the execution provider is not available.
    """
    ours, theirs = Pipe()
    # The child must import this very package, which may have come onto `sys.path` in ways that it does not inherit. Its
    # own session makes it the leader of a process group, so that what it starts can be killed with it.
    child = subprocess.Popen(  # noqa: S603 - our own code and a number
        [sys.executable, "-c", f"from {__name__} import main; main({theirs.fileno()})"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    theirs.close()
    try:
        process = Process(name, child, ours)
        process.loaded = process.ask(start)
        yield process
    finally:
        if child.returncode is None:  # not reaped yet, so no other process can have its id
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        ours.close()


@contextmanager
def all_started(starts: Mapping[str, Start]) -> Iterator[dict[str, Process]]:
    """Models that are measured against each other, each in its own process, by name."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(started(name, start)) for name, start in starts.items()}


def measure(
    processes: Mapping[str, Process],
    feeds: Feeds,
    repeat: int,
    told: Callable[[int], None] = lambda _done: None,
    *,
    seconds: float = TURN,
) -> dict[str, list[float]]:
    """The median seconds of a run in each turn: one per model and round.

    Args:
        processes: the models.
        feeds: the inputs.
        repeat: number of rounds.
        told: called with the number of rounds done.
        seconds: length of a turn.
    """
    for process in processes.values():
        process.turn(Turn(feeds, 0.0, runs=2))
    found: dict[str, list[float]] = {name: [] for name in processes}
    for done, order in enumerate(rounds(tuple(processes), repeat), start=1):
        for name in order:
            found[name].append(float(np.median(processes[name].turn(Turn(None, seconds, WARM)))))
        told(done)
    return found


# -- the child -----------------------------------------------------------------------------------------------------


def main(handle: int) -> None:
    """Load the model and run it as told, until the parent is gone; `handle` is the child's end of the pipe."""
    pipe = Connection(handle)

    def tell(**message: Any) -> None:
        pipe.send_bytes(json.dumps(message).encode())

    try:
        start: Start = pipe.recv()
        before = resident_peak()
        session = open_session(start.model, start.provider, spin=True, threads=start.threads)
        tell(load_seconds=session.load_seconds, cpu_nodes=session.cpu_nodes)
        feeds: Feeds = {}
        while True:
            turn: Turn = pipe.recv()
            feeds = feeds if turn.feeds is None else turn.feeds
            seconds = take(session, feeds, turn)
            time.sleep(_SETTLE)
            peak = resident_peak()
            tell(seconds=seconds, peak_bytes=None if peak is None or before is None else peak - before)
    except (EOFError, ConnectionError):
        pass
    except MemoryError:
        tell(error="MemoryError", message="out of memory")
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent reports it
        message = error.args[0] if isinstance(error, RewriteError) else one_line(error)
        tell(error=type(error).__name__, message=message)


def take(session: Any, feeds: Feeds, turn: Turn, clock: Any = time.perf_counter) -> list[float]:
    """Seconds of every run of a turn that counts; `session` is a Session, or anything with its method `run`."""
    runs: list[tuple[float, float]] = []
    first = clock()
    while True:
        start = clock()
        session.run(feeds)
        end = clock()
        runs.append((start - first, end - start))
        if end - first >= turn.seconds and len(runs) >= turn.runs:
            break
    return [took for began, took in runs if began >= turn.warm] or [runs[-1][1]]


def resident_peak() -> int | None:
    """High-water mark of the resident set of this process in bytes; None where there is no /proc.

    getrusage would include the parent's memory at the time of the fork.
    """
    if not _STATUS.exists():
        return None
    lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)
