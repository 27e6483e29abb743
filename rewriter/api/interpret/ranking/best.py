"""The k largest entries of each row of a matrix that is only ever seen in blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rewriter.arrays import Array
from rewriter.errors import UsageError

Places = NDArray[np.int64]

_MOST = 2**25
"""Entries that are kept at most: 400 MB."""

_MANY = 4
"""Entries per kept entry from which on a partial sort of whole rows is faster than sorting the entries."""


class Best:
    """The k largest entries per row so far, in falling order.

    Attributes:
        scores: [rows, k]; `floor` where there are fewer.
        places: [rows, k], their columns; -1 where there are fewer.

    Raises:
        UsageError: they would not fit into memory.
    """

    def __init__(self, rows: int, k: int, dtype: np.dtype[Any], floor: float = 0.0) -> None:
        if rows * k > _MOST:
            raise UsageError(
                f"the {k:,} largest for each of {rows:,} heads do not fit into memory; take a smaller --top"
            )
        self.scores = np.full((rows, k), floor, dtype)
        self.places = np.full((rows, k), -1, np.int64)

    def add(self, rows: Places, scores: Array, columns: Places) -> None:
        """Take entries that are larger than the smallest kept ones.

        Args:
            rows: [R], which rows of the whole matrix; no row twice.
            scores: [R, C], a block.
            columns: [C], which columns of the whole matrix.
        """
        k = self.scores.shape[1]
        larger = scores > self.scores[rows, -1][:, None]
        count = int(np.count_nonzero(larger))
        if count > _MANY * k * len(rows) and scores.shape[1] > k:
            # At first almost everything is larger than what is kept: k entries per row are enough.
            chosen = np.argpartition(scores, -k, axis=1)[:, -k:]
            self._merge(rows, np.take_along_axis(scores, chosen, axis=1), columns[chosen])
        elif count:
            self._merge_few(rows, scores, columns, *_nonzero(larger))

    def _merge_few(self, rows: Places, scores: Array, columns: Places, row: Places, column: Places) -> None:
        """Take some entries of a block, of which row `row` may have any number."""
        touched, short = np.unique(row, return_inverse=True)
        order = np.argsort(short, kind="stable")
        short, values, column = short[order], scores[row, column][order], column[order]
        rank = np.arange(len(short)) - np.searchsorted(short, short)
        dense = np.full((len(touched), int(rank.max()) + 1), -np.inf, values.dtype)
        places = np.full(dense.shape, -1, np.int64)
        dense[short, rank], places[short, rank] = values, columns[column]
        self._merge(rows[touched], dense, places)

    def _merge(self, rows: Places, scores: Array, places: Places) -> None:
        """Merge entries [R, n] with their columns into rows."""
        k = self.scores.shape[1]
        wide = np.concatenate([self.scores[rows], scores], axis=1)
        columns = np.concatenate([self.places[rows], places], axis=1)
        best = np.argsort(-wide, axis=1, kind="stable")[:, :k]
        self.scores[rows] = np.take_along_axis(wide, best, axis=1)
        self.places[rows] = np.take_along_axis(columns, best, axis=1)


def _nonzero(mask: Array) -> tuple[Places, Places]:
    """`numpy.nonzero`, in the order in which the mask lies in memory."""
    if mask.flags.f_contiguous and not mask.flags.c_contiguous:
        column, row = np.nonzero(mask.T)
    else:
        row, column = np.nonzero(mask)
    return row, column
