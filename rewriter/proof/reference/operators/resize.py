"""Resize and Upsample in numpy: one matrix of weights per axis.

Source: the ONNX specifications, opset 7 to 19, and onnxruntime where they are vague (sizes are computed in float32,
like the scales; "align_corners" goes by the size of the output).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rewriter.arrays import Array


@dataclass(frozen=True)
class _Axis:
    """One axis: its size before and after, the scale, and the region of interest."""

    size: int
    out: int
    scale: float
    start: float
    end: float


@dataclass(frozen=True)
class _Style:
    """How coordinates become weights."""

    mode: str
    coordinates: str
    nearest: str
    cubic: float
    exclude: bool
    antialias: bool


def upsample(attributes: Mapping[str, Any], x: Array, scales: Array | None = None) -> Array:
    """Upsample of opset 7, whose scales are an attribute, and 9."""
    return resize(attributes, x, np.asarray(attributes["scales"] if scales is None else scales))


def resize(
    attributes: Mapping[str, Any], x: Array, roi: Array, scales: Array | None = None, sizes: Array | None = None
) -> Array:
    """Resize; with two operands that of opset 10, where the second one holds the scales."""
    stated = {name: value.decode() if isinstance(value, bytes) else value for name, value in attributes.items()}
    oldest = scales is None and sizes is None
    defaults = ("asymmetric", "simple") if oldest else ("half_pixel", "round_prefer_floor")
    style = _Style(
        mode=stated.get("mode", "nearest"),
        coordinates=stated.get("coordinate_transformation_mode", defaults[0]),
        nearest=stated.get("nearest_mode", defaults[1]),
        cubic=float(np.float32(stated.get("cubic_coeff_a", -0.75))),
        exclude=bool(stated.get("exclude_outside")),
        antialias=bool(stated.get("antialias")),
    )
    axes = [int(axis) % x.ndim for axis in stated.get("axes") or range(x.ndim)]
    plans = _plans(stated, [x.shape[axis] for axis in axes], roi, roi if oldest else scales, sizes)
    y, outside = np.asarray(x), np.zeros((1,) * x.ndim, np.bool_)
    for axis, plan in zip(axes, plans, strict=True):
        places = _places(plan, style)
        if plan.out != plan.size or plan.scale != 1 or style.coordinates == "tf_crop_and_resize":
            y = np.moveaxis(np.tensordot(_weights(plan, places, style), y, (1, axis)), 0, axis)
        beyond = (places < 0) | (places > plan.size - 1)
        outside = outside | beyond.reshape([-1 if each == axis else 1 for each in range(x.ndim)])
    if style.coordinates == "tf_crop_and_resize":
        y = np.where(outside, float(np.float32(stated.get("extrapolation_value", 0.0))), y)
    return np.asarray(y)


def _plans(
    stated: Mapping[str, Any], shape: Sequence[int], roi: Array | None, scales: Array | None, sizes: Array | None
) -> list[_Axis]:
    count = len(shape)
    crop = stated.get("coordinate_transformation_mode") == "tf_crop_and_resize" and roi is not None
    starts, ends = (roi[:count], roi[count:]) if crop and roi is not None else ([0.0] * count, [1.0] * count)
    if scales is not None and scales.size:
        narrow = scales.astype(np.float32)
        outs = [int(np.floor(scale * np.float32(size))) for scale, size in zip(narrow, shape, strict=True)]
        factors = [float(scale) for scale in narrow]
    else:
        outs = [int(size) for size in np.asarray(sizes)]
        factors = [out / size for out, size in zip(outs, shape, strict=True)]
        policy = stated.get("keep_aspect_ratio_policy", "stretch")
        if policy != "stretch":
            factors = [(min if policy == "not_larger" else max)(factors)] * count
            outs = [int(np.floor(factor * size + 0.5)) for factor, size in zip(factors, shape, strict=True)]
    return [
        _Axis(size, out, factor, float(start), float(end))
        for size, out, factor, start, end in zip(shape, outs, factors, starts, ends, strict=True)
    ]


def _places(axis: _Axis, style: _Style) -> Array:
    """The position of each output entry on the input."""
    i, last, many = np.arange(axis.out, dtype=np.float64), axis.size - 1, axis.out > 1
    halves = (i + 0.5) / axis.scale - 0.5
    shift = axis.size / 2 * (1 - axis.out / (axis.scale * axis.size))
    middle = (axis.start + axis.end) / 2 * last
    found: Mapping[str, Any] = {
        "half_pixel": halves,
        "half_pixel_symmetric": shift + halves,
        "pytorch_half_pixel": halves if many else 0 * i,
        "tf_half_pixel_for_nn": halves + 0.5,
        "asymmetric": i / axis.scale,
        "align_corners": i * last / max(axis.out - 1, 1),
        "tf_crop_and_resize": (
            axis.start * last + i * (axis.end - axis.start) * last / max(axis.out - 1, 1) if many else middle + 0 * i
        ),
    }
    return np.asarray(found[style.coordinates])


def _nearest(places: Array, axis: _Axis, rounding: str) -> Array:
    if rounding == "simple":
        rounding = "ceil" if axis.scale < 1 else "floor"
    return {
        "round_prefer_floor": np.ceil(places - 0.5),
        "round_prefer_ceil": np.floor(places + 0.5),
        "floor": np.floor(places),
        "ceil": np.ceil(places),
    }[rounding]


def _weights(axis: _Axis, places: Array, style: _Style) -> Array:
    """Interpolation weights [out, in] along an axis."""
    weights = np.zeros((axis.out, axis.size))
    rows = np.arange(axis.out)
    if style.mode == "nearest":
        columns = np.clip(_nearest(places, axis, style.nearest), 0, axis.size - 1).astype(np.int64)
        weights[rows, columns] = 1
        return weights
    # A filter is stretched where antialiasing asks for it; entries beyond the edge are the edge, or none.
    stretch = max(1 / axis.scale, 1.0) if style.antialias else 1.0
    half = int(np.ceil((2 if style.mode == "cubic" else 1) * stretch))
    base = np.floor(places).astype(np.int64)
    for offset in range(-half, half + 2):
        column = base + offset
        weight = _filter((column - places) / stretch, style)
        if style.exclude:
            weight = np.where((column >= 0) & (column < axis.size), weight, 0)
        np.add.at(weights, (rows, np.clip(column, 0, axis.size - 1)), weight)
    return np.asarray(weights / weights.sum(1, keepdims=True))


def _filter(distance: Array, style: _Style) -> Array:
    d = np.abs(distance)
    if style.mode == "linear":
        return np.asarray(np.maximum(1 - d, 0))
    a = style.cubic
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.asarray(np.where(d <= 1, near, np.where(d < 2, far, 0)))
