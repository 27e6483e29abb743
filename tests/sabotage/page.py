"""Trials as Markdown: lines for the terminal, and the section of docs/trust.md."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tests.sabotage.sabotages import Expect, Sabotage, Trial
from tests.sabotage.table import FAMILIES

HEADER = "| sabotage | tried on | difference | ends with | s |\n| --- | --- | --- | --- | --- |"
BEGIN, END = "<!-- made by python -m tests.sabotage --write docs/trust.md -->\n", "<!-- end -->"
_LONGEST = 150


def row(trials: Sequence[Trial]) -> str:
    """One line about one sabotage; of several trials what the worst ends with."""
    worst = next((trial for trial in trials if trial.fault), trials[0])
    figures = [f"{trial.figure:.1g}" for trial in trials if trial.figure is not None]
    seconds = sum(trial.attempt.seconds for trial in trials)
    cells = (
        worst.sabotage.name,
        ", ".join(trial.subject.name for trial in trials),
        ", ".join(dict.fromkeys(figures)),
        ending(worst),
        f"{seconds:.1f}",
    )
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


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
        return "passes, as is known"
    return said


def section(trials: Iterable[Trial]) -> str:
    """All of it: a summary by kind, then a table of each kind."""
    tried: dict[str, list[Trial]] = {}
    for trial in trials:
        tried.setdefault(trial.sabotage.name, []).append(trial)
    parts = [_summary(tried)]
    for kind, family in FAMILIES.items():
        rows = [row(tried[sabotage.name]) for sabotage in family if sabotage.name in tried]
        parts.append("\n".join([f"### {kind}", "", HEADER, *rows]))
    return "\n\n".join(parts) + "\n"


def _summary(tried: Mapping[str, Sequence[Trial]]) -> str:
    lines = ["| kind | sabotages | trials | end as they must | harmless | unseen |", f"|{' --- |' * 6}"]
    for kind, family in FAMILIES.items():
        lines.append(_counts(kind, family, [trial for s in family for trial in tried.get(s.name, ())]))
    everything = [sabotage for family in FAMILIES.values() for sabotage in family]
    lines.append(_counts("all", everything, [trial for trials in tried.values() for trial in trials]))
    return "\n".join(lines)


def _counts(kind: str, family: Sequence[Sabotage], trials: Sequence[Trial]) -> str:
    harmless, unseen = (sum(s.expect is expect for s in family) for expect in (Expect.HARMLESS, Expect.UNSEEN))
    right = sum(not trial.fault for trial in trials)
    return f"| {kind} | {len(family)} | {len(trials)} | {right} | {harmless} | {unseen} |"


def write(path: Path, text: str) -> None:
    """Put the section between its marks in a page."""
    page = path.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")
