"""A measurement of several models, as data and as JSON; `SCHEMA_VERSION` is the version of the JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewriter.report.report import plain_data, write_json
from rewriter.timing.measure import Ratio

SCHEMA_VERSION = 1
"""Incremented if a field changes its meaning or is removed; new fields may be added without that."""


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


@dataclass(frozen=True)
class Benchmark:
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

    def to_json(self) -> dict[str, Any]:
        """JSON-ready data: numbers as numbers, infinite or missing ones as null."""
        return {"version": SCHEMA_VERSION, **plain_data(self)}

    def write(self, path: Path) -> None:
        """Write the JSON to `path`, atomically."""
        write_json(path, self.to_json())
