"""How a sabotage is tried, what became of it, and how that is told."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.sabotage.harness import Attempt, attempt
from tests.sabotage.oracle import difference
from tests.sabotage.subjects import Subject
from tests.sabotage.table import FAMILIES, TABLE, Expect, Sabotage


@dataclass(frozen=True)
class Trial:
    """What became of one sabotage of one subject.

    Attributes:
        sabotage: what was wrong.
        subject: what it was tried on.
        attempt: how the run ended.
        figure: what `oracle.difference` measured, None where no model was written.
    """

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
        if sabotage.words and not any(word in message for word in sabotage.words for message in outcome.messages):
            return f"no message says {' or '.join(sabotage.words)}"
        return ""

    @property
    def _within(self) -> bool:
        return self.figure is not None and not math.isnan(self.figure) and self.figure <= self.sabotage.below


def tried(sabotage: Sabotage, subject: Subject) -> Trial:
    """Try one sabotage on one subject."""
    return Trial(sabotage, subject, *measured(sabotage, subject))


def measured(sabotage: Sabotage, subject: Subject) -> tuple[Attempt, float | None]:
    """Run the rewriter, sabotaged, and let the oracle measure what it wrote."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        path = subject.path(folder)
        outcome = attempt(path, subject.options, sabotage.patch)
        figure = None if outcome.saved is None else difference(path, outcome.saved, folder)
    return outcome, figure


def measured_at(place: tuple[int, int]) -> tuple[Attempt, float | None]:
    """One trial, by the numbers of its sabotage and subject: those themselves cannot be sent to another process."""
    sabotage = TABLE[place[0]]
    return measured(sabotage, sabotage.subjects[place[1]])


def controls(sabotages: Sequence[Sabotage]) -> tuple[Subject, ...]:
    """What must pass while nothing is sabotaged: a failure of these would be blamed on the sabotage."""
    found: dict[str, Subject] = {}
    for sabotage in sabotages:
        for subject in () if sabotage.honest else sabotage.subjects:
            found.setdefault(repr(subject), subject)
    return tuple(found.values())


# -- trials as lines for the terminal, as totals in docs/trust.md and as rows of docs/tables/sabotage.csv --------------

COLUMNS = ("sabotage", "tried on", "difference", "ends with", "s")
BEGIN, END = "<!-- made by python -m tests.sabotage --write docs/trust.md -->\n", "<!-- end -->"
_LONGEST = 150


def cells(trials: Sequence[Trial]) -> tuple[str, ...]:
    """The `COLUMNS` of one sabotage; of several trials what the worst ends with."""
    worst = next((trial for trial in trials if trial.fault), trials[0])
    figures = [f"{trial.figure:.1g}" for trial in trials if trial.figure is not None]
    seconds = sum(trial.attempt.seconds for trial in trials)
    return (
        worst.sabotage.name,
        ", ".join(trial.subject.name for trial in trials),
        ", ".join(dict.fromkeys(figures)),
        ending(worst),
        f"{seconds:.1f}",
    )


def ending(trial: Trial) -> str:
    """What a run ended with, and what is wrong with that."""
    messages = trial.attempt.messages
    said = next((message for message in messages if trial.block and trial.block in message), (*messages, "")[0])
    said = re.sub(r"'[^']*/(\.rewrite-)\w+", r"'\1*", said)
    said = said if len(said) <= _LONGEST else f"{said[:_LONGEST]} ..."
    if trial.fault:
        return f"**{trial.fault}** {said}".strip()
    if trial.sabotage.expect is Expect.HARMLESS:
        return f"harmless, the bound is {trial.sabotage.below:.1g}" + (f"; {said}" if said else "")
    if trial.sabotage.expect is Expect.UNSEEN:
        return "passes (known limitation)"
    return said


def write(page: Path, trials: Iterable[Trial]) -> None:
    """Put the totals between their marks in a page, a row for each sabotage into `tables/sabotage.csv` beside it."""
    tried: dict[str, list[Trial]] = {}
    for trial in trials:
        tried.setdefault(trial.sabotage.name, []).append(trial)
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END, 1)
    page.write_text(f"{before}{BEGIN}{_summary(tried)}\n{END}{after}", encoding="utf-8")
    with (page.parent / "tables" / "sabotage.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("kind", *COLUMNS))
        for kind, family in FAMILIES.items():
            table.writerows((kind, *cells(tried[s.name])) for s in family if s.name in tried)


def _summary(tried: Mapping[str, Sequence[Trial]]) -> str:
    lines = ["| kind | sabotages | trials | detected as expected | harmless | unseen |", f"|{' --- |' * 6}"]
    for kind, family in FAMILIES.items():
        lines.append(_counts(kind, family, [trial for s in family for trial in tried.get(s.name, ())]))
    everything = [sabotage for family in FAMILIES.values() for sabotage in family]
    lines.append(_counts("all", everything, [trial for trials in tried.values() for trial in trials]))
    return "\n".join(lines)


def _counts(kind: str, family: Sequence[Sabotage], trials: Sequence[Trial]) -> str:
    harmless, unseen = (sum(s.expect is expect for s in family) for expect in (Expect.HARMLESS, Expect.UNSEEN))
    right = sum(not trial.fault for trial in trials)
    return f"| {kind} | {len(family)} | {len(trials)} | {right} | {harmless} | {unseen} |"
