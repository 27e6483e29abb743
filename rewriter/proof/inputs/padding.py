"""Which tokens of a batch are padding.

Comes in: how many rows and tokens, and whether the case is about special rows. Goes out: a boolean array, true where
there is a token. Masks and position ids are both made from it, so that they fit each other whatever order inputs come
in.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.bool_]


def token_rows(batch: int, length: int, *, special: bool) -> Rows:
    """[batch, length]: a full row, from three rows on one padded at the left, and a last one padded at the right.

    A case of special rows has all padding but the first token in its first row, all but the last token in its second;
    the others, and the only row of a batch of one, are full.
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
    """Position of every token among the tokens of its row, 0 for padding at the left."""
    counted: NDArray[np.int64] = np.maximum(np.cumsum(rows, axis=1) - 1, 0)
    return counted
