"""Programs for float64: errors proved in ball arithmetic on cells over all reals, and reached by float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from passes.programs.fitted import cheapest, cheapest_gate, precise_programs
from passes.programs.head import Head
from passes.programs.program import Program
from tests.conftest import slow
from tests.passes.programs.balls import arb, arb_series, errors, precision, program_at, upper

EACH = pytest.mark.parametrize(
    ("activation", "program"), precise_programs(), ids=[program.name for _, program in precise_programs()]
)
_TERMS, _SHARE, _FAR = 12, 1.0 / 32.0, 100.0
_DISCS = (4.0, 2.0, 1.0, 0.5, 0.25, 0.125, 0.0625)


def gelu(y: arb_series) -> arb_series:
    return y * (-y / arb(2).sqrt()).erfc() / 2


def gelu_tanh(y: arb_series) -> arb_series:
    logit = (8 / arb.pi()).sqrt() * (y + arb("0.044715") * y * y * y)
    if float(y[0].mid()) > 0.0:
        return y / (1 + (-logit).exp())
    share = logit.exp()
    return y * share / (1 + share)


FUNCTIONS: dict[str, Callable[[arb_series], arb_series]] = {"gelu": gelu, "gelu_tanh": gelu_tanh}


def largest_error(head: Head, f: Callable[[arb_series], arb_series], start: float, stop: float) -> float:
    """A bound on |head - f| over [start, stop]: Taylor polynomials on cells, in balls.

    The head's remainder is Cauchy's. On the disc |y - m| <= R, with p_j the weights at m, a_j the slopes less their
    mean, and E = sum p_j e^(|a_j| R) < 2, the denominator relative to that at m is at least 2 - E and the head at most
    sum p_j e^(|a_j| R) max |v_j| / (2 - E). That of f is its next coefficient over the cell.
    """
    slopes = head.keys.slopes[:, None]
    place, bound = start, 0.0
    while place < stop:
        for disc in _DISCS:
            radius = disc * _SHARE
            middle = place + radius
            p = head.keys.weights(np.array([middle]))
            apart = np.abs(slopes - np.sum(p * slopes))
            grown = p * np.exp(apart * disc)
            if np.sum(grown) < 1.5:
                break
        else:
            raise AssertionError(f"no disc around {middle} is small enough")
        values = np.abs([abs(middle) + disc, *(token.value for token in head.bias_tokens)])[:, None]
        most = 1.01 * float(np.sum(grown * values) / (2.0 - np.sum(grown)))
        rest = most * _SHARE**_TERMS / (1.0 - _SHARE)
        rest += upper(f(arb_series([arb(middle, radius), 1]))[_TERMS]) * radius**_TERMS
        y = arb_series([arb(middle), 1])
        weights = [(y * arb(token.slope) + arb(token.offset)).exp() for token in head.bias_tokens]
        product = sum((weight * arb(token.value) for weight, token in zip(weights, head.bias_tokens, strict=True)), y)
        near = product / sum(weights, 0 * y + 1) - f(y)
        bound = max(bound, rest + upper(sum((abs(near[k]) * arb(radius) ** k for k in range(_TERMS)), arb(0))))
        place += 2.0 * radius
    return bound


def tail(head: Head) -> float:
    """A bound beyond +-100: the token itself on the right, on the left the key of the smallest slope, of value 0.

    There every f is within 1e-300 of y or 0, and x e^(-s x) decreases for s x > 1.
    """
    far, last = arb(_FAR), min(head.bias_tokens, key=lambda token: token.slope)
    right, left = arb(0), (far * arb(last.slope) - arb(last.offset)).exp() * far
    for token in head.bias_tokens:
        right += (far * arb(token.slope) + arb(token.offset)).exp() * (far + abs(arb(token.value)))
        steeper = arb(last.slope) - arb(token.slope)
        left += (far * steeper + arb(token.offset) - arb(last.offset)).exp() * abs(arb(token.value))
    return max(upper(right), upper(left))


def proved(activation: str, program: Program, start: float = -_FAR, stop: float = _FAR) -> float:
    (head,) = program.heads
    assert (head.beta, head.gamma, head.c, head.d) == (0.0, 0.0, 1.0, 0.0)
    with precision(200):
        from flint import ctx

        ctx.cap = _TERMS + 1
        return max(largest_error(head, FUNCTIONS[activation], start, stop), tail(head))


@slow
@EACH
def test_certificate(activation: str, program: Program) -> None:
    bound = proved(activation, program)
    assert bound <= program.max_error <= 1.02 * bound


@EACH
def test_certificate_holds_where_the_keys_share_the_weight(activation: str, program: Program) -> None:
    bound = proved(activation, program, -1.0, 1.0)
    assert 0.05 * program.max_error <= bound <= program.max_error <= 1e-12


@EACH
@pytest.mark.parametrize("which", ["slope", "offset", "value"])
def test_a_wrong_coefficient_is_noticed(activation: str, program: Program, which: str) -> None:
    (head,) = program.heads
    heaviest = int(np.argmax(head.keys.weights(np.array([-0.5]))[1:, 0]))
    tokens = list(head.bias_tokens)
    tokens[heaviest] = replace(tokens[heaviest], **{which: getattr(tokens[heaviest], which) * (1.0 + 1e-9)})
    wrong = replace(program, heads=(replace(head, bias_tokens=tuple(tokens)),))
    assert proved(activation, wrong, -1.0, 0.5) > 10.0 * program.max_error


@EACH
def test_float64_reaches_it(activation: str, program: Program) -> None:
    """In ball arithmetic float64's rounding is seen alone; with the certificate it stays below 1e-12."""
    rng = np.random.default_rng(0)
    y = np.concatenate([rng.normal(0.0, 3.0, 150), rng.uniform(-40.0, 40.0, 50), [0.0, 1e-300, 1e6, -1e6]])
    with precision(300):
        exact = [program_at(program, arb(float(value)), arb(float(value))) for value in y]
        found = errors(program.evaluate(y), exact)
    rounding = program.float64_rounding(y)
    size = np.maximum(1.0, np.abs(program.evaluate(y)))
    assert np.all(found <= rounding)
    assert np.max(found / size) <= 1e-13
    assert np.max(rounding / size) + program.max_error <= 1e-12


@EACH
def test_it_is_what_float64_models_get(activation: str, program: Program) -> None:
    assert cheapest(activation, 1e-16) == program
    assert cheapest_gate(activation, 1e-16) == program
    assert cheapest(activation, 1e-7).bias_tokens <= 10
    assert all(token.slope < 0.0 for token in program.heads[0].bias_tokens)
