"""Patterns for CircuitsVis: shapes, sums and refusals; that the package takes them is in tests/exports."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rewriter import UsageError, run_with_cache
from rewriter.adapters.circuitsvis import attention_view
from rewriter.interpret.run import Cached
from tests.committed import FOLDER

TOKENS = np.array([[5, 9, 3], [7, 7, 1]])


@pytest.fixture(scope="module")
def found() -> Cached:
    feeds: dict[str, Any] = {"input_ids": TOKENS, "attention_mask": np.ones_like(TOKENS)}
    return run_with_cache(FOLDER / "silu-decoder.onnx", feeds)


def test_original_heads(found: Cached) -> None:
    view = attention_view(found, "blocks.1.attn", heads=[3, 0], tokens=["a", "b", "c"], sequence=1)
    wanted = found.cache["blocks.1.attn.hook_pattern"][1, [3, 0]]
    np.testing.assert_array_equal(view["attention"], wanted)
    assert view["tokens"] == ["a", "b", "c"]
    assert view["attention_head_names"] == ["blocks.1.attn[3]", "blocks.1.attn[0]"]


def test_heads_of_neurons(found: Cached) -> None:
    view = attention_view(found, "blocks.0.mlp_heads", heads=[17])
    pattern = found.cache["blocks.0.mlp_heads.hook_pattern"][0, :, 17]
    (square,) = view["attention"]
    assert view["tokens"] == ["0", "1", "2", "bias token 1"]
    expected = np.zeros((4, 4), np.float32)
    for token in range(3):
        expected[token, token], expected[token, 3] = pattern[token]
    expected[3, 3] = 1.0
    np.testing.assert_array_equal(square, expected)
    np.testing.assert_allclose(square.sum(axis=-1), 1.0, rtol=1e-6)


@pytest.mark.parametrize(
    ("sublayer", "options", "message"),
    [
        ("blocks.7.attn", {}, "there is no blocks.7.attn.hook_pattern"),
        ("blocks.0.attn", {"case": "1"}, "there is no 1/blocks.0.attn.hook_pattern"),
        ("blocks.0.attn", {"sequence": 2}, "there is no sequence 2"),
        ("blocks.0.attn", {"heads": [4]}, "has heads 0 to 3"),
        ("blocks.0.attn", {"tokens": ["a"]}, "there are 1 tokens, and the pattern has 3"),
        ("blocks.0.mlp_heads", {}, "has 128 heads: choose at most 64"),
    ],
)
def test_refusals(sublayer: str, options: dict[str, Any], message: str, found: Cached) -> None:
    with pytest.raises(UsageError, match=message):
        attention_view(found, sublayer, **options)
