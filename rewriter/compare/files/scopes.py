"""Pair a graph of A with its counterpart in B, and resolve which names refer to the same tensor.

A graph is a main graph or a control-flow body, together with the graphs around it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import onnx

from rewriter.compare.files.nodes import Nodes
from rewriter.compare.files.tensors import compare_tensors, digest, fingerprint
from rewriter.files.load import LoadedModel
from rewriter.graph.view import ONNX_DOMAINS, subgraphs

SameInput = Callable[[str, str], bool]
"""Whether a name in A and a name in B refer to the same tensor."""


@dataclass(frozen=True, eq=False)
class Side:
    """One graph, with the graphs around it.

    Attributes:
        model: the model that contains it.
        proto: the graph.
        graph: its nodes, prepared for matching, without Constant nodes.
        weights: its initializers and the values of its Constant nodes, by name; of a sparse one the values and, under a
            name that nothing reads, the indices.
        prints: the fingerprints of the weights.
        outer: the enclosing graph.
    """

    model: LoadedModel
    proto: onnx.GraphProto
    graph: Nodes
    weights: Mapping[str, onnx.TensorProto]
    prints: Mapping[str, bytes]
    outer: Side | None = None

    @classmethod
    def of(
        cls,
        model: LoadedModel,
        proto: onnx.GraphProto,
        outer: Side | None = None,
        alias: Mapping[str, str] | None = None,
    ) -> Side:
        """Index a graph; `alias` maps tensors of enclosing graphs to their names in the other model."""
        weights = {tensor.name: tensor for tensor in proto.initializer}
        nodes = []
        for node in proto.node:
            value = _constant(node)
            if value is None:
                nodes.append(node)
            else:
                weights[node.output[0]] = value
        prints = {name: fingerprint(model, tensor) for name, tensor in weights.items()}
        for sparse in proto.sparse_initializer:
            name, parts = sparse.values.name, (sparse.values, sparse.indices)
            weights |= zip((name, f"{name} (indices)"), parts, strict=True)
            prints |= zip((name, f"{name} (indices)"), _sparse_prints(model, sparse), strict=True)
        graph = Nodes(
            model=model,
            nodes=nodes,
            weights=prints if outer is None else {**outer.graph.weights, **prints},
            inputs={value.name: value.name if outer is None else str(i) for i, value in enumerate(proto.input)},
            outputs=[(value.name, value.name if outer is None else str(i)) for i, value in enumerate(proto.output)],
            outer=alias or {},
        )
        return cls(model, proto, graph, weights, prints, outer)

    def weight(self, name: str, depth: int = 0) -> tuple[int, onnx.TensorProto] | None:
        """The weight that a name refers to here, and how many graphs further out it is; None for other tensors."""
        if name in self.weights:
            return depth, self.weights[name]
        return None if self.outer is None or name in self.graph.inputs else self.outer.weight(name, depth + 1)


@dataclass(frozen=True, eq=False)
class Scope:
    """A graph of A and its counterpart in B; `name` is empty for the main graph."""

    name: str
    left: Side
    right: Side

    def same_input(self, alias: Mapping[str, str]) -> SameInput:
        """The test for names of this scope; `alias` maps tensors of A to their counterparts in B."""
        made = frozenset(alias.values())

        @cache
        def same(ours: str, theirs: str) -> bool:
            if ours in alias:
                return alias[ours] == theirs
            one, other = self.left.weight(ours), self.right.weight(theirs)
            if one is None or other is None:
                # Neither is a weight: an input or an outer tensor. `made` excludes a name that B gave to the
                # counterpart of another tensor of A.
                return ours == theirs and one is other and theirs not in made
            if ours == theirs and one[0] == other[0]:
                return True  # weights of the same name are compared where they are defined
            # Fingerprints first: comparing whole weights is expensive.
            if self.left.graph.weights[ours] != self.right.graph.weights[theirs]:
                return False
            return compare_tensors(ours, (self.left.model, one[1]), (self.right.model, other[1])) is None

        return same

    def bodies(self, one: onnx.NodeProto, other: onnx.NodeProto, alias: Mapping[str, str]) -> Iterator[Scope]:
        """Pairs of control-flow bodies that two nodes hold under the same attribute."""
        ours, theirs = dict(subgraphs(one)), dict(subgraphs(other))
        for attribute in sorted(ours.keys() & theirs.keys()):
            where = "/".join(part for part in (self.name, one.name or one.op_type, attribute) if part)
            left = Side.of(self.left.model, ours[attribute], self.left, alias)
            yield Scope(where, left, Side.of(self.right.model, theirs[attribute], self.right))


def _constant(node: onnx.NodeProto) -> onnx.TensorProto | None:
    """The value of a Constant node that holds a tensor; None for any other node."""
    if node.op_type != "Constant" or node.domain not in ONNX_DOMAINS or len(node.attribute) != 1:
        return None
    (stated,) = node.attribute
    return stated.t if stated.name == "value" else None


def _sparse_prints(model: LoadedModel, sparse: onnx.SparseTensorProto) -> tuple[bytes, bytes]:
    """Fingerprints of a sparse tensor as a whole, standing for its values, and of its indices alone."""
    indices = digest(model, sparse.indices)
    whole = (digest(model, sparse.values), indices, str(list(sparse.dims)).encode())
    return hashlib.blake2b(b"".join(whole), digest_size=16).digest(), indices
