"""The remaining time, and the lines of a long run that nobody watches."""

from __future__ import annotations

import io

import rich.console

from rewriter.report.terminal.console import Estimate, shown


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_remaining_time() -> None:
    clock = Clock()
    estimate = Estimate(clock)
    assert estimate.left(0, 1000) == ""
    clock.now += 4
    assert estimate.left(40, 1000) == ""  # too little is known
    clock.now += 6
    assert estimate.left(100, 1000) == "about 90 s left"
    clock.now += 10
    assert estimate.left(500, 1000) == "about 20 s left"
    clock.now += 580
    assert estimate.left(600, 1000) == "about 7 min left"


def test_a_step_in_other_units_starts_anew() -> None:
    clock = Clock()
    estimate = Estimate(clock)
    clock.now += 100
    estimate.left(0, 1)
    clock.now += 100
    assert estimate.left(0, 4) == ""
    clock.now += 2
    assert estimate.left(1, 4) == "about 6 s left"
    clock.now += 100
    assert estimate.left(0, 4) == ""
    clock.now += 3
    assert estimate.left(1, 4) == "about 9 s left"


def test_lines_off_a_terminal() -> None:
    clock, out = Clock(), io.StringIO()
    console = rich.console.Console(file=out, width=40)
    with shown(console, clock) as show:
        show("loading", 0, 1)
        show("running the original", 0, 1000)
        clock.now += 9.0
        show("running the original", 100, 1000)
        clock.now += 6.0
        show("proving a block with a name that is longer than the line", 250, 1000)
        clock.now += 5.0
        show("proving", 300, 1000)
    assert out.getvalue().splitlines() == [
        "25%, proving a block with a name that is longer than the line, about 45 s left"
    ]
