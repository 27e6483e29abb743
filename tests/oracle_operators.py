"""What each ONNX operator computes, in float64 numpy, written from the operators' specification.

`OPERATORS` is for `tests.oracle`, and for nothing else: it shares no code with the proof or with the passes, so that a
mistake of theirs cannot be repeated here. `tests/test_oracle.py` compares
every entry with onnxruntime. Control flow is not in the table: it needs the graph around it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import onnx

from tests.attention import Array

FLOATS = {onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}


Outputs = Array | tuple[Array, ...]


@dataclass(frozen=True)
class Call:
    """How an operator is called: its attributes, and the opset of its domain."""

    attributes: Mapping[str, Any]
    opset: int

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute. Float defaults are float32, like the values that a model states."""
        return self.attributes.get(name, float(np.float32(default)) if isinstance(default, float) else default)


def widened(array: Array) -> Array:
    """Floats as float64, anything else unchanged. numpy does not count bfloat16 as a float."""
    return array if array.dtype.kind in "biu" else array.astype(np.float64)


def _sigmoid(x: Array) -> Array:
    return np.asarray(1.0 / (1.0 + np.exp(-x)))


_erf = np.vectorize(math.erf, otypes=[np.float64])


def _gelu(x: Array, bias: Array | float = 0.0) -> Array:
    y = x + bias
    return np.asarray(0.5 * y * (1.0 + _erf(y / math.sqrt(2.0))))


def _gelu_tanh(x: Array, bias: Array | float = 0.0) -> Array:
    y = x + bias
    return np.asarray(0.5 * y * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (y + 0.044715 * y**3))))


def _divide(x: Array, y: Array) -> Array:
    """Integers are rounded towards zero."""
    if x.dtype.kind == "f":
        return np.asarray(x / y)
    return np.asarray(np.sign(x) * np.sign(y) * (np.abs(x) // np.abs(y))).astype(x.dtype)


def _clip(call: Call, x: Array, low: Array | None = None, high: Array | None = None) -> Array:
    low, high = call.get("min", low), call.get("max", high)
    return np.asarray(np.minimum(np.maximum(x, -np.inf if low is None else low), np.inf if high is None else high))


def _cast(call: Call, x: Array) -> Array:
    """Casts among float types change nothing: in exact arithmetic there is only one."""
    to = call.get("to")
    if to in FLOATS:
        return np.asarray(x, np.float64)
    whole = np.trunc(x) if x.dtype.kind == "f" else x
    return whole.astype(onnx.helper.tensor_dtype_to_np_dtype(to))


def _dequantize(call: Call, x: Array, scale: Array, zero: Array | None = None) -> Array:
    """One scale for all, or one for each entry of an axis."""
    shape = [-1 if axis == call.get("axis", 1) % x.ndim else 1 for axis in range(x.ndim)] if scale.ndim else []
    shift = 0.0 if zero is None else zero.astype(np.float64).reshape(shape)
    return np.asarray((x.astype(np.float64) - shift) * scale.reshape(shape))


ELEMENTWISE: Mapping[str, Callable[..., Array]] = {
    "Abs": np.abs,
    "Add": np.add,
    "Cos": np.cos,
    "Div": _divide,
    "Erf": _erf,
    "Exp": np.exp,
    "HardSwish": lambda x: x * np.clip(x / 6.0 + 0.5, 0.0, 1.0),
    "Log": np.log,
    "Max": lambda *xs: reduce(np.maximum, xs),
    "Min": lambda *xs: reduce(np.minimum, xs),
    "Mish": lambda x: x * np.tanh(np.logaddexp(0.0, x)),
    "Mul": np.multiply,
    "Neg": np.negative,
    "Pow": lambda x, y: np.power(x, y).astype(x.dtype),
    "PRelu": lambda x, slope: np.where(x < 0.0, slope * x, x),
    "Reciprocal": lambda x: 1.0 / x,
    "Relu": lambda x: np.maximum(x, 0.0),
    "Sigmoid": _sigmoid,
    "Sin": np.sin,
    "Softplus": lambda x: np.logaddexp(0.0, x),
    "Softsign": lambda x: x / (1.0 + np.abs(x)),
    "Sqrt": np.sqrt,
    "Sub": np.subtract,
    "Sum": lambda *xs: reduce(np.add, xs),
    "Tanh": np.tanh,
}
"""Operators without attributes."""


def _elu(x: Array, alpha: float, gamma: float = 1.0) -> Array:
    return np.asarray(gamma * np.where(x < 0.0, alpha * np.expm1(np.minimum(x, 0.0)), x))


def _gemm(call: Call, a: Array, b: Array, c: Array | float = 0.0) -> Array:
    a, b = (x.T if call.get(flag, 0) else x for x, flag in ((a, "transA"), (b, "transB")))
    return np.asarray(call.get("alpha", 1.0) * (a @ b) + call.get("beta", 1.0) * c)


def _matmul_nbits(call: Call, x: Array, packed: Array, scales: Array) -> Array:
    """4 bits each, the lower half of a byte first, in blocks with one scale and the zero point 8."""
    if call.get("bits", 4) != 4:
        raise NotImplementedError("MatMulNBits other than with 4 bits")
    rows, block = call.get("N"), call.get("block_size")
    steps = np.stack([packed & 15, packed >> 4], axis=-1).reshape(rows, -1, block).astype(np.float64) - 8.0
    weight = (steps * scales.reshape(rows, -1, 1)).reshape(rows, -1)[:, : call.get("K")]
    return np.asarray(x @ weight.T)


def _conv(call: Call, x: Array, weight: Array, bias: Array | None = None) -> Array:
    """x [batch, channels, *places], weight [out, channels / group, *kernel]."""
    kernel, group = weight.shape[2:], call.get("group", 1)
    count = len(kernel)
    strides, dilations = (call.get(name, [1] * count) for name in ("strides", "dilations"))
    if call.get("auto_pad", "NOTSET") != "NOTSET":
        raise NotImplementedError("Conv with auto_pad")
    pads = np.reshape(call.get("pads", [0] * 2 * count), (2, count)).T
    x = np.pad(x, [(0, 0), (0, 0), *pads])
    reach = [(size - 1) * dilation + 1 for size, dilation in zip(kernel, dilations, strict=True)]
    windows = np.lib.stride_tricks.sliding_window_view(x, reach, axis=tuple(range(2, 2 + count)))
    every = [slice(None)] * 2 + [slice(None, None, step) for step in (*strides, *dilations)]
    windows = windows[tuple(every)]
    parts = [
        np.tensordot(w, k, axes=([1, *range(2 + count, 2 + 2 * count)], range(1, 2 + count)))
        for w, k in zip(np.split(windows, group, axis=1), np.split(weight, group), strict=True)
    ]
    out = np.moveaxis(np.concatenate(parts, axis=-1), -1, 1)
    return out if bias is None else out + bias.reshape(-1, *[1] * count)


def softmax(x: Array, axis: int | tuple[int, ...] = -1) -> Array:
    weights = np.exp(x - x.max(axis=axis, keepdims=True, initial=-np.inf))
    return np.asarray(weights / weights.sum(axis=axis, keepdims=True))


def _softmax(call: Call, x: Array) -> Array:
    """Before opset 13 over all axes from `axis` on, which was 1."""
    if call.opset >= 13:
        return softmax(x, call.get("axis", -1))
    return softmax(x, tuple(range(call.get("axis", 1) % x.ndim, x.ndim)))


def _layer_normalization(call: Call, x: Array, scale: Array, shift: Array | float = 0.0) -> tuple[Array, ...]:
    axes = tuple(range(call.get("axis", -1) % x.ndim, x.ndim))
    mean = x.mean(axis=axes, keepdims=True)
    inverse = 1.0 / np.sqrt(((x - mean) ** 2).mean(axis=axes, keepdims=True) + call.get("epsilon", 1e-5))
    return (x - mean) * inverse * scale + shift, mean, inverse


def _attention(call: Call, query: Array, key: Array, value: Array, mask: Array | None = None) -> Array:
    """Of four axes: batch, heads, tokens, head dimension."""
    scores = call.get("scale", 0.0) or query.shape[-1] ** -0.5
    scores = scores * (query @ np.swapaxes(key, -1, -2))
    if mask is not None:
        scores = np.where(mask, scores, -np.inf) if mask.dtype == bool else scores + mask
    return np.asarray(softmax(scores) @ value)


STATED: Mapping[str, Callable[..., Outputs]] = {
    "Attention": _attention,
    "Cast": _cast,
    "Clip": _clip,
    "Conv": _conv,
    "CumSum": lambda _, x, axis: np.cumsum(x, axis=axis.item(), dtype=x.dtype),
    "DequantizeLinear": _dequantize,
    "GatherElements": lambda call, x, indices: np.take_along_axis(x, indices, call.get("axis", 0)),
    "Elu": lambda call, x: _elu(x, call.get("alpha", 1.0)),
    "Gelu": lambda call, x: _gelu_tanh(x) if call.get("approximate", "none") == "tanh" else _gelu(x),
    "Gemm": _gemm,
    "HardSigmoid": lambda call, x: np.clip(call.get("alpha", 0.2) * x + call.get("beta", 0.5), 0.0, 1.0),
    "LayerNormalization": _layer_normalization,
    "LeakyRelu": lambda call, x: np.where(x < 0.0, call.get("alpha", 0.01) * x, x),
    "MatMul": lambda _, a, b: np.matmul(a, b),
    "Selu": lambda call, x: _elu(
        x, call.get("alpha", 1.67326319217681884765625), call.get("gamma", 1.05070102214813232421875)
    ),
    "Softmax": _softmax,
    "Swish": lambda call, x: x * _sigmoid(call.get("alpha", 1.0) * x),
}
"""Operators with attributes, which are handed over first."""

MICROSOFT: Mapping[str, Callable[..., Outputs]] = {
    "BiasGelu": lambda _, x, bias: _gelu(x, bias),
    "FastGelu": lambda _, x, bias=0.0: _gelu_tanh(x, bias),
    "FusedGemm": lambda call, *operands: ELEMENTWISE[call.get("activation")](_gemm(call, *operands)),
    "Gelu": lambda _, x: _gelu(x),
    "MatMulNBits": _matmul_nbits,
    "QuickGelu": lambda call, x: x * _sigmoid(call.get("alpha", 1.702) * x),
}

OPERATORS: Mapping[tuple[str, str], Callable[..., Outputs]] = {
    **{("", name): (lambda _, *xs, f=function: f(*xs)) for name, function in ELEMENTWISE.items()},
    **{("", name): function for name, function in STATED.items()},
    **{("com.microsoft", name): function for name, function in MICROSOFT.items()},
}
"""Domain and operator to a function of the call and its inputs, None for those left out."""
