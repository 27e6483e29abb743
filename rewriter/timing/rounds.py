"""The measurement: every model has its turn, round after round."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rewriter.timing.process import Process, started
from rewriter.timing.requests import Start, Turn
from rewriter.timing.statistics import rounds

Feeds = Mapping[str, NDArray[Any]]

TURN, WARM = 0.1, 0.02
"""Seconds of a turn, and those at its start that do not count: threads wake up and caches fill."""


class Field:
    """Models that are measured against each other, each in its own process. Use it in a `with` statement."""

    def __init__(self, starts: Mapping[str, Start]) -> None:
        self._starts = starts
        self._stack = ExitStack()
        self.processes: dict[str, Process] = {}

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.processes = {name: stack.enter_context(started(name, start)) for name, start in self._starts.items()}
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *details: object) -> None:
        self._stack.close()

    def measure(
        self,
        feeds: Feeds,
        repeat: int,
        told: Callable[[int], None] = lambda _done: None,
        *,
        seconds: float = TURN,
        warm: float = WARM,
    ) -> dict[str, list[float]]:
        """The median seconds of a run in each turn: one per model and round.

        Args:
            feeds: the inputs.
            repeat: number of rounds.
            told: called with the number of rounds done.
            seconds: length of a turn.
            warm: seconds at its start that do not count.
        """
        for process in self.processes.values():
            process.turn(Turn(feeds, 0.0, runs=2))
        found: dict[str, list[float]] = {name: [] for name in self.processes}
        for done, order in enumerate(rounds(tuple(self.processes), repeat), start=1):
            for name in order:
                runs = self.processes[name].turn(Turn(None, seconds, warm))
                found[name].append(float(np.median(runs)))
            told(done)
        return found
