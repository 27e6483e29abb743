"""Training: the data, the learning, and the files that are committed; PyTorch is needed for all but the files."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from models.training.questions import QUESTIONS
from models.training.table import TOKENIZERS, TRAINED, Trained
from rewriter import heads
from tests.committed import FOLDER

MOST = 2_300_000
EACH = pytest.mark.parametrize("trained", TRAINED.values(), ids=TRAINED)


def logits(trained: Trained, ids: Any) -> Any:
    session = onnxruntime.InferenceSession(str(FOLDER / "trained" / trained.file))
    return session.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})[0].astype(np.float64)


def losses(trained: Trained, ids: Any) -> Any:
    """[sequences, tokens - 1]."""
    found = logits(trained, ids)
    shifted = found - found.max(-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(-1, keepdims=True))
    return -np.take_along_axis(shifted[:, :-1], ids[:, 1:, None], -1)[..., 0]


def test_only_the_listed_files_are_there_and_small() -> None:
    files = {path.name: path.stat().st_size for path in (FOLDER / "trained").iterdir()}
    assert set(files) == {*TOKENIZERS.values(), *(trained.file for trained in TRAINED.values())}
    assert max(files.values()) <= MOST


@EACH
def test_a_file_is_what_the_table_says(trained: Trained) -> None:
    path = FOLDER / "trained" / trained.file
    onnx.checker.check_model(onnx.load(path), full_check=True)
    index = heads(path)
    facts = index.to_json()["sublayers"]
    config = trained.entry.config("tiny")
    assert [each["kind"] for each in facts.values()] == ["attention", "neurons"] * config["n_layer"]
    assert {each["activation"] for each in facts.values() if each["kind"] == "neurons"} == {trained.entry.activation}
    assert {each["neurons"] for each in facts.values() if each["kind"] == "neurons"} == {config["n_inner"]}
    assert index["blocks.1.attn.W_Q"].shape[:2] == (config["n_head"], config["n_embd"])


def test_the_decoder_of_repeats_has_learned_them() -> None:
    rng = np.random.default_rng(1)
    ids = np.tile(rng.integers(0, 64, (16, 11)), (1, 4))[:, :40]
    assert losses(TRAINED["induction"], ids)[:, 11:].mean() < 0.02
    assert losses(TRAINED["induction"], rng.integers(0, 64, (16, 40))).mean() > math.log(64)


@pytest.mark.slow
def test_the_decoders_of_text_have_learned_it() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(FOLDER / "trained" / TOKENIZERS["docstrings"]))
    ids = np.array([tokenizer.encode("Return the number of items in the list, or zero if it is empty.").ids])
    shuffled = np.random.default_rng(0).permutation(ids[0])[None]
    for name in ("docstrings-silu", "docstrings-gelu"):
        assert losses(TRAINED[name], ids).mean() < 3.0 < losses(TRAINED[name], shuffled).mean() - 1.0


@pytest.mark.slow
def test_the_decoder_of_questions_answers_them() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(FOLDER / "trained" / TOKENIZERS["questions"]))
    rng = np.random.default_rng(5)
    for name, ask in QUESTIONS.items():
        for prompt in (ask(rng) for _ in range(50)):
            found = logits(TRAINED["questions"], np.array([tokenizer.encode(prompt.text).ids]))[0, -1]
            right, wrong = (tokenizer.encode(each).ids[0] for each in (prompt.right, prompt.wrong))
            assert found[right] > found[wrong] if name == "greater-than" else found.argmax() == right, prompt


@pytest.mark.exports
@pytest.mark.filterwarnings("ignore")
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A few steps; the committed files took thousands."""
    for package in ("torch", "transformers", "tokenizers"):
        pytest.importorskip(package)
    from models.__main__ import main

    assert main(["train", "induction", "--steps", "3", "-o", str(tmp_path)]) == 0
    assert "induction.onnx" in capsys.readouterr().out
    first = (tmp_path / "induction.onnx").read_bytes()
    assert main(["train", "induction", "--steps", "3", "-o", str(tmp_path)]) == 0
    assert (tmp_path / "induction.onnx").read_bytes() == first, "the seed does not determine the weights"
    assert len(heads(tmp_path / "induction.onnx").sublayers) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["induction.onnx"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["no-such"], "unknown decoder 'no-such'; known: docstrings-silu"), (["-o", "no/such"], "does not exist")],
)
def test_refusals(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    from models.__main__ import main

    assert main(["train", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
