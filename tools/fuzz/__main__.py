"""`python -m tools.fuzz --minutes 10`: damage models at random, and see how the rewriter ends.

With `--transformers`, random transformers that are sound instead, compared with what the rewriter makes of them.

Trials run in a child process, so that a crash of a library ends the child only; the file that it died of stays. Prints
how many trials ended with each status, and every finding once. A finding that was mended goes into `cases/`.
"""

import argparse
import faulthandler
import hashlib
import multiprocessing
import re
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from random import Random

from tools.fuzz.damage import damaged
from tools.fuzz.random_transformers import transformer
from tools.fuzz.seeds import committed, small
from tools.fuzz.trial import Outcome, a_way, tried, tried_transformer

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
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz", description="Damage models and rewrite them.")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first trial")
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()) / "fuzz", help="where findings go")
    parser.add_argument("--transformers", action="store_true", help="random transformers instead of damage")
    given = parser.parse_args()
    given.keep.mkdir(parents=True, exist_ok=True)
    small(), committed()  # made once, before the first fork
    ends, counts, found = time.monotonic() + 60 * given.minutes, Counter[int](), dict[str, str]()
    for number, outcome in _outcomes(given.seed, given.first, ends, given.transformers):
        counts[outcome.status] += 1
        key = key_of(outcome)
        if (outcome.finding or outcome.status == DIED) and key not in found:
            found[key] = outcome.message
            name = f"{hashlib.sha256(key.encode()).hexdigest()[:8]}.onnx"
            (given.keep / name).write_bytes(bytes_of(given.seed, number, sound=given.transformers))
            _say(f"trial {number}: {outcome.message} -> {name}")
    told = ", ".join(f"{status}: {count:,}" for status, count in sorted(counts.items()))
    _say(f"{counts.total():,} trials of seed {given.seed}; by exit status {told}; {len(found)} kinds of findings")
    return 1 if found else 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _outcomes(seed: int, number: int, ends: float, sound: bool) -> Iterator[tuple[int, Outcome]]:
    """Trials in a child process, which another one takes the place of when it dies, and now and then."""
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < ends:
            with ProcessPoolExecutor(1, multiprocessing.get_context("fork"), _limited) as pool:
                for number in range(number, number + _BATCH):  # noqa: B020 - the next batch goes on from there
                    try:
                        yield number, pool.submit(_in_time, seed, number, Path(folder), sound).result()
                    except BrokenProcessPool:
                        yield number, Outcome(DIED, "the process died")
                        break
                    if time.monotonic() > ends:
                        return
            number += 1


def _limited() -> None:
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))


def _in_time(seed: int, number: int, folder: Path, sound: bool) -> Outcome:
    signal.alarm(_SECONDS)
    outcome = trial(seed, number, folder, sound=sound)
    signal.alarm(0)
    return outcome


if __name__ == "__main__":
    sys.exit(main())
