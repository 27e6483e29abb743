"""Faults at some system calls, and that the checks see what they are for; `python -m tests.faults` tries all calls."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import slow
from tests.faults.calls import HAVE_STRACE
from tests.faults.trial import OLD, Setting, after, tried

NEW = b"the new model"


@slow
@pytest.mark.skipif(not HAVE_STRACE, reason="strace is not installed")
@pytest.mark.parametrize("fault", ["ENOSPC", "EIO", "SIGKILL", "SIGTERM", "SIGINT"])
def test_some_faults(fault: str, tmp_path: Path) -> None:
    setting = Setting(external=True, previous=True)
    calls = [call for call in setting.calls(tmp_path / "expected") if call.writes]
    assert {call.name for call in calls} >= {"openat", "write", "fsync", "rename", "unlink"}
    last = {call.name: call for call in calls}
    for call in (*last.values(), calls[0]):
        outcome = tried(setting, call, fault, tmp_path / "expected", tmp_path / f"{call.name}-{call.number}")
        assert not outcome.findings, (call, outcome)
        survives = call.name in ("unlink", "fsync")
        assert outcome.status != 0 or survives, (call, outcome)


@slow
@pytest.mark.skipif(not HAVE_STRACE, reason="strace is not installed")
def test_a_fault_that_misses_its_call_is_tried_again(tmp_path: Path) -> None:
    setting = Setting(external=False, previous=True)
    made = [call for call in setting.calls(tmp_path / "expected") if call.name == "openat"]
    shifted = replace(made[-1], number=made[-1].number - 2)
    outcome = tried(setting, shifted, "ENOSPC", tmp_path / "expected", tmp_path / "tried")
    assert outcome.status == 2
    assert "r.json" in outcome.message
    assert (tmp_path / "tried" / "1").exists()
    with pytest.raises(LookupError):
        tried(setting, replace(made[-1], text="another"), "ENOSPC", tmp_path / "expected", tmp_path / "never")


@pytest.mark.parametrize(
    ("files", "status", "said", "finding"),
    [
        ({"attnonly.onnx": OLD}, 2, "rewrite: the disk is full", ""),
        ({"attnonly.onnx": NEW, "r.json": b"{}"}, 0, "", ""),
        ({"attnonly.onnx": OLD, ".rewrite-0.onnx": b""}, -9, "", ""),
        ({"attnonly.onnx": OLD, ".rewrite-0.onnx": b""}, 2, "rewrite: full", "left behind"),
        ({"attnonly.onnx": NEW[:4]}, -9, "", "neither the old nor the new"),
        ({}, -9, "", "neither the old nor the new"),
        ({"attnonly.onnx": OLD}, 0, "", "neither the old nor the new"),
        ({"attnonly.onnx": NEW, "r.json": b"{"}, -9, "", "half a report"),
        ({"attnonly.onnx": OLD}, 2, "two\nlines", "not one line"),
        ({"attnonly.onnx": OLD}, 2, "50%, proving\nrewrite: full", ""),
        ({"attnonly.onnx": OLD}, 1, "Traceback (most recent call last)", "ended with 1"),
        ({"attnonly.onnx": OLD}, 70, "rewrite: internal error", "ended with 70"),
    ],
)
def test_the_checks_see_what_they_are_for(
    files: dict[str, bytes], status: int, said: str, finding: str, tmp_path: Path
) -> None:
    for name, content in (("expected", {"attnonly.onnx": NEW, "r.json": b"{}"}), ("tried", files)):
        (tmp_path / name / "out").mkdir(parents=True)
        for file, data in content.items():
            (tmp_path / name / "out" / file).write_bytes(data)
    run = subprocess.CompletedProcess([], status, "", said)
    found = after(Setting(external=False, previous=True), run, tmp_path / "expected", tmp_path / "tried")
    assert bool(found) == bool(finding)
    assert finding in "; ".join(found)
