"""Fuzzing guided by coverage: `python -m tests.fuzz --guided --minutes 30`, with atheris (extra `fuzz`).

libFuzzer keeps every input that reaches new code of this project and damages it further: half of the time as a model
(`tests/fuzz/damage.py`), otherwise its bytes. It runs in a child process with limited memory. A crash, or a run that
takes too long, ends the child, and another one goes on with the corpus so far; an exception that nobody foresaw is
noted, and the child goes on.
"""

from __future__ import annotations

import faulthandler
import hashlib
import importlib.util
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from tests.fuzz.damage import damaged
from tests.fuzz.seeds import small
from tests.fuzz.trial import Outcome, Way, a_way, unproved

_MEMORY = 4 * 2**30
_SECONDS = 300
"""Time for one input; instrumented code is several times slower."""
_LARGEST = 2**16
CASES = Path(__file__).parent / "cases"


def key_of(outcome: Outcome) -> str:
    """What tells one kind of finding from another: the exception and where it was raised, or what was said."""
    said, _, places = outcome.message.rpartition(" in ")
    if places.startswith("['"):
        return f"{said.partition(':')[0]} {places}"
    return re.sub(r"'.*'", "", outcome.message)


def way_of(data: bytes) -> Way:
    """A command and its options, which depend on the input only; without fitting and proofs, which take seconds."""
    return unproved(a_way(Random(zlib.crc32(data))))  # noqa: S311 - not for secrets


def mutated(data: bytes, largest: int, seed: int, blindly: Callable[[bytes, int], bytes]) -> bytes:
    """Another input, made from one that reached something new."""
    rng = Random(seed)  # noqa: S311 - not for secrets
    if rng.random() < 0.7:
        try:
            made = damaged(onnx.ModelProto.FromString(data), rng)
        except (DecodeError, ValueError, IndexError, TypeError, KeyError):
            made = b""  # so damaged already that there is nothing to choose from
        if 0 < len(made) <= largest:
            return made
    return blindly(data, largest)


def run_guided(minutes: float, seed: int, keep: Path, say: Callable[[str], None]) -> int:
    """Fuzz for some minutes; `keep` gets the corpus and, in `found`, the inputs of findings. Returns their number.

    Raises:
        SystemExit: atheris is not installed.
    """
    if importlib.util.find_spec("atheris") is None:
        raise SystemExit("guided fuzzing needs atheris, which is not installed: pip install 'attnonly[fuzz]'")
    corpus, found = keep / "corpus", keep / "found"
    for folder in (corpus, found):
        folder.mkdir(parents=True, exist_ok=True)
    for data in (*(model.SerializeToString() for model in small()), *(path.read_bytes() for path in CASES.iterdir())):
        if len(data) <= _LARGEST:
            (corpus / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    for path in (*keep.glob("counts-*.json"), *keep.glob("last-*.onnx"), *keep.glob("ended-*.txt")):
        path.unlink()
    start = time.monotonic()
    ends = start + 60 * minutes
    while (left := int(ends - time.monotonic())) > 0:
        limits = [f"-max_total_time={left}", f"-timeout={_SECONDS}", f"-max_len={_LARGEST}", f"-seed={seed + 1}"]
        limits += [
            f"-rss_limit_mb={_MEMORY >> 20}",
            "-report_slow_units=100000",
            f"-artifact_prefix={found}/",
            str(corpus),
        ]
        child = subprocess.run(
            [sys.executable, "-m", "tests.fuzz.guided", str(found), *limits],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # threads that wait for each other spin
        )
        lines = child.stderr.splitlines()
        for line in lines:
            if line.startswith("finding "):
                say(line)
        if child.returncode:
            (keep / f"ended-{seed}.txt").write_text(child.stderr, encoding="utf-8")
            say(f"a child ended with {child.returncode}, see ended-{seed}.txt: {' '.join(lines[-3:])[:200]}")
        seed += 1
    counts = Counter[str]()
    for path in keep.glob("counts-*.json"):
        counts.update(json.loads(path.read_text(encoding="utf-8")))
    told = ", ".join(f"{status}: {count:,}" for status, count in sorted(counts.items()))
    kinds = len(list(found.iterdir()))
    say(f"{counts.total():,} inputs in {(time.monotonic() - start) / 3600:.2f} hours; by exit status {told}")
    say(f"{len(list(corpus.iterdir())):,} inputs in the corpus; {kinds} kinds of findings in {found}")
    return kinds


def _child(found: Path, arguments: list[str]) -> None:
    """libFuzzer's loop; it ends the process. Says `finding FILE MESSAGE`, and how often which status was seen."""
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    import atheris

    # What the parent's functions imported is imported again, with counters in it.
    for name in [name for name in sys.modules if name.startswith(("rewriter", "passes", "tests.fuzz"))]:
        del sys.modules[name]
    kinds: set[str] = set()
    counts = Counter[int]()
    last = found.parent / f"last-{os.getpid()}.onnx"  # what a crash leaves
    with tempfile.TemporaryDirectory() as place, atheris.instrument_imports(include=["rewriter", "passes"]):
        from tests.fuzz import guided, seeds, trial

        folder = Path(place)
        for way in trial.WAYS:  # imports what is imported late
            trial.tried(seeds.small()[0].SerializeToString(), way, folder)

        def one(data: bytes) -> None:
            last.write_bytes(data)
            outcome = trial.tried(data, guided.way_of(data), folder)
            counts[outcome.status] += 1
            if counts.total() % 20 == 0:
                (found.parent / f"counts-{os.getpid()}.json").write_text(json.dumps(counts))
            if outcome.finding and (key := guided.key_of(outcome)) not in kinds:
                kinds.add(key)
                name = f"{hashlib.sha256(key.encode()).hexdigest()[:8]}.onnx"
                (found / name).write_bytes(data)
                sys.stderr.write(f"finding {name} {outcome.message}\n")

        def mutator(data: bytes, largest: int, seed: int) -> bytes:
            return guided.mutated(data, largest, seed, atheris.Mutate)

        atheris.Setup([sys.argv[0], *arguments], one, custom_mutator=mutator)
        atheris.Fuzz()


if __name__ == "__main__":
    _child(Path(sys.argv[1]), sys.argv[2:])
