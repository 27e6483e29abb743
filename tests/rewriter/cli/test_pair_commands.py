"""`rewrite validate` and `rewrite diff`: what they print, write and exit with."""

import json
import shutil
from pathlib import Path

import onnx
import pytest

from rewriter import rewrite
from tests.changes import change_values, weight
from tests.conftest import Ran
from tests.textmodels import SILU, mlp, text_model


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """a.onnx, b.onnx with heads, bad.onnx with another coefficient, other.onnx with other inputs."""
    folder, model = tmp_path_factory.mktemp("pair"), mlp(SILU)
    onnx.save(model, folder / "a.onnx")
    heads = rewrite(model, validate=False).rewritten
    onnx.save(heads, folder / "b.onnx")
    change_values(weight(heads, "mlp/heads/key"), "v.flat[0] = 1.001")
    onnx.save(heads, folder / "bad.onnx")
    onnx.save(text_model("z = Relu(x)", outputs="float[a, b, 4] z"), folder / "other.onnx")
    return folder


@pytest.fixture(autouse=True)
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same files in a folder to work in."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(shutil.copytree(made, tmp_path, dirs_exist_ok=True))


def test_validate_a_rewritten_model(ran: Ran) -> None:
    text = ran(0, ["validate", "a.onnx", "b.onnx"]).out
    assert "Errors as shares of the output's norm" in text
    assert "proved: for every input of every size, over the reals: each activation equal" in text
    assert text.splitlines()[-1].startswith(
        "CERTIFIED  b.onnx computes what a.onnx does for every input, and on cpu, error ratio "
    )


def test_validate_a_wrong_model(ran: Ran) -> None:
    text = ran(1, ["validate", "a.onnx", "bad.onnx"]).out
    assert "refuted: differs by 4.52e-06 at y = -10, more than 1e-15 (the activation h)" in text
    assert text.splitlines()[-1].startswith("DIFFERENT  bad.onnx does not compute what a.onnx does, in ")


@pytest.mark.slow
def test_tolerances(ran: Ran) -> None:
    for option, value, number in (("atol", "x", "'x'"), ("rtol", "-1", "-1.0")):
        error = ran(2, ["validate", "a.onnx", "b.onnx", f"--{option}", value]).err
        assert f"{option} is {number}; it must be a number of at least 0" in error
    text = ran(0, ["validate", "a.onnx", "bad.onnx", "--atol", "1"]).out
    assert text.splitlines()[-1].startswith("AGREES  "), "a tolerance takes the place of the rule"
    assert "the tolerance given" in ran(0, ["validate", "a.onnx", "a.onnx", "--atol", "0", "--rtol", "0"]).out
    assert "exceeds atol 1e-12, rtol 0 by" in ran(1, ["validate", "a.onnx", "b.onnx", "--atol", "1e-12"]).out


def test_diff_shows_both_sides(ran: Ran) -> None:
    text = ran(0, ["diff", "a.onnx", "b.onnx"]).out
    for part in (
        "attnonly::NeuronAttention        0       1       +1",
        "mlp/heads/key",
        "the same in both: 4 weights bit for bit",
    ):
        assert part in text, part
    assert text.splitlines()[-1].startswith("CERTIFIED  b.onnx computes what a.onnx does for every input")


def test_diff_of_wrong_models(ran: Ran) -> None:
    for other, said in (("bad", "bad.onnx does not compute"), ("other", "a.onnx and other.onnx have different inputs")):
        assert ran(1, ["diff", "a.onnx", f"{other}.onnx"]).out.splitlines()[-1].startswith(f"DIFFERENT  {said}")


def test_diff_says_where_they_part(ran: Ran) -> None:
    onnx.save(mlp("s = Sigmoid(y) t = Mul(y, s) h = Mul(t, $1.01)"), "w.onnx")
    lines = ran(1, ["diff", "a.onnx", "w.onnx"]).out.splitlines()
    assert (
        "first difference: Mul 'h' computes from 't' something that A does not compute; "
        "A: MatMul -> 'second', Add -> 'out'"
    ) in lines
    assert "3 nodes (Mul, MatMul, Add) from 't' to 'out': differs from 2 nodes of A (MatMul, Add)" in lines
    first, blank, failure, *rest = ran(1, ["diff", "a.onnx", "w.onnx", "--markdown"]).out.splitlines()
    assert (first, blank) == ("**DIFFERENT w.onnx does not compute what a.onnx does**", "")
    assert failure.startswith("- output out is off by 0.0105 of its norm")
    assert "&#91;0, 5, 2&#93;" in failure, "no name from a model means anything in Markdown"
    assert "| Mul | 1 | 2 | +1 |" in rest
    assert rest[rest.index("| Mul | 1 | 2 | +1 |") - 1] == "| --- | --- | --- | --- |"
    assert rest[-1] == "</details>"


def test_other_names(ran: Ran) -> None:
    onnx.save(text_model("q = Relu(x)", inputs="float[a, b, 4] x", outputs="float[a, b, 4] q"), "q.onnx")
    for command in ("validate", "diff", "certify"):
        assert ran(0, [command, "other.onnx", "q.onnx", "--map", "z=q"]).out.splitlines()[-1].startswith("CERTIFIED  ")
        assert "--map" in ran(1, [command, "other.onnx", "q.onnx"]).out


def test_an_unknown_dimension(ran: Ran) -> None:
    assert "nonsense" in ran(2, ["validate", "a.onnx", "b.onnx", "--dim", "nonsense=3"]).err


@pytest.mark.parametrize("option", ["--report", "--json"])
def test_report(ran: Ran, option: str) -> None:
    ran(0, ["validate", "a.onnx", "b.onnx", option, "r.json"])
    data = json.loads(Path("r.json").read_text(encoding="utf-8"))
    assert (data["version"], data["a"], data["b"], data["verdict"]) == (1, "a.onnx", "b.onnx", "certified")


@pytest.mark.sample(12)
@pytest.mark.parametrize("command", ["validate", "diff"])
@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["a.onnx"], 2, "Missing argument"),
        (["a.onnx", "missing.onnx"], 4, "missing.onnx' does not exist"),
        (["text.onnx", "a.onnx"], 4, "is a text file, not an ONNX model"),
        (["a.onnx", "cut.onnx"], 4, "cut.onnx' is not a readable ONNX model"),
        (["a.onnx", "b.onnx", "--inputs", "missing.npz"], 2, "missing.npz"),
        (["a.onnx", "b.onnx", "--map", "z"], 2, "--map: 'z' is not OLD=NEW"),
        (["a.onnx", "b.onnx", "--map", "y=out"], 2, "--map: the first model has no input or output 'y'"),
        (["a.onnx", "b.onnx", "--report", "no/r.json"], 2, "does not exist; create it first"),
        (["a.onnx", "b.onnx", "--report", "b.onnx"], 2, "would replace another file"),
        (["a.onnx", "b.onnx", "--report", "text.onnx"], 2, "exists and is not a .json file"),
        (["a.onnx", "fails.onnx"], 1, "rewrite: the rewritten model does not run: onnxruntime could not"),
        (["fails.onnx", "a.onnx"], 1, "rewrite: the original model does not run, so nothing can be tested"),
    ],
)
def test_broken_inputs_are_one_line(ran: Ran, command: str, arguments: list[str], status: int, message: str) -> None:
    Path("text.onnx").write_text("hello, this is not a model\n", encoding="utf-8")
    Path("cut.onnx").write_bytes(Path("a.onnx").read_bytes()[:-200])
    broken = onnx.load("a.onnx")
    broken.graph.node[0].op_type = "NoSuchOperator"
    onnx.save(broken, "fails.onnx")
    assert message in ran(status, [command, *arguments]).refusal
