"""Heads with equally spaced keys, whose weights all come from one exponential.

With keys at logits j c y + ln w_j for j = -n ... n, the exponentials are powers of r = e^(c y). For a program y Phi(y)
with Phi(-y) = 1 - Phi(y), such as GELU, the weights are symmetric and polynomials in z = r + 1/r:

    Phi(y) = (r P(z) + R(z)) / (z P(z) + 2 R(z)) = (r + h) / (r + 1/r + 2 h),   h = R(z) / P(z)

with P monic. Expanded in powers of r, the denominator's coefficients are the weights w_j, all positive, and those of
the numerator are the weights times the multiples of y. The second spelling has 8 operations besides those of P and R,
keeps its digits where Phi is small, and nothing overflows for |c y| <= `REACH`, where Phi is 0 or 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import DTypeLike

from passes.programs.head import Head, heads_over
from passes.programs.softmax import UNIT, Array

REACH = 20.0
"""|c y| is clipped to this. Phi is within 1e-9 of 0 or 1 there, and z^4 is a finite float32 number."""


SENSITIVITY = 0.55
"""An upper bound on |x^2 dPhi/dx|, x = c y, for every entry of the table; the tests prove it."""


@dataclass(frozen=True)
class Powers:
    """The multiple `factor` Phi(y) of what the values read.

    Attributes:
        step: c.
        numerator: coefficients of R, highest power first; as many as P has, with its leading 1.
        denominator: coefficients of P after its leading 1, highest power first.
        factor: factor of Phi.
    """

    step: float
    numerator: tuple[float, ...]
    denominator: tuple[float, ...]
    factor: float = 1.0

    @property
    def ends(self) -> tuple[float, float]:
        """Bounds of y as a self value: beyond, on the side where Phi is 0, y times Phi would not be."""
        end = REACH / self.step
        return (-end, math.inf) if self.step > 0.0 else (-math.inf, -end)

    def own(self, y: Array) -> Array:
        """The self value of y Phi(y)."""
        return np.clip(y, *self.ends)

    def mean(self, y: Array) -> Array:
        """`factor` Phi(y) in float64, with the operations of form `local`."""
        own, other, _ = self._parts(y)
        return np.asarray(self.factor * (own / (own + other)))

    def float64_rounding(self, y: Array) -> Array:
        """A bound on the absolute rounding error of `mean` in float64."""
        own, other, h = self._parts(y)
        x = self._logit(y)
        r = np.exp(x)
        z = r + 1.0 / r
        # One product makes x, and the exponential multiplies its rounding by x; a polynomial has two operations and
        # one factor z per degree, and R has coefficients of both signs.
        relative = 4.0 * np.abs(x) + 12.0
        degree = len(self.denominator)
        p = np.polyval([1.0, *self.denominator], z)
        sizes = np.polyval(np.abs(self.numerator), z) / p
        off = sizes * 2.0 * (degree * (relative + 3.0) + 2.0) + np.abs(h)
        total = own + other
        share = (relative * (r + 1.0 / r) + 2.0 * off) / total + 4.0
        here = (relative * r + off) / total + (own / total) * share + 2.0 * np.abs(own / total)
        return np.asarray(abs(self.factor) * UNIT * here)

    def _parts(self, y: Array) -> tuple[Array, Array, Array]:
        """R + h, 1/r + h, and h."""
        r = np.exp(self._logit(y))
        inverse = 1.0 / r
        z = r + inverse
        h = np.polyval(self.numerator, z) / np.polyval([1.0, *self.denominator], z)
        return np.asarray(r + h), np.asarray(inverse + h), np.asarray(h)

    def _logit(self, y: Array) -> Array:
        with np.errstate(over="ignore"):  # c y may be infinite for the largest y
            return np.clip(self.step * y, -REACH, REACH)

    def scaled(self, inner: float, outer: float) -> Powers:
        """The multiple of y in `outer f(inner y)`, f being y times this one."""
        return replace(self, step=self.step * inner, factor=self.factor * inner * outer)

    def rounded(self, dtype: DTypeLike) -> Powers:
        """The powers with coefficients rounded to a type; those of the table are float32 numbers."""

        def narrow(number: float) -> float:
            return float(np.asarray(number, dtype=dtype))

        numerator, denominator = (tuple(map(narrow, row)) for row in (self.numerator, self.denominator))
        return Powers(narrow(self.step), numerator, denominator, narrow(self.factor))

    def change(self, other: Powers) -> float:
        """A bound on |f' - f| / max(1, |f|), for f = y `factor` Phi(y) and f' with another step and factor."""
        step, factor = (abs(b / a - 1.0) for a, b in ((self.step, other.step), (self.factor, other.factor)))
        # y (Phi(c' y) - Phi(c y)) is (c' - c) y^2 Phi'(x) somewhere between, and y = x / c.
        return (SENSITIVITY * abs(self.factor / self.step) * step / (1.0 - step) ** 2 + factor) * (1.0 + 1e-6)

    @property
    def heads(self) -> tuple[Head, ...]:
        """The same as heads: one for every key with a nonzero multiple, all over the same keys."""
        p = _expanded((1.0, *self.denominator))
        shared = np.pad(_expanded(self.numerator), 1)
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
