"""What a result was made with."""

import platform
import socket
from importlib.metadata import version
from pathlib import Path

import pytest

import rewriter.api.run as module
from rewriter.api.run import environment


def test_versions_are_those_installed() -> None:
    found = environment()
    assert (found["onnxruntime"], found["Python"]) == (version("onnxruntime"), platform.python_version())
    assert all(found.values())


def test_no_host_no_paths() -> None:
    text = " ".join(environment().values())
    assert socket.gethostname() not in text
    assert "/" not in text
    assert str(Path.home()) not in text


def test_processor_from_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nmodel name\t: Some \x1b[31mCPU @ 2 GHz\nmodel name : other\n", encoding="utf-8")
    monkeypatch.setattr(module, "_CPUINFO", info)
    assert environment()["processor"] == "Some \N{REPLACEMENT CHARACTER}[31mCPU @ 2 GHz"
