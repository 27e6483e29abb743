"""Gates: from a program of h(y) to a program of h(g) u, whose self values read u.

Softmax weights are bounded and h is not. `with_line` makes any program a gate in the arithmetic of its model, by way of
the line g as attention (`passes.programs.line`); form `local` uses it. `gate` needs the fewest heads and keys, which
the other forms pay for, but also float64: h(g) becomes a small difference of weights divided by a small number e. A
head computes (c g + d) e^(s g) + sum_j v_j e^(t_j g) over e^(s g) + sum_j e^(t_j g). Its self key is split in two,

    e^(s g)  ->  (e^((s + e) g) + e^((s - e) g)) / 2  =  e^(s g) cosh(e g)
    c g + d  ->  c/e + d for the first, -c/e + d for the second

and every key with a nonzero value becomes the self key of a head with value u; all heads have the same keys. For SiLU
that is two heads and the weight sinh(e g) / e / (cosh(e g) + e^-g). A linear term l g becomes l tanh(e g) / e, in two
more heads. With x = e g, weights p of the self key and p_j of the others, A = sinh(x) / x - 1, B = cosh(x) - 1,
T = tanh(x) / x - 1 and p' = p / (1 + p B), the change is

    p' (c g (A - p B) + d (1 - p) B - B sum_j p_j v_j) + l g T,

about x^2/3 of h where p is 0 or 1; `limit_error` bounds it over max(1, |h|). Rounding errors are the arithmetic's
precision over e, so these programs need float64.

In float64 models that is too much. There a gate is the program with the line, written out as heads over pairs of keys
(`Arithmetic.pairs`): a line with a step of 1/32 costs a twelfth of the keys that the step 2^-24 saves, and rounding is
the arithmetic's precision over the step.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from functools import cache

import numpy as np

from passes.certificates.changes import largest_change
from passes.certificates.intervals import Interval, affine, largest, least_size, product, size, summed, total, weighted
from passes.certificates.pairs import LOGARITHMS, pairable, pairing_error
from passes.programs.arithmetic import Arithmetic
from passes.programs.fitted import lines
from passes.programs.groups import spread, spreads
from passes.programs.head import BiasToken, Head, heads_over
from passes.programs.line import Line
from passes.programs.program import Program
from passes.programs.softmax import FACTORED, LARGEST_QUERY, UNIT, Array

_TIGHT = 1.1
_ENOUGH = 2.0**-8
"""Bounds below this share of the limit's error need not be sharper."""
_MOST_CELLS = 200_000
_HALVED = UNIT
"""Relative error in the weights of the two self keys from the rounding of ln(1/2), their offset."""


@cache
def with_line(program: Program, arithmetic: Arithmetic) -> Program:
    """The program of h(g) u, given that of h, or of h(y) y: its self values are the line times what the values read.

    The error that the line adds is |M(g)| |line - g|, with M(g) the multiple of the self value in h. Where M vanishes
    on one side, the line need not reach far there.

    Args:
        program: a program in the arithmetic of its model, not itself a gate.
        arithmetic: provides the lines.
    """
    line, added, domain = _closest(program, arithmetic)
    return replace(
        program,
        name=f"{program.name}_gate",
        line=line,
        max_error=program.max_error + added * (1.0 + program.max_error),
        rounding=program.rounding + _LINE_ROUNDING[arithmetic.lines] / abs(line.step),
        domain=domain,
        certificate=f"{program.certificate}; {line.name}: {line.max_error:.2g} |g| for |g| <= {line.domain:g}",
    )


def _closest(program: Program, arithmetic: Arithmetic) -> tuple[Line, float, float]:
    """The line of a gate, the error that it adds, and the domain on which it does so."""
    # Beyond the kinks of a clip, self has no weight, and it does not matter how far a narrow line is off.
    candidates = [(line, program.domain) for line in lines(arithmetic.narrow)]
    for line in lines(arithmetic.lines):
        domain = min(program.domain, line.domain)
        candidates += [(line, domain), (line.reversed(), domain)]
    added = [_line_error(program, line, domain) for line, domain in candidates]
    close = [place for place, error in enumerate(added) if error <= _ADDED * arithmetic.tolerance]
    place = close[0] if close else int(np.argmin(added))
    line, domain = candidates[place]
    return line, added[place], domain


def needs_line(program: Program) -> bool:
    """Whether `with_line` makes the gate of a program: not of one that has float64 heads or is a gate already.

    Nor of a bounded h, such as a sigmoid, whose values are constants: u multiplies them, and no limit is needed.
    """
    if program.double or program.line is not None:
        return False
    return program.linear != 0.0 or any(head.c != 0.0 for head in program.heads)


_ADDED = 2.0
"""A line is close enough if it adds at most this times the arithmetic's tolerance."""

_LINE_ROUNDING = {"single": 2.0**-23, "half": 2.0**-23, "double": 2.0**-52}
"""Rounding of 1 - e^-x near x = 0, where e^-x is a multiple of half this or of this; divided by the step."""


def _line_error(program: Program, line: Line, domain: float) -> float:
    """A bound on |M(g)| |line(g) - g| / max(1, |h(g)|) for |g| <= domain."""
    reach = min(domain, line.domain)
    steps = np.concatenate([[0.0], np.geomspace(1e-3, 1.0, 400) * reach])
    if domain > reach:
        steps = np.concatenate([steps, np.geomspace(reach, min(domain, LARGEST_QUERY), 400)])
    edges = np.unique(np.concatenate([-steps, steps, [value for value in [line.lowest] if abs(value) < reach]]))
    g = edges[:-1], edges[1:]
    multiples, constants = [affine(0.0, program.linear, g)], [affine(0.0, program.constant, g)]
    for head in program.heads:
        weights = head.keys.enclosed(*g)
        values = np.array([head.d, *(token.value for token in head.bias_tokens)])[:, None]
        multiples.append(affine(head.c, 0.0, (weights[0][0], weights[1][0])))
        constants.append(summed(weighted(weights, (values, values))))
    multiple = total(*multiples)
    slopes = size(multiple)
    floor = np.maximum(1.0, least_size(total(product(multiple, g), *constants)))
    # Squares multiply h by g once more. Their error is over max(1, |h g|), hence the floor 1 / |g| for |h|.
    if program.constant == 0.0 and all(head.multiples is not None for head in program.heads):
        floor = np.maximum(1.0 / np.maximum(1.0, size(g)), least_size(product(multiple, g)))
    # Beyond its lowest g the line stays where it is.
    constant = (g[1] <= line.lowest) if line.step > 0.0 else (g[0] >= line.lowest)
    off = np.where(constant, 1.0, line.max_error * (1.0 + line.max_error)) * size(g)
    off = np.where(size(g) > reach, size(g) + line.largest, off)
    return float(np.max(slopes * off / floor)) * (1.0 + 1e-6)


@cache
def gate(program: Program, arithmetic: Arithmetic) -> Program:
    """The program of h(g) u, given that of h.

    Args:
        program: a program of one head with an affine self logit.
        arithmetic: provides e and the error up to which the limit counts as reached.

    Raises:
        ValueError: the program has several heads or a quadratic self logit.
    """
    if len(program.heads) != 1 or program.heads[0].alpha != 0.0:
        raise ValueError(f"{program.name} is not a program of one head with an affine self logit")
    (head,) = program.heads
    # A constant k of h is the term k u of the gate, which is linear in what the values read.
    made = replace(program, name=f"{program.name}_gate", linear=program.constant, constant=0.0)
    # Bounded h, such as a sigmoid, has constant values, which u multiplies: no limit is needed.
    if head.c == 0.0 and program.linear == 0.0:
        return replace(made, heads=_constants(head))
    if arithmetic.paired and pairable(head):
        return _in_pairs(program, f"{program.name}_gate", arithmetic)
    line = _line(program.linear, arithmetic.small) if program.linear != 0.0 else ()
    if head.c == 0.0:
        return _limit(replace(made, heads=(*_constants(head), *line)), head, program.linear, arithmetic)
    # The split below assumes the self key at logit 0; its two halves +-e g are then exact, e being a power of two.
    centred = _centred(program, arithmetic.limit * _ENOUGH)
    (head,) = centred.heads
    heads = (*_split(head, arithmetic.small), *line)
    return _limit(replace(made, heads=heads, max_error=centred.max_error), head, program.linear, arithmetic)


def line(factor: float, arithmetic: Arithmetic, name: str) -> Program:
    """The program of factor g u: two heads, each the other's bias token."""
    if arithmetic.paired:
        return _in_pairs(Program(name, (), linear=factor), name, arithmetic)
    # The limit's error depends on the linear term only, so the head in `_limit` is an empty one.
    made = Program(name, _line(factor, arithmetic.small))
    return _limit(made, Head(beta=0.0, bias_tokens=(), c=0.0), factor, arithmetic)


def _in_pairs(program: Program, name: str, arithmetic: Arithmetic) -> Program:
    """The gate of a program of at most one head, over the pairs of its keys and those of a line."""
    (line,) = lines(arithmetic.pairs)
    if program.linear != 0.0 and spreads(program):
        # A linear term beside the head would cancel it where the gate is small, as in groups.
        program = replace(program, heads=tuple(spread(program.heads[0], program.linear)), linear=0.0)
    domain = min(program.domain, line.domain)
    written = replace(line, max_error=line.max_error + LOGARITHMS)
    added = _line_error(program, written, domain)
    added += sum(pairing_error(head, written, domain, enough=line.max_error) for head in program.heads)
    made = replace(
        program,
        name=name,
        line=line,
        max_error=program.max_error + added * (1.0 + program.max_error),
        domain=domain,
        certificate=f"{program.certificate}; {line.name} in pairs of keys: {added:.2g}, bounded on cells",
    )
    return made.as_heads.in_double(gated=True)


def limit_error(head: Head, linear: float, small: float, domain: float, *, enough: float) -> float:
    """A bound on the limit's error in h(g), over max(1, |h|), for |g| <= domain <= 1 / (2 small).

    Where all values are multiples of g it also holds over max(1, |h g|) / |g|, as squares h(g) g need.
    """

    def bounds(low: Array, high: Array) -> tuple[Array, Array]:
        middle = (low + high) / 2.0
        return _change(head, linear, small, (low, high)), _change(head, linear, small, (middle, middle))

    steps = np.concatenate([[0.0], np.geomspace(1e-3, 1.0, 200)]) * domain
    edges = np.concatenate([-steps[:0:-1], steps])
    bound, _, _ = largest(bounds, edges, tight=_TIGHT, enough=enough, most=_MOST_CELLS)
    return bound * (1.0 + 1e-6)


def _change(head: Head, linear: float, small: float, g: Interval) -> Array:
    """The largest change over cells, over max(1, |h|) or max(1, |h g|) / |g|.

    The first term equals c g T + (1 - p) c g R with R = (B (1 + p) + p B^2 - A) / (1 + p B) / (1 + B). One form loses
    no digits where p is 0, the other none where p is 1; both bounds hold, so they are intersected.
    """
    least, most = head.keys.enclosed(*g)
    own, others = (least[0], most[0]), (least[1:], most[1:])
    values = np.array([token.value for token in head.bias_tokens])[:, None]
    rest, outside = summed(weighted(others, (values, values))), summed(others)
    # Bounds on A, B and T from the first terms of their series in x^2; the factors cover the rest for x <= 1/2.
    near, far = (small * least_size(g)) ** 2, (small * size(g)) ** 2
    a = near / 6.0 - _HALVED, far / 6.0 * 1.02 + _HALVED
    b = near / 2.0 - _HALVED, far / 2.0 * 1.03 + _HALVED
    t = -far / 3.0, -near / 3.0 * (1.0 - 0.4 * far)
    after = own[0] / (1.0 + b[1]), own[1] / (1.0 - _HALVED)
    scaled, straight = affine(head.c, 0.0, g), affine(linear, 0.0, g)
    left = product(weighted(after, scaled), (a[0] - own[1] * b[1], a[1] - own[0] * b[0]))
    r = (b[0] * (1.0 + own[0]) - a[1]) / (1.0 + b[1]) ** 2, b[1] * (1.0 + own[1] + own[1] * b[1]) - a[0]
    right = product(affine(head.c + linear, 0.0, g), t), product(weighted(outside, scaled), r)
    first = _both(total(left, product(straight, t)), total(*right))
    inner = total(affine(head.d, 0.0, product(outside, b)), affine(-1.0, 0.0, product(b, rest)))
    # Squares multiply h by g once more. Their error is over max(1, |h g|), hence the floor 1 / |g| for |h|.
    output = total(weighted(own, affine(head.c, head.d, g)), rest, straight)
    floor = 1.0 if np.any(values) or head.d != 0.0 else 1.0 / np.maximum(1.0, size(g))
    return size(total(first, weighted(after, inner))) / np.maximum(floor, least_size(output))


def _both(a: Interval, b: Interval) -> Interval:
    """The intersection of two intervals."""
    return np.maximum(a[0], b[0]), np.minimum(a[1], b[1])


def _limit(split: Program, head: Head, linear: float, arithmetic: Arithmetic) -> Program:
    """The program with the limit's error added, on the domain where the limit is reached."""
    small = arithmetic.small
    # x^2 / 3 <= limit; and x <= 1/2, as the series in `_change` need.
    domain = min(split.domain, min(math.sqrt(3.0 * arithmetic.limit), 0.5) / small)
    cost = limit_error(head, linear, small, domain, enough=arithmetic.limit * _ENOUGH) + _values(head, small)
    made = replace(
        split,
        max_error=split.max_error + cost * (1.0 + split.max_error),
        domain=domain,
        certificate=f"{split.certificate}; limit: tanh(e g) / e with e = 2^{math.log2(small):.0f}, bounded on cells",
    )
    return made.in_double(gated=True)


def _values(head: Head, small: float) -> float:
    """The rounding error of the two split values c/e + d and -c/e + d."""
    # c/e is exact, e being a power of two; adding d to it rounds.
    exact = Fraction(head.c) / Fraction(small), Fraction(head.d)
    return float(max(abs(Fraction(s * head.c / small + head.d) - s * exact[0] - exact[1]) for s in (1, -1)))


def _centred(program: Program, enough: float) -> Program:
    """The same program with the self key at logit 0, and steep keys with slopes that are powers of two.

    Then products with y are exact, and a kink stays in place in float64. The change is proved and added to the error.
    """
    (head,) = program.heads
    tokens = tuple(_snapped(head, token) for token in head.bias_tokens)
    made = replace(program, heads=(replace(head, beta=0.0, gamma=0.0, bias_tokens=tokens),))
    cost = largest_change(program, made, enough=enough)
    return replace(made, max_error=program.max_error + cost * (1.0 + program.max_error))


def _snapped(head: Head, token: BiasToken) -> BiasToken:
    """A bias token relative to the self key."""
    slope, offset = Fraction(token.slope) - Fraction(head.beta), Fraction(token.offset) - Fraction(head.gamma)
    if abs(offset) <= FACTORED or slope == 0:
        return replace(token, slope=float(slope), offset=float(offset))
    power = math.copysign(2.0 ** round(math.log2(abs(slope))), slope)
    # A steep slope may change by a factor of up to sqrt(2) as long as slope and offset keep the place of the kink.
    return replace(token, slope=power, offset=float(power * offset / slope))


def _split(head: Head, small: float) -> tuple[Head, ...]:
    """The heads of (c g + d) + sum_j v_j e^(t_j g), all over the same keys."""
    half = math.log(0.5)
    keys = [(small, half, head.c / small + head.d), (-small, half, -head.c / small + head.d)]
    keys += [(token.slope, token.offset, token.value) for token in head.bias_tokens]
    return _each(keys)


def _constants(head: Head) -> tuple[Head, ...]:
    """The heads of a head with constant values, each of which becomes a multiple of u."""
    keys = [(head.beta, head.gamma, head.d)]
    return _each([*keys, *((token.slope, token.offset, token.value) for token in head.bias_tokens)])


def _line(factor: float, small: float) -> tuple[Head, ...]:
    """The heads of factor tanh(small g) / small."""
    return _each([(small, 0.0, factor / small), (-small, 0.0, -factor / small)])


def _each(keys: list[tuple[float, float, float]]) -> tuple[Head, ...]:
    """A head for every key (slope, offset, multiple of u) with a nonzero multiple; other keys are its bias tokens."""
    return heads_over([key[:2] for key in keys], [key[2] for key in keys])
