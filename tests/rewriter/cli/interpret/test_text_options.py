"""`--text` and `--tokenizer`: the same numbers as with arrays, and tokens as text in tables and in the graph's JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rewriter import Text, attribute, run_with_cache
from rewriter.cli import run
from tests.committed import FOLDER

tokenizers = pytest.importorskip("tokenizers")

MODEL = str(FOLDER / "silu-decoder.onnx")
WORDS = ["the", "cat", "sat", *(f"word{number}" for number in range(125))]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, "the"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    return path


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    path = tmp_path / "x.npz"
    given: dict[str, Any] = {"input_ids": np.array([[0, 1, 2]]), "attention_mask": np.ones((1, 3), np.int64)}
    np.savez(path, **given)
    return path


def told(options: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert run(options) == 0
    return capsys.readouterr().out


def test_attribute(tokenizer: Path, arrays: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = ["--text", "the cat sat", "--tokenizer", str(tokenizer)]
    rest = ["--logit", "5-1", "--top", "400"]
    found = told(["attribute", MODEL, *text, *rest], capsys)
    plain = told(["attribute", MODEL, "--inputs", str(arrays), *rest], capsys)
    assert " 'word2' - 'cat'\n" in found
    assert "embed[1] 'cat'\n" in found
    for place, word in enumerate(("the", "cat", "sat")):
        found = found.replace(f"embed[{place}] '{word}'", f"embed[{place}]")
    assert found.replace(" 'word2' - 'cat'", "") == plain


def test_attribute_json(tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["attribute", MODEL, "--text", "the cat", "--tokenizer", str(tokenizer), "--logit", "5", "--json"]
    found = json.loads(told(options, capsys))
    assert found["tokens"] == ["the", "cat"]
    assert found["entries"] == ["word2"]


def test_graph(tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "graph.json"
    text = ["--text", "the cat sat", "--tokenizer", str(tokenizer)]
    told(["graph", MODEL, *text, "--logit", "5-1", "-o", str(out)], capsys)
    made = json.loads(out.read_text(encoding="utf-8"))
    assert made["metadata"]["prompt_tokens"] == ["the", "cat", "sat"]
    assert made["metadata"]["prompt"] == "the cat sat"
    (logit,) = [node for node in made["nodes"] if node["is_target_logit"]]
    assert logit["clerp"].startswith('Output "word2" - "cat" (p=')
    assert {node["node_id"] for node in made["nodes"]} >= {"E_0_0", "E_1_1", "E_2_2"}


def test_run(tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = tmp_path / "cache.npz"
    texts = ["--text", "the cat sat", "--text", "sat", "--tokenizer", str(tokenizer)]
    found = told(["run", MODEL, *texts, "--cache", str(cache), "--names", "*.hook_resid_post"], capsys)
    assert "tokens: the | cat | sat\ntokens: sat\n" in found
    wanted = run_with_cache(MODEL, Text(["the cat sat", "sat"], tokenizer), names="*.hook_resid_post")
    assert wanted.tokens == (("the", "cat", "sat"), ("sat",))
    with np.load(cache) as archive:
        assert archive["0/blocks.1.hook_resid_post"].shape == (1, 3, 32)
        for name, array in wanted.cache.items():
            np.testing.assert_array_equal(archive[name], array)


def test_against_another_text(tokenizer: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.npz"
    given: dict[str, Any] = {"input_ids": np.array([[0, 2]]), "attention_mask": np.ones((1, 2), np.int64)}
    np.savez(other, **given)
    text = Text("the cat", tokenizer)
    found = attribute(MODEL, text, 5, against=Text("the sat", tokenizer)).correlation
    assert found is not None
    assert found == attribute(MODEL, text, 5, against=other).correlation
    assert found != attribute(MODEL, text, 5, patching=True).correlation


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "pass --inputs FILE.npz, or --text and --tokenizer"),
        (["--inputs", "x.npz", "--text", "a"], "not both"),
        (["--text", "a"], "--text and --tokenizer belong together"),
        (["--inputs", "x.npz", "--tokenizer", "t.json"], "--text and --tokenizer belong together"),
        (["--text", "a", "--tokenizer", "nowhere.json"], "'nowhere.json': no such file"),
    ],
)
def test_refusals(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["attribute", MODEL, "--logit", "5"], ["graph", MODEL, "--logit", "5"]):
        assert run([*command, *options]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_the_tokenizer_is_not_replaced(tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tokenizer.read_bytes()
    options = ["--text", "the cat", "--tokenizer", str(tokenizer), "--logit", "5"]
    for output in ("-o", "--report"):
        assert run(["graph", MODEL, *options, output, str(tokenizer)]) == 2
    assert tokenizer.read_bytes() == before
