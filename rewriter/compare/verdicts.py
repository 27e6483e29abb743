"""Verdicts on outputs of two models, and the tolerances that users give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rewriter.arrays import Array
from rewriter.proof.distance import gap
from rewriter.proof.judging import Rule
from rewriter.proof.statistics import OutputStats


@dataclass(frozen=True)
class Tolerance:
    """|B - A| <= atol + rtol |A|, for every element."""

    atol: float = 0.0
    rtol: float = 0.0

    def excess(self, a: Array, b: Array) -> float:
        """By how much the worst element exceeds its tolerance; at most 0 if all elements are within it."""
        wide = np.abs(a.astype(np.float64))
        over = gap(b, a) - (self.atol + self.rtol * np.where(np.isfinite(wide), wide, 0.0))
        return float(over.max()) if over.size else 0.0


@dataclass(frozen=True)
class Rules:
    """How to judge and describe outputs.

    Attributes:
        tolerances: maps an output to the tolerance that replaces the pass rule; the key None stands for all others.
        top_k: number of top entries of each row to compare; None for no such comparison.
    """

    tolerances: Mapping[str | None, Tolerance]
    top_k: int | None = None

    def tolerance(self, name: str) -> Tolerance | None:
        """The tolerance of an output, if one was given."""
        return self.tolerances.get(name, self.tolerances.get(None))


@dataclass(frozen=True)
class OutputVerdict:
    """The verdict on one output. Errors are those of the channel with the least room, in output units.

    Attributes:
        name: the output.
        rule: the rule that was applied: `float64`, `original` (no float64 reference), `tolerance`, `equal` (values that
            are not floating-point), or `nothing` (there was nothing to compare).
        passed: whether it held, without and with graph optimisation.
        stats: statistics of B against A, both optimised.
        top_k: share of A's top k entries per row that are among B's too; None if not asked for.
        error_a: error of A against the reference, in the setting that is worst for B.
        error_b: error of B there; infinite if no tolerance would help.
        allowed: the allowance for `error_b`.
        error_ratio: largest error of B over that of A, in the worst setting; None without a float64 reference.
        where: the setting that is worst for B.
        reason: why the output did not pass; None if it did.
        channel: index of that channel; empty for an output with a single channel.
        share: where A stands in for the reference, the largest allowance for rounding, as a share of its channel's
            scale; otherwise 0.
    """

    name: str
    rule: Rule
    passed: bool
    stats: OutputStats
    top_k: float | None
    error_a: float | None
    error_b: float
    allowed: float
    error_ratio: float | None
    where: str
    reason: str | None
    channel: tuple[int, ...] = ()
    share: float = 0.0

    @property
    def exceeds(self) -> bool:
        """Whether B's error exceeds its allowance, as opposed to nothing having been compared."""
        return not self.passed and self.rule != "nothing"

    @property
    def failure(self) -> str | None:
        """The reason as a complete line; None if the output passed."""
        if self.reason is None:
            return None
        if self.rule == "nothing":
            return f"nothing could be compared: output {self.name} {self.reason}"
        return f"output {self.name}: {self.reason} on {self.where}"


@dataclass(frozen=True)
class PairProof:
    """Measurements on one execution provider.

    Attributes:
        outputs: verdicts by output.
        load_seconds: how long onnxruntime took to load A and B, optimised.
        cpu_nodes: nodes of B that fell back to the CPU.
    """

    outputs: Mapping[str, OutputVerdict]
    load_seconds: tuple[float, float]
    cpu_nodes: tuple[str, ...]

    @property
    def error_ratio(self) -> float | None:
        """The worst ratio of errors over the outputs; None without a float64 reference."""
        return max((each.error_ratio for each in self.outputs.values() if each.error_ratio is not None), default=None)
