"""Line charts as SVG, written by hand: small, reproducible byte for byte, and without dependencies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_WIDTH, _HEIGHT = 300, 190
_LEFT, _TOP, _GAP, _BOTTOM = 46, 30, 56, 54
_PER_ROW = 3
_COLOURS = (
    "#1b6ca8",
    "#d1495b",
    "#66a182",
    "#edae49",
    "#8d6a9f",
    "#00798c",
    "#a44a3f",
    "#5b8e7d",
    "#bc4b51",
    "#7a7a7a",
)


@dataclass(frozen=True)
class Curve:
    """One line: its points, its label in the legend (none if empty), and whether it is dashed."""

    x: Array
    y: Array
    name: str = ""
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """One chart; on a logarithmic axis, values at or below `low` are drawn on the lower edge."""

    title: str
    curves: tuple[Curve, ...]
    logarithmic: bool = False
    low: float | None = None
    high: float | None = None


def drawing(panels: Sequence[Panel], label: str) -> str:
    """The SVG of several panels side by side."""
    width = _LEFT + len(panels) * (_WIDTH + _GAP) - _GAP + 12
    height = _TOP + _HEIGHT + _BOTTOM
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="11" role="img" aria-label="{escape(label)}">'
    )
    parts = [head, f'<rect width="{width}" height="{height}" fill="#ffffff"/>']
    for number, panel in enumerate(panels):
        parts += _panel(panel, _LEFT + number * (_WIDTH + _GAP))
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel, left: float) -> list[str]:
    low, high = _range(panel)
    xs = np.concatenate([curve.x for curve in panel.curves])
    start, stop = float(xs.min()), float(xs.max())
    parts = [f'<text x="{left}" y="{_TOP - 12}" font-weight="bold" fill="#222">{escape(panel.title)}</text>']
    for value in _ticks(low, high, logarithmic=panel.logarithmic):
        y = _place(value, low, high, logarithmic=panel.logarithmic)
        parts.append(f'<path d="M{left} {y:.1f}h{_WIDTH}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{left - 5}" y="{y + 4:.1f}" text-anchor="end" fill="#555">{_shown(value)}</text>')
    for value in _ticks(start, stop, logarithmic=False):
        x = left + (value - start) / (stop - start) * _WIDTH
        parts.append(f'<path d="M{x:.1f} {_TOP}v{_HEIGHT}" stroke="#f0f0f0"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{_TOP + _HEIGHT + 15}" text-anchor="middle" fill="#555">{_shown(value)}</text>'
        )
    parts.append(f'<rect x="{left}" y="{_TOP}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#999"/>')
    for number, curve in enumerate(panel.curves):
        colour = _COLOURS[number % len(_COLOURS)]
        across = left + (curve.x - start) / (stop - start) * _WIDTH
        heights = [_place(value, low, high, logarithmic=panel.logarithmic) for value in curve.y.tolist()]
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(across.tolist(), heights, strict=True))
        dash = ' stroke-dasharray="5 3"' if curve.dashed else ""
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.4"{dash}/>')
    return parts + _legend(panel, left)


def _legend(panel: Panel, left: float) -> list[str]:
    named = [(number, curve) for number, curve in enumerate(panel.curves) if curve.name]
    parts = []
    for row, (number, curve) in enumerate(named):
        x, y = left + (_WIDTH // _PER_ROW) * (row % _PER_ROW), _TOP + _HEIGHT + 34 + 14 * (row // _PER_ROW)
        colour, dash = _COLOURS[number % len(_COLOURS)], ' stroke-dasharray="5 3"' if curve.dashed else ""
        parts.append(f'<path d="M{x} {y - 4}h16" stroke="{colour}" stroke-width="2"{dash}/>')
        parts.append(f'<text x="{x + 21}" y="{y}" fill="#222">{escape(curve.name)}</text>')
    return parts


def _range(panel: Panel) -> tuple[float, float]:
    values = np.concatenate([curve.y for curve in panel.curves])
    values = values[np.isfinite(values)]
    low = float(values.min()) if panel.low is None else panel.low
    high = float(values.max()) if panel.high is None else panel.high
    if panel.logarithmic:
        return low, max(10.0 ** math.ceil(math.log10(max(high, low * 10.0))), low * 10.0)
    margin = 0.06 * ((high - low) or 1.0)
    return low - margin, high + margin


def _place(value: float, low: float, high: float, *, logarithmic: bool) -> float:
    """The position of a value, in pixels from the top; clipped to the panel."""
    if math.isnan(value):
        value = high
    if logarithmic:
        value, low, high = math.log10(max(value, low)), math.log10(low), math.log10(high)
    share = (min(max(value, low), high) - low) / (high - low)
    return _TOP + (1.0 - share) * _HEIGHT


def _ticks(low: float, high: float, *, logarithmic: bool) -> list[float]:
    if logarithmic:
        first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
        step = max(1, math.ceil((last - first) / 6))
        return [10.0**power for power in range(last, first - 1, -step)]
    rough = (high - low) / 5.0
    power = 10.0 ** math.floor(math.log10(rough))
    width = next(size * power for size in (1.0, 2.0, 5.0, 10.0) if size * power >= rough)
    first, last = math.ceil(low / width - 1e-9), math.floor(high / width + 1e-9)
    return [number * width for number in range(first, last + 1)]


def _shown(value: float) -> str:
    if value and (abs(value) < 1e-3 or abs(value) >= 1e5):
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.4g}".replace("-", "\N{MINUS SIGN}")
