"""Trace tensors back to linear operators by evaluation at small sizes.

Between a linear operator and a product, nodes only move, scale and add entries. Evaluations with the operator's output
replaced by ones, by 1, 2, 3, ... and by zeros show the factor of each entry, its source and what is added.
So splitting, transposing or repeating heads is recognised by its effect. Rotary embeddings rotate by an angle of 0.
"""

from collections import ChainMap
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
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
from rewriter.evaluate.scalar import BROADCAST, NONLINEAR
from rewriter.files.load import LoadedModel, read_tensor
from rewriter.graph.constants import UNFIT, Constants, outputs
from rewriter.graph.edit import extract, upstream
from rewriter.graph.view import PARTS, REARRANGED, GraphView, LostError, Miss, integer_of, label
from rewriter.inputs.cases import Maker

Shape = tuple[int, ...]
Indices = NDArray[np.int64]
_MAX_DEPTH = 64  # of a chain of nodes
_SIZES = 2, 3, 7  # batch, tokens, past; a batch of 1 would look like a broadcast axis
MAX_ENTRIES = 2**27  # of a tensor that is followed: a file may declare any shape
_MAX_FACTOR = 2**12  # entries of a tensor that may be a factor
_MAX_TABLE = 2**24  # entries of a table that is read: those of larger ones, as of embeddings, count as 0

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
    except UNFIT:
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


class _Small(Evaluator):
    """An evaluation that reads no matrix and rotates nothing, and notes why tensors are missing."""

    def __init__(self, tracer: "Tracer", program: Program, feeds: Mapping[str, Array]) -> None:
        super().__init__(program, Floats(), feeds)
        self.environment.update(tracer.tables)
        self.decided |= feeds.keys()
        self.shapes: dict[str, Shape] = {name: array.shape for name, array in feeds.items()}
        self.values: dict[str, Any] = dict(feeds)  # of small tensors
        self.lost: dict[str, LostError] = {}
        self._tracer = tracer
        declared = ((tracer.view.type_of(name).shape or (), array.shape) for name, array in feeds.items())
        sizes = (pair for each in declared for pair in zip(*each, strict=False))
        self._symbols = {dim: size for dim, size in sizes if isinstance(dim, str)}

    def node(self, node: onnx.NodeProto, environment: MutableMapping[str, Any]) -> None:
        name, missing = node.output[0], [self.lost[each] for each in node.input if each in self.lost]
        try:
            if missing:
                raise missing[0]
            shape = self._shape(node, [environment[each] for each in node.input if each])
            if shape is None and node.op_type != "RotaryEmbedding":
                super().node(node, environment)
                return
            environment[name] = environment[node.input[0]] if shape is None else Value(np.broadcast_to(0.0, shape))
            self.decided.add(name)
            self.computed(node, name, environment)
        except (Unsupported, ValueError, LostError) as error:
            shape = self._declared(node)
            if shape is not None and prod(shape) <= MAX_ENTRIES:
                environment[name], self.shapes[name] = Value(np.broadcast_to(0.0, shape)), shape
                return
            if not isinstance(error, LostError):
                unfit = error.__cause__ or isinstance(error, ValueError)
                reason = str(error).removeprefix(f"{label(node)}: ")
                error = LostError("its nodes do not fit together" if unfit else reason, label(node))
            self.lost |= dict.fromkeys(node.output, error)

    def _declared(self, node: onnx.NodeProto) -> Shape | None:
        """The shape of an output that cannot be evaluated, such as a mask that broadcasts at batch 1 only."""
        shapes = [self.shapes[each] for each in node.input if each in self.shapes]
        if node.op_type in BROADCAST and shapes:
            return max(shapes, key=len)
        dims = self._tracer.view.type_of(node.output[0]).shape
        sizes = [dim if isinstance(dim, int) else self._symbols.get(dim or "") for dim in dims or ()]
        known = tuple(size for size in sizes if size is not None)
        return known if dims is not None and len(known) == len(dims) else None

    def _shape(self, node: onnx.NodeProto, operands: Sequence[Any]) -> Shape | None:
        """The shape of an output whose entries do not matter; None for other outputs."""
        width = self._tracer.widths.get(node.output[0])
        if width is not None:
            return (*operands[0].shape[:-1], width)
        if not operands or {*node.input} - self.decided or not isinstance(operands[0], Value):
            return None
        shapes = [each.shape for each in operands]
        if node.op_type == "MatMul":
            return (*np.broadcast_shapes(*(each[:-2] for each in shapes)), *shapes[0][-2:-1], *shapes[1][-1:])
        return shapes[0] if node.op_type in {*NONLINEAR, "Softmax"} else None

    def computed(self, node: onnx.NodeProto, name: str, environment: MutableMapping[str, Any]) -> None:
        value = environment[name]
        if isinstance(value, list):
            return
        self.shapes[name] = value.shape
        if prod(value.shape) > MAX_ENTRIES:
            raise LostError(f"it has {prod(value.shape)} entries, too many to follow", label(node))
        if self._tracer.is_wave(name) and is_float(value):
            rows = environment[node.input[0]] if node.op_type in _ROWS else np.full(1, float(node.op_type == "Cos"))
            row = (rows.entries if isinstance(rows, Value) else rows)[0]
            if value.shape[value.ndim - row.ndim :] == row.shape:
                value = Value(np.broadcast_to(row.astype(np.float64), value.shape))
                environment[name] = value
        entries = value.entries if isinstance(value, Value) else value
        if entries.size and (not any(entries.strides) or (entries == entries.flat[0]).all()):
            self.values[name] = np.broadcast_to(entries.flat[0], entries.shape)
        elif entries.size <= _MAX_FACTOR:
            self.values[name] = entries


class Tracer:
    """Follows tensors of one main graph."""

    def __init__(self, source: LoadedModel, model: onnx.ModelProto, views: Sequence[GraphView]) -> None:
        """`model` is that of `source` with operators expanded."""
        self.view = view = views[0]
        self.constants, known = Constants(view), views if model is source.proto and not model.functions else ()
        self._model = replace(source, proto=model)
        self._fixed = Constants(view, partial(read_tensor, self._model), self._sizes)
        tables = [each for each in view.initializers.values() if prod(each.dims) > _MAX_TABLE and each.data_type == 1]
        self.tables = {each.name: Value(np.broadcast_to(0.0, each.dims)) for each in tables}
        self.operator = cache(partial(made_linearly, view, self.constants))
        self.is_wave = cache(self._is_wave)
        made = {name: self.operator(name) for node in view.nodes for name in node.output[:1]}
        self.widths = {name: each.out_features for name, each in made.items() if each is not None and each.axis == -1}
        # The same graph without the weights of these.
        nodes = list(view.nodes)
        for name, each in made.items():
            if each is not None and self.widths.get(name):
                nodes[each.node] = onnx.helper.make_node(view.nodes[each.node].op_type, [each.data], [name])
        self._light = replace(view, nodes=tuple(nodes))
        self.maker = cache(lambda: Maker(source.proto, views=known))

    @cached_property
    def readers(self) -> dict[str, LinearOperator]:
        """The product that is the source of an operator's data, up to layout, to the first such operator."""
        made = [each for each in map(self.operator, self.widths) if each is not None]
        return {name: each for each in reversed(made) for name in self.view.back(each.data, REARRANGED)}

    @cached_property
    def _case(self) -> _Small:
        """The whole graph in a small case."""
        feeds, (batch, tokens, past) = dict[str, Array](), _SIZES
        try:
            maker = self.maker()
            feeds |= maker.case((batch, tokens, past if maker.cached else 0)).feeds
        except UsageError:  # inputs cannot be generated
            sizes = dict[str, int]()
            for name in self.view.inputs:
                kind, shape = self.view.type_of(name), list[int]()
                for axis, dim in enumerate(kind.shape or ()):
                    made = 2 * len(sizes) + tokens if axis else batch
                    shape.append(dim if isinstance(dim, int) else sizes.setdefault(dim or f"{name}[{axis}]", made))
                feeds[name] = np.zeros(shape, onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))
        part = extract(self._model.proto, self._light, upstream(self._light, frozenset(), self.view.outputs))
        found = _Small(self, Program(replace(self._model, proto=part)), feeds)
        for _ in found.steps():
            pass
        return found

    def _sizes(self, tensor: str) -> list[int | None] | None:
        shape = self.view.type_of(tensor).shape
        return None if shape is None else [dim if isinstance(dim, int) else None for dim in shape]

    def shape(self, tensor: str) -> Shape:
        """The shape of a tensor in the small case. Raises LostError."""
        case = self._case
        if tensor not in case.shapes:
            raise case.lost.get(tensor) or LostError("the shape of its output is not known", tensor)
        return case.shapes[tensor]

    # -- factors
    def scale(self, node: onnx.NodeProto) -> tuple[str, Array] | None:
        """(operand, factor) of a Mul or Div; None for factors that depend on inputs or are infinite."""
        for slot in (1, 0) if node.op_type == "Mul" else (1,):
            with suppress(Exception):  # onnx's evaluator raises any exception
                factor = np.asarray(self._fixed.of(node.input[slot], wide=True), dtype=np.float64)
                if np.isfinite(factor).all() and (node.op_type == "Mul" or factor.all()):
                    return node.input[1 - slot], factor if node.op_type == "Mul" else 1.0 / factor
        return None

    def _is_wave(self, tensor: str) -> bool:
        """Whether a tensor is the output of Cos or Sin, or rows of a constant table by position."""
        node = None if tensor in self.constants else self.view.made_by(tensor)
        if node is not None and node.op_type in _ROWS:
            return node.input[0] in self.constants and integer_of(node, "axis", 0) == 0
        return node is not None and node.op_type in ("Cos", "Sin")

    def _turns(self, tensor: str) -> bool:
        """Whether all entries of a tensor are moved and scaled cosines, or sines: 1 or 0 for the angle 0."""
        case = self._case
        ends = list(self.view.back(tensor, _MOVES - {*_ROWS} | {"Concat", "Mul"}))
        waves, value = [name for name in ends if self.is_wave(name)], case.values.get(tensor)
        if not waves or value is None or any(name in case.decided for name in ends if name not in waves):
            return False
        return bool((value == value.flat[0]).all())

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
        probes = [{source: np.ones_like(entries), **nothing}, {source: entries, **nothing}]
        probes += [{source: np.zeros_like(entries)}] if held else []
        factor, numbers, *constant = self._values(tensor, path, probes)
        index = np.rint(numbers / np.where(factor == 0.0, np.inf, factor)).astype(np.int64) - 1
        added = constant[0] if held else np.zeros_like(factor)
        return Traced(source, index, factor, added, held, any(path.values()))

    def _values(self, tensor: str, path: Collection[str], probes: Sequence[Mapping[str, Array]]) -> Iterator[Array]:
        """The value of a tensor with other entries of tensors on its path, and zeros as inputs there."""
        self.shape(tensor)  # it may be lost
        case = self._case
        known = frozenset(case.values).difference(path)
        part = upstream(self._light, known.union(self.widths, *probes), [tensor])
        made = {name: case.values[name] if name in known else np.zeros(case.shapes[name]) for name in part.inputs}
        for probe in probes:
            given = {name: Value(each) if is_float(each) else each for name, each in {**made, **probe}.items()}
            values = ChainMap[str, Any](given, {"": None}, case.program.weights(case.program.graph))
            for node in (self._light.nodes[place] for place in part.nodes if tensor not in probe):
                try:
                    operands = [values[name] for name in node.input]
                    turned = node.op_type == "RotaryEmbedding"
                    given |= zip(node.output, operands[:1] if turned else outputs(node, operands, case), strict=False)
                except (*UNFIT, Unsupported) as error:
                    raise LostError("its nodes do not fit together", label(node)) from error
            value = values[tensor]
            yield np.asarray(value.entries if isinstance(value, Value) else value, dtype=np.float64)

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
    shape = constants.shape(scale) or ()
    if len([size for size in shape if size != 1]) != 1 or not _contains_mean(view, data):
        return None
    # The x of x / sqrt(mean(x x)) or (x - mean(x)) / sqrt(...), where x is not the result of a mean.
    node = view.made_by(view.before(data))
    names = list(node.input) if node is not None else []
    makers = [view.made_by(name) for name in names]
    centred = [maker.input[0] for maker in makers if maker is not None and maker.op_type == "Sub"]
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
