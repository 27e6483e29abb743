"""`rewrite doctor`: what it finds on this machine, and each thing that can be wrong, planted; and `environment`."""

import json
import os
import platform
import socket
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import onnx
import pytest

from rewriter import doctor
from rewriter.api import diagnosing
from rewriter.api.run import environment
from rewriter.cli import run
from rewriter.errors import ProviderError
from rewriter.files.load import load_model
from rewriter.ort import PROVIDERS
from tests.conftest import Ran
from tests.textmodels import SILU, mlp


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[bool, str]]:
    """What became of each provider; one that is not named works."""
    found: dict[str, tuple[bool, str]] = {}
    monkeypatch.setattr(diagnosing, "_state", lambda provider: found.get(provider.name, (True, "")))
    monkeypatch.setattr(diagnosing, "distributions", lambda: [SimpleNamespace(name="onnxruntime")])
    return found


def test_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(mlp(SILU), "model.onnx")
    status = run(["doctor", "model.onnx", "--json", "found.json"])
    text, found = capsys.readouterr().out, json.loads(Path("found.json").read_text(encoding="utf-8"))
    assert status == found["exit_status"] == int(bool(found["problems"]))
    assert found["providers"]["cpu"] == ""
    assert found["environment"]["onnx"] == onnx.__version__ in text
    assert found["model_bytes"] == Path("model.onnx").stat().st_size


def test_a_broken_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "onnxruntime cannot be imported (no such library); pip install --force-reinstall"

    def broken() -> None:
        raise ProviderError(said)

    cpu, openvino = (next(each for each in PROVIDERS if each.name == name) for name in ("cpu", "openvino"))
    assert diagnosing._state(cpu) == (True, "")
    monkeypatch.setattr(diagnosing, "load_onnxruntime", lambda: SimpleNamespace(get_available_providers=list))
    assert diagnosing._state(openvino)[0] is False
    monkeypatch.setattr(diagnosing, "load_onnxruntime", broken)
    assert diagnosing._state(cpu) == (True, said)


def test_only_providers_that_are_used_unasked_are_problems(states: dict[str, tuple[bool, str]]) -> None:
    states |= {"cuda": (True, "no device"), "openvino": (True, "no device"), "webgpu": (False, "not built")}
    found = doctor()
    assert (found.problems, found.exit_status, found.providers["openvino"]) == (("no device",), 1, "no device")
    states["cuda"] = (False, "not built")
    assert doctor().problems == ()


@pytest.mark.usefixtures("states")
def test_several_onnxruntimes(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["onnxruntime", "onnxruntime-gpu", "onnxruntime-extensions", "onnx"]
    monkeypatch.setattr(diagnosing, "distributions", lambda: [SimpleNamespace(name=name) for name in names])
    (problem,) = doctor().problems
    assert problem.startswith("onnxruntime and onnxruntime-gpu overwrite each other's files; pip uninstall -y")


@pytest.mark.usefixtures("states")
def test_memory_disk_and_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx.save(mlp(SILU), tmp_path / "model.onnx")
    assert doctor(tmp_path / "model.onnx").problems == ()
    monkeypatch.setattr(diagnosing, "_memory", lambda: 10)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=20))
    monkeypatch.setattr("os.access", lambda *_: False)
    memory, disk, folder = doctor(tmp_path / "model.onnx").problems
    assert memory.endswith("10 B of memory are available; prove it in parts with --option proof=blocks")
    assert disk.endswith("20 B are free here; give -o another disk")
    assert folder.startswith("the folder is not writable")
    monkeypatch.setattr(diagnosing, "LARGE", 5)  # such a model is never loaded as a whole
    assert load_model(tmp_path / "model.onnx").size > 5
    assert doctor(tmp_path / "model.onnx").problems == (disk, folder)


def test_the_limit_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info, limit = tmp_path / "meminfo", tmp_path / "memory.max"
    monkeypatch.setattr(diagnosing, "MEMINFO", info)
    monkeypatch.setattr(diagnosing, "CGROUP", limit)
    assert diagnosing._memory() is None
    info.write_text("MemTotal: 8000 kB\nMemAvailable: 7000 kB\nHugePages_Total: 0\n", encoding="ascii")
    assert diagnosing._memory() == 7_168_000
    limit.write_text("4000000\n", encoding="ascii")
    assert diagnosing._memory() == 4_000_000
    limit.write_text("max\n", encoding="ascii")
    assert diagnosing._memory() == 7_168_000


def test_an_unreadable_model(tmp_path: Path, ran: Ran) -> None:
    (tmp_path / "x.onnx").write_bytes(b"junk")
    assert ran(4, ["doctor", os.fspath(tmp_path / "x.onnx")]).refusal


# -- what a result was made with ------------------------------------------------------------------------------------


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
    monkeypatch.setattr("rewriter.api.run._CPUINFO", info)
    assert environment()["processor"] == "Some \N{REPLACEMENT CHARACTER}[31mCPU @ 2 GHz"
