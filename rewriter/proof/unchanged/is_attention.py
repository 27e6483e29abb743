"""Check that a block that is reported as converted was replaced, and that attention replaced it.

Between the ends of the block in the rewritten model, none of the original's activation nodes may be left, and a softmax
must lie on a path from the block's inputs to its output: an operator Softmax or Attention, or exponentials and a
division by their sum. Calls of local functions are followed.
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
"""Maximum number of nodes that a message names."""

_SOFTMAX = (("", "Softmax", ""), ("", "Attention", ""))


def not_attention(
    claim: Claim, old: GraphView, between: Sequence[onnx.NodeProto], models: Models, functions: Functions
) -> Iterator[str]:
    """Evidence that a block was not converted, one line each.

    Args:
        claim: the claim about the block.
        old: the original's graph that contains it.
        between: the nodes between its ends in the rewritten model.
        models: both models.
        functions: the local functions of the rewritten model.
    """
    # Constants of the region (a scale, an epsilon) may be shared with the heads; only nodes that compute the activation
    # from its inputs must be gone. Names identify them, since the rewrite keeps the names of what it does not replace.
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
    # In a block that was replaced as a whole, the region's ends are gone: the heads' own output is the end.
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
    """Whether a softmax lies on a path from `starts` to `ends`; `calling` are the functions that contain `nodes`."""
    way, reached = _way(nodes, starts, ends)
    return _normalised(way, ends) or any(_is_softmax(node, reached, functions, calling) for node in way)


def _is_softmax(
    node: onnx.NodeProto, reached: Collection[str], functions: Functions, calling: frozenset[OperatorKey]
) -> bool:
    """Whether a node is a softmax or contains one, in the function that it calls or in its bodies."""
    key = operator_key(node)
    if key in functions:
        function = functions[key]
        # Only the formal inputs that the block's inputs reach: a softmax over constants inside the function does not
        # count. A recursive function, which a hostile model may have, is entered once.
        starts = [formal for formal, given in zip(function.input, node.input, strict=False) if given in reached]
        return key not in calling and _softmax(function.node, starts, function.output, functions, calling | {key})
    # Only captured tensors are followed into a body. What enters through the body's own inputs, such as a loop counter,
    # does not count as a path from `starts`.
    return key in _SOFTMAX or any(
        _softmax(graph.node, reached, [value.name for value in graph.output], functions, calling)
        for _, graph in subgraphs(node)
    )


def _normalised(way: Sequence[onnx.NodeProto], ends: Collection[str]) -> bool:
    """Whether something is divided by a value computed from exponentials, as in a softmax spelled out in operators."""
    exponentials = [name for node in way if operator_key(node) == ("", "Exp", "") for name in node.output]
    _, sums = _way(way, exponentials, ends)
    return any(operator_key(node) == ("", "Div", "") and node.input[1] in sums for node in way)


def _way(
    nodes: Iterable[onnx.NodeProto], starts: Collection[str], ends: Collection[str]
) -> tuple[list[onnx.NodeProto], set[str]]:
    """The nodes on paths from `starts` to `ends`, and all tensors that depend on `starts`."""
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
