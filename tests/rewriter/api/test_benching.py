"""`rewrite bench`: what is measured on which inputs, what is refused, and what it prints, writes and exits with."""

import json
import shutil
from pathlib import Path

import onnx
import pytest
from onnx import parser

from rewriter import UsageError, bench, rewrite
from rewriter.api import comparing
from tests.committed import FOLDER
from tests.conftest import Ran
from tests.textmodels import SILU, mlp, text_model


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """a.onnx, b.onnx with heads, other.onnx with other inputs, fails.onnx that loads but does not run."""
    folder = tmp_path_factory.mktemp("bench")
    onnx.save(mlp(SILU), folder / "a.onnx")
    rewrite(folder / "a.onnx", folder / "b.onnx", validate=False)
    other = text_model("z = Relu(w)", inputs="float[a, b, 4] w", outputs="float[a, b, 4] z")
    onnx.save(other, folder / "other.onnx")
    fails = """<ir_version: 8, opset_import: ["": 17]> g (float[n] x) => (float[m] y)
        <int64[1] shape = {-7}> { y = Expand(x, shape) }"""
    onnx.save(parser.parse_model(fails), folder / "fails.onnx")
    return folder


@pytest.fixture(autouse=True)
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same files in a folder to work in; short turns."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(shutil.copytree(made, tmp_path, dirs_exist_ok=True))
    monkeypatch.setattr(comparing, "_TURN", 0.0)
    monkeypatch.setattr(comparing, "_PAUSE", 0.0)


def test_a_measurement() -> None:
    model = mlp(SILU)
    heads = rewrite(model, validate=False).rewritten
    found = bench(model, heads, model, tokens=(5, 7), providers="cpu")
    names = ["<memory>", "<memory> (1)", "<memory> (2)"]
    assert [(row.model, row.inputs) for row in found.times] == [
        (name, f"batch 1, sequence {tokens}") for tokens in (5, 7) for name in names
    ]
    for row in found.times:
        low, middle, high = row.over_original
        assert row.milliseconds > 0.0
        assert (low, middle, high) == (1.0, 1.0, 1.0) if row.model == "<memory>" else 0.0 < low <= middle <= high


def test_the_ratio_is_that_of_the_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both drift tenfold in the middle; a ratio within a round does not see it."""
    slow = [2.0] * 5 + [20.0] * 5
    times = slow, [3 * one for one in slow]
    monkeypatch.setattr(comparing, "_rounds", lambda sessions, _case: dict(zip(sessions, times, strict=True)))
    rows = bench("a.onnx", "b.onnx", tokens=3, providers="cpu").times
    assert [row.over_original for row in rows] == [(1.0, 1.0, 1.0), (3.0, 3.0, 3.0)]
    assert [row.milliseconds for row in rows] == [11000.0, 33000.0]


def test_every_model_has_a_turn_in_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = list[str]()

    class Logged:
        def __init__(self, name: str) -> None:
            self.name = name

        def run(self, _feeds: object) -> None:
            turns.append(self.name)

    monkeypatch.setattr(comparing, "_ROUNDS", 3)
    sessions = {name: Logged(name) for name in "ab"}
    found = comparing._rounds(sessions, type("Case", (), {"feeds": {}}))  # type: ignore[arg-type]
    assert "".join(turns) == "abbaabba"
    assert {name: len(times) for name, times in found.items()} == {"a": 3, "b": 3}


def test_default_sizes() -> None:
    decoder, vision = FOLDER / "silu-decoder.onnx", FOLDER / "gelu-vision.onnx"
    # As many as its table of positions.
    assert "sequence 64" in bench(decoder, decoder, providers="cpu").times[0].inputs
    assert len(bench(vision, vision, providers="cpu").times) == 2


@pytest.mark.sample(0)
@pytest.mark.parametrize("form", ["whole", "maskless"])
def test_no_more_tokens_than_the_heads_take(form: str) -> None:
    decoder = FOLDER / "silu-decoder.onnx"
    heads = rewrite(decoder, form=form, max_tokens=16, validate=False).rewritten
    found = bench(decoder, heads, providers="cpu")
    assert {row.inputs for row in found.times} == {"batch 1, sequence 16"}
    assert {row.inputs for row in bench(decoder, heads, tokens=3, providers="cpu").times} == {"batch 1, sequence 3"}
    with pytest.raises(UsageError, match="the models do not take 17 tokens"):
        bench(decoder, heads, tokens=17, providers="cpu")


def test_the_command(ran: Ran) -> None:
    arguments = ["--tokens", "3", "--tokens", "5", "--provider", "cpu"]
    text = ran(0, ["bench", "a.onnx", "b.onnx", *arguments, "--json", "found.json"]).out
    for part in ("Median time of one run", "sequence 3", "sequence 5", "over original"):
        assert part in text
    last = text.splitlines()[-1]
    assert last.startswith("MEASURED  b.onnx takes ")
    assert " times as long as a.onnx, in " in last
    found = json.loads(Path("found.json").read_text(encoding="utf-8"))
    assert [row["model"] for row in found["times"]] == ["a.onnx", "b.onnx"] * 2
    assert found["environment"]["onnxruntime"]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["a.onnx"], 2, "Missing argument 'REWRITTEN'"),
        (["a.onnx", "missing.onnx"], 4, "missing.onnx' does not exist"),
        (["a.onnx", "other.onnx"], 2, "other.onnx (B) takes other inputs than a.onnx (A): "),
        (["a.onnx", "b.onnx", "--tokens", "0"], 2, "the models do not take 0 tokens"),
        ([str(FOLDER / "silu-decoder.onnx")] * 2 + ["--tokens", "65"], 2, "the models do not take 65 tokens"),
        ([str(FOLDER / "gelu-vision.onnx")] * 2 + ["--tokens", "5"], 2, "the models do not take 5 tokens"),
        (["a.onnx", "b.onnx", "--json", "nowhere/x.json"], 2, "does not exist; create it first"),
        (["a.onnx", "b.onnx", "--report", "b.onnx"], 2, "would replace another file"),
        (["a.onnx", "b.onnx", "--provider", "tpu"], 2, "unknown execution provider 'tpu'"),
        (["fails.onnx", "fails.onnx"], 1, "fails.onnx: onnxruntime could not run the model: "),
    ],
)
def test_errors_are_one_line(arguments: list[str], status: int, message: str, ran: Ran) -> None:
    captured = ran(status, ["bench", *arguments])
    assert message in captured.refusal
    assert captured.out == ""
