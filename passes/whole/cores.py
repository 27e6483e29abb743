"""The attention of a network: each softmax over keys between a product of queries and keys and one with values.

    product ─► scales, a cap, masks and biases ─► Softmax ─► guards ─► product with values

Everything else between embedding and unembedding must be a converted block, linear, a norm, a gate or data movement:
`cores_of` names what is none of these.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass

import onnx

from rewriter.graph.elementwise import NONLINEAR
from rewriter.graph.extract import ancestors
from rewriter.graph.types import FLOATS
from rewriter.graph.view import GraphView, LostError, integer_of, integers_of
from rewriter.graph.walk import iter_nodes, reads, subgraphs

Step = tuple[int, int]
"""Index of a node, and which of its operands is the scores or the pattern."""

_SAME_SCORES = ("Cast", "Identity", "Dropout")
_SCORING = frozenset(
    (*_SAME_SCORES, "Add", "Sub", "Mul", "Div", "Where", "Max", "Tanh", "Reshape", "Unsqueeze", "Squeeze")
)
"""Operators between a product and its softmax."""
_GUARDING = frozenset((*_SAME_SCORES, "Where", "Mul", "Reshape"))
"""Operators between a softmax and the product with values."""
_SUBLAYER = re.compile(r".*Attention.*|.*CausalConv.*|Scan|Loop|LSTM|GRU|RNN")  # or hold some
_MIXING = ("CumSum", "ReduceSum", "ReduceMean", "ReduceMax", "TopK")  # where over tokens
_STAYS = "it would stay in a network of attention only"


@dataclass(frozen=True)
class Core:
    """The heads of one attention sublayer; steps are in graph order, indices those of nodes."""

    product: int
    before: tuple[Step, ...]
    softmax: int
    after: tuple[Step, ...]
    values: int


def data_of(view: GraphView) -> frozenset[str]:
    """The tensors that depend on the values of inputs, not on their shapes alone."""
    found = set(view.inputs)
    for node in view.nodes:
        if node.op_type not in ("Shape", "Size") and not found.isdisjoint(reads(node)):
            found.update(node.output)
    return frozenset(found)


def cores_of(view: GraphView, blocks: Container[int], ends: Sequence[str]) -> tuple[Core, ...]:
    """All attention of a main graph; `ends` are the results of its blocks, whose nodes are `blocks`.

    Raises LostError where something else than heads, linear operators, norms and gates would remain.
    """
    finder = _Finder(view)
    softmaxes = [index for index, node in enumerate(view.nodes) if node.op_type == "Softmax" and index not in blocks]
    cores = tuple(core for index in softmaxes if (core := finder.core(index)) is not None)
    taken = {index for core in cores for index in finder.nodes(core)}
    way = ancestors(view, frozenset(), [*ends, *(view.nodes[core.values].output[0] for core in cores)])
    behind = finder.behind(cores, ends)
    for index, node in enumerate(view.nodes):
        if index not in taken and index not in blocks and not finder.data.isdisjoint(node.output):
            finder.check(node, on_way=index in way, mixed=index in way and index in behind)
    return cores


class _Finder:
    def __init__(self, view: GraphView) -> None:
        self.view = view
        self.data = data_of(view)

    def nodes(self, core: Core) -> set[int]:
        return {core.product, core.softmax, core.values, *(index for index, _ in (*core.before, *core.after))}

    def core(self, softmax: int) -> Core | None:
        """The attention around a softmax; None if that weighs no values. Raises LostError."""
        node, rank = self.view.nodes[softmax], self.view.type_of(self.view.nodes[softmax].input[0]).rank
        after = self._after(node.output[0])
        if after is None:
            return None
        axis = integer_of(node, "axis", -1)
        if axis != -1 and (rank is None or axis != rank - 1):
            raise LostError.at(node, "its softmax is not over the last axis")
        steps, values = after
        product, before = self._before(node)
        return Core(product, before, softmax, steps, values)

    def _after(self, pattern: str) -> tuple[tuple[Step, ...], int] | None:
        steps = list[Step]()
        while True:
            readers = [
                (index, [*self.view.nodes[index].input].index(pattern))
                for index in dict.fromkeys(self.view.consumers.get(pattern, ()))
                if self.view.nodes[index].op_type in _GUARDING | {"MatMul"} and pattern in self.view.nodes[index].input
            ]
            products = [step for step in readers if self._is_product(self.view.nodes[step[0]]) and step[1] == 0]
            if len(products) == 1:
                return tuple(steps), products[0][0]
            readers = [step for step in readers if self.view.nodes[step[0]].op_type in _GUARDING]
            if len(readers) != 1:
                return None
            steps += readers
            pattern = self.view.nodes[readers[0][0]].output[0]

    def _before(self, softmax: onnx.NodeProto) -> tuple[int, tuple[Step, ...]]:
        scores, steps = softmax.input[0], list[Step]()
        while not self._is_product(node := self.view.made_by(scores)):
            ways = [place for place, name in enumerate(() if node is None else node.input) if self._leads(name)]
            if node is None or node.op_type not in _SCORING or not ways:
                at = softmax if node is None else node
                raise LostError.at(at, "its scores are not a product of queries and keys, scaled, masked or capped")
            steps.append((self.view.producer[scores], ways[0]))
            scores = node.input[ways[0]]
        return self.view.producer[scores], tuple(reversed(steps))

    def _leads(self, tensor: str) -> bool:
        """Whether scores come from a tensor."""
        return tensor in self.data and any(
            self._is_product(self.view.made_by(name)) for name in self.view.back(tensor, _SCORING)
        )

    def _is_product(self, node: onnx.NodeProto | None) -> bool:
        """Whether a node multiplies two tensors that depend on data."""
        return node is not None and node.op_type == "MatMul" and self.data.issuperset(node.input)

    def behind(self, cores: Sequence[Core], ends: Sequence[str]) -> set[int]:
        """The nodes that depend on a sublayer."""
        made = {*ends, *(self.view.nodes[core.values].output[0] for core in cores)}
        found = set[int]()
        for index, node in enumerate(self.view.nodes):
            if not made.isdisjoint(reads(node)):
                found.add(index)
                made.update(node.output)
        return found

    def check(self, node: onnx.NodeProto, *, on_way: bool, mixed: bool) -> None:
        """Raise LostError for a node that is data and belongs to no sublayer, if attention alone cannot have it."""
        kind, known = node.op_type, self.view.type_of(node.output[0])
        inner = {each.op_type for _, body in subgraphs(node) for each in iter_nodes(body.node)}
        if _SUBLAYER.fullmatch(kind) or "Softmax" in inner or any(map(_SUBLAYER.fullmatch, inner)):
            raise LostError.at(node, "no heads were found in this sublayer")
        if not on_way or (known.elem_type and known.elem_type not in FLOATS):
            return
        if kind in NONLINEAR - {"Exp"} | {"Min", "Max", "Softmax"}:
            raise LostError.at(node, _STAYS)
        if self._is_product(node):
            raise LostError.at(node, "it mixes tokens outside a softmax")
        sizes = integers_of(node, "kernel_shape")
        if mixed and "Conv" in kind and (sizes is None or max(sizes) > 1):
            raise LostError.at(node, "it mixes tokens by a convolution")
