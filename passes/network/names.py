"""Names of the tensors by which blocks find the bias tokens that a network carries."""

from __future__ import annotations

PREFIX = "bias_token"

STREAM = f"{PREFIX}/stream"
"""The residual stream after the embeddings, with the bias tokens: [batch, N + m, d_model]."""

COUNT = f"{PREFIX}/tokens"
"""N, as int64 [1]."""

ROWS = f"{PREFIX}/rows"
"""N + m, as int64 [1]."""

IS_TOKEN = f"{PREFIX}/is_token"
"""Boolean [N + m, 1]: whether a row is a token."""

INDICATORS = f"{PREFIX}/indicators"
"""Boolean [N + m, 1 + m], the indicator columns: is a token, is bias token j. No sublayer writes to them, so one tensor
beside the stream serves every sublayer."""

POSITION_ROWS = f"{PREFIX}/token_columns"
"""Constant [1, T, 1 + R + T]: what the columns beside the model's hold for a token at each position (form `whole`)."""

BIAS_ROWS = f"{PREFIX}/bias_token_rows"
"""Constant [1, R, D + 1 + R + T]: the bias tokens of form `whole`."""


def activated_stream(block: str) -> str:
    """The stream behind the second of three sublayers of a block (form `whole`)."""
    return f"{PREFIX}/{block}/activated"


def cleared_columns(block: str) -> str:
    """What the third of three sublayers of a block writes to the hidden columns: their negatives."""
    return f"{PREFIX}/{block}/cleared"


def neuron_scores(bias_tokens: int) -> str:
    """Constant [R + T, R + T]: W_QK between positions of the heads that attend to so many bias tokens."""
    return f"{PREFIX}/W_QK_neurons_{bias_tokens}"
