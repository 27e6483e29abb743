"""Comparison of any two models: their outputs, what happens inside, and their files. Here, the options of it."""

from __future__ import annotations

from dataclasses import dataclass

from rewriter.options import option


@dataclass(frozen=True)
class CompareOptions:
    """A tolerance in place of the rule, and how far the comparison looks inside the models."""

    atol: float | None = option(
        None, "Judge outputs by this absolute tolerance instead of the rule.", metavar="NUMBER", least=0.0
    )
    rtol: float | None = option(
        None, "The same, relative to the first model's values; added to --atol.", metavar="NUMBER", least=0.0
    )
    accuracy: float | None = option(
        None,
        "Let the plan in the second model claim errors up to this, over max(1, |f|). Default: the usual limits.",
        metavar="EPS",
        above=0.0,
        below=1.0,
    )
    bisect: bool = option(False, "If they differ, test every part alone and name the faulty ones.")

    @property
    def tolerance(self) -> tuple[float, float] | None:
        """atol and rtol, if either was given."""
        return None if self.atol is self.rtol is None else (self.atol or 0.0, self.rtol or 0.0)
