"""Whatever no block claims must be as it was.

Comes in: both models and the claims. Goes out: failures, where a node or a weight outside the replaced regions is not
the original's. Needed beside the measurements: the pass rule allows what the rewritten model differs by in exact
arithmetic, because certified errors amount to something there, and a weight that was changed elsewhere would hide in
that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import onnx

from rewriter.files.load import LoadedModel, read_tensor
from rewriter.graph.extract import ancestors, cut, reads
from rewriter.graph.view import GraphView, Path, label, subgraphs
from rewriter.proof.claims import Claim, Side
from rewriter.proof.messages import one_line


def unexplained_changes(original: Side, rewritten: Side, claims: Sequence[Claim]) -> list[str]:
    """What differs outside the regions of the claims, one line each.

    Args:
        original: the original, in the form that the claims name tensors of.
        rewritten: the rewritten model.
        claims: all that was replaced.
    """
    found = list(_functions(original.model.proto, rewritten.model.proto))
    known = {_holders(original, path): view for path, view in original.views.items()}
    explained: set[Place] = set()
    for path, new in rewritten.views.items():
        place = _holders(rewritten, path)
        old = known.get(place)
        if old is None:
            if (*place[:-1], (place[-1][0], "")) not in explained:
                found.append("the rewritten model has a body of control flow that the original has not")
            explained.update((*place, (output, "")) for node in new.nodes for output in node.output)
            continue
        replaced = {
            index for claim in claims if claim.path == path for index in _made_by(claim, new, frozenset(old.producer))
        }
        explained.update((*place, (output, "")) for index in replaced for output in new.nodes[index].output)
        rest = [node for index, node in enumerate(new.nodes) if index not in replaced]
        found += [*_nodes(old, rest), *_weights((original.model, old), (rewritten.model, new), rest)]
    return list(dict.fromkeys(found))


Place = tuple[tuple[str, str], ...]
"""Where a body is: the first output of each node that holds it, and the attribute. Numbers shift when nodes come in."""


def _holders(side: Side, path: Path) -> Place:
    place: list[tuple[str, str]] = []
    for depth, (number, attribute) in enumerate(path):
        holders = [node for node in side.views[path[:depth]].nodes if next(subgraphs(node), None) is not None]
        place.append((holders[number].output[0], attribute))
    return tuple(place)


def _made_by(claim: Claim, view: GraphView, known: frozenset[str]) -> set[int]:
    """The nodes that a claim explains: between its ends, and what else was made for them alone.

    A node made anew has outputs of new names. One that is in the original under its name is explained only by lying
    between the ends.
    """
    if not claim.heads:
        return set(cut(view, claim.inputs, [claim.output]).nodes)
    ends = (*claim.block_outputs, *claim.shapes)
    above = ancestors(view, frozenset(claim.block_inputs), ends)
    new = {index for index in above if not any(name in known for name in view.nodes[index].output)}
    return new | set(cut(view, claim.block_inputs, ends).nodes)


def _nodes(old: GraphView, rest: Sequence[onnx.NodeProto]) -> Iterator[str]:
    for node in rest:
        before = old.made_by(next((name for name in node.output if name), ""))
        if before is None or not _same(before, node):
            yield f"{one_line(label(node), 120)} is not as in the original, and no block explains it"


def _same(old: onnx.NodeProto, new: onnx.NodeProto) -> bool:
    """Equal but for names and remarks; bodies of control flow are graphs of their own."""
    return (
        (old.op_type, old.domain) == (new.op_type, new.domain)
        and list(old.input) == list(new.input)
        and list(old.output) == list(new.output)
        and _attributes(old) == _attributes(new)
    )


def _attributes(node: onnx.NodeProto) -> dict[str, bytes]:
    graphs = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)
    plain = {item.name: item for item in node.attribute if item.type not in graphs}
    return {name: item.SerializeToString(deterministic=True) for name, item in plain.items()}


def _weights(
    old: tuple[LoadedModel, GraphView], new: tuple[LoadedModel, GraphView], rest: Sequence[onnx.NodeProto]
) -> Iterator[str]:
    names = dict.fromkeys((*(name for node in rest for name in reads(node)), *new[1].outputs))
    for name in names:
        after, before = new[1].initializers.get(name), old[1].initializers.get(name)
        if after is None or before is None:
            if (after is None) is not (before is None) and name not in old[1].producer:
                yield f"weight '{one_line(name, 120)}' is in one of the models only"
        elif not _same_values((old[0], before), (new[0], after)):
            yield f"weight '{one_line(name, 120)}' is not the original's"


def _same_values(old: tuple[LoadedModel, onnx.TensorProto], new: tuple[LoadedModel, onnx.TensorProto]) -> bool:
    """Bit for bit. References to the same bytes of one file are not read."""
    (source, before), (target, after) = old, new
    if list(before.dims) != list(after.dims) or before.data_type != after.data_type:
        return False
    if before == after and (before.data_location != onnx.TensorProto.EXTERNAL or source.base_dir == target.base_dir):
        return True
    if before.data_type == onnx.TensorProto.STRING:
        return list(before.string_data) == list(after.string_data)
    left, right = (np.ascontiguousarray(read_tensor(*each)) for each in (old, new))
    return left.tobytes() == right.tobytes()


def _functions(old: onnx.ModelProto, new: onnx.ModelProto) -> Iterator[str]:
    known = {(function.domain, function.name): function for function in old.functions}
    for function in new.functions:
        before = known.get((function.domain, function.name))
        if before is not None and before != function:
            yield f"function '{one_line(function.name, 120)}' is not the original's"
