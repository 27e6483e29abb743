"""Tolerances that take the place of the rule. Apart from their options, which the command line reads before numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rewriter.compare import Tolerances
from rewriter.errors import UsageError
from rewriter.proof.inputs.specs import is_float
from rewriter.proof.rule import Judgement, Results, compared


@dataclass(frozen=True)
class Rule:
    """Applies the rule of `rewriter.proof.rule`, or |B - A| <= atol + rtol |A| for every element, to an output.

    Attributes:
        given: by output, for which they replace the rule, atol and rtol, if given; the key None stands for all others.
    """

    given: Mapping[str | None, tuple[float | None, float | None]]

    @classmethod
    def of(cls, atol: Tolerances | None, rtol: Tolerances | None) -> Rule:
        """From what was given. Raises UsageError: a tolerance is negative or not finite."""
        sides = (each.items() if isinstance(each, Mapping) else [(None, each)] for each in (atol, rtol))
        a, r = map(dict[str | None, float | None], sides)
        odd = [value for value in (*a.values(), *r.values()) if value is not None and not 0.0 <= value < np.inf]
        if odd:
            raise UsageError(f"a tolerance is {odd[0]:g}; it must be finite and at least 0")
        return cls({name: (a.get(name, a.get(None)), r.get(name, r.get(None))) for name in {**a, **r}})

    def tolerance(self, name: str) -> tuple[float, float] | None:
        """atol and rtol of an output, if either was given."""
        atol, rtol = self.given.get(name, self.given.get(None, (None, None)))
        return None if atol is None and rtol is None else (atol or 0.0, rtol or 0.0)

    def __call__(self, name: str, original: Results, variants: Sequence[Results], rewritten: Results) -> Judgement:
        """Apply it; with a tolerance, errors are in the output's units."""
        found, given = compared(name, original, variants, rewritten), self.tolerance(name)
        if given is None or not original or not is_float(original[0][name].dtype) or not np.isfinite(found.error):
            return found
        excess = 0.0
        for a, b in ((a[name].astype(np.float64), b[name]) for a, b in zip(original, rewritten, strict=True)):
            with np.errstate(all="ignore"):
                over = np.abs(b.astype(np.float64) - a) - (given[0] + given[1] * np.abs(a))
            over = np.where(np.isnan(over), np.inf, over)
            excess = max(excess, float(np.max(over, initial=0.0, where=np.isfinite(a))))
        reason = f"error {found.max_abs:.3g} exceeds atol {given[0]:g}, rtol {given[1]:g} by {excess:.3g}"
        return replace(found, error=found.max_abs, rounding=0.0, allowed=given[0], reason=reason if excess else "")
