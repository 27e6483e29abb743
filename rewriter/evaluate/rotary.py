"""Rotary embeddings of ONNX and onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np

from rewriter.evaluate.arithmetic import Unsupported, Value, plain
from rewriter.evaluate.table import MICROSOFT, Call, operator

_HEADED = 4  # axes of [batch, heads, tokens, channels]


@operator("RotaryEmbedding", domain=MICROSOFT, table=True)
def _rotary_of_onnxruntime(call: Call, x: Any, positions: Any, cos: Any, sin: Any) -> Any:
    if call.get("is_packed_batching"):
        raise Unsupported("is_packed_batching is not supported")
    if np.size(positions) == 1:
        positions = positions.reshape(-1, 1) + np.arange(x.shape[-2])
    return _rotary(call, x, cos, sin, positions)


@operator("RotaryEmbedding")
def _rotary(call: Call, x: Any, cos: Any, sin: Any, positions: Any = None) -> Any:
    """Tables are by position, or [batch, tokens, width / 2] without positions; the first `width` channels turn."""
    f, shape = call.f, x.shape
    if len(shape) < _HEADED:
        heads = call.get("num_heads") or shape[-1] // (2 * cos.shape[-1])
        x = call.move(x, lambda t: t.reshape(*shape[:2], heads, shape[2] // heads).swapaxes(1, 2))
    if positions is not None:
        at = plain(positions)
        cos, sin = (call.move(table, lambda t: t[at]) for table in (cos, sin))
    entries, cos, sin = call.entries(x), call.entries(cos)[:, None], call.entries(sin)[:, None]
    width, interleaved = call.get("rotary_embedding_dim", 0) or 2 * cos.shape[-1], call.get("interleaved")
    part, rest = entries[..., :width], entries[..., width:]
    one, two = (part[..., ::2], part[..., 1::2]) if interleaved else np.split(part, 2, -1)
    made = f.sub(f.mul(one, cos), f.mul(two, sin)), f.add(f.mul(one, sin), f.mul(two, cos))
    part = np.stack(made, -1).reshape(part.shape) if interleaved else np.concatenate(made, -1)
    turned = np.concatenate([part, rest], -1)
    return Value(turned.swapaxes(1, 2).reshape(shape) if len(shape) < _HEADED else turned)
