"""Theorems 3, 6 and 9 on a network: what form `whole` does at each node of the route of the bias tokens.

The residual stream is one tensor [batch, N + R, D + 1 + R + T]: behind the model's D columns it has one that is 1 on
tokens, then one-hot positions, of the R bias tokens first and of T tokens after them. It starts at the entry of the
route; residual additions add to it, and a normalisation that the next sublayers skip to (post-norm) renews its first D
columns. All other operators read these D columns.

The rows of bias tokens have zeros there throughout, so that heads may read them like any other row: every operator on
the route maps a row of zeros to zeros. Biases do not, so they ride on the column that is 1 on tokens. `whole_for`
follows this operator by operator, and refuses what would break it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from passes.conversion import Conversion
from passes.forms.sublayer import LARGEST_PATTERN, default_omega
from passes.match.linear import Miss
from passes.options import DEFAULT_MAX_TOKENS
from passes.programs.groups import groups_of
from passes.sizes import TOKENS, ShapeReader, Size, Sizes
from passes.whole.masks import MaskReader, Scores
from passes.whole.route import Route, find_route, symbols_of
from rewriter.graph.constants import Constants
from rewriter.graph.extract import cut
from rewriter.graph.view import GraphView, label

_ROWS_ONLY = ("Reshape", "Identity", "Cast", "Dropout")
_KEEP_ZEROS = frozenset(
    [
        *("MatMul", "Gemm", "Transpose", "Reshape", "Expand", "Squeeze", "Unsqueeze", "Split", "Slice", "Gather"),
        *("Identity", "Cast", "Dropout", "Neg", "Abs", "Sqrt", "Pow", "Div", "LayerNormalization", "Sin"),
        *("RMSNormalization", "ReduceMean", "ReduceSum", "ReduceSumSquare", "ReduceL2"),
    ]
)
"""Operators whose output is 0 in a row where their first operand is 0."""
_NO_HEADS = frozenset(
    [
        *("Relu", "LeakyRelu", "PRelu", "Elu", "Selu", "Celu", "Clip", "Gelu", "Erf", "Tanh", "Sigmoid", "HardSigmoid"),
        *("HardSwish", "Swish", "Mish", "Softplus", "Where", "Min", "Max", "Softmax"),
    ]
)
"""Operators that form `whole` leaves nowhere but in a block that becomes heads, or as the softmax of a head."""
_SCORES = 2.0**60
"""Omega is at least so much, that it outweighs any score of the network's own heads."""
_MOST_AXES = 3
_PAIR = 2
_BATCHES = 3


@dataclass(frozen=True)
class Whole:
    """Form `whole` on a route.

    Attributes:
        route: the route.
        bias_tokens: R, the bias tokens of all programs, and one more to rest on if their values are not all 0.
        max_tokens: T.
        omega: what forbidden pairs are lowered by.
        sums: index of a residual addition to (the stream, what a sublayer writes).
        renewed: tensors that replace the model's columns of the stream, to the tensor that it was before.
        stream: every carried tensor to the one that was the stream when it was computed.
        biases: index of a node to the operand that is a bias.
        scores: index of a product of queries and keys to its way to the softmax.
        neurons: the numbers of bias tokens that heads of neurons attend to.
    """

    route: Route
    bias_tokens: int
    max_tokens: int
    omega: float
    sums: Mapping[int, tuple[str, str]]
    renewed: Mapping[str, str]
    stream: Mapping[str, str]
    biases: Mapping[int, int]
    scores: Mapping[int, Scores]
    neurons: tuple[int, ...]

    @property
    def data(self) -> tuple[str, ...]:
        """The masks that are data."""
        return tuple(dict.fromkeys(m.data for each in self.scores.values() for _, m in each.masks if m.data))


def unfit(conversion: Conversion) -> Miss | None:
    """Why a block cannot read the network's bias tokens; None where it can."""
    block, projections = conversion.block, conversion.projections
    if block.path:
        return Miss("it is in a subgraph of control flow, which the network's bias token does not enter", block.output)
    if projections is None or max(projections.rank, projections.result_rank) > _MOST_AXES:
        return Miss("its input has more axes than batch, tokens and channels; use form masked", block.output)
    return None


def whole_for(view: GraphView, conversions: Sequence[Conversion], longest: int | None) -> Whole | Miss:
    """What form `whole` does on the route of the bias tokens, or what it cannot do and what to use instead.

    `longest` is the largest number of tokens; None: the number that the model fixes, or the largest whose patterns stay
    within the limit.
    """
    found = _whole(view, conversions, longest)
    if isinstance(found, Miss):
        return Miss(f"the network cannot be attention only: {found.reason}; use form masked", found.node)
    return found


def _whole(view: GraphView, conversions: Sequence[Conversion], longest: int | None) -> Whole | Miss:
    route = find_route(view, [conversion.block for conversion in conversions])
    if isinstance(route, Miss):
        return route
    read = [name for conversion in conversions for name in conversion.inputs]
    other = next((name for name in read if route.sizes[name][-1] not in (None, Size(route.width))), None)
    if other is not None:
        return Miss(f"a block reads '{other}', which has other channels than the stream's {route.width}", other)
    if route.elem_type not in (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE):
        return Miss("its residual stream is not in float32 or float64, whose numbers can hold omega", route.entry)
    groups = tuple(group for conversion in conversions for group in groups_of(conversion.program))
    omega = max(default_omega(groups, route.elem_type), _SCORES)
    fixed = (view.type_of(route.entry).shape or (None, None))[1]
    fitting = min(_fitting(each) for each in conversions)
    longest = longest or (fixed if isinstance(fixed, int) else min(fitting, DEFAULT_MAX_TOKENS))
    found = _Follower(view, route, conversions, longest).run()
    if isinstance(found, Miss):
        return found
    values = any(token.value for group in groups for token in group.head.bias_tokens)
    return Whole(
        route,
        max([1, *(group.bias_tokens for group in groups)]) + values,
        longest,
        omega,
        found.sums,
        found.renewed,
        found.stream,
        found.biases,
        found.scores,
        tuple(sorted({group.bias_tokens for group in groups})),
    )


def _fitting(conversion: Conversion) -> int:
    """The largest number of tokens for which the patterns of all heads stay within `LARGEST_PATTERN`."""
    one = (conversion.block.neurons or 1) * np.dtype(conversion.dtype).itemsize
    return max(1, int((LARGEST_PATTERN / one) ** 0.5) - 1 - conversion.program.bias_tokens)


def left_over(block: str) -> str:
    """Why a network cannot be whole if one of its blocks is not converted."""
    return f"the network cannot be attention only: '{block}' is left; use form masked"


def notes_of(whole: Whole) -> tuple[str, ...]:
    """What the report says about the route, and about masks that stay."""
    return (
        f"the bias tokens are appended to '{whole.route.entry}' and carried through the network; blocks are proved one "
        "by one with bias tokens of their own, the file end to end",
        *(
            f"the mask '{mask}' depends on data and stays, without the pairs that W_QK forbids by position"
            for mask in whole.data
        ),
    )


class _Follower:
    """Follows the route; `stream`, `_zero` and `_above` grow with it."""

    def __init__(self, view: GraphView, route: Route, conversions: Sequence[Conversion], longest: int) -> None:
        self._view = view
        self._route = route
        self._constants = Constants(view)
        self._shapes = ShapeReader(view, self._constants, symbols_of(view, route.entry))
        self._shapes.carried = dict(route.sizes)
        shape = view.type_of(route.entry).shape or ()
        static = shape[1] if isinstance(shape[1], int) else None
        self._masks = MaskReader(view, self._constants, self._shapes, longest, static)
        self._blocks = frozenset(index for each in conversions for index in cut(view, each.inputs, each.outputs).nodes)
        self._results = frozenset(name for each in conversions for name in each.outputs)
        self.sums: dict[int, tuple[str, str]] = {}
        self.renewed: dict[str, str] = {}
        self.stream: dict[str, str] = {route.entry: route.entry}
        self.biases: dict[int, int] = {}
        self.scores: dict[int, Scores] = {}
        self._zero = {route.entry}
        self._streams = {route.entry}
        self._roots = {route.entry: route.entry}
        # The carried tensors above each carried tensor, as a bit set.
        self._bit = {name: 1 << number for number, name in enumerate(route.sizes)}
        self._above = {route.entry: self._bit[route.entry]}
        self._order = {route.entry: 0}

    def run(self) -> _Follower | Miss:
        attention = self._read_scores()
        if isinstance(attention, Miss):
            return attention
        for index in sorted(self._route.steps):
            step, node = self._route.steps[index], self._view.nodes[index]
            if not step.outputs:
                continue
            carried = [name for name in node.input if name in self._route.sizes]
            self._inherit(node, carried)
            if index in self._blocks:
                self._zero.update(self._results.intersection(node.output))
                continue
            miss = self._step(index, node, carried, attention)
            if miss is not None:
                return miss
        return self

    def _read_scores(self) -> frozenset[int] | Miss:
        """The nodes from products of queries and keys to their softmaxes."""
        found: set[int] = set()
        for index, step in self._route.steps.items():
            if not step.softmax:
                continue
            scores = self._masks.scores(self._view.nodes[index])
            if isinstance(scores, Miss):
                return scores
            self.scores[scores.product] = scores
            found.update((index, scores.product, *scores.scales, *(place for place, _ in scores.masks)))
        return frozenset(found)

    def _inherit(self, node: onnx.NodeProto, carried: Sequence[str]) -> None:
        """The outputs of a node come after the latest stream of its operands."""
        latest = max((self.stream[name] for name in carried), key=self._order.__getitem__)
        above = 0
        for name in carried:
            above |= self._above[name]
        root = self._roots[carried[0]] if node.op_type in _ROWS_ONLY else ""
        for name in node.output:
            if name in self._route.sizes:
                self.stream[name] = latest
                self._above[name] = above | self._bit[name]
                same = root and self._route.sizes[name][-1] == self._route.sizes[root][-1]
                self._roots[name] = root if same else name

    def _step(self, index: int, node: onnx.NodeProto, carried: Sequence[str], attention: frozenset[int]) -> Miss | None:
        if index in attention:
            return None
        if node.op_type in _NO_HEADS:
            return Miss(f"{label(node)}: it would stay in a network of attention only", label(node))
        pair = self._residual(node, carried)
        if pair is not None:
            return self._add(index, node, *pair)
        miss = self._bias(index, node, carried)
        if miss is None and self._keeps_zeros(index, node):
            self._zero.update(node.output)
        return miss

    # -- the stream ------------------------------------------------------------------------------------------

    def _residual(self, node: onnx.NodeProto, carried: Sequence[str]) -> tuple[str, str] | None:
        """(the stream, what a sublayer writes) for an Add of something and what is computed from it."""
        if node.op_type != "Add" or len(carried) != _PAIR or not self._is_rows(node.output[0]):
            return None
        for skip, written in (carried, carried[::-1]):
            if self._above[written] & self._bit[self._roots[skip]] and written != skip:
                return skip, written
        return None

    def _is_rows(self, tensor: str) -> bool:
        """Whether a tensor is [batch, tokens, D], or the same with one axis for batch and tokens."""
        return _rows_of(self._route.sizes[tensor]) == Size(self._route.width)

    def _add(self, index: int, node: onnx.NodeProto, skip: str, written: str) -> Miss | None:
        root = self._roots[skip]
        for name in (skip, written):
            if name not in self._zero:
                return Miss(f"{label(node)}: '{name}' is not 0 in the rows of bias tokens", label(node))
        if root not in self._streams:
            # What is skipped to is not the stream, but a normalisation of it.
            self.renewed[root] = self.stream[root]
            self._streams.add(root)
            self._order[root] = len(self._order)
        self.sums[index] = (root, written)
        out = str(node.output[0])
        self._streams.add(out)
        self._order[out] = len(self._order)
        self.stream[out] = out
        self._zero.add(out)
        return None

    # -- rows of zeros ---------------------------------------------------------------------------------------

    def _bias(self, index: int, node: onnx.NodeProto, carried: Sequence[str]) -> Miss | None:
        """Note a bias; a Miss where it cannot ride on the stream's column of ones."""
        place = _bias_operand(node, carried)
        if place is None:
            return None
        name, sizes = node.input[place], self._route.sizes[carried[0]]
        shape = self._constants.shape(name) if name in self._constants else None
        if shape is None:
            return Miss(f"{label(node)}: it adds '{name}', which is not part of the stream, to rows of it", label(node))
        if all(size == 1 for size in shape):
            return None
        width = _rows_of(self._route.sizes[str(node.output[0])])
        if width != Size(shape[-1]) or any(size != 1 for size in shape[:-1]) or len(shape) > len(sizes):
            return Miss(f"{label(node)}: its bias is not one number for each column of the stream", label(node))
        self.biases[index] = place
        return None

    def _keeps_zeros(self, index: int, node: onnx.NodeProto) -> bool:
        zero = [name in self._zero for name in node.input]
        if node.op_type in ("Add", "Sub"):
            carried = [name for name in node.input if name in self._route.sizes]
            return all(name in self._zero for name in carried) and (len(carried) == _PAIR or index in self.biases)
        if node.op_type == "Mul":
            return any(zero)
        if node.op_type == "Concat":
            return all(zero)
        if node.op_type == "MatMul" and node.input[1] in self._route.sizes:
            return zero[1]  # a bias token attends to bias tokens only, so it mixes rows of zeros
        if index not in self.biases and _bias_operand(node, ()) is not None:
            return False  # one number for all columns
        return node.op_type in _KEEP_ZEROS and zero[0]


def _rows_of(sizes: Sizes) -> Size | None:
    """The width of a tensor [batch, tokens, width] or [batch tokens, width]; None for other tensors."""
    if len(sizes) == _BATCHES and sizes[1] == TOKENS:
        return sizes[2]
    first = sizes[0]
    return sizes[1] if len(sizes) == _PAIR and first is not None and first.tokens == 1 else None


def _bias_operand(node: onnx.NodeProto, carried: Iterable[str]) -> int | None:
    """The operand that is added to rows, if it is not carried itself."""
    ours = set(carried)
    if node.op_type in ("Gemm", "LayerNormalization"):
        place = _PAIR
        return place if len(node.input) > place and node.input[place] else None
    if node.op_type in ("Add", "Sub"):
        return next((place for place, name in enumerate(node.input) if name not in ours), None)
    return None
