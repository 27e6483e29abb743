"""Proven bounds on pre-activations, from the normalisation in front of a projection.

Comes in: a projection. Goes out: an interval per neuron that holds for every input, or None where nothing is known of
the data. With x = g * n + c (g, c the normalisation's scale and bias) and D channels,

    y = w.x + b = (g * w).n + c.w + b,    |n| <= sqrt(D),

because the mean of n^2 is var / (var + epsilon) <= 1. LayerNormalization also makes the sum of n zero, so that
g * w may be replaced by its difference from its mean (Cauchy and Schwarz do the rest).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import numpy as np

from passes.operands import AnyArray, NotPlainError, Projection, Read, constant_operand
from passes.programs import Array
from rewriter.graph.view import ONNX_DOMAINS, GraphView

MICROSOFT = "com.microsoft"


@dataclass(frozen=True)
class _Norm:
    """Where an operator that normalises has its scale and bias, and whether it subtracts the mean."""

    scale: int
    bias: int | None
    centred: bool


NORMS: dict[tuple[str, str], _Norm] = {
    ("", "LayerNormalization"): _Norm(1, 2, centred=True),
    ("", "RMSNormalization"): _Norm(1, None, centred=False),
    ("", "SimplifiedLayerNormalization"): _Norm(1, None, centred=False),
    (MICROSOFT, "SkipLayerNormalization"): _Norm(2, 3, centred=True),
    (MICROSOFT, "SkipSimplifiedLayerNormalization"): _Norm(2, None, centred=False),
}
"""Operators whose first output is normalised along the last axis."""


def preactivation_bounds(view: GraphView, projection: Projection, read: Read) -> tuple[Array, Array] | None:
    """Smallest and largest value that each neuron's pre-activation can take, widened by what rounding may do.

    Returns:
        Two arrays of shape [d_ff], or None where the projection's data are not normalised by a known operator.
    """
    found = _scale_and_bias(view, projection.data, read)
    if found is None:
        return None
    norm, scale, shift = found
    weight = projection.weight.per_neuron.astype(np.float64)
    if scale.shape[-1:] != weight.shape[1:] or (shift is not None and shift.shape != scale.shape):
        return None
    bias = sum((_spread(operand.array, len(weight)) for operand in projection.biases), np.zeros(len(weight)))
    steered = weight * scale
    if norm.centred:
        steered -= steered.mean(axis=1, keepdims=True)
    reach = np.sqrt((steered**2).sum(axis=1)) * sqrt(weight.shape[1])
    middle = bias if shift is None else weight @ shift + bias
    size = reach + np.abs(bias) + (0.0 if shift is None else np.abs(weight) @ np.abs(shift))
    slack = _rounding(projection.weight.array.dtype, weight.shape[1]) * size
    return middle - reach - slack, middle + reach + slack


def _scale_and_bias(view: GraphView, tensor: str, read: Read) -> tuple[_Norm, Array, Array | None] | None:
    index = view.producer.get(tensor)
    if index is None:
        return None
    node = view.nodes[index]
    norm = NORMS.get(("" if node.domain in ONNX_DOMAINS else node.domain, node.op_type))
    if norm is None or node.output[0] != tensor or not _usual(view, index):
        return None
    try:
        scale = constant_operand(view, index, norm.scale, read).array.astype(np.float64)
        biased = norm.bias is not None and len(node.input) > norm.bias and node.input[norm.bias]
        shift = constant_operand(view, index, norm.bias or 0, read).array.astype(np.float64) if biased else None
    except NotPlainError:
        return None
    return norm, scale, shift


def _usual(view: GraphView, index: int) -> bool:
    """Along the last axis, and with an epsilon that makes nothing larger."""
    node = view.nodes[index]
    given = {attribute.name: attribute for attribute in node.attribute}
    rank = view.type_of(node.input[0]).rank
    last = "axis" not in given or given["axis"].i == -1 or (rank is not None and given["axis"].i == rank - 1)
    return last and ("epsilon" not in given or given["epsilon"].f >= 0.0)


def _spread(bias: AnyArray, count: int) -> Array:
    return np.broadcast_to(bias.astype(np.float64).reshape(-1), (count,))


def _rounding(dtype: np.dtype[np.generic], terms: int) -> float:
    """What rounding may add to a sum of so many products of rounded numbers, over the sum of their sizes; generous."""
    digits = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}.get(dtype.name, 7)
    return 4.0 * (terms + 8) * 2.0**-digits
