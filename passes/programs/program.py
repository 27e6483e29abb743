"""Head programs: one activation as a sum of attention heads (`passes.programs.head`), as plain numbers.

A program is the sum of its heads plus `linear z + constant`; the linear term is a head that attends only to itself.
Errors are over max(1, |f|), in units of the activation's output.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import DTypeLike

from passes.programs.changes import largest_change
from passes.programs.head import BiasToken, Head
from passes.programs.softmax import UNIT, Array


@dataclass(frozen=True)
class Program:
    """A sum of heads that computes one activation.

    Attributes:
        name: the name that reports print, such as `silu` or `gelu_erf_m8`.
        heads: attention heads per neuron.
        linear: factor of z outside the heads (a head that attends only to itself).
        constant: constant outside the heads.
        max_error: certified largest error against the activation over max(1, |f|), on `domain`, in exact arithmetic
            for the given coefficients. Only Mish's ln 2 means the real number.
        coefficient_error: bound on the change, over max(1, |f|), from rounding the coefficients to a type.
        rounding: largest error over max(1, |f|) that evaluating the program adds to `max_error`: measured in float32
            (a few units in the last place for an exact program), bounded on a grid by `in_double`.
        domain: largest |y| for which `max_error` holds.
        double: whether the heads need float64 arithmetic, since they are small differences of large values.
        measured: whether `max_error` was measured on a dense grid, as for fits at run time, rather than proved.
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
        """The largest number of bias tokens that a head attends to."""
        return max(len(head.bias_tokens) for head in self.heads)

    def evaluate(self, y: Array, z: Array | None = None) -> Array:
        """The program in float64. Self values read `z` (default y); shapes broadcast.

        Multiples of z are summed before they are multiplied by z: those of a gate are large and nearly cancel.
        """
        means = [head.mean(y) for head in self.heads]
        multiple = sum((part for part, _ in means), np.float64(self.linear))
        constant = sum((part for _, part in means), np.float64(self.constant))
        return np.asarray((y if z is None else z) * multiple + constant)

    @property
    def crossings(self) -> Array:
        """The pre-activations at which two keys of a head have equal weights; 1-D."""
        return np.unique(np.concatenate([head.keys.crossings for head in self.heads]))

    def float64_rounding(self, y: Array, z: Array | None = None) -> Array:
        """A bound on the rounding error of a float64 evaluation, by `evaluate` or by any form.

        It is absolute, in units of the output, one per point; shapes broadcast as in `evaluate`. Finite for finite y
        and z, unless the bound itself is beyond float64. `passes.programs.softmax` has the derivation for one head; the
        bound also covers the sum of heads, the linear term, and the y in f(y) - y (form `staged`).
        """
        query, source = np.broadcast_arrays(y, y if z is None else z)
        keys = [head.multiples for head in self.heads]
        # Forms compute heads over the same keys together, with their keys as they are; a lone head may be shifted.
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
        """The program marked for float64 arithmetic; `rounding` is the largest `float64_rounding` on a grid.

        For a gate it is that of the weight, with self values of 1; otherwise self values are y.
        """
        reach = min(self.domain, _FAR)
        y = np.concatenate([np.linspace(-32.0, 32.0, 1025), np.linspace(-reach, reach, 257)])
        y = y[np.abs(y) <= reach]
        z = np.ones_like(y) if gated else y
        share = self.float64_rounding(y, z) / np.maximum(1.0, np.abs(self.evaluate(y, z)))
        return replace(self, double=True, rounding=float(np.max(share)))

    def rounded(self, dtype: DTypeLike, *, factored: bool = True) -> Program:
        """The program with coefficients rounded as a graph of type `dtype` stores them.

        `coefficient_error` bounds the change for all numbers of the type, to within a tenth
        (`passes.programs.changes`).
        """
        return self if np.dtype(dtype) == np.float64 else _rounded(self, np.dtype(dtype), factored)

    def scaled(self, *, inner: float = 1.0, outer: float = 1.0) -> Program:
        """The program of `outer f(inner y)`, given that of f with an absolute `max_error`; self values read y."""
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
"""Bound on the effect of rounding all coefficients of a fitted program to float64, over max(1, |f|)."""

_FAR = 1e4
"""Beyond this |y|, float64 rounding is proportional to |f|."""

_ENOUGH = 1e-12
"""Bounds on the effect of rounding coefficients need not be sharper than this."""


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
