"""Heads with equally spaced keys, whose weights are powers of one exponential r = e^(c y) (docs/programs.md#gelu).

For a program y Phi(y) with Phi(-y) = 1 - Phi(y), such as GELU, Phi is (r + h) / (r + 1/r + 2 h), with z = r + 1/r and

    h = base + b_1 / (z + s_1) + ... + b_i / (z + s_i + b_(i+1) / (z + s_(i+1))) + ...

Nothing that is divided by is 0 for z >= 2. r is at most e^`REACH`; where 1/r is infinite, h is `base` and Phi is 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import DTypeLike

from passes.programs.head import Array, Head, heads_over, narrowed

REACH = 80.0  # c y is at most this: e^80 is finite in float32, and Phi is 1 long before


@dataclass(frozen=True)
class Powers:
    """The multiple `factor` Phi(y) of what the values read."""

    step: float  # c
    parts: tuple[float, ...]  # the b
    shifts: tuple[float, ...]  # the s, as many
    pairs: int = 0  # how many fractions of two levels there are; theirs are the last parts and shifts
    base: float = 0.0  # h far from 0
    factor: float = 1.0

    @property
    def fractions(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """Each fraction as (b, s) of its levels, one or two."""
        levels = tuple(zip(self.parts, self.shifts, strict=True))
        single = len(levels) - 2 * self.pairs
        paired = zip(levels[single::2], levels[single + 1 :: 2], strict=True)
        return (*((level,) for level in levels[:single]), *paired)

    @property
    def polynomials(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """P and R: coefficients of the same degrees, highest power first; P has a leading 1."""
        p: Array = np.ones(1)
        r: Array = np.array([self.base])
        for fraction in self.fractions:
            bottom: Array = np.ones(1)
            top: Array = np.zeros(1)
            for part, shift in reversed(fraction):
                bottom, top = np.asarray(np.polyadd(np.polymul([1.0, shift], bottom), top)), part * bottom
            r = np.asarray(np.polyadd(np.polymul(r, bottom), np.polymul(p, top)))
            p = np.asarray(np.polymul(p, bottom))
        return tuple(p.tolist()), tuple(np.pad(r, (len(p) - len(r), 0)).tolist())

    def mean(self, y: Array) -> Array:
        """`factor` Phi(y) in float64, with the operations of form `local`."""
        with np.errstate(over="ignore", divide="ignore"):
            # Nothing is clipped on the other side: 1/r may be infinite.
            r = np.exp(np.minimum(self.step * y, REACH))
            inverse = 1.0 / r
            z = r + inverse
            h = np.asarray(self.base)
            for fraction in self.fractions:
                below: Array = np.zeros(())
                for part, shift in reversed(fraction):
                    below = np.asarray(part / (z + shift + below))
                h = h + below
            own = r + h
            return np.asarray(self.factor * (own / (own + (inverse + h))))

    def scaled(self, inner: float, outer: float) -> Powers:
        """The multiple of y in `outer f(inner y)`, f being y times this one."""
        return replace(self, step=self.step * inner, factor=self.factor * inner * outer)

    def rounded(self, dtype: DTypeLike) -> Powers:
        narrow = partial(narrowed, dtype=dtype)
        parts, shifts = (tuple(map(narrow, row)) for row in (self.parts, self.shifts))
        return Powers(narrow(self.step), parts, shifts, self.pairs, narrow(self.base), narrow(self.factor))

    @property
    def heads(self) -> tuple[Head, ...]:
        """The same as heads: one for every key with a nonzero multiple, all over the same keys."""
        p, r = map(_expanded, self.polynomials)
        shared = np.pad(r, 1)
        # Index n + j belongs to r^j; a product with r or 1/r shifts by one.
        own, other = np.pad(p, (2, 0)) + shared, np.pad(p, (0, 2)) + shared
        weights = own + other
        count = len(weights) // 2
        keys = [(j * self.step, math.log(weight)) for j, weight in zip(range(-count, count + 1), weights, strict=True)]
        return heads_over(keys, (self.factor * own / weights).tolist())


def _expanded(coefficients: tuple[float, ...]) -> Array:
    """A polynomial in z = r + 1/r, highest power first, as the coefficients of r^-n ... r^n."""
    result = np.array(coefficients[:1])
    for coefficient in coefficients[1:]:
        # Horner's rule: the product with z shifts the coefficients both ways.
        result = np.pad(result, (0, 2)) + np.pad(result, (2, 0))
        result[len(result) // 2] += coefficient
    return result
