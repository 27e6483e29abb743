"""Just enough SVG: elements, scales, axes.

All text is escaped. Colours are never set here, only classes, so that the page's style sheet decides about them for
light mode, dark mode and print.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from rewriter.report.html import numbers

WIDTH, HEIGHT = 420.0, 270.0
LEFT, RIGHT, TOP, BOTTOM = 62.0, WIDTH - 14.0, 20.0, HEIGHT - 50.0
"""The drawing area of every figure, in units that are pixels on a wide screen."""


class Svg(str):
    """Safe markup, which templates insert without escaping."""

    __slots__ = ()

    def __html__(self) -> str:
        """The protocol by which jinja2 recognises safe markup."""
        return str(self)


def element(tag: str, *children: str, **attributes: str | float) -> Svg:
    """One element. `text_anchor` becomes `text-anchor` and `class_` becomes `class`; plain strings are escaped."""
    parts = [f' {_name(key)}="{_value(value)}"' for key, value in attributes.items()]
    inside = "".join(child if isinstance(child, Svg) else escape(child) for child in children)
    return Svg(f"<{tag}{''.join(parts)}>{inside}</{tag}>" if inside else f"<{tag}{''.join(parts)}/>")


def joined(parts: Sequence[Svg]) -> Svg:
    """The concatenation of several elements."""
    return Svg("".join(parts))


def figure(identity: str, title: str, description: str, *parts: Svg) -> Svg:
    """A figure with a title and a description for screen readers. `identity` must be unique in the page."""
    named = element("title", title, id=f"{identity}-t"), element("desc", description, id=f"{identity}-d")
    labels = f"{identity}-t {identity}-d"
    box = f"0 0 {WIDTH:.0f} {HEIGHT:.0f}"
    return element("svg", *named, *parts, viewBox=box, role="img", aria_labelledby=labels, class_="plot")


@dataclass(frozen=True)
class Scale:
    """A linear map from data to the drawing area, or a logarithmic one, which requires `low` > 0."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        """The position of a value, clamped to the ends of the scale."""
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log10(low), math.log10(high), math.log10(max(value, self.low))
        share = min(max((value - low) / (high - low), 0.0), 1.0)
        return self.start + share * (self.end - self.start)


def across(low: float, high: float) -> Scale:
    """A horizontal scale over the drawing area."""
    return Scale(low, high, LEFT, RIGHT)


def upward(low: float, high: float, *, logarithmic: bool = False) -> Scale:
    """A vertical scale over the drawing area, with large values at the top."""
    return Scale(low, high, BOTTOM, TOP, logarithmic)


def round_steps(low: float, high: float, most: int) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) in [low, high], at most `most` + 1 of them."""
    raw = (high - low) / most
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * magnitude for factor in (1.0, 2.0, 5.0, 10.0) if factor * magnitude >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def common_power(largest: float) -> int:
    """The power of ten to factor out of the labels of an axis; 0 for numbers of moderate size."""
    exponent = math.floor(math.log10(largest)) if largest > 0.0 else 0
    return 0 if -3 < exponent < 4 else exponent


def horizontal_axis(scale: Scale, ticks: Sequence[tuple[float, str]], label: str) -> Svg:
    """Ticks below the drawing area, with a label."""
    parts = [element("path", d=f"M{LEFT:.0f} {BOTTOM:.0f}H{RIGHT:.0f}", class_="axis")]
    for value, text in ticks:
        x = _round(scale(value))
        parts.append(element("path", d=f"M{x} {BOTTOM:.0f}v4", class_="axis"))
        parts.append(element("text", text, x=x, y=BOTTOM + 18, text_anchor="middle"))
    parts.append(
        element("text", label, x=_round((LEFT + RIGHT) / 2), y=HEIGHT - 8, text_anchor="middle", class_="label")
    )
    return joined(parts)


def vertical_axis(scale: Scale, ticks: Sequence[tuple[float, str]]) -> Svg:
    """Ticks to the left of the drawing area, with grid lines across it."""
    parts = []
    for value, text in ticks:
        y = _round(scale(value))
        parts.append(element("path", d=f"M{LEFT:.0f} {y}H{RIGHT:.0f}", class_="grid"))
        parts.append(element("text", text, x=LEFT - 8, y=y + 4, text_anchor="end"))
    return joined(parts)


def linear_ticks(low: float, high: float, most: int) -> tuple[list[tuple[float, str]], int]:
    """Round ticks, and the power of ten that their labels omit."""
    exponent = common_power(max(abs(low), abs(high)))
    values = round_steps(low, high, most)
    return [(value, numbers.plain(round(value * 10.0**-exponent, 6))) for value in values], exponent


def decade_ticks(low: float, high: float, most: int) -> list[tuple[float, str]]:
    """Powers of ten in [low, high], thinned out to about `most`."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    step = max(1, math.ceil((last - first) / most))
    return [(10.0**exponent, numbers.power(exponent)) for exponent in range(first, last + 1, step)]


def line(places: Sequence[tuple[float, float]], class_: str) -> Svg:
    """A polyline."""
    return element("path", d="M" + "L".join(f"{_round(x)} {_round(y)}" for x, y in places), class_=class_)


def _round(value: float) -> float:
    return round(value, 1)


def _name(key: str) -> str:
    return key if key in ("viewBox", "markerWidth") else key.rstrip("_").replace("_", "-")


def _value(value: str | float) -> str:
    return escape(value) if isinstance(value, str) else f"{value:.1f}".removesuffix(".0")
