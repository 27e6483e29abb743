"""Work as a count, and time that passes when told to: tests of growth and of times depend on no machine."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def grows_linearly(work: Callable[[int], Callable[[], object]], small: int, middle: int, large: int) -> None:
    """That what `work` makes of sizes grows no faster than they do, counted after a first time that fills caches."""
    _, first, second, third = (steps(work(size)) for size in (small, small, middle, large))
    assert second - first >= middle - small
    assert third - second <= 1.02 * (large - middle) / (middle - small) * (second - first)


def steps(function: Callable[[], object]) -> int:
    """How many lines of Python are run (a line once for each turn of a loop in it), and functions in C called."""
    count = 0

    def lines(_frame: FrameType, _event: str, _argument: Any) -> Any:
        nonlocal count
        count += 1
        return lines

    def calls(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal count
        count += event == "c_call"

    before = sys.gettrace(), sys.getprofile()
    sys.settrace(lines)
    sys.setprofile(calls)
    try:
        function()
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
    return count


class Clock:
    """Time that passes only when told to, and a second in each run."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now

    def run(self, _feeds: object) -> None:
        self.now += 1.0
