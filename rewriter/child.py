"""A child process of this package: started with a module, asked over a pipe, killed with all that it started.

Used where models must not disturb each other (`rewriter.timing`). Requests are pickled; answers are lines of JSON,
since a process that ran a hostile model is no longer trusted.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import IO, Any

from rewriter.errors import ModelError, ProviderError, RewriteError, UsageError, ValidationError
from rewriter.text import one_line

Tell = Callable[[Mapping[str, Any]], None]
Child = subprocess.Popen[bytes]

ERRORS: dict[str, type[RewriteError]] = {
    kind.__name__: kind for kind in (UsageError, ModelError, ProviderError, ValidationError)
}
"""The errors that a child may hand to its parent, by name."""


@contextmanager
def started(module: str) -> Iterator[Child]:
    """`python -m module` with pipes to its standard input and output; killed at the end of the block."""
    # The child must import this very package, which may have come onto `sys.path` in ways that it does not inherit. Its
    # own session makes it the leader of a process group, so that what it starts can be killed with it.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    child = subprocess.Popen(  # noqa: S603 - this interpreter, and a module of this package
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=environment,
    )
    try:
        yield child
    finally:
        kill(child)
        child.wait()
        for pipe in pipes(child):
            with suppress(BrokenPipeError):
                pipe.close()


def pipes(child: Child) -> tuple[IO[bytes], IO[bytes]]:
    """The child's standard input and output."""
    if child.stdin is None or child.stdout is None:
        raise ValidationError("a process could not be started")
    return child.stdin, child.stdout


def send(child: Child, request: object) -> None:
    """Pickle a request to the child. If it is dead, nothing happens: `how_it_ended` says why."""
    stdin, _ = pipes(child)
    with suppress(BrokenPipeError):
        pickle.dump(request, stdin, protocol=pickle.HIGHEST_PROTOCOL)
        stdin.flush()


def kill(child: Child) -> None:
    """Kill the child and everything that it started. It was not reaped yet, so no other process can have its id."""
    if child.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)


def how_it_ended(child: Child) -> str:
    """Why a child ended without an answer, to follow "was ended"."""
    status = child.wait()
    how = f"with status {status}"
    if status < 0:
        with suppress(ValueError):
            how = f"by {signal.Signals(-status).name}"
    return f"{how}: the model crashes onnxruntime, or memory ran out"


# -- in the child ------------------------------------------------------------------------------------------------------


def teller() -> Tell:
    """Takes over standard output, to which native code may print, and returns what writes a line of JSON to it."""
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    def tell(message: Mapping[str, Any]) -> None:
        lines.write(json.dumps(message) + "\n")
        lines.flush()

    return tell


def received() -> Any:
    """The next request.

    Raises:
        EOFError: the parent is gone.
    """
    return pickle.load(sys.stdin.buffer)  # noqa: S301 - only our parent writes to this pipe


def as_message(error: Exception) -> dict[str, str]:
    """An error as the parent reads it."""
    text = "" if isinstance(error, MemoryError) else str(error) if isinstance(error, RewriteError) else one_line(error)
    return {"error": type(error).__name__, "message": text}
