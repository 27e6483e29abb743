"""Patterns as CircuitsVis draws them; numpy only, `circuitsvis` itself is the caller's.

import circuitsvis
found = run_with_cache(model, Text("The cat sat", "tokenizer.json"))
circuitsvis.attention.attention_heads(**attention_view(found, "blocks.0.attn"))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rewriter.errors import UsageError
from rewriter.interpret.run import Cached

_RANK = 4
_MOST = 64
"""Heads in one drawing; a sublayer of neurons has thousands."""


def attention_view(
    found: Cached,
    sublayer: str,
    *,
    heads: Sequence[int] | None = None,
    tokens: Sequence[str] | None = None,
    sequence: int = 0,
    case: str = "",
) -> dict[str, Any]:
    """The patterns of a sublayer's heads, as keywords of `circuitsvis.attention.attention_heads`.

    Heads of neurons attend to the token itself and to their own bias tokens, which are drawn after the tokens: the
    square is [tokens + m, tokens + m], and in it bias tokens attend to themselves.

    Args:
        found: a result of `run_with_cache` with the sublayer's `hook_pattern`.
        sublayer: `blocks.0.attn` or `blocks.0.mlp_heads`.
        heads: which heads; default: all, of which there may be 64.
        tokens: the tokens as text; default: those of the text that was run, else their numbers.
        sequence: the sequence in the batch.
        case: the case, where several were run.

    Returns:
        `attention` [heads, dest, src], `tokens` and `attention_head_names`.

    Raises:
        UsageError: the pattern was not recorded, or the arguments do not fit it.
    """
    name = f"{case}/{sublayer}.hook_pattern" if case else f"{sublayer}.hook_pattern"
    pattern = found.cache.get(name)
    facts = found.index.to_json()["sublayers"].get(sublayer)
    if pattern is None or facts is None or pattern.ndim != _RANK:
        raise UsageError(f"there is no {name}; record it with run_with_cache(..., names='*.hook_pattern')")
    if not -len(pattern) <= sequence < len(pattern):
        raise UsageError(f"there is no sequence {sequence}: {name} has {len(pattern)}")
    neurons = facts["kind"] == "neurons"
    own = np.moveaxis(pattern[sequence], -2, 0) if neurons else pattern[sequence]
    chosen = list(range(len(own))) if heads is None else list(heads)
    if len(chosen) > _MOST:
        raise UsageError(f"{sublayer} has {len(own)} heads: choose at most {_MOST} of them with heads=")
    if any(not 0 <= head < len(own) for head in chosen):
        raise UsageError(f"{sublayer} has heads 0 to {len(own) - 1}, not {chosen}")
    spelled = _spelled(found, tokens, own.shape[1], case)
    drawn = own[chosen]
    if neurons:
        spelled += [f"bias token {number}" for number in range(1, drawn.shape[2])]
        drawn = _square(drawn)
    names = [f"{sublayer}[{head}]" for head in chosen]
    return {"attention": drawn, "tokens": spelled, "attention_head_names": names}


def _spelled(found: Cached, tokens: Sequence[str] | None, count: int, case: str) -> list[str]:
    if tokens is None and found.tokens:
        tokens = found.tokens[int(case or 0)]
    spelled = [str(number) for number in range(count)] if tokens is None else list(tokens)
    if len(spelled) != count:
        raise UsageError(f"there are {len(spelled)} tokens, and the pattern has {count}")
    return spelled


def _square(pattern: Any) -> Any:
    """[heads, tokens, 1 + m] to [heads, tokens + m, tokens + m]."""
    heads, count, width = pattern.shape
    square = np.zeros((heads, count + width - 1, count + width - 1), pattern.dtype)
    places = np.arange(count)
    square[:, places, places] = pattern[..., 0]
    square[:, :count, count:] = pattern[..., 1:]
    others = np.arange(count, count + width - 1)
    square[:, others, others] = 1.0
    return square
