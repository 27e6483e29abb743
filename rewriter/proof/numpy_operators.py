"""Operators in numpy, in the precision of their operands.

Comes in: attributes and arrays. Goes out: arrays. Used by `rewriter.proof.float64` in place of operators that
onnx's reference evaluator lacks (onnxruntime's own), computes in float32 whatever it is given (Erf, functions
with float32 constants), or computes slowly (Conv). Each is written from the operator's specification.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rewriter.proof.numpy_attention import attention, rotary

Array = NDArray[Any]
Attributes = Mapping[str, Any]
Operator = Callable[..., Array | tuple[Array | None, ...]]

_MICROSOFT = "com.microsoft"


def _erf_of(_: Attributes, x: Array) -> Array:
    # Nearly twice as fast as numpy.vectorize; numpy itself has no erf.
    return np.fromiter(map(math.erf, x.reshape(-1).tolist()), np.float64, x.size).reshape(x.shape)


def _sigmoid(x: Array) -> Array:
    # exp only ever sees numbers below 0, so that it does not overflow.
    small = np.exp(-np.abs(x))
    return np.asarray(np.where(x >= 0, 1, small) / (1 + small))


def _softplus(_: Attributes, x: Array) -> Array:
    return np.asarray(np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))))


def _gelu(attributes: Attributes, x: Array) -> Array:
    if attributes.get("approximate", b"none") in {b"tanh", "tanh"}:
        return _fast_gelu(attributes, x)
    return np.asarray(x * 0.5 * (1 + _erf_of(attributes, x / math.sqrt(2))))


def _fast_gelu(_: Attributes, x: Array, bias: Array | None = None) -> Array:
    x = x if bias is None else x + bias
    return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))))


def _bias_gelu(attributes: Attributes, x: Array, bias: Array) -> Array:
    return _gelu({**attributes, "approximate": b"none"}, x + bias)


def _quick_gelu(attributes: Attributes, x: Array) -> Array:
    return x * _sigmoid(_number(attributes, "alpha", 1.702) * x)


def _swish(attributes: Attributes, x: Array) -> Array:
    return x * _sigmoid(_number(attributes, "alpha", 1.0) * x)


def _hard_swish(_: Attributes, x: Array) -> Array:
    return np.asarray(x * np.clip(x / 6 + 0.5, 0, 1))


def _mish(attributes: Attributes, x: Array) -> Array:
    return np.asarray(x * np.tanh(_softplus(attributes, x)))


def _normalised(x: Array, axis: int, epsilon: float, *, centred: bool) -> Array:
    axes = tuple(range(axis % x.ndim, x.ndim))
    shifted = x - x.mean(axes, keepdims=True) if centred else x
    return np.asarray(shifted / np.sqrt((shifted * shifted).mean(axes, keepdims=True) + epsilon))


def _layer_norm(attributes: Attributes, x: Array, scale: Array, bias: Array | None = None) -> Array:
    axis, epsilon = int(attributes.get("axis", -1)), _number(attributes, "epsilon", 1e-5)
    y = _normalised(x, axis, epsilon, centred=True) * scale
    return y if bias is None else y + bias


def _rms_norm(attributes: Attributes, x: Array, scale: Array) -> Array:
    axis, epsilon = int(attributes.get("axis", -1)), _number(attributes, "epsilon", 1e-5)
    return _normalised(x, axis, epsilon, centred=False) * scale


def _group_norm(attributes: Attributes, x: Array, scale: Array, bias: Array) -> Array:
    groups = int(attributes["num_groups"])
    flat = x.reshape(x.shape[0], groups, -1)
    y = _normalised(flat, -1, _number(attributes, "epsilon", 1e-5), centred=True).reshape(x.shape)
    channels = (1, -1) + (1,) * (x.ndim - 2)
    # Up to opset 20 there is one scale per group, since then one per channel.
    each = x.shape[1] // scale.size
    return np.asarray(y * np.repeat(scale, each).reshape(channels) + np.repeat(bias, each).reshape(channels))


def _skip_layer_norm(
    attributes: Attributes,
    x: Array,
    skip: Array,
    gamma: Array,
    beta: Array | None = None,
    bias: Array | None = None,
) -> tuple[Array | None, ...]:
    total = x + skip if bias is None else x + skip + bias
    wanted = {"axis": -1, "epsilon": _number(attributes, "epsilon", 1e-12)}
    return _layer_norm(wanted, total, gamma, beta), None, None, total


def _skip_rms_norm(
    attributes: Attributes, x: Array, skip: Array, gamma: Array, bias: Array | None = None
) -> tuple[Array | None, ...]:
    total = x + skip if bias is None else x + skip + bias
    wanted = {"axis": -1, "epsilon": _number(attributes, "epsilon", 1e-12)}
    return _rms_norm(wanted, total, gamma), None, None, total


def _fused_matmul(attributes: Attributes, a: Array, b: Array) -> Array:
    if attributes.get("transBatchA") or attributes.get("transBatchB"):
        raise NotImplementedError("FusedMatMul with transposed batches")
    a = np.swapaxes(a, -1, -2) if attributes.get("transA") and a.ndim > 1 else a
    b = np.swapaxes(b, -1, -2) if attributes.get("transB") and b.ndim > 1 else b
    return np.asarray(_number(attributes, "alpha", 1.0) * np.matmul(a, b))


def _conv(attributes: Attributes, x: Array, weight: Array, bias: Array | None = None) -> Array:
    rank = weight.ndim - 2
    size, strides = weight.shape[2:], attributes.get("strides") or (1,) * rank
    dilations, group = attributes.get("dilations") or (1,) * rank, int(attributes.get("group", 1))
    reach = [(k - 1) * d + 1 for k, d in zip(size, dilations, strict=True)]
    x = np.pad(x, ((0, 0), (0, 0), *_conv_pads(attributes, x.shape[2:], reach, strides)))
    windows = np.lib.stride_tricks.sliding_window_view(x, reach, axis=tuple(range(2, 2 + rank)))
    steps = tuple(slice(None, None, step) for step in strides)
    inside = tuple(slice(None, None, step) for step in dilations)
    windows = windows[(slice(None), slice(None), *steps, *inside)]
    inner = [1, *range(2 + rank, 2 + 2 * rank)]
    parts = [
        np.tensordot(part, kernel, axes=(inner, list(range(1, 2 + rank))))
        for part, kernel in zip(np.split(windows, group, 1), np.split(weight, group, 0), strict=True)
    ]
    y = np.moveaxis(np.concatenate(parts, -1), -1, 1)
    return y if bias is None else y + bias.reshape(1, -1, *(1,) * rank)


def _conv_pads(attributes: Attributes, sizes: tuple[int, ...], reach: list[int], strides: Any) -> list[tuple[int, int]]:
    mode = attributes.get("auto_pad", b"NOTSET")
    mode = mode.decode() if isinstance(mode, bytes) else mode
    rank = len(sizes)
    if mode in {"NOTSET", "VALID"}:
        pads = (attributes.get("pads") if mode == "NOTSET" else None) or (0,) * (2 * rank)
        return [(int(pads[axis]), int(pads[axis + rank])) for axis in range(rank)]
    totals = [
        max((-(-size // step) - 1) * step + k - size, 0) for size, k, step in zip(sizes, reach, strides, strict=True)
    ]
    return [(t // 2, t - t // 2) if mode == "SAME_UPPER" else (t - t // 2, t // 2) for t in totals]


def _number(attributes: Attributes, name: str, default: float) -> float:
    """An attribute as onnxruntime has it: rounded to float32, then exact."""
    return float(np.float32(attributes.get(name, default)))


def _gather_elements(attributes: Attributes, data: Array, indices: Array) -> Array:
    # onnx's own takes at most 64 rows along the axis.
    return np.take_along_axis(data, indices.astype(np.int64), axis=int(attributes.get("axis", 0)))


NUMPY_OPERATORS: Mapping[tuple[str, str], Operator] = {
    ("", "Erf"): _erf_of,
    ("", "Sigmoid"): lambda _, x: _sigmoid(x),
    ("", "Softplus"): _softplus,
    ("", "Gelu"): _gelu,
    ("", "Swish"): _swish,
    ("", "HardSwish"): _hard_swish,
    ("", "Mish"): _mish,
    ("", "LayerNormalization"): _layer_norm,
    ("", "RMSNormalization"): _rms_norm,
    ("", "SimplifiedLayerNormalization"): _rms_norm,
    ("", "GroupNormalization"): _group_norm,
    ("", "Conv"): _conv,
    ("", "GatherElements"): _gather_elements,
    ("", "Attention"): attention,
    ("", "RotaryEmbedding"): rotary,
    (_MICROSOFT, "Gelu"): _gelu,
    (_MICROSOFT, "FastGelu"): _fast_gelu,
    (_MICROSOFT, "BiasGelu"): _bias_gelu,
    (_MICROSOFT, "QuickGelu"): _quick_gelu,
    (_MICROSOFT, "FusedMatMul"): _fused_matmul,
    (_MICROSOFT, "SkipLayerNormalization"): _skip_layer_norm,
    (_MICROSOFT, "SkipSimplifiedLayerNormalization"): _skip_rms_norm,
}
"""Domain and operator to its numpy form: attributes and operands in, the output or all outputs back."""
