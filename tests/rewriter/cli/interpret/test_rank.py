"""`rewrite rank`: tables of 80 columns that agree with the functions, JSON, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

from rewriter import compositions, head_tokens
from rewriter.cli import run
from tests.committed import FOLDER
from tests.textmodels import SILU, mlp

MODEL = FOLDER / "silu-decoder.onnx"


def test_tables(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["rank", str(MODEL), "--top", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "composition, without the scales of normalisations; unrelated weights: 0.177"
    assert [line.split() for line in lines[2:5]] == [
        [each.kind, each.reader, each.writer, f"{each.score:.4f}"] for each in compositions(MODEL, top=3).strongest(3)
    ]
    assert run(["rank", str(MODEL), "--tokens", "--idle", "--inputs", str(given), "--top", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    row = head_tokens(MODEL, top=3).selective(1)[0]
    place = next(number for number, line in enumerate(lines) if line.startswith("tokens"))
    assert lines[place + 1].split() == [row.head, "writes"]
    assert lines[place + 2].split()[:2] == [str(row.top[0][0]), f"{row.top[0][1]:+.3g}"]
    assert any(line.startswith("activations at 13 tokens") for line in lines)
    assert "idle by their weights: 0 heads" in lines
    assert lines[-1] == "264 heads in 4 sublayers"


def test_json(given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rank.json"
    assert run(["rank", str(MODEL), "--json", str(out)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "264 heads in 4 sublayers"
    data = json.loads(out.read_text(encoding="utf-8"))
    assert {*data} == {"model", "composition"}
    found = compositions(MODEL)
    writer, score = data["composition"]["kinds"]["Q"]["reads"]["blocks.1.attn.0"][0]
    assert (writer, score) == (
        found.of("blocks.1.attn.0", "Q")[0][0].writer,
        found.of("blocks.1.attn.0", "Q")[0][0].score,
    )
    assert run(["rank", str(MODEL), "--tokens", "--idle", "--inputs", str(given), "--json", str(out)]) == 0
    data = json.loads(out.read_text(encoding="utf-8"))
    assert {*data} == {"model", "tokens", "activity", "idle"}
    assert "blocks.0.attn.0" in [row["head"] for row in data["activity"]["heads"]]
    assert {row["side"] for row in data["tokens"]["rows"]} >= {"Q", "K", "V", "O"}
    capsys.readouterr()
    assert run(["rank", str(MODEL), "--idle", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["idle"] == {"similarity": 0.999, "idle": [], "duplicates": []}
    assert captured.err.splitlines()[-1] == "264 heads in 4 sublayers"


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (["--top", "0"], 2, "0 is not in the range x>=1"),
        (["--tokenizer", "t.json"], 2, "--tokenizer is for --tokens and --inputs"),
        (["--inputs", "none.npz"], 2, "no such file"),
        (["--report", "nowhere/x.json"], 2, "does not exist"),
        (["--report", str(MODEL)], 2, "would replace a model"),
    ],
)
def test_refusals(options: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["rank", str(MODEL), *options]) == status
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == (status != 0)
    if not status:
        assert "writes nothing that can be shown: the model has no output 'x'" in captured.out


def test_without_heads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "none.onnx"
    onnx.save(mlp("h = Softmax(y)"), path)
    assert run(["rank", str(path)]) == 3
    assert capsys.readouterr().out == "no heads were found\n"
    onnx.save(mlp(SILU), path)
    assert run(["rank", str(path)]) == 0  # one sublayer, which nothing reads
    assert capsys.readouterr().out.splitlines()[-1] == "8 heads in 1 sublayer"
