"""Standard output: JSON, readers that go away, and errors that nobody foresaw."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest

from rewriter import rewrite
from tests.conftest import Ran
from tests.textmodels import text_model

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONWARNINGS": "error"}


def test_json_to_standard_output(folder: Path, ran: Ran) -> None:
    for option in (("--json",), ("--report", "-"), ("--json", "-")):
        out, err = ran(0, ["model.onnx", "--dry-run", *option])
        report = json.loads(out)
        assert (report["model"], report["exit_status"]) == ("model.onnx", 0)
        assert "PLANNED" in err


def test_json_into_a_file_or_not(folder: Path, ran: Ran) -> None:
    assert "PLANNED" in ran(0, ["model.onnx", "--dry-run", "--json", "plan.json"]).out
    assert json.loads((folder / "plan.json").read_text(encoding="utf-8"))["exit_status"] == 0
    assert json.loads(ran(0, ["validate", "--json", "model.onnx", "model.onnx"]).out)["verdict"] == "certified"


@pytest.mark.sample(0)
@pytest.mark.parametrize(("status", "shell"), [(0, 'exec "$@"'), (3, 'exec "$@"'), (0, 'exec "$@" >&-')])
def test_a_reader_that_goes_away(folder: Path, status: int, shell: str) -> None:
    if status:
        onnx.save(text_model("out = Abs(x)"), "model.onnx")
    command = ["sh", "-c", shell, "sh", sys.executable, "-m", "rewriter", "model.onnx", "-o", "out.onnx"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert len(process.stdout.read(1)) == (not shell.endswith(">&-"))
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == status
    assert (folder / "out.onnx").exists() == (status == 0)


@pytest.mark.parametrize("options", [["--help"], ["model.onnx", "--dry-run", "--json"]])
def test_a_full_disk_is_an_error_in_one_line(folder: Path, options: list[str]) -> None:
    command = [sys.executable, "-m", "rewriter", *options]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=ENVIRONMENT, check=False)
    fault = b"rewrite: cannot write standard output: No space left on device; free some space on its disk\n"
    assert (done.returncode, done.stderr) == (2, fault)


def test_no_arguments_print_the_help(ran: Ran) -> None:
    assert "Usage: rewrite [OPTIONS] MODEL" in ran(0, []).out


def test_70_an_internal_error(folder: Path, ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise KeyError(str(folder / "secret"))

    monkeypatch.setattr(f"{rewrite.__module__}.Judge", broken)
    out, err = ran(70, [str(folder / "model.onnx"), "-o", str(folder / "out.onnx")])
    assert out == ""
    place = r"KeyError in test_streams.py:\d+ broken, called by rewriting.py:\d+ \w+, called by "
    assert re.fullmatch(rf"rewrite: internal error \({place}.*\); this is a bug, please report it .*\n", err)
    assert "secret" not in err
    assert [path.name for path in folder.iterdir()] == ["model.onnx"]
