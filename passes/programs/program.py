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
from numpy.typing import DTypeLike

from passes.programs.changes import largest_change
from passes.programs.softmax import FACTORED, UNIT, Array, Keys

__all__ = ["FACTORED", "Array", "BiasToken", "Head", "Program"]


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
        """The head's output in float64; shapes broadcast."""
        multiple, constant = self.mean(y)
        return np.asarray(z * multiple + constant)

    def mean(self, y: Array) -> tuple[Array, Array]:
        """(multiple, constant): the head's output is `z multiple + constant`, each a number of the values' size."""
        own, *others = self.keys.weights(y)
        values = [token.value for token in self.bias_tokens]
        constant = sum((weight * value for weight, value in zip(others, values, strict=True)), own * self.d)
        return self.c * own, np.asarray(constant)

    def float64_rounding(self, y: Array, z: Array, *, shifted: bool, steps: int) -> Array:
        """As `Program.float64_rounding`, of this head; y and z of one shape, the options as in `Keys.rounding`."""
        unit = np.where(np.abs(z) > 2.0**900, 2.0**200, 1.0)  # no value overflows that a weight makes small
        own = self.c * (z / unit) + self.d / unit
        others = np.array([token.value for token in self.bias_tokens]).reshape(-1, *[1] * y.ndim)
        values = np.concatenate([own[None], others / unit])
        own_size = np.abs(self.c * (z / unit)) + abs(self.d) / unit
        rounding = (
            self.keys.rounding(y, values, shifted=shifted, steps=steps)
            + 3.0 * UNIT * self.keys.weights(y)[0] * own_size
        )
        return np.asarray(rounding * unit)

    @property
    def keys(self) -> Keys:
        """The logits, its own first."""
        slopes, offsets = zip((self.beta, self.gamma), *((t.slope, t.offset) for t in self.bias_tokens), strict=True)
        return Keys(np.array(slopes), np.array(offsets), self.alpha)

    @property
    def multiples(self) -> tuple[tuple[float, float], ...] | None:
        """All keys (slope, offset) in order, where all values are multiples of z and logits are affine; else None."""
        if self.alpha != 0.0 or self.d != 0.0 or any(token.value != 0.0 for token in self.bias_tokens):
            return None
        return tuple(sorted([(self.beta, self.gamma), *((token.slope, token.offset) for token in self.bias_tokens)]))

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
        max_error: certified largest error against the activation over max(1, |f|), on `domain`, in exact arithmetic
            for the coefficients as they stand. Only the ln 2 of Mish stands for the real number.
        coefficient_error: bound on the change, over max(1, |f|), that rounding the coefficients to a type made.
        rounding: largest error over max(1, |f|) that evaluating the program adds to `max_error`: measured in float32
            (what an exact program shows is a few units in the last place), `in_double` bounded on a grid.
        domain: largest |y| for which `max_error` holds.
        double: whether the heads need float64 arithmetic, since they are small differences of large values.
        measured: whether `max_error` is no proved bound but what a dense grid shows, as for fits on the spot.
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
    measured: bool = False
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
        """The program in float64. `z` (default y) is what self values read; shapes broadcast.

        Multiples of z are added up before they meet z: their differences are small where they are large themselves.
        """
        means = [head.mean(y) for head in self.heads]
        multiple = sum((part for part, _ in means), np.float64(self.linear))
        constant = sum((part for _, part in means), np.float64(self.constant))
        return np.asarray((y if z is None else z) * multiple + constant)

    @property
    def crossings(self) -> Array:
        """The pre-activations at which two keys of a head weigh the same; 1-D."""
        return np.unique(np.concatenate([head.keys.crossings for head in self.heads]))

    def float64_rounding(self, y: Array, z: Array | None = None) -> Array:
        """How far a float64 evaluation, `evaluate` or that of any form, may be from the program in exact arithmetic.

        A bound at each point, absolute, in units of the output; shapes broadcast as in `evaluate`. Finite for finite y
        and z, unless the bound itself is beyond float64. `passes.programs.softmax` has the derivation; beside the
        heads' own rounding it counts that of their sum, the straight line, and of y's part in f(y) - y (form `staged`).
        """
        query, source = np.broadcast_arrays(y, y if z is None else z)
        keys = [head.multiples for head in self.heads]
        # heads over the same keys are computed together, or each with its keys as they are
        shifted = [own is None or keys.count(own) == 1 for own in keys]
        heads = [
            head.float64_rounding(query, source, shifted=shifts, steps=len(self.heads) + 2)
            for head, shifts in zip(self.heads, shifted, strict=True)
        ]
        sums = 2.0 * UNIT * (len(heads) + self.bias_tokens + 4.0)
        skipped = 4.0 * UNIT if keys[0] is not None and len(heads) == 1 else 0.0
        line = np.abs(source) * (sums * abs(self.linear) + skipped) + sums * abs(self.constant)
        return np.asarray(sum(heads) + line)

    def in_double(self, *, gated: bool) -> Program:
        """The program for float64 arithmetic: `rounding` is the largest `float64_rounding` on a grid.

        Gated: of the weight, that is for self values of 1; otherwise they are y.
        """
        reach = min(self.domain, _FAR)
        y = np.concatenate([np.linspace(-32.0, 32.0, 1025), np.linspace(-reach, reach, 257)])
        y = y[np.abs(y) <= reach]
        z = np.ones_like(y) if gated else y
        share = self.float64_rounding(y, z) / np.maximum(1.0, np.abs(self.evaluate(y, z)))
        return replace(self, double=True, rounding=float(np.max(share)))

    def rounded(self, dtype: DTypeLike, *, factored: bool = True) -> Program:
        """The program with coefficients of a type, as it stands in a graph; `coefficient_error` bounds the change.

        `passes.programs.changes` proves the bound for all numbers of the type; it is sharp to within a tenth.
        """
        return self if np.dtype(dtype) == np.float64 else _rounded(self, np.dtype(dtype), factored)

    def scaled(self, *, inner: float = 1.0, outer: float = 1.0) -> Program:
        """The program of `outer f(inner y)` from that of f, whose `max_error` is absolute; self values read y."""
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
            max_error=self.max_error * abs(outer) + _RESCALED * max(1.0, abs(outer)),
            rounding=self.rounding * max(1.0, abs(outer)),
            domain=self.domain / abs(inner),
        )


_RESCALED = 2.0**-40
"""Above what the rounding of all coefficients to float64 changes in a fitted program, over max(1, |f|)."""

_FAR = 1e4
"""Beyond it float64 rounding is proportional to |f|."""

_ENOUGH = 1e-12
"""Bounds on what rounding coefficients changes are no sharper than this."""


@cache
def _rounded(program: Program, dtype: np.dtype[np.generic], factored: bool) -> Program:
    result = replace(
        program,
        heads=tuple(head.rounded(dtype, factored=factored) for head in program.heads),
        linear=float(np.asarray(program.linear, dtype=dtype)),
        constant=float(np.asarray(program.constant, dtype=dtype)),
    )
    change = 0.0 if result == program else largest_change(program, result, enough=_ENOUGH)
    return replace(result, coefficient_error=change) if change else program
