"""Figures of error against depth: one mark per block for the original and one for the rewritten model.

Errors are distances from a float64 evaluation, on a logarithmic scale. An error of exactly 0 is drawn on the bottom
line, an infinite one on the top line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rewriter.report.html import numbers, svg
from rewriter.report.html.words import short
from rewriter.text import counted

_SMALLEST_DECADES = 2
_CAP = 5.0
_NAMED = 5
"""Maximum number of failed blocks that the description of a figure names."""

_ROOMY, _SMALLEST = 30, 0.5
"""Number of blocks from which on marks shrink, and the smallest size as a share of the full one."""

_ROOM = 0.15
"""Distance of marks from the ends of the scale, in decades."""
_EDGE = 9.0
"""Distance of the lines for 0 and infinity from the ends of the logarithmic scale."""


@dataclass(frozen=True)
class Mark:
    """One block; errors are in any common unit, None if unknown.

    Attributes:
        name: the block.
        original: error of the original.
        rewritten: error of the rewritten model.
        allowed: the allowance for the latter.
        failed: whether the block failed its proof.
    """

    name: str
    original: float | None
    rewritten: float | None
    allowed: float | None = None
    failed: bool = False


def depth_figure(identity: str, title: str, marks: Sequence[Mark]) -> svg.Svg:
    """Error against the number of the block."""
    x = svg.across(0.4, len(marks) + 0.6)
    y = _scale(marks)
    size = max(_SMALLEST, min(1.0, _ROOMY / len(marks)))
    ticks = [(value, f"{value:.0f}") for value in svg.round_steps(1.0, float(max(len(marks), 2)), 8)]
    ticks = [tick for tick in ticks if tick[0] == round(tick[0]) and 1 <= tick[0] <= len(marks)]
    if not ticks or ticks[0][0] != 1.0:
        ticks.insert(0, (1.0, "1"))
    parts = [
        svg.vertical_axis(y, svg.decade_ticks(y.low, y.high, 6)),
        svg.horizontal_axis(x, ticks, "block, in graph order"),
        *_extremes(marks),
    ]
    # Originals first: where both marks meet, the dot lies inside the ring.
    parts += [_allowed(x(number), y, mark) for number, mark in enumerate(marks, start=1)]
    parts += [_original(x(number), y, mark, size) for number, mark in enumerate(marks, start=1)]
    parts += [_rewritten(x(number), y, mark, size) for number, mark in enumerate(marks, start=1)]
    return svg.figure(identity, title, _description(marks), *parts)


def _scale(marks: Sequence[Mark]) -> svg.Scale:
    """Whole decades around all errors that are finite and not 0."""
    found = [value for mark in marks for value in (mark.original, mark.rewritten, mark.allowed)]
    drawn = [math.log10(value) for value in found if value is not None and 0.0 < value < math.inf]
    low, high = (math.floor(min(drawn) - _ROOM), math.ceil(max(drawn) + _ROOM)) if drawn else (-9, -6)
    while high - low < _SMALLEST_DECADES:
        low, high = (
            (low - 1, high) if high - max(drawn, default=high) < min(drawn, default=low) - low else (low, high + 1)
        )
    extremes = {value for value in found if value is not None and not 0.0 < value < math.inf}
    bottom = svg.BOTTOM - (3 * _EDGE if 0.0 in extremes else 0.0)
    top = svg.TOP + (3 * _EDGE if math.inf in extremes else 0.0)
    return svg.Scale(10.0**low, 10.0**high, bottom, top, logarithmic=True)


def _place(y: svg.Scale, value: float) -> float:
    if value == 0.0:
        return svg.BOTTOM - _EDGE / 2
    return svg.TOP + _EDGE / 2 if math.isinf(value) else y(value)


def _extremes(marks: Sequence[Mark]) -> list[svg.Svg]:
    """Labels of the lines for 0 and infinity, if there are marks on them."""
    found = {value for mark in marks for value in (mark.original, mark.rewritten)}
    labels = [(0.0, "0", svg.BOTTOM - _EDGE / 2), (math.inf, "∞", svg.TOP + _EDGE / 2)]
    return [
        svg.element("text", text, x=svg.LEFT - 8, y=place + 4, text_anchor="end")
        for value, text, place in labels
        if value in found
    ]


def _original(x: float, y: svg.Scale, mark: Mark, size: float) -> svg.Svg:
    if mark.original is None:
        return svg.Svg("")
    tip = svg.element("title", f"{short(mark.name)}: original {numbers.small(mark.original)}")
    return svg.element("circle", tip, cx=x, cy=_place(y, mark.original), r=5.5 * size, class_="original ring")


def _rewritten(x: float, y: svg.Scale, mark: Mark, size: float) -> svg.Svg:
    if mark.rewritten is None:
        return svg.Svg("")
    place = _place(y, mark.rewritten)
    tip = svg.element("title", f"{short(mark.name)}: rewritten {numbers.small(mark.rewritten)}")
    if mark.failed:
        cross = f"M{x - _CAP:.1f} {place - _CAP:.1f}l{2 * _CAP} {2 * _CAP}m0 -{2 * _CAP}l-{2 * _CAP} {2 * _CAP}"
        return svg.element("path", tip, d=cross, class_="failed cross")
    return svg.element("circle", tip, cx=x, cy=place, r=3.2 * size, class_="rewritten dot")


def _allowed(x: float, y: svg.Scale, mark: Mark) -> svg.Svg:
    if mark.allowed is None or not 0.0 < mark.allowed < math.inf:
        return svg.Svg("")
    tip = svg.element("title", f"{short(mark.name)}: allowed {numbers.small(mark.allowed)}")
    return svg.element("path", tip, d=f"M{x - _CAP:.1f} {y(mark.allowed):.1f}h{2 * _CAP}", class_="allowed")


def _description(marks: Sequence[Mark]) -> str:
    def span(values: list[float]) -> str:
        return f"{numbers.small(min(values))} to {numbers.small(max(values))}" if values else "not measured"

    old = [mark.original for mark in marks if mark.original is not None]
    new = [mark.rewritten for mark in marks if mark.rewritten is not None]
    failed = [short(mark.name) for mark in marks if mark.failed]
    text = f"{counted(len(marks), 'block')}. Original: {span(old)}. Rewritten: {span(new)}."
    if not failed:
        return text
    named = ", ".join(failed[:_NAMED])
    return f"{text} Failed: {named}{' and more' if len(failed) > _NAMED else ''}."
