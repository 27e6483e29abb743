"""`python -m tests.faults`: let every system call that touches a file fail, and kill the command at every one.

Needs strace. Prints every finding, and how runs ended.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

from tests.faults.calls import HAVE_STRACE, Call
from tests.faults.trial import ERRORS, SETTINGS, SIGNALS, Setting, tried


def faults_of(call: Call) -> tuple[str, ...]:
    """What can happen at a call: writing meets full disks and quotas, and a read only broken disks."""
    return (*ERRORS, *SIGNALS) if call.writes else ("EIO",)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--fault", action="append", choices=(*ERRORS, *SIGNALS), help="only these")
    parser.add_argument("-v", "--verbose", action="store_true", help="print every trial")
    given = parser.parse_args()
    if not HAVE_STRACE:
        parser.error("strace is not installed")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        trials: list[tuple[Setting, Path, Call, str]] = []
        for number, setting in enumerate(SETTINGS):
            expected = folder / f"expected-{number}"
            for call in setting.calls(expected):
                wanted = [fault for fault in faults_of(call) if given.fault is None or fault in given.fault]
                trials += product([setting], [expected], [call], wanted)
        ends, findings = Counter[tuple[str, int]](), 0
        with ThreadPoolExecutor(given.jobs) as pool:
            outcomes = pool.map(
                lambda each: tried(each[1][0], each[1][2], each[1][3], each[1][1], folder / str(each[0])),
                enumerate(trials),
            )
            for (setting, _, call, fault), outcome in zip(trials, outcomes, strict=True):
                ends["signal" if fault in SIGNALS else fault, outcome.status] += 1
                if given.verbose:
                    _say(f"{fault} at {call.name} {call.number} ({call.text}): {outcome.status} {outcome.message}")
                for finding in outcome.findings:
                    findings += 1
                    _say(f"{setting} {fault} at {call.name} {call.number} ({call.text}): {finding}")
        for (fault, status), count in sorted(ends.items()):
            _say(f"{fault}: {count} ended with {status}")
        _say(f"{len(trials)} trials, {findings} findings")
    return 1 if findings else 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
