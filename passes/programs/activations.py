"""The table of activations: how each is recognised from its values, and its head program.

Parameters (SiLU's beta, a leaky slope, an outer factor) are solved for, then checked on the whole grid
(`passes.match.identify`). Programs are fitted, or in closed form: exact ones, and limits with an error below the
arithmetic's rounding. docs/programs.md derives them and the errors: *steep keys* select one key on either side of a
kink; *a far normaliser* at logit 0 beside a key at y - L with the value times e^L gives e^y (1 - e^(y - L) + ...).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, partial
from statistics import NormalDist
from typing import Any

import numpy as np

from passes.programs.program import (
    FACTORED,
    MARGIN,
    Arithmetic,
    Array,
    BiasToken,
    Function,
    Head,
    Line,
    Parameters,
    Program,
    cheapest,
    grid,
    heads_over,
    in_powers,
    largest_change,
    lines,
    spread,
    spreads,
)
from rewriter.arrays import distinct
from rewriter.evaluate.arithmetic import each, sigmoid, softplus

Values = Callable[[Array, Parameters], Array]
Make = Callable[[Parameters, Arithmetic], Program]
Solve = Callable[[Function], Parameters | None]


@dataclass(frozen=True)
class Activation:
    """One entry of the table."""

    name: str
    parameters: tuple[str, ...]
    function: Values
    solve: Solve  # parameters from the values of an unknown function; None if it is another activation
    program: Make | None  # None where it is unknown
    usual: Parameters = (1.0,)  # the parameters of the plain activation, which reports omit
    gate: Make | None = None  # the program of h(g) u; None where the function `gate` derives it
    quick: Make | None = None  # the program with the fewest operations in form `local`, if another one

    def label(self, parameters: Parameters) -> str:
        rounded = tuple(round(value, 4) for value in parameters)
        if self.name == "silu" and rounded == (1.702, 1.0):
            return "quick_gelu"
        stated = ", ".join(f"{name}={value:.6g}" for name, value in zip(self.parameters, parameters, strict=True))
        return self.name if rounded == self.usual else f"{self.name}({stated})"

    def program_for(
        self, parameters: Parameters, arithmetic: Arithmetic, *, gated: bool = False, quick: bool = False
    ) -> Program | None:
        """The program of h(y), or of h(g) u, with the fewest heads (if `quick` operations); None if unknown."""
        make = (quick and self.quick) or self.program
        program = make and make(parameters, arithmetic)
        if not gated:
            return program
        if quick and program is not None and needs_line(program):
            return with_line(program, arithmetic)
        if self.gate is not None:
            return self.gate(parameters, arithmetic)
        plain = self.program and self.program(parameters, arithmetic)
        return gate(plain, arithmetic) if plain is not None and len(plain.heads) == 1 else None


# -- programs in closed form ------------------------------------------------------------------------------------------

# max over x > 0 of x / (1 + e^x), rounded up: the error of SiLU(k y) / k against ReLU is this over k.
KINK = 0.278464542762
_FAR_LOGIT = 36.0  # e^-36 is below half a unit in the last place of 1 in float64
_SHARE = 2.0**16  # 1 / (6 e) of a limit needed for |y| <= 3 only: error 3e-11, rounding 2e-11
_MAX_SLOPE = 1.25  # of SiLU (1.10) and of the programs of GELU (1.13)
_LARGEST_EXPONENT = 700.0  # of a float64


def silu(p: Parameters, _: Arithmetic) -> Program:
    """Theorem 3: weight sigma(k y), value y."""
    return Program("silu", (Head(beta=p[0], c=p[1]),))


def scaled_silu(activation: str) -> Program:
    """The SiLU y sigma(beta y) closest to GELU (`gelu`, `gelu_tanh`), as in the post."""
    # float32 numbers; errors are rounded up. QuickGELU's 1.702 is off by 2.03e-2.
    beta, error = {"gelu": (1.772933840751648, 1.40e-2), "gelu_tanh": (1.774497628211975, 1.43e-2)}[activation]
    return Program("scaled_silu", (Head(beta=beta),), max_error=error)


def mish(p: Parameters, _: Arithmetic) -> Program:
    """1 - tanh(softplus(y)) = 2 / (e^2y + 2 e^y + 2): the weight of self at logit ln 2 against 2y and y + ln 2."""
    ln2 = math.log(2.0)
    head = Head(beta=0.0, gamma=ln2, c=-p[0], bias_tokens=(BiasToken(slope=2.0), BiasToken(slope=1.0, offset=ln2)))
    return Program("mish", (head,), linear=p[0])


def logistic(p: Parameters, _: Arithmetic) -> Program:
    """`low + height sigmoid(k y)`: the self value is a constant."""
    k, height, low = p
    return Program("sigmoid" if low == 0.0 else "tanh", (Head(beta=k, c=0.0, d=height),), constant=low)


def two_slopes(p: Parameters, arithmetic: Arithmetic) -> Program:
    """ReLU and leaky ReLU: a steep key, and a linear term."""
    right, left = p
    k, c, name = arithmetic.steepness, right - left, "relu" if left == 0.0 else "leaky_relu"
    return Program(name, (Head(beta=k, c=c),), linear=left, max_error=abs(c) * KINK / k)


def clip(p: Parameters, arithmetic: Arithmetic) -> Program:
    """`slope y + offset` between two kinks: self at logit 0, and for each side a bias token with the value there."""
    slope, offset, left, right = p
    k, error, tokens = arithmetic.steepness, 0.0, []
    for side, end in ((-1.0, left), (1.0, right)):
        if math.isfinite(end):
            place = (end - offset) / slope
            error += abs(slope) * KINK / k
            tokens.append(BiasToken(side * k, -side * k * place, end))
    return Program("clip", (Head(beta=0.0, c=slope, d=offset, bias_tokens=tuple(tokens)),), max_error=error)


def exponential_linear(p: Parameters, arithmetic: Arithmetic) -> Program:
    """ELU, SELU, CELU: a steep self key above 0; below it the value -depth at logit 0, and e^(rate y) far below it."""
    right, depth, rate = p
    k = arithmetic.steepness
    tokens = (BiasToken(0.0, 0.0, -depth), BiasToken(rate, -_FAR_LOGIT, depth * math.exp(_FAR_LOGIT)))
    # At the kink, from the slopes and the curvature on the left.
    slopes = abs(right - depth * rate) + 1e-9 * (abs(right) + abs(depth * rate))
    kink = slopes * KINK / k + abs(depth) * (rate / k) ** 2
    error = kink + abs(depth) * (math.exp(-_FAR_LOGIT) + 2.0**-51)
    return Program("elu", (Head(beta=k, c=right, bias_tokens=tokens),), max_error=error)


def exponential_linear_gate(p: Parameters, arithmetic: Arithmetic) -> Program:
    """The gate of ELU: that of its ReLU, plus the bounded part, whose values are constants.

    Relative to the steep key, ELU's own head has slopes -k and rate - k, and rounding would lose the rate.
    """
    right, depth, rate = p
    line = gate(two_slopes((right, 0.0), arithmetic), arithmetic)
    bounded = gate(exponential_linear((0.0, depth, rate), arithmetic), arithmetic)
    heads, error = (*line.heads, *bounded.heads), line.max_error + bounded.max_error
    return replace(bounded, heads=heads, max_error=error, domain=line.domain, double=True)


def exponential(p: Parameters, arithmetic: Arithmetic) -> Program:
    """e^(rate y): weight e^(rate y - L), value e^L, where e^L is beyond the range of the type."""
    rate, factor = p
    far = 600.0 if arithmetic.tolerance < 1e-10 else 160.0
    far = min(far, math.floor(_LARGEST_EXPONENT - math.log(abs(factor))))
    head, error = Head(beta=rate, gamma=-far, c=0.0, d=factor * math.exp(far)), math.exp(-_FAR_LOGIT) + 2.0**-51
    return Program("exp", (head,), max_error=error, domain=(far - _FAR_LOGIT) / abs(rate), double=True)


def hard_swish(p: Parameters, arithmetic: Arithmetic) -> Program:
    """The weight of y: between the kinks 1/2 + tanh(e y) / (6 e), beyond them 0 and 1.

    Keys +e y and -e y with the values (1/2 +- 1/(6 e)) y, a steep key with value y above 3, one with value 0 below -3.
    The first two share the weight 1, so the kinks are at 3 and -3; 1/(6 e) is a power of two, so the sums are exact.
    """
    k, small, half = arithmetic.steepness, 1.0 / (6.0 * _SHARE), math.log(0.5)
    keys = [(small, half, 0.5 + _SHARE), (-small, half, 0.5 - _SHARE), (k, -3.0 * k, 1.0), (-k, -3.0 * k, 0.0)]
    heads = heads_over([key[:2] for key in keys], [p[0] * value for _, _, value in keys])
    error = abs(p[0]) * (2.0 * KINK / k + 1.5 * (3.0 * small) ** 2 / 3.0 + 2.0**-50)
    return Program("hard_swish", heads, max_error=error, double=True)


def clipped(program: Program, low: float, high: float, arithmetic: Arithmetic) -> Program:
    """The program of h(clip(y, low, high)): beyond each kink a steep bias token of equal weight there."""
    (head,) = program.heads
    if program.linear != 0.0:  # outside the softmax, it would continue beyond the kinks
        raise ValueError(f"{program.name} has a linear term, which a bias token cannot stop")
    k = arithmetic.steepness
    apart = k - max(abs(slope) for slope, _ in head.logits)
    tokens, error = [], program.max_error
    for side, end in ((-1.0, low), (1.0, high)):
        if math.isfinite(end):
            at = np.array([end])
            others = float(np.logaddexp.reduce(head.logits_at(at)[:, 0]))
            value = float(program.evaluate(at)[0]) - program.constant
            tokens.append(BiasToken(side * k, others - side * k * end, value))
            error += _MAX_SLOPE * abs(head.c) * (KINK / apart + 2.0**-51 * abs(end)) + 2.0**-50 * max(1.0, abs(value))
    heads = (replace(head, bias_tokens=(*head.bias_tokens, *tokens)),)
    return replace(program, name=f"{program.name}_clipped", heads=heads, max_error=error)


def _gelu_of(p: Parameters, arithmetic: Arithmetic) -> tuple[str, float, dict[str, float]]:
    """GELU's name in the table of programs, the tolerance there, and how its program is scaled."""
    name, (inner, factor) = ("gelu", p) if len(p) == 2 else ("gelu_tanh", (1.0, *p))
    return name, arithmetic.tolerance * abs(inner / factor), {"inner": inner, "outer": factor / inner}


def _gelu_program(p: Parameters, arithmetic: Arithmetic) -> Program:
    """A scaled SiLU where that is close enough, which only --accuracy asks for; else the one with the fewest keys."""
    name, tolerance, scale = _gelu_of(p, arithmetic)
    coarse = scaled_silu(name)
    return (coarse if coarse.max_error <= tolerance else cheapest(name, tolerance)).scaled(**scale)


def _quick_gelu(p: Parameters, arithmetic: Arithmetic) -> Program:
    name, tolerance, scale = _gelu_of(p, arithmetic)
    coarse, program = _gelu_program(p, arithmetic), in_powers(name, tolerance)
    return coarse if program is None or coarse.bias_tokens == 1 else program.scaled(**scale)


def _gelu_gate(p: Parameters, arithmetic: Arithmetic) -> Program:
    name, tolerance, scale = _gelu_of(p, arithmetic)
    # A gate may have a tenth more error if that saves a head.
    return gate(cheapest(name, 1.1 * tolerance, gate=True).scaled(**scale), arithmetic)


def _squared(derive: Callable[[Program, Arithmetic], Program]) -> Make:
    """ReLU squared, as a gate of ReLU whose value is y."""
    return lambda p, a: replace(derive(two_slopes((p[0], 0.0), a), a), name="relu_squared")


def _quick_hard_swish(p: Parameters, arithmetic: Arithmetic) -> Program:
    """Y times a clipped line; y, which has |y| <= 3 or |p y| > 1, multiplies the error over max(1, |h|)."""
    gate = with_line(clip((p[0] / 6.0, p[0] / 2.0, 0.0, p[0]), arithmetic), arithmetic)
    return replace(gate, name="hard_swish", max_error=max(3.0, 1.0 / abs(p[0])) * (1.0 + 1e-6) * gate.max_error)


# -- gates: programs of h(g) u, derived from those of h(y), with self values that read u ------------------------------
#
# `with_line` turns any program into a gate through the line g as attention (`program.Line`), as form `local` does.
# `gate` needs the fewest heads, in float64: the self key is split in two, with slopes e more and e less, and each key
# with a nonzero value becomes the self key of a head with value u. In float64 models, a gate is written out over pairs
# of keys instead.

_LINE_TOLERANCE = 2.0  # in tolerances: the allowed additional error of a line
_PAIRING_ERROR = 4e-15  # what rounding the coefficients of pairs of keys to float64 adds; the certificate proves it


@cache
def with_line(program: Program, arithmetic: Arithmetic) -> Program:
    """The program of h(g) u, given that of h, or of h(y) y: self values are the line times what values read.

    Where the multiple M(g) of the self value vanishes on one side, the line need not reach far there.
    """
    # Beyond the kinks of a clip, self has no weight, and it does not matter how far a narrow line is off.
    candidates = [(line, program.domain) for line in lines(arithmetic.narrow)]
    for line in lines(arithmetic.lines):
        domain = min(program.domain, line.domain)
        candidates += [(line, domain), (replace(line, step=-line.step), domain)]
    found = [(_line_error(program, line, domain), line, domain) for line, domain in candidates]
    close = (each for each in found if each[0] <= _LINE_TOLERANCE * arithmetic.tolerance)
    added, line, domain = next(close, None) or min(found, key=lambda each: each[0])
    return _with_error(program, added, line=line, domain=domain, name=f"{program.name}_gate")


def _with_error(program: Program, added: float, **changes: Any) -> Program:
    """The program with an error that is relative to its own values added to its own."""
    return replace(program, max_error=program.max_error + added * (1.0 + program.max_error), **changes)


def needs_line(program: Program) -> bool:
    """Whether a gate needs a line: not with float64 heads, of a gate, or of a bounded h with constant values."""
    if program.double or program.line is not None:
        return False
    return program.linear != 0.0 or any(head.c != 0.0 for head in program.heads)


def _line_error(program: Program, line: Line, domain: float) -> float:
    """The largest |M(g)| |line(g) - g| / max(1, |h(g)|) for |g| <= domain; M(g) is the multiple of self in h."""
    reach = min(domain, line.domain)
    g = grid(domain, program)
    g = distinct(np.append(g, [place for place in (line.lowest, reach, -reach) if abs(place) <= domain]))
    multiple, constant = program.mean(g)
    # Beyond its lowest g the line stays where it is.
    stays = g <= line.lowest if line.step > 0.0 else g >= line.lowest
    off = np.where(stays, 1.0, line.max_error * (1.0 + line.max_error)) * np.abs(g)
    # Nor is it larger than the values of its ends.
    off = np.where(np.abs(g) > reach, np.abs(g) + abs(line.head.d), off)
    # Squares multiply h by g once more: if all values are multiples, the error is over max(1, |h g|) / |g|.
    squares = program.constant == 0.0 and all(head.multiples is not None for head in program.heads)
    return MARGIN * float(np.max(np.abs(multiple) * off / _floor(g, multiple * g + constant, squares=squares)))


def _floor(g: Array, h: Array, *, squares: bool) -> Array:
    """What errors are relative to: max(1, |h|), or max(1, |h g|) / |g|, which is at most that for |g| >= 1."""
    return np.maximum(1.0 / np.maximum(1.0, np.abs(g)) if squares else 1.0, np.abs(h))


@cache
def gate(program: Program, arithmetic: Arithmetic) -> Program:
    """The program of h(g) u, given that of h. Raises ValueError unless that has one head."""
    (head,) = program.heads
    # A constant k of h is the term k u of the gate, which is linear in what the values read.
    made = replace(program, name=f"{program.name}_gate", linear=program.constant, constant=0.0)
    # Bounded h, such as a sigmoid, has constant values, which u multiplies: no limit is needed.
    constants = heads_over(head.logits, head.constants)
    if head.c == 0.0 and program.linear == 0.0:
        return replace(made, heads=constants)
    # Pairs with a line keep their offsets; those of a steep key would be lost.
    pairable = all(abs(token.offset - head.gamma) <= FACTORED for token in head.bias_tokens)
    if arithmetic.pairs and pairable and arithmetic.tolerance < arithmetic.limit:
        return _in_pairs(program, arithmetic)
    small = arithmetic.small  # the linear term is that times tanh(small g) / small: two heads, if it is not 0
    linear = heads_over([(small, 0.0), (-small, 0.0)], [program.linear / small, -program.linear / small])
    if head.c == 0.0:
        return _limit(replace(made, heads=(*constants, *linear)), head, program.linear, arithmetic)
    # With the self key at logit 0, its two halves +-e g are exact, e being a power of two; so are steep slopes.
    tokens = tuple(_snapped(head, token) for token in head.bias_tokens)
    centred = replace(program, heads=(replace(head, beta=0.0, gamma=0.0, bias_tokens=tokens),))
    centred = _with_error(centred, largest_change(program, centred))
    (head,), half = centred.heads, math.log(0.5)
    ends = [head.c / small + head.d, -head.c / small + head.d]
    exact = (sign * Fraction(head.c / small) + Fraction(head.d) for sign in (1, -1))
    error = centred.max_error + max(float(abs(Fraction(a) - b)) for a, b in zip(ends, exact, strict=True))
    heads = (*heads_over([(small, half), (-small, half), *head.logits[1:]], [*ends, *head.constants[1:]]), *linear)
    return _limit(replace(made, heads=heads, max_error=error), head, program.linear, arithmetic)


def line(factor: float, arithmetic: Arithmetic, name: str) -> Program:
    """The program of factor g u, as the gate of a program whose only head is 0."""
    return replace(gate(Program(name, (Head(beta=0.0, bias_tokens=(), c=0.0),), linear=factor), arithmetic), name=name)


def _in_pairs(program: Program, arithmetic: Arithmetic) -> Program:
    (line,), name = lines(arithmetic.pairs), f"{program.name}_gate"
    if program.linear != 0.0 and spreads(program):
        # A linear term beside the head would cancel it where the gate is small, as in groups.
        program = replace(program, heads=tuple(spread(program.heads[0], program.linear)), linear=0.0)
    domain = min(program.domain, line.domain)
    added = _line_error(program, line, domain) + _PAIRING_ERROR
    return replace(_with_error(program, added, line=line, domain=domain, name=name).as_heads, double=True)


def limit_error(head: Head, linear: float, small: float, domain: float) -> float:
    """The limit's error in h(g), over what errors are relative to, for |g| <= domain <= 1 / (2 small).

    With x = e g, weights p of the self key and p_j of the others, A = sinh(x) / x - 1, B = cosh(x) - 1, T = tanh(x) / x
    - 1 and p' = p / (1 + p B), h changes by p' (c g (A - p B) + d (1 - p) B - B sum_j p_j v_j) + l g T.
    """
    g = grid(domain, Program("", (head,)))
    p, *others = head.weights(g)
    rest = sum((weight * v for weight, v in zip(others, head.constants[1:], strict=True)), np.zeros_like(g))
    x = (small * g) ** 2  # the series of A, B and T: their own formulas would lose all digits near 0
    a, b = x / 6.0 + x**2 / 120.0 + x**3 / 5040.0, x / 2.0 + x**2 / 24.0 + x**3 / 720.0
    t = -x / 3.0 + 2.0 * x**2 / 15.0 - 17.0 * x**3 / 315.0 + 62.0 * x**4 / 2835.0
    inner = head.c * g * (a - p * b) + head.d * (1.0 - p) * b - b * rest
    change = p / (1.0 + p * b) * inner + linear * g * t
    h = p * (head.c * g + head.d) + rest + linear * g
    return MARGIN * float(np.max(np.abs(change) / _floor(g, h, squares=head.multiples is not None)))


def _limit(split: Program, head: Head, linear: float, arithmetic: Arithmetic) -> Program:
    small = arithmetic.small
    # x^2 / 3 <= limit; and x <= 1/2, as the series in `limit_error` need.
    domain = min(split.domain, min(math.sqrt(3.0 * arithmetic.limit), 0.5) / small)
    return _with_error(split, limit_error(head, linear, small, domain), domain=domain, double=True)


def _snapped(head: Head, token: BiasToken) -> BiasToken:
    """The token relative to the self key; a steep slope becomes a power of two, so that products with it are exact."""
    slope, offset = Fraction(token.slope) - Fraction(head.beta), Fraction(token.offset) - Fraction(head.gamma)
    if abs(offset) <= FACTORED or slope == 0:
        return replace(token, slope=float(slope), offset=float(offset))
    power = math.copysign(2.0 ** round(math.log2(abs(slope))), slope)
    # A steep slope may change by a factor of up to sqrt(2) as long as slope and offset keep the place of the kink.
    return replace(token, slope=power, offset=float(power * offset / slope))


# -- parameters, from a few values of an unknown function -------------------------------------------------------------
#
# A solver returns candidates for the parameters of its row in the table, which `passes.match.identify` tests on a whole
# grid. For another activation it returns None or raises one of `UNSOLVED`.

UNSOLVED = (ArithmeticError, ValueError, StopIteration)  # quotients and logarithms without a value; no bend
FAR = 1e4  # where sigmoid-shaped functions have reached their limits


def _at(f: Function, point: float) -> float:
    return float(f(np.array([point]))[0])


def _logit(p: float) -> float:
    return math.log(p / (1.0 - p))


def _bend(share: Callable[[float], float]) -> tuple[float, float]:
    """A y > 0 at which the sigmoid is numerically away from both asymptotes, and its value. Raises StopIteration."""
    places = [1.0, *(2.0 ** (sign * power) for power in range(1, 21) for sign in (-1, 1))]
    return next((place, found) for place in places if 0.02 < (found := share(place)) < 0.98)


def _solve_self_gated(quantile: Callable[[float], float]) -> Solve:
    """(k, a) of a y S(k y), S a distribution function symmetric about 0: f(y) - f(-y) = a y, f(y) = a y S(k y)."""

    def solve(f: Function) -> Parameters | None:
        height = _at(f, 1.0) - _at(f, -1.0)
        place, found = _bend(lambda y: _at(f, y) / (height * y))
        return None if found == 0.5 else (quantile(found) / place, height)  # a straight line has S(k y) = 1/2, k = 0

    return solve


def _solve_two_slopes(f: Function) -> Parameters | None:
    right, left = _at(f, 1.0), -_at(f, -1.0)
    return (right, left) if math.isfinite(right) and math.isfinite(left) and right != left else None


def _solve_logistic(f: Function) -> Parameters | None:
    low, high = _at(f, -FAR), _at(f, FAR)
    place, found = _bend(lambda y: (_at(f, y) - low) / (high - low))
    return _logit(found) / place, high - low, low


_PROBES = np.concatenate([-np.logspace(2, -4, 400), [0.0], np.logspace(-4, 2, 400)])


def _solve_clip(f: Function) -> Parameters | None:
    """(slope, offset, left, right) of slope y + offset, clipped to the values left and right (may be infinite)."""
    ends = [_at(f, side * FAR) if _at(f, side * FAR) == _at(f, 2 * side * FAR) else math.inf for side in (-1.0, 1.0)]
    values = f(_PROBES)
    inner = np.flatnonzero((values != ends[0]) & (values != ends[1]) & np.isfinite(values))
    if ends == [math.inf, math.inf] or inner.size < 2:
        return None
    first, *_, last = inner
    slope = float((values[last] - values[first]) / (_PROBES[last] - _PROBES[first]))
    if slope == 0.0 or not math.isfinite(slope):
        return None
    nearest = inner[np.argmin(np.abs(_PROBES[inner]))]
    offset = float(values[nearest] - slope * _PROBES[nearest])
    far = math.copysign(math.inf, slope)
    left, right = (side * far if math.isinf(end) else end for side, end in zip((-1.0, 1.0), ends, strict=True))
    return slope, offset, left, right


def _solve_exponential_linear(f: Function) -> Parameters | None:
    right, depth = _at(f, 1.0), -_at(f, -FAR)
    place, found = _bend(lambda y: 1.0 + _at(f, -y) / depth)
    return (right, depth, -math.log(found) / place) if math.isfinite(right) else None


def _solve_exponential(f: Function) -> Parameters | None:
    start, rate = _at(f, 0.0), math.log(_at(f, 1.0) / _at(f, 0.0))
    return (rate, start) if rate != 0.0 and math.isfinite(rate) else None


def _solve_softplus(f: Function) -> Parameters | None:
    scale, slopes = _at(f, 0.0) / math.log(2.0), (_at(f, FAR) / FAR, _at(f, -FAR) / -FAR)
    slope = max(slopes, key=abs)
    return (slope / scale, scale) if scale != 0.0 and slope != 0.0 and math.isfinite(slope) else None


def _solve_softsign(f: Function) -> Parameters | None:
    one, three = _at(f, 1.0), _at(f, 3.0)
    if one == 0.0 or not 1.0 < three / one < 3.0:
        return None
    inner = (3.0 - three / one) / (3.0 * three / one - 3.0)
    return inner, one * (1.0 + inner) / inner


def _last_agreement(f: Function, h: Function, side: float) -> float:
    """The point on one side up to which f equals h and beyond which f is constant; infinite if they always agree."""
    y = side * np.logspace(0, 4, 400)
    apart = np.flatnonzero(np.abs(f(y) - h(y)) > 1e-6 * np.maximum(1.0, np.abs(h(y))))
    if apart.size == 0:
        return side * math.inf
    end = _at(f, side * FAR)
    outer, inner = float(y[apart[0]]), float(y[max(int(apart[0]) - 1, 0)])
    start = _at(h, inner) - end
    while (middle := 0.5 * (inner + outer)) not in (inner, outer):
        inside = (_at(h, middle) - end) * start > 0.0
        inner, outer = (middle, outer) if inside else (inner, middle)
    return middle


# -- the table ---------------------------------------------------------------------------------------------------------


def _clip(y: Array, p: Parameters) -> Array:
    slope, offset, left, right = p
    return np.clip(slope * y + offset, min(left, right), max(left, right))


def normal_cdf(x: Array) -> Array:
    """The normal distribution function Phi(x); erfc keeps the left tail accurate."""
    return 0.5 * each(math.erfc, -x / math.sqrt(2.0))


def _gelu_tanh(x: Array) -> Array:
    return x * sigmoid(2.0 * math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))


_UNIT, _ONES = (1.0, 1.0), (1.0, 1.0, 1.0)
_LEAKY_RELU = Activation(
    "leaky_relu", ("right", "left"), lambda y, p: np.where(y >= 0, p[0], p[1]) * y, _solve_two_slopes, two_slopes
)
_SILU = Activation(
    "silu", ("beta", "factor"), lambda y, p: p[1] * y * sigmoid(p[0] * y), _solve_self_gated(_logit), silu, _UNIT
)
_GELU = Activation(
    "gelu", ("inner", "factor"), lambda y, p: p[1] * y * normal_cdf(p[0] * y), _solve_self_gated(NormalDist().inv_cdf),
    _gelu_program, _UNIT, _gelu_gate, _quick_gelu,
)  # fmt: skip
_TANH = Activation(
    "tanh", ("steepness", "height", "low"), lambda y, p: p[2] + p[1] * sigmoid(p[0] * y), _solve_logistic,
    logistic, (2.0, 2.0, -1.0),
)  # fmt: skip
_CLIP = Activation("clip", ("slope", "offset", "left", "right"), _clip, _solve_clip, clip)
_CELU = Activation(
    "celu", ("right", "depth", "rate"),
    lambda y, p: np.where(y > 0, p[0] * y, p[1] * np.expm1(p[2] * np.minimum(y, 0.0))), _solve_exponential_linear,
    exponential_linear, _ONES, exponential_linear_gate,
)  # fmt: skip


def _factored(name: str, function: Function, program: Make | None, place: float = 1.0, **further: Any) -> Activation:
    """An activation whose only parameter, a factor, is read at one place."""
    return Activation(
        name, ("factor",), lambda y, p: p[0] * function(y), lambda f: (_at(f, place) / _at(function, place),),
        program, **further,
    )  # fmt: skip


def _within(whole: Activation, name: str, usual: Parameters, *wanted: float | None, off: float = 1e-3) -> Activation:
    """The part of an activation whose parameters are these numbers, or about (the grid decides); None is any."""

    def found(f: Function) -> Parameters | None:
        p = whole.solve(f)
        near = partial(math.isclose, rel_tol=off, abs_tol=off)
        fits = p is not None and all(each is None or near(one, each) for one, each in zip(p, wanted, strict=True))
        return p if fits else None

    return replace(whole, name=name, solve=found, usual=usual)


def _clipped(whole: Activation, make: Make) -> Activation:
    """The activation h(clip(y, low, high)), not clipped at -1 and 1, where h is read."""

    def solve(f: Function) -> Parameters | None:
        inside = whole.solve(f)
        if inside is None or inside[0] <= 0.0:
            return None
        ends = [_last_agreement(f, lambda y: whole.function(y, inside), side) for side in (-1.0, 1.0)]
        return None if ends == [-math.inf, math.inf] else (*inside, *ends)

    return Activation(
        f"{whole.name}_clipped",
        (*whole.parameters, "low", "high"),
        lambda y, p: whole.function(np.clip(y, p[-2], p[-1]), p[:-2]),
        solve,
        lambda p, a: clipped(make(p[:-2], a), p[-2], p[-1], a),
    )


ACTIVATIONS: tuple[Activation, ...] = (
    _within(_LEAKY_RELU, "relu", (1.0, 0.0), None, 0.0, off=0.0),
    _LEAKY_RELU,
    _SILU,
    _GELU,
    _factored("gelu_tanh", _gelu_tanh, _gelu_program, gate=_gelu_gate, quick=_quick_gelu),
    _factored("mish", lambda y: y * np.tanh(softplus(y)), mish),
    _within(_TANH, "sigmoid", (1.0, 1.0, 0.0), None, None, 0.0, off=0.0),
    _TANH,
    _factored("relu_squared", lambda y: np.maximum(y, 0.0) ** 2, _squared(gate), quick=_squared(with_line)),
    _within(_CLIP, "relu6", (1.0, 0.0, 0.0, 6.0), 1.0, 0.0, 0.0, 6.0),
    _within(_CLIP, "hard_sigmoid", (0.1667, 0.5, 0.0, 1.0), None, 0.5, 0.0, 1.0),
    _CLIP,
    _factored(
        "hard_swish", lambda y: y * np.clip(y / 6.0 + 0.5, 0.0, 1.0), hard_swish, 4.0,
        quick=_quick_hard_swish,
    ),
    _within(_CELU, "elu", _ONES, 1.0, None, 1.0),
    _within(_CELU, "selu", (1.0507, 1.7581, 1.0), 1.0507, 1.7581, 1.0),
    _CELU,
    _clipped(_SILU, silu),
    _clipped(_GELU, _gelu_program),
    Activation(
        "softplus", ("inner", "factor"), lambda y, p: p[1] * softplus(p[0] * y), _solve_softplus,
        lambda p, a: cheapest("softplus", a.tolerance / abs(p[1])).scaled(inner=p[0], outer=p[1]), _UNIT,
    ),
    Activation(
        "softsign", ("inner", "factor"), lambda y, p: p[1] * p[0] * y / (1.0 + np.abs(p[0] * y)), _solve_softsign,
        None, _UNIT,
    ),
    Activation(
        "exp", ("rate", "factor"), lambda y, p: p[1] * np.exp(p[0] * y), _solve_exponential, exponential,
        _UNIT,
    ),
    _factored(
        "square", lambda y: y * y, lambda p, a: line(p[0], a, "square"),
        quick=lambda p, a: replace(with_line(Program("", (), linear=p[0]), a), name="square"),
    ),
)  # fmt: skip

LINEAR = _factored(
    "linear", lambda y: y, None,
    gate=lambda p, a: line(p[0], a, "bilinear"), quick=lambda p, _: Program("linear", (), linear=p[0]),
)  # fmt: skip
"""The gate of a bilinear layer, g u. It is not in the table, since alone it is not an activation."""

UNNAMED = Activation("f", (), lambda y, _: np.full_like(y, np.nan), lambda _: None, None, usual=())
"""A function that is known by its values alone, in place of `function`."""
