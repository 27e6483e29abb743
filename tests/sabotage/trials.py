"""How a sabotage is tried, and what became of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.sabotage.harness import Attempt, attempt
from tests.sabotage.oracle import difference
from tests.sabotage.subjects import Subject
from tests.sabotage.table import Expect, Sabotage


@dataclass(frozen=True)
class Trial:
    """What became of one sabotage of one subject; `figure` is the oracle's difference, None without a model."""

    sabotage: Sabotage
    subject: Subject
    attempt: Attempt
    figure: float | None

    @property
    def block(self) -> str:
        """The block that a message must name."""
        planned = self.attempt.planned
        return planned[self.sabotage.block] if self.sabotage.block < len(planned) else ""

    @property
    def fault(self) -> str:
        """What is wrong with the outcome; empty when it is as it must be."""
        sabotage, outcome = self.sabotage, self.attempt
        if outcome.status is None:
            return f"crashed: {outcome.messages[0]}"
        if sabotage.expect is Expect.HARMLESS:
            return "" if self._within else f"not harmless: outputs differ by {self.figure}"
        if sabotage.expect is Expect.UNSEEN:
            return "" if outcome.passed else "caught by now: expect that"
        if outcome.left:
            return f"left {', '.join(outcome.left)}" + (", and passed" if outcome.passed else "")
        if not (outcome.refused if sabotage.expect is Expect.REFUSED else outcome.caught):
            return f"ended with {outcome.status!r}"
        if sabotage.expect is Expect.BLOCK and not (self.block and outcome.names(self.block)):
            return f"no message names {self.block}"
        if sabotage.expect is Expect.BLOCK and outcome.certified and not sabotage.honest:
            return "the certificate holds"
        if sabotage.words and not any(word in message for word in sabotage.words for message in outcome.messages):
            return f"no message says {' or '.join(sabotage.words)}"
        return ""

    @property
    def _within(self) -> bool:
        return self.figure is not None and not math.isnan(self.figure) and self.figure <= self.sabotage.below


def tried(sabotage: Sabotage, subject: Subject) -> Trial:
    return Trial(sabotage, subject, *measured(sabotage, subject))


def measured(sabotage: Sabotage, subject: Subject) -> tuple[Attempt, float | None]:
    """Run the rewriter, sabotaged, and let the oracle measure what it wrote."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        path = subject.path(folder)
        outcome = attempt(path, subject.options, sabotage.patch)
        figure = None if outcome.saved is None else difference(path, outcome.saved, folder)
    return outcome, figure


def controls(sabotages: Sequence[Sabotage]) -> tuple[Subject, ...]:
    """What must pass while nothing is sabotaged: a failure of these would be blamed on the sabotage."""
    found: dict[str, Subject] = {}
    for sabotage in sabotages:
        for subject in () if sabotage.honest else sabotage.subjects:
            found.setdefault(repr(subject), subject)
    return tuple(found.values())
