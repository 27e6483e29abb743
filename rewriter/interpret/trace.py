"""Trace tensors back to linear operators by evaluation at small sizes.

Between a linear operator and a product, nodes only move, scale and add entries. Evaluations with the operator's output
replaced by ones, by 1, 2, 3, ... and by zeros show the factor of each entry, its source and what is added.
So splitting, transposing or repeating heads is recognised by its effect. Rotary embeddings rotate by an angle of 0.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from math import prod
from typing import Any, Literal

import numpy as np
import onnx
from numpy.typing import NDArray

from passes.match.linear import LinearOperator, linear_operator, made_linearly
from rewriter.arrays import Array
from rewriter.errors import UsageError
from rewriter.evaluate.arithmetic import Floats, Unsupported, Value, is_float
from rewriter.evaluate.evaluator import Evaluator, Program
from rewriter.files.load import LoadedModel, read_tensor
from rewriter.graph.constants import UNFIT, Constants, Shapes
from rewriter.graph.edit import ancestors
from rewriter.graph.view import PARTS, REARRANGED, SIZES, GraphView, LostError, Miss, integer_of, label
from rewriter.graph.walk import reads
from rewriter.inputs.cases import Maker

Shape = tuple[int, ...]
Indices = NDArray[np.int64]
_MAX_DEPTH = 64  # of a chain of nodes
_BATCH, _TOKENS, _PAST = 2, 3, 7  # a batch of 1 would look like a broadcast axis
MAX_ENTRIES = 2**27  # of a tensor that is followed: a file may declare any shape

_ROWS = ("Gather", "GatherND")  # operators that take rows of a table
_MOVES = REARRANGED | PARTS | {"Expand", "Tile"}
# Operators that move, repeat, drop or write entries: the operands with these.
_FOLLOWED: dict[str, Sequence[int]] = dict.fromkeys((*_MOVES, "Neg", "RotaryEmbedding"), (0,))
_FOLLOWED |= {"ScatterND": (0, 2), "ScatterElements": (0, 2), "TensorScatter": (0, 1)}
_JOINING = ("Concat", "Add", "Sub", "Sum")  # all of their operands


@contextmanager
def noting(missed: list[Miss], what: str, node: str, kind: Literal["", "attention"] = "") -> Iterator[None]:
    """Turn a failure of the block into a miss; `node` is named for nodes that do not fit together."""
    try:
        yield
    except LostError as error:
        missed.append(Miss(f"{what}: {error.miss.reason}", error.miss.node, kind))
    except (*UNFIT, RecursionError):
        missed.append(Miss(f"{what}: its nodes do not fit together", node, kind))


@dataclass(frozen=True, eq=False)
class Traced:
    """A tensor whose entries are `factor * source[index] + added`."""

    source: str  # the output of a linear operator, of a normalisation, or a tensor where the caller stops
    index: Indices  # in the flattened source; -1 for an entry that is not from there, as those of a key-value cache
    factor: Array
    added: Array
    constants: tuple[str, ...]  # those in `added`
    rotary: bool = False  # whether a rotary embedding, which is left out, was applied

    def moved(self, move: Callable[[Array], Array]) -> "Traced":
        """The same with entries moved, repeated or dropped."""
        return replace(self, index=move(self.index), factor=move(self.factor), added=move(self.added))


class Tracer:
    """Follows tensors of one main graph."""

    def __init__(self, source: LoadedModel, model: onnx.ModelProto, views: Sequence[GraphView]) -> None:
        """`model` is that of `source` with operators expanded."""
        self.view = view = views[0]
        self.constants, known = Constants(view), views if model is source.proto and not model.functions else ()
        self._read = partial(read_tensor, source)
        self._fixed = Constants(view, self._read, view.sizes_of)
        self.operator = cache(partial(made_linearly, view, self.constants))
        made = {name: self.operator(name) for node in view.nodes for name in node.output[:1]}
        self.linear = {name: each for name, each in made.items() if each is not None and each.axis == -1}
        self.beside = cache(self._beside)
        bare = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
        self._evaluator = Evaluator(Program(replace(source, proto=bare)), Floats(), {})
        self.maker = cache(lambda: Maker(source.proto, views=known))

    @cached_property
    def readers(self) -> dict[str, LinearOperator]:
        """The product that is the source of an operator's data, up to layout, to the first such operator."""
        return {name: each for each in reversed(self.linear.values()) for name in self.view.back(each.data, REARRANGED)}

    @cached_property
    def _feeds(self) -> Mapping[str, Array]:
        """The inputs of a small case; none if they cannot be generated."""
        with suppress(UsageError):
            return self.maker().case((_BATCH, _TOKENS, _PAST)).feeds
        return {}

    @cached_property
    def _shapes(self) -> Shapes:
        sizes = dict[str, int]()
        for name, array in self._feeds.items():
            for axis, (dim, size) in enumerate(zip(self.view.type_of(name).shape or (), array.shape, strict=False)):
                sizes[str(dim or f"{name}[{axis}]")] = size

        def size_of(axis: int, name: str) -> int:
            return sizes.setdefault(name, 2 * len(sizes) + _TOKENS if axis else _BATCH)

        return Shapes(self.view, size_of, self._read)

    def shape(self, tensor: str) -> Shape:
        """The shape of a tensor in the small case. Raises LostError."""
        sizes = self._shapes.of(tensor)
        shape = tuple(size for size in sizes or () if size is not None)
        if sizes is None or len(shape) < len(sizes):
            nodes = (self.view.nodes[index] for index in sorted(ancestors(self.view, (), [tensor])))
            first = next((node for node in nodes if self._shapes.of(node.output[0]) is None), None)
            if first is None or not self.view.is_onnx(first):
                raise LostError("the shape of its output is not known", tensor)
            raise LostError("its nodes do not fit together", label(first))
        if prod(shape) > MAX_ENTRIES:
            node = self.view.made_by(tensor)
            raise LostError(f"it has {prod(shape)} entries, too many to follow", label(node) if node else tensor)
        return shape

    # -- factors
    def scale(self, node: onnx.NodeProto) -> tuple[str, Array] | None:
        """(operand, factor) of a Mul or Div; None for factors that depend on inputs or are infinite."""
        for slot in (1, 0) if node.op_type == "Mul" else (1,):
            with suppress(Exception):  # onnx's evaluator raises any exception
                factor = np.asarray(self._fixed.of(node.input[slot], wide=True), dtype=np.float64)
                if np.isfinite(factor).all() and (node.op_type == "Mul" or factor.all()):
                    return node.input[1 - slot], factor if node.op_type == "Mul" else 1.0 / factor
        return None

    def is_wave(self, tensor: str) -> bool:
        """Whether a tensor is the output of Cos or Sin, or rows of a constant table by position."""
        node = None if tensor in self.constants else self.view.made_by(tensor)
        if node is not None and node.op_type in _ROWS:
            return node.input[0] in self.constants and integer_of(node, "axis", 0) == 0
        return node is not None and node.op_type in ("Cos", "Sin")

    def _turns(self, tensor: str) -> bool:
        """Whether all entries of a tensor are moved and scaled cosines, or sines: 1 or 0 for the angle 0."""
        ends = list(self.view.back(tensor, _MOVES - {*_ROWS} | {"Concat", "Mul"}))
        waves = [name for name in ends if self.is_wave(name)]
        if not waves or any(name in self.view.data for name in ends if name not in waves):
            return False
        with suppress(LostError, *UNFIT):
            value = self._evaluator.arithmetic.lift(self.beside(tensor)).entries
            return bool((value == value.flat[0]).all())
        return False

    # -- tracing back
    def trace(self, tensor: str, end: str = "") -> Traced:
        """Follow a tensor to one linear operator or normalisation, or to `end`. Raises LostError."""
        path = dict[str, bool]()
        names = list(dict.fromkeys(self._sources(tensor, end, path)))
        made = [name for name in names if name not in self.constants]
        if len(made) != 1:
            reason = "it is a sum of several linear operators' outputs" if made else "no linear operator makes it"
            raise LostError(reason, made[0] if made else "its inputs")
        (source,) = made
        entries = np.arange(1.0, prod(self.shape(source)) + 1).reshape(self.shape(source))
        held = tuple(name for name in names if name in self.constants)
        nothing = {name: np.zeros(self.constants.shape(name) or ()) for name in held}
        probes = {source: np.ones_like(entries), **nothing}, {source: entries, **nothing}, {source: 0.0 * entries}
        along = {name: self.shape(name) for name in path if name not in self.constants}  # one may be lost, or too large

        def probed(probe: Mapping[str, Array]) -> Array:
            @cache
            def value(name: str) -> Any:
                if name in probe:
                    return Value(probe[name])
                return self._made(name, value) if name in along else self.beside(name)

            return self._evaluator.arithmetic.lift(value(tensor)).entries

        factor, numbers, added = map(probed, probes)
        index = np.rint(numbers / np.where(factor == 0.0, np.inf, factor)).astype(np.int64) - 1
        return Traced(source, index, factor, added, held, any(path.values()))

    def _beside(self, tensor: str) -> Any:
        """The value in the small case of a tensor beside a path: no matrix is read, and angles are 0."""
        node, fed = self.view.made_by(tensor), self._feeds.get(tensor)
        if fed is not None and not is_float(fed):
            return fed
        if tensor in self.view.initializers:
            return self._read(self.view.initializers[tensor])
        if node is not None and self.is_wave(tensor):
            rows = self.beside(node.input[0]) if node.op_type in _ROWS else np.full(1, float(node.op_type == "Cos"))
            if is_float(rows):
                row = self._evaluator.arithmetic.lift(rows.entries[0] if isinstance(rows, Value) else rows[0])
                return Value(np.broadcast_to(row.entries, self.shape(tensor)))
        if tensor in self.linear:
            return Value(np.zeros(self.shape(tensor)))
        if tensor not in self.view.data:
            with suppress(Exception):  # onnx's evaluator raises any exception
                made = self._shapes.values.of(tensor)
                if tensor in self.constants or not is_float(made):  # others may be moved cosines
                    return made
        return self._made(tensor, self.beside)

    def _made(self, tensor: str, value: Callable[[str], Any]) -> Any:
        """What a node makes of the values of its operands; an input is zeros."""
        node = self.view.made_by(tensor)
        if node is None:
            return Value(np.zeros(self.shape(tensor)))
        if node.op_type == "RotaryEmbedding":
            return value(node.input[0])
        sizes = node.op_type in SIZES
        environment = {name: Value(np.zeros(self.shape(name))) if sizes else value(name) for name in reads(node)}
        try:
            self._evaluator.node(node, environment)
        except Unsupported as error:
            reason = str(error).removeprefix(f"{label(node)}: ")
            raise LostError("its nodes do not fit together" if error.__cause__ else reason, label(node)) from error
        return environment[tensor]

    def norm(self, tensor: str) -> "Norm | None":
        """The normalisation whose output a tensor is."""
        norm = norm_before(self.view, self.constants, tensor)
        return norm if norm is not None and norm.output == tensor else None

    def _sources(self, tensor: str, end: str, path: dict[str, bool], depth: int = 0) -> Iterator[str]:
        """Where a tensor's entries are from, except inputs. Raises LostError.

        Adds the tensors along the way to `path`, each with whether it is rotated there.
        """
        path[tensor] = False
        node = self.view.made_by(tensor)
        if tensor == end or tensor in self.constants or self.operator(tensor) or self.norm(tensor):
            yield tensor
            return
        if node is None:
            return
        if depth > _MAX_DEPTH:
            raise LostError("the way back is too long", label(node))
        kind, parts = node.op_type, list(node.input)
        if kind == "RotaryEmbedding":
            path[tensor] = True
        elif kind in ("Mul", "Div"):
            scale = self.scale(node)
            waves = [slot for slot in (0, 1) if scale is None and kind == "Mul" and self._turns(parts[slot])]
            if scale is None and len(waves) != 1:
                raise LostError("it multiplies with something that the inputs change", label(node))
            path[tensor], parts = scale is None, [scale[0] if scale else parts[1 - waves[0]]]
        elif kind not in (*_FOLLOWED, *_JOINING) or not self.view.is_onnx(node):
            product = linear_operator(self.view, self.constants, self.view.producer[tensor])
            reason = product.reason if isinstance(product, Miss) else "it does more than move, scale or add entries"
            raise LostError(reason, label(node))
        for part in (parts[place] for place in _FOLLOWED.get(kind, range(len(parts)))):
            found = list(self._sources(part, end, path, depth + 1))
            if kind in _JOINING[1:] and not found:
                raise LostError("it adds something that comes from the inputs", label(node))
            yield from found


# -- normalisations: an operator, or arithmetic that divides by a mean ------------------------------------------------

_MAX_DISTANCE = 8  # nodes between the scale of a normalisation in primitive operators and its mean
# Operators whose output is normalised along the last axis; scale and bias follow the data.
NORMS = ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")


@dataclass(frozen=True)
class Norm:
    """A normalisation `x_hat * scale + bias` of `data` over the last axis; absent tensors are empty."""

    output: str
    scale: str
    bias: str
    data: str

    @property
    def constants(self) -> dict[str, str]:
        """The present constants: `w` to the scale, `b` to the bias."""
        return {name: held for name, held in (("w", self.scale), ("b", self.bias)) if held}


def norm_before(view: GraphView, constants: Constants, tensor: str) -> Norm | None:
    """The normalisation that computes `tensor`, up to its layout; None without one."""
    tensor = view.before(tensor)
    node = view.made_by(tensor)
    if node is None:
        return None
    if node.op_type in NORMS and integer_of(node, "axis", -1) == -1:
        data, scale, bias = [*node.input, ""][:3]
        return Norm(tensor, scale, bias, data)
    # In primitive operators: an Add and a Mul of constants after a division by a mean.
    data, bias = without_constant(view, tensor, "Add")
    data, scale = without_constant(view, data, "Mul")
    if len([size for size in constants.shape(scale) or () if size != 1]) != 1 or not _contains_mean(view, data):
        return None
    # The x of x / sqrt(mean(x x)) or (x - mean(x)) / sqrt(...), where x is not the result of a mean.
    node = view.made_by(view.before(data))
    names = list(node.input) if node is not None else []
    centred = [maker.input[0] for maker in map(view.made_by, names) if maker is not None and maker.op_type == "Sub"]
    normalised = next((name for name in (*names, *centred) if not _contains_mean(view, name)), "")
    return Norm(tensor, scale, bias, normalised)


def without_constant(view: GraphView, tensor: str, kind: str) -> tuple[str, str]:
    """(data, constant) of an operator `kind` on both; else the tensor itself, and no name."""
    node = view.made_by(tensor)
    names = list(node.input) if node is not None and node.op_type == kind else []
    data = [name for name in names if name not in view.constants]
    held = [name for name in names if name in view.constants]
    return (data[0], held[0]) if len(data) == len(held) == 1 else (tensor, "")


def norm_apart(view: GraphView, constants: Constants, data: str) -> Norm | None:
    """The normalisation before a sublayer; None if its result is also part of the residual stream."""
    norm = norm_before(view, constants, data)
    sums = () if norm is None else (node for node in view.readers(norm.output) if node.op_type in ("Add", "Sum"))
    return norm if all(any(name in constants for name in node.input) for node in sums) else None


def _contains_mean(view: GraphView, tensor: str, reach: int = _MAX_DISTANCE) -> bool:
    node = view.made_by(tensor)
    if node is None or reach < 0:
        return False
    through = node.op_type in ("Div", "Mul", "Reciprocal", "Sqrt", "Add", "Pow", "Cast", "Sub")
    means = node.op_type in ("ReduceMean", "ReduceSum", "ReduceSumSquare")
    return means or (through and any(_contains_mean(view, name, reach - 1) for name in node.input))
