"""Trace tensors back to linear operators at placeholder sizes, tracking the provenance of each entry.

Every entry of the tensor is a sum of entries of linear operators' outputs and of constants, with factors. The tracer
follows the indices through operators that only move entries, so that splitting, transposing or repeating heads is
recognised by its effect.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from passes.match.linear import LinearOperator, linear_operator, made_linearly
from passes.sizes import Shapes, Sizes, shapes_at
from rewriter.errors import UsageError
from rewriter.graph.constants import Constants, Read, computed
from rewriter.graph.elementwise import MICROSOFT
from rewriter.graph.norms import Norm, norm_before
from rewriter.graph.view import REARRANGED, SAME_ENTRIES, GraphView, LostError, Miss, attributes, key_of, label
from rewriter.proof.inputs.cases import Maker

Shape = tuple[int, ...]
Indices = NDArray[np.int64]
Array = NDArray[np.float64]
Move = Callable[[NDArray[Any]], NDArray[Any]]  # moves, repeats or drops entries of an array
_MAX_DEPTH = 64  # of a chain of nodes
_CASES = (2, 3, 7), (3, 5, 11)  # batch, tokens, past; a batch of 1 would look like a broadcast axis
MAX_ENTRIES = 2**27  # of a tensor that is followed: a file may declare any shape


@dataclass(frozen=True, eq=False)
class EntrySource:
    """One source of a tensor's entries."""

    name: str  # the output of a linear operator or normalisation, a constant, or a tensor where the caller stops
    index: Indices  # of every entry in the flattened source, -1 for none
    factor: Array


@dataclass(frozen=True, eq=False)
class Signal:
    """A tensor as the sum of its sources."""

    shape: Shape
    sources: tuple[EntrySource, ...]  # none for inputs of the graph, such as a key-value cache
    rotary: bool = False  # whether a rotary embedding, which sources leave out, was applied
    norm: Norm | None = None  # a normalisation whose operands and output are all sources

    def moved(self, move: Move) -> Signal:
        shape = move(np.broadcast_to(np.int8(0), self.shape)).shape
        if prod(shape) > MAX_ENTRIES:
            raise LostError(f"it has {prod(shape)} entries, too many to follow", "a tensor that is repeated")
        sources = (replace(each, index=move(each.index), factor=move(each.factor)) for each in self.sources)
        return replace(self, shape=shape, sources=tuple(sources))

    def spread(self, shape: Shape) -> Signal:
        return self.moved(lambda array: np.broadcast_to(array, shape))

    def scaled(self, factor: Array | float) -> Signal:
        return replace(self, sources=tuple(replace(each, factor=each.factor * factor) for each in self.sources))


def shapes_of_case(file: onnx.ModelProto, model: onnx.ModelProto, view: GraphView, read: Read, number: int) -> Shapes:
    """The shapes of the main graph in a small case; `model` is `file` with operators expanded."""
    given, integers = dict[str, Shape](), dict[str, NDArray[Any]]()
    batch, tokens, past = _CASES[number]
    with suppress(UsageError):  # inputs cannot be generated
        maker = Maker(file)
        feeds = maker.case((batch, tokens, past if maker.cached else 0)).feeds
        given = {name: array.shape for name, array in feeds.items()}
        integers = {name: array for name, array in feeds.items() if array.dtype.kind in "iu"}
    free = dict[str, int]()  # dimensions of inputs that were not generated

    def size_of(tensor: str, axis: int, name: str) -> int:
        if tensor in given:
            return given[tensor][axis]
        return free.setdefault(name, 2 * len(free) + tokens if axis else batch)

    return shapes_at(model, view, size_of, read, integers)


class Tracer:
    """Follows tensors of one main graph."""

    def __init__(self, view: GraphView, shapes: Callable[[int], Shapes], read: Read) -> None:
        """`shapes` gives the shapes of a case; `read` reads initializers."""
        self.view = view
        self.constants = Constants(view)
        self._shapes, self._others = shapes(0), cache(lambda: shapes(1))
        # The bounds of slices are those of the case; the factors of scores must not depend on it.
        self._exact = Constants(view, read, self._fixed_sizes)

    def _fixed_sizes(self, tensor: str) -> Sizes | None:
        pair = [shapes.of(tensor) for shapes in (self._shapes, self._others())]
        known = [sizes for sizes in pair if sizes is not None]
        return tuple(a if a == b else None for a, b in zip(*known, strict=True)) if len(known) == len(pair) else None

    def shape(self, tensor: str) -> Shape:
        """The shape of a tensor. Raises LostError."""
        known = self._size(tensor)
        if known is None:
            node = self.view.made_by(tensor)
            raise LostError("the shape of its output is not known", label(node) if node is not None else tensor)
        return known

    def _size(self, tensor: str) -> Shape | None:
        sizes = self._shapes.of(tensor)
        known = tuple(size for size in sizes or () if size is not None)
        return known if sizes is not None and len(known) == len(sizes) else None

    def operator(self, tensor: str) -> LinearOperator | None:
        return made_linearly(self.view, self.constants, tensor)

    def scale(self, node: onnx.NodeProto) -> tuple[str, Array] | None:
        """(operand, factor) of a Mul or Div; None for factors that depend on inputs or are infinite."""
        for slot in (1, 0) if node.op_type == "Mul" else (1,):
            factor = self._fixed(node.input[slot])
            if factor is not None and (node.op_type == "Mul" or factor.all()):
                return node.input[1 - slot], factor if node.op_type == "Mul" else 1.0 / factor
        return None

    def _fixed(self, tensor: str) -> Array | None:
        """The value of a small tensor that is the same for all inputs; else None."""
        try:
            value = np.asarray(self._exact.of(tensor), dtype=np.float64)
        except Exception:  # noqa: BLE001 - onnx's evaluator raises any exception; the value is then unknown
            return None
        return value if np.isfinite(value).all() else None

    def trace(self, tensor: str, ends: Callable[[str], bool] = lambda _: False, depth: int = 0) -> Signal:
        """Follow a tensor to linear operators, constants and inputs, or to where `ends` holds. Raises LostError."""
        if ends(tensor) or tensor in self.constants or self.operator(tensor) is not None:
            return self._entries(tensor, self.shape(tensor))
        node = self.view.made_by(tensor)
        if node is None:
            return Signal(self.shape(tensor), ())
        if depth > _MAX_DEPTH:
            raise LostError("the way back is too long", label(node))
        found = self._through(node, tensor, lambda name: self.trace(name, ends, depth + 1))
        known = self._size(tensor)
        if known is not None and found.shape != known:
            raise LostError(f"its output has shape {list(known)}, not {list(found.shape)}", label(node))
        return found

    def _entries(self, tensor: str, shape: Shape) -> Signal:
        if prod(shape) > MAX_ENTRIES:
            raise LostError(f"it has {prod(shape)} entries, too many to follow", tensor)
        return Signal(shape, (EntrySource(tensor, np.arange(prod(shape)).reshape(shape), np.ones(shape)),))

    def _through(self, node: onnx.NodeProto, output: str, follow: Callable[[str], Signal]) -> Signal:
        key, norm = key_of(node), norm_before(self.view, self.constants, output)
        if norm is not None and norm.output == output:
            return self._normed(norm, follow(norm.data))
        if key in (("", "RotaryEmbedding"), (MICROSOFT, "RotaryEmbedding")):
            return replace(follow(node.input[0]), rotary=True)
        if key in _MOVES:
            return self._moved(node, output, follow(node.input[0]))
        if key == ("", "Concat"):
            return _concatenated([follow(name) for name in node.input], attributes(node)["axis"])
        if key in _WRITES:
            return self._written(node, follow)
        if key == ("", "Neg"):
            return follow(node.input[0]).scaled(-1.0)
        if key in (("", "Mul"), ("", "Div")):
            return self._scaled(node, follow)
        if key in (("", "Add"), ("", "Sub"), ("", "Sum")):
            return self._added(node, follow)
        product = linear_operator(self.view, self.constants, self.view.producer[output])
        reason = product.reason if isinstance(product, Miss) else "it does more than move, scale or add entries"
        raise LostError(reason, label(node))

    def _written(self, node: onnx.NodeProto, follow: Callable[[str], Signal]) -> Signal:
        """Entries written into others, such as new keys into a cache, at the places of the case."""
        old, new, where = (node.input[place] for place in (0, *_WRITES[key_of(node)]))
        try:
            places = {where: self._shapes.values.of(where)}
        except Exception as error:  # onnx's evaluator raises any exception
            raise LostError("where it writes is not known", label(node)) from error

        def write(pieces: list[NDArray[Any]]) -> NDArray[Any]:
            given = dict(zip((old, new), pieces, strict=True))
            return np.asarray(computed([node], given | places, node.output, {"": self.view.opsets.get("", 1)})[0])

        return _joined([follow(old), follow(new)], write)

    def _normed(self, norm: Norm, data: Signal) -> Signal:
        if data.rotary or data.norm is not None or not data.sources:
            raise LostError("what it normalises is rotated or normalised", norm.output)
        own = self._entries(norm.output, data.shape)
        return replace(own, sources=(*data.sources, *own.sources), norm=norm)

    def _scaled(self, node: onnx.NodeProto, follow: Callable[[str], Signal]) -> Signal:
        scale = self.scale(node)
        if scale is None:
            raise LostError("it multiplies with something that the inputs change", label(node))
        found, factor = follow(scale[0]), scale[1]
        return found.spread(np.broadcast_shapes(found.shape, factor.shape)).scaled(factor)

    def _added(self, node: onnx.NodeProto, follow: Callable[[str], Signal]) -> Signal:
        """Add, Sub, Sum; and the rotation x cos + R x sin, as x."""
        turned = self._before_rotation(node)
        if turned is not None:
            return replace(follow(turned), rotary=True)
        operands = [follow(name) for name in node.input]
        shape = np.broadcast_shapes(*(operand.shape for operand in operands))
        if not all(operand.sources for operand in operands) or any(operand.norm for operand in operands):
            raise LostError("it adds something that comes from the inputs, or to what is normalised", label(node))
        signs = [-1.0 if place and node.op_type == "Sub" else 1.0 for place in range(len(operands))]
        terms = [operand.spread(shape).scaled(sign) for operand, sign in zip(operands, signs, strict=True)]
        sources = tuple(source for term in terms for source in term.sources)
        return Signal(shape, sources, any(term.rotary for term in terms))

    def _before_rotation(self, node: onnx.NodeProto) -> str | None:
        """The x of x cos + R x sin; None for any other sum."""
        if node.op_type not in ("Add", "Sub") or len(node.input) != 2:
            return None
        factors: dict[str, str] = {}
        for name in node.input:
            product = self.view.made_by(name)
            if product is None or product.op_type != "Mul":
                return None
            for slot in (0, 1):
                wave = self._cos_or_sin(product.input[slot])
                if wave in ("Cos", "Sin"):
                    factors[wave] = product.input[1 - slot]
        return factors.get("Cos") if len(factors) == 2 else None

    def _cos_or_sin(self, tensor: str) -> str:
        """`Cos` or `Sin` if all entries of a tensor are moved and scaled values of it; else empty."""
        try:
            kinds = {self._kind(source) for source in self.trace(tensor, self._is_cos_or_sin).sources}
        except LostError:
            return ""
        return kinds.pop() if len(kinds) == 1 else ""

    def _is_cos_or_sin(self, tensor: str) -> bool:
        """Whether a tensor is the output of Cos or Sin, or rows of a constant table by position."""
        node = self.view.made_by(tensor)
        if node is None or tensor in self.constants:
            return False
        return node.op_type in ("Cos", "Sin") or (node.op_type in _ROWS and node.input[0] in self.constants)

    def _kind(self, source: EntrySource) -> str:
        """The operator, or `Cos` or `Sin` by row 0 of a table, where cos is 1 and sin is 0."""
        node = self.view.made_by(source.name)
        if node is None or node.op_type not in _ROWS:
            return "" if node is None else node.op_type
        rows = self._fixed(node.input[0])
        if rows is None or rows.ndim < 2 or len(rows) < 2 or self.shape(source.name)[1 - rows.ndim :] != rows.shape[1:]:
            return ""
        first, second = (row.reshape(-1)[source.index % row.size] for row in rows[:2])
        if (first == second).all():
            return ""
        return "Cos" if (first == 1.0).all() else "Sin" if (first == 0.0).all() else ""

    def _moved(self, node: onnx.NodeProto, output: str, data: Signal) -> Signal:
        """A node that only moves, repeats or drops entries does the same to their indices."""
        known = self._size(output)
        if node.op_type in ("Cast", "Identity", "Dropout"):
            return data
        if node.op_type in SAME_ENTRIES and known is not None:
            return data.moved(lambda array: array.reshape(known))
        operands = {name: self._shapes.values.of(name) for name in node.input[1:] if name}
        if node.op_type == "Expand":
            return data.spread(np.broadcast_shapes(data.shape, self._shapes.values.numbers(node.input[1])))
        place, versions = list(node.output).index(output), {"": self.view.opsets.get("", 1)}

        def move(array: NDArray[Any]) -> NDArray[Any]:
            made = computed([node], {node.input[0]: array, **operands}, node.output, versions)[place]
            return np.asarray(made)

        try:
            return data.moved(move)
        except Exception as error:  # onnx's evaluator raises any exception
            raise LostError("its nodes do not fit together", label(node)) from error


def _concatenated(pieces: list[Signal], axis: int) -> Signal:
    """Concat: of the new keys with a cache, of a rotated part with the rest."""
    # Operands from the inputs, such as a cache, may have other placeholder sizes.
    known = next((piece.shape for piece in pieces if piece.sources), pieces[0].shape)
    sizes = (piece.shape[axis] for piece in pieces)
    apart = [[*known[: axis % len(known)], size, *known[axis % len(known) + 1 :]] for size in sizes]
    pieces = [
        piece if piece.sources else replace(piece, shape=tuple(shape))
        for piece, shape in zip(pieces, apart, strict=True)
    ]
    return _joined(pieces, lambda arrays: np.concatenate(arrays, axis))


def _joined(pieces: list[Signal], join: Callable[[list[NDArray[Any]]], NDArray[Any]]) -> Signal:
    found = []
    for name in dict.fromkeys(source.name for piece in pieces for source in piece.sources):
        index, factor = [], []
        for piece in pieces:
            own = next((source for source in piece.sources if source.name == name), None)
            index.append(np.full(piece.shape, -1) if own is None else own.index)
            factor.append(np.ones(piece.shape) if own is None else own.factor)
        found.append(EntrySource(name, join(index), join(factor)))
    shape = join([np.zeros(piece.shape, np.int8) for piece in pieces]).shape
    norm = next((piece.norm for piece in pieces if piece.norm), None)
    return Signal(shape, tuple(found), any(piece.rotary for piece in pieces), norm)


_WRITES = {("", "ScatterND"): (2, 1), ("", "ScatterElements"): (2, 1), ("", "TensorScatter"): (1, 2)}
"""Operators that write entries into their first input: the operand with the entries, and that with the indices."""

_ROWS = ("Gather", "GatherND")  # operators that take rows of a table
_MOVES = {("", name) for name in REARRANGED | {"Expand", "Split", "Slice", "Gather", "GatherND", "Tile"}}
"""Operators that only move, repeat or drop the entries of their first input."""
