"""Lowering: decomposing fused operators and inlining local functions that hide parts of MLP blocks.

The result is an equivalent model in which every activation consists of nodes of its own. The plan lowers a second time
with `keep`, to leave alone whatever no converted block needs (`passes.plan`). `rewriter.graph.fused` has an entry per
fused operator.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass

import onnx

from passes.match.linear import LINEAR_OPERATORS, MICROSOFT
from rewriter.graph.edit import inlined, set_nodes
from rewriter.graph.elementwise import NONLINEAR
from rewriter.graph.fused import in_parts, saturating
from rewriter.graph.view import ONNX_DOMAINS, REARRANGED, key_of
from rewriter.graph.walk import all_graphs, functions_with, is_external

_PARTS_OF_BLOCKS = {
    *(operator for _, operator in LINEAR_OPERATORS),
    *NONLINEAR,
    *("Abs", "Max", "Where"),  # activations are spelled with these alone
}
"""Operators for which a local function is inlined: exporters wrap modules, or single activations, in functions."""

_AFTER_LINEAR = REARRANGED | {"Add", "QLinearAdd", "QuantizeLinear", "DequantizeLinear"}
"""Operators that make another projection of a projection: biases, layouts, rounding."""


@dataclass(frozen=True)
class Lowered:
    """A lowered model (the original if there is nothing to lower), outputs of operators and functions taken apart."""

    model: onnx.ModelProto
    fused: frozenset[str]
    inlined: tuple[str, ...]


def lower(
    model: onnx.ModelProto, keep: frozenset[str] = frozenset(), *, whole: frozenset[tuple[str, str]] = frozenset()
) -> Lowered:
    """Lower `model`, except fused operators with the outputs `keep` and functions `whole`, heads of an earlier run."""
    # Those that contain a linear operator or an activation, or call one that does.
    model, functions = _inlined(model, sorted(functions_with(model, _is_part, whole)))
    found = [
        node.output[0]
        for graph in all_graphs(model.graph)
        for relus in (_dropped_relus(graph),)
        for node in graph.node
        if _parts(node, relus) is not None
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
    relus = _dropped_relus(graph)
    for node in graph.node:
        parts = _parts(node, relus) if node.output and node.output[0] in wanted else None
        for part in parts or ():
            part.metadata_props.extend(node.metadata_props)  # block names come from the exporter's scopes in it
        result.extend(parts or [node])
    set_nodes(graph, result)


def _parts(node: onnx.NodeProto, relus: frozenset[str]) -> list[onnx.NodeProto] | None:
    """The nodes that a fused operator stands for; None for one that is no other."""
    made = in_parts(node, relus)
    return None if made == [node] else made


def _dropped_relus(graph: onnx.GraphProto) -> frozenset[str]:
    """Projections whose quantiser stands for a Relu too."""
    given = {value.name for value in graph.input}
    low = saturating(graph, lambda each: None if is_external(each) else onnx.numpy_helper.to_array(each), given)
    linear, found = set[str](), set[str]()
    for node in graph.node if low else ():
        if key_of(node) in LINEAR_OPERATORS or (node.op_type in _AFTER_LINEAR and not linear.isdisjoint(node.input)):
            (found if node.output[0] in low else linear).update(node.output)
    return frozenset(found)
