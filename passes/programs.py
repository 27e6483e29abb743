"""Head programs: one activation as a sum of attention heads, as plain numbers.

Comes in: coefficients. Goes out: `Program`, which the forms turn into nodes. A head attends from one token to
itself and to m constant *bias tokens* (persistent memory vectors). With y the neuron's pre-activation,

    self logit        alpha y^2 + beta y + gamma      self value        c z + d
    bias-token logit  a_j y + b_j                     bias-token value  v_j

where z is y, or for a gated block the other projection. A head returns the softmax-weighted sum of the values, a
program the sum of its heads plus `linear z + constant` (a head that attends to itself alone). Theorem 3 of Huben
and Morris (arXiv 2309.08593) is the case of one head, one bias token with logit and value 0, self logit y and
self value y: SiLU. Errors are over max(1, |f|), in units of the activation's output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import DTypeLike, NDArray

Array = NDArray[np.float64]

FACTORED = 60.0
"""Up to this size the offset of a logit is taken out of the exponential: e^(a y + b) = e^b e^(a y).

The rounding of a logit is proportional to its size, so that offsets would cost digits. Beyond it e^b could leave
the range of float32; such offsets belong to steep keys, whose weights are 0 or 1.
"""


@dataclass(frozen=True)
class BiasToken:
    """A constant token as one head sees it: logit `slope y + offset`, value `value`."""

    slope: float = 0.0
    offset: float = 0.0
    value: float = 0.0


@dataclass(frozen=True)
class Head:
    """One attention head over {self, bias tokens}; the self logit is `alpha y^2 + beta y + gamma`."""

    beta: float
    bias_tokens: tuple[BiasToken, ...] = (BiasToken(),)
    alpha: float = 0.0
    gamma: float = 0.0
    c: float = 1.0
    d: float = 0.0

    def evaluate(self, y: Array, z: Array) -> Array:
        """The head's output in float64, softmax with the largest logit subtracted; any shape."""
        logits = [(self.alpha * y + self.beta) * y + self.gamma]
        logits += [token.slope * y + token.offset for token in self.bias_tokens]
        values = [self.c * z + self.d, *(np.full_like(y, token.value) for token in self.bias_tokens)]
        with np.errstate(all="ignore"):
            top = np.max(logits, axis=0)
            weights = [np.exp(logit - top) for logit in logits]
            total = np.sum(weights, axis=0)
            return np.asarray(sum(weight * value for weight, value in zip(weights, values, strict=True)) / total)

    @property
    def zero_bias(self) -> bool:
        """Whether there is one bias token, with key and value zero: Theorem 3 as it stands."""
        return self.bias_tokens == (BiasToken(),) and self.gamma == 0.0

    def shifted(self, slope: float, offset: float) -> Head:
        """The same head with `slope y + offset` added to every logit, which softmax does not see."""
        tokens = tuple(replace(t, slope=t.slope + slope, offset=t.offset + offset) for t in self.bias_tokens)
        return replace(self, beta=self.beta + slope, gamma=self.gamma + offset, bias_tokens=tokens)

    def unscaled(self) -> Head:
        """The head with self value z + d / c, whose output times c is this head's.

        A factor that is applied last cannot make a value infinite that the softmax then weighs with 0.
        """
        tokens = tuple(replace(token, value=token.value / self.c) for token in self.bias_tokens)
        return replace(self, c=1.0, d=self.d / self.c, bias_tokens=tokens)

    def rounded(self, dtype: DTypeLike, *, factored: bool = True) -> Head:
        """The head as it stands in a graph of a type.

        Not `factored`, logits are computed with their offsets, and every coefficient is rounded. Otherwise an offset of
        at most `FACTORED` stands there as the factor e^offset of the bias token's weight, and the value
        multiplied by it; these two are rounded. The self logit has no offset there: all logits are shifted by it. The
        factor c stands behind the softmax (`unscaled`).
        """
        if self.c not in (0.0, 1.0):
            scale = float(np.asarray(self.c, dtype=dtype))
            inner = self.unscaled().rounded(dtype, factored=factored)
            tokens = tuple(replace(token, value=token.value * scale) for token in inner.bias_tokens)
            return replace(inner, c=scale, d=inner.d * scale, bias_tokens=tokens)

        def narrow(number: float) -> float:
            return float(np.asarray(number, dtype=dtype))

        def token_of(token: BiasToken) -> BiasToken:
            if abs(token.offset) > FACTORED or not factored:
                return BiasToken(narrow(token.slope), narrow(token.offset), narrow(token.value))
            weight = narrow(math.exp(token.offset))
            value = narrow(weight * token.value) / weight
            return BiasToken(narrow(token.slope), math.log(weight), value)

        plain = self.shifted(0.0, -self.gamma)
        return Head(
            beta=narrow(plain.beta),
            alpha=narrow(plain.alpha),
            c=narrow(plain.c),
            d=narrow(plain.d),
            bias_tokens=tuple(token_of(token) for token in plain.bias_tokens),
        )

    def conditioned(self) -> Head:
        """The shift of this head that float32 likes best: the key with the largest logit at y = 0 becomes zero.

        The rounding of a logit is proportional to its size, so the keys that share the weight should have small
        logits. For the GELU programs this halves the float32 error or better.
        """
        keys = [(self.gamma, self.beta), *((token.offset, token.slope) for token in self.bias_tokens)]
        offset, slope = max(keys)
        return self.shifted(-slope, -offset)


@dataclass(frozen=True)
class Program:
    """A sum of heads that computes one activation.

    Attributes:
        name: the name reports print, such as `silu` or `gelu_erf_m8`.
        heads: attention heads per neuron.
        linear: factor of z outside the heads (a head that attends to itself alone).
        constant: constant outside the heads.
        max_error: certified largest error against the activation over max(1, |f|), on `domain`, in exact arithmetic.
        coefficient_error: largest change, over max(1, |f|), that rounding the coefficients to a type made.
        rounding: largest error over max(1, |f|) that evaluating the program in float32 was measured to add to
            `max_error`; what an exact program shows is a few units in the last place.
        domain: largest |y| for which `max_error` holds.
        double: whether the heads need float64 arithmetic, since they are small differences of large values.
        certificate: how `max_error` was established, in one line.
    """

    name: str
    heads: tuple[Head, ...]
    linear: float = 0.0
    constant: float = 0.0
    max_error: float = 0.0
    coefficient_error: float = 0.0
    rounding: float = 4 * 2.0**-24
    domain: float = float("inf")
    double: bool = False
    certificate: str = "identity"

    @property
    def exact(self) -> bool:
        """Whether the program equals the activation in exact arithmetic."""
        return self.max_error == 0.0

    @property
    def bias_tokens(self) -> int:
        """The most bias tokens that one of the heads attends to."""
        return max(len(head.bias_tokens) for head in self.heads)

    def evaluate(self, y: Array, z: Array | None = None) -> Array:
        """The program in float64. `z` (default y) is what self values read; shapes broadcast."""
        source = y if z is None else z
        return np.asarray(sum(head.evaluate(y, source) for head in self.heads) + self.linear * source + self.constant)

    def rounded(self, dtype: DTypeLike, *, factored: bool = True) -> Program:
        """The program with coefficients of a type, as it stands in a graph; what that changes is measured and stated.

        The change is the largest over a grid that is dense where the weights move and reaches 1e6, with a tenth added.
        """
        return self if np.dtype(dtype) == np.float64 else _rounded(self, np.dtype(dtype), factored)

    def scaled(self, *, inner: float = 1.0, outer: float = 1.0) -> Program:
        """The program of `outer f(inner y)`, given that of f; self values keep reading y."""
        if inner == 1.0 and outer == 1.0:
            return self
        heads = tuple(
            Head(
                alpha=head.alpha * inner * inner,
                beta=head.beta * inner,
                gamma=head.gamma,
                c=head.c * inner * outer,
                d=head.d * outer,
                bias_tokens=tuple(
                    BiasToken(token.slope * inner, token.offset, token.value * outer) for token in head.bias_tokens
                ),
            )
            for head in self.heads
        )
        return replace(
            self,
            heads=heads,
            linear=self.linear * inner * outer,
            constant=self.constant * outer,
            max_error=self.max_error * abs(outer),
            rounding=self.rounding * max(1.0, abs(outer)),
            domain=self.domain / abs(inner),
        )


def _kinks(head: Head) -> Array:
    """Points around those where a steep key takes over."""
    steep = [token for token in head.bias_tokens if abs(token.offset) > FACTORED and token.slope != 0.0]
    near = 1.0 + np.arange(-64, 65) * 2.0**-25
    return np.concatenate([np.zeros(0), *(-token.offset / token.slope * near for token in steep)])


_SAME = 1e-15
"""Two float64 evaluations this close show their own rounding, no other coefficients."""


@cache
def _rounded(program: Program, dtype: np.dtype[np.generic], factored: bool) -> Program:
    result = replace(
        program,
        heads=tuple(head.rounded(dtype, factored=factored) for head in program.heads),
        linear=float(np.asarray(program.linear, dtype=dtype)),
        constant=float(np.asarray(program.constant, dtype=dtype)),
    )
    if result == program:
        return program
    tails = np.logspace(-3, 6, 2000)
    points = np.concatenate([np.linspace(-32.0, 32.0, 65537), tails, -tails, *map(_kinks, program.heads)])
    points = points[np.abs(points) <= program.domain]
    exact = program.evaluate(points)
    change = np.abs(result.evaluate(points) - exact) / np.maximum(1.0, np.abs(exact))
    worst = float(change.max())
    return program if worst <= _SAME else replace(result, coefficient_error=1.1 * worst)
