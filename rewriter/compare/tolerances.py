"""The rule for outputs where users give tolerances."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rewriter.arrays import Array
from rewriter.proof.inputs.roles import is_float
from rewriter.proof.rule import Judgement, Results, compared


@dataclass(frozen=True)
class Tolerance:
    """|B - A| <= atol + rtol |A|, for every element."""

    atol: float = 0.0
    rtol: float = 0.0

    def excess(self, a: Array, b: Array) -> float:
        """By how much the worst element exceeds its tolerance; at most 0 if all elements are within it."""
        old, new = a.astype(np.float64), b.astype(np.float64)
        finite = np.isfinite(old)
        with np.errstate(all="ignore"):
            over = np.abs(new - old) - (self.atol + self.rtol * np.abs(old))
        over = np.where(finite, np.where(np.isnan(over), np.inf, over), 0.0)
        return float(over.max()) if over.size else 0.0


@dataclass(frozen=True)
class Rule:
    """Applies the rule of `rewriter.proof.rule`, or a tolerance, to an output.

    Attributes:
        tolerances: maps an output to the tolerance that replaces the rule; the key None stands for all others.
    """

    tolerances: Mapping[str | None, Tolerance] = field(default_factory=dict)

    def tolerance(self, name: str) -> Tolerance | None:
        """The tolerance of an output, if one was given."""
        return self.tolerances.get(name, self.tolerances.get(None))

    def __call__(self, name: str, original: Results, variants: Sequence[Results], rewritten: Results) -> Judgement:
        """Apply it; with a tolerance, errors are in the output's units."""
        found = compared(name, original, variants, rewritten)
        old, new = ([case[name] for case in results] for results in (original, rewritten))
        given = self.tolerance(name)
        if given is None or not old or not is_float(old[0].dtype) or not np.isfinite(found.error):
            return found
        excess = max(given.excess(a, b) for a, b in zip(old, new, strict=True))
        error = max(Tolerance().excess(a, b) for a, b in zip(old, new, strict=True))
        reason = f"error {error:.3g} exceeds atol {given.atol:g}, rtol {given.rtol:g} by {excess:.3g}"
        return Judgement(name, error, 0.0, given.atol, reason if excess > 0.0 else "")
