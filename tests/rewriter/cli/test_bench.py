"""`rewrite bench`: what it prints, writes and exits with."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from onnx import parser

from rewriter import rewrite
from rewriter.cli import run
from rewriter.ort.timing import measure
from tests.textmodels import SILU, mlp, text_model

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """a.onnx, b.onnx with heads, other.onnx with other inputs, fails.onnx that loads but does not run."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure, "__kwdefaults__", {"seconds": 0.0})
    onnx.save(mlp(SILU), "a.onnx")
    rewrite("a.onnx", "b.onnx", validate=False)
    onnx.save(text_model("z = Relu(w)", inputs="float[a, b, 4] w", outputs="float[a, b, 4] z"), "other.onnx")
    fails = """<ir_version: 8, opset_import: ["": 17]> g (float[n] x) => (float[m] y)
        <int64[1] shape = {-7}> { y = Expand(x, shape) }"""
    onnx.save(parser.parse_model(fails), "fails.onnx")
    return tmp_path


def test_measures(capsys: Capture) -> None:
    arguments = ["--tokens", "3", "--tokens", "5", "--provider", "cpu"]
    assert run(["bench", "a.onnx", "b.onnx", *arguments, "--json", "found.json"]) == 0
    text = capsys.readouterr().out
    for part in ("Time of one run: median of 10 rounds", "sequence 3", "sequence 5", "peak memory MB"):
        assert part in text
    assert text.splitlines()[-1].startswith("MEASURED  b.onnx takes ")
    assert " times as long as a.onnx (control " in text.splitlines()[-1]
    found = json.loads(Path("found.json").read_text(encoding="utf-8"))
    assert (found["original"], found["others"], found["control"]) == ("a.onnx", ["b.onnx"], "control")


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["a.onnx"], 2, "Missing argument 'REWRITTEN'"),
        (["a.onnx", "missing.onnx"], 4, "missing.onnx' does not exist"),
        (["a.onnx", "other.onnx"], 2, "other.onnx (B) takes other inputs than a.onnx (A): "),
        (["a.onnx", "b.onnx", "--tokens", "0"], 2, "tokens is 0; it must be an integer of at least 1"),
        (["a.onnx", "b.onnx", "--inputs", "missing.npz"], 2, "missing.npz: no such file"),
        (["a.onnx", "b.onnx", "--json", "nowhere/x.json"], 2, "does not exist; create it first"),
        (["a.onnx", "b.onnx", "--report", "b.onnx"], 2, "would replace another file"),
        (["a.onnx", "b.onnx", "--provider", "tpu"], 2, "unknown execution provider 'tpu'"),
        (["fails.onnx", "fails.onnx"], 1, "fails.onnx: onnxruntime could not run the model: "),
    ],
)
def test_errors_are_one_line(arguments: list[str], status: int, message: str, capsys: Capture) -> None:
    assert run(["bench", *arguments]) == status
    captured = capsys.readouterr()
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""
