"""Operators in numpy, in the precision of their operands.

The table contains the operators that onnxruntime does not compute in double, because it has no kernel or decomposes
them into others with constants rounded to float32. Each is written from its specification: ONNX's, and onnxruntime's of
contributed operators. onnx's own reference of Attention rounds the scale to float32 and honours a float32
`softmax_precision`, neither of which belongs in the truth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rewriter.arrays import Array

Attributes = Mapping[str, Any]
Key = tuple[str, str]
Operator = Callable[..., Array | tuple[Array | None, ...]]

_MICROSOFT = "com.microsoft"


def _number(attributes: Attributes, name: str, default: float) -> float:
    """A float attribute, which ONNX stores in float32: the value is rounded to that, and exact from there on."""
    return float(np.float32(attributes.get(name, default)))


# -- activations -----------------------------------------------------------------------------------------------------


def _each(function: Callable[[float], float], x: Array) -> Array:
    # Nearly twice as fast as numpy.vectorize, and no list in memory; numpy itself has no erf.
    return np.fromiter(map(function, x.flat), np.float64, x.size).reshape(x.shape)


def _erf(_: Attributes, x: Array) -> Array:
    return _each(math.erf, x)


def _sigmoid(x: Array) -> Array:
    # exp only ever sees numbers below 0, so that it does not overflow.
    small = np.exp(-np.abs(x))
    return np.asarray(np.where(x >= 0, 1, small) / (1 + small))


def _gelu(attributes: Attributes, x: Array) -> Array:
    if attributes.get("approximate", b"none") in {b"tanh", "tanh"}:
        return _fast_gelu(attributes, x)
    return np.asarray(x * 0.5 * _each(math.erfc, -x / math.sqrt(2)))


def _fast_gelu(_: Attributes, x: Array, bias: Array | None = None) -> Array:
    x = x if bias is None else x + bias
    return x * _sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))


def _bias_gelu(attributes: Attributes, x: Array, bias: Array) -> Array:
    return _gelu({**attributes, "approximate": b"none"}, x + bias)


def _quick_gelu(attributes: Attributes, x: Array) -> Array:
    return x * _sigmoid(_number(attributes, "alpha", 1.702) * x)


def _swiglu(attributes: Attributes, gate: Array, value: Array) -> Array:
    return _quick_gelu({"alpha": 1.0, **attributes}, gate) * value


def _hard_swish(_: Attributes, x: Array) -> Array:
    return np.asarray(x * np.clip(x / 6 + 0.5, 0, 1))


def _fused_matmul(attributes: Attributes, a: Array, b: Array) -> Array:
    if attributes.get("transBatchA") or attributes.get("transBatchB"):
        raise NotImplementedError("FusedMatMul with transposed batches")
    a = np.swapaxes(a, -1, -2) if attributes.get("transA") and a.ndim > 1 else a
    b = np.swapaxes(b, -1, -2) if attributes.get("transB") and b.ndim > 1 else b
    return np.asarray(_number(attributes, "alpha", 1.0) * np.matmul(a, b))


# -- normalisation ---------------------------------------------------------------------------------------------------


def _normalised(attributes: Attributes, x: Array, *, centred: bool) -> tuple[Array, Array, Array]:
    """The input normalised over the axes from `axis` on, its mean, and the reciprocal of its deviation."""
    axis = int(attributes.get("axis", -1)) % x.ndim
    axes = tuple(range(axis, x.ndim))
    mean = x.mean(axes, keepdims=True)
    shifted = x - mean if centred else x
    inverse = 1 / np.sqrt((shifted * shifted).mean(axes, keepdims=True) + _number(attributes, "epsilon", 1e-5))
    return shifted * inverse, mean, inverse


def _layer_norm(
    attributes: Attributes, x: Array, scale: Array, bias: Array | None = None
) -> tuple[Array, Array, Array]:
    """LayerNormalization: the result, the mean, and the reciprocal of the deviation."""
    y, mean, inverse = _normalised(attributes, x, centred=True)
    return y * scale if bias is None else y * scale + bias, mean, inverse


def _rms_norm(attributes: Attributes, x: Array, scale: Array) -> Array:
    """RMSNormalization, and onnxruntime's SimplifiedLayerNormalization."""
    return np.asarray(_normalised(attributes, x, centred=False)[0] * scale)


def _skip_layer_norm(
    attributes: Attributes,
    x: Array,
    skip: Array,
    gamma: Array,
    beta: Array | None = None,
    bias: Array | None = None,
) -> tuple[Array | None, ...]:
    """SkipLayerNormalization: the result, and the sum that was normalised."""
    total = x + skip if bias is None else x + skip + bias
    wanted = {"epsilon": _number(attributes, "epsilon", 1e-12)}
    return _layer_norm(wanted, total, gamma, beta)[0], None, None, total


def _skip_rms_norm(
    attributes: Attributes, x: Array, skip: Array, gamma: Array, bias: Array | None = None
) -> tuple[Array | None, ...]:
    """SkipSimplifiedLayerNormalization: the result, and the sum that was normalised."""
    total = x + skip if bias is None else x + skip + bias
    wanted = {"epsilon": _number(attributes, "epsilon", 1e-12)}
    return _rms_norm(wanted, total, gamma), None, None, total


# -- attention -----------------------------------------------------------------------------------------------------


def _attention(
    attributes: Attributes,
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None = None,
    past_key: Array | None = None,
    past_value: Array | None = None,
    nonpad: Array | None = None,
) -> tuple[Array, ...]:
    """Attention of ai.onnx: Y, present key and present value.

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
    offset = 0
    if past_key is not None and past_value is not None:
        offset = past_key.shape[2]
        key, value = np.concatenate((past_key, key), 2), np.concatenate((past_value, value), 2)
    groups = query.shape[1] // key.shape[1]
    scale = float(attributes.get("scale") or 1 / np.sqrt(query.shape[-1]))
    logits = scale * query @ np.swapaxes(np.repeat(key, groups, 1), -1, -2)
    if softcap := float(attributes.get("softcap") or 0):
        logits = np.tanh(logits / softcap) * softcap
    logits = logits + _bias(logits, mask, causal=bool(attributes.get("is_causal")), offset=offset)
    # A row in which every key is masked gets weights of 0.
    highest = logits.max(-1, keepdims=True, initial=-np.inf)
    shares = np.exp(logits - np.where(np.isneginf(highest), 0, highest))
    total = shares.sum(-1, keepdims=True)
    result = shares / np.where(total == 0, 1, total) @ np.repeat(value, groups, 1)
    if flat:
        result = np.swapaxes(result, 1, 2).reshape(result.shape[0], result.shape[2], -1)
    return result, key, value


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


NUMPY_OPERATORS: Mapping[Key, Operator] = {
    ("", "Erf"): _erf,
    ("", "Gelu"): _gelu,
    ("", "HardSwish"): _hard_swish,
    ("", "SwiGLU"): _swiglu,
    ("", "LayerNormalization"): _layer_norm,
    ("", "RMSNormalization"): _rms_norm,
    ("", "SimplifiedLayerNormalization"): _rms_norm,
    ("", "Attention"): _attention,
    (_MICROSOFT, "Gelu"): _gelu,
    (_MICROSOFT, "FastGelu"): _fast_gelu,
    (_MICROSOFT, "BiasGelu"): _bias_gelu,
    (_MICROSOFT, "QuickGelu"): _quick_gelu,
    (_MICROSOFT, "FusedMatMul"): _fused_matmul,
    (_MICROSOFT, "SkipLayerNormalization"): _skip_layer_norm,
    (_MICROSOFT, "SkipSimplifiedLayerNormalization"): _skip_rms_norm,
}
"""Maps domain and operator to a function of attributes and operands that returns the output, or a tuple of all."""
