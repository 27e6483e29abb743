"""The benchmark of standard questions: it patches as `patch` does, and knows what is attributed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from models.training.questions import SENTENCES
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
    from docs.notebooks.circuits import Subject

    if name == "gelu-encoder":
        return Subject(FOLDER / "gelu-encoder.onnx", words())
    file = str(FOLDER / "trained" / "questions-tokenizer.json")
    return Subject(FOLDER / "trained" / "questions.onnx", tokenizers.Tokenizer.from_file(file))


@pytest.mark.parametrize(("name", "question"), [("questions", "induction"), ("gelu-encoder", "subject")])
def test_patching_is_that_of_the_file_and_attribution_that_of_the_held_network(name: str, question: str) -> None:
    from docs.notebooks.circuits import areas, scores

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
