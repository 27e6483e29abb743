"""Runs the whole rewriter with one part of it replaced by a wrong one.

`POINTS` says where the rewriter's parts are. A sabotage gives wrappers for some of them, which `attempt` puts in.
"""

import importlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import rewriter
from rewriter import ExitStatus
from rewriter.errors import RewriteError

POINTS: Mapping[str, tuple[str, str]] = {
    "made": ("rewriter.api.rewriting", "with_heads"),
    "decide": ("passes.forms", "decide"),
    "lower": ("passes.plan", "lower"),
    "serialise": ("rewriter.files.save", "_serialise"),
}
"""Parts of the rewriter that a sabotage can replace: the module that calls each, and its name there."""

Part = Callable[..., Any]
Wrapper = Callable[[Part], Part]
Patch = Mapping[str, Wrapper]
"""Name in `POINTS` to a function that makes the wrong part from the right one."""


class SabotageError(AssertionError):
    """A sabotage could not be carried out: what it wants to change is not there any more."""


@dataclass(frozen=True)
class Attempt:
    """How one run ended; `status` is None after a crash, `left` are files that it left, `saved` is its last model.

    `certified`: the certificate holds, whatever a run found.
    """

    status: ExitStatus | None
    left: tuple[str, ...]
    messages: tuple[str, ...]
    planned: tuple[str, ...]
    saved: bytes | None
    seconds: float
    certified: bool = False

    @property
    def passed(self) -> bool:
        return self.status is ExitStatus.CONVERTED

    @property
    def caught(self) -> bool:
        """Whether it ended as it must: exit status 1 and nothing left."""
        return self.status is ExitStatus.VALIDATION_FAILED and not self.left

    @property
    def refused(self) -> bool:
        """Whether it ended with any error that a user can read, and nothing left."""
        return self.status not in (None, ExitStatus.CONVERTED, ExitStatus.NOTHING_TO_CONVERT) and not self.left

    def names(self, block: str) -> bool:
        return any(block in message for message in self.messages)


def attempt(model: Path, options: Mapping[str, Any], patch: Patch) -> Attempt:
    """Rewrite `model` with parts of the rewriter replaced."""
    saved: list[bytes] = []
    planned: list[tuple[str, ...]] = [()]
    used: set[str] = set()
    with TemporaryDirectory() as folder, ExitStack() as stack:
        for point, wrapper in patch.items():
            stack.enter_context(_installed(point, _noting(wrapper, point, used)))
        stack.enter_context(_installed("serialise", lambda right: _recording(right, saved)))
        stack.enter_context(_installed("made", lambda right: _planning(right, planned)))
        result = _run(model, Path(folder) / "out.onnx", options)
        if missing := set(patch) - used:
            raise SabotageError(f"{', '.join(sorted(missing))} was never called")
        left = tuple(sorted(path.name for path in Path(folder).iterdir()))
    return replace(result, left=left, saved=saved[-1] if saved else None, planned=planned[-1])


def _run(model: Path, out: Path, options: Mapping[str, Any]) -> Attempt:
    begin = time.perf_counter()
    status: ExitStatus | None = None
    messages: tuple[str, ...] = ()
    certified = False
    try:
        report = rewriter.rewrite(model, out, **options)
    except SabotageError:
        raise
    except RewriteError as error:
        status, messages = error.exit_status, (str(error),)
    except Exception as error:  # noqa: BLE001 - a crash is a result here, and no good one
        messages = (f"{type(error).__name__}: {error}",)
    else:
        status = report.exit_status
        messages = report.problems
        certified = report.proof is not None and report.proof.certified
    return Attempt(status, (), messages, (), None, time.perf_counter() - begin, certified)


@contextmanager
def _installed(point: str, wrapper: Wrapper) -> Iterator[None]:
    module, name = POINTS[point]
    right = getattr(importlib.import_module(module), name)
    with mock.patch(f"{module}.{name}", wrapper(right)):
        yield


def _noting(wrapper: Wrapper, point: str, used: set[str]) -> Wrapper:
    def noting(right: Part) -> Part:
        wrong = wrapper(right)

        def called(*arguments: Any, **options: Any) -> Any:
            used.add(point)
            return wrong(*arguments, **options)

        return called

    return noting


def _recording(right: Part, saved: list[bytes]) -> Part:
    def recording(*arguments: Any, **options: Any) -> tuple[int, list[bytes]]:
        size, pieces = right(*arguments, **options)
        saved.append(b"".join(pieces))
        return size, [saved[-1]]

    return recording


def _planning(right: Part, planned: list[tuple[str, ...]]) -> Part:
    def planning(plan: Any) -> Any:
        planned.append(tuple(conversion.block.name for conversion in plan.conversions))
        return right(plan)

    return planning
