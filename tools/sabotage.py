"""`python -m tools.sabotage`: try sabotages, and tell what became of each in a line."""

import argparse
import csv
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from fnmatch import fnmatchcase
from multiprocessing import get_context
from pathlib import Path

from tests.sabotage.harness import Attempt
from tests.sabotage.table import FAMILIES, TABLE, Expect, Sabotage
from tests.sabotage.trials import Trial, measured

COLUMNS = ("sabotage", "tried on", "difference", "ends with", "s")
BEGIN, END = "<!-- made by python -m tools.sabotage --write docs/trust.md -->\n", "<!-- end -->"
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


def measured_at(place: tuple[int, int]) -> tuple[Attempt, float | None]:
    """One trial, by the numbers of its sabotage and subject: those themselves cannot be sent to another process."""
    sabotage = TABLE[place[0]]
    return measured(sabotage, sabotage.subjects[place[1]])


def main(arguments: list[str]) -> int:
    """Run the trials; 0 if each ended as it must."""
    parser = argparse.ArgumentParser(prog="python -m tools.sabotage", description=__doc__)
    parser.add_argument("names", nargs="*", default=["*"], help="globs of the sabotages to try; default all")
    parser.add_argument("--model", default="*", help="glob of the models to try them on")
    parser.add_argument("--missed", action="store_true", help="print only what does not end as it must")
    parser.add_argument(
        "--write", type=Path, metavar="PAGE", help="put the totals into this page, the rows into tables/ beside it"
    )
    parser.add_argument("--jobs", type=int, default=1, help="how many to try at once; default 1")
    options = parser.parse_args(arguments)
    wanted = [
        (number, place)
        for number, sabotage in enumerate(TABLE)
        for place, subject in enumerate(sabotage.subjects)
        if any(fnmatchcase(sabotage.name, glob) for glob in options.names) and fnmatchcase(subject.name, options.model)
    ]
    _say("\t".join(COLUMNS))
    trials: list[Trial] = []
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        for (number, place), outcome in zip(wanted, pool.map(measured_at, wanted), strict=True):
            trials.append(Trial(TABLE[number], TABLE[number].subjects[place], *outcome))
            if trials[-1].fault or not options.missed:
                _say("\t".join(cells(trials[-1:])))
    faults = sum(bool(trial.fault) for trial in trials)
    _say(f"\n{len(trials)} trials, {faults} not detected as expected")
    if options.write:
        write(options.write, trials)
    return 1 if faults else 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
