"""Which tests are left to the slow suite: `python -m tools.slow LOG` writes `tests/slow.txt` from measured durations.

LOG is the output of `python -m pytest -n 2 -m 'not exports' --durations=0 --durations-min=0.05`, of both suites
(ATTNONLY_SLOW=1) or of the default one, whose slowest tests then join those that are listed. The slowest go until the
rest fits the budget, but the quickest case of each test stays, and at least one test of each file.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter, defaultdict
from pathlib import Path

LIST = Path(__file__).parents[1] / "tests" / "slow.txt"
_LINE = re.compile(r"\s*(?P<seconds>[\d.]+)s (?:call|setup|teardown) +(?P<test>.+)")


def chosen(seconds: dict[str, float], share: float) -> list[str]:
    """The tests to leave out so that the others take `share` of the time."""
    cases, files = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for test in seconds:
        cases[test.partition("[")[0]].add(test)
        files[test.partition("::")[0]].add(test)
    left, found = sum(seconds.values()), []
    for test in sorted(seconds, key=lambda name: -seconds[name]):
        if left <= share * sum(seconds.values()):
            break
        own, others = cases[test.partition("[")[0]], files[test.partition("::")[0]]
        if len(others) > 1 and (len(own) > 1 or "[" not in test):
            own.discard(test)
            others.discard(test)
            found.append(test)
            left -= seconds[test]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.slow", description="Write tests/slow.txt.")
    parser.add_argument("log", type=Path)
    parser.add_argument("--share", type=float, required=True, help="of the measured time, what the rest may take")
    given = parser.parse_args()
    seconds = Counter[str]()
    for line in given.log.read_text(encoding="utf-8").splitlines():
        if found := _LINE.fullmatch(line.rstrip()):
            seconds[found["test"]] += float(found["seconds"])  # type: ignore[assignment]
    names = sorted({*LIST.read_text(encoding="utf-8").splitlines()} | set(chosen(dict(seconds), given.share)))
    LIST.write_text("".join(f"{name}\n" for name in names), encoding="utf-8")


if __name__ == "__main__":
    main()
