"""The benchmark of standard questions: it patches as `patch` does, and knows what is attributed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from models.training.questions import QUESTIONS
from rewriter import patch, run_with_cache
from tests.committed import FOLDER


def test_patching_is_that_of_the_file_and_attribution_that_of_the_held_network() -> None:
    torch, tokenizers = pytest.importorskip("torch"), pytest.importorskip("tokenizers")
    from benchmarks.interpret import Subject, areas, scores

    tokenizer = tokenizers.Tokenizer.from_file(str(FOLDER / "trained" / "questions-tokenizer.json"))
    subject = Subject(FOLDER / "trained" / "questions.onnx", tokenizer)
    batch = subject.prompts(QUESTIONS["induction"], 4, np.random.default_rng(0))
    assert subject.off(batch) < 1e-5
    ways, differ = scores(subject, batch, 0)
    assert differ < 1e-5
    made = areas(subject, batch, ways["attribution patching"])
    assert [made[each][end] for each in ("faithfulness", "without") for end in (0, -1)] == [0.0, 1.0, 1.0, 0.0]
    assert made["CMD"] < areas(subject, batch, ways["random"])["CMD"]

    changed = np.roll(batch.ids, 1, axis=1)
    other = replace(batch, changed=torch.from_numpy(subject.network.embedded(changed)))
    away = torch.zeros(3, subject.nodes, dtype=torch.bool)
    away[1, 2] = away[2, 4 + 7] = True
    names = ("blocks.0.attn.2", "blocks.0.mlp_heads.7")
    models = [subject.path, *(patch(subject.path, each, subject.network.feeds(changed)) for each in names)]
    for model, wanted in zip(models, subject.patched(other, away).numpy(), strict=True):
        logits = run_with_cache(model, subject.network.feeds(batch.ids), names=()).outputs["logits"]
        right, wrong = np.take_along_axis(logits[:, -1], batch.entries, axis=1).T
        assert (right - wrong).mean() == pytest.approx(wanted, abs=1e-4)
