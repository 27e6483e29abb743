"""Arrays whose element type is known at run time only."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
"""An array of any element type."""


def magnitude(values: Array) -> float:
    """The largest finite |entry|; 0 if there is none."""
    wide = np.abs(values.astype(np.float64))
    return float(np.max(wide, initial=0.0, where=np.isfinite(wide)))
