"""The attention of a network: each softmax over keys between a product of queries and keys and one with values.

    product ─► scales, a cap, masks and biases ─► Softmax ─► guards ─► product with values

Everything else between embedding and unembedding must be a converted block, linear, a norm, a gate or data movement:
`cores_of` names what is none of these.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import onnx

from rewriter.graph.elementwise import NONLINEAR
from rewriter.graph.extract import ancestors
from rewriter.graph.types import FLOATS
from rewriter.graph.view import GraphView, LostError, integer_of, integers_of
from rewriter.graph.walk import iter_nodes, reads, subgraphs

Step = tuple[int, int]
"""Index of a node, and which of its operands is the scores or the pattern."""

SAME_SCORES = frozenset(("Cast", "Identity", "Dropout"))
LAYOUT = frozenset(("Reshape", "Unsqueeze", "Squeeze"))
_SCORING = SAME_SCORES | LAYOUT | {"Add", "Sub", "Mul", "Div", "Where", "Max", "Tanh"}
_GUARDING = SAME_SCORES | {"Where", "Mul", "Reshape"}
"""Operators between a softmax and the product with values."""
_SUBLAYER = re.compile(r".*Attention.*|.*CausalConv.*|Scan|Loop|LSTM|GRU|RNN")  # or hold some
_NO_HEADS = NONLINEAR - {"Exp"} | {"Min", "Max", "Softmax"}


@dataclass(frozen=True)
class Core:
    """The heads of one attention sublayer; steps are in graph order, indices those of nodes."""

    product: int
    before: tuple[Step, ...]
    softmax: int
    after: tuple[Step, ...]
    values: int

    @property
    def nodes(self) -> set[int]:
        return {self.product, self.softmax, self.values, *(index for index, _ in (*self.before, *self.after))}


def data_of(view: GraphView) -> frozenset[str]:
    """The tensors that depend on the values of inputs, not on their shapes alone."""
    found = set(view.inputs)
    for node in view.nodes:
        if node.op_type not in ("Shape", "Size") and not found.isdisjoint(reads(node)):
            found.update(node.output)
    return frozenset(found)


def cores_of(
    view: GraphView, blocks: Container[int], ends: Sequence[str], tokens: Callable[[str], set[int]]
) -> tuple[Core, ...]:
    """All attention of a main graph; `ends` are the results of its blocks, whose nodes are `blocks`.

    `tokens` gives the axes of a tensor, from the end, whose lengths depend on the inputs. Raises LostError where
    something else than heads, linear operators, norms and gates would remain.
    """
    finder = _Finder(view)
    softmaxes = [index for index, node in enumerate(view.nodes) if node.op_type == "Softmax" and index not in blocks]
    cores = tuple(core for index in softmaxes if (core := finder.core(index)) is not None)
    ends = [*ends, *(view.nodes[core.values].output[0] for core in cores)]
    way, made, taken = ancestors(view, frozenset(), ends), set(ends), set[int]().union(*(core.nodes for core in cores))
    for index, node in enumerate(view.nodes):
        behind = not made.isdisjoint(reads(node))  # a sublayer
        made.update(node.output if behind else ())
        if index not in taken and index not in blocks and not finder.data.isdisjoint(node.output):
            finder.check(node, tokens, on_way=index in way, behind=behind)
    return cores


class _Finder:
    def __init__(self, view: GraphView) -> None:
        self.view = view
        self.data = data_of(view)

    def core(self, softmax: int) -> Core | None:
        """The attention around a softmax; None if that weighs no values. Raises LostError."""
        node, rank = self.view.nodes[softmax], self.view.type_of(self.view.nodes[softmax].input[0]).rank
        after = self._after(node.output[0])
        if after is None:
            return None
        if integer_of(node, "axis", -1) not in (-1, (rank or 0) - 1):
            raise LostError.at(node, "it is not over the last axis")
        product, before = self._before(node)
        return Core(product, before, softmax, *after)

    def _after(self, pattern: str) -> tuple[tuple[Step, ...], int] | None:
        steps = list[Step]()
        while True:
            found = [
                (index, [*self.view.nodes[index].input].index(pattern))
                for index in dict.fromkeys(self.view.consumers.get(pattern, ()))
                if pattern in self.view.nodes[index].input
            ]
            products = [index for index, place in found if not place and self._is_product(self.view.nodes[index])]
            if len(products) == 1:
                return tuple(steps), products[0]
            found = [step for step in found if self.view.nodes[step[0]].op_type in _GUARDING]
            if len(found) != 1:
                return None
            steps += found
            pattern = self.view.nodes[found[0][0]].output[0]

    def _before(self, softmax: onnx.NodeProto) -> tuple[int, tuple[Step, ...]]:
        scores, steps = softmax.input[0], list[Step]()
        while not self._is_product(node := self.view.made_by(scores)):
            ways = [place for place, name in enumerate(() if node is None else node.input) if self._leads(name)]
            if node is None or node.op_type not in _SCORING or not ways:
                reason = "its scores are not a product of queries and keys, scaled, masked or capped"
                raise LostError.at(softmax if node is None else node, reason)
            steps.append((self.view.producer[scores], ways[0]))
            scores = node.input[ways[0]]
        return self.view.producer[scores], tuple(reversed(steps))

    def _leads(self, tensor: str) -> bool:
        """Whether scores come from a tensor."""
        return any(self._is_product(self.view.made_by(name)) for name in self.view.back(tensor, _SCORING))

    def _is_product(self, node: onnx.NodeProto | None) -> bool:
        """Whether a node multiplies two tensors that depend on data."""
        return node is not None and node.op_type == "MatMul" and self.data.issuperset(node.input)

    def check(self, node: onnx.NodeProto, tokens: Callable[[str], set[int]], *, on_way: bool, behind: bool) -> None:
        """Raise LostError for what a network of attention only cannot have: `on_way` to a sublayer, `behind` one."""
        kind, known = node.op_type, self.view.type_of(node.output[0]).elem_type
        inner = [each.op_type for _, body in subgraphs(node) for each in iter_nodes(body.node)]
        if "Softmax" in inner or any(_SUBLAYER.fullmatch(each) for each in (kind, *inner)):
            raise LostError.at(node, "no heads were found in this sublayer")
        if not on_way or (known and known not in FLOATS):
            return
        reduced = "Reduce" in kind and len(tokens(node.input[0])) > len(tokens(node.output[0]))
        convolved = "Conv" in kind and max(integers_of(node, "kernel_shape") or [2]) > 1
        multiplied = kind in ("MatMul", "Gemm") and (self._is_product(node) or -1 in tokens(node.input[0]))
        if multiplied or (behind and (reduced or convolved or kind == "CumSum")):
            raise LostError.at(node, "it mixes tokens outside a softmax")
        if behind and kind in _NO_HEADS:
            raise LostError.at(node, "it would stay in a network of attention only")
