"""Times of models beside each other: one process per model, taking turns; ratios are within a round.

The speed of a shared machine drifts, so every model has one turn per round, in changing order. Each has a separate
process, because onnxruntime's worker threads spin for a while after a run (docs/decisions/0023).
"""

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
import onnx
from numpy.typing import NDArray

from rewriter.errors import RewriteError, ValidationError
from rewriter.ort import open_session, require_provider
from rewriter.text import one_line

SECONDS_PER_TURN = 0.1
_SECONDS_TO_SETTLE = 0.05  # onnxruntime's idle threads stop spinning, which would slow down the next turn
_STATUS = Path("/proc/self/status")
Feeds = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Ratio:
    """One candidate over the baseline."""

    of_medians: float  # median time over the baseline's
    paired: float  # median over the rounds of the ratio within the round; `low` and `high` are its quartiles
    low: float
    high: float
    of_fastest: float  # fastest time over the baseline's, which excludes disturbances that only add time

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


def take(session: Any, feeds: Feeds, seconds: float, clock: Callable[[], float] = time.perf_counter) -> float:
    """The median seconds of a run, of runs for `seconds`, at least one.

    The first fifth is discarded unless it is the only run: threads wake up and caches fill.
    """
    runs: list[tuple[float, float]] = []
    first = clock()
    while not runs or clock() - first < seconds:
        start = clock()
        session.run(feeds)
        runs.append((start - first, clock() - start))
    return float(np.median([took for began, took in runs if began >= seconds / 5] or [runs[-1][1]]))


@dataclass(eq=False)
class Process:
    """A model in a separate process.

    `known` are its answers: `load_seconds`, `cpu_nodes` as of `Session` and, after a turn, `peak_bytes`, the most
    memory of the model so far (None where the system does not report it).
    """

    name: str
    child: subprocess.Popen[bytes]
    pipe: Connection
    known: dict[str, Any] = field(default_factory=dict)

    def turn(self, feeds: Feeds | None, seconds: float) -> float:
        """The median seconds of a run, as `take`, or ValidationError; with None on the inputs of the last turn."""
        return float(self.ask((feeds, seconds))["seconds"])

    def ask(self, request: object) -> dict[str, Any]:
        """All answers so far, the one to this request included, or ValidationError."""
        try:
            with suppress(ConnectionError):
                self.pipe.send(request)
            self.known |= json.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionError, ValueError):
            status = self.child.wait()
            how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
            said = f"{self.name}: its process was ended {how}: the model crashes onnxruntime, or memory ran out"
            raise ValidationError(said) from None
        if "error" in self.known:
            raise ValidationError(f"{self.name}: {self.known['error']}")
        return self.known


@contextmanager
def started(
    models: Mapping[str, Path | onnx.ModelProto], provider: str, threads: int = 0
) -> Iterator[dict[str, Process]]:
    """Processes with loaded models, by name, killed at the end of the block. Raises ValidationError."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(_started(name, (each, provider, threads))) for name, each in models.items()}


@contextmanager
def _started(name: str, start: tuple[Path | onnx.ModelProto, str, int]) -> Iterator[Process]:
    ours, theirs = Pipe()
    # A new session, so that Ctrl-C reaches the parent only.
    child = subprocess.Popen(
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
        process.ask(start)
        yield process
    finally:
        child.kill()
        child.wait()
        ours.close()


def measure(
    processes: Mapping[str, Process],
    feeds: Feeds,
    repeat: int,
    progress: Callable[[int, int], object] = lambda _done, _all: None,
    *,
    seconds: float = SECONDS_PER_TURN,
) -> dict[str, list[float]]:
    """The median seconds of a run per turn and model: `repeat` turns of `seconds`, after one to warm up."""
    for process in processes.values():
        process.turn(feeds, seconds)
    found: dict[str, list[float]] = {name: [] for name in processes}
    for done, order in enumerate(rounds(tuple(processes), repeat), start=1):
        for name in order:
            found[name].append(processes[name].turn(None, seconds))
        progress(done, repeat)
    return found


def main(handle: int) -> None:
    """Load the model and run it on request, until the parent is gone; `handle` is the child's end of the pipe."""
    pipe = Connection(handle)

    def tell(**message: Any) -> None:
        pipe.send_bytes(json.dumps(message).encode())

    try:
        model, provider, threads = pipe.recv()
        before = resident_peak()
        require_provider(provider)  # so that its first test is not part of the time
        start = time.perf_counter()
        session = open_session(model, provider, spin=True, threads=threads)
        tell(load_seconds=time.perf_counter() - start, cpu_nodes=session.cpu_nodes)
        feeds: Feeds = {}
        while True:
            given, seconds = pipe.recv()
            feeds = feeds if given is None else given
            took = take(session, feeds, seconds)
            time.sleep(_SECONDS_TO_SETTLE)
            peak = resident_peak()
            tell(seconds=took, peak_bytes=None if peak is None or before is None else peak - before)
    except (EOFError, ConnectionError):
        pass
    except MemoryError:
        tell(error="out of memory")
    except Exception as error:  # noqa: BLE001 - the parent reports it
        tell(error=error.args[0] if isinstance(error, RewriteError) else one_line(error))


def resident_peak() -> int | None:
    """Peak resident set of this process in bytes, without the parent's at the time of the fork; None without /proc."""
    if not _STATUS.exists():
        return None
    lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)
