"""A proved bound on how much a head program changes when its coefficients do.

It bounds |other - program| / max(1, |program|) on the domain, for two programs of the same shape. With p_j the weights
and v_j the values of a head, o its output, and logits changed by d_j, the output of a head changes by

    sum over j of (p_j (exp(d_j) - 1) (v_j - o) + p_j exp(d_j) (v'_j - v_j)) / sum of p_j exp(d_j),

which is evaluated in interval arithmetic on cells, with signs. Where a steep key moves, d_j is large on a cell around
its kink, and this bound is useless there. A second one holds: both outputs are means of the values.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

import numpy as np

from passes.certificates.intervals import Interval, affine, largest, least_size, product, size, summed, total, weighted
from passes.programs.head import Head
from passes.programs.softmax import FACTORED, Array, Keys

_TIGHT = 1.1
_MOST_CELLS = 200_000
_WIDEST = 2.0**128
"""Cells end here, beyond the largest number of any type to which coefficients are rounded."""

_GROWN = 0.1
"""Where a weight may change by more than this fraction, the second bound is computed as well."""

_FAR = 200.0
"""A logit that grows by more than this belongs to a steep key."""


class Heads(Protocol):
    """A sum of heads and a line, such as `passes.programs.program.Program`, which imports this module."""

    @property
    def heads(self) -> tuple[Head, ...]:
        """The heads."""

    @property
    def linear(self) -> float:
        """Slope of the line."""

    @property
    def constant(self) -> float:
        """Offset of the line."""

    @property
    def domain(self) -> float:
        """Largest |y|."""


def largest_change(program: Heads, other: Heads, *, enough: float) -> float:
    """A bound on |other - program| / max(1, |program|) over the domain; below `enough` it need not be tight.

    Self values read y. Where all values are multiples of it they may read anything, as in a gate, and the bound also
    holds for the multiples. Infinite for quadratic self logits.
    """
    if any(head.alpha != 0.0 for head in (*program.heads, *other.heads)):
        return np.inf
    bound = _largest(program, other, enough, gated=False)
    multiples = program.constant == 0.0 and all(head.multiples is not None for head in program.heads)
    return max(bound, _largest(program, other, enough, gated=True)) if multiples else bound


@dataclass(frozen=True, eq=False)
class _Pair:
    """A head, and the changes of its logits relative to the self key's: `slopes y + offsets` [keys, 1]."""

    head: Head
    other: Head
    slopes: Array
    offsets: Array

    @classmethod
    def of(cls, head: Head, other: Head) -> _Pair:
        """The pair, with exact differences, each rounded once."""
        # As fractions: a difference of two differences cancels in floating point.
        moved = [
            [Fraction(b) - Fraction(a) for a, b in zip(*keys, strict=True)]
            for keys in zip(head.logits, other.logits, strict=True)
        ]
        relative = np.array([[float(number - own) for number, own in zip(key, moved[0], strict=True)] for key in moved])
        return cls(head, other, relative[:, :1], relative[:, 1:])

    def enclosed(self, low: Array, high: Array, z: Interval) -> tuple[Interval, Interval]:
        """(change of the output, output of the head) over cells."""
        values, weights = _values(self.head, z), self.head.keys.enclosed(low, high)
        moves = self._moves(low, high)
        # A key that grows by e^200 had no weight before. It is taken to have none afterwards (growth -1), and what it
        # may have then is added back below.
        far = moves[1] > _FAR
        least, most = (np.where(far, -1.0, np.expm1(np.minimum(end, _FAR))) for end in moves)
        growth = least, most
        grown = growth[0] + 1.0, growth[1] + 1.0
        differences = _value_changes(self.head, self.other, z)
        # o - v_j as the mean of v_k - v_j: intervals of o and v_j alone would forget that o contains v_j.
        from_mean = [summed(weighted(weights, _apart(values, values, j))) for j in range(len(far))]
        gaps = -np.array([gap[1] for gap in from_mean]), -np.array([gap[0] for gap in from_mean])
        terms = total(weighted(weights, product(growth, gaps)), weighted(weights, weighted(grown, differences)))
        # The new weights' sum is a mean of the factors exp(d_j), so never below the smallest of them.
        least = np.maximum(np.sum(weights[0] * grown[0], axis=0), np.min(grown[0], axis=0))
        scale = np.sum(weights[1] * grown[1], axis=0), np.maximum(least, 1e-100)
        change = weighted((1.0 / scale[0], 1.0 / scale[1]), summed(terms))
        if max(np.max(growth[1]), -np.min(growth[0])) > _GROWN:
            # Near a steep key that moves. The mean after is that without the far keys times their missing weight, plus
            # at most `back`; and the second bound holds on every cell.
            after = self.other.keys.enclosed(low, high)
            extra = np.where(far, after[1], 0.0)
            back = np.sum(extra * (size(gaps) + size(differences)), axis=0)
            kept = np.maximum(1.0 - np.sum(extra, axis=0), 0.0)
            change = weighted((kept, np.ones_like(kept)), change)
            most = self._among_values((low, high), z, weights, after)
            known = least > 1e-100
            change = (
                np.where(known, np.maximum(change[0] - back, -most), -most),
                np.where(known, np.minimum(change[1] + back, most), most),
            )
        return change, summed(weighted(weights, values))

    def _moves(self, low: Array, high: Array) -> Interval:
        """The changes d_j of the logits, relative to that of the largest logit at the cell's centre."""
        # Softmax does not see a common change. With the heaviest key's change at 0, light keys may change a lot.
        top = np.argmax(self.head.keys.logits((low + high) / 2.0), axis=0)
        slopes, offsets = self.slopes - self.slopes[top].T, self.offsets - self.offsets[top].T
        ends = slopes * low + offsets, slopes * high + offsets
        return np.minimum(*ends), np.maximum(*ends)

    def _among_values(self, cells: Interval, z: Interval, weights: Interval, weights_after: Interval) -> Array:
        """A bound on the change that needs no bound on the changes of the logits.

        Both means are near the value of any one key: their distance from it is the weighted sum of the distances of
        the other values. Around the kink of a steep key, only the mean of the others is near its value, not each one.
        """
        values, after = _values(self.head, z), _values(self.other, z)
        differences = size(_value_changes(self.head, self.other, z))
        bounds = []
        for j in range(len(differences)):
            apart, apart_after = _apart(values, values, j), _apart(after, values, j)
            each = np.sum(weights[1] * size(apart) + weights_after[1] * size(apart_after), axis=0)
            bounds.append(each + differences[j])
            if abs(self.head.keys.offsets[j]) > FACTORED:
                means = (
                    _mean_without(head.keys, cells, gap, j)
                    for head, gap in ((self.head, apart), (self.other, apart_after))
                )
                bounds.append(sum(size(mean) for mean in means) + differences[j])
        return np.asarray(np.min(bounds, axis=0))


def _apart(values: Interval, origin: Interval, j: int) -> Interval:
    """The differences of all values from that of key j, exactly 0 for key j."""
    apart = values[0] - origin[1][j], values[1] - origin[0][j]
    apart[0][j] = apart[1][j] = 0.0
    return apart


def _mean_without(keys: Keys, cells: Interval, values: Interval, j: int) -> Interval:
    """The weighted mean over all keys except j."""
    rest = Keys(np.delete(keys.slopes, j), np.delete(keys.offsets, j))
    return summed(weighted(rest.enclosed(*cells), (np.delete(values[0], j, 0), np.delete(values[1], j, 0))))


def _values(head: Head, z: Interval) -> Interval:
    """The values over cells [keys, cells]."""
    return _stacked(affine(head.c, head.d, z), [token.value for token in head.bias_tokens])


def _value_changes(head: Head, other: Head, z: Interval) -> Interval:
    """The differences v'_j - v_j over cells [keys, cells]."""
    pairs = zip(head.bias_tokens, other.bias_tokens, strict=True)
    return _stacked(affine(other.c - head.c, other.d - head.d, z), [new.value - old.value for old, new in pairs])


def _stacked(own: Interval, tokens: list[float]) -> Interval:
    rest = np.multiply.outer(np.array(tokens), np.ones_like(own[0]))
    return np.concatenate([own[0][None], rest]), np.concatenate([own[1][None], rest])


def _largest(program: Heads, other: Heads, enough: float, *, gated: bool) -> float:
    """The bound for z = y, or for z = 1."""
    pairs = [_Pair.of(*heads) for heads in zip(program.heads, other.heads, strict=True)]
    straight = other.linear - program.linear, other.constant - program.constant

    # The second value, on the degenerate cell at the centre, is nearly exact: cells with a much larger bound are split.
    def bounds(low: Array, high: Array) -> tuple[Array, Array]:
        return _relative(low, high), _relative((low + high) / 2.0, (low + high) / 2.0)

    def _relative(low: Array, high: Array) -> Array:
        z = (np.ones_like(low), np.ones_like(low)) if gated else (low, high)
        changes, outputs = zip(*(pair.enclosed(low, high, z) for pair in pairs), strict=True)
        change = total(*changes, affine(*straight, z))
        output = total(*outputs, affine(program.linear, program.constant, z))
        return size(change) / np.maximum(1.0, least_size(output))

    bound, _, _ = largest(bounds, _edges(min(program.domain, _WIDEST)), tight=_TIGHT, enough=enough, most=_MOST_CELLS)
    return bound * (1.0 + 1e-6)


def _edges(limit: float) -> Array:
    """Cells of width 1/8 up to 32, then each twice as far out as the last."""
    edges = np.concatenate([np.arange(0.0, 32.0, 0.125), np.exp2(np.arange(5.0, 129.0))])
    edges = np.append(edges[edges < limit], limit)
    return np.concatenate([-edges[:0:-1], edges])
