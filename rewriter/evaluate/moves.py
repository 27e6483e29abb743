"""Rows of operators that move data: each entry of the output is an entry of an operand, or a constant."""
# ruff: noqa: ARG001 - every row is given its node

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from onnx import helper

from rewriter.arrays import Array
from rewriter.evaluate.arithmetic import Unsupported, Value, integers, is_float
from rewriter.evaluate.table import Call, operator


def masks_of(value: Value) -> Any:
    """How many masking constants each entry contains, broadcast to its shape."""
    return np.broadcast_to(0 if value.masks is None else value.masks, value.shape)


def plain(x: Any) -> Array:
    """An index, or another operand that data must not decide."""
    if isinstance(x, Value):
        raise Unsupported("data decides a shape or an index")
    return np.asarray(x)


def first(x: Any) -> int:
    """The element of a tensor of one element."""
    return integers(x)[0]


# -- shapes


@operator("Identity", "Optional", "OptionalGetElement", moves=True)
def _identity(call: Call, x: Any = None) -> Any:
    if x is None:
        raise Unsupported("an optional operand without an element")
    return x


@operator("OptionalHasElement", moves=True)
def _has_element(call: Call, x: Any = None) -> Any:
    return np.array(x is not None)


@operator("Dropout", moves=True)
def _dropout(call: Call, x: Any, ratio: Any = None, training: Any = None) -> Any:
    if training is not None and plain(training).any():
        raise Unsupported("dropout in training")
    outputs = call.node.output
    if len(outputs) < 2 or not outputs[1]:
        return x
    return x, np.ones(x.shape, bool if call.opset >= 7 else np.float32)


@operator("Reshape", moves=True)
def _reshape(call: Call, x: Any, shape: Any = None) -> Any:
    dims = integers(shape) if shape is not None else list(call.get("shape"))
    if not call.get("allowzero", 0):
        dims = [x.shape[place] if dim == 0 else dim for place, dim in enumerate(dims)]
    return call.move(x, lambda t: t.reshape(dims))


@operator("Flatten", moves=True)
def _flatten(call: Call, x: Any) -> Any:
    axis = call.get("axis", 1)
    axis = axis + x.ndim if axis < 0 else axis
    dims = math.prod(x.shape[:axis]), math.prod(x.shape[axis:])
    return call.move(x, lambda t: t.reshape(dims))


@operator("Transpose", moves=True)
def _transpose(call: Call, x: Any) -> Any:
    return call.move(x, lambda t: np.ascontiguousarray(np.transpose(t, call.get("perm"))))


@operator("Unsqueeze", moves=True)
def _unsqueeze(call: Call, x: Any, axes: Any = None) -> Any:
    axes = integers(axes) if axes is not None else call.get("axes")
    rank = x.ndim + len(axes)
    return call.move(x, lambda t: np.expand_dims(t, tuple(axis % rank for axis in axes)))


@operator("Squeeze", moves=True)
def _squeeze(call: Call, x: Any, axes: Any = None) -> Any:
    axes = integers(axes) if axes is not None else call.get("axes")
    return call.move(x, lambda t: np.squeeze(t, None if axes is None else tuple(axes)))


@operator("Expand", moves=True)
def _expand(call: Call, x: Any, shape: Any) -> Any:
    dims = np.broadcast_shapes(x.shape, tuple(integers(shape)))
    return call.move(x, lambda t: np.broadcast_to(t, dims))


@operator("Tile", moves=True)
def _tile(call: Call, x: Any, repeats: Any) -> Any:
    times = integers(repeats)
    return call.move(x, lambda t: np.tile(t, times))


@operator("Shape", moves=True)
def _shape(call: Call, x: Any) -> Any:
    return np.array(x.shape[slice(call.get("start", 0), call.get("end"))], np.int64)


@operator("Size", moves=True)
def _size(call: Call, x: Any) -> Any:
    return np.array(math.prod(x.shape), np.int64)


@operator("DepthToSpace", moves=True)
def _depth_to_space(call: Call, x: Any) -> Any:
    size, (n, channels, h, w) = call.get("blocksize"), x.shape
    kept = channels // size**2
    if call.text("mode", "DCR") == "DCR":
        split, order = (n, size, size, kept, h, w), (0, 3, 4, 1, 5, 2)
    else:
        split, order = (n, kept, size, size, h, w), (0, 1, 4, 2, 5, 3)
    return call.move(x, lambda t: t.reshape(split).transpose(order).reshape(n, kept, h * size, w * size))


@operator("SpaceToDepth", moves=True)
def _space_to_depth(call: Call, x: Any) -> Any:
    size, (n, channels, h, w) = call.get("blocksize"), x.shape
    split = n, channels, h // size, size, w // size, size
    dims = n, channels * size**2, h // size, w // size
    return call.move(x, lambda t: t.reshape(split).transpose(0, 3, 5, 1, 2, 4).reshape(dims))


# -- parts


def _clamped(start: int, end: int, step: int, size: int) -> slice:
    start, end = (each + size if each < 0 else each for each in (start, end))
    if step > 0:
        return slice(min(max(start, 0), size), min(max(end, 0), size), step)
    start, end = min(max(start, 0), size - 1), min(max(end, -1), size - 1)
    return slice(start, None if end < 0 else end, step)


@operator("Slice", moves=True)
def _slice(call: Call, x: Any, starts: Any = None, ends: Any = None, axes: Any = None, steps: Any = None) -> Any:
    first_ones = integers(starts) if starts is not None else call.get("starts")
    last_ones = integers(ends) if ends is not None else call.get("ends")
    places = integers(axes) if axes is not None else call.get("axes", range(len(first_ones)))
    strides = integers(steps) if steps is not None else [1] * len(first_ones)
    cut = [slice(None)] * x.ndim
    for start, end, axis, step in zip(first_ones, last_ones, places, strides, strict=True):
        cut[axis] = _clamped(start, end, step, x.shape[axis])
    return call.move(x, lambda t: t[tuple(cut)])


def _from_end(index: Any, size: int) -> Array:
    """Indices, with negative ones counted from the end. Raises IndexError."""
    index = plain(index)
    if index.size and (index.min() < -size or index.max() >= size):
        raise IndexError(f"an index of an axis of {size} entries is out of range")
    return np.asarray(np.where(index < 0, index + size, index))


@operator("Gather", moves=True)
def _gather(call: Call, x: Any, index: Any) -> Any:
    axis = call.get("axis", 0)
    places = _from_end(index, x.shape[axis])
    if call.decided and call.evaluator.takes_rows(call, [x, index]):
        return call.evaluator.rows(x, places)
    return call.move(x, lambda t: np.take(t, places, axis=axis))


@operator("GatherElements", moves=True)
def _gather_elements(call: Call, x: Any, index: Any) -> Any:
    axis = call.get("axis", 0) % x.ndim
    places = _from_end(index, x.shape[axis])
    cut = tuple(slice(None) if place == axis else slice(size) for place, size in enumerate(places.shape))
    return call.move(x, lambda t: np.take_along_axis(t[cut], places, axis))


@operator("GatherND", moves=True)
def _gather_nd(call: Call, x: Any, index: Any) -> Any:
    index = plain(index)
    batch = tuple(np.indices(index.shape[:-1])[: call.get("batch_dims", 0)])
    return call.move(x, lambda t: t[(*batch, *np.moveaxis(index, -1, 0))])


@operator("Split", moves=True)
def _split(call: Call, x: Any, split: Any = None) -> Any:
    axis, count = call.get("axis", 0), call.get("num_outputs", len(call.node.output))
    size = x.shape[axis]
    sizes = integers(split) if split is not None else call.get("split")
    if sizes is None:
        chunk = -(-size // count)
        sizes = [max(min(chunk, size - chunk * place), 0) for place in range(count)]
    return tuple(_parts(call, x, sizes, axis))


def _parts(call: Call, x: Any, sizes: Sequence[int], axis: int) -> list[Any]:
    """Consecutive parts of an axis."""
    if sum(sizes) != x.shape[axis]:
        raise ValueError(f"parts of {list(sizes)} entries do not fill an axis of {x.shape[axis]}")
    before, ends = (slice(None),) * (axis % x.ndim), np.cumsum(sizes).tolist()

    def part(size: int, end: int) -> Any:
        return call.move(x, lambda t: t[(*before, slice(end - size, end))])

    return [part(*each) for each in zip(sizes, ends, strict=True)]


@operator("Compress", moves=True)
def _compress(call: Call, x: Any, condition: Any) -> Any:
    taken = plain(condition)
    return call.move(x, lambda t: np.compress(taken, t, axis=call.get("axis")))


@operator("Trilu", moves=True)
def _trilu(call: Call, x: Any, k: Any = None) -> Any:
    diagonal, half = 0 if k is None else first(k), np.triu if call.get("upper", 1) else np.tril
    return call.move(x, lambda t: half(t, diagonal))


@operator("ReverseSequence", moves=True)
def _reverse_sequence(call: Call, x: Any, lengths: Any) -> Any:
    time, batch = call.get("time_axis", 0), call.get("batch_axis", 1)
    steps, ends = np.arange(x.shape[time])[:, None], plain(lengths)[None]
    source = np.where(steps < ends, ends - 1 - steps, steps)
    source = source if (time, batch) == (0, 1) else source.T
    source = source.reshape(*source.shape, *[1] * (x.ndim - 2))
    return call.move(x, lambda t: np.take_along_axis(t, source, time))


# -- several operands


@operator("Concat", moves=True)
def _concat(call: Call, *operands: Any) -> Any:
    return joined(call, operands, call.get("axis", 1))


def joined(call: Call, operands: Sequence[Any], axis: int) -> Any:
    """Concatenate tensors."""
    if not any(isinstance(each, Value) for each in operands):
        return np.concatenate(operands, axis)
    values = [call.lift(each, scalar=False) for each in operands]
    masks = None
    if any(each.masks is not None for each in values):
        masks = np.concatenate([masks_of(each) for each in values], axis)
    whole = all(each.whole for each in values)
    return Value(np.concatenate([each.entries for each in values], axis), masks, whole=whole, grid=_shared_grid(values))


def _shared_grid(values: Sequence[Value]) -> Any:
    """The grid of values that are on the same one."""
    grid = values[0].grid
    return grid if all(each.grid is grid or _equal(each.grid, grid) for each in values) else None


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except ValueError:  # grids that hold arrays
        return False


@operator("Where", moves=True)
def _where(call: Call, condition: Any, x: Any, y: Any) -> Any:
    chosen = condition.entries != 0 if isinstance(condition, Value) else condition
    if not isinstance(x, Value) and not isinstance(y, Value):
        return np.where(chosen, x, y)
    x, y = call.lift(x), call.lift(y)
    masks = None if x.masks is None and y.masks is None else np.where(chosen, *_masks_of_both(x, y))
    return Value(np.where(chosen, x.entries, y.entries), masks, whole=x.whole and y.whole, grid=_shared_grid([x, y]))


def _masks_of_both(x: Value, y: Value) -> tuple[Array, Array]:
    return masks_of(x), masks_of(y)


@operator("Pad", moves=True)
def _pad(call: Call, x: Any, pads: Any = None, value: Any = None, axes: Any = None) -> Any:
    widths = integers(pads) if pads is not None else call.get("pads", call.get("paddings"))
    places = integers(axes) if axes is not None else range(x.ndim)
    around = [(0, 0)] * x.ndim
    for place, axis in enumerate(places):
        around[axis] = widths[place], widths[place + len(places)]
    cut = tuple(slice(max(-a, 0), size - max(-b, 0)) for (a, b), size in zip(around, x.shape, strict=True))
    around = [(max(a, 0), max(b, 0)) for a, b in around]
    mode: Any = call.text("mode", "constant")
    if mode != "constant":
        return call.move(x, lambda t: np.pad(t[cut], around, mode=mode))
    fill = np.float32(call.get("value", 0.0)) if value is None else value
    if not isinstance(x, Value) and not isinstance(fill, Value):
        return np.pad(x[cut], around, constant_values=np.asarray(fill).item())
    x, fill = call.lift(x, scalar=False), call.lift(fill)
    masks = None
    if x.masks is not None or fill.masks is not None:
        masks = np.pad(masks_of(x)[cut], around, constant_values=masks_of(fill).item())
    grid = None if fill.entries.any() else x.grid  # 0 is on every grid
    return Value(np.pad(x.entries[cut], around, constant_values=fill.entries.item()), masks, whole=x.whole, grid=grid)


@operator("OneHot", moves=True)
def _one_hot(call: Call, index: Any, depth: Any, values: Any) -> Any:
    size, index = first(depth), plain(index)
    axis = call.get("axis", -1)
    if call.decided and is_float(values):  # as rows of a table
        off, on = (call.lift(values[place]).entries for place in (0, 1))
        hot = call.evaluator.rows(np.eye(size, dtype=np.float32), index).entries
        made = call.f.add(off, call.f.mul(hot, call.f.sub(on, off)))
        return Value(np.moveaxis(made, -1, axis))
    axis = axis + index.ndim + 1 if axis < 0 else axis
    shape = [size if place == axis else 1 for place in range(index.ndim + 1)]
    index = np.where(index < 0, index + size, index)
    hot = (np.expand_dims(index, axis) == np.arange(size).reshape(shape)).astype(np.int64)
    return call.move(values, lambda t: t[hot])


@operator("EyeLike")
def _eye_like(call: Call, x: Any) -> Any:
    rows, columns = x.shape
    dtype = helper.tensor_dtype_to_np_dtype(call.get("dtype", 1))
    return np.eye(rows, columns, call.get("k", 0)).astype(dtype)


@operator("Resize", "Upsample")
def _resize(call: Call, x: Value, *operands: Any) -> Any:
    """Axis after axis, by the weights with which the runtime's kernel combines entries of one axis."""
    if call.text("coordinate_transformation_mode") == "tf_crop_and_resize" or call.text(
        "keep_aspect_ratio_policy", "stretch"
    ) not in ("stretch", ""):
        raise Unsupported("a resize that crops, or keeps the ratio")
    axes = [axis % x.ndim for axis in call.get("axes", range(x.ndim))]
    for place, axis in enumerate(axes):
        weights = _weights_of_axis(call, x, list(operands), axis, place)
        if np.array_equal(weights, np.eye(*weights.shape)):
            continue
        source = weights.argmax(0)
        if np.array_equal(weights, np.eye(weights.shape[0])[:, source]):
            x = call.move(x, functools.partial(np.take, indices=source, axis=axis))
        else:
            x = Value(np.moveaxis(call.f.matmul(Value(np.moveaxis(x.entries, axis, -1)), weights), -1, axis))
    return x


def _weights_of_axis(call: Call, x: Value, operands: list[Any], axis: int, place: int) -> Array:
    """Weights of entries (rows) in what a resize makes of an axis (columns)."""
    size, units = x.shape[axis], 1 if axis == 0 else 0
    shape = [size if each in (axis, units) else 1 for each in range(x.ndim)]
    axes = [each % x.ndim for each in call.get("axes", range(x.ndim))]
    for number, operand in enumerate(operands):
        if operand is None or not np.size(operand) or (call.kind == "Resize" and call.opset > 10 and number == 0):
            continue  # absent, or the region of interest, which only cropping reads
        other = 1.0 if is_float(operand) else np.array([shape[each] for each in axes])
        operands[number] = np.where(np.arange(len(axes)) == place, plain(operand), other).astype(operand.dtype)
    identity = np.eye(size, dtype=np.float32).reshape(shape)
    made = call.evaluator.program.kernels.run(call.node, [identity, *operands])[0]
    rows = np.moveaxis(made, (units, axis), (0, 1))
    return np.asarray(rows.reshape(size, rows.shape[1], -1)[..., 0])


# -- scattering


@operator("ScatterElements", "Scatter")
def _scatter_elements(call: Call, x: Any, index: Any, updates: Any) -> Any:
    axis = call.get("axis", 0) % x.ndim
    places = np.indices(plain(index).shape)
    places[axis] = _from_end(index, x.shape[axis])
    return _scattered(call, x, list(places), updates)


@operator("ScatterND")
def _scatter_nd(call: Call, x: Any, index: Any, updates: Any) -> Any:
    places = np.moveaxis(plain(index), -1, 0)
    return _scattered(call, x, [_from_end(each, size) for each, size in zip(places, x.shape, strict=False)], updates)


@operator("TensorScatter")
def _tensor_scatter(call: Call, x: Any, updates: Any, starts: Any = None) -> Any:
    axis = call.get("axis", -2) % x.ndim
    places = np.indices(updates.shape)
    if starts is not None:
        places[axis] += plain(starts)[places[0]]
    if call.text("mode", "linear") == "circular":
        places[axis] %= x.shape[axis]
    return _scattered(call, x, list(places), updates)


@operator("Col2Im")
def _col2im(call: Call, x: Any, image: Any, block: Any) -> Any:
    image, block = integers(image), integers(block)
    rank = len(image)
    pads, strides, dilations = (
        call.get("pads", [0] * 2 * rank),
        *(call.get(name, [1] * rank) for name in ("strides", "dilations")),
    )
    n, channels = x.shape[0], x.shape[1] // math.prod(block)
    spans = [size + pads[i] + pads[i + rank] for i, size in enumerate(image)]
    counts = [(spans[i] - dilations[i] * (block[i] - 1) - 1) // strides[i] + 1 for i in range(rank)]
    parts = call.lift(x).entries.reshape(n, channels, *block, *counts)
    at = np.indices(parts.shape)
    places = [*at[:2], *(at[2 + i] * dilations[i] + at[2 + rank + i] * strides[i] for i in range(rank))]
    made = _put(np.zeros_like(parts, shape=(n, channels, *spans)), places, parts, call.f.add)
    cut = tuple(slice(pads[i], pads[i] + size) for i, size in enumerate(image))
    return Value(made[(slice(None), slice(None), *cut)])


def _scattered(call: Call, x: Any, places: Sequence[Array], updates: Any) -> Value:
    """x, where updates are written at, or combined with, some entries of its first axes."""
    x, updates, f = call.lift(x, scalar=False), call.lift(updates, scalar=False), call.f
    reduction, masks = call.text("reduction", "none"), None
    combined = {"none": None, "add": f.add, "mul": f.mul, "max": f.maximum, "min": f.minimum}[reduction]
    if (x.masks is not None or updates.masks is not None) and reduction in ("none", "add"):
        masks = _put(masks_of(x), places, masks_of(updates), None if reduction == "none" else np.add)
    entries = _put(x.entries, places, updates.entries, combined)
    return Value(entries, masks, whole=x.whole and updates.whole)


def _put(t: Array, places: Sequence[Array], updates: Array, combined: Callable[[Array, Array], Array] | None) -> Array:
    """A copy of t, with updates at places of its first axes, or combined with what is there."""
    lead = t.shape[: len(places)]
    rows = np.ravel_multi_index(tuple(places), lead).reshape(-1)
    made = np.array(t).reshape(math.prod(lead), *t.shape[len(places) :])
    updates = updates.reshape(rows.size, *made.shape[1:])
    if combined is None:
        made[rows] = updates
    else:
        for taken in _rounds(rows):
            made[rows[taken]] = combined(made[rows[taken]], updates[taken])
    return made.reshape(t.shape)


def _rounds(rows: Array) -> list[Array]:
    """Positions of indices, in rounds in which no index occurs twice."""
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    starts = np.searchsorted(ordered, ordered)
    turn = np.arange(rows.size) - starts
    return [order[turn == number] for number in range(turn.max(initial=-1) + 1)]


# -- types


@operator("Cast")
def _cast(call: Call, x: Any) -> Any:
    return _as_type(call, x, helper.tensor_dtype_to_np_dtype(call.get("to")))


@operator("CastLike")
def _cast_like(call: Call, x: Any, like: Any) -> Any:
    if isinstance(x, Value):
        return _as_type(call, x, np.dtype(np.float32) if isinstance(like, Value) else like.dtype)
    return x if is_float(x) else x.astype(np.float32)


def _as_type(call: Call, x: Value, dtype: Any) -> Any:
    if dtype.kind == "b":
        return ~call.f.vanishes(x.entries) | (masks_of(x) > 0)
    if dtype.kind in "OUS" or dtype.name.startswith(("float8", "float6_", "float4")):
        raise Unsupported(f"a conversion to {dtype.name}")
    if dtype.kind == "f" or "float" in dtype.name:
        return Value(x.entries, x.masks, x.origin, grid=x.grid)
    if x.whole or (x.origin and x.origin[0] == "rounded"):
        return Value(x.entries, x.masks, whole=True, grid=x.grid)
    return Value(call.f.odd("truncated", x.entries), whole=True)


# -- sequences


@operator("SequenceConstruct", moves=True)
def _sequence(call: Call, *operands: Any) -> Any:
    return list(operands)


@operator("SequenceEmpty", moves=True)
def _sequence_empty(call: Call) -> Any:
    return []


@operator("SequenceInsert", moves=True)
def _sequence_insert(call: Call, sequence: list[Any], x: Any, position: Any = None) -> Any:
    place = len(sequence) if position is None else first(position)
    place = place + len(sequence) if place < 0 else place
    return [*sequence[:place], x, *sequence[place:]]


@operator("SequenceErase", moves=True)
def _sequence_erase(call: Call, sequence: list[Any], position: Any = None) -> Any:
    place = range(len(sequence))[-1 if position is None else first(position)]
    return [*sequence[:place], *sequence[place + 1 :]]


@operator("SequenceAt", moves=True)
def _sequence_at(call: Call, sequence: list[Any], position: Any) -> Any:
    return sequence[first(position)]


@operator("SequenceLength", moves=True)
def _sequence_length(call: Call, sequence: list[Any]) -> Any:
    return np.array(len(sequence), np.int64)


@operator("SplitToSequence", moves=True)
def _split_to_sequence(call: Call, x: Any, split: Any = None) -> Any:
    axis = call.get("axis", 0)
    size = x.shape[axis]
    if split is None:
        parts = _parts(call, x, [1] * size, axis)
        return parts if call.get("keepdims", 1) else [call.move(each, lambda t: np.squeeze(t, axis)) for each in parts]
    sizes = integers(split)
    if not np.ndim(split):
        sizes = [min(sizes[0], size - start) for start in range(0, size, sizes[0])]
    return _parts(call, x, sizes, axis)


@operator("ConcatFromSequence", moves=True)
def _concat_from_sequence(call: Call, sequence: list[Any]) -> Any:
    axis = call.get("axis")
    if call.get("new_axis", 0):
        sequence = [call.move(each, lambda t: np.expand_dims(t, axis)) for each in sequence]
    return joined(call, sequence, axis)


@operator("NonZero", "Unique", "ConstantOfShape", "Range")
def _sized_by_data(call: Call, *operands: Any) -> Any:
    raise Unsupported("data decides the shape of its output")
