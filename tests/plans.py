"""Activations as plans put them in, written in plain numpy: what a `Claim` holds in tests of the proof."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Silu:
    """y / (1 + e^-y) times `factor`, plus `off`; for a gate times z / y."""

    factor: float = 1.0
    off: float = 0.0
    rounding: float = 0.0

    @property
    def crossings(self) -> Array:
        """Where the two keys weigh the same."""
        return np.zeros(1)

    def evaluate(self, y: Array, z: Array | None = None) -> Array:
        """The value in float64."""
        with np.errstate(over="ignore"):
            return np.asarray((y if z is None else z) * self.factor / (1.0 + np.exp(-y)) + self.off)


class Exp(Silu):
    """e^y, with a rounding in proportion."""

    def evaluate(self, y: Array, z: Array | None = None) -> Array:
        """The value in float64, which may overflow."""
        assert z is None
        with np.errstate(over="ignore"):
            return np.asarray(np.exp(y))
