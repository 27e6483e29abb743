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
from passes.formoptions import BIAS_TOKENS, DEFAULT_OPTIONS, FormOptions
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
        """Time one step."""
        self.progress(what, 0, 1)
        start = time.perf_counter()
        yield
        self._seconds[name] = time.perf_counter() - start

    def finish(self, report: Report) -> Report:
        """The report with the times in it."""
        return replace(report, seconds={**self._seconds, "total": time.perf_counter() - self._start})


def checked_options(
    *,
    form: str = "local",
    scope: str = "mlp",
    inline: bool = False,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    forms: FormOptions = DEFAULT_OPTIONS,
) -> Options:
    """The options, with unknown names and impossible numbers refused.

    Raises:
        UsageError: a form or a scope that does not exist; a size that is not positive.
    """
    if form not in FORMS:
        raise UsageError(f"unknown form '{form}'; known are: {', '.join(FORMS)}")
    if scope not in SCOPES:
        raise UsageError(f"unknown scope '{scope}'; known are: {', '.join(SCOPES)}")
    for name, value in (
        ("max_pattern_mb", forms.max_pattern_mb),
        ("max_tokens", forms.max_tokens),
        ("omega", 1.0 if forms.omega is None else forms.omega),
    ):
        if not 0.0 < value < float("inf"):
            raise UsageError(f"{name} is {value}, and must be a positive number")
    if forms.bias_token not in BIAS_TOKENS:
        raise UsageError(f"unknown bias token '{forms.bias_token}'; known are: {', '.join(BIAS_TOKENS)}")
    if forms.bias_token == "network" and form != "masked":
        raise UsageError(f"a bias token that is carried through the network is for form masked, not {form}")
    return Options(form=form, scope=scope, inline=inline, only=tuple(only), skip=tuple(skip), forms=forms)
