"""The verdict: one word, and a sentence or two on what it means.

It claims no more than was measured: a proof covers the inputs that were run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rewriter.errors import ExitStatus
from rewriter.proof.distance import FACTOR
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
    measured = all(each.error_ratio is not None for each in validation.providers.values())
    within = (
        f"within {FACTOR:g} times the original’s own distance from float64, plus the certified error of the heads"
        if measured
        else "within what the rounding of its element types explains; there is no float64 evaluation to compare with"
    )
    where = " and ".join(name.upper() for name in validation.providers)
    inputs = counted(len(validation.cases), "input")
    quick = " This was the quick proof: end to end the models were compared on two inputs only."
    return Verdict(
        "Proved quickly" if validation.quick else "Proved",
        "good",
        f"{became}, and the outputs stayed the same: on {inputs} run on {where}, every block and every output lies "
        f"{within}.{quick if validation.quick else ''}",
    )
