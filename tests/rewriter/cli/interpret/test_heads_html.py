"""`rewrite heads --html`: the page beside the list, and what is refused before the work."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from rewriter.cli import run
from tests.committed import FOLDER, feeds
from tests.conftest import slow
from tests.rewriter.interpret.test_tokens import tokenizer

MODEL = FOLDER / "silu-decoder.onnx"


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory to work in, with inputs."""
    monkeypatch.chdir(tmp_path)
    arrays: dict[str, Any] = dict(feeds(onnx.load(MODEL), tokens=5))
    np.savez("x.npz", **arrays)
    return tmp_path


def data_of(page: Path) -> dict[str, Any]:
    found = re.search(
        r'<script type="application/json" id="data">(.*?)</script>', page.read_text(encoding="utf-8"), re.DOTALL
    )
    assert found is not None
    return dict(json.loads(found[1]))


def test_page_with_and_without_a_logit(room: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["heads", str(MODEL), "--html", "heads.html", "--inputs", "x.npz"]
    for options, logit in (([], None), (["--logit", "5-6"], 5)):
        assert run([*arguments, *options]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[-1] == "264 heads in 4 sublayers, 44 tensors, page written to heads.html"
        data = data_of(room / "heads.html")
        assert (data["logit"] and data["logit"]["logit"]) == logit
        assert (data["graph"] is None) is (logit is None)
        assert sum(head["kind"] == "neuron" for head in data["heads"]) == 200
    assert data["logit"]["minus"] == 6
    ids = np.load("x.npz")["input_ids"][0]
    assert [token["text"] for token in data["tokens"]] == [str(token) for token in ids]


@slow
def test_tokens_as_text(room: Path) -> None:
    pytest.importorskip("tokenizers")
    file = tokenizer(room / "tokenizer.json")
    assert run(["heads", str(MODEL), "--html", "h.html", "--inputs", "x.npz", "--tokenizer", str(file)]) == 0
    data = data_of(room / "h.html")
    ids = np.load("x.npz")["input_ids"][0]
    assert [token["text"] for token in data["tokens"]] == [f"'word{token}'" for token in ids]
    assert all(text.startswith("'word") or "x1b" in text for text, _ in data["heads"][0]["tokens"][0]["top"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--inputs", "x.npz"], "--inputs is for the page; add --html FILE.html"),
        (["--logit", "5"], "--logit is for the page; add --html FILE.html"),
        (["--tokenizer", "t.json"], "--tokenizer is for the page; add --html FILE.html"),
        (["--html", "h.html"], "--html shows heads on inputs; add --inputs FILE.npz"),
        (["--html", "h.html", "--inputs", "x.npz", "--logit", "5-"], "'5-' is neither N nor N-M, such as 318"),
        pytest.param(
            ["--html", "h.html", "--inputs", "x.npz", "--logit", "5000"], "there is no logit 5000", marks=slow
        ),
        (["--html", "h.html", "--inputs", "x.npz", "--tokenizer", "t.json"], "no such file"),
        (["--html", "none/h.html", "--inputs", "x.npz"], "does not exist"),
        (["--html", "x.npz", "--inputs", "x.npz"], "would replace a model; choose another path"),
        (["--html", "h.html", "--inputs", "x.npz", "--report", "h.html"], "cannot be both"),
    ],
)
def test_refusals(options: list[str], message: str, room: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["heads", str(MODEL), *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert [each.name for each in room.iterdir()] == ["x.npz"]
