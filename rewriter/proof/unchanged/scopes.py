"""Compare one graph, or the body of one local function, with its counterpart in the original.

Every node outside the replaced blocks must be the original's, and every name that is read must have the same definition
in both. Control-flow bodies are scopes of their own; `inner` pairs them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest

import onnx

from rewriter.graph.extract import reads
from rewriter.graph.view import Path, holder_name, label, subgraphs
from rewriter.proof.unchanged.definitions import Scope
from rewriter.proof.unchanged.same import Models, OperatorKey, operator_key, same_node, same_tensors
from rewriter.text import one_line


@dataclass(frozen=True, eq=False)
class Pair:
    """A scope of the original and its counterpart.

    Attributes:
        old: the original's.
        new: the rewritten model's.
        path: the path of the graph in either model, as in `GraphView`; None in functions. It is one path, because
            partners, which hold the bodies, have the same outputs.
    """

    old: Scope
    new: Scope
    path: Path | None = None

    @property
    def models(self) -> Models:
        """The models that the two scopes belong to."""
        return self.old.model, self.new.model


def name_of(text: str) -> str:
    """A name from a model, quoted for a message."""
    return f"'{one_line(text, 120)}'"


def partners(pair: Pair) -> dict[int, int]:
    """Maps the index of each unchanged node of the rewritten model to its index in the original."""
    # By the first output: names of tensors are unique in a graph, names of nodes need not be.
    found = {}
    for index, node in enumerate(pair.new.nodes):
        before = pair.old.makers.get(next((name for name in node.output if name), ""))
        if before is not None and same_node(pair.old.nodes[before], node, pair.models):
            found[index] = before
    return found


def scope_changes(
    pair: Pair,
    explained: Collection[int],
    same: Mapping[int, int],
    added: Collection[OperatorKey],
    exposed: Collection[str] = (),
) -> Iterator[str]:
    """Differences between two scopes, one line each.

    Args:
        pair: the scope in both models.
        explained: indices of the rewritten model's nodes that belong to a replaced block.
        same: the result of `partners`.
        added: operators that only the rewritten model defines by local functions. No other node may call them: a
            function could take the place of a custom operator that the original leaves to the runtime.
        exposed: outputs that the rewritten model may have besides the original's, all made by nodes in `explained`.
    """
    where = f" (in {one_line(pair.new.where, 120)})" if pair.new.where else ""
    for index, node in enumerate(pair.new.nodes):
        if index in explained or not any(node.output):
            continue
        if index not in same:
            yield f"{one_line(label(node), 120)} differs from the original, and no replaced block explains it{where}"
        elif operator_key(node) in added:
            yield f"{one_line(label(node), 120)} calls a local function that the original does not have{where}"
    found = (
        *_declared("input", pair),
        *_declared("output", pair, exposed),
        *_names(pair, explained),
        *_annotations(pair),
    )
    yield from (text + where for text in found)


def inner(pair: Pair, same: Mapping[int, int]) -> Iterator[Pair]:
    """Pairs of control-flow bodies that unchanged nodes contain."""
    for index, before in same.items():
        node, other = pair.new.nodes[index], pair.old.nodes[before]
        bodies = _bodies(other)
        for name, graph in _bodies(node).items():
            where = "/".join(part for part in (pair.new.where, node.name or node.op_type, name) if part)
            old = Scope.of_graph(pair.old.model, bodies[name], where, pair.old)
            new = Scope.of_graph(pair.new.model, graph, where, pair.new)
            yield Pair(old, new, None if pair.path is None else (*pair.path, (holder_name(node), name)))


def _bodies(node: onnx.NodeProto) -> dict[str, onnx.GraphProto]:
    return dict(subgraphs(node)) if node.attribute else {}


def _declared(what: str, pair: Pair, exposed: Collection[str] = ()) -> Iterator[str]:
    """Inputs or outputs: names, order and types; outputs in `exposed` may follow those of the original."""
    sides = (pair.old.inputs, pair.new.inputs) if what == "input" else (pair.old.outputs, pair.new.outputs)
    for number, (old, new) in enumerate(zip_longest(*sides)):
        if old is None and new is not None and what == "output" and new.name in exposed:
            continue
        if old is None or new is None:
            yield f"{what} {name_of((old or new).name)} is in one of the models only"
        elif old.name != new.name:
            yield f"{what} {number} is {name_of(new.name)}, but {name_of(old.name)} in the original"
        elif old.type.SerializeToString(deterministic=True) != new.type.SerializeToString(deterministic=True):
            yield f"{what} {name_of(new.name)} is not declared with the original's type and shape"


def _names(pair: Pair, explained: Collection[int]) -> Iterator[str]:
    """Names whose definition differs from the original's, and new weights that no replaced block reads."""
    read = dict.fromkeys(name for node in pair.new.nodes for name in reads(node))
    read.update(dict.fromkeys(value.name for value in (*pair.new.inputs, *pair.new.outputs)))
    for name in read:
        old, new = pair.old.find(name), pair.new.find(name)
        # A name that the original lacks is either read by a changed node, which is reported, or inside a block. A name
        # from an enclosing graph is compared there, unless this graph shadows it or it moved to another one.
        if old is None or (old.depth and (new is None or new.depth == old.depth)):
            continue
        if new is None or old.kind != new.kind:
            yield f"{name_of(name)} is {'missing' if new is None else new.kind}, but {old.kind} in the original"
        elif old.depth != new.depth:
            yield f"{name_of(name)} is defined in another graph than in the original"
        elif old.dims != new.dims or not same_tensors(old.tensors, new.tensors, pair.models):
            yield f"weight {name_of(name)} is not the original's"
    by_blocks = {name for index in explained for name in reads(pair.new.nodes[index])}
    for name in pair.new.weights:
        if name not in by_blocks and pair.old.find(name) is None:
            yield f"weight {name_of(name)} is in the rewritten model only"


def _annotations(pair: Pair) -> Iterator[str]:
    for tensor, *_ in sorted(pair.old.annotations ^ pair.new.annotations):
        yield f"the quantisation annotation of {name_of(tensor)} is not the original's"
