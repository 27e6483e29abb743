"""The user's choices about how a form becomes nodes.

Comes in: values from the command line or the Python API. Goes out: `FormOptions`, carried by each `Conversion` to the
form that emits it. What does not concern a form is ignored by it.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_PATTERN_MB = 64.0
"""Largest pattern tensor by default, in units of 2^20 bytes: it stays in the caches of a large CPU, and is small change
beside the weights of a model that has many heads."""

DEFAULT_MAX_TOKENS = 512
"""Positions of the forms with one-hot position columns, by default."""

BIAS_TOKENS = ("sublayer", "network")
"""Where bias tokens live: each sublayer appends its own, or they are carried through the whole network (Theorem 6)."""


@dataclass(frozen=True)
class FormOptions:
    """How a form becomes nodes.

    Attributes:
        max_pattern_mb: largest attention pattern [batch, heads, queries, keys] at run time, in units of 2^20 bytes.
        attention_op: use `ai.onnx.Attention` nodes (form `masked`; needs opset 23).
        max_tokens: longest sequence of the forms with one-hot position columns.
        head_dimension: of the linear sublayers of form `staged`, over whose heads the rank of a weight is split.
        omega: what forbidden pairs' logits are lowered by in form `maskless`; None: from program and element type.
        bias_token: a member of `BIAS_TOKENS`.
    """

    max_pattern_mb: float = DEFAULT_PATTERN_MB
    attention_op: bool = False
    max_tokens: int = DEFAULT_MAX_TOKENS
    omega: float | None = None
    bias_token: str = "sublayer"
    head_dimension: int = 64


DEFAULT_OPTIONS = FormOptions()
"""What holds where nothing was chosen."""
