"""Operators in numpy, in the precision of their operands.

The table contains the operators that onnx's reference evaluator lacks, decomposes into others with constants rounded
to float32, or computes otherwise than their version says. Each is written from its specification: ONNX's, and
onnxruntime's of contributed operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from rewriter.arrays import Array
from rewriter.graph.view import attributes as attributes_of

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


def _hard_swish(_: Attributes, x: Array) -> Array:
    return np.asarray(x * np.clip(x / 6 + 0.5, 0, 1))


def _fused_matmul(attributes: Attributes, a: Array, b: Array) -> Array:
    if attributes.get("transBatchA") or attributes.get("transBatchB"):
        raise NotImplementedError("FusedMatMul with transposed batches")
    a = np.swapaxes(a, -1, -2) if attributes.get("transA") and a.ndim > 1 else a
    b = np.swapaxes(b, -1, -2) if attributes.get("transB") and b.ndim > 1 else b
    return np.asarray(_number(attributes, "alpha", 1.0) * np.matmul(a, b))


def _rms_norm(attributes: Attributes, x: Array, scale: Array) -> Array:
    """onnxruntime's SimplifiedLayerNormalization: over the axes from `axis` on."""
    axes = tuple(range(int(attributes.get("axis", -1)) % x.ndim, x.ndim))
    return np.asarray(x / np.sqrt((x * x).mean(axes, keepdims=True) + _number(attributes, "epsilon", 1e-5)) * scale)


def _rotary(attributes: Attributes, x: Array, positions: Array, cos: Array, sin: Array) -> Array:
    """onnxruntime's RotaryEmbedding: as that of ONNX, whose operands come in another order."""
    from onnx.reference.ops.op_rotary_embedding import rotary_embedding

    if positions.ndim == 1:  # the position of the first token
        positions = np.broadcast_to(positions + np.arange(x.shape[-2]), (len(x), x.shape[-2]))
    given = {key: attributes.get(key, 0) for key in ("interleaved", "rotary_embedding_dim", "num_heads")}
    return np.asarray(rotary_embedding(x, cos, sin, positions, **given)) * _number(attributes, "scale", 1.0)


# -- what onnx's evaluator computes otherwise --------------------------------------------------------------------------


def _flattened(function: Operator, attributes: Attributes, x: Array) -> Array:
    """Softmax and its logarithm before opset 13: over all axes from `axis` on."""
    axis = int(attributes.get("axis", 1)) % x.ndim
    return np.asarray(function(x.reshape(*x.shape[:axis], -1))).reshape(x.shape)


def _log_softmax(x: Array) -> Array:
    shifted = x - x.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def _softmax(x: Array) -> Array:
    return np.asarray(np.exp(_log_softmax(x)))


def _batch_norm(attributes: Attributes, x: Array, scale: Array, bias: Array, mean: Array, variance: Array) -> Array:
    """BatchNormalization of inference: before opset 14 onnx takes the statistics of the batch instead."""
    if attributes.get("training_mode"):
        raise NotImplementedError("BatchNormalization in training")
    shape = (*scale.shape, *(1,) * (x.ndim - 1 - scale.ndim))
    scale, bias, mean, variance = (each.reshape(shape) for each in (scale, bias, mean, variance))
    return (x - mean) / np.sqrt(variance + _number(attributes, "epsilon", 1e-5)) * scale + bias


def _gather_elements(attributes: Attributes, x: Array, index: Array) -> Array:
    """GatherElements; onnx's fails on more than 64 rows."""
    axis = int(attributes.get("axis", 0))
    return np.take_along_axis(x, np.where(index < 0, index + x.shape[axis], index), axis)


OPERATORS: Mapping[Key, Operator] = {
    ("", "GatherElements"): _gather_elements,
    ("", "Erf"): _erf,
    ("", "Gelu"): _gelu,
    ("", "HardSwish"): _hard_swish,
    ("", "SimplifiedLayerNormalization"): _rms_norm,
    ("", "BatchNormalization"): _batch_norm,
    (_MICROSOFT, "Gelu"): _gelu,
    (_MICROSOFT, "FastGelu"): _fast_gelu,
    (_MICROSOFT, "BiasGelu"): _bias_gelu,
    (_MICROSOFT, "QuickGelu"): _quick_gelu,
    (_MICROSOFT, "FusedMatMul"): _fused_matmul,
    (_MICROSOFT, "RotaryEmbedding"): _rotary,
}
"""Maps domain and operator to a function of attributes and operands that returns the output, or a tuple of all."""

_UNTIL_12: Mapping[Key, Operator] = {
    ("", "Softmax"): partial(_flattened, _softmax),
    ("", "LogSoftmax"): partial(_flattened, _log_softmax),
}


def operators(opset: int) -> list[type]:
    """The operators, in some opset of the default domain, as classes for onnx's reference evaluator."""
    from onnx.reference.ops.op_dequantize_linear import DequantizeLinear_25

    known = {**OPERATORS, **(_UNTIL_12 if opset < 13 else {})}
    # onnx's evaluator has no earlier DequantizeLinear, which computed the same.
    earlier = [type("DequantizeLinear", (DequantizeLinear_25,), {"op_domain": ""})] if opset < 19 else []
    return [_as_class(*key, form) for key, form in known.items()] + earlier


def _as_class(domain: str, name: str, form: Operator) -> type:
    from onnx.reference.op_run import OpRun

    def run(self: Any, *operands: Array | None, **_: Any) -> tuple[Array | None, ...]:
        made = form(attributes_of(self.onnx_node), *operands)
        return made if isinstance(made, tuple) else (made,)

    return type(name, (OpRun,), {"op_domain": domain, "_run": run})
