"""Head programs: one activation as a sum of attention heads, as plain numbers.

Comes in: coefficients. Goes out: `Program`, which the forms turn into nodes. A head attends from one token to
itself and to m constant *bias tokens* (persistent memory vectors). With y the neuron's pre-activation,

    self logit        alpha y^2 + beta y + gamma      self value        c z + d
    bias-token logit  a_j y + b_j                     bias-token value  v_j

where z is y, or for a gated block the other projection. A head returns the softmax-weighted sum of the values, a
program the sum of its heads plus `linear z + constant` (a head that attends to itself alone). Theorem 3 of Huben
and Morris (arXiv 2309.08593) is the case of one head, one bias token with logit and value 0, self logit y and
self value y: SiLU. Errors are absolute, in units of the activation's output.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import DTypeLike, NDArray

Array = NDArray[np.float64]


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

    def rounded(self, dtype: DTypeLike) -> Head:
        """The head with its coefficients rounded to a type."""

        def narrow(number: float) -> float:
            return float(np.asarray(number, dtype=dtype))

        return Head(
            beta=narrow(self.beta),
            alpha=narrow(self.alpha),
            gamma=narrow(self.gamma),
            c=narrow(self.c),
            d=narrow(self.d),
            bias_tokens=tuple(
                BiasToken(narrow(token.slope), narrow(token.offset), narrow(token.value)) for token in self.bias_tokens
            ),
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
        max_error: certified largest absolute error against the activation, over `domain`, in exact arithmetic.
        coefficient_error: largest change, over max(1, |f|), that rounding the coefficients to a type made.
        rounding: largest error over max(1, |f|) that evaluating the program in float32 was measured to add to
            `max_error`; what an exact program shows is a few units in the last place.
        domain: largest |y| for which `max_error` holds.
    """

    name: str
    heads: tuple[Head, ...]
    linear: float = 0.0
    constant: float = 0.0
    max_error: float = 0.0
    coefficient_error: float = 0.0
    rounding: float = 4 * 2.0**-24
    domain: float = float("inf")

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

    def rounded(self, dtype: DTypeLike) -> Program:
        """The program with coefficients of a type, as it stands in a graph; what that changes is measured and stated.

        The change is the largest over a grid that is dense where the weights move and reaches 1e6, with a tenth added.
        """
        result = _rounded(self, np.dtype(dtype))
        return self if result == self else result

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

    def gate(self) -> Program:
        """The program of f(y) u, given that of a bounded f whose values are constants: what was d becomes d u.

        Raises:
            ValueError: when a self value reads y, or a bias token has a value.
        """
        plain = all(head.c == 0.0 and all(token.value == 0.0 for token in head.bias_tokens) for head in self.heads)
        if not plain or self.linear != 0.0:
            raise ValueError(f"{self.name} is not a program of constant self values and valueless bias tokens")
        heads = tuple(replace(head, c=head.d, d=0.0) for head in self.heads)
        return replace(self, name=f"{self.name}_gate", heads=heads, linear=self.constant, constant=0.0)


@cache
def _rounded(program: Program, dtype: np.dtype[np.generic]) -> Program:
    result = replace(
        program,
        heads=tuple(head.rounded(dtype) for head in program.heads),
        linear=float(np.asarray(program.linear, dtype=dtype)),
        constant=float(np.asarray(program.constant, dtype=dtype)),
    )
    if result == program:
        return program
    tails = np.logspace(-3, 6, 2000)
    points = np.concatenate([np.linspace(-32.0, 32.0, 65537), tails, -tails])
    exact = program.evaluate(points)
    change = np.abs(result.evaluate(points) - exact) / np.maximum(1.0, np.abs(exact))
    return replace(result, coefficient_error=1.1 * float(change.max()))
