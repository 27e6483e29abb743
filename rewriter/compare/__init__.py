"""Comparison of any two models: their outputs, what happens inside, and their files. Here, the options of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rewriter.options import option

Tolerances = float | Mapping[str, float] | Mapping[str | None, float]
"""One number for all outputs, or output name to number; the key None stands for all outputs that are not named."""


@dataclass(frozen=True)
class CompareOptions:
    """What takes the place of the rule, and what is looked at inside."""

    atol: Tolerances | None = option(
        None,
        "Judge all outputs, or one, by this absolute tolerance instead of the rule (repeatable).",
        metavar="[OUTPUT:]NUMBER",
    )
    rtol: Tolerances | None = option(
        None, "The same, relative to the first model's values; added to --atol.", metavar="[OUTPUT:]NUMBER"
    )
    bisect: bool = option(False, "If they differ, test every part alone and name the faulty ones.")
