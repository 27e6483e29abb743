"""Names of the tensors by which blocks of form `whole` find the network's stream and its bias tokens."""

from __future__ import annotations

PREFIX = "bias_token"

STREAM = f"{PREFIX}/stream"
"""The model's columns of the stream after the embeddings, with the bias tokens: [batch, N + R, D]."""

COUNT = f"{PREFIX}/tokens"
"""N, as int64 [1]."""

ROWS = f"{PREFIX}/rows"
"""N + R, as int64 [1]."""

POSITION_ROWS = f"{PREFIX}/token_columns"
"""Constant [1, T, 1 + R + T]: what the columns beside the model's hold for a token at each position."""

BIAS_ROWS = f"{PREFIX}/bias_token_rows"
"""Constant [1, R, D + 1 + R + T]: the bias tokens."""


def neuron_scores(bias_tokens: int) -> str:
    """Constant [R + T, R + T]: W_QK between positions of the heads that attend to so many bias tokens."""
    return f"{PREFIX}/W_QK_neurons_{bias_tokens}"
