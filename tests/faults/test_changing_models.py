"""A model that changes while it is converted, and two runs with one OUT: OUT is the old or the new model, complete."""

import faulthandler
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from rewriter import ExitStatus, RewriteError, rewrite
from tests.textmodels import SILU, mlp

OLD = b"what OUT was before"
_MOMENTS = 40
"""More than a run has steps."""
_NEVER, _CRASHED = 98, 99


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def _zeroed(path: Path) -> None:
    third = path.stat().st_size // 3
    with path.open("r+b") as file:
        file.seek(third)
        file.write(bytes(third))


def _replaced(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    other.replace(path)


CHANGES: dict[str, Callable[[Path], object]] = {
    "halved": lambda path: os.truncate(path, path.stat().st_size // 2),
    "emptied": lambda path: os.truncate(path, 0),
    "zeroed": _zeroed,
    "replaced": _replaced,
    "removed": Path.unlink,
}


@pytest.mark.sample(0)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("external", [False, True], ids=["one-file", "external-data"])
def test_a_model_that_changes_at_any_step(change: Callable[[Path], object], external: bool, tmp_path: Path) -> None:
    """A file that shrinks while it is mapped ends the process, as SIGKILL would; the next run cleans up."""
    ends = set()
    for moment in range(1, _MOMENTS):
        folder = tmp_path / str(moment)
        for name in ("in", "out"):
            (folder / name).mkdir(parents=True)
        source, out = folder / "in" / "model.onnx", folder / "out" / "attnonly.onnx"
        onnx.save(mlp(SILU), str(source), save_as_external_data=external, location="w.bin", size_threshold=0)
        kept = files(folder / "in")
        out.write_bytes(OLD)
        status = _forked(lambda: _converted(source, out, moment, change))  # noqa: B023 - called at once
        if status == _NEVER:
            break
        ends.add(status)
        new = status == ExitStatus.CONVERTED
        assert (out.read_bytes() != OLD) is new, (moment, status)
        if new:
            onnx.checker.check_model(str(out), full_check=True)
        elif status != -signal.SIGBUS:
            assert list(files(folder / "out")) == ["attnonly.onnx"], (moment, status)
        else:
            for name, data in kept.items():
                (folder / "in" / name).write_bytes(data)
            assert rewrite(source, out, force=True).exit_status is ExitStatus.CONVERTED
        assert {Path(name).suffix for name in files(folder / "out")} <= {".onnx", ".data"}
    else:
        pytest.fail("a run has more steps than were tried")
    assert {ExitStatus.CONVERTED, ExitStatus.BAD_MODEL} & ends
    known = {ExitStatus.CONVERTED, ExitStatus.VALIDATION_FAILED, ExitStatus.USAGE, ExitStatus.BAD_MODEL}
    assert ends <= {*known, -signal.SIGBUS}


def _converted(source: Path, out: Path, moment: int, change: Callable[[Path], object]) -> int:
    data = source.with_name("w.bin")
    seen = 0

    def progress(*_: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == moment:
            change(data if data.exists() else source)

    try:
        report = rewrite(source, out, force=True, progress=progress)
    except RewriteError as error:
        return int(error.exit_status)
    return int(report.exit_status) if seen >= moment else _NEVER


def _forked(run: Callable[[], int]) -> int:
    """The status of a run in a separate process; negative for a signal."""
    child = os.fork()
    if not child:
        faulthandler.disable()  # pytest's, which would say where the signal came
        status = _CRASHED
        try:
            status = run()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.sample(0)
@pytest.mark.parametrize("force", [[], ["--force"]], ids=["new", "force"])
def test_two_runs_with_one_output(force: list[str], tmp_path: Path) -> None:
    onnx.save(mlp(SILU), tmp_path / "model.onnx")
    (tmp_path / "out").mkdir()
    out = tmp_path / "out" / "attnonly.onnx"
    command = [sys.executable, "-m", "rewriter", str(tmp_path / "model.onnx"), "-o", str(out), *force]
    runs = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    said = [run.communicate()[1] for run in runs]
    statuses = sorted(run.returncode for run in runs)
    assert statuses[0] == 0, said
    assert set(statuses) <= {0, 2}, said
    assert all("exists" in text for run, text in zip(runs, said, strict=True) if run.returncode == ExitStatus.USAGE)
    onnx.checker.check_model(str(out), full_check=True)
    assert list(files(out.parent)) == ["attnonly.onnx"]
