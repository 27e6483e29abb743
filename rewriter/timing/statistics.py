"""Statistics of interleaved measurements: the order of turns, and ratios within a round.

The speed of a shared machine drifts, so nothing is compared across runs. Every candidate has one turn per round, in
changing order, and ratios are taken within a round as well as between medians.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import numpy as np


@dataclass(frozen=True)
class Ratio:
    """One candidate over the baseline.

    Attributes:
        of_medians: median time over the baseline's median time.
        paired: median over the rounds of the ratio within the round.
        low: lower quartile of these ratios.
        high: upper quartile.
        of_fastest: fastest time over the baseline's fastest, which excludes disturbances that only add time.
    """

    of_medians: float
    paired: float
    low: float
    high: float
    of_fastest: float

    def __str__(self) -> str:
        return f"{self.of_medians:.3f} ({self.paired:.3f}, {self.low:.3f} to {self.high:.3f})"


def ratio(candidate: Sequence[float], baseline: Sequence[float]) -> Ratio:
    """Statistics of a candidate's times relative to the baseline's, round by round."""
    low, middle, high = np.percentile(np.divide(candidate, baseline), [25, 50, 75])
    return Ratio(
        of_medians=float(np.median(candidate) / np.median(baseline)),
        paired=float(middle),
        low=float(low),
        high=float(high),
        of_fastest=min(candidate) / min(baseline),
    )


def rounds(names: Sequence[str], number: int) -> Iterator[tuple[str, ...]]:
    """The order of the turns in each of `number` rounds: all rotations, each followed by its reverse.

    No candidate always follows the same other one, and even two rounds are balanced: ABC CBA BCA ACB CAB BAC.
    """
    forward = [(*names[start:], *names[:start]) for start in range(len(names))]
    return islice(cycle([tuple(order) for each in forward for order in (each, each[::-1])]), number)
