"""`rewrite validate` and `rewrite diff`: what they print, write and exit with."""

from __future__ import annotations

import json
import re
from pathlib import Path

import onnx
import pytest

from rewriter import rewrite
from rewriter.cli import run
from tests.changes import change_values, weight
from tests.textmodels import SILU, mlp, text_model

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """a.onnx, b.onnx with heads, bad.onnx with another coefficient, other.onnx with other inputs."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(tmp_path)
    model = mlp(SILU)
    onnx.save(model, "a.onnx")
    heads = rewrite(model, validate=False).rewritten
    onnx.save(heads, "b.onnx")
    change_values(weight(heads, "mlp/heads/key"), "v.flat[0] = 1.001")
    onnx.save(heads, "bad.onnx")
    onnx.save(text_model("z = Relu(x)", outputs="float[a, b, 4] z"), "other.onnx")
    return tmp_path


def test_validate_a_rewritten_model(capsys: Capture) -> None:
    assert run(["validate", "a.onnx", "b.onnx"]) == 0
    text = capsys.readouterr().out
    assert "Errors as shares of the output's norm" in text
    assert "proved: for every input of every size, over the reals: each activation equal" in text
    assert text.splitlines()[-1].startswith(
        "SAME  b.onnx computes what a.onnx does for every input, and on cpu, error ratio "
    )


def test_validate_a_wrong_model(capsys: Capture) -> None:
    assert run(["validate", "a.onnx", "bad.onnx", "--bisect"]) == 1
    text = capsys.readouterr().out
    assert "Guilty parts of B, each fed with what A computes" in text
    assert "refuted: Div 'output__1': differs by " in text
    assert re.search(
        r"DIFFERENT  bad.onnx does not compute what a.onnx does; guilty: mlp, activation, in [\d.]+ s", text
    )


def test_tolerances(capsys: Capture) -> None:
    for option, value, number in (("atol", "x", "'x'"), ("rtol", "-1", "-1.0")):
        assert run(["validate", "a.onnx", "b.onnx", f"--{option}", value]) == 2
        assert f"{option} is {number}; it must be a number of at least 0" in capsys.readouterr().err
    assert run(["validate", "a.onnx", "bad.onnx", "--atol", "1"]) == 1, "the heads themselves are wrong"
    assert "output out" not in capsys.readouterr().out
    assert run(["validate", "a.onnx", "a.onnx", "--atol", "0", "--rtol", "0"]) == 0
    assert "the tolerance given" in capsys.readouterr().out
    assert run(["validate", "a.onnx", "b.onnx", "--atol", "1e-12"]) == 1
    assert "exceeds atol 1e-12, rtol 0 by" in capsys.readouterr().out


def test_diff_shows_both_sides(capsys: Capture) -> None:
    assert run(["diff", "a.onnx", "b.onnx"]) == 0
    text = capsys.readouterr().out
    for part in (
        "2 nodes, Sigmoid 's' to Mul 'h' ",
        "5 nodes, Mul 'logit",
        "attnonly::NeuronAttention        0       1       +1",
        "mlp/heads/key",
        "the same in both: 4 nodes, 4 weights bit for bit",
    ):
        assert part in text, part
    assert text.splitlines()[-1].startswith("SAME  b.onnx computes what a.onnx does for every input")
    assert "their graphs differ" in text.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "status", "last"),
    [
        (["diff", "a.onnx", "a.onnx", "--graph-only"], 0, "a.onnx and a.onnx are the same graph with the same weights"),
        (["diff", "a.onnx", "b.onnx", "--graph-only"], 1, "DIFFERENT  a.onnx and b.onnx are different graphs"),
        (["diff", "a.onnx", "bad.onnx"], 1, "DIFFERENT  bad.onnx does not compute what a.onnx does"),
        (["validate", "a.onnx", "bad.onnx"], 1, "a.onnx does; --bisect names the guilty block, in "),
        (["diff", "a.onnx", "other.onnx"], 1, "DIFFERENT  a.onnx and other.onnx have different inputs or outputs"),
    ],
)
def test_exit_status(capsys: Capture, arguments: list[str], status: int, last: str) -> None:
    assert run(arguments) == status
    assert last in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("option", ["--report", "--json"])
def test_report(capsys: Capture, option: str) -> None:
    assert run(["validate", "a.onnx", "b.onnx", option, "r.json"]) == 0
    data = json.loads(Path("r.json").read_text(encoding="utf-8"))
    assert (data["version"], data["a"], data["b"], data["verdict"]) == (1, "a.onnx", "b.onnx", "same")


@pytest.mark.parametrize("command", ["validate", "diff"])
@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["a.onnx"], 2, "Missing argument"),
        (["a.onnx", "missing.onnx"], 4, "missing.onnx' does not exist"),
        (["text.onnx", "a.onnx"], 4, "is a text file, not an ONNX model"),
        (["a.onnx", "cut.onnx"], 4, "cut.onnx' is not a readable ONNX model"),
        (["a.onnx", "b.onnx", "--dim", "nonsense=3"], 2, "nonsense"),
        (["a.onnx", "b.onnx", "--inputs", "missing.npz"], 2, "missing.npz"),
        (["a.onnx", "b.onnx", "--report", "no/r.json"], 2, "does not exist; create it first"),
        (["a.onnx", "b.onnx", "--report", "b.onnx"], 2, "would replace another file"),
        (["a.onnx", "b.onnx", "--report", "text.onnx"], 2, "exists and is not a .json file"),
        (["a.onnx", "fails.onnx"], 1, "rewrite: the rewritten model does not run: onnxruntime could not"),
        (["fails.onnx", "a.onnx"], 1, "rewrite: the original model does not run, so nothing can be tested"),
    ],
)
def test_broken_inputs_are_one_line(
    capsys: Capture, command: str, arguments: list[str], status: int, message: str
) -> None:
    Path("text.onnx").write_text("hello, this is not a model\n", encoding="utf-8")
    Path("cut.onnx").write_bytes(Path("a.onnx").read_bytes()[:-200])
    broken = onnx.load("a.onnx")
    broken.graph.node[0].op_type = "NoSuchOperator"
    onnx.save(broken, "fails.onnx")
    assert run([command, *arguments]) == status
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert "Traceback" not in captured.err
