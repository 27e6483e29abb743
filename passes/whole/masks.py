"""The masks of a network's own heads: what stands between the product of queries and keys and the softmax.

A mask is static if it depends on the positions of query and key alone: causal, sliding window, blocks. It is found by
value: the graph's own nodes compute it at several lengths, from the shapes that the walk along the route knows. What
depends on data, such as padding, is told apart by trying data.
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

from passes.match.linear import Miss
from passes.sizes import BATCH, TOKENS, ShapeReader, Size
from rewriter.graph.constants import Constants, computed
from rewriter.graph.extract import ancestors, reads
from rewriter.graph.view import GraphView, label

_TRANSPARENT = ("Cast", "Identity", "Dropout")
_LENGTHS = (1, 2, 3, 7)
_TRIALS = 8
_LEAST = 1000.0
"""A mask lowers a score by at least as much, so that exp of it is 0 whatever the other scores are."""
_RANKS = (3, 4)

Fill = Callable[[Sequence[int]], NDArray[Any]]
"""Makes data of a shape."""


@dataclass(frozen=True)
class Mask:
    """A mask added to scores, or put in their place.

    Attributes:
        allowed: boolean [T, T], whether a query (row) may attend to a key (column), by their positions.
        data: the tensor that is added, if it depends on data as well; otherwise empty.
        low: what it adds to a forbidden score, where it depends on data.
        rank: number of axes of that tensor.
    """

    allowed: NDArray[np.bool_]
    data: str = ""
    low: float = 0.0
    rank: int = 0


@dataclass(frozen=True)
class Scores:
    """The way from a product of queries and keys to a softmax.

    Attributes:
        product: index of the MatMul.
        scales: indices of the nodes that multiply or divide the scores by one number.
        masks: node index to the mask that it applies.
    """

    product: int
    scales: tuple[int, ...]
    masks: tuple[tuple[int, Mask], ...]


class MaskReader:
    """Reads the scores of softmaxes on a route.

    Args:
        view: the graph.
        constants: its constants.
        shapes: the shapes that the walk along the route found, carried tensors included.
        longest: T, the largest number of positions.
        static_tokens: the number of tokens where the model fixes it.
    """

    def __init__(
        self, view: GraphView, constants: Constants, shapes: ShapeReader, longest: int, static_tokens: int | None
    ) -> None:
        self._view = view
        self._constants = constants
        self._shapes = shapes
        self._longest = longest
        self._static = static_tokens
        self._masks: dict[tuple[str, bool], Mask | Miss] = {}

    def scores(self, softmax: onnx.NodeProto) -> Scores | Miss:
        """What stands in front of a softmax, back to the product of queries and keys."""
        carried = self._shapes.carried
        tensor, scales, masks = softmax.input[0], list[int](), list[tuple[int, Mask]]()
        while True:
            index = self._view.producer[tensor]
            node = self._view.nodes[index]
            if self._elsewhere(tensor):
                return Miss(f"{label(node)}: its scores are also read outside of its head", label(node))
            ours = [name for name in node.input if name in carried]
            if node.op_type == "MatMul" and len(ours) == 2:
                return self._product(index, node, scales, masks)
            if len(ours) != 1:
                return self._unknown(node)
            others = [name for name in node.input if name and name not in carried]
            if node.op_type in ("Mul", "Div") and self._scale(node, ours[0], others):
                scales.append(index)
            elif node.op_type in ("Add", "Where"):
                mask = self._mask(node, ours[0])
                if isinstance(mask, Miss):
                    return mask
                if mask.data and scales:
                    return Miss(f"{label(node)}: its mask is data, and what comes behind it is scaled", label(node))
                masks.append((index, mask))
            elif node.op_type not in _TRANSPARENT:
                return self._unknown(node)
            tensor = ours[0]

    def _elsewhere(self, tensor: str) -> bool:
        readers = [self._view.nodes[index].op_type for index in self._view.consumers.get(tensor, ())]
        return tensor in self._view.outputs or sum(reader != "Shape" for reader in readers) != 1

    def _unknown(self, node: onnx.NodeProto) -> Miss:
        return Miss(f"{label(node)}: it changes the scores in a way that W_QK cannot hold", label(node))

    def _product(
        self, index: int, node: onnx.NodeProto, scales: list[int], masks: list[tuple[int, Mask]]
    ) -> Scores | Miss:
        left, right = (self._shapes.carried[name] for name in node.input)
        fits = len(left) == len(right) and len(left) in _RANKS and left[-2] == right[-1] == TOKENS
        # The positions' columns are joined to queries and keys by batch, so the batch must be an axis of its own.
        if not fits or not all(sizes[0] in (BATCH, Size(1), None) for sizes in (left, right)):
            return Miss(f"{label(node)}: its queries and keys are not [batch, heads, tokens, d_head]", label(node))
        if sum(bool(mask.data) for _, mask in masks) > 1:
            return Miss(f"{label(node)}: more than one mask that is data is added to its scores", label(node))
        return Scores(index, tuple(reversed(scales)), tuple(masks))

    def _scale(self, node: onnx.NodeProto, scores: str, others: list[str]) -> bool:
        if len(others) != 1 or (node.op_type == "Div" and node.input[0] != scores):
            return False
        value = self._constants.scalar(others[0])
        sizes = self._shapes.sizes_of(others[0])
        return value is None or value > 0.0 if sizes is not None and all(size == Size(1) for size in sizes) else False

    # -- masks -----------------------------------------------------------------------------------------------

    def _mask(self, node: onnx.NodeProto, scores: str) -> Mask | Miss:
        chosen = node.op_type == "Where"
        if chosen and (node.input[1] != scores or node.input[2] not in self._constants):
            return self._unknown(node)
        tensor = node.input[0] if chosen else next(name for name in node.input if name != scores)
        key = tensor, chosen
        if key not in self._masks:
            self._masks[key] = self._read(node, tensor, chosen=chosen)
        found = self._masks[key]
        return Miss(found.reason, label(node)) if isinstance(found, Miss) else found

    def _read(self, node: onnx.NodeProto, tensor: str, *, chosen: bool) -> Mask | Miss:
        """The mask that a node adds, or by which it chooses; a Miss where its values are not those of a mask."""
        inputs = self._data_of(tensor)
        if inputs and chosen:
            return Miss(f"{label(node)}: it selects scores by data", label(node))
        lengths = (self._static,) if self._static is not None else tuple({*_LENGTHS, self._longest})
        found: dict[int, NDArray[np.bool_]] = {}
        low, rank = 0.0, 0
        # With data of ones nothing is padding, so what is forbidden then is forbidden by position.
        for length in lengths:
            values = self._values(tensor, length, np.ones)
            read = None if values is None else _forbidden(values, length, chosen=chosen)
            if read is None:
                what = "its values are not those of a mask: 0 and one large negative number, the same for all heads"
                return Miss(f"{label(node)}: {what}", label(node))
            found[length], each = read
            low, rank = min(low, each), 0 if values is None else values.ndim
        longest = max(found)
        forbidden = found[longest]
        if any((forbidden[:length, :length] != each).any() for length, each in found.items()):
            return Miss(f"{label(node)}: which keys its mask forbids depends on the length", label(node))
        if (forbidden.all(axis=1)).any():
            return Miss(f"{label(node)}: its mask forbids all keys of a token", label(node))
        if not inputs:
            return Mask(_padded(~forbidden, self._longest))
        tried = self._tried(tensor, forbidden)
        if tried is None:
            return Miss(f"{label(node)}: data can allow what its mask forbids by position", label(node))
        low = min(low, tried)
        if not np.isfinite(low):
            return Miss(f"{label(node)}: its mask is data and minus infinity, without a finite number", label(node))
        return Mask(_padded(~forbidden, self._longest), tensor, low, rank)

    def _tried(self, tensor: str, forbidden: NDArray[np.bool_]) -> float | None:
        """What the mask adds to forbidden scores for any data; None if data can allow what positions forbid."""
        rng = np.random.default_rng(0)
        length = self._static or max(_LENGTHS)
        low = 0.0
        for _ in range(_TRIALS):
            values = self._values(tensor, length, lambda shape: rng.integers(0, 2, shape))
            if values is None:
                return None
            square = np.broadcast_to(values, (*values.shape[:-2], length, length))
            present = np.unique(square[square != 0.0])
            if (square[..., forbidden[:length, :length]] == 0.0).any() or len(present) > 1:
                return None
            low = min(low, float(present.min(initial=0.0)))
        return low if low <= -_LEAST else None

    def _data_of(self, tensor: str) -> list[str]:
        """The graph inputs whose values, not only shapes, a tensor depends on."""
        above = ancestors(self._view, self._shape_outputs, [tensor])
        read = {name for index in above for name in reads(self._view.nodes[index])} | {tensor}
        return sorted(name for name in read if name in self._view.inputs)

    @cached_property
    def _shape_outputs(self) -> frozenset[str]:
        return frozenset(name for node in self._view.nodes if node.op_type == "Shape" for name in node.output)

    @cached_property
    def _known_shapes(self) -> dict[str, list[Size]]:
        """The outputs of Shape nodes whose elements are known in terms of batch and tokens."""
        read = {name: self._shapes.elements(name) or [None] for name in self._shape_outputs}
        return {
            name: [each for each in elements if isinstance(each, Size)]
            for name, elements in read.items()
            if all(isinstance(each, Size) for each in elements)
        }

    def _values(self, tensor: str, length: int, fill: Fill) -> NDArray[np.generic] | None:
        """The tensor for two sequences of a length, computed by the graph's own nodes; None where that fails."""
        view, stops = self._view, self._known_shapes
        above = sorted(ancestors(view, frozenset(stops), [tensor]))
        needed = {name for index in above for name in reads(view.nodes[index])} | {tensor}
        feeds: dict[str, NDArray[np.generic]] = {}
        for name in sorted(needed):
            if name in stops:
                feeds[name] = np.asarray([_at(each, length) for each in stops[name]], np.int64)
            elif name in view.inputs:
                sizes = self._shapes.sizes_of(name)
                if sizes is None or None in sizes:
                    return None
                dtype = helper.tensor_dtype_to_np_dtype(view.type_of(name).elem_type)
                shape = [_at(size, length) for size in sizes if size is not None]
                feeds[name] = fill(shape).astype(dtype)
        kept = [view.initializers[name] for name in sorted(needed) if name in view.initializers]
        if any(each.data_location == onnx.TensorProto.EXTERNAL for each in kept):
            return None
        try:
            (value,) = computed([view.nodes[index] for index in above], feeds, [tensor], view.opsets, kept)
        except Exception:  # noqa: BLE001 - whatever it cannot evaluate is refused by the caller
            return None
        return np.asarray(value)


_BATCH = 2


def _at(size: Size, length: int) -> int:
    return int(size.number * _BATCH**size.batch * length**size.tokens)


def _forbidden(values: NDArray[np.generic], length: int, *, chosen: bool) -> tuple[NDArray[np.bool_], float] | None:
    """Boolean [length, length] and what is added to forbidden scores; None where the values are not those of a mask."""
    if values.ndim < 2 or any(size not in (1, length) for size in values.shape[-2:]):
        return None
    square = np.broadcast_to(values, (*values.shape[:-2], length, length)).reshape(-1, length, length)
    if not np.array_equal(square, np.broadcast_to(square[:1], square.shape)):
        return None
    first = square[0]
    if chosen:
        return ~first.astype(np.bool_), 0.0
    low = np.unique(first[first != 0])
    if len(low) > 1 or (low > -_LEAST).any():
        return None
    return np.asarray(first != 0), float(low.min(initial=0.0))


def _padded(allowed: NDArray[np.bool_], longest: int) -> NDArray[np.bool_]:
    """The square for T positions; a model with fixed lengths never uses the rest."""
    wide = np.eye(longest, dtype=np.bool_)
    wide[: len(allowed), : len(allowed)] = allowed[:longest, :longest]
    return wide
