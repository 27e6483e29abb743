"""Models that round activations to 8 bits: how stable the original's own choices of tokens are is said beside."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from rewriter import rewrite
from rewriter.proof.unsteady import stability
from tests.textmodels import SILU, text_model


@pytest.mark.parametrize(("own", "heads"), [(0, 0), (0, 1), (1, 0)])
def test_the_same_tokens_are_promised_where_the_original_is_stable(own: int, heads: int) -> None:
    plain, other = ([{"logits": np.array([[[3.0, 1.0], [0.0, high]]], np.float32)}] for high in (1.0, -1.0))
    (told,) = stability(plain, (plain, other)[own], (plain, other)[heads])
    assert f"changes {own} of 2 choices by logits in the original, the heads change {heads}; " in told
    assert told.endswith("the same tokens are to be expected") == (own == heads == 0)


@pytest.mark.parametrize("level", [0, 4])
def test_the_note_is_about_models_that_round_activations(level: int) -> None:
    rng, product = np.random.default_rng(0), f"MatMulNBits<K = 32, N = 32, block_size = 32, accuracy_level = {level}>"
    packed = {name: onnx.numpy_helper.from_array(rng.integers(0, 256, (32, 1, 16)).astype("B"), name) for name in "wvu"}
    body = f"n = SimplifiedLayerNormalization(x, g) y = com.microsoft.{product}(n, w, c) {SILU}"
    model = text_model(
        f"{body} z = com.microsoft.{product}(h, v, c) logits = com.microsoft.{product}(z, u, c)",
        inputs="float[batch, tokens, 32] x", outputs="float[batch, tokens, 32] logits",
        domains={"com.microsoft": 1}, constants={**packed, "c": np.full(32, 0.02), "g": rng.uniform(0.5, 2, 32)},
    )  # fmt: skip
    proof = rewrite(model, providers="cpu").validation
    assert proof is not None
    assert [each.startswith("activations are rounded to 8 bits") for each in proof.notes] == [True] * (level == 4)
