"""The lines of a long run that nobody watches."""

from __future__ import annotations

import io

import rich.console

from rewriter.report.terminal.console import shown


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


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
    assert out.getvalue().splitlines() == ["25%, proving a block with a name that is longer than the line"]
