"""Progress on standard error: a bar with the remaining time on a terminal, otherwise a plain line from time to time.

The remaining time is extrapolated from the share of the work that is done, so it is rough. A step that counts anew, or
in other units, starts a new estimate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import rich.console

from rewriter.proof.validate import Progress as Callback
from rewriter.report.terminal.layout import plain
from rewriter.text import clean

_EVERY = 10.0
"""Seconds between plain lines; a call that takes less prints none."""

_ENOUGH = 0.05
"""Share of the work from which an estimate is given."""

Clock = Callable[[], float]


class Estimate:
    """The remaining time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._start = clock()
        self._first = self._done = self._total = 0

    def left(self, done: int, total: int) -> str:
        """The remaining time in words; empty while too little is known."""
        if total != self._total or done < self._done:
            self._start, self._first, self._total = self._clock(), done, total
        self._done = done
        worked = done - self._first
        if worked <= _ENOUGH * total:
            return ""
        seconds = (self._clock() - self._start) * (total - done) / worked
        return f"about {seconds:.0f} s left" if seconds < 100 else f"about {seconds / 60:.0f} min left"


@contextmanager
def shown(console: rich.console.Console, clock: Clock = time.monotonic) -> Iterator[Callback]:
    """Show progress on `console` while the block runs."""
    estimate = Estimate(clock)
    if not console.is_terminal:
        yield _lines(console, estimate, clock)
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(24),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}", markup=False),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=1, left="")

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=clean(what), completed=done, total=total, left=estimate.left(done, total))

        yield show


def _lines(console: rich.console.Console, estimate: Estimate, clock: Clock) -> Callback:
    last = clock()

    def show(what: str, done: int, total: int) -> None:
        nonlocal last
        left = estimate.left(done, total)
        if clock() - last >= _EVERY:
            last = clock()
            console.print(
                plain(", ".join(each for each in (f"{done / max(total, 1):.0%}", what, left) if each)), soft_wrap=True
            )

    return show
