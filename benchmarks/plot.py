"""A line plot with logarithmic axes as SVG text, written by hand: no plotting library needed.

It is legible on light and dark pages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

Points = Sequence[tuple[float, float]]

_WIDTH, _HEIGHT = 760, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 190, 44, 56
_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#9d6fb4", "#8a6d5b", "#d37295", "#72b7b2")
_DASHES = ("", "7 4", "2 3", "10 3 2 3")


def plot(title: str, x_label: str, y_label: str, series: Mapping[str, Points], ticks: Sequence[float]) -> str:
    """The plot as SVG. `ticks` are those of the x axis; y ticks are powers of ten.

    Points that are not positive are omitted.
    """
    drawn = {name: [(x, y) for x, y in points if x > 0 and y > 0] for name, points in series.items()}
    xs = [x for points in drawn.values() for x, _ in points]
    ys = [y for points in drawn.values() for _, y in points]
    low, high = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)))
    x_low, x_high = math.log10(min(xs)), math.log10(max(xs))

    def place(x: float, y: float) -> tuple[float, float]:
        right = (math.log10(x) - x_low) / ((x_high - x_low) or 1.0)
        up = (math.log10(y) - low) / ((high - low) or 1.0)
        return _LEFT + right * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM)

    root = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="13" role="img"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {root} aria-label="{escape(title)}">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="24" font-size="15" font-weight="bold">{escape(title)}</text>',
    ]
    left, right = _LEFT, _WIDTH - _RIGHT
    for power in range(low, high + 1):
        y = place(min(xs), 10.0**power)[1]
        lines.append(f'<line x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#d8d8d8"/>')
        lines.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">1e{power}</text>')
    for tick in ticks:
        x = place(tick, ys[0])[0]
        lines.append(f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{_HEIGHT - _BOTTOM}" stroke="#ececec"/>')
        lines.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{tick:g}</text>')
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    lines.append(f'<text x="{(left + right) / 2}" y="{_HEIGHT - 14}" text-anchor="middle">{escape(x_label)}</text>')
    lines.append(f'<text transform="translate(18 {middle}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>')
    for number, (name, points) in enumerate(drawn.items()):
        lines += _series(number, name, [place(x, y) for x, y in points])
    return "\n".join([*lines, "</svg>"]) + "\n"


def _series(number: int, name: str, points: Points) -> list[str]:
    colour, dash = _COLOURS[number % len(_COLOURS)], _DASHES[(number + number // len(_COLOURS)) % len(_DASHES)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    style = f'fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"'
    y = _TOP + 8 + 20 * number
    key = _WIDTH - _RIGHT + 14
    return [
        f'<polyline points="{path}" {style}/>',
        f'<line x1="{key}" y1="{y}" x2="{key + 26}" y2="{y}" {style}/>',
        f'<text x="{key + 33}" y="{y + 4}">{escape(name)}</text>',
    ]
