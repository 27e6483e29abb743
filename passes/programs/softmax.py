"""Softmax weights of one head in float64, and how far any float64 evaluation may be from the exact ones.

Let l_j be the logits, p_j the weights, v_j the values, o = sum p_j v_j, and t the key with the largest logit. An
evaluation makes weights proportional to p_j (1 + e_j), and

    sum p_j (1 + e_j) v_j / sum p_j (1 + e_j) - o = sum p_j e_j (v_j - o) / sum p_j (1 + e_j),

where |e_j| <= exp(d_j) - 1 and d_j bounds what rounding changes in l_j: some units, plus 4 u times the sizes of l_j and
of its product. Scaled so that e_t is 0, d_j + d_t bounds it for the others: a steep key costs nothing where its weight
is 0 or 1. Both bounds hold; the first is better around a kink, where v_t is the mean of the other values. Two sums of n
products and their quotient add 2 n u sum p_j |v_j|. This covers every spelling of this package: offsets in the logits
or as factors of the weights (the largest logit without its offset is subtracted then), all logits shifted so that the
self logit has no offset, nothing subtracted, multiples of one value averaged first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

UNIT = 2.0**-53
"""Unit roundoff of float64."""

FACTORED = 60.0
"""Up to this size the offset of a logit is taken out of the exponential: e^(a y + b) = e^b e^(a y).

The rounding of a logit is proportional to its size, so that offsets would cost digits. Beyond it e^b could leave
the range of float32; such offsets belong to steep keys, whose weights are 0 or 1.
"""

_LARGEST_QUERY = 2.0**500
"""Queries are clipped to this, as in float64 graphs; all weights are long 0 or 1 there, and no logit is infinite."""

_EXPONENTIAL = 8.0
"""Half units in the last place that an exponential, a factor e^offset and their product may be off by.

Exponentials are good to two units in numpy, onnxruntime and CUDA.
"""

_FLUSHED = 2.0**-1000
"""Above every number that an arithmetic without denormals replaces by 0, and what becomes of it."""

_CERTAIN = 20.0
"""Where the largest logit may change by more than this, its weight is 1 or unknown."""


@dataclass(frozen=True, eq=False)
class Keys:
    """The logits of one head, `slopes y + offsets` with `alpha y^2` added to the first, which is its own.

    Attributes:
        slopes: [keys].
        offsets: [keys].
        alpha: factor of y^2 in the head's own logit.
    """

    slopes: Array
    offsets: Array
    alpha: float = 0.0

    def logits(self, y: Array) -> Array:
        """[keys, ...] at points [...]; finite for finite y."""
        query = np.clip(y, -_LARGEST_QUERY, _LARGEST_QUERY)
        logits = np.multiply.outer(self.slopes, query) + _column(self.offsets, query)
        if self.alpha != 0.0:
            logits[0] = (self.alpha * query + self.slopes[0]) * query + self.offsets[0]
        return logits

    @property
    def crossings(self) -> Array:
        """The points at which two keys weigh the same: where the weights move, and kinks of limits are."""
        steps, rises = np.subtract.outer(self.offsets, self.offsets), np.subtract.outer(self.slopes, self.slopes)
        with np.errstate(all="ignore"):
            places = -steps / rises
        return np.unique(places[np.isfinite(places)])

    def weights(self, y: Array) -> Array:
        """The softmax weights [keys, ...] at points [...]."""
        weights = self.logits(y)
        weights -= np.max(weights, axis=0)
        np.exp(weights, out=weights)
        weights /= np.sum(weights, axis=0)
        return weights

    def enclosed(self, low: Array, high: Array) -> tuple[Array, Array]:
        """The least and the largest weight of each key over cells [cells]: two arrays [keys, cells].

        p_j = 1 / sum exp(l_i - l_j), where each difference of affine logits is largest at one end of the cell.
        """
        if self.alpha != 0.0:
            return np.zeros((len(self.slopes), *low.shape)), np.ones((len(self.slopes), *low.shape))
        ends = np.stack([self.logits(low), self.logits(high)])
        room = 4.0 * UNIT * np.maximum(self._sizes(low, ends[0]), self._sizes(high, ends[1])) + 64.0 * UNIT
        least, most = [], []
        for j in range(len(self.slopes)):
            apart = ends - ends[:, j : j + 1]
            slack = np.where(np.arange(len(room))[:, None] == j, 0.0, room + room[j])
            with np.errstate(over="ignore"):
                most.append(1.0 / np.sum(np.exp(np.min(apart, axis=0) - slack), axis=0))
                least.append(1.0 / np.sum(np.exp(np.max(apart, axis=0) + slack), axis=0))
        return np.array(least), np.array(most)

    def rounding(self, y: Array, values: Array, *, shifted: bool, steps: int) -> Array:
        """How far a weighted mean of `values` [keys, ...] may be from the exact one, absolute: [...].

        Args:
            y: points [...].
            values: numbers [keys, ...].
            shifted: whether the offset of the first logit may be taken away from all of them, with rounding.
            steps: operations that follow the mean, each of which rounds it once.
        """
        logits = self.logits(y)
        top = np.argmax(logits, axis=0)[None]
        below = logits - np.take_along_axis(logits, top, axis=0)
        weights = np.exp(below) / np.sum(np.exp(below), axis=0)
        apart = _from_mean(values, weights, top)
        own = self._changes(y, logits, shifted=shifted)
        largest = np.take_along_axis(own, top, axis=0)
        relative = own + largest
        np.put_along_axis(relative, top, 0.0, axis=0)
        np.put_along_axis(own, top, np.minimum(largest, _CERTAIN), axis=0)
        shift = np.where(largest[0] <= _CERTAIN, _moved(below, own, apart), np.inf)
        shift = np.minimum(np.minimum(shift, _moved(below, relative, apart)), np.max(apart, axis=0))
        size = np.sum(weights * np.abs(values), axis=0)
        sums = (2.0 * len(logits) + steps) * UNIT * size
        return np.asarray(shift + sums + _FLUSHED * (1.0 + np.sum(np.abs(values), axis=0)))

    def _changes(self, y: Array, logits: Array, *, shifted: bool) -> Array:
        """What rounding may change in each logit: [keys, ...]."""
        first = self.offsets[0]
        factored = float(np.max(np.minimum(np.abs(self.offsets - first), FACTORED)))
        moved = _residue(self.offsets, -first, self.offsets - first) if shifted else np.zeros_like(self.offsets)
        changes = UNIT * (4.0 * (self._sizes(y, logits) + 0.5 * factored) + _EXPONENTIAL)
        return np.asarray(changes + _column(moved, y))

    def _sizes(self, y: Array, logits: Array) -> Array:
        """The sizes of the terms that are rounded in each logit.

        A product with a power of two is exact, and so is a sum near 0 of two large numbers: a kink stays in its place.
        """
        query = np.abs(np.clip(y, -_LARGEST_QUERY, _LARGEST_QUERY))
        slopes = np.where(np.abs(np.frexp(self.slopes)[0]) == 0.5, 0.0, np.abs(self.slopes))
        sizes = np.multiply.outer(slopes, query) + np.abs(logits)
        if self.alpha != 0.0:
            sizes[0] += 2.0 * (abs(self.alpha) * query + abs(self.slopes[0])) * query
        return np.asarray(sizes)


def _from_mean(values: Array, weights: Array, top: NDArray[np.intp]) -> Array:
    """How far each value is from the mean, rounded up; 0 for the key at `top` where it has all the weight."""
    origin = np.take_along_axis(values, top, axis=0)
    apart, slack = values - origin, 4.0 * UNIT * (np.abs(values) + np.abs(origin))
    np.put_along_axis(slack, top, 0.0, axis=0)
    return np.asarray(np.abs(apart - np.sum(weights * apart, axis=0)) + slack + np.sum(weights * slack, axis=0))


def _moved(below: Array, changes: Array, apart: Array) -> Array:
    """How far the mean moves when logits, `below` the largest, change by so much: up to infinity."""
    with np.errstate(over="ignore"):
        # exp(below) (exp(change) - 1): large changes belong to steep keys, and 0 times infinity would be no number
        moved = np.exp(np.minimum(below + changes, 700.0)) * -np.expm1(-changes) * apart
        return np.asarray(1.01 * np.sum(moved, axis=0) / np.sum(np.exp(below - changes), axis=0))


def _residue(a: Array, b: float, total: Array) -> Array:
    """The size of a + b - total, where total is the rounded sum: exact (Knuth's TwoSum)."""
    part = total - a
    return np.abs((a - (total - part)) + (b - part))


def _column(numbers: Array, like: Array) -> Array:
    return numbers.reshape(-1, *[1] * np.ndim(like))
