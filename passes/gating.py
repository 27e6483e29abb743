"""Gates: from the program of h(y) to one of h(g) u, in one attention sublayer.

Comes in: a program of one head. Goes out: a program whose self values read u. Softmax weights are bounded and h is not,
so h(g) becomes a small difference of weights divided by a small number e. With the one head's numerator
c g e^(s g) + sum_j v_j e^(t_j g) over the denominator e^(s g) + sum_j e^(t_j g), the self key is split in two,

    e^(s g)  ->  (e^((s + e) g) + e^((s - e) g)) / 2  =  e^(s g) cosh(e g)
    g        ->  +1/e for the first, -1/e for the second  =  tanh(e g) / e

and every key whose value is not zero is the self key of one head with value u; all heads see the same keys. For SiLU
that is two heads and the weight sinh(e g) / e / (cosh(e g) + e^-g). With x = e g the numerator grows by the factor
sinh(x) / x <= 1 + x^2/5 and the denominator by at most cosh(x) <= 1 + 2/3 x^2 for |x| <= 1/2, so that the relative
error is at most 2/3 x^2. Rounding costs the arithmetic's precision over e, so these programs want float64.
"""

from __future__ import annotations

import math
from dataclasses import replace

from passes.arithmetic import Arithmetic
from passes.programs import BiasToken, Head, Program

_DOUBLE_ROUNDING = 2.0**-51
"""What float64 arithmetic may lose of a weight of 1: a few units in its last place."""


def gate(program: Program, arithmetic: Arithmetic) -> Program:
    """The program of h(g) u, given that of h.

    Args:
        program: one head, without a quadratic self logit.
        arithmetic: gives the number e.

    Raises:
        ValueError: the program has several heads or a quadratic self logit.
    """
    if len(program.heads) != 1 or program.heads[0].alpha != 0.0:
        raise ValueError(f"{program.name} is not a program of one head with an affine self logit")
    (head,) = program.heads
    name = f"{program.name}_gate"
    if head.c == 0.0 and program.linear == 0.0 and all(token.value == 0.0 for token in head.bias_tokens):
        return replace(
            program, name=name, heads=(replace(head, c=head.d, d=0.0),), linear=program.constant, constant=0.0
        )
    heads = _split(head, arithmetic.small)
    if program.linear != 0.0:
        heads = (*heads, *_line(program.linear, arithmetic.small))
    return _limit(replace(program, name=name, heads=heads, linear=program.constant, constant=0.0), arithmetic)


def line(factor: float, arithmetic: Arithmetic, name: str) -> Program:
    """The program of factor g u: two heads, each the other's bias token."""
    return _limit(Program(name, _line(factor, arithmetic.small)), arithmetic)


def _limit(program: Program, arithmetic: Arithmetic) -> Program:
    """The program with what the limit costs, on the domain where it is reached."""
    small = arithmetic.small
    return replace(
        program,
        max_error=program.max_error + arithmetic.limit,
        rounding=program.rounding + _DOUBLE_ROUNDING / small,
        domain=min(program.domain, min(math.sqrt(1.5 * arithmetic.limit), 0.5) / small),
        double=True,
        certificate=f"{program.certificate}; limit: 2/3 (e g)^2 with e = 2^{math.log2(small):.0f}",
    )


def _split(head: Head, small: float) -> tuple[Head, ...]:
    """The heads of (c g + d) e^(s g) + sum_j v_j e^(t_j g), all over the same keys; self is at logit 0."""
    plain = head.shifted(-head.beta, -head.gamma)
    half = math.log(0.5)
    keys = [(small, half, head.c / small + head.d), (-small, half, head.d - head.c / small)]
    keys += [(token.slope, token.offset, token.value) for token in plain.bias_tokens]
    if head.c == 0.0:
        keys = [(0.0, 0.0, head.d), *keys[2:]]
    return tuple(_one(keys, place) for place, (_, _, factor) in enumerate(keys) if factor != 0.0)


def _line(factor: float, small: float) -> tuple[Head, ...]:
    keys = [(small, 0.0, factor / small), (-small, 0.0, -factor / small)]
    return _one(keys, 0), _one(keys, 1)


def _one(keys: list[tuple[float, float, float]], place: int) -> Head:
    slope, offset, factor = keys[place]
    others = tuple(BiasToken(a, b) for other, (a, b, _) in enumerate(keys) if other != place)
    return Head(beta=slope, gamma=offset, c=factor, bias_tokens=others)
