"""Decide which tokens of a batch are padding.

Masks and position ids are both derived from this, so they agree.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.bool_]


def token_rows(batch: int, length: int, *, special: bool) -> Rows:
    """[batch, length] True where there is a token.

    The first row is full and the last one is padded on the right; with three rows or more, the second one is padded on
    the left. In a case of special rows the first row has only its first token and the second only its last; the others
    are full. A batch of one is always full.
    """
    rows = np.ones((batch, length), np.bool_)
    if batch < 2 or length < 2:
        return rows
    if special:
        rows[0, 1:] = False
        rows[1, :-1] = False
        return rows
    padding = max(length // 3, 1)
    rows[-1, length - padding :] = False
    if batch > 2:
        rows[1, :padding] = False
    return rows


def positions_of(rows: Rows) -> NDArray[np.int64]:
    """The position of every token among the tokens of its row; 0 for padding on the left."""
    counted: NDArray[np.int64] = np.maximum(np.cumsum(rows, axis=1) - 1, 0)
    return counted
