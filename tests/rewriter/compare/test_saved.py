"""Runs that are saved and judged again, and files that are no such run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest

from rewriter import UsageError, judge, validate
from rewriter.cli import run
from rewriter.compare import saved
from rewriter.compare.saved import Recording, read_run
from tests.textmodels import SILU, mlp

Capture = pytest.CaptureFixture[str]
ABOUT = {"a": "a", "b": "b", "reference": "float64", "cases": ["one"], "operators": 2}


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """a.onnx, b.onnx whose output is off by 2^-7."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    model = mlp(SILU)
    onnx.save(model, "a.onnx")
    (bias,) = (each for each in model.graph.initializer if each.name == "b2")
    bias.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(bias) + np.float32(2**-7), "b2"))
    onnx.save(model, "b.onnx")


@pytest.mark.usefixtures("pair")
def test_other_tolerances_without_running(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(["validate", "a.onnx", "b.onnx", "--save-run", "run.npz", "-q"]) == 1
    Path("a.onnx").unlink()
    Path("b.onnx").unlink()
    capsys.readouterr()
    assert run(["judge", "run.npz", "--atol", "0.0079"]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[-1].startswith("PASSED  b.onnx computes what a.onnx does on cpu")
    assert run(["judge", "run.npz", "--atol", "0.0077", "--json", "found.json"]) == 1
    text = capsys.readouterr().out
    assert "output out: error 0.00781 exceeds atol 0.0077, rtol 0 by " in text
    assert "bisect" not in text
    found = json.loads(Path("found.json").read_text(encoding="utf-8"))
    assert (found["a"], found["b"], found["same"]) == ("a.onnx", "b.onnx", False)
    assert found["providers"]["cpu"]["outputs"]["out"]["stats"]["max_abs"] == pytest.approx(2**-7, rel=1e-3)


@pytest.mark.usefixtures("pair")
def test_the_verdict_is_that_of_the_comparison() -> None:
    for atol in (1e-2, 1e-3):
        direct = validate("a.onnx", "b.onnx", providers=["cpu"], atol=atol, save_run="run.npz")
        again = judge("run.npz", atol=atol)
        assert again.same == direct.same == (atol > 2**-7)
        assert again.providers["cpu"].outputs["out"].stats == direct.providers["cpu"].outputs["out"].stats
    assert judge("run.npz", expect="int8").same
    assert not judge("run.npz", expect="fp16", atol={"out": 1e-4}).same


@pytest.mark.usefixtures("pair")
def test_usage(capsys: Capture) -> None:
    assert run(["validate", "a.onnx", "b.onnx", "--save-run", "run.txt"]) == 2
    assert "must end in .npz" in capsys.readouterr().err
    assert run(["validate", "a.onnx", "b.onnx", "--save-run", "nowhere/run.npz"]) == 2
    assert "does not exist" in capsys.readouterr().err
    np.savez("x.npz", x=np.zeros((1, 1, 4), np.float32))
    assert run(["validate", "a.onnx", "b.onnx", "--inputs", "x.npz", "--save-run", "./x.npz"]) == 2
    assert "would replace the inputs" in capsys.readouterr().err
    run(["validate", "a.onnx", "b.onnx", "--save-run", "run.npz", "-q"])
    assert run(["judge", "run.npz"]) == 2
    assert "output 'out' has no tolerance; give --atol" in capsys.readouterr().err
    assert run(["judge", "run.npz", "--atol", "other:1"]) == 2
    assert "which is not an output; the outputs are: out" in capsys.readouterr().err


def recorded(path: Path, a: Any, b: Any) -> None:
    recording = Recording()
    recording.keep("cpu", True, [{"y": a, "n": np.arange(3)}], [{"y": b, "n": np.arange(3)}])
    recording.save(path, ABOUT)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_types_survive(tmp_path: Path, dtype: Any) -> None:
    values = np.asarray([[0.5, -3.0]]).astype(dtype)
    recorded(tmp_path / "run.npz", values, values)
    found = read_run(tmp_path / "run.npz")
    assert found.runs[0][2][0]["y"].dtype == dtype
    assert np.array_equal(found.runs[0][2][0]["y"], values)
    assert judge(tmp_path / "run.npz", atol=0.0).same


def test_integers_must_be_equal_and_nan_in_place(tmp_path: Path) -> None:
    path = tmp_path / "run.npz"
    recorded(path, np.asarray([1.0, np.nan]), np.asarray([1.0, np.nan]))
    assert judge(path, atol=0.0).same
    recorded(path, np.asarray([1.0, np.nan]), np.asarray([np.nan, 1.0]))
    assert not judge(path, atol=1e9).same
    recorded(path, np.asarray([np.nan]), np.asarray([np.nan]))
    assert judge(path, atol=1.0).failures == (
        "nothing could be compared: output y is NaN or infinite throughout, in every case",
    )
    recording = Recording()
    recording.keep("cpu", True, [{"n": np.arange(3)}], [{"n": np.arange(3) + 1}])
    recording.save(path, ABOUT)
    assert not judge(path).same


def tampered(path: Path, change: Any) -> None:
    with np.load(path) as archive:
        arrays = {key: archive[key] for key in archive.files}
    about = json.loads(bytes(arrays["run"]))
    change(arrays, about)
    if "run" in arrays:
        arrays["run"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
    np.savez(path, **arrays)


@pytest.mark.parametrize(
    "change",
    [
        lambda arrays, _: arrays.pop("run"),
        lambda arrays, _: arrays.pop("0/b/0/1"),
        lambda arrays, _: arrays.update({"0/a/0/0": np.zeros(2, np.complex64)}),
        lambda _, about: about.update(version=99),
        lambda _, about: about.update(runs=[]),
        lambda _, about: about.update(a=3),
        lambda _, about: about.update(operators="many"),
        lambda _, about: about["runs"][0].update(cases=10**9),
        lambda _, about: about["runs"][0].update(a=[]),
        lambda _, about: about["runs"][0]["b"].pop("y"),
        lambda _, about: about.update(runs=7),
    ],
)
def test_damaged_runs(tmp_path: Path, change: Any) -> None:
    path = tmp_path / "run.npz"
    recorded(path, np.zeros(2), np.zeros(2))
    tampered(path, change)
    with pytest.raises(UsageError, match="run"):
        judge(path, atol=1.0)


def test_files_that_are_no_runs(tmp_path: Path) -> None:
    for name, data in (("empty.npz", b""), ("text.npz", b"hello"), ("zip.npz", b"PK\x03\x04")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UsageError, match="is not a run"):
            judge(tmp_path / name, atol=1.0)
    np.savez(tmp_path / "pickled.npz", run=np.asarray([{}], object))
    with pytest.raises(UsageError, match="is not a run"):
        judge(tmp_path / "pickled.npz", atol=1.0)
    with pytest.raises(UsageError, match="no such file"):
        judge(tmp_path / "missing.npz", atol=1.0)
    assert saved.EXPECTED == ("fp16", "bf16", "int8")
