"""Softmax weights of one head in float64, with a bound on the error of any float64 evaluation.

Let l_j be the logits, p_j the weights, v_j the values, o = sum p_j v_j, and t the key with the largest logit. A rounded
evaluation has weights proportional to p_j (1 + e_j), and

    sum p_j (1 + e_j) v_j / sum p_j (1 + e_j) - o = sum p_j e_j (v_j - o) / sum p_j (1 + e_j),

where |e_j| <= exp(d_j) - 1 and d_j bounds the rounding error of l_j: a few units, plus 4 u times the magnitudes of l_j
and of its product. If the weights are scaled so that e_t = 0, then d_j + d_t takes the place of d_j for the others, and
a steep key costs nothing where its weight is 0 or 1. Both bounds hold; the first is better around a kink, where v_t is
the mean of the other values. Two sums of n products and their quotient add 2 n u sum p_j |v_j|.

This covers every spelling in this package: offsets in the logits or as factors of the weights (then the largest logit
without its offset is subtracted), all logits shifted so that the self logit has no offset, nothing subtracted, and
multiples of one value averaged first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

UNIT = 2.0**-53
"""Unit roundoff of float64."""

FACTORED = 60.0
"""Offsets up to this magnitude are taken out of the exponential: e^(a y + b) = e^b e^(a y).

The rounding error of a logit is proportional to its magnitude, so an offset in the logit costs digits. For larger
offsets e^b could leave the range of float32; they belong to steep keys, whose weights are 0 or 1.
"""

FACTORED_BESIDE_STEEP = 20.0
"""The same for a head that has larger offsets, too. The exponentials of such a head are at least e^-87 in graphs
(`passes.forms.spelling`), and times a factor e^60 that is no longer nothing.
"""

LARGEST_QUERY = 2.0**500
"""Queries are clipped to this, as in float64 graphs: logits stay finite, and all weights are 0 or 1 long before."""

_EXPONENTIAL = 8.0
"""Error of an exponential, a factor e^offset and their product, in half units in the last place.

The exponentials of numpy, onnxruntime and CUDA are accurate to two units in the last place.
"""

_FLUSHED = 2.0**-1000
"""Above every number that arithmetic without denormals flushes to 0, and above the error that this causes."""

_CERTAIN = 20.0
"""Where rounding may change the largest logit by more than this, its weight is either 1 or unknown."""


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
        query = np.clip(y, -LARGEST_QUERY, LARGEST_QUERY)
        logits = np.multiply.outer(self.slopes, query) + _column(self.offsets, query)
        if self.alpha != 0.0:
            logits[0] = (self.alpha * query + self.slopes[0]) * query + self.offsets[0]
        return logits

    @property
    def crossings(self) -> Array:
        """The points at which two keys have equal weights: there the weights change, and limits have their kinks."""
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

        p_j = 1 / sum exp(l_i - l_j), and each difference of affine logits is largest at one end of the cell.
        """
        if self.alpha != 0.0:  # a parabola may be largest inside the cell
            return np.zeros((len(self.slopes), *low.shape)), np.ones((len(self.slopes), *low.shape))
        ends = np.stack([self.logits(low), self.logits(high)])
        room = 4.0 * UNIT * np.maximum(self._sizes(low, ends[0]), self._sizes(high, ends[1])) + 64.0 * UNIT
        least, most = [], []
        for j in range(len(self.slopes)):
            apart = ends - ends[:, j : j + 1]
            # l_j - l_j is exactly 0; all other differences carry the rounding of both logits.
            slack = np.where(np.arange(len(room))[:, None] == j, 0.0, room + room[j])
            with np.errstate(over="ignore"):
                most.append(1.0 / np.sum(np.exp(np.min(apart, axis=0) - slack), axis=0))
                least.append(1.0 / np.sum(np.exp(np.max(apart, axis=0) + slack), axis=0))
        return np.array(least), np.array(most)

    def rounding(self, y: Array, values: Array, *, shifted: bool, steps: int) -> Array:
        """A bound on the rounding error of the weighted mean of `values` [keys, ...], absolute: [...].

        Args:
            y: points [...].
            values: numbers [keys, ...].
            shifted: whether the offset of the first logit may be subtracted from all logits, with rounding.
            steps: number of operations after the mean, each of which rounds it once.
        """
        logits = self.logits(y)
        top = np.argmax(logits, axis=0)[None]
        below = logits - np.take_along_axis(logits, top, axis=0)
        weights = np.exp(below) / np.sum(np.exp(below), axis=0)
        apart = _from_mean(values, weights, top)
        own = self._changes(y, logits, shifted=shifted)
        # Two scalings of the e_j: each logit with its own d_j, or relative to the largest with d_j + d_t. Either gives
        # a bound, and the smaller one counts. Whatever rounding does, a mean stays among the values.
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
        """The d_j: a bound on the rounding error of each logit, [keys, ...]."""
        # A graph that factors offsets out subtracts the largest logit without its offset, so that differences may be
        # larger by that offset.
        first = self.offsets[0]
        factored = float(np.max(np.minimum(np.abs(self.offsets - first), FACTORED)))
        moved = _residue(self.offsets, -first, self.offsets - first) if shifted else np.zeros_like(self.offsets)
        changes = UNIT * (4.0 * (self._sizes(y, logits) + 0.5 * factored) + _EXPONENTIAL)
        return np.asarray(changes + _column(moved, y))

    def _sizes(self, y: Array, logits: Array) -> Array:
        """The magnitudes of the terms that are rounded in each logit.

        A product with a power of two is exact, and so is a sum near 0 of two large numbers: kinks stay in place.
        """
        query = np.abs(np.clip(y, -LARGEST_QUERY, LARGEST_QUERY))
        slopes = np.where(np.abs(np.frexp(self.slopes)[0]) == 0.5, 0.0, np.abs(self.slopes))
        sizes = np.multiply.outer(slopes, query) + np.abs(logits)
        if self.alpha != 0.0:
            sizes[0] += 2.0 * (abs(self.alpha) * query + abs(self.slopes[0])) * query
        return np.asarray(sizes)


def _from_mean(values: Array, weights: Array, top: NDArray[np.intp]) -> Array:
    """The distance of each value from the mean, rounded up; 0 for the key at `top` where it has all the weight."""
    # Relative to the top key's value: if that key has all the weight, the differences vanish without rounding.
    origin = np.take_along_axis(values, top, axis=0)
    apart, slack = values - origin, 4.0 * UNIT * (np.abs(values) + np.abs(origin))
    np.put_along_axis(slack, top, 0.0, axis=0)
    return np.asarray(np.abs(apart - np.sum(weights * apart, axis=0)) + slack + np.sum(weights * slack, axis=0))


def _moved(below: Array, changes: Array, apart: Array) -> Array:
    """How far the mean moves when the logits, `below` the largest, change by up to `changes`; may be infinite."""
    with np.errstate(over="ignore"):
        # exp(below) (exp(change) - 1) in one exponent: steep keys have large changes, and 0 times infinity is NaN. The
        # factor 1.01 covers the rounding of this evaluation itself.
        moved = np.exp(np.minimum(below + changes, 700.0)) * -np.expm1(-changes) * apart
        return np.asarray(1.01 * np.sum(moved, axis=0) / np.sum(np.exp(below - changes), axis=0))


def _residue(a: Array, b: float, total: Array) -> Array:
    """|a + b - total| for the rounded sum `total`, exactly (Knuth's TwoSum)."""
    part = total - a
    return np.abs((a - (total - part)) + (b - part))


def _column(numbers: Array, like: Array) -> Array:
    return numbers.reshape(len(numbers), *[1] * np.ndim(like))
