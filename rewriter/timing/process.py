"""One model in a process of its own: the parent side.

Models share no process, because onnxruntime's worker threads spin for a while after a run: in one process every run
competes with the other sessions' workers (docs/decisions/0025).
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from rewriter.errors import ModelError, ProviderError, RewriteError, UsageError, ValidationError
from rewriter.timing.requests import EndProfile, Start, Turn

_ERRORS: dict[str, type[RewriteError]] = {
    kind.__name__: kind for kind in (UsageError, ModelError, ProviderError, ValidationError)
}


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
        """Run the model for a while: the seconds of each run.

        Raises:
            ValidationError: the model does not run, or ended its process.
        """
        answer = self.ask(turn)
        self.peak_bytes = answer["peak_bytes"]
        return [float(each) for each in answer["seconds"]]

    def ask(self, request: Start | Turn | EndProfile) -> dict[str, Any]:
        """Send a request and wait for the answer."""
        stdin, stdout = self.child.stdin, self.child.stdout
        if stdin is None or stdout is None:
            raise ValidationError(f"{self.name}: the process to measure it could not be started")
        with suppress(BrokenPipeError):  # the child died; `_death` says how
            pickle.dump(request, stdin, protocol=pickle.HIGHEST_PROTOCOL)
            stdin.flush()
        line = stdout.readline()
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            raise ValidationError(f"{self.name}: {self._death()}") from None
        if "error" in answer:
            raise _ERRORS.get(answer["error"], ValidationError)(f"{self.name}: {answer['message']}")
        return answer

    def _death(self) -> str:
        """Why the child ended without an answer."""
        status = self.child.wait()
        how = f"with status {status}"
        if status < 0:
            with suppress(ValueError):
                how = f"by {signal.Signals(-status).name}"
        return f"its process was ended {how}: the model crashes onnxruntime, or memory ran out"


@contextmanager
def started(name: str, start: Start) -> Iterator[Process]:
    """A process that has loaded a model; it ends with the block.

    Raises:
        ValidationError: onnxruntime cannot load the model.
        ProviderError: the execution provider is not available.
    """
    # The child must import this very package, which may have come onto `sys.path` in ways that it does not inherit.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    child = subprocess.Popen(
        [sys.executable, "-m", "rewriter.timing.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    try:
        process = Process(name, child)
        process.loaded = process.ask(start)
        yield process
    finally:
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
