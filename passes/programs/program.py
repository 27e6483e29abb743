"""Head programs: one activation as a sum of attention heads (`passes.programs.head`), as plain numbers.

A program is the sum of its heads plus `linear z + constant`; the linear term is a head that attends only to itself.
Errors are over max(1, |f|), in units of the activation's output.

A gate h(g) u in the arithmetic of its model is a program of h whose self values are not y but the line g as attention,
times u (`passes.programs.line`); as plain heads it is a sum over pairs of keys (`Program.attention`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np
from numpy.typing import DTypeLike

from passes.certificates.changes import largest_change
from passes.programs.head import BiasToken, Head
from passes.programs.line import Line
from passes.programs.powers import Powers
from passes.programs.softmax import UNIT, Array


@dataclass(frozen=True)
class Program:
    """A sum of heads that computes one activation.

    Attributes:
        name: the name that reports print, such as `silu` or `gelu_erf_11`.
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
        line: what the self values are instead of z, if z is only multiplied with the heads' outputs, as in a gate.
        powers: the heads as powers of one exponential, if their keys are equally spaced; form `local` writes these.
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
    line: Line | None = None
    powers: Powers | None = None

    @property
    def exact(self) -> bool:
        """Whether the program equals the activation in exact arithmetic."""
        return self.max_error == 0.0

    @property
    def bias_tokens(self) -> int:
        """The largest number of bias tokens that a head attends to."""
        return max(len(head.bias_tokens) for head in self.attention)

    @property
    def attention(self) -> tuple[Head, ...]:
        """The heads of `as_heads`."""
        return self.as_heads.heads

    @cached_property
    def as_heads(self) -> Program:
        """The same function as heads whose self values are multiples of z: those of a gate are over pairs of keys."""
        if self.line is None:
            return self
        rest = Head(beta=0.0, bias_tokens=(), c=self.linear, d=self.constant)
        heads = tuple(one for head in (*self.heads, rest) for one in self.line.heads(head))
        return replace(self, heads=heads, linear=0.0, constant=0.0, line=None, powers=None)

    def evaluate(self, y: Array, z: Array | None = None) -> Array:
        """The program in float64. Self values read `z` (default y); shapes broadcast.

        Multiples of z are summed before they are multiplied by z: those of a gate are large and nearly cancel.
        """
        multiple, constant = self._mean(y)
        source = y if z is None else z
        if self.line is not None:
            return np.asarray(source * (self.line.evaluate(y) * multiple + constant))
        return np.asarray(source * multiple + constant)

    def _mean(self, y: Array) -> tuple[Array, Array]:
        """(multiple, constant): the heads, the linear term and the constant are `own multiple + constant`."""
        if self.powers is not None:
            return self.powers.mean(y), np.asarray(self.constant)
        means = [head.mean(y) for head in self.heads]
        multiple = sum((part for part, _ in means), np.float64(self.linear))
        return np.asarray(multiple), np.asarray(sum((part for _, part in means), np.float64(self.constant)))

    def weights(self, number: int, y: Array) -> Array:
        """The softmax weights of head `number` at y [...]: [..., 1 + m], its own key first, in float64."""
        return np.moveaxis(np.asarray(self.heads[number].keys.weights(y)), 0, -1)

    @property
    def crossings(self) -> Array:
        """The pre-activations at which two keys of a head have equal weights; 1-D."""
        return np.unique(np.concatenate([np.empty(0), *(head.keys.crossings for head in self.heads)]))

    def float64_rounding(self, y: Array, z: Array | None = None) -> Array:
        """A bound on the rounding error of a float64 evaluation, by `evaluate` or by any form.

        It is absolute, in units of the output, one per point; shapes broadcast as in `evaluate`. Finite for finite y
        and z, unless the bound itself is beyond float64. `passes.programs.softmax` has the derivation for one head; the
        bound also covers the sum of heads, the linear term, and the y in f(y) - y (form `staged`).
        """
        query, source = np.broadcast_arrays(y, y if z is None else z)
        if self.line is not None:
            own = self.line.evaluate(query)
            multiple, constant = self._mean(query)
            inner = np.abs(multiple) * self.line.float64_rounding(query) + self._rounding(query, own)
            return np.asarray(np.abs(source) * (inner + 4.0 * UNIT * np.abs(own * multiple + constant)))
        return self._rounding(query, source)

    def _rounding(self, query: Array, source: Array) -> Array:
        """The rounding of the heads, the linear term and the constant with self values that read `source`."""
        if self.powers is not None:
            mean = np.abs(self.powers.mean(query))
            return np.asarray(np.abs(source) * (self.powers.float64_rounding(query) + 4.0 * UNIT * mean))
        if not self.heads:
            return np.asarray(4.0 * UNIT * (np.abs(self.linear * source) + abs(self.constant)))
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
        (`passes.certificates.changes`).
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
            powers=None if self.powers is None else self.powers.scaled(inner, outer),
        )


_RESCALED = 2.0**-40
"""Bound on the effect of rounding all coefficients of a fitted program to float64, over max(1, |f|)."""

_FAR = 1e4
"""Beyond this |y|, float64 rounding is proportional to |f|."""

_ENOUGH = 1e-12
"""Bounds on the effect of rounding coefficients need not be sharper than this."""


def _change(program: Program, other: Program) -> float:
    """A bound on |other - program| / max(1, |program|), for a program and the same with rounded coefficients."""
    one, two = program.powers, other.powers
    if one is None or two is None or not one.same_shares(two):
        return largest_change(program, other, enough=_ENOUGH)
    return one.change(two) + abs(other.constant - program.constant)


@cache
def _rounded(program: Program, dtype: np.dtype[np.generic], factored: bool) -> Program:
    powers = None if program.powers is None else program.powers.rounded(dtype)
    heads = tuple(head.rounded(dtype, factored=factored) for head in program.heads)
    result = replace(
        program,
        # Rounding the coefficients of the powers moves all heads; unless it changes nothing, they are made again.
        heads=heads if powers is None else program.heads if powers == program.powers else powers.heads,
        powers=powers,
        line=None if program.line is None else program.line.rounded(dtype),
        linear=float(np.asarray(program.linear, dtype=dtype)),
        constant=float(np.asarray(program.constant, dtype=dtype)),
    )
    change = 0.0 if result == program else _change(program, result)
    return replace(result, coefficient_error=change) if change else program
