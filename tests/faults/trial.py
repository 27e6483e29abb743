"""One fault in one run of the command line, and what must hold after it.

- OUT is what it was, or the new model, complete; the same holds for the report.
- A run that ends by itself says in one line what went wrong, has a documented status, and leaves nothing behind.
- After a run that was killed, or could not remove a file, the next run for the same OUT succeeds and removes what is
  left.
- The source does not change.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import onnx

from tests.faults.calls import Call, logged
from tests.faults.forked import run as run_again
from tests.faults.forked import traced
from tests.textmodels import SILU, mlp

ERRORS = ("ENOSPC", "EIO", "EDQUOT")
SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT")
_STATUSES = {0, 1, 2, 4, 130, 143}
_PROGRESS = re.compile(r"\d+%, ")
OLD = b"what OUT was before"


@dataclass(frozen=True)
class Setting:
    """Where a run finds its files.

    Attributes:
        external: whether the weights lie beside the model, which is in another directory than OUT.
        previous: whether there is an OUT already.
        folder: whether a folder of two models and another file is converted, into one that does not exist.
    """

    external: bool
    previous: bool
    folder: bool = False

    @property
    def model(self) -> str:
        """The model in the directory of OUT."""
        return "attnonly/model.onnx" if self.folder else "attnonly.onnx"

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
        if self.folder:
            (folder / "in" / "plain").mkdir()
            onnx.save(mlp("h = Identity(y)"), str(folder / "in" / "plain" / "plain.onnx"))
            (folder / "in" / "config.json").write_text("{}", encoding="utf-8")

    def arguments(self, folder: Path) -> list[str]:
        """Those of `rewrite`."""
        source, out = folder / "in", folder / "out"
        report = ["--report", str(out / "r.json")]
        if self.folder:
            return [str(source), "-o", str(out / "attnonly"), *report]
        return [str(source / "model.onnx"), "-o", str(out / "attnonly.onnx"), *report, "--force"]

    def calls(self, folder: Path) -> list[Call]:
        """The calls on its files in a run without faults, whose OUT and report are what `after` expects."""
        self.prepare(folder)
        run = traced(self.arguments(folder), folder / "log")
        assert run.returncode == 0, run.stderr
        made = [call for call in logged(folder / "log") if str(folder) in call.text]
        return [call for call in made if call.name != "openat" or call.writes]


SETTINGS = [
    *(Setting(external, previous) for external in (False, True) for previous in (False, True)),
    Setting(external=True, previous=False, folder=True),
]


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
    """Run with a fault at one call; `expected` is the folder of a run without one.

    The call is found by its number, which differs if a run reads something that the run before did not. So the log
    must show that the fault met the call that was meant.

    Raises:
        LookupError: the call was not met in five runs.
    """
    kind = "signal" if fault in SIGNALS else "error"
    number = call.number
    for attempt in range(5):
        place = folder / str(attempt)
        setting.prepare(place)
        source = files(place / "in")
        inject = f"inject={call.name}:{kind}={fault}:when={number}"
        run = traced(setting.arguments(place), place / "log", "-e", inject)
        met = [each for each in logged(place / "log") if (each.name, each.number) == (call.name, number)]
        if [each.like(place) for each in met] == [call.like(expected)]:
            return _outcome(setting, call, run, source, expected, place)
        number = _number_of(call, expected, setting, folder / f"calls-{attempt}")
    raise LookupError(f"no run met {call}")


def _number_of(call: Call, expected: Path, setting: Setting, folder: Path) -> int:
    """The number that a call of another run has in a new run."""
    texts = [each.text for each in logged(expected / "log") if each.name == call.name]
    before = texts[: texts.index(call.text) + 1] if call.text in texts else []
    nth = sum(replace(call, text=text).like(expected) == call.like(expected) for text in before)
    found = [each.number for each in setting.calls(folder) if each.like(folder) == call.like(expected)]
    return found[nth - 1] if 1 <= nth <= len(found) else call.number


def _outcome(
    setting: Setting,
    call: Call,
    run: subprocess.CompletedProcess[str],
    source: dict[str, bytes],
    expected: Path,
    folder: Path,
) -> Outcome:
    removing = call.name in ("unlink", "unlinkat", "rmdir")
    findings = after(setting, run, expected, folder, removing=removing)
    if run.returncode < 0 or run.returncode > 128 or removing:
        make_room(setting, folder)
        again = run_again(setting.arguments(folder))
        findings += after_the_next(again, expected, folder)
    if files(folder / "in") != source:
        findings.append("the source changed")
    return Outcome(run.returncode, tuple(findings), run.stderr.strip())


def make_room(setting: Setting, folder: Path) -> None:
    """Remove a folder that was written before the run was killed, since folders are never replaced."""
    if setting.folder:
        shutil.rmtree(folder / "out" / "attnonly", ignore_errors=True)


def after_the_next(run: subprocess.CompletedProcess[str], expected: Path, folder: Path) -> list[str]:
    """What is wrong after the run that follows a killed one."""
    found = []
    if run.returncode != 0:
        found.append(f"the next run ends with {run.returncode}: {run.stderr.strip()}")
    if left := set(files(folder / "out")) ^ set(files(expected / "out")):
        found.append(f"after the next run: {sorted(left)}")
    return found


def after(
    setting: Setting, run: subprocess.CompletedProcess[str], expected: Path, folder: Path, *, removing: bool = False
) -> list[str]:
    """What is wrong right after the run; `removing`: the system did not let it remove a file."""
    found = []
    killed = run.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)
    if "Traceback" in run.stderr or (run.returncode not in _STATUSES and not killed):
        found.append(f"ended with {run.returncode}: {run.stderr.strip()[-300:]}")
    # On a slow machine there are lines such as "50%, running the original" as well.
    said = [line for line in run.stderr.strip().splitlines() if not _PROGRESS.match(line)]
    if run.returncode != 0 and not killed and len(said) != 1:
        found.append(f"not one line: {run.stderr.strip()!r}")
    made, wanted = files(folder / "out"), files(expected / "out")
    before = {"attnonly.onnx": OLD} if setting.previous else {}
    out = made.get(setting.model)
    if out not in (before.get(setting.model), wanted[setting.model]) or (run.returncode == 0 and out == OLD):
        found.append("OUT is neither the old nor the new model")
    if out == wanted[setting.model] and (lost := {*wanted} - {*made, "r.json"}):
        found.append(f"OUT is there without {sorted(lost)}")
    if any(made.get(name, data) != data for name, data in wanted.items() if name.endswith("data")):
        found.append("data are others")
    found += ["half a report"] if not _whole(made.get("r.json", b"{}")) else []
    # What the system refuses to remove stays until the next run.
    if not killed and not removing and (left := {name for name in made if name not in wanted}):
        found.append(f"left behind: {sorted(left)}")
    if not killed and out != wanted[setting.model] and (left := {*made} - {*before, "r.json"}) and not removing:
        found.append(f"left behind without OUT: {sorted(left)}")
    return found


def _whole(text: bytes) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def files(folder: Path) -> dict[str, bytes]:
    """The files below a folder; folders have names with a slash at the end."""
    found = sorted(folder.rglob("*"))
    named = {str(path.relative_to(folder)) + "/" * path.is_dir(): path for path in found}
    return {name: path.read_bytes() if path.is_file() else b"" for name, path in named.items()}
