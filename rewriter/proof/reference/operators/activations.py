"""Activations that recurrent and fused operators name in an attribute.

Source: RNN, GRU and LSTM of onnx; FusedGemm and FusedConv of onnxruntime.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rewriter.arrays import Array


def _sigmoid(x: Array) -> Array:
    return np.asarray(0.5 * (1 + np.tanh(x / 2)))


ACTIVATIONS: Mapping[str, tuple[tuple[float | None, ...], Callable[..., Any]]] = {
    "sigmoid": ((), _sigmoid),
    "tanh": ((), np.tanh),
    "relu": ((), lambda x: np.maximum(x, 0)),
    "softsign": ((), lambda x: x / (1 + np.abs(x))),
    "softplus": ((), lambda x: np.logaddexp(x, 0)),
    "leakyrelu": ((0.01,), lambda x, a: np.where(x >= 0, x, a * x)),
    "thresholdedrelu": ((None,), lambda x, a: np.where(x > a, x, 0)),
    "elu": ((1.0,), lambda x, a: np.where(x >= 0, x, a * np.expm1(x))),
    "hardsigmoid": ((0.2, 0.5), lambda x, a, b: np.clip(a * x + b, 0, 1)),
    "affine": ((None, None), lambda x, a, b: a * x + b),
    "scaledtanh": ((None, None), lambda x, a, b: a * np.tanh(b * x)),
}
"""Lower-case name to the defaults of alpha and beta, and the function; None where ONNX and onnxruntime differ."""
