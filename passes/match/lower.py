"""Lowering: decomposing fused operators and inlining local functions that hide parts of MLP blocks.

The result is an equivalent model in which every activation consists of nodes of its own. The plan lowers a second time
with `keep`, to leave alone whatever no converted block needs (`passes.plan`). `FUSED` has an entry per fused
operator.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from math import prod

import numpy as np
import onnx

from passes.match.linear import LINEAR_OPERATORS, MICROSOFT
from rewriter.graph.edit import inlined, set_nodes
from rewriter.graph.elementwise import NONLINEAR
from rewriter.graph.fused import FUSED, SATURATING, step
from rewriter.graph.view import ONNX_DOMAINS, REARRANGED, key_of
from rewriter.graph.walk import all_graphs, functions_with

_PARTS_OF_BLOCKS = {
    *(operator for _, operator in LINEAR_OPERATORS),
    *NONLINEAR,
    *("Abs", "Max", "Where"),  # activations are spelled with these alone
}
"""Operators for which a local function is inlined: exporters wrap modules, or single activations, in functions."""

_QUANTISED_TYPES = frozenset(
    (onnx.TensorProto.INT8, onnx.TensorProto.UINT8, onnx.TensorProto.INT16, onnx.TensorProto.UINT16)
)
_QUANTISING = {
    ("", "QuantizeLinear"): 3,
    ("", "QLinearMatMul"): 8,
    (MICROSOFT, "QLinearAdd"): 8,
    (MICROSOFT, "QGemm"): 9,
}
"""Operators whose last operand, of this many, is the zero point of what they make."""
_AFTER_LINEAR = REARRANGED | {"Add", "QLinearAdd", "QuantizeLinear", "DequantizeLinear"}
"""Operators that make another projection of a projection: biases, layouts, rounding."""


@dataclass(frozen=True)
class Lowered:
    """A lowered model.

    Attributes:
        model: the lowered model; the original object where there was nothing to lower.
        fused: names of the outputs of decomposed operators.
        inlined: names of the local functions that were inlined.
    """

    model: onnx.ModelProto
    fused: frozenset[str]
    inlined: tuple[str, ...]


def lower(
    model: onnx.ModelProto, keep: frozenset[str] = frozenset(), *, whole: frozenset[tuple[str, str]] = frozenset()
) -> Lowered:
    """Lower `model`.

    Args:
        model: the model.
        keep: outputs of fused operators that stay.
        whole: local functions that stay, (domain, name): those of heads that an earlier run made.
    """
    # Those that contain a linear operator or an activation, or call one that does.
    model, functions = _inlined(model, sorted(functions_with(model, _is_part, whole)))
    found = [
        node.output[0]
        for graph in all_graphs(model.graph)
        for saturating in (_saturating(graph),)
        for node in graph.node
        if _lowered(node, saturating) is not None
    ]
    wanted = frozenset(found) - keep
    if wanted:
        if not functions:  # the inliner has made a copy already
            model = deepcopy(model)
        for graph in all_graphs(model.graph):
            _take_apart(graph, wanted)
    return Lowered(model, wanted, tuple(f"{domain}::{name}" for domain, name in functions))


def _inlined(model: onnx.ModelProto, functions: list[tuple[str, str]]) -> tuple[onnx.ModelProto, list[tuple[str, str]]]:
    """A copy with these functions inlined, and their names; the model itself where onnx refuses.

    It refuses functions that import another operator set than the model, whose nodes would get another meaning.
    """
    if not functions:
        return model, []
    try:
        return inlined(model, functions), functions
    except RuntimeError:
        return model, []


def _is_part(node: onnx.NodeProto) -> bool:
    return node.op_type in _PARTS_OF_BLOCKS and node.domain in (*ONNX_DOMAINS, MICROSOFT)


def _take_apart(graph: onnx.GraphProto, wanted: frozenset[str]) -> None:
    if not any(node.output and node.output[0] in wanted for node in graph.node):
        return
    result: list[onnx.NodeProto] = []
    saturating = _saturating(graph)
    for node in graph.node:
        parts = _lowered(node, saturating) if node.output and node.output[0] in wanted else None
        for part in parts or ():
            part.metadata_props.extend(node.metadata_props)  # block names come from the exporter's scopes in it
        result.extend(parts or [node])
    set_nodes(graph, result)


def _lowered(node: onnx.NodeProto, saturating: frozenset[str]) -> list[onnx.NodeProto] | None:
    entry = FUSED.get(key_of(node))
    if entry is None and node.output and node.output[0] in saturating:
        entry = SATURATING.get(key_of(node), lambda quantise: [quantise])
    made = [node] if entry is None else entry(node)
    if made is not None and made[-1].op_type == "QuantizeLinear" and made[-1].output[0] in saturating:
        relu = step(node, "Relu", [made[-1].input[0]], last=False)
        made = [*made[:-1], relu, deepcopy(made[-1])]
        made[-1].input[0] = relu.output[0]
    return None if made == [node] else made


def _saturating(graph: onnx.GraphProto) -> frozenset[str]:
    """Quantised projections with the smallest number as zero point: they are those of a Relu, which quantisers drop."""
    sizes = {tensor.name: len(tensor.dims) for tensor in graph.initializer}
    numbers = [
        (tensor.name, onnx.numpy_helper.to_array(tensor))
        for tensor in graph.initializer
        if tensor.data_type in _QUANTISED_TYPES and prod(tensor.dims) == 1 and not tensor.external_data
    ]
    lowest = {name for name, zero in numbers if zero == np.iinfo(zero.dtype).min}
    lowest -= {value.name for value in graph.input}
    linear, found = set[str](), set[str]()
    for node in graph.node if lowest else ():
        key = key_of(node)
        follows = node.op_type in _AFTER_LINEAR and not linear.isdisjoint(node.input)
        if key not in LINEAR_OPERATORS and not follows:
            continue
        # Scales for each column of a matrix are on the axis that DequantizeLinear takes by default.
        plain = key != ("", "QLinearMatMul") or [sizes.get(name) for name in node.input[3:4]] == [2]
        if _QUANTISING.get(key) == len(node.input) and node.input[-1] in lowest and plain:
            found.add(node.output[0])
        else:
            linear.update(node.output)
    return frozenset(found)
