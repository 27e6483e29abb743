"""SIGKILL at random moments: each run is a process that is forked when everything is imported, and killed at some time.

Used by `python -m tests.faults --kills N`. What is imported makes no files, so the moments are spread over the work.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

from tests.faults.forked import import_all, work
from tests.faults.trial import SETTINGS, Setting, after, after_the_next, files, make_room


def killed_at_random(count: int, seed: int, place: Path, say: Callable[[str], None]) -> int:
    """Kill `count` runs, settings taking turns, and check what they leave, then that the next run mends it.

    Args:
        count: how many runs.
        seed: of the moments.
        place: an empty folder.
        say: gets every finding, and the counts.

    Returns:
        The number of findings.
    """
    SETTINGS[0].prepare(place / "imports")
    import_all(SETTINGS[0].arguments(place / "imports"), place / "imports")
    seconds: dict[Setting, float] = {}
    for number, setting in enumerate(SETTINGS):
        setting.prepare(place / f"expected-{number}")
        start = time.monotonic()
        done = _run(setting, place / f"expected-{number}", None)
        seconds[setting] = time.monotonic() - start
        if done.returncode:
            raise RuntimeError(f"{setting} without a fault: {done.stderr}")
    rng, ends, findings = Random(seed), Counter[str](), 0  # noqa: S311 - not for secrets
    for number in range(count):
        which = number % len(SETTINGS)
        setting, expected, folder = SETTINGS[which], place / f"expected-{which}", place / str(number)
        setting.prepare(folder)
        source, delay = files(folder / "in"), rng.uniform(0.0, 1.1 * seconds[setting])
        run = _run(setting, folder, delay)
        found = after(setting, run, expected, folder)
        left = files(folder / "out")
        ends[_state(run.returncode, setting, left, files(expected / "out"))] += 1
        make_room(setting, folder)
        found += after_the_next(_run(setting, folder, None), expected, folder)
        found += ["the source changed"] if files(folder / "in") != source else []
        for each in found:
            say(f"{number}: {setting}, killed after {delay:.3f} s: {each}")
        findings += len(found)
        shutil.rmtree(folder)
    for state, times in sorted(ends.items()):
        say(f"{state}: {times}")
    say(f"{count} kills of seed {seed}, {findings} findings")
    return findings


def _state(code: int, setting: Setting, left: dict[str, bytes], wanted: dict[str, bytes]) -> str:
    if code == 0:
        return "ended before it was killed"
    if left.get(setting.model) == wanted[setting.model]:
        return "killed with the new OUT in place"
    return (
        "killed with files left" if any("/" not in name[:-1] and name[0] == "." for name in left) else "killed before"
    )


def _run(setting: Setting, folder: Path, delay: float | None) -> subprocess.CompletedProcess[str]:
    """Run the command in a fork, killed after `delay` seconds."""
    log = folder / "log"
    child = os.fork()
    if not child:
        with log.open("wb") as said:
            work(setting.arguments(folder), said.fileno())
    if delay is not None:
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return subprocess.CompletedProcess([], code, "", log.read_text(encoding="utf-8") if log.exists() else "")
