"""Rotary embeddings of ONNX and onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np

from rewriter.evaluate.arithmetic import Unsupported, Value, plain
from rewriter.evaluate.table import MICROSOFT, Call, operator

_HEADED = 4  # axes of [batch, heads, tokens, channels]


def _by_head(call: Call, x: Any, heads: int) -> Any:
    """[batch, tokens, heads * channels] as [batch, heads, tokens, channels]."""
    batch, tokens, width = x.shape
    return call.move(x, lambda t: t.reshape(batch, tokens, heads, width // heads).transpose(0, 2, 1, 3))


def _joined(call: Call, x: Any) -> Any:
    """[batch, heads, tokens, channels] as [batch, tokens, heads * channels]."""
    batch, heads, tokens, channels = x.shape
    return call.move(x, lambda t: t.transpose(0, 2, 1, 3).reshape(batch, tokens, heads * channels))


def _turned(call: Call, x: Any, cos: Any, sin: Any, positions: Any, interleaved: Any, width: int = 0) -> Value:
    """Queries or keys [batch, heads, tokens, channels], of which the first `width` channels are turned.

    Tables are by position, or [batch, tokens, width / 2] without positions.
    """
    f, x = call.f, call.entries(x)
    if positions is not None:
        at = plain(positions)
        cos, sin = (call.move(table, lambda t: t[at]) for table in (cos, sin))
    cos, sin = (call.entries(table)[:, None] for table in (cos, sin))
    width = width or 2 * cos.shape[-1]
    part, rest = x[..., :width], x[..., width:]
    one, two = (part[..., ::2], part[..., 1::2]) if interleaved else np.split(part, 2, -1)
    made = f.sub(f.mul(one, cos), f.mul(two, sin)), f.add(f.mul(one, sin), f.mul(two, cos))
    part = np.stack(made, -1).reshape(part.shape) if interleaved else np.concatenate(made, -1)
    return Value(np.concatenate([part, rest], -1))


@operator("RotaryEmbedding", domain=MICROSOFT, table=True)
def _rotary_of_onnxruntime(call: Call, x: Any, positions: Any, cos: Any, sin: Any) -> Any:
    if call.get("is_packed_batching"):
        raise Unsupported("is_packed_batching is not supported")
    if np.size(positions) == 1:
        positions = positions.reshape(-1, 1) + np.arange(x.shape[-2])
    return _rotary(call, x, cos, sin, positions)


@operator("RotaryEmbedding")
def _rotary(call: Call, x: Any, cos: Any, sin: Any, positions: Any = None) -> Any:
    flat = x.ndim < _HEADED
    data = _by_head(call, x, call.get("num_heads") or x.shape[-1] // (2 * cos.shape[-1])) if flat else x
    made = _turned(call, data, cos, sin, positions, call.get("interleaved"), call.get("rotary_embedding_dim", 0))
    return _joined(call, made) if flat else made
