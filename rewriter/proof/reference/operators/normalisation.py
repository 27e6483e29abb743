"""Normalisations in numpy.

Source: ONNX, opset 1 to 23, and onnxruntime's contributed operators.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rewriter.arrays import Array

Attributes = Mapping[str, Any]


def number(attributes: Attributes, name: str, default: float) -> float:
    """A float attribute, which ONNX stores in float32: the value is rounded to that, and exact from there on."""
    return float(np.float32(attributes.get(name, default)))


def _normalised(attributes: Attributes, x: Array, *, centred: bool) -> tuple[Array, Array, Array]:
    """The input normalised over the axes from `axis` on, its mean, and the reciprocal of its deviation."""
    axis = int(attributes.get("axis", -1)) % x.ndim
    axes = tuple(range(axis, x.ndim))
    mean = x.mean(axes, keepdims=True)
    shifted = x - mean if centred else x
    inverse = 1 / np.sqrt((shifted * shifted).mean(axes, keepdims=True) + number(attributes, "epsilon", 1e-5))
    return shifted * inverse, mean, inverse


def layer_norm(attributes: Attributes, x: Array, scale: Array, bias: Array | None = None) -> tuple[Array, Array, Array]:
    """LayerNormalization: the result, the mean, and the reciprocal of the deviation."""
    y, mean, inverse = _normalised(attributes, x, centred=True)
    return y * scale if bias is None else y * scale + bias, mean, inverse


def rms_norm(attributes: Attributes, x: Array, scale: Array) -> Array:
    """RMSNormalization, and onnxruntime's SimplifiedLayerNormalization."""
    return np.asarray(_normalised(attributes, x, centred=False)[0] * scale)


def group_norm(attributes: Attributes, x: Array, scale: Array, bias: Array) -> Array:
    """GroupNormalization; up to opset 20 with one scale per group, from then on with one per channel."""
    flat = x.reshape(x.shape[0], int(attributes["num_groups"]), -1)
    y = _normalised(attributes, flat, centred=True)[0].reshape(x.shape)
    channels = (1, -1) + (1,) * (x.ndim - 2)
    each = x.shape[1] // scale.size
    return np.asarray(y * np.repeat(scale, each).reshape(channels) + np.repeat(bias, each).reshape(channels))


def skip_layer_norm(
    attributes: Attributes,
    x: Array,
    skip: Array,
    gamma: Array,
    beta: Array | None = None,
    bias: Array | None = None,
) -> tuple[Array | None, ...]:
    """SkipLayerNormalization: the result, and the sum that was normalised."""
    total = x + skip if bias is None else x + skip + bias
    wanted = {"epsilon": number(attributes, "epsilon", 1e-12)}
    return layer_norm(wanted, total, gamma, beta)[0], None, None, total


def skip_rms_norm(
    attributes: Attributes, x: Array, skip: Array, gamma: Array, bias: Array | None = None
) -> tuple[Array | None, ...]:
    """SkipSimplifiedLayerNormalization: the result, and the sum that was normalised."""
    total = x + skip if bias is None else x + skip + bias
    wanted = {"epsilon": number(attributes, "epsilon", 1e-12)}
    return rms_norm(wanted, total, gamma), None, None, total
