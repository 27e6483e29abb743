"""`python -m tests.fuzz --minutes 10`: damage models at random, and see how the rewriter ends.

With `--transformers`, random transformers that are sound instead, compared with what the rewriter makes of them.

Trials run in a child process, so that a crash of a library ends the child only; the file that it died of stays. Prints
how many trials ended with each status, and every finding once. A finding that was mended goes into `cases/`.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import multiprocessing
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random

from tests.fuzz.damage import damaged
from tests.fuzz.seeds import committed, small
from tests.fuzz.transformers import transformer
from tests.fuzz.trial import Outcome, a_way, tried, tried_transformer

_SECONDS = 180
"""Time for one trial; one that takes longer is a finding."""
_MEMORY = 6 * 2**30
_BATCH = 500
"""Trials per child."""
DIED = 139


def case(seed: int, number: int) -> tuple[bytes, Random]:
    """The bytes of trial `number` of a seed, and the generator that made them."""
    rng = Random(f"{seed}/{number}")  # noqa: S311 - not for secrets
    models = committed() if rng.random() < 0.05 else small()
    return damaged(rng.choice(models), rng), rng


def bytes_of(seed: int, number: int, *, sound: bool) -> bytes:
    """The model of a trial."""
    if not sound:
        return case(seed, number)[0]
    data: bytes = transformer(Random(f"{seed}/{number}")).model.SerializeToString()  # noqa: S311 - not for secrets
    return data


def trial(seed: int, number: int, folder: Path, *, sound: bool) -> Outcome:
    """Trial `number` of a seed; `sound`: of a random transformer."""
    if not sound:
        data, rng = case(seed, number)
        return tried(data, a_way(rng), folder)
    rng = Random(f"{seed}/{number}")  # noqa: S311 - not for secrets
    return tried_transformer(transformer(rng), a_way(rng, ("rewrite",), proved=0.3), number)


def key_of(outcome: Outcome) -> str:
    """What tells one kind of finding from another: the exception and where it was raised, or what was said."""
    said, _, places = outcome.message.rpartition(" in ")
    if places.startswith("['"):
        return f"{said.partition(':')[0]} {places}"
    return re.sub(r"'.*'", "", outcome.message)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Damage models and rewrite them.")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first trial")
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()) / "fuzz", help="where findings go")
    parser.add_argument("--transformers", action="store_true", help="random transformers instead of damage")
    given = parser.parse_args()
    given.keep.mkdir(parents=True, exist_ok=True)
    small(), committed()  # made once, before the first fork
    ends, counts, found, number = time.monotonic() + 60 * given.minutes, Counter[int](), dict[str, str](), given.first
    while time.monotonic() < ends:
        for outcome, at in _batch(given.seed, number, ends, given.keep, given.transformers):
            number = at + 1
            counts[outcome.status] += 1
            key = key_of(outcome)
            if (outcome.finding or outcome.status == DIED) and key not in found:
                found[key] = outcome.message
                name = f"{hashlib.sha256(key.encode()).hexdigest()[:8]}.onnx"
                (given.keep / name).write_bytes(bytes_of(given.seed, at, sound=given.transformers))
                _say(f"trial {at}: {outcome.message} -> {name}")
    told = ", ".join(f"{status}: {count:,}" for status, count in sorted(counts.items()))
    _say(f"{counts.total():,} trials of seed {given.seed}; by exit status {told}; {len(found)} kinds of findings")
    return 1 if found else 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _batch(seed: int, first: int, ends: float, keep: Path, sound: bool) -> list[tuple[Outcome, int]]:
    here, there = multiprocessing.Pipe(duplex=False)
    folder = Path(tempfile.mkdtemp())
    child = multiprocessing.Process(target=_child, args=(there, seed, first, ends, folder, sound))
    child.start()
    there.close()
    outcomes: list[tuple[Outcome, int]] = []
    try:
        while True:
            outcomes.append((here.recv(), first + len(outcomes)))
    except EOFError:
        child.join()
    if child.exitcode:
        outcomes.append((Outcome(DIED, f"the process ended with {child.exitcode}"), first + len(outcomes)))
        if (folder / "case.onnx").exists():
            shutil.copy(folder / "case.onnx", keep / f"died-{seed}-{outcomes[-1][1]}.onnx")
    shutil.rmtree(folder)
    return outcomes


def _child(results: Connection, seed: int, first: int, ends: float, folder: Path, sound: bool) -> None:
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    for number in range(first, first + _BATCH):
        signal.alarm(_SECONDS)
        results.send(trial(seed, number, folder, sound=sound))
        signal.alarm(0)
        if time.monotonic() > ends:
            return


if __name__ == "__main__":
    sys.exit(main())
