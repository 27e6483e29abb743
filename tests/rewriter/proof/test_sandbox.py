"""Isolated proofs: the same result; limits, crashes and lies of the child are one line, and leave nothing."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import onnx
import pytest

from rewriter import ExitStatus, ProviderError, UsageError, ValidationError, rewrite
from rewriter.api.rewriting import made
from rewriter.cli import run
from rewriter.plain import from_plain
from rewriter.proof import sandbox
from rewriter.proof.blocks.block import BlockProof
from rewriter.proof.settings import Settings
from rewriter.proof.validate import Validation
from tests.textmodels import ERF_GELU, SILU, mlp

pytestmark = pytest.mark.skipif(os.name != "posix", reason="resource limits of POSIX")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(mlp(ERF_GELU), path)
    return path


def test_the_result_is_that_of_a_proof_here(model: Path) -> None:
    told: list[str] = []
    apart = rewrite(
        model, isolate=True, memory_limit_mb=4000, time_limit=300, progress=lambda *step: told.append(step[0])
    )
    here = rewrite(model)
    assert apart.validation is not None
    assert here.validation is not None
    assert apart.validation.blocks == here.validation.blocks
    assert apart.validation.providers["cpu"].outputs == here.validation.providers["cpu"].outputs
    assert "proving mlp" in told


def test_a_failed_proof_fails_there_too(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(*arguments: Any) -> onnx.ModelProto:
        result = made(*arguments)
        tensor = next(each for each in result.graph.initializer if each.name.endswith("/heads/step"))
        tensor.float_data[:] = []
        tensor.CopyFrom(onnx.numpy_helper.from_array(0.01 + onnx.numpy_helper.to_array(tensor), tensor.name))
        return result

    monkeypatch.setattr(f"{rewrite.__module__}.made", planted)
    report = rewrite(model, model.with_name("out.onnx"), isolate=True)
    assert report.exit_status is ExitStatus.VALIDATION_FAILED
    assert [path.name for path in model.parent.iterdir()] == ["model.onnx"]


def test_errors_of_the_proof_come_back_as_they_are(model: Path) -> None:
    with pytest.raises(UsageError, match="no input has a dimension 'colour'"):
        rewrite(model, isolate=True, dims={"colour": 3})


def test_too_little_memory(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = model.with_name("out.onnx")
    arguments = [str(model), "-o", str(out), "--isolate", "--memory-limit-mb", "60"]
    assert run(arguments) == 1
    err = capsys.readouterr().err
    assert re.search(r"the isolated proof (ran out of memory|was ended .*memory ran out) \(it had 60 MB\)", err)
    assert err.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize(
    "message",
    [
        {"error": "MemoryError", "message": ""},
        {"error": "EncodeError", "message": "Failed to serialize proto"},
        {"error": "DecodeError", "message": "Error parsing message with type 'onnx.NodeProto': Arena alloc failed"},
        {"error": "OSError", "message": "[Errno 12] Cannot allocate memory"},
        {"error": "ImportError", "message": "libm.so: failed to map segment from shared object"},
    ],
)
def test_what_says_that_memory_ran_out(message: dict[str, Any]) -> None:
    limited = sandbox._error(message, Settings(memory_limit_mb=60))
    assert str(limited).startswith("the isolated proof ran out of memory (it had 60 MB)")
    assert str(sandbox._error({**message, "message": "else", "error": "OSError"}, Settings())).endswith("OSError: else")


def processes() -> set[int]:
    """Children of this process, by their numbers."""
    own = str(os.getpid())
    stats = {int(entry.name): entry / "stat" for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    found = set()
    for number, stat in stats.items():
        try:
            if stat.read_text().rpartition(")")[2].split()[1] == own:
                found.add(number)
        except OSError:
            continue
    return found


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Let another program take the child's place."""
    program = folder / "child"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("kill -SEGV $$", "the isolated proof was ended by SIGSEGV: the model crashes onnxruntime, or memory ran out"),
        ("kill -KILL $$", "the isolated proof was ended by SIGKILL"),
        ("exit 7", "the isolated proof was ended with status 7"),
        ("echo no JSON", "the isolated proof was ended "),
        ("echo '[1]'", "the isolated proof was ended "),
        ("""echo '{"error": "ValidationError", "message": "it\\\\u001b[31m said"}'""", r"^it.*said$"),
        ("""echo '{"error": "ProviderError", "message": "none"}'""", "^none$"),
        ("""echo '{"error": "Nonsense", "message": "what"}'""", "the isolated proof failed: Nonsense: what"),
        ("""echo '{"error": "MemoryError", "message": ""}'""", "ran out of memory; give it more"),
        ("""echo '{"result": {"passed": true}}'""", "the isolated proof returned a malformed result"),
    ],
)
def test_what_becomes_of_the_child_is_one_line(
    script: str, message: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, script)
    with pytest.raises((ValidationError, ProviderError), match=message) as caught:
        rewrite(model, isolate=True)
    assert str(caught.value).isprintable()


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
def test_out_of_time_leaves_no_process(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A grandchild, as a worker would be, and a child that waits for it.
    # Neither ends by itself: a proof that waited for them would not end.
    stand_in(tmp_path, monkeypatch, f"sleep 1000000 & echo $! > {tmp_path}/grandchild; wait")
    before = processes()
    with pytest.raises(ValidationError, match="did not finish within 2 s and was stopped; give it more time"):
        rewrite(model, model.with_name("out.onnx"), isolate=True, time_limit=2)
    assert processes() == before
    grandchild = Path("/proc") / (tmp_path / "grandchild").read_text().strip() / "cmdline"
    assert not grandchild.exists() or b"sleep" not in grandchild.read_bytes()
    assert not model.with_name("out.onnx").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_limit_mb": 10}, "a memory limit applies only to an isolated proof: add --isolate"),
        ({"time_limit": 1.0}, "a time limit applies only to an isolated proof"),
        ({"isolate": True, "time_limit": 0.0}, "time_limit is 0.0; it must be a number above 0"),
    ],
)
def test_limits_that_cannot_be_followed(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        rewrite(mlp(SILU), **options)


def test_a_system_without_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewriter.proof.settings.os.name", "nt")
    with pytest.raises(UsageError, match="--isolate needs the resource limits of a POSIX system"):
        rewrite(mlp(SILU), isolate=True)


GOOD: dict[str, Any] = {
    "name": "mlp", "exact_error": None, "region_error": 1e-7, "region_ratio": 1, "block_error": None,
    "block_ratio": None, "failures": ["a", "b"], "infinite": [],
    "region_original_error": None, "block_original_error": None, "block_allowed": None,
}  # fmt: skip


def test_plain_data_become_the_dataclass() -> None:
    made = from_plain(BlockProof, GOOD)
    assert made == BlockProof("mlp", None, 1e-7, 1.0, None, None, ("a", "b"))


@pytest.mark.parametrize(
    "change",
    [{"name": 3}, {"region_error": "1"}, {"region_error": True}, {"failures": "ab"}, {"failures": [1]}, {"more": 1}],
)
def test_plain_data_of_another_form(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^(not a |BlockProof has other fields)"):
        from_plain(BlockProof, {**GOOD, **change})
    with pytest.raises(ValueError, match="not a Validation"):
        from_plain(Validation, [])
