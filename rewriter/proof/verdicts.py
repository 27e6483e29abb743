"""What is said of one output of two models, and the small rules behind it.

Comes in: errors, statistics, tolerances. Goes out: `OutputVerdict`, `PairProof`, and answers to single questions. Used
by `rewriter.proof.pairs` for outputs, by `rewriter.proof.taps` and `rewriter.proof.isolate` inside the models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rewriter.proof.compare import OutputStats
from rewriter.proof.distance import Array, gap, largest

SUSPECT = 8.0
"""An original this many times its coarse share away from float64 is not rounded, but another function."""


@dataclass(frozen=True)
class Tolerance:
    """|B - A| <= atol + rtol |A|, for every element."""

    atol: float = 0.0
    rtol: float = 0.0

    def excess(self, a: Array, b: Array) -> float:
        """By how much the worst element is over its tolerance; not above 0 where all are within."""
        wide = np.abs(a.astype(np.float64))
        over = gap(b, a) - (self.atol + self.rtol * np.where(np.isfinite(wide), wide, 0.0))
        return float(over.max()) if over.size else 0.0


@dataclass(frozen=True)
class Rules:
    """How outputs are judged and described.

    Attributes:
        tolerances: output name to the tolerance that replaces the rule; None is the name of all others.
        top_k: how many of the best entries of each row to compare, None for none.
    """

    tolerances: Mapping[str | None, Tolerance]
    top_k: int | None = None

    def tolerance(self, name: str) -> Tolerance | None:
        """The tolerance of one output, if one was given."""
        return self.tolerances.get(name, self.tolerances.get(None))


@dataclass(frozen=True)
class OutputVerdict:
    """One output of B against A; errors are the largest over cases, in output units.

    Attributes:
        name: the output.
        rule: what judged it: `float64`, `original` (no float64 reference), `tolerance`, `equal` (values that are no
            floats).
        passed: whether it held, without and with graph optimisation.
        stats: B against A, both optimised.
        top_k: share of A's k best entries per row that B has too; None where not asked for.
        error_a: error of A against the reference, in the setting that is worst for B.
        error_b: error of B there.
        allowed: what that could be.
        error_ratio: error of B over that of A, the worst setting; None without float64 reference.
        where: that setting.
        reason: why it did not pass.
    """

    name: str
    rule: str
    passed: bool
    stats: OutputStats
    top_k: float | None
    error_a: float | None
    error_b: float
    allowed: float
    error_ratio: float | None
    where: str
    reason: str | None


@dataclass(frozen=True)
class PairProof:
    """What was measured on one execution provider.

    Attributes:
        outputs: by name.
        load_seconds: how long onnxruntime took to load A and B, optimised.
        cpu_nodes: nodes of B that fell back to the CPU.
    """

    outputs: Mapping[str, OutputVerdict]
    load_seconds: tuple[float, float]
    cpu_nodes: tuple[str, ...]

    @property
    def error_ratio(self) -> float | None:
        """The worst ratio of errors over the outputs, None without a float64 reference."""
        return max((each.error_ratio for each in self.outputs.values() if each.error_ratio is not None), default=None)


@dataclass(frozen=True)
class Judged:
    """One tensor in one setting: errors, what is allowed, and why it does not hold."""

    where: str
    error_a: float | None
    error_b: float
    allowed: float
    ratio: float | None
    reason: str | None
    rule: str


def believable(error_a: float, top: float, coarse: float) -> bool:
    """Whether a float64 evaluation is that of the same function: A is off by rounding only."""
    return error_a <= SUSPECT * coarse * top


def ratio_of(error_b: float, error_a: float, floor: float) -> float:
    """Error of B over error of A, where either counts as half of `floor` at least; 1 where they are equal."""
    least = max(0.5 * floor, float(np.finfo(np.float64).tiny))
    return max(error_b, least) / max(error_a, least)


def parity(stats: OutputStats) -> str | None:
    """What no tolerance forgives."""
    if not stats.same_shape:
        return "its shape is another one"
    if not stats.same_dtype:
        return "its element type is another one"
    if not stats.nan_parity:
        return "NaN at other places"
    return None if stats.inf_parity else "infinite at other places"


def distance(values: Sequence[Array], truth: Sequence[Array]) -> float:
    """Largest distance over the cases; a wrong shape is infinitely far."""
    pairs = zip(values, truth, strict=True)
    return max(largest(gap(v, t)) if v.shape == t.shape else float("inf") for v, t in pairs)
