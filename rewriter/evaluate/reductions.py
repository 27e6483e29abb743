"""Rows of operators that combine entries along axes: reductions, softmax, order, norms."""

import functools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from onnx import helper

from rewriter.arrays import Array
from rewriter.evaluate.arithmetic import Field, Unsupported, Value, integers, plain
from rewriter.evaluate.moves import as_matrix, fully_masked, masks_of
from rewriter.evaluate.table import Call, operator

# -- reductions


def axes_of(call: Call, x: Value, axes: Any) -> tuple[int, ...]:
    """The axes that a reduction is over, counted from the front."""
    stated = call.integers("axes", axes)
    if not stated:
        return () if call.get("noop_with_empty_axes", 0) else tuple(range(x.ndim))
    return tuple(sorted(axis % x.ndim for axis in stated))


def flat(t: Array, axes: Sequence[int]) -> Array:
    """Axes as one, the last."""
    kept = [size for place, size in enumerate(t.shape) if place not in axes]
    count = math.prod(t.shape[axis] for axis in axes)
    return np.moveaxis(t, axes, range(-len(axes), 0)).reshape(*kept, count)


@operator("ReduceSum", "ReduceMean", "ReduceSumSquare", "ReduceL1", "ReduceL2", "ReduceLogSum")
def _reduced_sum(call: Call, x: Value, axes: Any = None) -> Any:
    f, kind, places, keep = call.f, call.kind, axes_of(call, x, axes), bool(call.get("keepdims", 1))
    entries = x.entries
    if kind in ("ReduceSumSquare", "ReduceL2"):
        entries = f.mul(entries, entries)
    if kind == "ReduceL1":
        entries = np.where(f.sign(entries) < 0, f.neg(entries), entries)
    total = f.total(entries, places, keepdims=keep)
    if kind == "ReduceMean":
        return call.typed(f.mul(total, f.rational(Fraction(1, math.prod(x.shape[axis] for axis in places)))), x)
    if kind == "ReduceL2":
        return call.typed(f.sqrt(total), x)
    exponentials = places and kind != "ReduceSumSquare" and x.origin and x.origin[0] == "exp"
    made = Value(total, origin=("sumexp", x.origin[1], places, keep) if exponentials else None, whole=x.whole)
    return call.typed(call.apply("Log", made).entries, x) if kind == "ReduceLogSum" else made


def _extreme(call: Call, x: Value) -> Any:
    order, largest = call.f.order(x.entries), call.kind == "ReduceMax"
    if x.masks is not None:  # the largest is one with the fewest masking constants, the smallest one with the most
        most = (x.masks.min if largest else x.masks.max)(-1, keepdims=True)
        call.f.note_near(x.masks - most)
        order = np.where(x.masks == most, order, order.dtype.type(0 if largest else 2**64 - 1))
    picked = (order.argmax if largest else order.argmin)(-1)[..., None]
    return call.move(x, lambda t: np.take_along_axis(t, picked, -1)[..., 0])


@operator("ReduceProd", "ReduceLogSumExp", "ReduceMax", "ReduceMin")
def _reduced(call: Call, x: Value, axes: Any = None) -> Any:
    places = axes_of(call, x, axes)
    rows = call.move(x, lambda t: flat(t, places))
    if call.kind != "ReduceLogSumExp" and isinstance(call.f, Field) and call.node.op_type == call.kind:
        entries = np.sort(np.where(masks_of(rows) > 0, -1 - np.arange(rows.shape[-1]), rows.entries), -1)
        many = max(rows.shape[-1] // 8, 1)  # equal ones, unlike those of the same token twice
        equal = entries == 0 if call.kind == "ReduceProd" else entries[..., many:] == entries[..., :-many]
        call.f.noted.joint |= bool(equal.any())
    if call.kind == "ReduceProd":
        one = np.ones(rows.shape[:-1], rows.entries.dtype)
        made = Value(functools.reduce(call.f.mul, np.moveaxis(rows.entries, -1, 0), one), whole=x.whole)
    elif call.kind == "ReduceLogSumExp":
        anchor, _, total = _exponentials(call, rows)
        made = call.typed(call.f.add(anchor, call.f.log(total))[..., 0], x)
    else:
        made = _extreme(call, rows)
    made = call.move(made, lambda t: np.expand_dims(t, places)) if call.get("keepdims", 1) else made
    made.origin = ("max", x) if call.kind == "ReduceMax" else None
    return made


@operator("GlobalAveragePool", "GlobalMaxPool")
def _pooled(call: Call, x: Value) -> Any:
    return call.apply("ReduceMean" if call.kind == "GlobalAveragePool" else "ReduceMax", x, axes=range(2, x.ndim))


@operator("CumSum")
def _cumulative(call: Call, x: Value, axis: Any) -> Any:
    (sums,) = call.evaluator.program.kernels.run(call.node, [x.entries, plain(axis)])
    return Value(call.f.reduced(sums), whole=x.whole)


# -- softmax


def _exponentials(call: Call, logits: Value) -> tuple[Array, Array, Array]:
    """Along the last axis: what is subtracted, the exponentials, and their sum.

    Of entries with masking constants, only the ones with the fewest in their row have a weight. In a fully masked row
    they have the same weight, since rounding leaves nothing of their scores.
    """
    f, entries, masks = call.f, logits.entries, logits.masks
    if masks is None:
        anchor = f.anchor(entries)
        weights = f.exp(f.sub(entries, anchor))
    else:
        chosen = masks.argmin(-1)[..., None]
        anchor, least = np.take_along_axis(entries, chosen, -1), np.take_along_axis(masks, chosen, -1)
        kept, weights = masks <= least, np.zeros_like(entries)
        below = f.sub(entries, anchor)
        f.note_masked(below, masks - least)
        weights[kept] = f.exp(np.where(fully_masked(least), 0, below)[kept])
    return anchor, weights, f.total(weights, -1, keepdims=True)


def softmax(call: Call, value: Value, axis: int = -1, *, log: bool = False) -> Value:
    f, logits = call.f, call.move(value, lambda t: np.moveaxis(t, axis, -1))
    anchor, weights, total = _exponentials(call, logits)
    masks = None if not log or logits.masks is None else logits.masks - logits.masks.min(-1, keepdims=True)
    made = f.sub(f.sub(logits.entries, anchor), f.log(total)) if log else f.mul(weights, f.inv(total))
    moved = call.move(Value(made, masks), lambda t: np.ascontiguousarray(np.moveaxis(t, -1, axis)))
    return Value(moved.entries, moved.masks, None if log else ("softmax", value, axis))


@operator("Softmax", "LogSoftmax")
def _softmax(call: Call, x: Value) -> Any:
    log = call.kind == "LogSoftmax"
    if call.opset >= 13:
        return softmax(call, x, call.get("axis", -1), log=log)
    made = softmax(call, call.move(x, lambda t: as_matrix(t, call.get("axis", 1))), log=log)
    masks = None if made.masks is None else made.masks.reshape(x.shape)
    return Value(made.entries.reshape(x.shape), masks, made.origin)


# -- order


@operator("ArgMax", "ArgMin", "TopK")
def _placed(call: Call, x: Value, *count: Any) -> Any:
    """Where the kernel places the ranks of entries; the first of equal entries comes first."""
    axis = call.get("axis", -1 if call.kind == "TopK" else 0)
    taken, order = integers(count[0])[0] if count else call.get("k", 1), call.f.order(x.entries)
    if isinstance(call.f, Field) and x.size:  # how often each entry is taken
        call.f.noted.coins[-1] = x.size / x.shape[axis] * taken / x.shape[axis], x.shape
    # Where numbers are often equal, the same ones are often taken.
    _, ranks = np.unique(order >> np.uint64(62) if call.rounded else order, return_inverse=True)
    node = helper.make_node(call.kind, call.node.input, [*call.node.output[:-1], "index"])  # which may be left out
    node.attribute.extend(call.node.attribute)
    given = [ranks.reshape(x.shape).astype(np.float64), *map(plain, count)]
    *_, index = call.evaluator.program.kernels.run(node, given)
    if call.kind != "TopK":
        return index
    index = index if call.get("sorted", 1) else np.sort(index, axis)  # of no order that another operator has
    return call.move(x, lambda t: np.take_along_axis(t, index, axis)), index


# -- norms


@operator("LayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization")
def _layer_norm(call: Call, x: Any, scale: Any = None, bias: Any = None) -> tuple[Value, ...]:
    """(x - mean) / sqrt(variance + epsilon) over the last axes; the mean, unless it is 0, and the inverse deviation."""
    f, made, centred = call.f, call.entries(x), call.kind == "LayerNormalization"
    axes = tuple(range(call.get("axis", -1) % x.ndim, x.ndim))
    count = f.rational(Fraction(1, math.prod(x.shape[axis] for axis in axes)))
    mean = f.mul(f.total(made, axes, keepdims=True), count)
    made = f.sub(made, mean) if centred else made
    variance = f.mul(f.total(f.mul(made, made), axes, keepdims=True), count)
    inverse = f.inv(f.sqrt(f.add(variance, call.number(call.get("epsilon", 1e-5)))))
    made = _scaled(call, f.mul(made, inverse), scale, bias)
    return (Value(made), *([Value(mean)] if centred else []), Value(inverse))


def _scaled(call: Call, entries: Array, scale: Any, bias: Any) -> Array:
    made = entries if scale is None else call.f.mul(entries, call.lift(scale, scalar=False).entries)
    return made if bias is None else call.f.add(made, call.lift(bias, scalar=False).entries)


def _by_channel(call: Call, x: Any, rank: int) -> Value:
    return Value(call.lift(x, scalar=False).entries.reshape(-1, *[1] * (rank - 2)))


@operator("GroupNormalization", "InstanceNormalization")
def _group_norm(call: Call, x: Any, scale: Any, bias: Any) -> Any:
    (n, channels, *_), groups = x.shape, call.get("num_groups", x.shape[1])
    grouped = Value(call.entries(x).reshape(n, groups, math.prod(x.shape[1:]) // groups))
    made = call.apply("LayerNormalization", grouped, epsilon=call.get("epsilon", 1e-5)).entries.reshape(x.shape)
    whole = (np.repeat(_by_channel(call, t, x.ndim).entries, channels // t.size, 0) for t in (scale, bias))
    return Value(_scaled(call, made, *map(Value, whole)))


@operator("BatchNormalization")
def _batch_norm(call: Call, x: Any, scale: Any, bias: Any, mean: Any, variance: Any) -> Any:
    tested = call.opset >= 7 or call.get("is_test", 0)
    if not tested or call.get("training_mode", 0) or any(call.node.output[1:]):
        raise Unsupported("batch normalisation in training")
    f, given = call.f, [scale, bias, mean, variance]
    if call.get("spatial", 1):  # before opset 9 there may be one for each entry instead
        given = [_by_channel(call, each, x.ndim) for each in given]
    scale, bias, mean, variance = (call.lift(each, scalar=False) for each in given)
    inverse = f.inv(f.sqrt(f.add(variance.entries, call.number(call.get("epsilon", 1e-5)))))
    return Value(_scaled(call, f.mul(f.sub(call.entries(x), mean.entries), inverse), scale, bias))
