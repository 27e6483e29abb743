"""Figures of one head program over the pre-activation y: its values, its attention, its error.

Attention weights sum to one, so they are drawn as stacked bands, one per key.
"""

from __future__ import annotations

from collections.abc import Sequence

from rewriter.report.details import Drawing, DrawnHead
from rewriter.report.html import numbers, svg
from rewriter.report.html.words import short

_LABEL_HEIGHT = 15.0
_SELF = ": the token itself, whose weight grows with y, and bias tokens"


def values_figure(identity: str, drawing: Drawing) -> svg.Svg:
    """The activation as a broad line with the program as a thin one on top."""
    every = (*drawing.target.values, *drawing.values.values)
    low, high = _padded(min(every), max(every))
    x, y = svg.across(drawing.points[0], drawing.points[-1]), svg.upward(low, high)
    ticks, exponent = svg.linear_ticks(low, high, 5)
    target, program = (
        [(x(point), y(value)) for point, value in zip(drawing.points, curve.values, strict=True)]
        for curve in (drawing.target, drawing.values)
    )
    first, last = numbers.plain(drawing.points[0]), numbers.plain(drawing.points[-1])
    description = f"For y from {first} to {last}: two curves, one on the other."
    return svg.figure(
        identity,
        f"{short(drawing.program)} and {short(drawing.activation)}, over y",
        description,
        svg.vertical_axis(y, ticks),
        _pre_activation(x, drawing.points),
        _unit(exponent),
        svg.line(target, "target"),
        svg.line(program, "program"),
    )


def weights_figure(identity: str, drawing: Drawing, head: DrawnHead) -> svg.Svg:
    """Stacked softmax weights: the token itself at the bottom, then other keys in the order of their peaks."""
    x, y = svg.across(drawing.near[0], drawing.near[-1]), svg.upward(0.0, 1.0)
    own = [] if head.shared else [0]
    rest = sorted(range(len(own), len(head.weights)), key=lambda key: _peak(head.weights[key].values))
    order = [*own, *rest]
    below = [0.0] * len(drawing.near)
    bands, labels = [], []
    for rank, key in enumerate(order):
        above = [low + value for low, value in zip(below, head.weights[key].values, strict=True)]
        style = "self" if key in own else f"token{rank % 2}"
        bands.append(_band(x, y, drawing.near, (below, above), style, head.weights[key].label))
        labels += _band_label(x, y, drawing.near, (below, above), "self" if key in own else _short(head, key))
        below = above
    ticks = [(value, numbers.plain(value)) for value in (0.0, 0.25, 0.5, 0.75, 1.0)]
    return svg.figure(
        identity,
        f"Attention of {short(drawing.program)} over y",
        f"Stacked softmax weights of {len(order)} keys{'' if head.shared else _SELF}.",
        svg.vertical_axis(y, ticks),
        *bands,
        *labels,
        _pre_activation(x, drawing.near),
    )


def error_figure(identity: str, drawing: Drawing) -> svg.Svg:
    """The signed error, with the certified error as a band around 0."""
    largest = max(drawing.certified, *(abs(value) for value in drawing.error.values)) or 1.0
    low, high = -1.15 * largest, 1.15 * largest
    x, y = svg.across(drawing.near[0], drawing.near[-1]), svg.upward(low, high)
    ticks, exponent = svg.linear_ticks(low, high, 5)
    band = svg.element(
        "rect",
        x=svg.LEFT,
        y=y(drawing.certified),
        width=svg.RIGHT - svg.LEFT,
        height=y(-drawing.certified) - y(drawing.certified),
        class_="certified",
    )
    places = [(x(point), y(value)) for point, value in zip(drawing.near, drawing.error.values, strict=True)]
    peak = max(abs(value) for value in drawing.error.values)
    known = "the largest on a dense grid" if drawing.measured else "the certificate"
    return svg.figure(
        identity,
        f"Error of {short(drawing.program)} over y",
        f"At most {numbers.small(peak)} at the drawn points; {known} is {numbers.small(drawing.certified)}.",
        band,
        svg.vertical_axis(y, ticks),
        _pre_activation(x, drawing.near),
        _unit(exponent),
        svg.line(places, "error"),
    )


def _padded(low: float, high: float) -> tuple[float, float]:
    margin = 0.06 * ((high - low) or 1.0)
    return low - margin, high + margin


def _pre_activation(x: svg.Scale, points: Sequence[float]) -> svg.Svg:
    ticks, exponent = svg.linear_ticks(points[0], points[-1], 6)
    label = "pre-activation y" if exponent == 0 else f"pre-activation y, in {numbers.power(exponent)}"
    return svg.horizontal_axis(x, ticks, label)


def _unit(exponent: int) -> svg.Svg:
    """The power of ten that the labels of a vertical axis omit, drawn above them."""
    if exponent == 0:
        return svg.Svg("")
    return svg.element(
        "text", f"× {numbers.power(exponent)}", x=svg.LEFT, y=svg.TOP - 7, text_anchor="start", class_="label"
    )


def _band(
    x: svg.Scale,
    y: svg.Scale,
    points: Sequence[float],
    edges: tuple[Sequence[float], Sequence[float]],
    style: str,
    label: str,
) -> svg.Svg:
    upper = [(x(point), y(value)) for point, value in zip(points, edges[1], strict=True)]
    lower = [(x(point), y(value)) for point, value in zip(points, edges[0], strict=True)]
    way = "L".join(f"{across:.1f} {up:.1f}" for across, up in (*upper, *reversed(lower)))
    return svg.element("path", svg.element("title", short(label)), d=f"M{way}Z", class_=f"band {style}")


def _band_label(
    x: svg.Scale, y: svg.Scale, points: Sequence[float], edges: tuple[Sequence[float], Sequence[float]], text: str
) -> list[svg.Svg]:
    """The label of a band at its highest point, if there is room."""
    heights = [y(low) - y(high) for low, high in zip(*edges, strict=True)]
    inner = range(len(points) // 12, len(points) - len(points) // 12)  # keep clear of the frame
    widest = max(heights[place] for place in inner)
    if widest < _LABEL_HEIGHT:
        return []
    # The middle of the stretch where the band is nearly at its full height.
    wide = [place for place in inner if heights[place] >= 0.97 * widest]
    place = wide[len(wide) // 2]
    middle = y((edges[0][place] + edges[1][place]) / 2) + 4
    return [svg.element("text", text, x=x(points[place]), y=middle, text_anchor="middle", class_="in-band")]


def _short(head: DrawnHead, key: int) -> str:
    return "bias token" if len(head.keys) == 2 else str(key + head.shared)


def _peak(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)
