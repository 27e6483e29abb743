"""Numbers and names as the page writes them."""

from __future__ import annotations

import math

import pytest

from rewriter.report.html import numbers
from rewriter.report.html.rendering import short


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
