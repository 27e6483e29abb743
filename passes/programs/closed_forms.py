"""Head programs in closed form, exact ones and limits with an error below the arithmetic's rounding; and gates of any.

docs/programs.md derives them, and the errors: *steep keys* select one key on either side of a kink; *a far normaliser*
at logit 0 beside a key at y - L with the value times e^L gives e^y (1 - e^(y - L) + ...).

A gate is a program of h(g) u, derived from one of h(y): its self values read u. `with_line` turns any program into a
gate through the line g as attention (`program.Line`), as form `local` does. `gate` needs the fewest heads, in float64:
the self key is split in two, with slopes e more and e less, and each key with a nonzero value becomes the self key of a
head with value u. In float64 models, a gate is written out over pairs of keys instead.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np

from passes.programs.program import (
    FACTORED,
    LARGEST_QUERY,
    MARGIN,
    Arithmetic,
    Array,
    BiasToken,
    Head,
    Line,
    Parameters,
    Program,
    grid,
    heads_over,
    largest_change,
    lines,
    spread,
    spreads,
)

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
    known = {"gelu": (1.772933840751648, 1.40e-2), "gelu_tanh": (1.774497628211975, 1.43e-2)}
    beta, error = known[activation]
    return Program("scaled_silu", (Head(beta=beta),), max_error=error)


def mish(p: Parameters, _: Arithmetic) -> Program:
    """1 - tanh(softplus(y)) = 2 / (e^2y + 2 e^y + 2): the weight of self at logit ln 2 against 2y and y + ln 2."""
    ln2 = math.log(2.0)
    head = Head(beta=0.0, gamma=ln2, c=-p[0], bias_tokens=(BiasToken(slope=2.0), BiasToken(slope=1.0, offset=ln2)))
    return Program("mish", (head,), linear=p[0])


def logistic(p: Parameters, _: Arithmetic) -> Program:
    """`low + height sigmoid(k y)`: the self value is a constant."""
    k, height, low = p
    name = "sigmoid" if low == 0.0 else "tanh"
    return Program(name, (Head(beta=k, c=0.0, d=height),), constant=low)


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
    head = Head(beta=0.0, c=slope, d=offset, bias_tokens=tuple(tokens))
    return Program("clip", (head,), max_error=error)


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


# -- gates -------------------------------------------------------------------------------------------------------------

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
    added = [_line_error(program, line, domain) for line, domain in candidates]
    close = [place for place, error in enumerate(added) if error <= _LINE_TOLERANCE * arithmetic.tolerance]
    place = close[0] if close else int(np.argmin(added))
    chosen, domain = candidates[place]
    return _with_error(program, added[place], line=chosen, domain=domain, name=f"{program.name}_gate")


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
    g = grid(min(domain, LARGEST_QUERY), program)
    g = np.unique(np.append(g, [place for place in (line.lowest, reach, -reach) if abs(place) <= domain]))
    multiple, constant = program.mean(g)
    # Beyond its lowest g the line stays where it is.
    stays = g <= line.lowest if line.step > 0.0 else g >= line.lowest
    off = np.where(stays, 1.0, line.max_error * (1.0 + line.max_error)) * np.abs(g)
    # Nor is it larger than the values of its ends.
    off = np.where(np.abs(g) > reach, np.abs(g) + abs(line.keys[0][2]), off)
    # Squares multiply h by g once more: if all values are multiples, the error is over max(1, |h g|) / |g|.
    squares = program.constant == 0.0 and all(head.multiples is not None for head in program.heads)
    return MARGIN * float(np.max(np.abs(multiple) * off / _floor(g, multiple * g + constant, squares=squares)))


def _floor(g: Array, h: Array, *, squares: bool) -> Array:
    """What errors are relative to: max(1, |h|), or max(1, |h g|) / |g|, which is at most that for |g| >= 1."""
    return np.maximum(1.0 / np.maximum(1.0, np.abs(g)) if squares else 1.0, np.abs(h))


@cache
def gate(program: Program, arithmetic: Arithmetic) -> Program:
    """The program of h(g) u, given that of h. Raises ValueError unless that has one head."""
    if len(program.heads) != 1:
        raise ValueError(f"{program.name} is not a program of one head")
    (head,) = program.heads
    # A constant k of h is the term k u of the gate, which is linear in what the values read.
    made = replace(program, name=f"{program.name}_gate", linear=program.constant, constant=0.0)
    # Bounded h, such as a sigmoid, has constant values, which u multiplies: no limit is needed.
    constants = heads_over(head.logits, head.constants)
    if head.c == 0.0 and program.linear == 0.0:
        return replace(made, heads=constants)
    # Pairs with a line keep their offsets; those of a steep key would be lost.
    pairable = all(abs(token.offset - head.gamma) <= FACTORED for token in head.bias_tokens)
    if arithmetic.paired and pairable:
        return _in_pairs(program, f"{program.name}_gate", arithmetic)
    line = _line(program.linear, arithmetic.small) if program.linear != 0.0 else ()
    if head.c == 0.0:
        return _limit(replace(made, heads=(*constants, *line)), head, program.linear, arithmetic)
    # With the self key at logit 0, its two halves +-e g are exact, e being a power of two.
    (head,), small, half = (centred := _centred(program)).heads, arithmetic.small, math.log(0.5)
    ends = [head.c / small + head.d, -head.c / small + head.d]
    exact = (sign * Fraction(head.c / small) + Fraction(head.d) for sign in (1, -1))
    error = centred.max_error + max(float(abs(Fraction(a) - b)) for a, b in zip(ends, exact, strict=True))
    values = [*ends, *head.constants[1:]]
    heads = (*heads_over([(small, half), (-small, half), *head.logits[1:]], values), *line)
    return _limit(replace(made, heads=heads, max_error=error), head, program.linear, arithmetic)


def line(factor: float, arithmetic: Arithmetic, name: str) -> Program:
    """The program of factor g u: two heads, each the other's bias token."""
    if arithmetic.paired:
        return _in_pairs(Program(name, (), linear=factor), name, arithmetic)
    # The limit's error depends on the linear term only, so the head in `_limit` is an empty one.
    empty = Head(beta=0.0, bias_tokens=(), c=0.0)
    return _limit(Program(name, _line(factor, arithmetic.small)), empty, factor, arithmetic)


def _in_pairs(program: Program, name: str, arithmetic: Arithmetic) -> Program:
    (line,) = lines(arithmetic.pairs)
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


def _centred(program: Program) -> Program:
    """The same program with the self key at logit 0, and steep slopes that are powers of two: products are exact."""
    (head,) = program.heads
    tokens = tuple(_snapped(head, token) for token in head.bias_tokens)
    made = replace(program, heads=(replace(head, beta=0.0, gamma=0.0, bias_tokens=tokens),))
    return _with_error(made, largest_change(program, made))


def _snapped(head: Head, token: BiasToken) -> BiasToken:
    slope, offset = Fraction(token.slope) - Fraction(head.beta), Fraction(token.offset) - Fraction(head.gamma)
    if abs(offset) <= FACTORED or slope == 0:
        return replace(token, slope=float(slope), offset=float(offset))
    power = math.copysign(2.0 ** round(math.log2(abs(slope))), slope)
    # A steep slope may change by a factor of up to sqrt(2) as long as slope and offset keep the place of the kink.
    return replace(token, slope=power, offset=float(power * offset / slope))


def _line(factor: float, small: float) -> tuple[Head, ...]:
    """The heads of factor tanh(small g) / small."""
    return heads_over([(small, 0.0), (-small, 0.0)], [factor / small, -factor / small])
