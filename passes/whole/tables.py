"""What is added to the scores of a head: by position alone, which W_QK can hold, or by data.

The graph's own nodes compute it at several lengths, from shapes alone. What is the same number for the same two
positions at each of them is an entry of a table. What is data stays an addition; pairs that it forbids for any data,
by their positions, are entries of the table too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import floor, log2, prod

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from passes.sizes import Shapes, shapes_at
from passes.whole.cores import LAYOUT, SAME_SCORES, Core, Step, data_of
from rewriter.graph.constants import Constants, Read, computed
from rewriter.graph.extract import ancestors
from rewriter.graph.types import FLOATS, TensorType
from rewriter.graph.view import GraphView, LostError
from rewriter.graph.walk import reads

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Fill = Callable[[Sequence[int]], NDArray[np.generic]]  # creates data of a shape

OMEGA = 2.0**60
"""No finite mask lowers a score by more, and bias tokens are lower still."""
_LENGTHS, _CACHED, _BATCH = (1, 2, 3, 7), (3, 4), 2
_DATA_TRIALS = 8
_MAX_READ = 2**24  # elements of the weights from which a table is computed
_MIN_PENALTY = 1000.0  # exp of a score lowered by as much is 0 beside any other
_UNKNOWN = "it changes the scores in a way that W_QK cannot hold"


@dataclass(frozen=True)
class Term:
    """What a node adds to scores, or with `other` puts in their place where a condition is not `kept`."""

    tensor: str
    negative: bool = False
    other: str = ""
    kept: bool = True


@dataclass(frozen=True)
class Data:
    """A term that depends on data."""

    term: Term
    rank: int
    wide: bool = True  # whether it has a column for each key
    low: float = 0.0  # what it adds to a forbidden score
    allowed: Mask | None = None  # [T, T], without what positions forbid
    scales: tuple[int, ...] = ()  # nodes that scale it later

    @property
    def share(self) -> float:
        """A power of two by which it is multiplied, so that bias tokens can weigh less."""
        return min(1.0, 2.0 ** floor(60.0 - log2(-self.low))) if -np.inf < self.low < 0.0 else 1.0


@dataclass(frozen=True)
class Scores:
    """The scores of a core: q k^T, scaled, perhaps capped, plus a table by position, plus data."""

    table: Array  # [heads or 1, T, T] of query and key
    data: tuple[Data, ...] = ()
    scales: tuple[int, ...] = ()  # nodes that scale queries
    layout: tuple[int, ...] = ()  # nodes that split or insert axes before the last two
    cap: tuple[Step, ...] = ()  # steps up to a tanh of the product, and behind it

    @property
    def by_position(self) -> bool:
        return bool(self.table.any()) or any(each.allowed is not None for each in self.data)

    @property
    def bias(self) -> float:
        """The score of bias tokens: above pairs forbidden by -infinity, of which NaN comes, and below all others."""
        infinite = self.table.min() < -OMEGA or any(each.low == -np.inf for each in self.data)
        return -OMEGA if infinite else -4.0 * OMEGA


class Reader:
    """Reads the scores of cores in networks of up to `longest` tokens; `read` reads initializers."""

    def __init__(self, model: onnx.ModelProto, view: GraphView, read: Read, longest: int) -> None:
        self.model, self.view, self.read, self.longest = model, view, read, longest
        self.data = data_of(view)
        self.constants = Constants(view, read)
        self.shapes = cache(self._shapes)
        self._known = dict[tuple[Term, object], Array | Data]()
        self._stops = {name for node in view.nodes if node.op_type in ("Shape", "Size") for name in node.output}

    # -- the steps between product and softmax

    def scores(self, core: Core) -> Scores:
        """The scores of a core. Raises LostError if W_QK cannot hold them."""
        product, found = self.view.nodes[core.product], Scores(np.zeros((1, self.longest, self.longest)))
        self._squares_fit(product)
        caps = [place for place, (index, _) in enumerate(core.before) if self.view.nodes[index].op_type == "Tanh"]
        end = caps[-1] + 1 if caps else 0
        while caps and end < len(core.before) and self._scale(core, end):
            end += 1
        found = replace(found, cap=core.before[:end])
        for number, (index, place) in enumerate(core.before[end:], start=end):
            node = self.view.nodes[index]
            others = [name for at, name in enumerate(node.input) if at != place and name]
            if node.op_type in ("Mul", "Div") and self._scale(core, number) and not caps:
                factor = self.constants.scalar(others[0])
                if found.table.any() and factor is None:
                    raise LostError.at(node, "it scales what is added by position by data")
                factor = 1.0 if factor is None else 1.0 / factor if node.op_type == "Div" else factor
                data = tuple(replace(each, scales=(*each.scales, index)) for each in found.data)
                found = replace(found, scales=(*found.scales, index), table=found.table * factor, data=data)
            elif node.op_type in ("Add", "Sub", "Where"):
                found = self._added(found, product, node, place)
            elif node.op_type in LAYOUT and not (found.table.any() or found.data or caps):
                found = replace(found, layout=(*found.layout, index))
            elif node.op_type == "Max" and self._is_low(others):
                continue
            elif node.op_type not in SAME_SCORES:
                raise LostError.at(node, _UNKNOWN)
        return found

    def _scale(self, core: Core, number: int) -> bool:
        """Whether a step multiplies the scores of each head by one number."""
        index, place = core.before[number]
        node = self.view.nodes[index]
        sizes = self.sizes(node.input[1 - place]) if node.op_type in ("Mul", "Div") else None
        return sizes is not None and not (node.op_type == "Div" and place) and all(size == 1 for size in sizes[-2:])

    def _is_low(self, names: Sequence[str]) -> bool:
        values = [self.constants.scalar(name) for name in names]
        return all(value is not None and value < -(10.0**9) for value in values)

    def _squares_fit(self, product: onnx.NodeProto) -> None:
        sides = [self.sizes(name) for name in product.input]
        if any(sizes is None or None in sizes or len(sizes) < 3 for sizes in sides):
            raise LostError.at(product, "the shape of its queries or keys is not known")
        count = max(size or 0 for size in (sides[0] or ())[-2:-1] + (sides[1] or ())[-1:])
        if not self.tokens(product.output[0]) and count > self.longest:
            raise LostError.at(product, f"it has {count} tokens; raise --max-tokens from {self.longest} to {count}")

    def tokens(self, tensor: str) -> set[int]:
        """The axes, from the end, whose lengths depend on the inputs."""
        pairs = zip(*(self.shapes(length, 0).of(tensor) or () for length in _LENGTHS[-2:]), strict=False)
        sizes = [one != other for one, other in pairs]
        return {axis - len(sizes) for axis, varies in enumerate(sizes) if varies}

    def _added(self, found: Scores, product: onnx.NodeProto, node: onnx.NodeProto, place: int) -> Scores:
        if node.op_type == "Where":
            terms = [Term(node.input[0], other=node.input[3 - place], kept=place == 1)]
        else:
            terms = [*self._parts(node.input[1 - place], negative=node.op_type == "Sub")]
        for term in terms:
            key = term, self.sizes(product.output[0])
            if key not in self._known:
                static = self.data.isdisjoint((term.tensor, term.other))
                self._known[key] = self._table(term, product, node) if static else self._data(term, product)
            read = self._known[key]
            if isinstance(read, Data):
                found = replace(found, data=(*found.data, read))
                if read.allowed is None:
                    continue
                number = -4.0 * OMEGA if read.low == -np.inf else read.low * read.share
                read = np.where(read.allowed, 0.0, number)[None]
            found = replace(found, table=np.maximum(found.table + read, -4.0 * OMEGA))
        return found

    def _parts(self, tensor: str, *, negative: bool) -> Iterator[Term]:
        """The terms of a sum of a table and data."""
        node = self.view.made_by(tensor)
        mixed = node is not None and node.op_type == "Add" and len(self.data.intersection(node.input)) == 1
        for name in node.input if mixed and node is not None else (tensor,):
            yield Term(name, negative)

    # -- their values

    def _table(self, term: Term, product: onnx.NodeProto, node: onnx.NodeProto) -> Array:
        table = np.full((1, self.longest, self.longest), np.nan)
        for square, offset in self._squares(term, product, np.ones):
            if square is None:
                raise LostError.at(node, "what it adds to the scores cannot be computed by position alone")
            if np.isnan(square).any() or (square == np.inf).any():
                raise LostError.at(node, "what it adds to the scores is not finite")
            if len(square) > len(table):
                table = np.repeat(table, len(square), axis=0)
            part = table[:, offset : offset + square.shape[1], : square.shape[2]]
            if ((part != square) & ~np.isnan(part)).any():
                raise LostError.at(node, "what it adds to the scores depends on the length")
            part[:] = square
        table = np.where(np.isnan(table), 0.0, table)
        return np.where(table == -np.inf, -4.0 * OMEGA, np.maximum(table, -OMEGA))

    def _data(self, term: Term, product: onnx.NodeProto) -> Data:
        shape = self.sizes(term.tensor) or ()
        shape = np.broadcast_shapes(shape, self.sizes(term.other) or ()) if term.other else shape
        found, keys = Data(term, len(shape), shape[-1:] != (1,)), self.longest
        forbidden, low = np.zeros((keys, keys), np.bool_), set[float]()
        rng = np.random.default_rng(0)
        # With data of ones all tokens are valid, so every forbidden pair is forbidden by position.
        for square, offset in self._squares(term, product, np.ones):
            if square is None or len(square) > 1:
                return found
            low.update(np.unique(square[square != 0.0]))
            part = forbidden[offset : offset + square.shape[1], : square.shape[2]]
            if (part & (square[0] == 0.0)).any():
                return found  # which pairs depends on the length
            part |= square[0] != 0.0
        for _ in range(_DATA_TRIALS):
            square = self._square(term, product, (_LENGTHS[-1], 0), lambda shape: rng.integers(0, 2, shape), whole=True)
            if square is None:
                return found
            low.update(np.unique(square[square != 0.0]))
            if (square[:, forbidden[: square.shape[1], : square.shape[2]]] == 0.0).any():
                return found
        if len(low) != 1 or not min(low) <= -_MIN_PENALTY:
            return found
        return replace(found, low=float(min(low)), allowed=~forbidden if forbidden.any() else None)

    def _squares(self, term: Term, product: onnx.NodeProto, fill: Fill) -> Iterator[tuple[Array | None, int]]:
        """[heads or 1, queries, keys] at several lengths, and the first query's position; None if not computable."""
        longest = self.longest if self.tokens(product.output[0]) else _LENGTHS[-1]
        for case in [*((length, 0) for length in sorted({*_LENGTHS, longest})), *([_CACHED] if self.caches else [])]:
            sizes = self.shapes(*case).of(product.output[0])
            square = self._square(term, product, case, fill)
            if square is None and case == _CACHED:
                continue  # its sizes are not the sums that the names of dimensions say
            yield square, 0 if sizes is None else max(0, (sizes[-1] or 0) - (sizes[-2] or 0))

    def _square(
        self, term: Term, product: onnx.NodeProto, case: tuple[int, int], fill: Fill, *, whole: bool = False
    ) -> Array | None:
        sizes = self.shapes(*case).of(product.output[0])
        values = [self._value(name, case, fill) for name in (term.tensor, term.other) if name]
        if sizes is None or None in sizes or any(value is None for value in values):
            return None
        if 0 in sizes:  # keys of an encoder that are in a cache
            return np.zeros((1, *(size or 0 for size in sizes[-2:])))
        first, *other = (np.asarray(value) for value in values)
        made = np.where(first.astype(np.bool_) == term.kept, 0.0, *other) if other else first.astype(np.float64)
        made = -made if term.negative else made
        try:
            square = np.broadcast_to(made, (*made.shape[:-2], *(size or 0 for size in sizes[-2:])))
        except ValueError:
            return None
        heads = 1 if len(sizes) < 4 or made.ndim < 3 else made.shape[-3]
        square = square.reshape(-1, heads, *square.shape[-2:])
        if whole:
            return square.reshape(-1, *square.shape[-2:])
        if (square != square[:1]).any():
            return None  # it differs within a batch
        return square[0, :1] if (square[0] == square[0, :1]).all() else square[0]

    def _value(self, tensor: str, case: tuple[int, int], fill: Fill) -> NDArray[np.generic] | None:
        """A tensor computed by the graph's nodes; None where that fails."""
        view, shapes = self.view, self.shapes(*case)
        above = sorted(ancestors(view, frozenset(self._stops), [tensor]))
        feeds: dict[str, NDArray[np.generic]] = {}
        kept = list[onnx.TensorProto]()
        for name in sorted({name for index in above for name in reads(view.nodes[index])} | {tensor}):
            numbers, sizes = shapes.numbers(name) if name in self._stops else None, shapes.of(name)
            if numbers is not None:
                feeds[name] = np.asarray(numbers, np.int64)
            elif name in view.inputs and sizes is not None and None not in sizes:
                dtype = helper.tensor_dtype_to_np_dtype(view.type_of(name).elem_type)
                feeds[name] = fill([size for size in sizes if size is not None]).astype(dtype)
            elif name in view.inputs or name in self._stops:
                return None
            elif name in view.initializers:
                kept.append(view.initializers[name])
        if sum(prod(each.dims) for each in kept) > _MAX_READ:
            return None
        try:
            kept = [onnx.numpy_helper.from_array(self.read(each), each.name) for each in kept]
            (value,) = computed([view.nodes[index] for index in above], feeds, [tensor], view.opsets, kept)
        except Exception:  # noqa: BLE001 - the caller refuses what cannot be evaluated
            return None
        return np.asarray(value)

    # -- sizes

    def sizes(self, tensor: str) -> tuple[int | None, ...] | None:
        """The shape of a tensor at some length."""
        return self.shapes(_LENGTHS[-1], 0).of(tensor)

    @property
    def caches(self) -> frozenset[tuple[str, int]]:
        """The axes of inputs that hold past keys or values: those of floats by head, if outputs are too."""
        if not any(_by_head(self.view.type_of(name)) for name in self.view.outputs):
            return frozenset()
        kinds = {name: self.view.type_of(name) for name in self.view.inputs}
        return frozenset(
            (name, axis)
            for name, kind in kinds.items()
            if _by_head(kind)
            for axis, dim in enumerate(kind.shape or ())
            if axis and not isinstance(dim, int)
        )

    def _shapes(self, length: int, past: int) -> Shapes:
        """The shapes for two sequences of a length behind a past."""
        caches = self.caches
        symbols = {dim for name, axis in caches if isinstance(dim := (self.view.type_of(name).shape or ())[axis], str)}

        def size_of(tensor: str, axis: int, name: str) -> int:
            if not axis:
                return _BATCH
            if (tensor, axis) in caches or name in symbols:
                return past
            return length + past if any(f"{each} +" in name or f"+ {each}" in name for each in symbols) else length

        return shapes_at(self.model, self.view, size_of, self.read)


def _by_head(kind: TensorType) -> bool:
    return kind.elem_type in FLOATS and (kind.rank or 0) >= 4
