"""The shared position scores of form `maskless` are the literal product of every head's W_Q and W_K on the stream."""

import numpy as np
import pytest

from passes.options import Options
from passes.plan import apply, make_plan
from tests.headmath import tapped
from tests.oracle_operators import softmax
from tests.textmodels import ERF_GELU, SILU, mlp

TOKENS = 7


@pytest.mark.parametrize("text", [SILU, ERF_GELU], ids=["silu", "gelu"])
def test_shared_scores_equal_the_literal_product(text: str) -> None:
    """W_Q and W_K of each head get the position columns: [W_Q, P W_QK] and [W_K, P], one matrix each.

    Their product on the stream is compared with what the graph adds up, and its softmax with what the heads write.
    """
    model = mlp(text, elem="double")
    plan = make_plan(model, Options(form="maskless", max_tokens=TOKENS))
    result = apply(plan)
    names = ["stream", "W_Q", "W_K", "finite_q", "k", "position_scores", "position_scores_W_QK", "z"]
    x = np.random.default_rng(0).normal(size=(2, TOKENS, 4))
    made = tapped(result, {"x": x}, [f"mlp/heads/{name}" for name in names])
    stream, w_q, w_k, q, k, shared, w_qk, z = (made[f"mlp/heads/{name}"] for name in names)
    slots = len(w_qk)
    heads = len(w_q)
    width = stream.shape[2]
    positions = np.eye(width, slots, slots - width)
    w_q, w_k = (np.pad(each, ((0, 0), (0, width - each.shape[1]), (0, 0))) for each in (w_q, w_k))
    literal_q = np.concatenate([w_q, np.repeat((positions @ w_qk)[None], heads, axis=0)], axis=2)
    literal_k = np.concatenate([np.repeat(w_k, heads, axis=0), np.repeat(positions[None], heads, axis=0)], axis=2)
    scores = np.einsum("brw,hwd,hvd,bsv->bhrs", stream, literal_q, literal_k, stream, optimize=True)
    emitted = q @ np.swapaxes(k, 2, 3) + shared
    assert np.abs(scores - emitted).max() <= 1e-12 * max(1.0, np.abs(shared).max())
    allowed = np.broadcast_to(shared == 0.0, scores.shape)
    assert np.abs(scores - emitted)[allowed].max() <= 1e-12 * max(1.0, np.abs(emitted[allowed]).max())
    assert not allowed.all()
    (head,) = plan.conversions[0].program.heads
    values = q[..., :1].copy()
    for place, token in enumerate(head.bias_tokens, start=TOKENS):
        values[:, :, place] = token.value
    assert np.abs(softmax(scores) @ values - z)[:, :, :TOKENS].max() <= 1e-11
