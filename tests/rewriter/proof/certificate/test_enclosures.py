"""Cells: what is said of all y between two numbers holds at numbers between them, by mpmath with 60 digits."""

from contextlib import suppress
from random import Random

import mpmath
import pytest
from flint import ctx, fmpq

from rewriter.proof.certificate.bounds import Undecided, _Search, bound
from rewriter.proof.certificate.expressions import (
    HALF,
    ONE,
    VARIABLE,
    ZERO,
    Expression,
    Kink,
    add,
    apply,
    constant,
    div,
    mul,
    neg,
    softmax,
    sub,
    where,
)
from tests.rewriter.proof.certificate.evaluated import at, gelu, sigmoid, tanh

CELLS = [
    (fmpq(low), fmpq(high))
    for low, high in ((-3, -2), (0, 1), (-1, 2), (5, 6), (-60, -40), (100, 1000), (-9000, -8000))
] + [(fmpq(-1, 8), fmpq(1, 16)), (fmpq(1, 3), fmpq(2, 5)), (fmpq(-7, 2), fmpq(-27, 8)), (fmpq(30), fmpq(2) ** 90)]


def drawn(rng: Random, depth: int) -> Expression:
    """A random function that is defined everywhere."""
    if not depth or rng.random() < 0.2:
        return rng.choice((VARIABLE, VARIABLE, constant(fmpq(rng.randint(-9, 9), rng.randint(1, 5)))))
    one, two = (drawn(rng, depth - 1) for _ in range(2))
    line = add(mul(constant(fmpq(rng.randint(-9, 9), 4)), VARIABLE), constant(rng.randint(-2, 2)))
    return rng.choice(
        (
            lambda: add(one, two),
            lambda: sub(one, two),
            lambda: mul(one, two),
            lambda: neg(one),
            lambda: apply(rng.choice(("erf", "softplus")), one),
            lambda: rng.choice((sigmoid, tanh, gelu))(one),
            lambda: apply("exp", line),
            lambda: apply("sqrt", add(ONE, mul(one, one))),
            lambda: div(one, add(ONE, mul(two, two))),
            lambda: where(rng.choice((line, sub(one, two))), one, two),
            lambda: softmax([line, ZERO, neg(line), add(line, line)])[rng.randint(0, 3)],
            lambda: softmax([mul(constant(300), line), ZERO, mul(constant(299), line)])[rng.randint(0, 2)],
        )
    )()


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", range(80))
def test_what_holds_on_a_cell_holds_at_its_numbers(seed: int) -> None:
    rng = Random(seed)  # noqa: S311 - not for secrets
    a = drawn(rng, 4)
    b = rng.choice((a, drawn(rng, 3), add(a, mul(VARIABLE, drawn(rng, 2))), add(a, constant(fmpq(1, 10**6)))))
    with mpmath.workdps(60):
        for low, high in CELLS:
            search = _Search(a, b, fmpq(2) ** 100)
            try:
                piece = search.piece(low, high)
            except Kink:
                continue
            numbers = [y for y in (low + (high - low) * fmpq(k, 8) for k in range(9)) if y not in search.roots]
            gaps = [abs(at(b, y) - at(a, y)) for y in numbers]
            over = max(gap / max(mpmath.mpf(1), abs(at(a, y))) for gap, y in zip(gaps, numbers, strict=True))
            slack = 1 + mpmath.mpf(10) ** -30
            for most in (search.by_series, search.by_lines):
                with suppress(Undecided), ctx.workprec(200):
                    assert over <= most(piece, low, high) * slack, (low, high)
            if search.at is not None and search.lower < float("inf"):
                scale = max(mpmath.mpf(1), abs(at(a, search.at)))
                assert search.lower <= abs(at(b, search.at) - at(a, search.at)) / scale * (1 + 1e-12)
            assert not search.equal(piece) or max(gaps) <= mpmath.mpf(10) ** -40 * (1 + abs(at(a, high)))


EXP, SOFTPLUS = apply("exp", VARIABLE), apply("softplus", VARIABLE)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (EXP, ONE),
        (div(add(VARIABLE, ONE), constant(2)), add(mul(HALF, VARIABLE), constant(2))),
        (SOFTPLUS, VARIABLE),
        (SOFTPLUS, EXP),
        (SOFTPLUS, add(ONE, EXP)),
        (add(ONE, SOFTPLUS), SOFTPLUS),
        (add(ONE, SOFTPLUS), add(constant(2), EXP)),
        (neg(SOFTPLUS), apply("softplus", neg(VARIABLE))),
        (mul(VARIABLE, SOFTPLUS), SOFTPLUS),
        (mul(VARIABLE, SOFTPLUS), mul(mul(VARIABLE, VARIABLE), SOFTPLUS)),
        (mul(HALF, SOFTPLUS), SOFTPLUS),
        (mul(VARIABLE, sigmoid(VARIABLE)), mul(VARIABLE, sigmoid(mul(constant(2), VARIABLE)))),
        (apply("exp", mul(constant(3), VARIABLE)), mul(apply("exp", mul(constant(2), VARIABLE)), mul(EXP, EXP))),
        (apply("exp", mul(constant(-2), VARIABLE)), mul(HALF, apply("exp", neg(VARIABLE)))),
        (div(ONE, add(VARIABLE, constant(2))), HALF),
    ],
)
def test_algebra_equates_no_two_functions(a: Expression, b: Expression) -> None:
    search = _Search(a, b, fmpq(100))
    assert not search.equal(search.piece(fmpq(1), fmpq(2)))
    assert not bound(a, b, limit=1e-3, top=fmpq(100)).holds
