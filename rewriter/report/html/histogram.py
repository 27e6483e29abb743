"""The histogram of errors in units in the last place.

For every bin of `rewriter.proof.statistics` it shows the share of elements, with one bar for the original and one for
the rewritten model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from rewriter.proof.statistics import HIGHEST, LOWEST
from rewriter.report.html import numbers, svg

_MOST_LABELS = 9
_LEAST_BINS = 7


@dataclass(frozen=True)
class Bars:
    """One series: its label, its counts per bin, and the CSS class of its bars."""

    label: str
    counts: tuple[int, ...]
    style: str


def histogram_figure(identity: str, title: str, series: Sequence[Bars]) -> svg.Svg:
    """Shares per bin, with the series side by side."""
    first, last = _window(series)
    shares = [_shares(bars.counts) for bars in series]
    top = max(max(each) for each in shares)
    x = svg.across(first - 0.5, last + 0.5)
    y = svg.upward(0.0, 1.08 * top)
    heights = [(value, f"{numbers.plain(round(100 * value, 6))}%") for value in svg.round_steps(0.0, 1.08 * top, 6)]
    step = max(1, -(-(last - first + 1) // _MOST_LABELS))
    labels = [(float(place), bin_label(place)) for place in range(first, last + 1, step)]
    parts = [svg.vertical_axis(y, heights)]
    parts += [
        _bar(x, y, (place, number, len(series)), each[place], bars.style)
        for number, (bars, each) in enumerate(zip(series, shares, strict=True))
        for place in range(first, last + 1)
        if each[place] > 0
    ]
    parts.append(svg.horizontal_axis(x, labels, "error up to, in units in the last place"))
    return svg.figure(identity, title, "; ".join(_described(bars) for bars in series), *parts)


def bin_label(place: int) -> str:
    """The upper end of a bin in units in the last place: `0`, `1/16` up to `64k`, `more`."""
    if place == 0:
        return "0"
    exponent = place - 1 + LOWEST
    if exponent > HIGHEST:
        return "more"
    if exponent < 0:
        return {1: "½", 2: "¼", 3: "⅛", 4: "1/16"}[-exponent]
    return str(2**exponent) if exponent < 10 else f"{2 ** (exponent - 10)}k"


def _window(series: Sequence[Bars]) -> tuple[int, int]:
    """The range of bins that are not empty, widened to a minimum."""
    size = len(series[0].counts)
    filled = [place for place in range(size) if any(bars.counts[place] for bars in series)]
    first, last = (filled[0], filled[-1]) if filled else (0, 0)
    while last - first + 1 < _LEAST_BINS:
        first, last = max(0, first - 1), min(size - 1, last + 1)
    return first, last


def _shares(counts: tuple[int, ...]) -> list[float]:
    total = max(sum(counts), 1)
    return [number / total for number in counts]


def _bar(x: svg.Scale, y: svg.Scale, where: tuple[int, int, int], share: float, style: str) -> svg.Svg:
    """Bar number `where[1]` of `where[2]` in bin `where[0]`."""
    place, number, of = where
    gap = 0.12
    width = (1.0 - 2 * gap) / of
    left, right = (x(place - 0.5 + gap + shift * width) for shift in (number, number + 1))
    top = min(y(share), svg.BOTTOM - 1.0)  # so that a single element among millions remains visible
    tip = svg.element("title", f"up to {bin_label(place)}: {numbers.percent(share)}")
    return svg.element(
        "rect", tip, x=left + 0.5, y=top, width=max(right - left - 1.0, 1.0), height=svg.BOTTOM - top, class_=style
    )


def _described(bars: Bars) -> str:
    total = sum(bars.counts)
    reached = list(accumulate(bars.counts))
    place = next(place for place, number in enumerate(reached) if number >= 0.99 * total)
    most = max((place for place, number in enumerate(bars.counts) if number), default=0)
    return (
        f"{bars.label}: {numbers.count(total)} elements, 99 % up to {bin_label(place)}, all up to {bin_label(most)} "
        "units in the last place"
    )
