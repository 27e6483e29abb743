"""One fault in one run of the command line, and what must hold after it.

- OUT is what it was, or the new model, complete; the same holds for the report.
- A run that ends by itself says in one line what went wrong, has a documented status, and leaves nothing behind.
- After a run that was killed, or could not remove a file, the next run for the same OUT succeeds and removes what is
  left.
- The source does not change.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import onnx

from tests.faults.calls import Call, calls_of, traced
from tests.textmodels import SILU, mlp

ERRORS = ("ENOSPC", "EIO", "EDQUOT")
SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT")
_STATUSES = {0, 1, 2, 4, 130, 143}
OLD = b"what OUT was before"


@dataclass(frozen=True)
class Setting:
    """Where a run finds its files.

    Attributes:
        external: whether the weights lie beside the model, which is in another directory than OUT.
        previous: whether there is an OUT already.
    """

    external: bool
    previous: bool

    def prepare(self, folder: Path) -> None:
        """Make the files of a run below an empty folder."""
        for name in ("in", "out"):
            (folder / name).mkdir(parents=True)
        model = mlp(SILU)
        onnx.save(
            model,
            str(folder / "in" / "model.onnx"),
            save_as_external_data=self.external,
            location="w.bin",
            size_threshold=0,
        )
        if self.previous:
            (folder / "out" / "attnonly.onnx").write_bytes(OLD)

    def command(self, folder: Path) -> list[str]:
        out = folder / "out"
        files = [str(folder / "in" / "model.onnx"), "-o", str(out / "attnonly.onnx"), "--report", str(out / "r.json")]
        return ["-m", "rewriter", *files, "--quick", "--force"]

    def calls(self, folder: Path) -> list[Call]:
        """The calls of a run without faults. OUT and the report that it writes are what `check` expects."""
        self.prepare(folder)
        return calls_of(self.command(folder), folder, folder / "log")


SETTINGS = [Setting(external, previous) for external in (False, True) for previous in (False, True)]


@dataclass(frozen=True)
class Outcome:
    """How a run with a fault ended.

    Attributes:
        status: exit status; negative for a signal.
        findings: what should have been otherwise.
        message: what it said.
    """

    status: int
    findings: tuple[str, ...]
    message: str


def tried(setting: Setting, call: Call, fault: str, expected: Path, folder: Path) -> Outcome:
    """Run with a fault at one call; `expected` is the folder of a run without one."""
    setting.prepare(folder)
    source = _files(folder / "in")
    kind = "signal" if fault in SIGNALS else "error"
    inject = f"inject={call.name}:{kind}={fault}:when={call.number}"
    run = traced(setting.command(folder), folder / "log", "-e", inject)
    findings = after(setting, run, call, expected, folder)
    if run.returncode < 0 or run.returncode > 128 or call.name == "unlink":
        again = subprocess.run(
            [sys.executable, "-B", *setting.command(folder)], capture_output=True, text=True, check=False
        )
        if again.returncode != 0:
            findings.append(f"the next run ends with {again.returncode}: {again.stderr.strip()}")
        if left := set(_files(folder / "out")) ^ set(_files(expected / "out")):
            findings.append(f"after the next run: {sorted(left)}")
    if _files(folder / "in") != source:
        findings.append("the source changed")
    return Outcome(run.returncode, tuple(findings), run.stderr.strip())


def after(
    setting: Setting, run: subprocess.CompletedProcess[str], call: Call, expected: Path, folder: Path
) -> list[str]:
    """What is wrong right after the run."""
    found = []
    killed = run.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)
    if "Traceback" in run.stderr or (run.returncode not in _STATUSES and not killed):
        found.append(f"ended with {run.returncode}: {run.stderr.strip()[-300:]}")
    if run.returncode != 0 and not killed and len(run.stderr.strip().splitlines()) != 1:
        found.append(f"not one line: {run.stderr.strip()!r}")
    made, wanted = _files(folder / "out"), _files(expected / "out")
    before = {"attnonly.onnx": OLD} if setting.previous else {}
    out = made.get("attnonly.onnx")
    if out not in (before.get("attnonly.onnx"), wanted["attnonly.onnx"]) or (run.returncode == 0 and out == OLD):
        found.append("OUT is neither the old nor the new model")
    if out == wanted["attnonly.onnx"] and any(made.get(name) != wanted[name] for name in wanted if name[-4:] == "data"):
        found.append("OUT is there without its data")
    if "r.json" in made:
        try:
            json.loads(made["r.json"])
        except ValueError:
            found.append("half a report")
    # What the system refuses to remove stays until the next run.
    if not killed and call.name != "unlink" and (left := {name for name in made if name not in wanted}):
        found.append(f"left behind: {sorted(left)}")
    if not killed and out != wanted["attnonly.onnx"] and (left := {*made} - {*before, "r.json"}):
        found.append(f"left behind without OUT: {sorted(left)}")
    return found


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
