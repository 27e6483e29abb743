"""One call of the API: its clock, its progress, its checked options.

Comes in: what the caller gave. Goes out: values the steps work with, or UsageError.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import onnx

from passes.find import SCOPES
from passes.forms import FORMS
from passes.plan import Options
from rewriter.errors import UsageError
from rewriter.proof.validate import Progress
from rewriter.report import Report


def silent(_what: str, _done: int, _total: int) -> None:
    """Show no progress."""


def name_of(model: str | os.PathLike[str] | onnx.ModelProto) -> str:
    """How reports name a model: its path as given."""
    return "<memory>" if isinstance(model, onnx.ModelProto) else os.fspath(model)


@dataclass
class Run:
    """The clock and the progress of one call."""

    progress: Progress

    def __post_init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextmanager
    def step(self, name: str, what: str) -> Iterator[None]:
        """Time one step; its times add up where it is taken more than once."""
        self.progress(what, 0, 1)
        start = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def finish(self, report: Report) -> Report:
        """The report with the times in it."""
        return replace(report, seconds=self.seconds())

    def seconds(self) -> dict[str, float]:
        """The times so far, by step and in total."""
        return {**self._seconds, "total": time.perf_counter() - self._start}


def checked_options(
    *, form: str = "local", scope: str = "mlp", inline: bool = False, only: Sequence[str] = (), skip: Sequence[str] = ()
) -> Options:
    """The options, with unknown names refused.

    Raises:
        UsageError: a form or a scope that does not exist.
    """
    if form not in FORMS:
        raise UsageError(f"unknown form '{form}'; known are: {', '.join(FORMS)}")
    if scope not in SCOPES:
        raise UsageError(f"unknown scope '{scope}'; known are: {', '.join(SCOPES)}")
    return Options(form=form, scope=scope, inline=inline, only=tuple(only), skip=tuple(skip))
