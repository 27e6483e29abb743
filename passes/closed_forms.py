"""Head programs in closed form: exact ones, and limits that are below the arithmetic's rounding everywhere.

Comes in: an activation's parameters and the arithmetic. Goes out: a `Program` with its certified error. Two limits are
used. *Steep keys*: a logit k (y - a) with a huge k picks one key on either side of a. Between a key with value v(y)
and one with value w(y), both continuous and equal at a, the error is at most |v' - w'| x / (1 + e^x) / k with
x = k |y - a|, which is at most 0.2785 |v' - w'| / k. *A far normaliser*: one key at logit 0 and another at
y - L with the value times e^L give e^y (1 - e^(y - L) + ...).
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from passes.arithmetic import Arithmetic
from passes.gating import gate
from passes.programs import BiasToken, Head, Program
from passes.solving import Parameters

KINK = 0.27846454276107379
"""max over x > 0 of x / (1 + e^x): the error of SiLU(k y) / k against ReLU is this over k."""

_GENTLE = 2.0**25
"""A steepness whose kinks cost 2e-8 and whose logits leave float64 28 bits behind the point."""

_FAR_LOGIT = 36.0
"""e^-36 is below half a unit in the last place of 1 in float64."""


def silu(p: Parameters, _: Arithmetic) -> Program:
    """Theorem 3: weight sigma(k y), value y."""
    return Program("silu", (Head(beta=p[0], c=p[1]),), certificate="identity (Theorem 3)")


def mish(p: Parameters, _: Arithmetic) -> Program:
    """1 - tanh(softplus(y)) = 2 / (e^2y + 2 e^y + 2): the weight of self at logit ln 2 against 2y and y + ln 2."""
    ln2 = math.log(2.0)
    head = Head(beta=0.0, gamma=ln2, c=-p[0], bias_tokens=(BiasToken(slope=2.0), BiasToken(slope=1.0, offset=ln2)))
    return Program("mish", (head,), linear=p[0])


def logistic(p: Parameters, _: Arithmetic) -> Program:
    """Low + height sigmoid(k y): the value is a constant."""
    k, height, low = p
    name = "sigmoid" if low == 0.0 else "tanh"
    return Program(name, (Head(beta=k, c=0.0, d=height),), constant=low)


def two_slopes(p: Parameters, arithmetic: Arithmetic) -> Program:
    """ReLU and leaky ReLU: a steep key, and a linear term."""
    right, left = p
    k = arithmetic.steepness
    name = "relu" if left == 0.0 else "leaky_relu"
    error = abs(right - left) * KINK / k
    return Program(name, (Head(beta=k, c=right - left),), linear=left, max_error=error, certificate=_steep(k))


def clip(p: Parameters, arithmetic: Arithmetic) -> Program:
    """Slope y + offset between two kinks: self at logit 0, and beyond each kink a bias token with the value there."""
    slope, offset, left, right = p
    k = arithmetic.steepness
    tokens = [
        BiasToken(side * k, -side * k * (end - offset) / slope, end)
        for side, end in ((-1.0, left), (1.0, right))
        if math.isfinite(end)
    ]
    head = Head(beta=0.0, c=slope, d=offset, bias_tokens=tuple(tokens))
    return Program("clip", (head,), max_error=len(tokens) * abs(slope) * KINK / k, certificate=_steep(k))


def exponential_linear(p: Parameters, arithmetic: Arithmetic) -> Program:
    """ELU, SELU, CELU: a steep self key above 0; below it the value -depth at logit 0, and e^(rate y) far below it."""
    right, depth, rate = p
    k = arithmetic.steepness
    tokens = (BiasToken(0.0, 0.0, -depth), BiasToken(rate, -_FAR_LOGIT, depth * math.exp(_FAR_LOGIT)))
    error = (abs(right) + abs(depth * rate)) * KINK / k + abs(depth) * math.exp(-_FAR_LOGIT)
    certificate = f"{_steep(k)}; e^-{_FAR_LOGIT:g}"
    return Program("elu", (Head(beta=k, c=right, bias_tokens=tokens),), max_error=error, certificate=certificate)


def exponential_linear_gate(p: Parameters, arithmetic: Arithmetic) -> Program:
    """The gate of ELU. Its steep key is less so: the two below it differ by a slope of rate, which k must not drown."""
    gentle = replace(arithmetic, steepness=min(arithmetic.steepness, _GENTLE))
    return gate(exponential_linear(p, gentle), arithmetic)


def exponential(p: Parameters, arithmetic: Arithmetic) -> Program:
    """e^(rate y): weight e^(rate y - L), value e^L. L lies beyond what the type can hold."""
    rate, factor = p
    far = 600.0 if arithmetic.tolerance < 1e-10 else 160.0
    head = Head(beta=rate, gamma=-far, c=0.0, d=factor * math.exp(far))
    return Program(
        "exp",
        (head,),
        max_error=math.exp(-_FAR_LOGIT),
        domain=(far - _FAR_LOGIT) / abs(rate),
        double=True,
        certificate=f"e^-{_FAR_LOGIT:g}",
    )


def hard_swish(p: Parameters, arithmetic: Arithmetic) -> Program:
    """The weight of y: between the kinks 1/2 + tanh(e y) / (6 e), beyond them 0 and 1.

    Keys +e y and -e y with the values (1/2 +- 1/(6 e)) y, a steep key with value y above 3, one with value 0 below -3.
    """
    k, small = arithmetic.steepness, _NARROW
    share, kink = 1.0 / (6.0 * small), 3.0 * k
    keys = [(small, 0.0, 0.5 + share), (-small, 0.0, 0.5 - share), (k, -kink, 1.0), (-k, -kink, 0.0)]
    heads = []
    for place, (slope, offset, value) in enumerate(keys[:3]):
        others = tuple(BiasToken(a, b) for other, (a, b, _) in enumerate(keys) if other != place)
        heads.append(Head(beta=slope, gamma=offset, c=p[0] * value, bias_tokens=others))
    error = abs(p[0]) * (2.0 * KINK / k * 1.5 + 3.0 * 0.5 * (3.0 * small) ** 2 / 3.0)
    certificate = f"{_steep(k)}; tanh(e y) / e with e = 2^{math.log2(small):.0f} for |y| <= 3"
    rounding = 2.0**-51 / small + 2.0**-22
    return Program("hard_swish", tuple(heads), max_error=error, double=True, certificate=certificate, rounding=rounding)


_NARROW = 2.0**-18
"""The number e of a limit that is needed for |y| <= 3 only: error 1e-10, rounding 1e-10."""


def clipped(program: Program, low: float, high: float, arithmetic: Arithmetic) -> Program:
    """The program of h(clip(y, low, high)): beyond each kink a steep bias token with the value there."""
    (head,) = program.heads
    k = arithmetic.steepness
    ends = [(side, end) for side, end in ((-1.0, low), (1.0, high)) if math.isfinite(end)]
    outside = float(program.linear != 0.0)  # a linear term would go on beyond the kinks
    if outside:
        raise ValueError(f"{program.name} has a linear term, which a bias token cannot stop")
    values = [float(program.evaluate(np.array([end]))[0]) - program.constant for _, end in ends]
    tokens = tuple(BiasToken(side * k, -side * k * end, value) for (side, end), value in zip(ends, values, strict=True))
    return replace(
        program,
        name=f"{program.name}_clipped",
        heads=(replace(head, bias_tokens=(*head.bias_tokens, *tokens)),),
        max_error=program.max_error + 2.0 * abs(head.c) * len(ends) * KINK / k,
        certificate=f"{program.certificate}; {_steep(k)}",
    )


def _steep(k: float) -> str:
    return f"limit: 0.2785 / k at each kink with k = 2^{math.log2(k):.0f}"
