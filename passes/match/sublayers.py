"""Lowering of fused operators outside of MLP blocks, which bias tokens pass on their way through a network.

onnxruntime's optimiser fuses the scale of scores and a transposition of keys into their product (FusedMatMul), and a
residual addition into the normalisation behind it (SkipLayerNormalization).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from passes.match.linear import MICROSOFT
from rewriter.graph.view import GraphView, attributes, view_model

Parts = list[onnx.NodeProto]
_LAYER_NORM_OPSET = 17
_MEAN, _DEVIATION, _SUM = 1, 2, 3
"""Further outputs of SkipLayerNormalization."""


def network_parts(model: onnx.ModelProto) -> Mapping[str, Parts]:
    """First output of a fused operator of the main graph to the nodes that compute the same."""
    if not any(node.domain == MICROSOFT for node in model.graph.node):
        return {}
    view = view_model(model)
    found: dict[str, Parts] = {}
    for node in view.nodes:
        entry = _LOWERINGS.get(node.op_type) if node.domain == MICROSOFT else None
        parts = None if entry is None else entry(view, node)
        if parts:
            found[node.output[0]] = parts
    return found


def _node(
    node: onnx.NodeProto, operator: str, inputs: list[str], part: str, output: str = "", **given: Any
) -> onnx.NodeProto:
    made = output or f"{node.output[0]}/{part}"
    return helper.make_node(operator, inputs, [made], f"{node.name or node.output[0]}/{part}", **given)


def _product(view: GraphView, node: onnx.NodeProto) -> Parts | None:
    """FusedMatMul of two tensors that are data: their transpositions, product and scale."""
    given = attributes(node)
    constant = any(name in view.initializers for name in node.input)
    kinds = {view.type_of(name).elem_type for name in (*node.input, *node.output)} - {0}
    if constant or given.get("transBatchA") or given.get("transBatchB") or len(kinds) != 1:
        return None
    parts, inputs = Parts(), list(node.input)
    for place, side in enumerate("AB"):
        if given.get(f"trans{side}"):
            rank = view.type_of(inputs[place]).rank
            if rank is None or rank < 2:
                return None
            order = [*range(rank - 2), rank - 1, rank - 2]
            parts.append(_node(node, "Transpose", [inputs[place]], f"turned_{side}", perm=order))
            inputs[place] = str(parts[-1].output[0])
    scale = float(given.get("alpha", 1.0))
    if scale == 1.0:
        return [*parts, _node(node, "MatMul", inputs, "product", str(node.output[0]))]
    product = _node(node, "MatMul", inputs, "product")
    value = np.asarray(scale, helper.tensor_dtype_to_np_dtype(kinds.pop()))
    alpha = helper.make_node(
        "Constant", [], [f"{node.output[0]}/alpha"], f"{node.name}/alpha", value=numpy_helper.from_array(value)
    )
    scaled = _node(node, "Mul", [str(product.output[0]), str(alpha.output[0])], "scaled", str(node.output[0]))
    return [*parts, product, alpha, scaled]


def _skip(view: GraphView, node: onnx.NodeProto) -> Parts | None:
    """SkipLayerNormalization: the bias, the residual addition and the normalisation."""
    named = [*node.input, *[""] * (5 - len(node.input))]
    outputs = [*node.output, *[""] * (4 - len(node.output))]
    if view.opsets.get("", 1) < _LAYER_NORM_OPSET or outputs[_MEAN] or outputs[_DEVIATION] or not all(named[:3]):
        return None
    x, skip, gain, shift, bias = named
    parts = Parts()
    if bias:
        parts.append(_node(node, "Add", [x, bias], "biased"))
        x = str(parts[-1].output[0])
    total = _node(node, "Add", [x, skip], "sum", outputs[_SUM])
    epsilon = attributes(node).get("epsilon", 1e-12)
    inputs = [str(total.output[0]), gain, *([shift] if shift else [])]
    normed = _node(node, "LayerNormalization", inputs, "normalised", str(node.output[0]), epsilon=epsilon, axis=-1)
    return [*parts, total, normed]


_LOWERINGS: dict[str, Callable[[GraphView, onnx.NodeProto], Parts | None]] = {
    "FusedMatMul": _product,
    "SkipLayerNormalization": _skip,
}
"""Operator of onnxruntime's domain to its parts."""
