"""Head programs: one activation as a sum of attention heads, as plain numbers (docs/programs.md).

A head attends from one token to itself and to m constant *bias tokens*. With y the neuron's pre-activation,

    self logit        beta y + gamma      self value        c z + d
    bias-token logit  a_j y + b_j         bias-token value  v_j

where z is y, or in a gated block the other projection. The head returns the softmax-weighted sum of the values. A
program is the sum of its heads plus `linear z + constant`; the linear term is a head that attends only to itself.
Errors are over max(1, |f|), in units of the activation's output.

A gate h(g) u in the arithmetic of its model is a program of h whose self values are not y but the line g as attention
(`Line`), times u; as plain heads it is a sum over pairs of keys (`Program.as_heads`).
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from importlib.resources import files
from typing import Any

import numpy as np
import onnx
from numpy.typing import DTypeLike, NDArray

from rewriter.arrays import distinct

Array = NDArray[np.float64]
Function = Callable[[Array], Array]
Parameters = tuple[float, ...]  # of an activation
# Offsets up to this magnitude are factored out, e^(a y + b) = e^b e^(a y): a logit is rounded in proportion to its
# magnitude. For larger ones, which belong to steep keys, e^b could leave the range of float32.
FACTORED = 60.0

LARGEST_QUERY = 2.0**500  # queries are clipped to it: all weights are 0 or 1 long before


def narrowed(number: float, dtype: DTypeLike) -> float:
    """The nearest number of a type."""
    return float(np.asarray(number, dtype=dtype))


@dataclass(frozen=True)
class BiasToken:
    """A constant token in one head: logit `slope y + offset`, value `value`."""

    slope: float = 0.0
    offset: float = 0.0
    value: float = 0.0


@dataclass(frozen=True)
class Head:
    """One attention head over {self, bias tokens}; the self logit is `beta y + gamma`, the self value `c z + d`."""

    beta: float
    bias_tokens: tuple[BiasToken, ...] = (BiasToken(),)
    gamma: float = 0.0
    c: float = 1.0
    d: float = 0.0

    @property
    def logits(self) -> list[tuple[float, float]]:
        return [(self.beta, self.gamma), *((token.slope, token.offset) for token in self.bias_tokens)]

    @property
    def constants(self) -> tuple[float, ...]:
        """The constant part of the value of every key, its own first."""
        return self.d, *(token.value for token in self.bias_tokens)

    def logits_at(self, y: Array) -> Array:
        """The logits [keys, ...] at points [...], its own key first; finite for finite y."""
        slopes, offsets = np.array(self.logits).T
        query = np.clip(y, -LARGEST_QUERY, LARGEST_QUERY)
        return np.asarray(np.multiply.outer(slopes, query) + offsets.reshape(-1, *[1] * np.ndim(query)))

    def weights(self, y: Array) -> Array:
        """The softmax weights [keys, ...] at points [...], its own key first."""
        weights = self.logits_at(y)
        weights -= np.max(weights, axis=0)
        np.exp(weights, out=weights)
        weights /= np.sum(weights, axis=0)
        return weights

    @property
    def crossings(self) -> Array:
        """The points at which two keys have equal weights: there the weights change, and limits have their kinks."""
        slopes, offsets = np.array(self.logits).T
        with np.errstate(all="ignore"):
            places = -np.subtract.outer(offsets, offsets) / np.subtract.outer(slopes, slopes)
        return distinct(places[np.isfinite(places)])

    def evaluate(self, y: Array, z: Array) -> Array:
        multiple, constant = self.mean(y)
        return np.asarray(z * multiple + constant)

    def mean(self, y: Array) -> tuple[Array, Array]:
        """(multiple, constant): the head's output is `z multiple + constant`."""
        own, *others = self.weights(y)
        constant = sum((weight * value for weight, value in zip(others, self.constants[1:], strict=True)), own * self.d)
        return self.c * own, np.asarray(constant)

    @property
    def multiples(self) -> tuple[tuple[float, float], ...] | None:
        """All keys (slope, offset) in order, if all values are multiples of z; else None."""
        return None if any(self.constants) else tuple(sorted(self.logits))

    @property
    def largest_factored(self) -> float:
        """The magnitude up to which graphs take offsets relative to the self logit out of the exponentials."""
        # Beside steep keys, exponentials are at least e^-87 (`passes.forms.local`): times e^60 they are not negligible.
        steep = any(abs(token.offset - self.gamma) > FACTORED for token in self.bias_tokens)
        return 20.0 if steep else FACTORED

    def shifted(self, slope: float, offset: float) -> "Head":
        """The same head with `slope y + offset` added to every logit; softmax is invariant to it."""
        tokens = tuple(replace(t, slope=t.slope + slope, offset=t.offset + offset) for t in self.bias_tokens)
        return replace(self, beta=self.beta + slope, gamma=self.gamma + offset, bias_tokens=tokens)

    def scaled(self, inner: float, outer: float) -> "Head":
        """`outer` times the head at `inner y`, whose self value still reads y."""
        tokens = tuple(BiasToken(t.slope * inner, t.offset, t.value * outer) for t in self.bias_tokens)
        return Head(self.beta * inner, tokens, self.gamma, self.c * inner * outer, self.d * outer)

    def unscaled(self) -> "Head":
        """The head with self value z + d / c. Multiplied by c last, a value of weight 0 cannot overflow."""
        tokens = tuple(replace(token, value=token.value / self.c) for token in self.bias_tokens)
        return replace(self, c=1.0, d=self.d / self.c, bias_tokens=tokens)

    def rounded(self, dtype: DTypeLike, *, factored: bool = True, conditioned: bool = False) -> "Head":
        """The head with coefficients rounded as a graph of type `dtype` stores them.

        If `factored`, the graph stores for an offset of at most `largest_factored` the factor e^offset of the bias
        token's weight and its product with the value; otherwise every coefficient as it is. Logits are shifted so that
        the self logit has no offset, or as `conditioned` does. The factor c follows the softmax (`unscaled`).
        """
        if self.c not in (0.0, 1.0):
            inner = self.unscaled().rounded(dtype, factored=factored, conditioned=conditioned)
            return inner.scaled(1.0, narrowed(self.c, dtype))
        narrow, stored = partial(narrowed, dtype=dtype), list[BiasToken]()
        plain = self.conditioned() if conditioned else self.shifted(0.0, -self.gamma)
        for token in plain.bias_tokens:
            if factored and abs(token.offset) <= self.largest_factored:
                weight = narrow(math.exp(token.offset))
                offset, value = math.log(weight), narrow(weight * token.value) / weight
            else:
                offset, value = narrow(token.offset), narrow(token.value)
            stored.append(BiasToken(narrow(token.slope), offset, value))
        return Head(narrow(plain.beta), tuple(stored), *map(narrow, (plain.gamma, plain.c, plain.d)))

    def conditioned(self) -> "Head":
        """The head shifted so that its largest logit at y = 0 is zero: float32 rounds logits by their magnitude."""
        slope, offset = max(self.logits, key=lambda key: (key[1], -abs(key[0]), key[0]))
        return self.shifted(-slope, -offset)


def heads_over(keys: Sequence[tuple[float, float]], multiples: Iterable[float]) -> tuple[Head, ...]:
    """Heads over the same keys (slope, offset), one for every key with a nonzero multiple of z as its value."""
    tokens = [BiasToken(*key) for key in keys]  # there may be more than multiples
    return tuple(
        Head(slope, (*tokens[:place], *tokens[place + 1 :]), offset, multiple)
        for place, ((slope, offset), multiple) in enumerate(zip(keys, multiples, strict=False))
        if multiple != 0.0
    )


# -- softmaxes that form `local` writes with few exponentials ----------------------------------------------------------
#
# docs/programs.md derives both. **The line** g is (1 - e^-x) / (d S(x)) with x = d g and S(x) = sum_j w_j e^(-r_j x).
# Its nodes r are symmetric about 1/2. **Equally spaced keys** have weights that are powers of one exponential r =
# e^(c y): Phi is (r + h) / (r + 1/r + 2 h) in y Phi(y), such as GELU, with z = r + 1/r >= 2, where no divisor is 0, and
#
#     h = base + b_1 / (z + s_1) + ... + b_i / (z + s_i + b_(i+1) / (z + s_(i+1))) + ...


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
    max_error: float  # |S(x) x / (1 - e^-x) - 1|

    @property
    def lowest(self) -> float:
        """The g on one side beyond which the line is constant; on the other side that is outside the domain."""
        return LOWEST / self.step

    @cached_property
    def head(self) -> Head:
        """The head whose output is the line; its own key and its first bias token are the two ends."""
        value, offset = 1.0 / (self.step * self.end), math.log(self.end)
        nodes = [(r, w) for rate, w in self.pairs for r in (rate, 1.0 - rate)]
        nodes += [(0.5, self.middle)] if self.middle else []
        inner = (BiasToken(-r * self.step, math.log(w)) for r, w in nodes)
        return Head(0.0, (BiasToken(-self.step, offset, -value), *inner), offset, c=0.0, d=value)

    def evaluate(self, g: Array) -> Array:
        return self.head.mean(g)[1]

    def heads(self, head: Head) -> tuple[Head, ...]:
        """The heads of `head`'s gate: self value c line(g) + d times what the values read.

        A product of two softmaxes is one over all pairs of keys. If c is not 0, the self key of `head` becomes two
        heads, one per end of the line. Constant values need no line: they are heads over the keys of `head` alone.
        """
        ends = [head.c * value for value in self.head.constants[:2]]
        # Relative to the self key, which comes first: beside a steep slope, the line's would be rounded.
        relative = [(slope - head.beta, offset - head.gamma) for slope, offset in head.logits]
        pairs = [(a + slope, b + offset) for a, b in relative for slope, offset in self.head.logits]
        return (*heads_over(pairs, ends), *heads_over(head.logits, head.constants))

    def rounded(self, dtype: DTypeLike) -> "Line":
        narrow = partial(narrowed, dtype=dtype)
        pairs = tuple((narrow(rate), narrow(weight)) for rate, weight in self.pairs)
        return replace(self, end=narrow(self.end), middle=narrow(self.middle), pairs=pairs)


# c y is at most this: e^80 is finite in float32, and Phi is 1 long before. Where 1/r is infinite, h is `base`, Phi 0.
REACH = 80.0


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
        return (*((level,) for level in levels[:single]), *zip(levels[single::2], levels[single + 1 :: 2], strict=True))

    def scaled(self, inner: float, outer: float) -> "Powers":
        """The multiple of y in `outer f(inner y)`, f being y times this one."""
        return replace(self, step=self.step * inner, factor=self.factor * inner * outer)

    def rounded(self, dtype: DTypeLike) -> "Powers":
        narrow = partial(narrowed, dtype=dtype)
        parts, shifts = (tuple(map(narrow, row)) for row in (self.parts, self.shifts))
        return Powers(narrow(self.step), parts, shifts, self.pairs, narrow(self.base), narrow(self.factor))

    @cached_property
    def head(self) -> Head:
        # h = R / P as polynomials in r, of which z is (r^2 + 1) / r; Phi is (r^2 P + r R) / ((r^2 + 1) P + 2 r R).
        r, p, rest = np.poly1d([1.0, 0.0]), np.poly1d([1.0]), np.poly1d([self.base])
        for fraction in self.fractions:
            bottom, top = np.poly1d([1.0]), np.poly1d([0.0])
            for part, shift in reversed(fraction):
                bottom, top = np.poly1d([1.0, shift, 1.0]) * bottom + r * top, part * r * bottom
            p, rest = p * bottom, rest * bottom + p * top
        own, weights = (each.coeffs[::-1] for each in (r * r * p + r * rest, (r * r + 1.0) * p + 2.0 * r * rest))
        slopes = self.step * (np.arange(len(weights)) - len(weights) // 2)
        rows = slopes, np.log(weights), self.factor * own / weights
        (slope, offset, value), *others = zip(*(row.tolist() for row in rows), strict=True)
        return Head(slope, tuple(BiasToken(*key) for key in others), offset, c=0.0, d=value)

    @property
    def heads(self) -> tuple[Head, ...]:
        return heads_over(self.head.logits, self.head.constants)


# -- programs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """A sum of heads that computes one activation."""

    name: str
    heads: tuple[Head, ...]
    linear: float = 0.0
    constant: float = 0.0
    # on `domain`, in exact arithmetic: derived, or measured on a dense grid with a margin; the certificate proves it
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
    def bias_tokens(self) -> int:
        """m, the largest number of a head."""
        return max(len(head.bias_tokens) for head in self.as_heads.heads)

    @cached_property
    def as_heads(self) -> "Program":
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
        if self.line is None:
            return np.asarray(source * multiple + constant)
        return np.asarray(source * (self.line.evaluate(y) * multiple + constant))

    def mean(self, y: Array) -> tuple[Array, Array]:
        """(multiple, constant): the heads, the linear term and the constant are `own multiple + constant`."""
        if self.powers is not None:
            return self.powers.head.mean(y)[1], np.asarray(self.constant)
        means = [head.mean(y) for head in self.heads]
        multiple = sum((part for part, _ in means), np.float64(self.linear))
        return np.asarray(multiple), np.asarray(sum((part for _, part in means), np.float64(self.constant)))

    def rounded(self, dtype: DTypeLike, *, factored: bool = True, conditioned: bool = False) -> "Program":
        """The program with coefficients as a form stores them in a type (`Head.rounded`), and what that changes."""
        made = self if np.dtype(dtype) == np.float64 else _rounded(self, np.dtype(dtype), factored, conditioned)
        # Every form adds a linear term to the coefficients of the head beside it, and these sums are rounded once more.
        added = spread_error(made, dtype)
        return replace(made, coefficient_error=made.coefficient_error + added) if added else made

    def scaled(self, *, inner: float = 1.0, outer: float = 1.0) -> "Program":
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


_RESCALING_ERROR = 2.0**-40  # of all coefficients of a fitted program in float64, over max(1, |f|)
MARGIN = 1.05  # on maxima over a grid, which may be larger between the points
_EVALUATION_ROUNDING = 2.0**-48  # smaller changes are that of the evaluations compared
_LARGEST_POINT = 2.0**128  # beyond the numbers of all types that coefficients have


def grid(domain: float, *programs: Program) -> Array:
    """Points of |y| <= domain where programs are compared: dense near 0 and around every kink, sparse far out."""
    domain = min(domain, _LARGEST_POINT)
    far = np.geomspace(1e-3, 1.0, 600) * domain
    kinks = distinct(np.concatenate([np.zeros(1), *(head.crossings for each in programs for head in each.heads)]))
    near = np.multiply.outer(np.maximum(np.abs(kinks), 1e-3), np.geomspace(2.0**-52, 1.0, 160))
    around = np.concatenate([kinks[:, None] - near, kinks[:, None] + near]).ravel()
    y = distinct(np.concatenate([np.linspace(-32.0, 32.0, 8193), far, -far, around]))
    return np.asarray(y[np.abs(y) <= domain])


def largest_change(program: Program, other: Program) -> float:
    """The largest |other - program| / max(1, |program|) on the domain, for programs of one shape, measured.

    Self values read y; multiples of it may read anything, as in a gate, and the figure also holds for these.
    """
    powers = (0, 2) if program.line is not None else (0,)  # the value u of h(g) u may be g
    program, other = replace(program, line=None), replace(other, line=None)
    y = grid(program.domain, program, other)
    multiples = program.constant == 0.0 and all(head.multiples is not None for head in program.heads)
    largest = 0.0
    for z in (y, *(y**power for power in powers if multiples)):
        before = program.evaluate(y, z)
        change = np.abs(other.evaluate(y, z) - before) / np.maximum(1.0, np.abs(before))
        largest = max(largest, float(np.max(np.where(change > _EVALUATION_ROUNDING, change, 0.0))))
    return MARGIN * largest


@cache
def _rounded(program: Program, dtype: np.dtype[np.generic], factored: bool, conditioned: bool) -> Program:
    powers = None if program.powers is None else program.powers.rounded(dtype)
    heads = tuple(head.rounded(dtype, factored=factored, conditioned=conditioned) for head in program.heads)
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
    # Logits that were shifted stay so, even where no value changes.
    return replace(result, coefficient_error=change) if change or conditioned else program


# -- groups of heads, as the forms write them --------------------------------------------------------------------------
#
# Each group is one head per neuron over {self, bias tokens}. Terms outside the program's heads become heads too:
#
# - A linear term l z beside a single head whose values are multiples of z is spread over that head's keys, as the
#   weights sum to one: the weight of a bias token is the self weight of another head, with that key and the self key
#   exchanged. Thus Mish becomes y p_1 + y p_2, without cancellation. `spread_error` bounds the rounding of these sums.
# - Otherwise `linear z + constant` is a head that attends only to itself (Theorem 7): no bias tokens, weight 1.


@dataclass(frozen=True)
class Group:
    """One head per neuron, with c 0 or 1; the factor is that of its output."""

    head: Head
    factor: float = 1.0

    @property
    def bias_tokens(self) -> int:
        return len(self.head.bias_tokens)

    @property
    def dimension(self) -> int:
        """d_head of queries and keys: y alone, or (y, 1) where logits have offsets."""
        return 2 if any(offset for _, offset in self.head.logits) else 1


def groups_of(program: Program) -> tuple[Group, ...]:
    """The groups of a program, in order; at least one."""
    heads = list(program.heads)
    if program.linear != 0.0 and spreads(program):
        heads = spread(heads[0], program.linear)
    elif program.linear != 0.0 or program.constant != 0.0:
        heads.append(Head(beta=0.0, bias_tokens=(), c=program.linear, d=program.constant))
    return tuple(map(group_of, heads))


def spreads(program: Program) -> bool:
    """Whether a linear term of the program can be spread over the keys of its only head."""
    return len(program.heads) == 1 and program.constant == 0.0 and program.heads[0].multiples is not None


def spread_error(program: Program, dtype: DTypeLike) -> float:
    """The largest relative change from rounding the spread coefficients to a type."""
    if program.linear == 0.0 or not spreads(program):
        return 0.0
    sums = np.asarray([value for value in (program.heads[0].c + program.linear, program.linear) if value != 0.0])
    return float(np.max(np.abs(sums.astype(dtype).astype(np.float64) / sums - 1.0)))


def spread(head: Head, linear: float) -> list[Head]:
    """The heads of `head` plus `linear z`: one per key, with the others as its bias tokens."""
    own = BiasToken(slope=head.beta, offset=head.gamma)
    heads = [replace(head, c=head.c + linear)] if head.c + linear != 0.0 else []
    for number, token in enumerate(head.bias_tokens):
        others = (*head.bias_tokens[:number], own, *head.bias_tokens[number + 1 :])
        heads.append(Head(beta=token.slope, gamma=token.offset, bias_tokens=others, c=linear))
    return heads


def group_of(head: Head) -> Group:
    """The group of a head; a factor of its value is applied last, where it cannot overflow a value of weight 0."""
    return Group(head) if head.c in (0.0, 1.0) else Group(head.unscaled(), head.c)


# -- arithmetics: steepness of limits and negligible errors, by element type --------------------------------------


@dataclass(frozen=True)
class Arithmetic:
    """The arithmetic in which a block's heads are evaluated."""

    steepness: float  # factor k of the limit ReLU(y) = lim SiLU(k y) / k: a power of two, so that k y is exact
    tolerance: float  # errors of programs that this arithmetic cannot distinguish from 0
    small: float  # the number e of the limit g = lim tanh(e g) / e, which is evaluated in float64
    limit: float  # the error, over max(1, |f|), up to which that limit counts as reached; sets the largest |g|
    lines: str  # the lines for "single", "double" or "half" precision
    narrow: str = ""  # lines with fewer keys, for gates whose self value counts near 0 only
    pairs: str = ""  # lines of gates over pairs of keys, in forms that pay for every head, where the limit is too far


_HALF = Arithmetic(steepness=2.0**40, tolerance=2.0**-12, small=2.0**-27, limit=2.0**-15, lines="half")
_SINGLE = Arithmetic(2.0**40, tolerance=1.2e-7, small=2.0**-24, limit=2.0**-26, lines="single", narrow="narrow single")
_DOUBLE = Arithmetic(2.0**80, tolerance=1e-16, small=2.0**-24, limit=2.0**-31, lines="double", pairs="double pairs")

ARITHMETIC: dict[int, Arithmetic] = {
    onnx.TensorProto.FLOAT: _SINGLE,
    onnx.TensorProto.DOUBLE: _DOUBLE,
    onnx.TensorProto.FLOAT16: _HALF,
    onnx.TensorProto.BFLOAT16: _HALF,
}
"""Element type of a block to its arithmetic. Half precisions are computed in float32, with casts around the heads.

tolerance: half a unit in the last place of 1; bfloat16 uses float16's, since one more bias token costs little, and its
own would leave GELU at 1.5e-3. small: balances the error of the limit, which bounds |g| at 3,500 (float32), 630
(float64, clipped gates only) and beyond every float16, against float64's rounding over e, 2e-9 and 2e-8.
"""

# -- the fitted programs -----------------------------------------------------------------------------------------------
#
# `python -m benchmarks.fit` writes the entries of `programs.json`; the slow tests prove every stated error.

_FILE: dict[str, Any] = json.loads(files("passes.programs").joinpath("programs.json").read_text(encoding="utf-8"))


@cache
def fitted_programs(kind: str = "plain") -> tuple[tuple[str, Program], ...]:
    """The fitted programs of one kind, as (activation, program), in the order of the table.

    `plain` hold for all reals; `gate`: one head with few nonzero values (each costs a head, self two); `precise`: one
    head below float64's rounding; `powers`: weights are powers of one exponential.
    """
    rows = _FILE[kind if kind in ("precise", "powers") else "programs"]
    chosen = (entry for entry in rows if bool(entry.get("gate")) is (kind == "gate"))
    return tuple((entry["activation"], _program(entry)) for entry in chosen if "domain" not in entry)


def cheapest(activation: str, tolerance: float, *, gate: bool = False) -> Program:
    """The program with the fewest keys (of a `gate`, nonzero values first) of error `tolerance`, else the closest."""
    kinds = ("gate", "plain", "precise") if gate else ("plain", "precise")
    known = [program for kind in kinds for name, program in fitted_programs(kind) if name == activation]

    def cost(program: Program) -> tuple[float, ...]:
        values = sum(token.value != 0.0 for token in program.heads[0].bias_tokens)
        keys = program.bias_tokens
        return (values, keys, program.max_error) if gate else (keys, program.rounding)

    close = [program for program in known if program.max_error <= tolerance]
    return min(close, key=cost) if close else min(known, key=lambda program: program.max_error)


def in_powers(activation: str, tolerance: float) -> Program | None:
    """The program of `activation` in the fewest powers with `max_error` at most about `tolerance`; None if none is."""
    known = [program for name, program in fitted_programs("powers") if name == activation]
    close = [each for each in known if each.max_error <= 1.15 * tolerance]  # a closer one has three more operations
    return min(close, key=lambda program: len(program.heads), default=None)


@cache
def lines(arithmetic: str) -> tuple[Line, ...]:
    """The lines of one kind (`Arithmetic`), the most precise first."""
    entries = ({**entry, "pairs": tuple(map(tuple, entry["pairs"]))} for entry in _FILE["lines"])
    return tuple(Line(**entry) for entry in entries if entry.pop("arithmetic") == arithmetic)


def _program(entry: dict[str, Any]) -> Program:
    stated = {"name": entry["name"], "max_error": entry["max_error"], "rounding": entry["float32_error"]}
    if "parts" in entry:
        powers = Powers(entry["step"], tuple(entry["parts"]), tuple(entry["shifts"]), entry["pairs"], entry["base"])
        return Program(heads=powers.heads, powers=powers, **stated)
    tokens = tuple(BiasToken(*map(float, token)) for token in entry["bias_tokens"])
    beta, gamma, c, d = map(float, (*entry["self_key"], *entry.get("self_value", (1.0, 0.0))))
    head = Head(beta, tokens, gamma, c, d)
    # A shift would round coefficients that must stay as they are.
    stays = entry.get("float32") or entry.get("precise")
    return Program(heads=(head if stays else head.conditioned(),), **stated)
