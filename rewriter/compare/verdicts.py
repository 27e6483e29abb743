"""What is said of one output of two models, as data: tolerances that users give, and verdicts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rewriter.proof.distance import Array, gap
from rewriter.proof.judging import Rule
from rewriter.proof.statistics import OutputStats


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
    """One output of B against A; errors are those of the channel with the least room, in output units.

    Attributes:
        name: the output.
        rule: what judged it: `float64`, `original` (no float64 reference), `tolerance`, `equal` (values that are not
            floating-point), `nothing` (there was nothing to compare).
        passed: whether it held, without and with graph optimisation.
        stats: B against A, both optimised.
        top_k: share of A's k best entries per row that B has too; None where not asked for.
        error_a: error of A against the reference, in the setting that is worst for B.
        error_b: error of B there; infinite where no tolerance would help.
        allowed: what that may be.
        error_ratio: largest error of B over that of A, the worst setting; None without float64 reference.
        where: that setting.
        reason: why it did not pass.
        channel: the index of that channel; empty where an output has one channel.
        share: where the original stands in for the reference, the most that is allowed for rounding, as a share of its
            channel's scale; else 0.
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
        """Whether B is further off than it may be, rather than not compared."""
        return not self.passed and self.rule != "nothing"

    @property
    def failure(self) -> str | None:
        """The reason as a line of its own."""
        if self.reason is None:
            return None
        if self.rule == "nothing":
            return f"nothing could be compared: output {self.name} {self.reason}"
        return f"output {self.name}: {self.reason} on {self.where}"


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
