"""`rewrite doctor`: what it finds on this machine, and each thing that can be wrong, planted."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest

from rewriter import doctor, rewrite
from rewriter.cli import run
from rewriter.files.load import load_model
from rewriter.health import diagnosing, machine, packages, probe
from rewriter.health.findings import Machine, ModelNeeds
from rewriter.health.libraries import needed
from tests.textmodels import SILU, mlp

GB = 10**9
BUILT = {"version": "1.30", "providers": ["CPUExecutionProvider"], "libraries": {}}
CUDA = {**BUILT, "providers": ["CUDAExecutionProvider", "CPUExecutionProvider"]}
FINE = {"reason": "", "float64": True}


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str | None, dict[str, Any]]:
    """What the child processes answer, by request."""
    found: dict[str | None, dict[str, Any]] = {None: BUILT, "cpu": FINE}
    monkeypatch.setattr(diagnosing, "ask", found.__getitem__)
    monkeypatch.setattr(diagnosing, "onnxruntimes", lambda: {"onnxruntime": "1.30.0"})
    return found


def test_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(mlp(SILU), "model.onnx")
    status = run(["doctor", "model.onnx", "--json", "found.json"])
    text, found = capsys.readouterr().out, json.loads(Path("found.json").read_text(encoding="utf-8"))
    assert status == found["exit_status"] == int(bool(found["problems"]))
    (cpu,) = (each for each in found["providers"] if each["name"] == "cpu")
    assert (cpu["built"], cpu["works"], cpu["float64"]) == (True, True, True)
    assert "cpu: works, float64 too" in text
    assert f"onnx {onnx.__version__}" in text
    assert found["model"]["bytes"] == Path("model.onnx").stat().st_size
    built = set(onnxruntime.get_available_providers())
    assert {each["name"] for each in found["providers"] if each["built"]} >= {"cpu"}
    assert set(found["others"]) <= built


def test_a_crash_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "onnxruntime.py").write_text("import os\nos.kill(os.getpid(), 11)\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert probe.ask(None) == {"crash": "the process ended by SIGSEGV"}


def test_a_hang_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "onnxruntime.py").write_text("import time\ntime.sleep(600)\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert probe.ask(None, seconds=0.5) == {"crash": "it did not answer within 0 s"}


def test_a_broken_onnxruntime(answers: dict[str | None, Any]) -> None:
    answers[None] = {"crash": "the process ended by SIGSEGV"}
    (problem,) = diagnosing.doctor().problems
    assert str(problem).startswith("onnxruntime cannot be imported (the process ended by SIGSEGV); pip install")


@pytest.mark.parametrize(
    ("libraries", "what", "advice"),
    [
        (
            {"libcuda.so.1": False, "libcublas.so.13": True},
            "not found: libcuda.so.1",
            "install an NVIDIA driver ('nvidia-smi' shows whether it works)",
        ),
        (
            {"libcuda.so.1": True, "libcublas.so.13": False, "libcudnn.so.9": False},
            "not found: libcublas.so.13, libcudnn.so.9",
            "pip install 'onnxruntime-gpu[cuda,cudnn]'",
        ),
        ({"libcuda.so.1": True}, "no CUDA-capable device", "it needs an NVIDIA driver, CUDA and cuDNN"),
    ],
)
def test_cuda_does_not_start(answers: dict[str | None, Any], libraries: Any, what: str, advice: str) -> None:
    answers[None] = {**CUDA, "libraries": libraries}
    answers["cuda"] = {"reason": "no CUDA-capable device", "float64": False}
    found = diagnosing.doctor()
    (problem,) = found.problems
    assert problem.what == f"execution provider cuda does not start ({what})"
    assert problem.advice.startswith(advice)
    assert found.exit_status == 1
    assert {each.name: each.works for each in found.providers if each.built} == {"cpu": True, "cuda": False}


def test_a_provider_that_is_used_only_when_named_is_no_problem(answers: dict[str | None, Any]) -> None:
    answers[None] = {**BUILT, "providers": ["TensorrtExecutionProvider", "CPUExecutionProvider"]}
    answers["tensorrt"] = {"crash": "the process ended by SIGABRT"}
    found = diagnosing.doctor()
    assert found.problems == ()
    (state,) = (each for each in found.providers if each.name == "tensorrt")
    assert (state.works, state.reason) == (False, "starting it crashes: the process ended by SIGABRT")


def test_a_provider_without_float64(answers: dict[str | None, Any], capsys: pytest.CaptureFixture[str]) -> None:
    answers[None] = {**BUILT, "providers": ["OpenVINOExecutionProvider", "CPUExecutionProvider"]}
    answers["openvino"] = {"reason": "", "float64": False}
    assert run(["doctor"]) == 0
    assert "openvino: works, no float64" in capsys.readouterr().out


def test_several_onnxruntimes(answers: dict[str | None, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosing, "onnxruntimes", lambda: {"onnxruntime": "1.30.0", "onnxruntime-gpu": "1.30.0"})
    (problem,) = diagnosing.doctor().problems
    assert problem.what == "onnxruntime and onnxruntime-gpu are installed at once and overwrite each other's files"
    assert problem.advice == "keep one: pip uninstall -y onnxruntime onnxruntime-gpu && pip install onnxruntime-gpu"


def test_missing_and_old_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        packages, "requires", lambda _: ["onnx>=1.21", "onnxruntime>=1.22", "numpy>=1.26", "x; extra == 'y'"]
    )
    found = {"onnx": "1.9.0", "onnxruntime": "1.22.0rc1", "numpy": ""}
    problems = [str(each) for each in packages.package_problems(found, {"onnxruntime-gpu": "1.22.0rc1"})]
    assert problems == [
        "onnx 1.9.0 is older than 1.21; pip install -U 'onnx>=1.21'",
        "the package numpy is missing; pip install 'numpy>=1.26'",
    ]


def test_another_package_takes_the_place_of_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name != "onnxruntime-openvino":
            raise PackageNotFoundError(name)
        return "1.24.1"

    monkeypatch.setattr(packages, "version", version)
    assert packages.packages()["onnxruntime"] == "1.24.1"
    assert packages.onnxruntimes() == {"onnxruntime-openvino": "1.24.1"}


@pytest.mark.parametrize(
    ("has", "needs", "what"),
    [
        (Machine(8 * GB, GB, GB, "x", True), ModelNeeds("m", 4 * GB, True, 2 * GB, 0), "2.0 GB of memory, and 1.0 GB"),
        (Machine(8 * GB, 8 * GB, GB, "x", True), ModelNeeds("m", GB, False, GB, 2 * GB), "2.0 GB, and 1.0 GB are free"),
        (Machine(8 * GB, 8 * GB, GB, "x", False), ModelNeeds("m", GB, False, GB, 0), "not writable"),
        (Machine(None, None, None, "x", True), ModelNeeds("m", 10**15, False, 10**15, 10**15), None),
        (Machine(8 * GB, 8 * GB, GB, "x", True), ModelNeeds("m", GB, False, GB, GB), None),
    ],
)  # fmt: skip
def test_memory_and_disk(has: Machine, needs: ModelNeeds, what: str | None) -> None:
    problems = [str(each) for each in machine.machine_problems(has, needs)]
    assert len(problems) == (what is not None)
    assert what is None or what in problems[0]


def test_the_limit_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text(
        "MemTotal: 8000 kB\nMemAvailable: 7000 kB\nHugePages_Total: 0\n", encoding="ascii"
    )
    monkeypatch.setattr(machine, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    found = machine.machine_at(tmp_path)
    assert (found.memory, found.available) == (8_192_000, 7_168_000)
    (tmp_path / "memory.max").write_text("4000000\n", encoding="ascii")
    (tmp_path / "memory.current").write_text("1000000\n", encoding="ascii")
    found = machine.machine_at(tmp_path)
    assert (found.memory, found.available) == (4_000_000, 3_000_000)
    (tmp_path / "memory.max").write_text("max\n", encoding="ascii")
    assert machine.machine_at(tmp_path).memory == 8_192_000


def test_what_a_large_model_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(mlp(SILU), path)
    whole = machine.needs_of(load_model(path), path, None)
    monkeypatch.setattr(machine, "LARGE", 10)
    by_blocks = machine.needs_of(load_model(path), path, None)
    assert (whole.by_blocks, by_blocks.by_blocks) == (False, True)
    assert whole.memory is None


def test_the_estimate_is_that_of_a_dry_run(answers: dict[str | None, Any], tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(mlp(SILU), path)
    planned, found = rewrite(path, dry_run=True).estimate, doctor(path).model
    assert planned is not None
    assert found is not None
    assert found.estimate == planned
    assert found.memory == planned.memory_bytes


def test_libraries_of_an_elf_file(tmp_path: Path) -> None:
    assert "libc.so.6" in needed(_native())
    whole = _native().read_bytes()
    for length in (0, 3, 20, 64, len(whole) // 2, len(whole) - 7):
        (tmp_path / "cut").write_bytes(whole[:length] or b"\0")
        assert isinstance(needed(tmp_path / "cut"), tuple)
    (tmp_path / "wild").write_bytes(
        b"\x7fELF\x02\x01" + bytes(34) + struct.pack("<Q", 2**63) + bytes(10) + b"\x40\0\xff\xff" + bytes(99)
    )
    assert needed(tmp_path / "wild") == ()


def _native() -> Path:
    return next(_libraries(Path(onnxruntime.__file__).parent / "capi"))


def _libraries(folder: Path) -> Iterator[Path]:
    yield from sorted(folder.glob("onnxruntime_pybind11_state*.so"))


def test_an_unreadable_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.onnx").write_bytes(b"junk")
    assert run(["doctor", os.fspath(tmp_path / "x.onnx")]) == 4
    assert capsys.readouterr().err.count("\n") == 1
