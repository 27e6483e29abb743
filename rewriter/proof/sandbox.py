"""Run a proof in a child process, with limits on memory and time.

A model that crashes onnxruntime, exhausts memory or never ends takes down the child and not the caller, who gets a
one-line ValidationError. The module has two parts: the parent, and the child, which runs as
`python -m rewriter.proof.sandbox`.

The parent pickles a `Request` to the child's standard input. The child answers in JSON, one object per line:
`progress`, then `result` or `error`. A process that ran a hostile model is no longer trusted, so its result is rebuilt
field by field from plain data, where unpickling it would run code of its choice. The child exits with its parent, whose
pipe it watches, and the parent kills it and everything that it started, however the proof ends. No file is created.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import IO, Any

from rewriter.child import ERRORS, Child, Tell, as_message, how_it_ended, kill, pipes, received, send, started, teller
from rewriter.errors import RewriteError, TimeLimitError, ValidationError
from rewriter.files.load import LoadedModel
from rewriter.plain import from_plain
from rewriter.proof.claims import NO_VARIANTS, Claim, Variants
from rewriter.proof.run.whole import Progress
from rewriter.proof.settings import Settings
from rewriter.proof.validate import Validation, validate
from rewriter.text import one_line

_LONGEST_LINE = 2**28
_LONGEST_MESSAGE = 600


def prove(
    original: LoadedModel,
    rewritten: LoadedModel,
    claims: Sequence[Claim],
    settings: Settings,
    progress: Progress,
    variants: Variants = NO_VARIANTS,
) -> Validation:
    """Run `rewriter.proof.validate.validate`, in a child process if `settings.isolate` is set.

    Raises:
        ValidationError: as `validate`; also if the child crashed or ran out of memory.
        TimeLimitError: the child did not finish in time.
        ProviderError: as `validate`.
        UsageError: as `validate`.
    """
    if not settings.isolate:
        return validate(original, rewritten, claims, settings, progress, variants)
    request = Request(original, rewritten, tuple(claims), settings, variants)
    with started("rewriter.proof.sandbox") as child, _deadline(child, settings.time_limit) as late:
        send(child, request)
        for message in _messages(pipes(child)[1]):
            if "progress" in message:
                _tell(progress, message["progress"])
            elif "result" in message:
                return _result(message["result"])
            else:
                raise _error(message, settings)
        if late.is_set():
            raise TimeLimitError(
                f"the isolated proof did not finish within {settings.time_limit:g} s and was stopped; give it more "
                "time, or fewer and shorter inputs with --dim or --inputs"
            )
        raise ValidationError(f"the isolated proof was ended {how_it_ended(child)}{_given(settings)}")


def _tell(progress: Progress, step: object) -> None:
    with suppress(ValueError, TypeError):  # malformed progress is not worth failing for
        what, done, total = from_plain(tuple[str, int, int], step)
        progress(one_line(what, 160), done, total)


def _result(data: object) -> Validation:
    try:
        return from_plain(Validation, data)
    except ValueError as error:
        raise ValidationError(f"the isolated proof returned a malformed result ({one_line(error, 160)})") from error


@contextmanager
def _deadline(child: Child, seconds: float | None) -> Iterator[threading.Event]:
    """Kill the child when its time is up; the event tells that this happened."""
    late = threading.Event()
    if seconds is None:
        yield late
        return

    def end() -> None:
        late.set()
        kill(child)

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
            return  # the child was killed in the middle of a line
        if not isinstance(message, dict):
            return
        yield message


def _error(message: dict[str, Any], settings: Settings) -> RewriteError:
    name, text = str(message.get("error")), one_line(str(message.get("message", "")), _LONGEST_MESSAGE)
    # Short of memory, protobuf may say no more than that it failed to serialise.
    short = name == "EncodeError" or any(words in text for words in _OUT_OF_MEMORY)
    if name == "MemoryError" or (short and settings.memory_limit_mb is not None):
        return ValidationError(f"the isolated proof ran out of memory{_given(settings)}; {_ADVICE}")
    if name in ERRORS:
        return ERRORS[name](text)
    return ValidationError(f"the isolated proof failed: {name}: {text}")


_OUT_OF_MEMORY = (
    "Cannot allocate memory",
    "failed to map segment",
    "can't start new thread",
    "bad_alloc",
    "Arena alloc failed",
    "bad allocation",
    "Failed to allocate memory",
)
"""What the system, the dynamic loader, protobuf and onnxruntime say where memory ran out."""

_ADVICE = "give it more, or try --proof blocks, or fewer and shorter inputs with --dim or --inputs"


def _given(settings: Settings) -> str:
    return "" if settings.memory_limit_mb is None else f" (it had {settings.memory_limit_mb} MB)"


# -- the child ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """The arguments of `validate`."""

    original: LoadedModel
    rewritten: LoadedModel
    claims: tuple[Claim, ...]
    settings: Settings
    variants: Variants


def main() -> None:
    """Read a request, carry out the proof, and report the outcome."""
    tell = teller()
    request: Request = received()
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    _limit(request.settings.memory_limit_mb)
    tell(_outcome(request, tell))


def _outcome(request: Request, tell: Tell) -> dict[str, Any]:
    settings = replace(request.settings, isolate=False)
    try:
        found = validate(
            request.original,
            request.rewritten,
            request.claims,
            settings,
            lambda what, done, total: tell({"progress": [what, done, total]}),
            request.variants,
        )
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent reports it
        return as_message(error)
    return {"result": asdict(found)}


def _end_with_the_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def _limit(megabytes: int | None) -> None:
    """Limit what this process may allocate, and leave no core file if it crashes."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if megabytes is not None:
        # On Linux DATA covers private writable memory; AS would also count address space that is only reserved.
        kind = resource.RLIMIT_DATA if sys.platform == "linux" else resource.RLIMIT_AS
        resource.setrlimit(kind, (megabytes * 10**6, megabytes * 10**6))


if __name__ == "__main__":
    main()
