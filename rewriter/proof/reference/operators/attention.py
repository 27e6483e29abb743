"""The Attention and RotaryEmbedding operators of ai.onnx in numpy, in float64.

onnx's own reference rounds the scale to float32 and honours a float32 `softmax_precision`, neither of which belongs in
the truth. Source: the ONNX specification, opset 23.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rewriter.arrays import Array


def attention(
    attributes: Mapping[str, Any],
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None = None,
    past_key: Array | None = None,
    past_value: Array | None = None,
    nonpad: Array | None = None,
) -> tuple[Array | None, ...]:
    """Y, present key, present value and the attention logits.

    Shapes: [batch, heads, tokens, head size], or [batch, tokens, heads * head size] with the numbers of heads
    as attributes. Key and value may have fewer heads than the query (grouped-query attention).
    """
    windows = [attributes.get(name, -1) for name in ("left_window_size", "right_window_size")]
    if nonpad is not None or any(size >= 0 for size in windows):
        raise NotImplementedError("Attention with nonpad_kv_seqlen or a window")
    flat = query.ndim == 3
    if flat:
        query = _heads(query, attributes["q_num_heads"])
        key, value = (_heads(each, attributes["kv_num_heads"]) for each in (key, value))
    offset = 0 if past_key is None else past_key.shape[2]
    if past_key is not None and past_value is not None:
        key, value = np.concatenate((past_key, key), 2), np.concatenate((past_value, value), 2)
    groups = query.shape[1] // key.shape[1]
    scale = float(attributes.get("scale") or 1 / np.sqrt(query.shape[-1]))
    logits = scale * query @ np.swapaxes(np.repeat(key, groups, 1), -1, -2)
    softcap = float(attributes.get("softcap") or 0)
    capped = np.tanh(logits / softcap) * softcap if softcap else logits
    biased = capped + _bias(capped, mask, causal=bool(attributes.get("is_causal")), offset=offset)
    weights = _softmax(biased)
    modes = (logits, capped, biased, weights)
    result = weights @ np.repeat(value, groups, 1)
    if flat:
        result = np.swapaxes(result, 1, 2).reshape(result.shape[0], result.shape[2], -1)
    return result, key, value, modes[int(attributes.get("qk_matmul_output_mode", 0))]


def rotary(attributes: Mapping[str, Any], x: Array, cos: Array, sin: Array, positions: Array | None = None) -> Array:
    """RotaryEmbedding: rotate pairs of coordinates by the angles of their positions."""
    flat = x.ndim == 3
    heads = _heads(x, attributes["num_heads"]) if flat else x
    size = int(attributes.get("rotary_embedding_dim") or heads.shape[-1])
    turned, rest = heads[..., :size], heads[..., size:]
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    cos, sin = cos[:, None], sin[:, None]
    if attributes.get("interleaved"):
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = np.stack((a * cos - b * sin, a * sin + b * cos), -1).reshape(turned.shape)
    else:
        a, b = np.split(turned, 2, -1)
        turned = np.concatenate((a * cos - b * sin, a * sin + b * cos), -1)
    y = np.concatenate((turned, rest), -1)
    return np.swapaxes(y, 1, 2).reshape(x.shape) if flat else y


def _heads(x: Array, count: int) -> Array:
    return np.swapaxes(x.reshape(*x.shape[:2], int(count), -1), 1, 2)


def _bias(logits: Array, mask: Array | None, *, causal: bool, offset: int) -> Array:
    queries, keys = logits.shape[-2:]
    bias: Array = np.zeros((queries, keys))
    if causal:
        allowed = np.arange(keys) <= np.arange(queries)[:, None] + offset
        bias = np.where(allowed, 0.0, -np.inf)
    if mask is None:
        return bias
    if mask.dtype == np.bool_:
        mask = np.where(mask, 0.0, -np.inf)
    short = keys - mask.shape[-1]
    if short > 0:
        mask = np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, short)], constant_values=-np.inf)
    return np.asarray(bias + mask)


def _softmax(logits: Array) -> Array:
    """Softmax over the last axis; a row in which every key is masked gets weights of 0."""
    highest = logits.max(-1, keepdims=True, initial=-np.inf)
    shares = np.exp(logits - np.where(np.isneginf(highest), 0, highest))
    total = shares.sum(-1, keepdims=True)
    return np.asarray(shares / np.where(total == 0, 1, total))
