"""A block that is reported as converted was replaced, and what replaced it is attention.

Comes in: what lies between the ends of a block in both models. In the rewritten model the original's activation nodes
must not be among it, and there must be a softmax on the way from the block's inputs to its output: an operator Softmax
or Attention, or exponentials and a division by a sum of them. Calls of local functions are followed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import onnx

from rewriter.graph.extract import ancestors, reads
from rewriter.graph.view import GraphView, label, subgraphs
from rewriter.proof.claims import Claim
from rewriter.proof.unchanged.same import Functions, Models, OperatorKey, operator_key, same_node
from rewriter.text import one_line

_NAMED = 3
"""How many nodes a message names."""

_SOFTMAX = (("", "Softmax", ""), ("", "Attention", ""))


def not_attention(
    claim: Claim, old: GraphView, between: Sequence[onnx.NodeProto], models: Models, functions: Functions
) -> Iterator[str]:
    """What shows that a block was not converted, one line each.

    Args:
        claim: what is claimed of it.
        old: the original's graph that holds it.
        between: the nodes between its ends in the rewritten model.
        models: both models.
        functions: the local functions of the rewritten model.
    """
    region = [old.nodes[index] for index in sorted(ancestors(old, frozenset(claim.inputs), [claim.output]))]
    activation = {name: node for node in _way(region, claim.inputs, [claim.output])[0] for name in node.output if name}
    still = [
        one_line(label(node), 120)
        for node in between
        if (before := activation.get(next((name for name in node.output if name), ""))) is not None
        and same_node(before, node, models)
    ]
    if still:
        named = ", ".join(still[:_NAMED]) + (f" and {len(still) - _NAMED} more" if len(still) > _NAMED else "")
        yield f"{claim.name}: reported as converted, but the original's activation is still there: {named}"
    starts, end = (claim.block_inputs, claim.heads) if claim.heads else (claim.inputs, claim.output)
    if not _softmax(between, starts, [end], functions):
        yield f"{claim.name}: reported as converted, but there is no softmax between its ends"


def _softmax(
    nodes: Sequence[onnx.NodeProto],
    starts: Collection[str],
    ends: Collection[str],
    functions: Functions,
    calling: frozenset[OperatorKey] = frozenset(),
) -> bool:
    """Whether a softmax lies on a way from `starts` to `ends`; `calling` are the functions that these nodes are in."""
    way, reached = _way(nodes, starts, ends)
    return _normalised(way, ends) or any(_is_softmax(node, reached, functions, calling) for node in way)


def _is_softmax(
    node: onnx.NodeProto, reached: Collection[str], functions: Functions, calling: frozenset[OperatorKey]
) -> bool:
    """Whether a node is a softmax or holds one: in the function that it calls, or in its bodies."""
    key = operator_key(node)
    if key in functions:
        function = functions[key]
        starts = [formal for formal, given in zip(function.input, node.input, strict=False) if given in reached]
        return key not in calling and _softmax(function.node, starts, function.output, functions, calling | {key})
    # What reaches a body through inputs of its own, such as a loop's counter, is no way from `starts`.
    return key in _SOFTMAX or any(
        _softmax(graph.node, reached, [value.name for value in graph.output], functions, calling)
        for _, graph in subgraphs(node)
    )


def _normalised(way: Sequence[onnx.NodeProto], ends: Collection[str]) -> bool:
    """Whether something is divided by what exponentials amount to."""
    exponentials = [name for node in way if operator_key(node) == ("", "Exp", "") for name in node.output]
    _, sums = _way(way, exponentials, ends)
    return any(operator_key(node) == ("", "Div", "") and node.input[1] in sums for node in way)


def _way(
    nodes: Iterable[onnx.NodeProto], starts: Collection[str], ends: Collection[str]
) -> tuple[list[onnx.NodeProto], set[str]]:
    """The nodes on the ways from `starts` to `ends`, and all tensors that depend on `starts`."""
    reached = set(starts)
    below = []
    for node in nodes:
        if reached.intersection(reads(node)):
            below.append(node)
            reached.update(filter(None, node.output))
    wanted = set(ends)
    way = []
    for node in reversed(below):
        if wanted.intersection(node.output):
            way.append(node)
            wanted.update(reads(node))
    return way[::-1], reached
