"""Operators that onnxruntime fuses, in numpy: a linear operator with what follows it.

Source: com.microsoft in onnxruntime's `ContribOperators.md`. Their kernels compute in float32 only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rewriter.arrays import Array
from rewriter.proof.reference.operators.activations import ACTIVATIONS
from rewriter.proof.reference.operators.convolution import conv
from rewriter.proof.reference.operators.normalisation import number

Attributes = Mapping[str, Any]

_PARAMETERS = ("activation_alpha", "activation_beta")


def fused_matmul(attributes: Attributes, a: Array, b: Array) -> Array:
    """`alpha A B`, either one transposed."""
    if attributes.get("transBatchA") or attributes.get("transBatchB"):
        raise NotImplementedError("FusedMatMul with transposed batches")
    a = np.swapaxes(a, -1, -2) if attributes.get("transA") and a.ndim > 1 else a
    b = np.swapaxes(b, -1, -2) if attributes.get("transB") and b.ndim > 1 else b
    return np.asarray(number(attributes, "alpha", 1.0) * np.matmul(a, b))


def fused_gemm(attributes: Attributes, a: Array, b: Array, c: Array | None = None) -> Array:
    """`activation(alpha A B + beta C)`."""
    product = fused_matmul(attributes, a, b)
    total = product if c is None else product + number(attributes, "beta", 1.0) * c
    given = [number(attributes, name, np.nan) for name in _PARAMETERS if name in attributes]
    return _activated(attributes, total, given)


def fused_conv(
    attributes: Attributes, x: Array, weight: Array, bias: Array | None = None, addend: Array | None = None
) -> Array:
    """`activation(Conv(x) + addend)`."""
    result = conv(attributes, x, weight, bias)
    given = [float(np.float32(value)) for value in attributes.get("activation_params", ())]
    return _activated(attributes, result if addend is None else result + addend, given)


def _activated(attributes: Attributes, x: Array, given: list[float]) -> Array:
    name = attributes.get("activation", b"")
    name = name.decode() if isinstance(name, bytes) else name
    if not name:
        return x
    defaults, values = ACTIVATIONS.get(name.lower(), ((None,), None))
    numbers = (*given, *defaults[len(given) :])
    if values is None or None in numbers:
        raise NotImplementedError(f"a fused {name}")
    return np.asarray(values(x, *numbers))
