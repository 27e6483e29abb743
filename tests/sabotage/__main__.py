"""`python -m tests.sabotage`: try sabotages, and tell what became of each in a line."""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from fnmatch import fnmatchcase
from multiprocessing import get_context
from pathlib import Path

from tests.sabotage.table import TABLE
from tests.sabotage.trials import COLUMNS, Trial, cells, measured_at, write


def main(arguments: list[str]) -> int:
    """Run the trials; 0 if each ended as it must."""
    parser = argparse.ArgumentParser(prog="python -m tests.sabotage", description=__doc__)
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
