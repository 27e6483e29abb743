"""Gates: from a program of h(y) to a program of h(g) u, whose self values read u (docs/programs.md).

`with_line` makes any program a gate in the arithmetic of its model, through the line g as attention
(`exponentials.Line`); form `local` uses it. `gate` needs the fewest heads and keys, but also float64: h(g) becomes a
small difference of weights divided by a small number e. The self key of (c g + d) e^(s g) + sum_j v_j e^(t_j g) over
e^(s g) + sum_j e^(t_j g) is split in two, s + e and s - e, with the values c/e + d and -c/e + d; every key with a
nonzero value becomes the self key of a head with value u. A linear term l g becomes l tanh(e g) / e. With x = e g,
weights p of the self key and p_j of the others, A = sinh(x) / x - 1, B = cosh(x) - 1, T = tanh(x) / x - 1 and p' = p /
(1 + p B), the change is

    p' (c g (A - p B) + d (1 - p) B - B sum_j p_j v_j) + l g T,

which `limit_error` measures over max(1, |h|). In float64 models rounding over e is too much; there a gate is the
program with the line, written out as heads over pairs of keys (`Arithmetic.pairs`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from functools import cache

import numpy as np

from passes.programs.exponentials import Line
from passes.programs.fitted import lines
from passes.programs.groups import spread, spreads
from passes.programs.head import FACTORED, LARGEST_QUERY, Array, BiasToken, Head, heads_over
from passes.programs.program import MARGIN, Arithmetic, Program, grid, largest_change

_LINE_TOLERANCE = 2.0  # in tolerances: the allowed additional error of a line
_PAIRING_ERROR = 4e-15  # what rounding the coefficients of pairs of keys to float64 adds; the certificate proves it


@cache
def with_line(program: Program, arithmetic: Arithmetic) -> Program:
    """The program of h(g) u, given that of h, or of h(y) y: self values are the line times what values read.

    The error that the line adds is |M(g)| |line - g|, with M(g) the multiple of the self value in h. Where M vanishes
    on one side, the line need not reach far there.
    """
    # Beyond the kinks of a clip, self has no weight, and it does not matter how far a narrow line is off.
    candidates = [(line, program.domain) for line in lines(arithmetic.narrow)]
    for line in lines(arithmetic.lines):
        domain = min(program.domain, line.domain)
        candidates += [(line, domain), (replace(line, step=-line.step), domain)]
    added = [_line_error(program, line, domain) for line, domain in candidates]
    close = [place for place, error in enumerate(added) if error <= _LINE_TOLERANCE * arithmetic.tolerance]
    place = close[0] if close else int(np.argmin(added))
    return _with(program, *candidates[place], added[place], f"{program.name}_gate")


def _with(program: Program, line: Line, domain: float, added: float, name: str) -> Program:
    error = program.max_error + added * (1.0 + program.max_error)
    return replace(program, name=name, line=line, max_error=error, domain=domain)


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
    off = np.where(np.abs(g) > reach, np.abs(g) + line.largest, off)
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
    constants = heads_over(head.logits, [head.d, *(token.value for token in head.bias_tokens)])
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
    centred = _centred(program)
    (head,), small, half = centred.heads, arithmetic.small, math.log(0.5)
    values = [head.c / small + head.d, -head.c / small + head.d, *(token.value for token in head.bias_tokens)]
    heads = (*heads_over([(small, half), (-small, half), *head.logits[1:]], values), *line)
    return _limit(replace(made, heads=heads, max_error=centred.max_error), head, program.linear, arithmetic)


def line(factor: float, arithmetic: Arithmetic, name: str) -> Program:
    """The program of factor g u: two heads, each the other's bias token."""
    if arithmetic.paired:
        return _in_pairs(Program(name, (), linear=factor), name, arithmetic)
    # The limit's error depends on the linear term only, so the head in `_limit` is an empty one.
    made = Program(name, _line(factor, arithmetic.small))
    return _limit(made, Head(beta=0.0, bias_tokens=(), c=0.0), factor, arithmetic)


def _in_pairs(program: Program, name: str, arithmetic: Arithmetic) -> Program:
    (line,) = lines(arithmetic.pairs)
    if program.linear != 0.0 and spreads(program):
        # A linear term beside the head would cancel it where the gate is small, as in groups.
        program = replace(program, heads=tuple(spread(program.heads[0], program.linear)), linear=0.0)
    domain = min(program.domain, line.domain)
    made = _with(program, line, domain, _line_error(program, line, domain) + _PAIRING_ERROR, name)
    return replace(made.as_heads, double=True)


def limit_error(head: Head, linear: float, small: float, domain: float) -> float:
    """The limit's error in h(g), over what errors are relative to, for |g| <= domain <= 1 / (2 small)."""
    g = grid(domain, Program("", (head,)))
    p, *others = head.weights(g)
    rest = sum((weight * token.value for weight, token in zip(others, head.bias_tokens, strict=True)), np.zeros_like(g))
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
    cost = limit_error(head, linear, small, domain)
    return replace(split, max_error=split.max_error + cost * (1.0 + split.max_error), domain=domain, double=True)


def _centred(program: Program) -> Program:
    """The same program with the self key at logit 0, and steep slopes that are powers of two: products are exact."""
    (head,) = program.heads
    tokens = tuple(_snapped(head, token) for token in head.bias_tokens)
    made = replace(program, heads=(replace(head, beta=0.0, gamma=0.0, bias_tokens=tokens),))
    cost = largest_change(program, made)
    return replace(made, max_error=program.max_error + cost * (1.0 + program.max_error))


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
