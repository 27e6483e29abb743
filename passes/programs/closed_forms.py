"""Head programs in closed form: exact ones, and limits whose error is below the arithmetic's rounding everywhere.

*Steep keys* (docs/programs.md#limits-of-steep-keys): a logit k (y - a) with a huge k selects one key on either side of
a; between values v and w that are equal at a, the error is at most 0.2785 |v' - w'| / k. *A far normaliser*: one key at
logit 0 and another at y - L with the value times e^L give e^y (1 - e^(y - L) + ...).
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from passes.programs.gates import gate
from passes.programs.head import BiasToken, Head, heads_over
from passes.programs.program import Arithmetic, Program
from passes.programs.solve import Parameters

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
    k, error = arithmetic.steepness, 0.0
    tokens = []
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
    head, error = _bent(right, depth, rate, arithmetic.steepness)
    return Program("elu", (head,), max_error=error)


def exponential_linear_gate(p: Parameters, arithmetic: Arithmetic) -> Program:
    """The gate of ELU: that of its ReLU, plus the bounded part, whose values are constants.

    Relative to the steep key, ELU's own head has slopes -k and rate - k, and rounding would lose the rate.
    """
    right, depth, rate = p
    bent, error = _bent(0.0, depth, rate, arithmetic.steepness)
    line = gate(two_slopes((right, 0.0), arithmetic), arithmetic)
    bounded = gate(Program("elu", (bent,), max_error=error), arithmetic)
    heads, error = (*line.heads, *bounded.heads), line.max_error + error
    return replace(bounded, heads=heads, max_error=error, domain=line.domain, double=True)


def _bent(right: float, depth: float, rate: float, k: float) -> tuple[Head, float]:
    """The head of ELU and its error at the kink, from the slopes and the curvature on the left."""
    tokens = (BiasToken(0.0, 0.0, -depth), BiasToken(rate, -_FAR_LOGIT, depth * math.exp(_FAR_LOGIT)))
    slopes = abs(right - depth * rate) + 1e-9 * (abs(right) + abs(depth * rate))
    kink = slopes * KINK / k + abs(depth) * (rate / k) ** 2
    return Head(beta=k, c=right, bias_tokens=tokens), kink + abs(depth) * (math.exp(-_FAR_LOGIT) + 2.0**-51)


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
    The first two share the weight 1, so that the kinks are at 3 and -3. 1/(6 e) is a power of two, to which 1/2 adds
    exactly.
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
