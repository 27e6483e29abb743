"""Attention heads in numpy, from tensors in the shapes of TransformerLens; knows nothing of the tool."""

from collections.abc import Mapping
from copy import deepcopy

import numpy as np
import onnx
import onnxruntime

from tests.attention import Array
from tests.oracle_operators import softmax

Tensors = Mapping[str, Array]


def close(found: Array, wanted: Array, bound: float = 3e-6) -> None:
    """Relative to the largest entry; 3e-6 is for float32."""
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() <= bound * max(1.0, np.abs(wanted).max())


def projected(data: Array, weight: Array, bias: Array) -> Array:
    """[batch, tokens, d_model] to [batch, tokens, heads, d_head]."""
    return np.asarray(np.einsum("btd,hdk->bthk", data, weight) + bias)


def rotated(vectors: Array, base: float = 10000.0) -> Array:
    """Rotary embedding of [batch, tokens, heads, d_head], halves against each other."""
    half = vectors.shape[-1] // 2
    angles = np.outer(np.arange(vectors.shape[1]), base ** (-np.arange(half) / half))[None, :, None]
    first, second = vectors[..., :half], vectors[..., half:]
    turned = (first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles))
    return np.concatenate(turned, axis=-1)


def scores_of(data: Array, own: Tensors, scale: float, *, rotary: bool) -> Array:
    """Scores by content, [batch, heads, dest, src]."""
    query, key = (projected(data, own[f"W_{side}"], own[f"b_{side}"]) for side in "QK")
    if rotary:
        query, key = rotated(query), rotated(key)
    return np.asarray(np.einsum("bthk,bshk->bhts", query, key) * scale)


def pattern_of(data: Array, own: Tensors, scale: float, mask: Array, *, rotary: bool) -> Array:
    """[batch, heads, dest, src]; `mask` is True where a token may attend, and broadcasts."""
    return softmax(np.where(mask, scores_of(data, own, scale, rotary=rotary), -np.inf))


def written(data: Array, pattern: Array, own: Tensors) -> Array:
    """What attention heads write, [batch, tokens, d_model], from their pattern."""
    value = projected(data, own["W_V"], own["b_V"])
    z = np.einsum("bhts,bshk->bthk", pattern, value)
    return np.asarray(np.einsum("bthk,hkd->btd", z, own["W_O"]) + own["b_O"])


def neuron_pattern(data: Array, own: Tensors) -> Array:
    """[batch, tokens, heads, 1 + m]: every token attends to itself and to the bias tokens."""
    query, key = (projected(data, own[f"W_{side}"], own[f"b_{side}"]) for side in "QK")
    itself = (query * key).sum(axis=-1, keepdims=True)
    with np.errstate(invalid="ignore"):  # 0 times -inf: a bias token that a head does not have
        products = query[..., None, :] * own["bias_K"]
    others = np.where(np.isneginf(own["bias_K"]).any(axis=-1), -np.inf, products.sum(axis=-1))
    return softmax(np.concatenate([itself, others], axis=-1))


def neurons_write(data: Array, own: Tensors) -> Array:
    """What the heads of neurons write, [batch, tokens, d_model]."""
    pattern = neuron_pattern(data, own)
    value = projected(data, own["W_V"], own["b_V"])
    z = pattern[..., :1] * value + (pattern[..., 1:, None] * own["bias_V"]).sum(axis=-2)
    return np.asarray(np.einsum("bthk,hkd->btd", z, own["W_O"]) + own["b_O"])


def tapped(model: onnx.ModelProto, feeds: Tensors, names: list[str]) -> dict[str, Array]:
    """The values of tensors inside a model, by onnxruntime without optimisation."""
    copy = deepcopy(model)
    present = {value.name for value in copy.graph.output}
    copy.graph.output.extend(onnx.ValueInfoProto(name=name) for name in dict.fromkeys(names) if name not in present)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(copy.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return dict(zip(names, session.run(names, dict(feeds)), strict=True))


def wide(own: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    """The tensors of one sublayer in float64, by their short names."""
    return {
        name.removeprefix(f"{prefix}."): own[name].astype(np.float64) for name in own if name.startswith(f"{prefix}.")
    }
