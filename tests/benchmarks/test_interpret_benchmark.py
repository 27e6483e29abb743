"""The benchmark of standard questions: it patches as `patch` does, and knows what is attributed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from models.training.questions import QUESTIONS, SENTENCES
from rewriter import patch, run_with_cache
from tests.committed import FOLDER

torch, tokenizers = pytest.importorskip("torch"), pytest.importorskip("tokenizers")


def words() -> Any:
    """A tokenizer of the words of encoders' questions, [CLS] before them and [SEP] behind."""
    drawn = (ask(np.random.default_rng(seed)) for ask in SENTENCES.values() for seed in range(100))
    text = " ".join(text for prompt in drawn for text in (prompt.text, prompt.corrupted, prompt.right, prompt.wrong))
    known = ("[UNK]", "[CLS]", "[SEP]", *sorted(set(text.split())))
    model = tokenizers.models.WordLevel({word: number for number, word in enumerate(known)}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    ends = [("[CLS]", 1), ("[SEP]", 2)]
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=ends)
    return tokenizer


def subject_of(name: str) -> Any:
    from benchmarks.interpret import Subject

    if name == "gelu-encoder":
        return Subject(FOLDER / "gelu-encoder.onnx", words())
    file = str(FOLDER / "trained" / "questions-tokenizer.json")
    return Subject(FOLDER / "trained" / "questions.onnx", tokenizers.Tokenizer.from_file(file))


@pytest.mark.parametrize(("name", "question"), [("questions", "induction"), ("gelu-encoder", "subject")])
def test_patching_is_that_of_the_file_and_attribution_that_of_the_held_network(name: str, question: str) -> None:
    from benchmarks.interpret import areas, scores

    subject = subject_of(name)
    batch = subject.prompts(subject.questions[question], 4, np.random.default_rng(0))
    assert subject.off(batch) < 1e-5
    ways, differ = scores(subject, batch, 0)
    assert differ < 1e-5
    again = scores(subject, batch, 0)[0]
    assert all((way == again[method]).all() for method, way in ways.items())
    made = areas(subject, batch, ways["attribution patching"])
    ends = [made[each][end] for each in ("faithfulness", "without") for end in (0, -1)]
    assert ends == pytest.approx([0.0, 1.0, 1.0, 0.0], abs=1e-5)
    assert made["CMD"] < areas(subject, batch, ways["random"])["CMD"]

    changed = np.roll(batch.ids, 1, axis=1)
    other = replace(batch, changed=torch.from_numpy(subject.network.embedded(changed)))
    away = torch.zeros(3, subject.nodes, dtype=torch.bool)
    away[1, 2] = away[2, 4 + 7] = True
    feeds, names = subject.network.feeds(changed), ("blocks.0.attn.2", "blocks.0.mlp_heads.7")
    models = [subject.path, *(patch(subject.path, each, feeds) for each in names)]
    for model, wanted in zip(models, subject.patched(other, away).numpy(), strict=True):
        output = next(iter(run_with_cache(model, subject.network.feeds(batch.ids), names=()).outputs.values()))
        if name == "questions":
            right, wrong = np.take_along_axis(output[:, -1], batch.entries, axis=1).T
            made = right - wrong
        else:
            mean = output.mean(axis=1)
            made = (mean / np.linalg.norm(mean, axis=1, keepdims=True) * batch.directions.numpy().T).sum(axis=1)
        assert made.mean() == pytest.approx(wanted, abs=1e-4)


def test_an_encoder_is_asked_which_of_two_paraphrases_is_closer() -> None:
    """Directions are embeddings of the right paraphrase minus the wrong one, whatever the file computes them by."""
    subject = subject_of("gelu-encoder")
    prompt = SENTENCES["action"](np.random.default_rng(3))
    batch = subject.prompts(lambda _: prompt, 1, np.random.default_rng(0))

    def embedding(text: str) -> Any:
        ids = np.array([words().encode(text).ids])
        found = run_with_cache(subject.path, subject.network.feeds(ids), names=()).outputs
        mean = next(iter(found.values()))[0].mean(axis=0)
        return mean / np.linalg.norm(mean)

    wanted = embedding(prompt.right) - embedding(prompt.wrong)
    np.testing.assert_allclose(batch.directions[:, 0].numpy(), wanted, atol=1e-5)
    with torch.no_grad():
        asked = subject.metric(batch, subject.replica.run(batch.start)[0])
        end = subject.replica.run(batch.start)[0]
    np.testing.assert_allclose(asked.numpy(), [embedding(prompt.text) @ wanted], atol=1e-5)
    held = torch.autograd.grad(subject.metric(batch, end.requires_grad_(), ("norms",)).sum(), end)[0]
    norm = float(end.detach().mean(1).norm())
    np.testing.assert_allclose(held[0, 2].numpy(), wanted / norm / end.shape[1], atol=1e-6)


def test_an_export_of_gpt2_with_its_kind_of_tokenizer(tmp_path: Path) -> None:
    """One command; the weights are random, the tokenizer is a byte-level BPE in GPT-2's file format."""
    pytest.importorskip("transformers")
    from benchmarks.interpret import main
    from models.__main__ import main as models

    assert models(["export", "gpt2", "--size", "small", "-o", str(tmp_path / "gpt2.onnx")]) == 0
    given = [str(tmp_path / "gpt2.onnx"), "--prompts", "2", "--seeds", "1", "--neurons", "4"]
    given += ["--json", str(tmp_path / "rows.json")]
    without = CliRunner().invoke(main, given)
    assert without.exit_code == 1
    assert "gpt2.onnx has no tokenizer beside it; name one with --tokenizer" in without.output

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    drawn = [ask(np.random.default_rng(seed)) for ask in QUESTIONS.values() for seed in range(2000)]
    texts = (text for prompt in drawn for text in (prompt.text + prompt.right, prompt.corrupted))
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=1000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    result = CliRunner().invoke(main, [*given, "--question", "induction"])
    assert result.exit_code == 0, result.output
    (row,) = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))["rows"]
    assert row["question"] == "induction"
    assert max(row["replica"], row["attribute beside replica"]) < 1e-5


def test_form_whole_in_pytorch_computes_what_the_decoder_does() -> None:
    from benchmarks.replica import Replica
    from docs.notebooks.survival import LENGTH, Stream

    replica = Replica(FOLDER / "trained" / "docstrings-silu.onnx")
    start, stream = torch.randn(2, LENGTH, 48), Stream(replica, 2.0**60)
    wanted = replica.logits(replica.run(start)[0])
    torch.testing.assert_close(stream.run(stream.parameters, start)[0], wanted, atol=1e-4, rtol=1e-4)


def test_heads_are_fitted_by_variable_projection() -> None:
    """A block's own neurons are exact; more heads than it has neurons come close from random starts, a map does not."""
    from benchmarks.replica import ACTIVATIONS, Sublayer
    from docs.notebooks.exchange import Block, Problem, mapped, solved

    generator = torch.Generator().manual_seed(0)
    shapes = {"W_in": (6, 4), "b_in": (4,), "W_O": (4, 6), "b_O": (6,)}
    weights = {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
    sublayer = Sublayer("blocks.0.mlp_heads", None, weights, ACTIVATIONS["silu"], 1, 1.0, causal=True)
    read = torch.randn(2, 500, 6, generator=generator) @ torch.randn(6, 6, generator=generator) + 1.0
    read[..., 5] = read[..., 0]  # a direction without variance, as behind a normalisation
    written = sublayer.written(sublayer.channels(read))
    block = Block(sublayer, read[0], written[0], read[1], written[1])
    problem = Problem(block)
    covariance = torch.cov(problem.rows[:, :-1].T, correction=0)
    torch.testing.assert_close(covariance, torch.eye(5, dtype=torch.float64))
    assert block.unexplained(problem.mapped(problem.own(4), written[0])(read[1])) < 1e-10
    assert block.unexplained(mapped(read[1], solved(read[0], written[0]).float())) > 0.05
    heads, course = problem.fitted(problem.random(8, 1, seed=0), written[0], 1e-2, 300)
    assert course == sorted(course, reverse=True)
    assert block.unexplained(problem.mapped(heads, written[0])(read[1])) < 1e-3
    again = problem.fitted(problem.random(8, 1, seed=0), written[0], 1e-2, 300)[1]
    assert again == course
