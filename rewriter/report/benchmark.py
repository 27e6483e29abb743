"""A measurement of several models, as data and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rewriter.errors import ExitStatus
from rewriter.report.report import Result
from rewriter.timing.measure import Ratio


@dataclass(frozen=True)
class ModelRow:
    """One process that loaded a model.

    Attributes:
        model: path of the model; `control` for the second process of the original.
        provider: the execution provider.
        load_seconds: how long onnxruntime took to read, optimise and place the model.
        peak_mb: the most memory that loading and all runs took, in 10^6 bytes; None where the system does not tell.
        cpu_nodes: on a provider other than the CPU, the nodes that onnxruntime placed on the CPU; None if unknown.
    """

    model: str
    provider: str
    load_seconds: float
    peak_mb: float | None
    cpu_nodes: tuple[str, ...] | None


@dataclass(frozen=True)
class TimeRow:
    """One model on one set of inputs.

    Attributes:
        model: as in `ModelRow`.
        provider: the execution provider.
        inputs: size of the inputs, or the name of their case.
        milliseconds: median over the rounds of the time of one run.
        low: lower quartile, in milliseconds.
        high: upper quartile, in milliseconds.
        over_original: ratio to the original; None for the original.
        rounds: the median in each round, in milliseconds.
    """

    model: str
    provider: str
    inputs: str
    milliseconds: float
    low: float
    high: float
    over_original: Ratio | None
    rounds: tuple[float, ...]


@dataclass(frozen=True, repr=False)
class Benchmark(Result):
    """What `bench` measured.

    Attributes:
        original: path of the original.
        others: paths of the models that were compared with it.
        control: what the original is called as its own competitor.
        models: loading and memory, by process.
        times: the times, original first.
        options: the options, as keywords of `rewriter.bench`.
        environment: versions, processor, operating system.
        seconds: time by step.
    """

    original: str
    others: tuple[str, ...]
    control: str
    models: tuple[ModelRow, ...]
    times: tuple[TimeRow, ...]
    options: Mapping[str, Any]
    environment: Mapping[str, str]
    seconds: Mapping[str, float]

    exit_status = ExitStatus.CONVERTED

    @property
    def summary(self) -> str:
        """How long each model takes beside the original, and the control."""
        parts = [f"{name} takes {self._over(name)} times as long as {self.original}" for name in self.others]
        return f"MEASURED  {'; '.join(parts)} (control {self._over(self.control)}), in {self.seconds['total']:.1f} s"

    def _over(self, name: str) -> str:
        values = [row.over_original.paired for row in self.times if row.model == name and row.over_original]
        low, high = f"{min(values):.2f}", f"{max(values):.2f}"
        return low if low == high else f"{low} to {high}"
