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
    feeds, names = subject.network.feeds(changed), ("blocks.0.attn.2", "blocks.0.mlp_heads.7")
    models = [subject.path, *(patch(subject.path, each, feeds) for each in names)]
    for model, wanted in zip(models, subject.patched(other, away).numpy(), strict=True):
        logits = run_with_cache(model, subject.network.feeds(batch.ids), names=()).outputs["logits"]
        right, wrong = np.take_along_axis(logits[:, -1], batch.entries, axis=1).T
        assert (right - wrong).mean() == pytest.approx(wanted, abs=1e-4)


def test_form_whole_in_pytorch_computes_what_the_decoder_does() -> None:
    torch = pytest.importorskip("torch")
    from benchmarks.replica import Replica
    from benchmarks.survival import LENGTH, Stream

    replica = Replica(FOLDER / "trained" / "docstrings-silu.onnx")
    start, stream = torch.randn(2, LENGTH, 48), Stream(replica, 2.0**60)
    wanted = replica.logits(replica.run(start)[0])
    torch.testing.assert_close(stream.run(stream.parameters, start)[0], wanted, atol=1e-4, rtol=1e-4)
