"""From counts to seconds and bytes: sums of counts times factors that were measured.

`factors.json` beside this file holds the factors, and by how much the measured runs were off.
`python -m benchmarks.estimating` measures and fits them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rewriter.estimate.counts import Counts

FACTORS = Path(__file__).parent / "factors.json"
ONE = "one"
"""The term that is the same for all runs."""

PREPARING, BLOCKS, WHOLE = "rest", "blocks", "whole"
TERMS: dict[str, tuple[str, ...]] = {
    PREPARING: (ONE, "nodes", "bytes", "blocks"),
    BLOCKS: (
        *("blocks", "block_bytes", "block_products", "points_scores"),
        *("sublayers", "sublayer_products", "sublayer_scores", "slots", "stages"),
    ),
    WHOLE: (ONE, "nodes", "bytes", "products", "elements", "scores"),
}
"""The counts on which the CPU time of a phase depends."""

MEMORY = (
    *(ONE, "nodes", "case_elements", "largest_scores", "largest_points_scores"),
    *("whole_bytes", "segment_bytes", "read_bytes", "slots", "stages"),
)
"""The counts on which memory depends."""


@dataclass(frozen=True)
class Estimate:
    """What a run takes, about: CPU time of all threads, and the peak of resident memory.

    Attributes:
        cpu_seconds: all phases together.
        seconds: by phase: rest (loading, planning, applying, saving), blocks (their proofs), whole (both models end to
            end, in their own type and in float64).
        memory_bytes: the peak.
        cpu_factor: by how much the time of a measured run was off at most.
        memory_factor: the same for memory.
        counts: what it was computed from.
    """

    cpu_seconds: float
    seconds: Mapping[str, float]
    memory_bytes: int
    cpu_factor: float
    memory_factor: float
    counts: Counts


def estimate(counts: Counts, *, proved: bool = True, factors: Mapping[str, Any] | None = None) -> Estimate:
    """Time and memory of a conversion with these counts, with its proof or without; `factors` are those of the file."""
    factors = _factors() if factors is None else factors
    phases = TERMS if proved else (PREPARING,)
    seconds = {phase: _sum(counts, factors["seconds"][phase]) for phase in phases}
    return Estimate(
        cpu_seconds=sum(seconds.values()),
        seconds=seconds,
        memory_bytes=round(_sum(counts, factors["memory"])),
        cpu_factor=factors["off"]["cpu_seconds"],
        memory_factor=factors["off"]["memory_bytes"],
        counts=counts,
    )


def _sum(counts: Counts, factors: Mapping[str, float]) -> float:
    return sum(factor * term(counts, name) for name, factor in factors.items())


def term(counts: Counts, name: str) -> float:
    """The value of a term of `TERMS` or `MEMORY`."""
    return 1.0 if name == ONE else float(getattr(counts, name))


@cache
def _factors() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FACTORS.read_text(encoding="utf-8"))
    return found
