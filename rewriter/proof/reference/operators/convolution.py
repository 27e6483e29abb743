"""Convolution and average pooling in numpy, one operation per tap of the kernel.

Source: ONNX's Conv and AveragePool, opset 1 to 22. Arrays are [batch, channels, *spatial], kernels
[outputs, inputs / group, *taps].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rewriter.arrays import Array


@dataclass(frozen=True)
class _Taps:
    """The positions of a kernel's taps on its input."""

    kernel: tuple[int, ...]
    strides: Sequence[int]
    dilations: Sequence[int]

    @classmethod
    def of(cls, attributes: Mapping[str, Any], kernel: Sequence[int]) -> _Taps:
        ones = (1,) * len(kernel)
        strides, dilations = (attributes.get(name) or ones for name in ("strides", "dilations"))
        return cls(tuple(kernel), strides, dilations)

    @property
    def reach(self) -> list[int]:
        """How many entries the kernel spans, axis by axis."""
        return [(size - 1) * step + 1 for size, step in zip(self.kernel, self.dilations, strict=True)]

    def places(self, sizes: Sequence[int]) -> Iterator[tuple[Any, Any]]:
        """Indices of each tap, and of the entries of a padded array that it meets, `sizes` along each axis."""
        for tap in np.ndindex(*self.kernel):
            first = [index * step for index, step in zip(tap, self.dilations, strict=True)]
            met = [
                slice(start, start + (size - 1) * stride + 1, stride)
                for start, size, stride in zip(first, sizes, self.strides, strict=True)
            ]
            yield (..., *tap), (..., *met)


def conv(attributes: Mapping[str, Any], x: Array, weight: Array, bias: Array | None = None) -> Array:
    """Convolution with groups, strides, dilations and padding of every kind."""
    taps, group = _Taps.of(attributes, weight.shape[2:]), int(attributes.get("group", 1))
    x = np.pad(x, ((0, 0), (0, 0), *_pads(attributes, x.shape[2:], taps)))
    sizes = [(n - r) // s + 1 for n, r, s in zip(x.shape[2:], taps.reach, taps.strides, strict=True)]
    grouped = x.reshape(x.shape[0], group, -1, *x.shape[2:])
    kernels = weight.reshape(group, -1, *weight.shape[1:])
    y = np.zeros((x.shape[0], group, kernels.shape[1], int(np.prod(sizes))))
    for tap, place in taps.places(sizes):
        y += kernels[tap] @ grouped[place].reshape(*grouped.shape[:3], -1)
    return _with_bias(y.reshape(x.shape[0], weight.shape[0], *sizes), bias)


def average_pool(attributes: Mapping[str, Any], x: Array) -> Array:
    """AveragePool: sums over the window of a kernel, divided by the number of entries that count."""
    taps = _Taps.of(attributes, attributes["kernel_shape"])
    pads, inside = _pads(attributes, x.shape[2:], taps), np.ones(x.shape[2:])
    sizes, more = [], []
    for size, (low, high), reach, stride in zip(x.shape[2:], pads, taps.reach, taps.strides, strict=True):
        steps = (size + low + high - reach) / stride
        out = int(np.ceil(steps) if attributes.get("ceil_mode") else np.floor(steps)) + 1
        # A kernel that starts behind the input is none.
        out -= 1 if attributes.get("ceil_mode") and (out - 1) * stride >= size + low else 0
        sizes.append(out)
        more.append((0, max((out - 1) * stride + reach - size - low - high, 0)))
    counted = np.pad(inside, pads, constant_values=float(bool(attributes.get("count_include_pad"))))
    x, counted = np.pad(np.pad(x, [(0, 0), (0, 0), *pads]), [(0, 0), (0, 0), *more]), np.pad(counted, more)
    places = [place for _, place in taps.places(sizes)]
    return np.asarray(sum(x[place] for place in places) / sum(counted[place] for place in places))


def _with_bias(y: Array, bias: Array | None) -> Array:
    return y if bias is None else y + bias.reshape(1, -1, *(1,) * (y.ndim - 2))


def _mode(attributes: Mapping[str, Any]) -> str:
    mode = attributes.get("auto_pad", b"NOTSET")
    return mode.decode() if isinstance(mode, bytes) else str(mode)


def _stated_pads(attributes: Mapping[str, Any], rank: int) -> list[tuple[int, int]]:
    pads = (attributes.get("pads") if _mode(attributes) == "NOTSET" else None) or (0,) * (2 * rank)
    return [(int(pads[axis]), int(pads[axis + rank])) for axis in range(rank)]


def _halves(total: int, *, more_first: bool) -> tuple[int, int]:
    return (total - total // 2, total // 2) if more_first else (total // 2, total - total // 2)


def _pads(attributes: Mapping[str, Any], sizes: Sequence[int], taps: _Taps) -> list[tuple[int, int]]:
    mode = _mode(attributes)
    if mode in {"NOTSET", "VALID"}:
        return _stated_pads(attributes, len(sizes))
    totals = [
        max((-(-size // step) - 1) * step + reach - size, 0)
        for size, reach, step in zip(sizes, taps.reach, taps.strides, strict=True)
    ]
    return [_halves(total, more_first=mode == "SAME_LOWER") for total in totals]
