"""The factors of the estimate, by least squares over relative errors, none below 0; and how far off they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rewriter.estimate.counts import Counts
from rewriter.estimate.formula import MEMORY, ONE, TERMS, term


@dataclass(frozen=True)
class Row:
    """A measured run: its counts, CPU seconds by phase, bytes of memory at the peak."""

    name: str
    counts: Counts
    seconds: Mapping[str, float]
    memory_bytes: int
    keywords: Mapping[str, Any] = field(default_factory=dict)

    @property
    def cpu_seconds(self) -> float:
        """All phases together."""
        return sum(self.seconds.values())


def fitted(rows: Sequence[Row]) -> dict[str, Any]:
    """The factors of each phase and of memory."""
    seconds = {phase: _factors(rows, terms, [row.seconds[phase] for row in rows]) for phase, terms in TERMS.items()}
    return {"seconds": seconds, "memory": _factors(rows, MEMORY, [row.memory_bytes for row in rows])}


def _factors(rows: Sequence[Row], terms: Sequence[str], measured: Sequence[float]) -> dict[str, float]:
    """Factors of `terms` whose sums are closest to what was measured, relative to that."""
    from scipy.optimize import nnls  # type: ignore[import-untyped]  # a development tool

    wanted = np.array(measured, np.float64)
    # A phase of a tenth of a second says nothing; do not let it count as much as one of minutes.
    weight = 1.0 / np.maximum(wanted, 0.2)
    columns = np.array([[term(row.counts, name) for name in terms] for row in rows])
    scale = np.maximum(columns.max(axis=0), 1.0)
    found, _ = nnls(columns / scale * weight[:, None], wanted * weight)
    return {name: float(f"{each:.3g}") for name, each in zip(terms, found / scale, strict=True) if each or name == ONE}


def off(measured: float, estimated: float) -> float:
    """The factor between two numbers, at least 1."""
    return max(measured / estimated, estimated / measured)
