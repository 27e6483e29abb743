"""How an operator is called, and what those do that only make, move or pick numbers: see `tests.oracle_operators`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Outputs = Array | tuple[Array, ...]


@dataclass(frozen=True)
class Call:
    """How an operator is called: its attributes, the opset of its domain, and how many outputs are wanted."""

    attributes: Mapping[str, Any]
    opset: int
    outputs: int

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute. Defaults that are floats are float32, as those that a model states are."""
        return self.attributes.get(name, float(np.float32(default)) if isinstance(default, float) else default)

    def axes(self, given: Array | None) -> tuple[int, ...] | None:
        """`axes`, an attribute in older opsets and an input in newer ones; None if stated in neither way."""
        stated = self.get("axes") if given is None else given
        return None if stated is None else tuple(int(axis) for axis in np.ravel(stated))


def widened(array: Array) -> Array:
    """Floats as float64, anything else as it is. bfloat16 is no float to numpy."""
    return array if array.dtype.kind in "biu" else array.astype(np.float64)


def _constant(call: Call) -> Array:
    ((name, value),) = call.attributes.items()
    return widened(np.asarray(value, np.int64 if name in ("value_int", "value_ints") else None))


def _constant_of_shape(call: Call, shape: Array) -> Array:
    return np.full(tuple(shape), *widened(np.asarray(call.get("value", [0.0]))))


def _expand(call: Call, x: Array, shape: Array) -> Array:
    return np.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(shape)))


def _flatten(call: Call, x: Array) -> Array:
    axis = call.get("axis", 1)
    return x.reshape(math.prod(x.shape[:axis]), -1)


def _gather(call: Call, x: Array, indices: Array) -> Array:
    return np.take(x, indices, axis=call.get("axis", 0))


def _gather_nd(call: Call, x: Array, indices: Array) -> Array:
    """The last axis of `indices` is a place in `x`, whose first `batch_dims` axes go along with those of `indices`."""
    batch = call.get("batch_dims", 0)
    lead = x.shape[:batch]
    parts = [x[at][tuple(np.moveaxis(indices[at], -1, 0))] for at in np.ndindex(*lead)]
    return np.stack(parts).reshape(lead + parts[0].shape) if parts else np.zeros(lead)


def _pad(
    call: Call, x: Array, given: Array | None = None, fill: Array | None = None, axes: Array | None = None
) -> Array:
    pads = np.asarray(call.get("pads", given)).reshape(2, -1)
    widths = np.zeros((x.ndim, 2), np.int64)
    widths[range(x.ndim) if axes is None else list(axes)] = pads.T
    if call.get("mode", "constant") != "constant" or pads.min(initial=0) < 0:
        raise NotImplementedError("Pad other than with a constant, outwards")
    value = call.get("value", 0.0) if fill is None or not fill.size else fill.item()
    return np.pad(x, widths, constant_values=np.asarray(value, x.dtype))


def _range(call: Call, start: Array, limit: Array, delta: Array) -> Array:
    count = max(math.ceil((limit.item() - start.item()) / delta.item()), 0)
    return np.asarray(start + np.arange(count) * delta).astype(start.dtype)


def _reshape(call: Call, x: Array, shape: Array) -> Array:
    kept = [x.shape[axis] if size == 0 and not call.get("allowzero", 0) else size for axis, size in enumerate(shape)]
    return x.reshape(kept)


def _shape(call: Call, x: Array) -> Array:
    return np.asarray(x.shape[slice(call.get("start"), call.get("end"))], np.int64)


def _slice(call: Call, x: Array, *given: Array) -> Array:
    """Bounds beyond the ends and negative ones mean what they do in Python."""
    stated: list[Any] = list(given) if given else [call.get(name) for name in ("starts", "ends", "axes")]
    starts, ends, axes, steps = (*stated, None, None)[:4]
    along = range(len(starts)) if axes is None else axes
    by = [1] * len(starts) if steps is None else steps
    cut = [slice(None)] * x.ndim
    for axis, start, end, step in zip(along, starts, ends, by, strict=True):
        cut[axis] = slice(int(start), int(end), int(step))
    return x[tuple(cut)]


def _split(call: Call, x: Array, sizes: Array | None = None) -> tuple[Array, ...]:
    axis = call.get("axis", 0)
    stated = call.get("split") if sizes is None else sizes
    if stated is None:  # equal parts; the last is smaller where that cannot be
        each = -(-x.shape[axis] // call.outputs)
        stated = [each] * call.outputs
    return tuple(np.split(x, np.cumsum(stated)[:-1], axis=axis))


def _squeeze(call: Call, x: Array, axes: Array | None = None) -> Array:
    return np.squeeze(x, call.axes(axes))


def _transpose(call: Call, x: Array) -> Array:
    return np.transpose(x, call.get("perm"))


def _unsqueeze(call: Call, x: Array, axes: Array | None = None) -> Array:
    return np.expand_dims(x, call.axes(axes) or ())


SHAPES: Mapping[str, Callable[..., Outputs]] = {
    "Concat": lambda call, *xs: np.concatenate(xs, axis=call.get("axis")),
    "Constant": _constant,
    "ConstantOfShape": _constant_of_shape,
    "Expand": _expand,
    "Flatten": _flatten,
    "Gather": _gather,
    "GatherElements": lambda call, x, indices: np.take_along_axis(x, indices, call.get("axis", 0)),
    "GatherND": _gather_nd,
    "Pad": _pad,
    "Range": _range,
    "Reshape": _reshape,
    "Shape": _shape,
    "Slice": _slice,
    "Split": _split,
    "Squeeze": _squeeze,
    "Tile": lambda _, x, repeats: np.tile(x, repeats),
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
"""Operators, all with attributes, which are handed over first."""
