"""Rows of operators that move data: each entry of the output is an entry of an operand, or a constant."""
# ruff: noqa: ARG001 - every row is given its node

import math
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
from onnx import helper, numpy_helper

from rewriter.arrays import Array
from rewriter.evaluate.arithmetic import FAR, Field, Unsupported, Value, integers, is_float, plain
from rewriter.evaluate.table import Call, operator

SECTIONS = frozenset(("Split", "Slice"))  # operators that select entries in order: views, which cost nothing

PARTS = SECTIONS | {"Gather", "GatherND", "GatherElements"}  # operators that select entries

SAME_ENTRIES = frozenset(("Identity", "Dropout", "Reshape", "Squeeze", "Unsqueeze", "Flatten"))
"""Operators that keep values and their order; axes may be split, merged, added or dropped."""

CASTS = frozenset(("Cast", "CastLike"))

SAME_NUMBERS = SAME_ENTRIES | {"Cast"}  # the same, or casts

REARRANGED = SAME_NUMBERS | {"Transpose"}  # the same, or in another order

NOT_LARGER = REARRANGED | {"Slice", "Split", "Gather", "Concat", "Mod", "DequantizeLinear", "ScatterElements"}
"""Operators, beside elementwise ones, whose output is not larger than their operands."""


def masks_of(value: Value) -> Any:
    """How many masking constants each entry contains, broadcast to its shape."""
    return np.broadcast_to(0 if value.masks is None else value.masks, value.shape)


def joint_masks(function: Callable[..., Array], *values: Value) -> Array | None:
    """What a function makes of the masks of several values; None where none of them has any."""
    return None if all(each.masks is None for each in values) else function(*map(masks_of, values))


def fully_masked(least: Array) -> Array:
    """The rows in which every entry has a mask below all scores, by least count; none if all rows do: an offset."""
    return np.asarray((least >= FAR) & (least.min(initial=FAR) < FAR))


def _moved_together(call: Call, function: Callable[..., Array], *operands: Any, scalar: bool = True) -> Any:
    """Data movement out of several operands: the same for entries and masks, and for plain arrays."""
    if not any(isinstance(each, Value) for each in operands):
        return function(*operands)
    values = [call.lift(each, scalar=scalar) for each in operands]
    entries, whole = function(*(each.entries for each in values)), all(each.whole for each in values)
    grids = {each.grid for each in values if each.grid or each.entries.any()}  # 0 is on every grid
    grid = grids.pop() if len(grids) == 1 else None
    return Value(entries, joint_masks(function, *values), whole=whole, grid=grid)


_LARGEST = np.iinfo(np.int32).max, np.iinfo(np.int64).max


# -- shapes


@operator("Identity", "Dropout", moves=True, elementwise=True)
def _same(call: Call, x: Any, ratio: Any = None, training: Any = None) -> Any:
    tested = call.opset >= 7 or call.get("is_test", 0) or call.kind == "Identity"
    if not tested or (training is not None and plain(training).any()):
        raise Unsupported("dropout in training")
    if not any(call.node.output[1:]):
        return x
    if call.opset < 12:
        raise Unsupported("what a mask of dropout holds is not specified")
    return x, np.ones(x.shape, bool)


def _reshaped(call: Call, t: Array, dims: Sequence[int]) -> Array:
    kept = not call.get("allowzero", 0)
    return t.reshape([t.shape[place] if kept and dim == 0 else dim for place, dim in enumerate(dims)])


def as_matrix(t: Array, axis: int) -> Array:
    axis = axis + t.ndim if axis < 0 else axis
    return t.reshape(math.prod(t.shape[:axis]), math.prod(t.shape[axis:]))


_SHAPED: Mapping[str, tuple[str, Callable[[Call, Array, Any], Array]]] = {
    "Reshape": ("shape", _reshaped),
    "Flatten": ("axis", lambda _, t, axis: as_matrix(t, 1 if axis is None else axis)),
    "Transpose": ("perm", lambda _, t, perm: np.transpose(t, perm)),
    "Unsqueeze": ("axes", lambda _, t, axes: np.expand_dims(t, tuple(axes))),
    "Squeeze": ("axes", lambda _, t, axes: np.squeeze(t, None if axes is None else tuple(axes))),
    "Expand": ("shape", lambda _, t, shape: np.broadcast_to(t, np.broadcast_shapes(t.shape, tuple(shape)))),
}
"""Operators that change a tensor's shape, each with the attribute or operand that specifies it."""


@operator(*_SHAPED, moves=True)
def _shaped(call: Call, x: Any, operand: Any = None) -> Any:
    name, function = _SHAPED[call.kind]
    stated = call.integers(name, operand)
    return call.move(x, lambda t: function(call, t, stated))


@operator("Shape", "Size", moves=True)
def _shape(call: Call, x: Any) -> Any:
    size = math.prod(x.shape)
    return np.array(size if call.kind == "Size" else x.shape[slice(call.get("start", 0), call.get("end"))], np.int64)


# -- parts


@operator("Slice", moves=True, table=True)
def _slice(call: Call, x: Any, starts: Any = None, ends: Any = None, axes: Any = None, steps: Any = None) -> Any:
    begin = call.integers("starts", starts)
    places, strides = call.integers("axes", axes, range(len(begin))), call.integers("steps", steps, [1] * len(begin))
    cut = [slice(None)] * x.ndim
    for start, stop, axis, step in zip(begin, call.integers("ends", ends), places, strides, strict=True):
        # As in Python, except that a backward slice from before the first entry starts at the first, and that the
        # runtime takes the largest numbers for its end.
        back, end = step < 0, None if step < 0 and stop in _LARGEST else stop
        cut[axis] = slice(max(start, -x.shape[axis]) if back else start, end, step)
        far = abs(step) != 1 or max(abs(start), abs(stop) if abs(stop) < _LARGEST[0] else 0) > x.shape[axis]
        if isinstance(call.f, Field) and (far or {*call.node.input[4:]} - call.evaluator.fixed - {""}):
            call.evaluator.cut.add(call.node.output[0])
    return call.move(x, lambda t: t[tuple(cut)])


@operator("Gather", moves=True, table=True)
def _gather(call: Call, x: Any, index: Any) -> Any:
    axis = call.get("axis", 0)
    x, places = _rows_taken(call, x, np.arange(x.shape[axis])[plain(index)])  # an index out of range is an error
    return call.move(x, lambda t: np.take(t, places, axis=axis))


@operator("GatherND", "GatherElements", moves=True, table=True)
def _gather_entries(call: Call, x: Any, index: Any) -> Any:
    return _moved(call, *_rows_taken(call, x, plain(index)))


def _rows_taken(call: Call, table: Any, index: Array) -> tuple[Any, Array]:
    """Entries that inputs choose along an axis of a table, blended, and an index into these; else both operands."""
    if not call.decided or not call.evaluator.takes_rows(call, [table, index]):
        return table, index
    axis = call.get("axis", 0)
    taken, places = np.unique(np.arange(table.shape[axis])[index], return_inverse=True)
    if axis:
        table = call.move(table, lambda t: np.moveaxis(t, axis, 0))
    rows = call.evaluator.rows(call, table, taken)
    return call.move(rows, lambda t: np.moveaxis(t, 0, axis)), places.reshape(index.shape)


@operator("Split", moves=True, table=True)
def _split(call: Call, x: Any, split: Any = None) -> Any:
    axis, sizes = call.get("axis", 0), call.integers("split", split)
    if sizes is None:
        size, count = x.shape[axis], call.get("num_outputs", len(call.node.output))
        chunk = -(-size // count)
        sizes = [max(min(chunk, size - chunk * place), 0) for place in range(count)]
    return tuple(parts(call, x, sizes, axis))


def parts(call: Call, x: Any, sizes: Sequence[int], axis: int) -> list[Any]:
    if sum(sizes) != x.shape[axis]:
        raise ValueError(f"parts of {list(sizes)} entries do not fill an axis of {x.shape[axis]}")
    before, ends = (slice(None),) * (axis % x.ndim), np.cumsum(sizes).tolist()
    cuts = [(*before, slice(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    return [call.move(x, itemgetter(cut)) for cut in cuts]


# -- several operands


@operator("Concat", moves=True)
def _concat(call: Call, *operands: Any) -> Any:
    axis = call.get("axis", 1)
    return _moved_together(call, lambda *tensors: np.concatenate(tensors, axis), *operands, scalar=False)


@operator("Where", moves=True, elementwise=True)
def where(call: Call, condition: Any, x: Any, y: Any) -> Any:
    chosen = condition.entries != 0 if isinstance(condition, Value) else condition
    return _moved_together(call, lambda one, two: np.asarray(np.where(chosen, one, two)), x, y)


@operator("OneHot", moves=True)
def _one_hot(call: Call, index: Any, depth: Any, values: Any) -> Any:
    size, index = integers(depth)[0], plain(index)
    axis = call.get("axis", -1)
    if call.decided and is_float(values):  # as rows of a table
        off, on = (call.lift(values[place]).entries for place in (0, 1))
        hot = call.evaluator.rows(call, np.eye(size, dtype=np.float32), index).entries
        made = call.f.add(off, call.f.mul(hot, call.f.sub(on, off)))
        return Value(np.moveaxis(made, -1, axis))
    index = np.where(index < 0, index + size, index)
    hot = np.moveaxis(index[..., None] == np.arange(size), -1, axis).astype(np.int64)
    return call.move(values, lambda t: t[hot])


# -- entries that the runtime's kernel moves

_MOVED: Mapping[str, Sequence[int]] = {
    "Pad": (0, 2), "TensorScatter": (0, 1), **dict.fromkeys(("Tile", "Trilu", "GatherElements", "GatherND"), (0,)),
    **dict.fromkeys(("Scatter", "ScatterElements", "ScatterND"), (0, 2)),
}  # fmt: skip
"""Operators, with the operands whose entries they move."""


@operator("Pad", "Tile", "Trilu", moves=True)
@operator("Scatter", "ScatterElements", "ScatterND", "TensorScatter")
def _moved(call: Call, *operands: Any) -> Any:
    """The kernel moves the numbers of entries, from 1 on; 0 is the number of what is filled in."""
    run = call.evaluator.program.kernels.run
    if not any(isinstance(each, Value) for each in operands):
        return run(call.node, operands)
    places = [place for place in _MOVED[call.kind] if place < len(operands) and operands[place] is not None]
    data, reduction = [operands[place] for place in places], call.text("reduction", "none")
    node = helper.make_node(call.kind, call.node.input, call.node.output)
    node.attribute.extend(each for each in call.node.attribute if each.name != "value")

    def kernel(*tensors: Array) -> Array:
        moved = dict(zip(places, tensors, strict=True))
        given = (moved.get(place, each) for place, each in enumerate(operands))
        return np.asarray(run(node, [None if each is None else plain(each) for each in given])[0])

    if reduction == "add":
        made = _moved_together(call, kernel, *data, scalar=False)
        return Value(call.f.reduced(made.entries), made.masks, whole=made.whole)
    if reduction != "none":
        raise Unsupported(f"a scattered {reduction}")
    ends = np.cumsum([each.size for each in data])
    counted = np.split(np.arange(1.0, ends[-1] + 1), ends[:-1])
    numbers = kernel(*(part.reshape(each.shape) for part, each in zip(counted, data, strict=True))).astype(int)
    filler, moved = call.get("value", 0), lambda *tensors: np.concatenate([*map(np.ravel, tensors)])[numbers]
    return _moved_together(call, moved, np.asarray(filler), *data, scalar=False)


# -- types


@operator(*CASTS, always=True, elementwise=True)
def _cast(call: Call, x: Any, like: Any = None) -> Any:
    dtype: Any = np.dtype(np.int64 if isinstance(like, Value) and like.whole else np.float32)
    if not isinstance(like, Value):
        dtype = helper.tensor_dtype_to_np_dtype(call.get("to")) if like is None else like.dtype
    real = dtype.kind == "f" or "float" in dtype.name
    if dtype.kind in "OUS" or dtype.name.startswith(("float8", "float6_", "float4")):
        if isinstance(x, Value):
            raise Unsupported(f"a conversion to {dtype.name}")
        return call.evaluator.program.kernels.run(call.node, [x])
    if not isinstance(x, Value) and not (real and not call.f.reads_masks and call.evaluator.in_reals):
        return x if real and is_float(x) else x.astype(dtype)
    x = call.lift(x)
    if dtype.kind == "b":
        holds = ~call.f.vanishes(x.entries)
        return holds if x.masks is None else holds | (call.f.masks_decide(x.masks) != 0)
    if real:
        return Value(x.entries, x.masks, x.origin, grid=x.grid)
    if not call.f.reads_masks and not x.grid:
        return np.trunc(x.entries).astype(dtype)
    if x.whole or (x.origin and x.origin[0] == "rounded"):
        return Value(x.entries, x.masks, whole=True, grid=x.grid)
    return Value(call.f.odd("truncated", x.entries), whole=True)


# -- sequences


@operator("SequenceConstruct", "SequenceEmpty", moves=True)
def _sequence(call: Call, *operands: Any) -> Any:
    return list(operands)


@operator("SequenceInsert", moves=True)
def _sequence_insert(call: Call, sequence: list[Any], x: Any, position: Any = None) -> Any:
    place = len(sequence) if position is None else integers(position)[0]  # counted from the end as in Python
    return [*sequence[:place], x, *sequence[place:]]


@operator("SequenceAt", moves=True)
def _sequence_at(call: Call, sequence: list[Any], position: Any) -> Any:
    if call.decided and call.node.input[1] in call.evaluator.decided and isinstance(call.f, Field):
        raise Unsupported("an input chooses what it takes")
    return sequence[integers(position)[0]]


@operator("SplitToSequence", moves=True)
def _split_to_sequence(call: Call, x: Any, split: Any = None) -> Any:
    axis, sizes = call.get("axis", 0), [1] if split is None else integers(split)
    if not np.ndim(split):
        sizes = [min(sizes[0], x.shape[axis] - start) for start in range(0, x.shape[axis], sizes[0])]
    made = parts(call, x, sizes, axis)
    apart = split is None and not call.get("keepdims", 1)
    return [call.move(each, lambda t: np.squeeze(t, axis)) for each in made] if apart else made


@operator("ConcatFromSequence", moves=True)
def _concat_from_sequence(call: Call, sequence: list[Any]) -> Any:
    axis = call.get("axis")
    if call.get("new_axis", 0):
        sequence = [call.move(each, lambda t: np.expand_dims(t, axis)) for each in sequence]
    return call.apply("Concat", *sequence, axis=axis)


# -- sizes that operands decide


@operator("ConstantOfShape", always=True)
def _constant_of_shape(call: Call, shape: Any) -> Any:
    value = numpy_helper.to_array(call.get("value")).reshape(()) if call.get("value") else np.float32(0)
    return np.broadcast_to(value, integers(shape))


@operator("NonZero", "Unique", "Range", always=True)
def _sized_by_data(call: Call, *operands: Any) -> Any:
    if any(isinstance(x, Value) for x in operands) and call.f.reads_masks:
        raise Unsupported("data decides the shape of its output")
    return call.evaluator.program.kernels.run(call.node, [x.entries if isinstance(x, Value) else x for x in operands])
