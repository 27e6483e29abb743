"""Head programs: one activation as a sum of attention heads (`passes.programs.head`), as plain numbers.

A program is the sum of its heads plus `linear z + constant`; the linear term is a head that attends only to itself.
Errors are over max(1, |f|), in units of the activation's output.

A gate h(g) u in the arithmetic of its model is a program of h whose self values are not y but the line g as attention,
times u (`passes.programs.exponentials`); as plain heads it is a sum over pairs of keys (`Program.attention`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np
import onnx
from numpy.typing import DTypeLike

from passes.programs.exponentials import Line, Powers
from passes.programs.head import Array, Head, narrowed


@dataclass(frozen=True)
class Program:
    """A sum of heads that computes one activation."""

    name: str
    heads: tuple[Head, ...]
    linear: float = 0.0
    constant: float = 0.0
    # against the activation, on `domain`, in exact arithmetic for the given coefficients: derived, or measured on a
    # dense grid with a margin. It is a claim, which the certificate of a rewritten model proves.
    max_error: float = 0.0
    coefficient_error: float = 0.0  # from rounding the coefficients to a type; a claim likewise
    rounding: float = 4 * 2.0**-24  # what evaluating fitted heads in float32 adds, as measured
    domain: float = float("inf")  # largest |y| for which `max_error` holds
    double: bool = False  # whether the heads need float64, as small differences of large values do
    measured: bool = False
    # what self values are instead of z, if z is only multiplied with the heads' outputs, as in a gate
    line: Line | None = None
    powers: Powers | None = None  # equally spaced keys as powers of one exponential, as form `local` writes them

    @property
    def exact(self) -> bool:
        return self.max_error == 0.0

    @property
    def bias_tokens(self) -> int:
        return max(len(head.bias_tokens) for head in self.attention)

    @property
    def attention(self) -> tuple[Head, ...]:
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
        """The program in float64; self values read `z` (default y). Multiples are summed first: they nearly cancel."""
        multiple, constant = self.mean(y)
        source = y if z is None else z
        if self.line is not None:
            return np.asarray(source * (self.line.evaluate(y) * multiple + constant))
        return np.asarray(source * multiple + constant)

    def mean(self, y: Array) -> tuple[Array, Array]:
        """(multiple, constant): the heads, the linear term and the constant are `own multiple + constant`."""
        if self.powers is not None:
            return self.powers.mean(y), np.asarray(self.constant)
        means = [head.mean(y) for head in self.heads]
        multiple = sum((part for part, _ in means), np.float64(self.linear))
        return np.asarray(multiple), np.asarray(sum((part for _, part in means), np.float64(self.constant)))

    @property
    def crossings(self) -> Array:
        return np.unique(np.concatenate([np.empty(0), *(head.crossings for head in self.heads)]))

    def rounded(self, dtype: DTypeLike, *, factored: bool = True) -> Program:
        """The program with coefficients rounded as stored in a type, and the change as `coefficient_error`."""
        return self if np.dtype(dtype) == np.float64 else _rounded(self, np.dtype(dtype), factored)

    def scaled(self, *, inner: float = 1.0, outer: float = 1.0) -> Program:
        """The program of `outer f(inner y)`, given that of f with an absolute `max_error`; self values read y."""
        if inner == 1.0 and outer == 1.0:
            return self
        return replace(
            self,
            heads=tuple(head.scaled(inner, outer) for head in self.heads),
            linear=self.linear * inner * outer,
            constant=self.constant * outer,
            max_error=self.max_error * abs(outer) + _RESCALING_ERROR * max(1.0, abs(outer)),
            domain=self.domain / abs(inner),
            powers=None if self.powers is None else self.powers.scaled(inner, outer),
        )


_RESCALING_ERROR = 2.0**-40  # of all coefficients of a fitted program in float64, over max(1,
MARGIN = 1.05  # on maxima over a grid, which may be larger between the points
_EVALUATION_ROUNDING = 2.0**-48  # smaller changes are that of the evaluations compared
_LARGEST_POINT = 2.0**128  # beyond the numbers of all types that coefficients have


def grid(domain: float, *programs: Program) -> Array:
    """Points of |y| <= domain where programs are compared: dense near 0 and around every kink, sparse far out."""
    domain = min(domain, _LARGEST_POINT)
    far = np.geomspace(1e-3, 1.0, 600) * domain
    kinks = np.concatenate([np.zeros(1), *(program.crossings for program in programs)])
    near = np.multiply.outer(np.maximum(np.abs(kinks), 1e-3), np.geomspace(2.0**-52, 1.0, 160))
    around = np.concatenate([kinks[:, None] - near, kinks[:, None] + near]).ravel()
    y = np.unique(np.concatenate([np.linspace(-32.0, 32.0, 8193), far, -far, around]))
    return np.asarray(y[np.abs(y) <= domain])


def largest_change(program: Program, other: Program) -> float:
    """The largest |other - program| / max(1, |program|) on the domain, for programs of one shape, measured.

    Self values read y; multiples of it may read anything, as in a gate, and the figure also holds for these.
    """
    powers = (0, 2) if program.line is not None else (0,)  # the value u of h(g) u may be g
    program, other = replace(program, line=None), replace(other, line=None)
    y = grid(program.domain, program, other)
    found = _changes(program, other, y, y)
    if program.constant == 0.0 and all(head.multiples is not None for head in program.heads):
        found = np.maximum.reduce([found, *(_changes(program, other, y, y**power) for power in powers)])
    return MARGIN * float(np.max(found))


def _changes(program: Program, other: Program, y: Array, z: Array) -> Array:
    before = program.evaluate(y, z)
    change = np.abs(other.evaluate(y, z) - before) / np.maximum(1.0, np.abs(before))
    return np.where(change > _EVALUATION_ROUNDING, change, 0.0)


@cache
def _rounded(program: Program, dtype: np.dtype[np.generic], factored: bool) -> Program:
    powers = None if program.powers is None else program.powers.rounded(dtype)
    heads = tuple(head.rounded(dtype, factored=factored) for head in program.heads)
    result = replace(
        program,
        # Rounding the coefficients of the powers moves all heads; unless it changes nothing, they are rebuilt.
        heads=heads if powers is None else program.heads if powers == program.powers else powers.heads,
        powers=powers,
        line=None if program.line is None else program.line.rounded(dtype),
        linear=narrowed(program.linear, dtype),
        constant=narrowed(program.constant, dtype),
    )
    change = 0.0 if result == program else largest_change(program, result)
    return replace(result, coefficient_error=change) if change else program


# -- arithmetics: steepness of limits and negligible errors, by element type ----------------------------------------


@dataclass(frozen=True)
class Arithmetic:
    """The arithmetic in which a block's heads are evaluated."""

    steepness: float  # factor k of the limit ReLU(y) = lim SiLU(k y) / k: a power of two, so that k y is exact
    tolerance: float  # errors of programs that this arithmetic cannot distinguish from 0
    small: float  # the number e of the limit g = lim tanh(e g) / e, which is evaluated in float64
    limit: float  # the error, over max(1, |f|), up to which that limit counts as reached; sets the largest |g|
    lines: str  # the lines (`passes.programs.exponentials`) for "single", "double" or "half" precision
    narrow: str = ""  # lines with fewer keys, for gates whose self value counts near 0 only
    pairs: str = ""  # lines of gates over pairs of keys, in forms that pay for every head, where the limit is too far

    @property
    def paired(self) -> bool:
        """Whether gates are over pairs of keys, since the limit is not accurate enough."""
        return bool(self.pairs) and self.tolerance < self.limit


_HALF = Arithmetic(steepness=2.0**40, tolerance=2.0**-12, small=2.0**-27, limit=2.0**-15, lines="half")
_SINGLE = Arithmetic(2.0**40, tolerance=1.2e-7, small=2.0**-24, limit=2.0**-26, lines="single", narrow="narrow single")

ARITHMETIC: dict[int, Arithmetic] = {
    onnx.TensorProto.FLOAT: _SINGLE,
    onnx.TensorProto.DOUBLE: Arithmetic(
        2.0**80, tolerance=1e-16, small=2.0**-24, limit=2.0**-31, lines="double", pairs="double pairs"
    ),
    onnx.TensorProto.FLOAT16: _HALF,
    onnx.TensorProto.BFLOAT16: _HALF,
}
"""Element type of a block to its arithmetic. Half precisions are computed in float32, with casts around the heads.

steepness: SiLU(k y) / k is within 0.28 / k of ReLU everywhere, and equal bit for bit once |k y| > 104, where the
exponential is 0 or infinite: with k = 2^40, for |y| > 1e-10. tolerance: half a unit in the last place of 1; bfloat16
uses float16's, since one more bias token costs little, and its own would leave GELU at 1.5e-3. small: balances the
error of the limit, 2/3 (e g)^2, which bounds |g| at 3,500 (float32), 630 (float64, clipped gates only) and beyond every
float16, against float64's rounding over e, 2e-9 and 2e-8.
"""
