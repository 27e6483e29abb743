"""A proof in a process of its own, with limits on memory and time.

Comes in: what `validate` takes. Goes out: its `Validation`. A model that crashes onnxruntime, eats all memory or
never ends takes the child with it and not the caller: that is a ValidationError of one line. What comes back is plain
JSON, checked field by field, because a process that ran a hostile model is not trusted any more. No file is made; on
the way out, for whatever reason, the child and all that it started are killed.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any

from rewriter.errors import ModelError, ProviderError, RewriteError, UsageError, ValidationError
from rewriter.files.load import LoadedModel
from rewriter.proof.child import Request
from rewriter.proof.claims import NO_VARIANTS, Claim, Variants
from rewriter.proof.messages import one_line
from rewriter.proof.plain import from_plain
from rewriter.proof.run.whole import Progress
from rewriter.proof.settings import Settings
from rewriter.proof.validate import Validation

_ERRORS: dict[str, type[RewriteError]] = {
    kind.__name__: kind for kind in (UsageError, ModelError, ProviderError, ValidationError)
}
_LONGEST_LINE = 2**28
_LONGEST_MESSAGE = 600


def validate_isolated(
    original: LoadedModel,
    rewritten: LoadedModel,
    claims: Sequence[Claim],
    settings: Settings,
    progress: Progress,
    variants: Variants = NO_VARIANTS,
) -> Validation:
    """`validate`, in a child process.

    Raises:
        ValidationError: as `validate`; also when the child crashed, ran out of memory or out of time.
        ProviderError: as `validate`.
        UsageError: as `validate`.
    """
    request = Request(original, rewritten, tuple(claims), settings, variants)
    with _child() as child, _deadline(child, settings.time_limit) as late:
        stdin, stdout = child.stdin, child.stdout
        if stdin is None or stdout is None:
            raise ValidationError("the isolated proof could not be started")
        with suppress(BrokenPipeError):  # the child died; how, is told below
            pickle.dump(request, stdin, protocol=pickle.HIGHEST_PROTOCOL)
            stdin.flush()
        for message in _messages(stdout):
            if "progress" in message:
                _tell(progress, message["progress"])
            elif "result" in message:
                return _result(message["result"])
            else:
                raise _error(message, settings)
        raise ValidationError(_death(child, settings, late=late.is_set()))


def _tell(progress: Progress, step: object) -> None:
    with suppress(ValueError, TypeError):  # a step that cannot be read is not shown
        what, done, total = from_plain(tuple[str, int, int], step)
        progress(one_line(what, 160), done, total)


def _result(data: object) -> Validation:
    try:
        return from_plain(Validation, data)
    except ValueError as error:
        raise ValidationError(f"the isolated proof gave no result that can be read ({one_line(error, 160)})") from error


@contextmanager
def _child() -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    child = subprocess.Popen(
        [sys.executable, "-m", "rewriter.proof.child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=environment,
    )
    try:
        yield child
    finally:
        _kill(child)
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Kill the child and what it started. It is not reaped before, so its process group is still its own."""
    if child.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)


@contextmanager
def _deadline(child: subprocess.Popen[bytes], seconds: float | None) -> Iterator[threading.Event]:
    """Kill the child when its time is over; the event says that it was."""
    late = threading.Event()
    if seconds is None:
        yield late
        return

    def end() -> None:
        late.set()
        _kill(child)

    timer = threading.Timer(seconds, end)
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()
        timer.join()


def _messages(stdout: IO[bytes]) -> Iterator[dict[str, Any]]:
    while line := stdout.readline(_LONGEST_LINE):
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            return  # killed in the middle of a line
        if not isinstance(message, dict):
            return
        yield message


def _error(message: dict[str, Any], settings: Settings) -> RewriteError:
    name, text = str(message.get("error")), one_line(str(message.get("message", "")), _LONGEST_MESSAGE)
    if name == "MemoryError":
        return ValidationError(f"the isolated proof ran out of memory{_given(settings)}; {_ADVICE}")
    if name in _ERRORS:
        return _ERRORS[name](text)
    return ValidationError(f"the isolated proof failed: {name}: {text}")


_ADVICE = "give it more, or try --proof blocks, or fewer and shorter inputs with --dim or --inputs"


def _given(settings: Settings) -> str:
    return "" if settings.memory_limit_mb is None else f" (it had {settings.memory_limit_mb} MB)"


def _death(child: subprocess.Popen[bytes], settings: Settings, *, late: bool) -> str:
    """Why the child is gone without an answer."""
    if late:
        return (
            f"the isolated proof did not end within {settings.time_limit:g} s and was stopped; give it more time, or "
            "fewer and shorter inputs with --dim or --inputs"
        )
    status = child.wait()
    how = f"with status {status}"
    if status < 0:
        with suppress(ValueError):
            how = f"by {signal.Signals(-status).name}"
    return f"the isolated proof was ended {how}: the model crashes onnxruntime, or memory ran out{_given(settings)}"
