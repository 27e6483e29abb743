"""One model in a process of its own: the child side, run as `python -m rewriter.timing.worker`.

The parent pickles a `Start`, then one `Turn` after the other, to the child's standard input. The child answers each
with one line of JSON, since a process that ran a hostile model is no longer trusted. It ends when its parent does,
whose pipe it reads.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from rewriter.errors import RewriteError
from rewriter.ort.sessions import Session, open_session
from rewriter.text import one_line

_STATUS = Path("/proc/self/status")
_QUIET, _PATIENCE = 0.03, 1.0
"""Seconds without work after which the threads of a process count as asleep, and the longest wait for them."""

Feeds = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Start:
    """Load a model.

    Attributes:
        model: its file, or its bytes.
        provider: the execution provider.
        threads: threads per operator; 0 for onnxruntime's default.
    """

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


def main() -> None:
    """Load the model and run it as told."""
    # Native code may print to standard output: answers go to a copy of it.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    def tell(message: Mapping[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        start: Start = _received()
        before = resident_peak()
        session = open_session(start.model, start.provider, spin=True, threads=start.threads)
        tell({"load_seconds": session.load_seconds, "cpu_nodes": session.cpu_nodes})
        _serve(session, before, tell)
    except EOFError:  # the parent is gone
        pass
    except MemoryError:
        tell({"error": "MemoryError", "message": ""})
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent reports it
        message = str(error) if isinstance(error, RewriteError) else one_line(error)
        tell({"error": type(error).__name__, "message": message})


def _received() -> Any:
    """The next request. Raises EOFError if the parent is gone."""
    return pickle.load(sys.stdin.buffer)  # noqa: S301 - only our parent writes to this pipe


def _serve(session: Session, before: int | None, tell: Callable[[Mapping[str, Any]], None]) -> None:
    feeds: Feeds = {}
    while True:
        turn: Turn = _received()
        feeds = turn.feeds if turn.feeds is not None else feeds
        seconds = take(session, feeds, turn)
        settle()
        peak = resident_peak()
        tell({"seconds": seconds, "peak_bytes": None if peak is None or before is None else peak - before})


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


def settle(clock: Any = time.perf_counter, used: Any = time.process_time, sleep: Any = time.sleep) -> None:
    """Wait until the threads of this process sleep.

    onnxruntime's idle workers spin for some time after a run, which would slow down the next model's turn.
    """
    first = since = clock()
    while clock() - since < _QUIET and clock() - first < _PATIENCE:
        before = used()
        sleep(_QUIET / 6)
        if used() - before > _QUIET / 60:
            since = clock()


def resident_peak() -> int | None:
    """High-water mark of the resident set of this process in bytes; None where the system does not tell.

    From /proc on Linux: getrusage would include the parent's memory at the time of the fork.
    """
    if _STATUS.exists():
        for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    main()
