"""Activations and head programs in ball arithmetic (python-flint): numbers with proved bounds on their rounding.

It shares no code with `passes`: programs are read as plain coefficients, and activations are implemented from their
definitions. Results are balls; `upper` is a rigorous upper bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

pytest.importorskip("flint")
from flint import arb, arb_series, ctx

from passes.programs.head import Array, BiasToken, Head
from passes.programs.program import Program

Ball = Callable[[arb], arb]
__all__ = ["arb", "arb_series"]
PRECISE = 1300
"""Bits: the difference of two logits of 2^80 times 1e308 still has a hundred after the binary point."""
BITS = (160, 400, PRECISE)
"""Precisions that are tried in turn: few points need the last."""
Key = tuple[float, float]
"""A logit: the factor of y, and the offset."""


@contextmanager
def precision(bits: int = PRECISE) -> Iterator[None]:
    """Ball arithmetic with this many bits, and Taylor series of ten terms, inside the block."""
    before = ctx.prec, ctx.cap
    ctx.prec, ctx.cap = bits, 10
    try:
        yield
    finally:
        ctx.prec, ctx.cap = before


def program_at(program: Program, y: arb, z: arb) -> arb:
    """A program: its heads and the linear term."""
    return evaluator(program)(y, z)


def evaluator(program: Program) -> Callable[[arb, arb], arb]:
    """The program as a function of y and z, for many points: heads over the same keys share their exponentials.

    A gate has dozens of heads over one set of keys, which differ in the key that is the head's own.
    """
    groups = [_shared(keys, heads) for keys, heads in _over_the_same_keys(program).items()]
    linear, constant = arb(program.linear), arb(program.constant)

    def at(y: arb, z: arb) -> arb:
        return sum((group(y, z) for group in groups), linear * z + constant)

    return at


def _over_the_same_keys(program: Program) -> dict[tuple[Key, ...], list[Head]]:
    """The heads by their keys, in any order."""
    found: dict[tuple[Key, ...], list[Head]] = {}
    for head in program.heads:
        found.setdefault(tuple(sorted((_own(head), *map(_key, head.bias_tokens)))), []).append(head)
    return found


def _own(head: Head) -> Key:
    return (head.beta, head.gamma)


def _key(token: BiasToken) -> Key:
    return (token.slope, token.offset)


def _shared(keys: tuple[Key, ...], heads: list[Head]) -> Callable[[arb, arb], arb]:
    """The sum of heads over these keys: a softmax is linear in its values. Coefficients are exact balls."""
    coefficients = [tuple(map(arb, key)) for key in keys]
    multiples = [(keys.index(_own(head)), arb(head.c)) for head in heads if head.c]
    constants = [(keys.index(_own(head)), arb(head.d)) for head in heads if head.d]
    constants += [(keys.index(_key(token)), arb(token.value)) for h in heads for token in h.bias_tokens if token.value]

    def at(y: arb, z: arb) -> arb:
        logits = [slope * y + offset for slope, offset in coefficients]
        top = max(logit.mid() for logit in logits)
        weights = [(logit - top).exp() for logit in logits]
        values = sum((weights[place] * factor for place, factor in multiples), arb(0)) * z
        values = sum((weights[place] * value for place, value in constants), values)
        return values / sum(weights, arb(0))

    return at


def narrow(ball: Callable[[], arb], room: float, relative: float = 0.0) -> arb:
    """A ball of radius at most `room`, or `relative` times its middle, with as few bits as that takes of `BITS`.

    With the most bits the radius is what it is; the ball holds the number in any case.
    """
    for bits in BITS:
        with precision(bits):
            found = ball()
            if float(found.rad()) <= max(room, relative * abs(float(found.mid()))):
                break
    return found


def allowance(program: Program, y: Array, z: Array | None = None) -> Array:
    """Absolute, for the rounding of `Program.evaluate` in float64: from that of float32, unless it is stated."""
    share = program.rounding if program.double else 2.0**-26 * program.rounding
    return np.asarray(
        share * np.maximum(np.maximum(1.0, 0.0 if z is None else np.abs(z)), np.abs(program.evaluate(y, z)))
    )


def upper(ball: arb) -> float:
    """An upper bound of the ball's largest absolute value."""
    return float(abs(ball).upper()) * (1.0 + 2.0**-50)


def errors(values: Sequence[float] | Array, exact: Sequence[arb]) -> Array:
    """The distances of floats from balls, rounded up; infinite for floats that are not finite."""
    return np.array(
        [upper(arb(float(a)) - b) if np.isfinite(a) else np.inf for a, b in zip(values, exact, strict=True)]
    )


# -- the activations ---------------------------------------------------------------------------------------------


def _clamp(y: arb, low: float, high: float) -> arb:
    """Clip(y, low, high); comparisons of exact numbers are decidable in ball arithmetic."""
    y = arb(low) if low > -np.inf and y < arb(low) else y
    return arb(high) if high < np.inf and y > arb(high) else y


def _silu(y: arb, beta: float, factor: float) -> arb:
    return arb(factor) * y / (1 + (-arb(beta) * y).exp())


def _gelu(y: arb, inner: float, factor: float) -> arb:
    return arb(factor) * y * (-arb(inner) * y / arb(2).sqrt()).erfc() / 2


def _gelu_tanh(y: arb, factor: float) -> arb:
    argument = 2 * (2 / arb.pi()).sqrt() * (y + arb("0.044715") * y**3)
    return arb(factor) * y / (1 + (-argument).exp())


def _mish(y: arb, factor: float) -> arb:
    return arb(factor) * y * (1 + y.exp()).log().tanh()


def _softplus(y: arb, inner: float, factor: float) -> arb:
    return arb(factor) * (1 + (arb(inner) * y).exp()).log()


def _bent(y: arb, right: float, depth: float, rate: float) -> arb:
    return arb(right) * y if y > 0 else arb(depth) * ((arb(rate) * y).exp() - 1)


def _clip(y: arb, slope: float, offset: float, left: float, right: float) -> arb:
    return _clamp(arb(slope) * y + arb(offset), min(left, right), max(left, right))


BALLS: Mapping[str, Callable[..., arb]] = {
    "relu": lambda y, right, left: arb(right if y > 0 else left) * y,
    "leaky_relu": lambda y, right, left: arb(right if y > 0 else left) * y,
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "mish": _mish,
    "sigmoid": lambda y, k, height, low: arb(low) + arb(height) / (1 + (-arb(k) * y).exp()),
    "tanh": lambda y, k, height, low: arb(low) + arb(height) / (1 + (-arb(k) * y).exp()),
    "relu_squared": lambda y, factor: arb(factor) * y * y if y > 0 else arb(0),
    "relu6": _clip,
    "hard_sigmoid": _clip,
    "clip": _clip,
    "hard_swish": lambda y, factor: arb(factor) * y * _clamp(y / 6 + arb(1) / 2, 0.0, 1.0),
    "elu": _bent,
    "selu": _bent,
    "celu": _bent,
    "silu_clipped": lambda y, beta, factor, low, high: _silu(_clamp(y, low, high), beta, factor),
    "gelu_clipped": lambda y, inner, factor, low, high: _gelu(_clamp(y, low, high), inner, factor),
    "softplus": _softplus,
    "exp": lambda y, rate, factor: arb(factor) * (arb(rate) * y).exp(),
    "square": lambda y, factor: arb(factor) * y * y,
    "linear": lambda y, factor: arb(factor) * y,
}
"""The activations of the table by name, from a ball and the parameters."""


# -- points of evaluation ----------------------------------------------------------------------------------------


def kinks(program: Program) -> list[tuple[float, float]]:
    """Points at which two keys, one of them steep, have equal weights: (place, difference of slopes)."""
    found = set()
    for keys in _over_the_same_keys(program):
        for number, (a, b) in enumerate(keys):
            found |= {((b - d) / (c - a), abs(a - c)) for c, d in keys[:number] if abs(a - c) > 1e6}
    return sorted(found)


def points(program: Program, rng: np.random.Generator, count: int) -> Array:
    """Points of the domain: where weights change, around kinks, far out, next to 0, and special numbers."""
    sign = rng.choice([-1.0, 1.0], count)
    near = [place + rng.standard_normal(count // 8) * 3.0 / steep for place, steep in kinks(program)]
    slopes = [abs(token.slope - head.beta) for head in program.heads for token in head.bias_tokens]
    rise = max([1.0, *(slope for slope in slopes if slope <= 1e6)])
    wide = rng.uniform(-20.0, 20.0, count)
    y = np.concatenate([wide, wide / rise, sign * 10.0 ** rng.uniform(-320.0, 308.0, count), *near])
    y = np.concatenate([y, [0.0, -0.0, 5e-324, -1e-310, 3.4028234e38, -1e300, 1.7e308, program.domain]])
    return np.asarray(y[np.isfinite(y) & (np.abs(y) <= program.domain)])


def ball_points(program: Program, rng: np.random.Generator, count: int) -> list[arb]:
    """Numbers for exact evaluation: some of `points`, and numbers between floats around each kink."""
    y = [arb(float(value)) for value in points(program, rng, count) if abs(value) < 1e30]
    for place, steep in kinks(program):
        y += [
            arb(place) + arb(side * x) / arb(steep) for side in (-1, 1) for x in (0.3, 0.8, 1.278, 2.0, 5.0, 20.0, 60.0)
        ]
    return [value for value in y if abs(value) <= program.domain]
