"""The masks of a network's own heads: the nodes between the product of queries and keys and the softmax.

A mask is static if it depends on the positions of query and key alone: causal, sliding window, blocks. It is found by
value: the graph's own nodes compute it at several lengths, from the shapes that the walk along the route knows. What
depends on data, such as padding, is distinguished by trying data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from passes.sizes import BATCH, TOKENS, Shapes, factors
from rewriter.graph.constants import Constants, computed
from rewriter.graph.extract import ancestors
from rewriter.graph.view import GraphView, LostError
from rewriter.graph.walk import reads

_KEEP_SCORES = ("Cast", "Identity", "Dropout")
_LENGTHS = (1, 2, 3, 7)
_DATA_TRIALS = 8
_MIN_PENALTY = 1000.0  # exp of a score lowered by as much is 0 beside any other
_SCORE_RANKS = (3, 4)
_UNKNOWN = "it changes the scores in a way that W_QK cannot hold"
Fill = Callable[[Sequence[int]], NDArray[Any]]  # creates data of a shape


@dataclass(frozen=True)
class Mask:
    """A mask added to scores, or put in their place."""

    allowed: NDArray[np.bool_]  # [T, T], whether a query (row) may attend to a key (column), by their positions
    data: str = ""  # the added tensor, if it depends on data; otherwise empty
    low: float = 0.0  # what that adds to a forbidden score
    rank: int = 0


@dataclass(frozen=True)
class Scores:
    """The nodes between a product of queries and keys and a softmax, all by index."""

    product: int
    scales: tuple[int, ...]
    masks: tuple[Mask, ...]
    nodes: tuple[int, ...]


class MaskReader:
    """The masks of softmaxes on the path of the stream.

    The known `shapes` are those of carried tensors, `longest` is T, and `fixed` the number of tokens where the model
    fixes it.
    """

    def __init__(self, view: GraphView, constants: Constants, shapes: Shapes, longest: int, fixed: int | None) -> None:
        self._view = view
        self._constants = constants
        self._shapes = shapes
        self._longest = longest
        self._fixed = fixed
        self._masks: dict[tuple[str, bool], Mask] = {}

    def scores(self, softmax: onnx.NodeProto) -> Scores:
        """The nodes before a softmax, back to the product. Raises LostError if W_QK cannot hold them."""
        carried = self._shapes.known
        tensor, nodes, scales, masks = softmax.input[0], list[int](), list[int](), list[Mask]()
        while True:
            index = self._view.producer[tensor]
            node = self._view.nodes[index]
            nodes.append(index)
            readers = [self._view.nodes[reader].op_type for reader in self._view.consumers.get(tensor, ())]
            if tensor in self._view.outputs or sum(reader != "Shape" for reader in readers) != 1:
                raise LostError.at(node, "its scores are also read outside of its head")
            ours = [name for name in node.input if name in carried]
            if node.op_type == "MatMul" and len(ours) == 2:
                self._check_product(node, masks)
                return Scores(index, tuple(reversed(scales)), tuple(masks), tuple(nodes))
            others = [name for name in node.input if name and name not in carried]
            if len(ours) == 1 and node.op_type in ("Mul", "Div") and self._scale(node, ours[0], others):
                scales.append(index)
            elif len(ours) == 1 and node.op_type in ("Add", "Where"):
                mask = self._mask(node, ours[0])
                if mask.data and scales:
                    raise LostError.at(node, "its mask is data, and what comes behind it is scaled")
                masks.append(mask)
            elif len(ours) != 1 or node.op_type not in _KEEP_SCORES:
                raise LostError.at(node, _UNKNOWN)
            tensor = ours[0]

    def _check_product(self, node: onnx.NodeProto, masks: list[Mask]) -> None:
        left, right = (self._shapes.known[name] for name in node.input)
        fits = len(left) == len(right) and len(left) in _SCORE_RANKS and left[-2] == right[-1] == TOKENS
        # The positions' columns are joined to queries and keys by batch, so the batch must be a separate axis.
        if not fits or not all(sizes[0] in (BATCH, 1) and None not in sizes for sizes in (left, right)):
            raise LostError.at(node, "its queries and keys are not [batch, heads, tokens, d_head]")
        if sum(bool(mask.data) for mask in masks) > 1:
            raise LostError.at(node, "more than one mask that is data is added to its scores")

    def _scale(self, node: onnx.NodeProto, scores: str, others: list[str]) -> bool:
        if len(others) != 1 or (node.op_type == "Div" and node.input[0] != scores):
            return False
        value, sizes = self._constants.scalar(others[0]), self._shapes.of(others[0])
        return (value is None or value > 0.0) and sizes is not None and all(size == 1 for size in sizes)

    def _mask(self, node: onnx.NodeProto, scores: str) -> Mask:
        chosen = node.op_type == "Where"
        if chosen and (node.input[1] != scores or node.input[2] not in self._constants):
            raise LostError.at(node, _UNKNOWN)
        tensor = node.input[0] if chosen else next(name for name in node.input if name != scores)
        if (tensor, chosen) not in self._masks:
            self._masks[tensor, chosen] = self._read(node, tensor, chosen=chosen)
        return self._masks[tensor, chosen]

    def _read(self, node: onnx.NodeProto, tensor: str, *, chosen: bool) -> Mask:
        inputs = self._data_of(tensor)
        if inputs and chosen:
            raise LostError.at(node, "it selects scores by data")
        found: dict[int, NDArray[np.bool_]] = {}
        low, rank = 0.0, 0
        # With data of ones all tokens are valid, so every forbidden pair is forbidden by position.
        for length in sorted({*_LENGTHS, self._longest} if self._fixed is None else {self._fixed}):
            values = self._values(tensor, length, np.ones)
            read = None if values is None else _forbidden(values, length, chosen=chosen)
            if read is None:
                what = "its values are not those of a mask: 0 and one large negative number, the same for all heads"
                raise LostError.at(node, what)
            found[length], each = read
            low, rank = min(low, each), 0 if values is None else values.ndim
        forbidden = found[max(found)]
        if any((forbidden[:length, :length] != each).any() for length, each in found.items()):
            raise LostError.at(node, "which keys its mask forbids depends on the length")
        if (forbidden.all(axis=1)).any():
            raise LostError.at(node, "its mask forbids all keys of a token")
        # The square for T positions; a model with a fixed length never uses the rest.
        allowed = np.eye(self._longest, dtype=np.bool_)
        allowed[: len(forbidden), : len(forbidden)] = ~forbidden[: self._longest, : self._longest]
        if not inputs:
            return Mask(allowed)
        tried = self._added_for_any_data(tensor, forbidden)
        if tried is None:
            raise LostError.at(node, "data can allow what its mask forbids by position")
        low = min(low, tried)
        if not np.isfinite(low):
            raise LostError.at(node, "its mask is data and minus infinity, without a finite number")
        return Mask(allowed, tensor, low, rank)

    def _added_for_any_data(self, tensor: str, forbidden: NDArray[np.bool_]) -> float | None:
        """The mask's penalty for any data; None if data can allow pairs that positions forbid."""
        rng = np.random.default_rng(0)
        length = self._fixed or max(_LENGTHS)
        low = 0.0
        for _ in range(_DATA_TRIALS):
            values = self._values(tensor, length, lambda shape: rng.integers(0, 2, shape))
            if values is None:
                return None
            square = np.broadcast_to(values, (*values.shape[:-2], length, length))
            present = np.unique(square[square != 0.0])
            if (square[..., forbidden[:length, :length]] == 0.0).any() or len(present) > 1:
                return None
            low = min(low, float(present.min(initial=0.0)))
        return low if low <= -_MIN_PENALTY else None

    def _data_of(self, tensor: str) -> list[str]:
        """The graph inputs on whose values, not only shapes, a tensor depends."""
        above = ancestors(self._view, self._shape_outputs, [tensor])
        read = {name for index in above for name in reads(self._view.nodes[index])} | {tensor}
        return sorted(name for name in read if name in self._view.inputs)

    @cached_property
    def _shape_outputs(self) -> frozenset[str]:
        return frozenset(name for node in self._view.nodes if node.op_type == "Shape" for name in node.output)

    @cached_property
    def _known_shapes(self) -> dict[str, list[int]]:
        read = {name: self._shapes.numbers(name) for name in self._shape_outputs}
        return {name: numbers for name, numbers in read.items() if numbers is not None}

    def _values(self, tensor: str, length: int, fill: Fill) -> NDArray[np.generic] | None:
        """The tensor for two sequences of a length, computed by the graph's nodes; None where that fails."""
        view, stops = self._view, self._known_shapes
        above = sorted(ancestors(view, frozenset(stops), [tensor]))
        needed = {name for index in above for name in reads(view.nodes[index])} | {tensor}
        feeds: dict[str, NDArray[np.generic]] = {}
        for name in sorted(needed):
            if name in stops:
                feeds[name] = np.asarray([_size_at(each, length) for each in stops[name]], np.int64)
            elif name in view.inputs:
                sizes = self._shapes.of(name)
                if sizes is None or None in sizes:
                    return None
                dtype = helper.tensor_dtype_to_np_dtype(view.type_of(name).elem_type)
                feeds[name] = fill([_size_at(size, length) for size in sizes if size is not None]).astype(dtype)
        kept = [view.initializers[name] for name in sorted(needed) if name in view.initializers]
        if any(each.data_location == onnx.TensorProto.EXTERNAL for each in kept):
            return None
        try:
            (value,) = computed([view.nodes[index] for index in above], feeds, [tensor], view.opsets, kept)
        except Exception:  # noqa: BLE001 - the caller refuses what cannot be evaluated
            return None
        return np.asarray(value)


def _size_at(size: int, length: int) -> int:
    """A placeholder size for two sequences of a length."""
    number, batch, tokens = factors(size)
    return int(number * 2**batch * length**tokens)


def _forbidden(values: NDArray[np.generic], length: int, *, chosen: bool) -> tuple[NDArray[np.bool_], float] | None:
    """Boolean [length, length] and the penalty of forbidden scores; None if it is not a mask."""
    if values.ndim < 2 or any(size not in (1, length) for size in values.shape[-2:]):
        return None
    square = np.broadcast_to(values, (*values.shape[:-2], length, length)).reshape(-1, length, length)
    if not np.array_equal(square, np.broadcast_to(square[:1], square.shape)):
        return None
    first = square[0]
    if chosen:
        return ~first.astype(np.bool_), 0.0
    low = np.unique(first[first != 0])
    if len(low) > 1 or (low > -_MIN_PENALTY).any():
        return None
    return np.asarray(first != 0), float(low.min(initial=0.0))
