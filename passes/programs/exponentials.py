"""Softmaxes that form `local` writes with few exponentials: the line, and equally spaced keys (docs/programs.md).

**The line** g as attention is what a gate h(g) u needs: softmax weights are bounded, and h is not.
For x = d g, with nodes 0 = r_1 < ... < r_n = 1 symmetric about 1/2 and S(x) = sum_j w_j e^(-r_j x) ~ (1 - e^-x) / x,
g ~ (1 - e^-x) / (d S(x)): a softmax over n keys with logits -r_j d g + ln w_j, in which the first key has the value
1 / (d w_1), the last one minus that, and the others are bias tokens of value 0. `max_error` is
|S(x) x / (1 - e^-x) - 1|. The exponentials of mirrored nodes, r and 1 - r, are e^(-r x) and e^-x / e^(-r x): their
logits are small where they count.

**Equally spaced keys** have weights that are powers of one exponential r = e^(c y).
For a program y Phi(y) with Phi(-y) = 1 - Phi(y), such as GELU, Phi is (r + h) / (r + 1/r + 2 h), with z = r + 1/r and

    h = base + b_1 / (z + s_1) + ... + b_i / (z + s_i + b_(i+1) / (z + s_(i+1))) + ...

Nothing that is divided by is 0 for z >= 2. r is at most e^`REACH`; where 1/r is infinite, h is `base` and Phi is 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
from numpy.typing import DTypeLike

from passes.programs.head import Array, Head, heads_over, narrowed

LOWEST, HIGHEST = -80.0, 160.0  # of x: e^80 and the smallest e^(-x/2) = e^-80 are normal float32 numbers


@dataclass(frozen=True)
class Line:
    """The line g on |g| <= domain."""

    name: str
    step: float  # d, a power of two up to its sign, which exchanges the two sides
    end: float  # weight of the keys r = 0 and r = 1
    pairs: tuple[tuple[float, float], ...]  # (r, w) of the nodes below 1/2; the node 1 - r has the same weight
    middle: float  # weight of the node 1/2, 0 for none
    domain: float
    max_error: float

    @property
    def lowest(self) -> float:
        """The g on one side beyond which the line is constant; on the other side that is outside the domain."""
        return LOWEST / self.step

    @property
    def largest(self) -> float:
        """A bound on the line's magnitude: that of the values of its two ends."""
        return 1.0 / abs(self.step * self.end)

    @cached_property
    def keys(self) -> tuple[tuple[float, float, float], ...]:
        """(slope, offset, value) of every key of the softmax whose mean of values is the line; the two ends first."""
        value = 1.0 / (self.step * self.end)
        nodes = [(r, w) for rate, w in self.pairs for r in (rate, 1.0 - rate)]
        nodes += [(0.5, self.middle)] if self.middle else []
        ends = [(0.0, math.log(self.end), value), (-self.step, math.log(self.end), -value)]
        return (*ends, *((-r * self.step, math.log(w), 0.0) for r, w in nodes))

    def evaluate(self, g: Array) -> Array:
        """In float64, with the operations of form `local`."""
        x = np.clip(self.step * g, LOWEST, HIGHEST)
        far = np.exp(-x)
        total = self.end * (1.0 + far)
        for rate, weight in self.pairs:
            near = np.exp(-rate * x)
            total = total + weight * (near + far / near)
        if self.middle:
            total = total + self.middle * np.exp(-0.5 * x)
        return np.asarray((1.0 - far) / (self.step * total))

    def heads(self, head: Head) -> tuple[Head, ...]:
        """The heads of `head`'s gate: self value c line(g) + d times what the values read.

        A product of two softmaxes is one over all pairs of keys. The self key of `head` makes two heads, one per end of
        the line, if c is not 0. Constant values, which are multiples of what the values read, need no line: they are
        heads over the keys of `head` alone.
        """
        multiples = [head.d, *(token.value for token in head.bias_tokens)]
        ends = [head.c * value for _, _, value in self.keys[:2]]
        # Relative to the self key, which comes first: beside a steep slope, the line's would be rounded.
        relative = [(slope - head.beta, offset - head.gamma) for slope, offset in head.logits]
        pairs = [(a + slope, b + offset) for a, b in relative for slope, offset, _ in self.keys]
        return (*heads_over(pairs, ends), *heads_over(head.logits, multiples))

    def rounded(self, dtype: DTypeLike) -> Line:
        narrow = partial(narrowed, dtype=dtype)
        pairs = tuple((narrow(rate), narrow(weight)) for rate, weight in self.pairs)
        return replace(self, end=narrow(self.end), middle=narrow(self.middle), pairs=pairs)


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
        p, r = np.ones(1), np.array([self.base])
        for fraction in self.fractions:
            bottom, top = np.ones(1), np.zeros(1)
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
