"""Lowering: decomposing fused operators and inlining local functions that hide parts of MLP blocks.

The result is an equivalent model in which every activation consists of separate nodes. The plan lowers a second time
with `keep`, which leaves alone the operators that converted blocks do not need (`passes.plan`). `rewriter.graph.fused`
has an entry per fused operator.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx

from passes.match.linear import LINEAR_OPERATORS
from rewriter.graph.edit import inlined
from rewriter.graph.elementwise import MICROSOFT, NONLINEAR
from rewriter.graph.fused import in_parts, saturating, with_parts
from rewriter.graph.view import ONNX_DOMAINS, REARRANGED, key_of
from rewriter.graph.walk import all_graphs, functions_with, is_external

# Operators for which a local function is inlined: exporters wrap modules, or single activations, in functions.
# Activations are spelled with the last three alone.
_PARTS_OF_BLOCKS = {*(operator for _, operator in LINEAR_OPERATORS), *NONLINEAR, "Abs", "Max", "Where"}
# Operators whose output is a projection if their input is one: biases, layouts, rounding.
_AFTER_LINEAR = REARRANGED | {"Add", "QLinearAdd", "QuantizeLinear", "DequantizeLinear"}


@dataclass(frozen=True)
class Lowered:
    """A lowered model (the original if unchanged), the outputs of expanded operators and the inlined functions."""

    model: onnx.ModelProto
    fused: frozenset[str]
    inlined: tuple[str, ...]


def lower(
    model: onnx.ModelProto, keep: frozenset[str] = frozenset(), *, whole: frozenset[tuple[str, str]] = frozenset()
) -> Lowered:
    """Lower `model`, except fused operators with the outputs `keep` and functions `whole`, heads of an earlier run."""
    # Functions that contain a linear operator or an activation, or call such a function.
    known = (*ONNX_DOMAINS, MICROSOFT)
    functions = sorted(
        functions_with(model, lambda each: each.op_type in _PARTS_OF_BLOCKS and each.domain in known, whole)
    )
    try:
        model = inlined(model, functions) if functions else model
    except RuntimeError:  # onnx refuses functions of another operator set, whose nodes would get another meaning
        functions = []
    # By the identity of nodes, which are held: a body may have a tensor of the same name.
    fused = {id(node): (node, parts) for graph in all_graphs(model.graph) for node, parts in _fused(graph, keep)}
    lowered = with_parts(model, lambda node: fused[id(node)][1] if id(node) in fused else None)
    names = frozenset(node.output[0] for node, _ in fused.values())
    return Lowered(lowered, names, tuple(f"{domain}::{name}" for domain, name in functions))


def _fused(graph: onnx.GraphProto, keep: frozenset[str]) -> Iterator[tuple[onnx.NodeProto, list[onnx.NodeProto]]]:
    """Fused operators, except those with an output in `keep`, with their expansions."""
    relus = _dropped_relus(graph)
    for node in graph.node:
        parts = in_parts(node, relus)
        if parts != [node] and node.output[0] not in keep:
            yield node, parts


def _dropped_relus(graph: onnx.GraphProto) -> frozenset[str]:
    """Projections whose quantiser also acts as a Relu."""
    given = {value.name for value in graph.input}
    low = saturating(graph, lambda each: None if is_external(each) else onnx.numpy_helper.to_array(each), given)
    linear, found = set[str](), set[str]()
    for node in graph.node if low else ():
        if key_of(node) in LINEAR_OPERATORS or (node.op_type in _AFTER_LINEAR and not linear.isdisjoint(node.input)):
            (found if node.output[0] in low else linear).update(node.output)
    return frozenset(found)
