"""One call of the API: its clock, its progress, its checked options.

Comes in: what the caller gave. Goes out: values the steps work with, or UsageError.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import onnx

from passes.conversion import Accuracy
from passes.forms import FORMS
from passes.match.blocks import GATES, SCOPES
from passes.options import BIAS_TOKENS, DEFAULT_OPTIONS, FormOptions
from passes.plan import Options
from rewriter.errors import UsageError
from rewriter.proof.validate import Progress
from rewriter.report.environment import environment
from rewriter.report.report import Report


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
        """The report with the times, and what it was made with."""
        return replace(report, seconds=self.seconds(), environment=environment())

    def seconds(self) -> dict[str, float]:
        """The times so far, by step and in total."""
        return {**self._seconds, "total": time.perf_counter() - self._start}


def checked_options(
    *,
    form: str = "local",
    scope: str = "mlp",
    inline: bool = False,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    merge: bool = False,
    gate: str = "heads",
    fit: bool = True,
    accuracy: float | None = None,
    domain: float | None = None,
    forms: FormOptions = DEFAULT_OPTIONS,
) -> Options:
    """The options, with unknown names and impossible numbers refused.

    Raises:
        UsageError: a form, a scope or a kind of gate that does not exist; an accuracy, a domain or a size out of range.
    """
    if form not in FORMS:
        raise UsageError(f"unknown form '{form}'; known are: {', '.join(FORMS)}")
    if scope not in SCOPES:
        raise UsageError(f"unknown scope '{scope}'; known are: {', '.join(SCOPES)}")
    if gate not in GATES:
        raise UsageError(f"unknown gate '{gate}'; known are: {', '.join(GATES)}")
    if accuracy is not None and not 0.0 < accuracy < 1.0:
        raise UsageError(f"the accuracy {accuracy:g} is not between 0 and 1")
    for name, value in (
        ("domain", 1.0 if domain is None else domain),
        ("max_pattern_mb", forms.max_pattern_mb),
        ("max_tokens", forms.max_tokens),
        ("omega", 1.0 if forms.omega is None else forms.omega),
    ):
        if not 0.0 < value < math.inf:
            raise UsageError(f"{name} is {value}, and must be a positive number")
    if forms.bias_token not in BIAS_TOKENS:
        raise UsageError(f"unknown bias token '{forms.bias_token}'; known are: {', '.join(BIAS_TOKENS)}")
    if forms.bias_token == "network" and form != "masked":
        raise UsageError(f"a bias token that is carried through the network is for form masked, not {form}")
    return Options(
        form=form,
        scope=scope,
        inline=inline,
        only=tuple(only),
        skip=tuple(skip),
        gate=gate,
        fit=fit,
        accuracy=Accuracy(accuracy, domain),
        merge=merge,
        forms=forms,
    )
