"""The rule for outputs where users give tolerances."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rewriter.arrays import Array
from rewriter.compare import Tolerances
from rewriter.errors import UsageError
from rewriter.proof.inputs.roles import is_float
from rewriter.proof.rule import Judgement, Results, compared


@dataclass(frozen=True)
class Rule:
    """Applies the rule of `rewriter.proof.rule`, or |B - A| <= atol + rtol |A| for every element, to an output.

    Attributes:
        atol: by output, for which it replaces the rule; the key None stands for all others.
        rtol: likewise.
    """

    atol: Mapping[str | None, float] = field(default_factory=dict)
    rtol: Mapping[str | None, float] = field(default_factory=dict)

    @classmethod
    def of(cls, atol: Tolerances | None, rtol: Tolerances | None) -> Rule:
        """From what was given. Raises UsageError: a tolerance is negative or not finite."""
        sides = [dict(each) if isinstance(each, Mapping) else {None: each} for each in (atol, rtol)]
        found: list[dict[str | None, float]] = [
            {k: float(v) for k, v in each.items() if v is not None} for each in sides
        ]
        odd = [value for each in found for value in each.values() if not 0.0 <= value < np.inf]
        if odd:
            raise UsageError(f"a tolerance is {odd[0]:g}; it must be finite and at least 0")
        return cls(*found)

    def tolerance(self, name: str) -> tuple[float, float] | None:
        """atol and rtol of an output, if either was given."""
        if not {name, None} & {*self.atol, *self.rtol}:
            return None
        return self.atol.get(name, self.atol.get(None, 0.0)), self.rtol.get(name, self.rtol.get(None, 0.0))

    def __call__(self, name: str, original: Results, variants: Sequence[Results], rewritten: Results) -> Judgement:
        """Apply it; with a tolerance, errors are in the output's units."""
        found, given = compared(name, original, variants, rewritten), self.tolerance(name)
        if given is None or not original or not is_float(original[0][name].dtype) or not np.isfinite(found.error):
            return found
        excess = max(_excess(a[name], b[name], *given) for a, b in zip(original, rewritten, strict=True))
        reason = f"error {found.max_abs:.3g} exceeds atol {given[0]:g}, rtol {given[1]:g} by {excess:.3g}"
        return Judgement(name, found.max_abs, 0.0, given[0], reason if excess > 0.0 else "", found.max_abs)


def _excess(a: Array, b: Array, atol: float, rtol: float) -> float:
    """By how much the worst element exceeds its tolerance; at most 0 if all elements are within it."""
    old, new = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(all="ignore"):
        over = np.abs(new - old) - (atol + rtol * np.abs(old))
    over = np.where(np.isfinite(old), np.where(np.isnan(over), np.inf, over), 0.0)
    return float(over.max()) if over.size else 0.0
