"""Numbers, axes and figures by themselves."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree as ET

import pytest

from rewriter.proof.statistics import BINS
from rewriter.report.html import numbers, svg
from rewriter.report.html.curves import error_figure, values_figure, weights_figure
from rewriter.report.html.depth import Mark, depth_figure
from rewriter.report.html.histogram import Bars, bin_label, histogram_figure
from rewriter.report.html.words import short
from tests.rewriter.report.html.samples import REPORTS


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1.0, "1"),
        (1.25, "1.2"),
        (0.0049, "0.0049"),
        (375.0, "380"),
        (-3.0, "−3"),
        (1.7e-6, "1.7 × 10⁻⁶"),
        (-2.5e-13, "−2.5 × 10⁻¹³"),
        (9.99e-7, "1.0 × 10⁻⁶"),
        (2.0**40, "1.1 × 10¹²"),
        (math.inf, "∞"),
        (None, "–"),
        (math.nan, "–"),
    ],
)
def test_small(value: float | None, text: str) -> None:
    assert numbers.small(value).replace("\N{NARROW NO-BREAK SPACE}", " ") == text


@pytest.mark.parametrize(
    ("amount", "text"), [(999, "999 B"), (4635, "4.6 kB"), (263642, "263.6 kB"), (4e10, "40.00 GB"), (0, "0 B")]
)
def test_size(amount: int, text: str) -> None:
    assert numbers.size(amount).replace("\N{NARROW NO-BREAK SPACE}", " ") == text


@pytest.mark.parametrize(("amount", "text"), [(0.0, "0.0 ms"), (0.0021, "2.1 ms"), (0.25, "250 ms"), (1.5, "1.5 s")])
def test_seconds(amount: float, text: str) -> None:
    assert numbers.seconds(amount).replace("\N{NARROW NO-BREAK SPACE}", " ") == text


def test_short_keeps_both_ends() -> None:
    assert short("x" * 240) == "x" * 240
    cut = short("begin" + "x" * 10**6 + "end")
    assert len(cut) == 240
    assert cut.startswith("begin")
    assert cut.endswith("end")
    assert short("a\x00\u202eb") == "a\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}b"


def test_elements_escape_everything() -> None:
    made = svg.element("text", "<b>&", x=1.0, class_='"><script>')
    assert made == '<text x="1" class="&quot;&gt;&lt;script&gt;">&lt;b&gt;&amp;</text>'
    assert svg.element("g", made) == f"<g>{made}</g>"


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.0, 1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (-6.0, 6.0, [-5, 0, 5]), (0.0, 0.29, [0, 0.1, 0.2])],
)
def test_round_steps(low: float, high: float, expected: list[float]) -> None:
    found = svg.round_steps(low, high, len(expected) - 1 if len(expected) > 3 else 3)
    assert found == pytest.approx(expected)


def test_logarithmic_scale() -> None:
    scale = svg.upward(1e-8, 1e-4, logarithmic=True)
    assert scale(1e-8) == svg.BOTTOM
    assert scale(1e-4) == pytest.approx(svg.TOP)
    assert scale(1e-6) == pytest.approx((svg.TOP + svg.BOTTOM) / 2)
    assert scale(0.0) == svg.BOTTOM


def parsed(figure: svg.Svg) -> ET.Element:
    """The figure as XML, which is stricter than HTML."""
    return ET.fromstring(figure)  # noqa: S314 - our own text


def circles(figure: svg.Svg, kind: str) -> list[float]:
    return [float(each.attrib["cy"]) for each in parsed(figure).iter("circle") if kind in each.attrib["class"]]


def test_depth_places_errors() -> None:
    marks = [Mark("a", 1e-7, 1e-6), Mark("b", 1e-7, 1e-5), Mark("c", 1e-7, 0.0), Mark("d", None, math.inf)]
    figure = depth_figure("f", "title", marks)
    first, second, zero, infinite = circles(figure, "rewritten")
    assert infinite < second < first < zero, "upwards is larger; 0 at the bottom, infinity at the top"
    assert len(circles(figure, "original")) == 3
    assert infinite >= svg.TOP
    assert zero <= svg.BOTTOM
    texts = [each.text for each in parsed(figure).iter("text")]
    assert {"0", "∞", "10⁻⁷"} <= set(texts)


def test_depth_tells_failures_in_words_and_shape() -> None:
    figure = depth_figure("f", "title", [Mark("good", 1e-7, 1e-7), Mark("guilty", 1e-7, 1e-3, failed=True)])
    assert len(circles(figure, "rewritten")) == 1
    assert "Failed: guilty." in figure
    assert "guilty: rewritten 0.001" in figure


@pytest.mark.parametrize("marks", [[Mark("a", 0.0, 0.0)], [Mark("a", None, math.inf)], [Mark("a", 1e-300, 1e300)]])
def test_depth_of_odd_errors(marks: list[Mark]) -> None:
    assert parsed(depth_figure("f", "title", marks)).tag == "svg"


def test_bin_labels() -> None:
    labels = [bin_label(place) for place in range(BINS)]
    assert labels[:7] == ["0", "1/16", "⅛", "¼", "½", "1", "2"]
    assert labels[-3:] == ["32k", "64k", "more"]
    assert len(set(labels)) == BINS


def test_histogram_heights_are_shares() -> None:
    old, new = [0] * BINS, [0] * BINS
    old[5], old[6], new[5], new[8] = 75, 25, 10, 90
    figure = histogram_figure("f", "title", [Bars("old", tuple(old), "original"), Bars("new", tuple(new), "rewritten")])
    heights = [float(bar.attrib["height"]) for bar in parsed(figure).iter("rect")]
    assert [height / max(heights) for height in heights] == pytest.approx([75 / 90, 25 / 90, 10 / 90, 1.0], abs=0.01)
    assert "old: 100 elements, 99 % up to 2, all up to 2 units" in figure
    assert "new: 100 elements, 99 % up to 8, all up to 8 units" in figure


@pytest.mark.parametrize("name", ["gelu", "relu", "silu", "mish", "float16"])
def test_program_figures_stay_in_their_frame(name: str) -> None:
    (drawing,) = REPORTS[name]().details.drawings
    for figure in (
        values_figure("v", drawing),
        error_figure("e", drawing),
        weights_figure("w", drawing, drawing.heads[0]),
    ):
        for path in parsed(figure).iter("path"):
            if path.attrib["class"] in ("axis", "grid"):
                continue
            numbers_in = [float(text) for text in re.findall(r"-?[\d.]+", path.attrib["d"])]
            assert min(numbers_in[::2]) >= svg.LEFT - 0.1
            assert max(numbers_in[::2]) <= svg.RIGHT + 0.1
            assert min(numbers_in[1::2]) >= svg.TOP - 0.1
            assert max(numbers_in[1::2]) <= svg.BOTTOM + 0.1


def test_attention_has_one_band_per_key() -> None:
    (drawing,) = REPORTS["gelu"]().details.drawings
    figure = parsed(weights_figure("w", drawing, drawing.heads[0]))
    bands = [path for path in figure.iter("path") if "band" in path.attrib["class"]]
    assert len(bands) == 11
    assert "self" not in {text.text for text in figure.iter("text")}
