"""What a result was made with."""

from __future__ import annotations

import platform
import socket
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import rewriter.report.environment as module
from rewriter import rewrite
from rewriter.report.environment import environment
from tests.textmodels import SILU, mlp


@pytest.fixture(autouse=True)
def fresh() -> None:
    module._processor.cache_clear()
    module._version.cache_clear()


def test_versions_are_those_installed() -> None:
    found = environment()
    assert found["onnxruntime"] == version("onnxruntime")
    assert found["Python"] == platform.python_version()
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


def test_a_package_in_place_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"onnxruntime-gpu": "1.2.3"}

    def found(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(module, "version", found)
    assert environment()["onnxruntime"] == "1.2.3 (onnxruntime-gpu)"
    assert environment()["onnx"] == "unknown"


def test_report_holds_it() -> None:
    report = rewrite(mlp(SILU), dry_run=True)
    assert report.environment == environment()
    assert report.to_json()["environment"] == environment()
