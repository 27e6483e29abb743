"""`python -m tests.mutation`: change the program, one place at a time, and see whether a test notices.

Mutants are made by cosmic-ray, drawn at random (`tests.mutation.mutants`), and put into a temporary copy of the
checkout, where the tests of the module run (`suites_of`). One JSON object per mutant goes into the results
file. A survivor is a gap in the tests, unless it computes the same: whoever finds that writes `equivalent`, and why,
into its row, which holds for that change of that line.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.mutation.mutants import Mutant, diff_of, mutants

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "mutation.json"

_LEAST = 60.0
"""Seconds that tests have at least; else five times what they take without a mutant."""

_NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "build", "dist")

Row = dict[str, Any]


_FOLDERS: Mapping[str, Sequence[str]] = {
    "rewriter/proof": ("rewriter/proof",),
    "passes": ("passes/programs", "passes/match"),
    "rewriter/compare": ("rewriter/compare",),
    "rewriter/files": ("rewriter/files",),
    "rewriter/graph": ("rewriter/graph",),
}
"""Room to the folders whose modules decide something."""

ROOMS: Mapping[str, Sequence[str]] = {
    room: [
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.name != "__init__.py"
    ]
    for room, folders in _FOLDERS.items()
}

_WHOLE = ("tests/rewriter/api/test_rewriting.py",)
"""What sees the effect of most modules."""


def suites_of(module: str) -> list[tuple[str, ...]]:
    """The tests of a module, group by group: its own, those of its folder, those of the room, and of the whole way."""
    path = Path("tests") / module
    groups = (
        [path.with_name(f"test_{path.name}")],
        [path.parent],
        [path.parent.parent],
        [Path(name) for name in _WHOLE],
    )
    found: list[tuple[str, ...]] = []
    for group in groups:
        tests = tuple(each.as_posix() for each in group if (ROOT / each).exists() and each != Path("tests"))
        if tests and tests not in found:
            found.append(tests)
    return found


@dataclass
class Copy:
    """A copy of the checkout, and how long tests take in it."""

    root: Path
    seconds: dict[tuple[str, ...], float] = field(default_factory=dict)
    written: int = 0

    def killer(self, mutant: Mutant) -> str | None:
        """What notices the mutant, put into the copy meanwhile: the first failing test, or the time limit, or None."""
        path = self.root / mutant.spec.module_path
        source = path.read_text(encoding="utf-8")
        for tests in suites_of(str(mutant.spec.module_path)):
            if tests not in self.seconds:
                start = time.monotonic()
                if failed := self._run(tests, None):
                    raise SystemExit(f"fails without a mutant: {failed}")
                self.seconds[tests] = time.monotonic() - start
            self._write(path, mutant.code)
            try:
                failed = self._run(tests, max(_LEAST, 5 * self.seconds[tests]))
            finally:
                self._write(path, source)
            if failed:
                return failed
        return None

    def _write(self, path: Path, code: str) -> None:
        path.write_text(code, encoding="utf-8")
        # Compiled modules are told apart by whole seconds and sizes, which two mutants may share.
        self.written += 1
        os.utime(path, (self.written, self.written))

    def _run(self, tests: Sequence[str], limit: float | None) -> str | None:
        """Run tests until one fails: which one, or that they took too long."""
        options = ["-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-m", "not exports and not slow"]
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=self.root,
            env={**os.environ, "PYTHONPATH": str(self.root)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            return "out of time"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        if process.returncode == 0:
            return None
        lines = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        named = [line.partition(" ")[2].partition(" - ")[0] for line in lines]
        return named[0] if named else f"status {process.returncode}"


@contextmanager
def copied() -> Iterator[Copy]:
    """A copy of the checkout that is thrown away."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        root = Path(folder) / "checkout"
        shutil.copytree(ROOT, root, ignore=_NOT_COPIED)
        yield Copy(root)


def row_of(mutant: Mutant, room: str, seed: int, killer: str | None) -> Row:
    """A mutant and what became of it, for the results file."""
    spec, module = mutant.spec, str(mutant.spec.module_path)
    return {
        "room": room,
        "seed": seed,
        "module": module,
        "line": spec.start_pos[0],
        "operator": spec.operator_name.removeprefix("core/"),
        "occurrence": spec.occurrence,
        "diff": diff_of(mutant),
        "result": "killed" if killer else "survived",
        "by": killer or "",
    }


def score(rows: Sequence[Row]) -> str:
    """The score of each room as a table in Markdown."""
    lines = ["| room | mutants | equivalent | killed | survived | score |", "| --- | --- | --- | --- | --- | --- |"]
    for room in (*ROOMS, "all"):
        found = Counter(row["result"] for row in rows if room in (row["room"], "all"))
        if some := found["killed"] + found["survived"]:
            numbers = found.total(), found["equivalent"], found["killed"], found["survived"]
            lines.append(f"| `{room}` | {' | '.join(map(str, numbers))} | {100 * found['killed'] / some:.0f} % |")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Run mutants; 0 if none survived."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--room", choices=ROOMS, action="append", help="where to mutate; default everywhere")
    parser.add_argument("--sample", type=int, default=20, help="how many mutants of each room; default 20")
    parser.add_argument("--seed", type=int, default=0, help="which sample; default 0")
    parser.add_argument("--results", type=Path, default=RESULTS, help="rows are added to this file")
    parser.add_argument("--score", action="store_true", help="run nothing, print the score")
    options = parser.parse_args(arguments)
    rows: list[Row] = json.loads(options.results.read_text()) if options.results.exists() else []
    rooms = options.room or list(ROOMS)
    if not options.score:
        with copied() as copy:
            _try(rows, copy, options, rooms)
    rows = [row for row in rows if row["room"] in rooms]
    _say(score(rows))
    return 1 if any(row["result"] == "survived" for row in rows) else 0


def _try(rows: list[Row], copy: Copy, options: argparse.Namespace, rooms: Sequence[str]) -> None:
    """A sample of each room. A change that has a row is not tried again, unless it survived."""
    known = {_key(row): place for place, row in enumerate(rows)}
    for room in rooms:
        for mutant in mutants(ROOT, ROOMS[room], options.sample, options.seed):
            row = row_of(mutant, room, options.seed, None)
            # By the changed line, not by its place, which moves as a module grows.
            place = known.setdefault(_key(row), len(rows))
            if place < len(rows) and rows[place]["result"] != "survived":
                continue
            rows[place : place + 1] = [row_of(mutant, room, options.seed, copy.killer(mutant))]
            options.results.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
            row = rows[place]
            _say(f"{row['result']}: {row['module']}:{row['line']} {row['by']}")
            _say(*([f"    {line}" for line in row["diff"]] if row["result"] == "survived" else []))


def _key(row: Row) -> tuple[str, ...]:
    return row["module"], row["operator"], *row["diff"]


def _say(*lines: str) -> None:
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
