"""The verdict: one word, and a sentence or two on what it means.

It claims no more than was measured: a proof covers the inputs that were run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rewriter.errors import ExitStatus
from rewriter.report.report import Report
from rewriter.text import counted


@dataclass(frozen=True)
class Verdict:
    """The text at the top of the page.

    Attributes:
        word: the verdict.
        kind: good, bad, or neither.
        meaning: what it means, in a sentence or two.
        other: the relation of the second model to the first, as a label of its path.
    """

    word: str
    kind: Literal["good", "bad", "open"]
    meaning: str
    other: str = "Written to"


def verdict_of(report: Report) -> Verdict:
    """The verdict on a rewriting."""
    validation = report.validation
    blocks = counted(len(report.converted), "MLP block")
    heads = sum(row.heads or 0 for row in report.converted)
    became = f"{blocks} became {heads:,} attention heads" if heads else f"{blocks} became attention heads"
    if report.exit_status is ExitStatus.NOTHING_TO_CONVERT:
        left = len(report.left)
        reasons = (
            f"{counted(left, 'candidate')} stayed as {'it was' if left == 1 else 'they were'}; the reasons are below."
        )
        why = reasons if left else "Nothing in the model looks like an MLP block."
        return Verdict("Nothing to convert", "open", f"{why} Nothing was written.")
    if report.exit_status is ExitStatus.VALIDATION_FAILED or (validation is not None and not validation.passed):
        failures = () if validation is None else validation.failures
        found = f": {counted(len(failures), 'check')} did not hold" if failures else ""
        meaning = f"The rewritten model does not compute what the original does{found}. Nothing was written."
        return Verdict("Failed", "bad", meaning)
    if validation is None and report.after is None:
        return Verdict("Planned", "open", f"{blocks} would become {heads:,} attention heads. Nothing was written.")
    if validation is None:
        return Verdict("Not proved", "open", f"{became}, but the proof was skipped: the two models were not compared.")
    where = " and ".join(name.upper() for name in validation.providers)
    run = f"it ran on {counted(len(validation.cases), 'input')} on {where}, and differed by rounding only"
    if validation.certified:
        meaning = (
            f"{became}. For every input of every size the outputs are proved to be the original’s, over the reals "
        )
        return Verdict("Certified", "good", f"{meaning}and within the bounds below; {run}.")
    return Verdict("Tested", "good", f"{became}. They were tested, not proved, block by block; {run}.")
