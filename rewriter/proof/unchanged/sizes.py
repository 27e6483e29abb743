"""Check that heads of a form without square patterns compute the same at every size.

Such heads look at one entry at a time. Shapes may say how numbers are laid out, sliced and counted, but no number may
be computed from them: heads that give 0 from a batch of 9 on, or at 41 tokens, would pass every test at other sizes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import onnx

from rewriter.graph.extract import reads
from rewriter.graph.view import key_of, subgraphs
from rewriter.proof.unchanged.same import Functions, OperatorKey, operator_key

_LAYOUT = {
    **dict.fromkeys(("Reshape", "Expand", "Tile", "Pad", "Split", "Squeeze", "Unsqueeze"), (1,)),
    "Slice": (1, 2, 3, 4),
    "ConstantOfShape": (0,),
    "Loop": (0,),
}
"""Operators to the operands that say how numbers are laid out, and which of them are taken."""

_SIZES = {("", "Shape"), ("", "Size")}


def depends_on_size(
    nodes: Iterable[onnx.NodeProto], output: str, functions: Functions, sized: Collection[str] = ()
) -> bool:
    """Whether a tensor is computed from shapes.

    Args:
        nodes: what may make it, in topological order.
        output: the tensor.
        functions: the local functions of the model.
        sized: tensors that are known to be computed from shapes.
    """
    return output in _sized(nodes, functions, frozenset(sized), frozenset())


def _sized(
    nodes: Iterable[onnx.NodeProto], functions: Functions, given: frozenset[str], calling: frozenset[OperatorKey]
) -> set[str]:
    """The tensors that are computed from shapes, or from those in `given`."""
    found = set(given)
    for node in nodes:
        domain, operator = key_of(node)
        layout = () if domain else _LAYOUT.get(operator, ())
        inputs = [name in found for place, name in enumerate(node.input) if name and place not in layout]
        function = functions.get(operator_key(node))
        if (domain, operator) in _SIZES:
            found.update(node.output)
        elif function is not None and operator_key(node) not in calling:
            start = frozenset(formal for formal, name in zip(function.input, node.input, strict=False) if name in found)
            inner = _sized(function.node, functions, start, calling | {operator_key(node)})
            found.update(name for name, own in zip(node.output, function.output, strict=False) if own in inner)
        elif any(inputs):
            found.update(node.output)
        elif any(True for _ in subgraphs(node)):
            found.update(_of_bodies(node, functions, found, calling))
    return found - {""}


def _of_bodies(
    node: onnx.NodeProto, functions: Functions, found: set[str], calling: frozenset[OperatorKey]
) -> Iterable[str]:
    """The outputs of a node with bodies that these compute from shapes; all of them if any is, of a Loop or Scan."""
    captured = found.intersection(reads(node))
    for _, body in subgraphs(node):
        counter = {body.input[0].name} if node.op_type == "Loop" else set()
        inner = _sized(body.node, functions, frozenset(captured | counter), calling)
        if node.op_type == "Loop":
            # The condition ends the loop; what it carries and collects are the outputs.
            made = [value.name for value in body.output][1:]
        else:
            made = [value.name for value in body.output]
        if any(name in inner for name in made):
            return list(node.output)
    return ()
