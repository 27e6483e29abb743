"""Bounds over all reals: what is proved is true, and wrong functions are refused, however narrow the place."""

import math
import re
import sys
from collections.abc import Iterator

import mpmath
import numpy as np
import pytest
from flint import arb, ctx, fmpq
from hypothesis import given, settings
from hypothesis import strategies as st

from rewriter.proof.certificate import bounds
from rewriter.proof.certificate.bounds import NONE, Bound, Lines, Taylor, Undecided, _Search, bound, evaluate
from rewriter.proof.certificate.expressions import (
    HALF,
    ONE,
    VARIABLE,
    ZERO,
    Expression,
    add,
    apply,
    constant,
    div,
    maximum,
    minimum,
    mul,
    neg,
    on_piece,
    ordered,
    softmax,
    sub,
    where,
)
from tests.rewriter.proof.certificate.evaluated import at, gelu, sigmoid, tanh

Y = VARIABLE
THE_VARIABLE = fmpq(1), fmpq(0)
SINGLE, HALF_TYPE, DOUBLE = fmpq(2) ** 128, fmpq(65504), fmpq(2) ** 1024
SIGMOID = sigmoid(Y)
SILU, TANH = mul(Y, SIGMOID), tanh(Y)
RELU, PAST, OFF = maximum(Y, ZERO), sub(Y, constant(3)), sub(Y, constant(1.2345))
HEADS = div(Y, add(ONE, apply("exp", neg(Y))))
STEEP = mul(Y, sigmoid(mul(constant(2.0**40), Y)))


def number(value: float | str) -> Expression:
    return constant(fmpq(*value.as_integer_ratio()) if isinstance(value, float) else fmpq(value))


def of(a: Expression, b: Expression, limit: float = 1e-7, top: fmpq = SINGLE, domain: float | None = None) -> Bound:
    return bound(a, b, limit=limit, top=top, domain=domain)


def inside(low: float, high: float, then: Expression, otherwise: Expression) -> Expression:
    """`then` on [low, high], by nested conditions."""
    return where(sub(Y, constant(low)), where(sub(constant(high), Y), then, otherwise), otherwise)


EXACT: dict[str, tuple[Expression, Expression]] = {
    "SiLU as one head": (SILU, HEADS),
    "SiLU by tanh": (SILU, mul(mul(HALF, Y), add(ONE, tanh(mul(HALF, Y))))),
    "QuickGELU": (
        mul(Y, sigmoid(mul(constant(1.702), Y))), div(Y, add(ONE, apply("exp", mul(constant(-1.702), Y))))
    ),
    "tanh as a sigmoid": (TANH, sub(mul(constant(2), sigmoid(mul(constant(2), Y))), ONE)),
    "tanh of softplus": (
        mul(Y, tanh(apply("softplus", Y))),
        mul(Y, sub(ONE, div(constant(2), add(ONE, mul(add(ONE, apply("exp", Y)), add(ONE, apply("exp", Y))))))),
    ),
    "ReLU with its sides changed": (RELU, where(neg(Y), ZERO, Y)),
    "a clip from above first": (minimum(RELU, constant(6)), maximum(minimum(Y, constant(6)), ZERO)),
    "a kink that is not at 0": (
        maximum(PAST, ZERO), mul(HALF, add(PAST, where(PAST, PAST, neg(PAST))))
    ),
    "a power of softplus": (
        apply("exp", mul(constant(2), apply("softplus", Y))),
        mul(add(ONE, apply("exp", Y)), add(ONE, apply("exp", Y))),
    ),
    "a product in another order": (mul(mul(Y, Y), SIGMOID), mul(Y, mul(SIGMOID, Y))),
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("top", [SINGLE, HALF_TYPE, DOUBLE], ids=["float32", "float16", "float64"])
def test_equal_functions_are_proved_equal(name: str, top: fmpq) -> None:
    found = of(*EXACT[name], limit=0.0, top=top)
    assert (found.holds, found.exact, found.bound, found.domain) == (True, True, 0.0, None)


WRONG: dict[str, tuple[Expression, Expression]] = {
    "a coefficient": (SILU, div(Y, add(ONE, apply("exp", mul(number("-100001/100000"), Y))))),
    "a slope": (SILU, mul(number("1000001/1000000"), HEADS)),
    "an interval": (SILU, inside(1.2345, 1.2346, mul(number("1001/1000"), HEADS), HEADS)),
    "an interval far out": (SILU, inside(-31337.5, -31337.4999, constant(-0.25), HEADS)),
    "an interval by a square": (
        SILU, where(sub(number("1/100000000"), mul(OFF, OFF)), add(HEADS, number("1/1000")), HEADS)
    ),
    "an interval of lines by a square": (
        RELU, where(sub(number("1/100000000"), mul(OFF, OFF)), add(RELU, number("1/1000")), RELU)
    ),
    "a point": (RELU, inside(1.0, 1.0, constant(1.01), RELU)),
    "the point of a kink": (RELU, where(Y, where(neg(Y), ONE, Y), ZERO)),
    "a clip at 8": (SILU, minimum(SILU, constant(8))),
    "beyond 30": (SILU, where(sub(Y, constant(30)), add(HEADS, ONE), HEADS)),
    "beyond 300": (SILU, where(sub(Y, constant(300)), mul(HEADS, number("999/1000")), HEADS)),
    "below -300": (SILU, where(add(Y, constant(300)), HEADS, number("-1/1000"))),
    "beyond 1e30": (RELU, minimum(RELU, constant(1e30))),
    "the largest floats": (RELU, minimum(RELU, constant(3e38))),
    "the other GELU": (gelu(Y), gelu(Y, approximate=True)),
    "a side": (RELU, minimum(Y, ZERO)),
    "below a kink of a falling line": (Y, where(sub(constant(3), Y), add(Y, ONE), Y)),
    "a sign": (TANH, neg(TANH)),
    "a root of negative numbers": (apply("sqrt", Y), add(apply("sqrt", Y), number("1/1000000000000"))),
    "a shift": (TANH, tanh(add(Y, number("1/1000000")))),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_functions_are_refused(name: str) -> None:
    found = of(*WRONG[name])
    assert not found.holds
    assert found.bound > found.limit
    assert found.reason


@pytest.mark.parametrize(
    ("name", "at"), [("a coefficient", 2.0), ("beyond 30", 30.0), ("a sign", 1.0), ("the other GELU", 2.0)]
)
def test_a_refusal_has_a_witness(name: str, at: float) -> None:
    found = of(*WRONG[name])
    assert found.at is not None
    assert found.at_least > found.limit
    assert f"differs by {found.at_least:.3g} at y = {found.at:.9g}, more than 1e-07" == found.reason
    assert abs(found.at) >= at / 16


def test_a_type_ends_where_its_floats_do() -> None:
    capped = minimum(RELU, constant(70000))
    assert of(RELU, capped, top=HALF_TYPE).exact
    assert not of(RELU, capped).holds
    assert of(RELU, minimum(RELU, constant(1e300)), top=DOUBLE).at == sys.float_info.max
    assert of(neg(VARIABLE), minimum(neg(VARIABLE), constant(1e300)), top=DOUBLE).at == -sys.float_info.max


def test_the_last_number_of_a_type_is_enclosed() -> None:
    """Of GELU by tanh, an exponential of 2^3073."""
    search = _Search(ZERO, gelu(Y, approximate=True), DOUBLE)
    assert search._measured(search.piece(-DOUBLE, -DOUBLE), -DOUBLE) < 1e-9


def test_a_domain_is_what_was_claimed() -> None:
    capped = minimum(RELU, constant(508))
    assert of(RELU, capped, domain=508.0).holds
    assert not of(RELU, capped, domain=512.0).holds
    everywhere = of(RELU, capped)
    assert (everywhere.holds, everywhere.domain) == (False, None)


@pytest.mark.parametrize("pole", [div(mul(SILU, each), each) for each in (sub(Y, ONE), sub(SIGMOID, HALF), mul(Y, Y))])
def test_a_pole_is_refused(pole: Expression) -> None:
    found = of(SILU, pole)
    assert not found.holds
    assert "not defined at y = " in found.reason or "no bound" in found.reason


def test_conditions_that_are_no_lines() -> None:
    for original, off in ((ZERO, 0.0), (ONE, 1.0)):
        search = _Search(original, where(sub(mul(Y, Y), number("1/3")), ONE, ZERO), fmpq(1))
        piece = search.piece(fmpq(-1), fmpq(1))
        assert search.by_lines(piece, fmpq(0), fmpq(1)) >= 1
        assert search.by_lines(piece, fmpq(0), fmpq(1, 2)) == pytest.approx(off)
    for ends in ((arb(-1), arb(1)), (arb(-1), arb(0)), (arb(0), arb(1))):
        with pytest.raises(Undecided):
            Lines(fmpq(-1), fmpq(1)).div((NONE, (arb(1), arb(1))), (NONE, ends))
    assert of(minimum(SILU, ONE), minimum(HEADS, ONE)).bound <= 1e-14


def test_the_limit_of_a_steep_head() -> None:
    found = of(RELU, STEEP)
    # The largest y sigmoid(-2^40 y): 0.278464543 / 2^40.
    assert found.at_least <= 0.2784645428 / 2**40 <= found.bound <= 1.2 * found.at_least


ELU = where(Y, Y, sub(apply("exp", Y), ONE))


@pytest.mark.sample(1)
@pytest.mark.parametrize(("wrong", "holds"), [(0.0, True), (1e-8, False)])
def test_softmax_weights_that_change_at_once(wrong: float, holds: bool) -> None:
    """ELU by three keys: itself, one of value -1, and e^36 at an offset of -36; logits 2^40 y, 0 and y - 36."""
    steep, off = mul(constant(2.0**40), Y), sub(Y, constant(36))
    own, low, large = softmax([steep, ZERO, off])
    value = mul(constant(round(math.exp(36))), mul(large, constant(1 + wrong)))
    heads = add(mul(own, Y), sub(value, low))
    found = of(ELU, heads, 2e-9)
    assert found.holds == holds, found
    assert not holds or found.bound < 2e-9


@pytest.mark.parametrize(("low", "high", "equal"), [
    ("-1", "0", False), ("0", "1", False), ("-1", "1/2", False), ("-1/2", "1", False),
    ("1/2", "1", True), ("-1", "-1/2", True),
])  # fmt: skip
def test_algebra_divides_only_by_what_is_nowhere_zero(low: str, high: str, equal: bool) -> None:
    for divisor in (Y, mul(Y, Y)):
        search = _Search(ONE, div(divisor, divisor), SINGLE)
        assert search.equal(search.piece(fmpq(low), fmpq(high))) is equal


def test_a_search_that_gives_up_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MOST_CELLS", 20)
    found = of(*WRONG["the other GELU"], limit=4.8e-4)
    assert not found.holds
    assert found.bound > found.limit > found.at_least
    assert re.match(r"no bound below \S+ was found on \[", found.reason)
    assert found.cells == 22
    assert of(SILU, div(mul(SILU, OFF), OFF)).bound == math.inf


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "pair", "domain"),
    [
        ("steep", (RELU, STEEP), None),
        ("other GELU", (gelu(Y), gelu(Y, approximate=True)), None),
        ("slope", (SILU, mul(number("100001/100000"), SILU)), 100.0),
        ("truncated", (apply("exp", Y), add(ONE, add(Y, mul(HALF, mul(Y, Y))))), 0.01),
    ],
)
def test_a_limit_that_is_too_small_by_two_percent(
    name: str, pair: tuple[Expression, Expression], domain: float | None
) -> None:
    loose = of(*pair, limit=1.0, domain=domain)
    assert loose.holds, name
    assert 0 < loose.bound <= 1.2 * loose.at_least
    assert not of(*pair, limit=loose.at_least * 0.98, domain=domain).holds
    assert of(*pair, limit=loose.bound, domain=domain).holds


def test_a_process_proves_each_claim_once() -> None:
    assert bound(RELU, STEEP, limit=1e-7, top=SINGLE) is bound(RELU, STEEP, limit=1e-7, top=SINGLE)
    assert bound(SILU, SILU, limit=0.0, top=SINGLE).exact


SMOOTH = (SILU, TANH, gelu(Y), gelu(Y, approximate=True))


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from(SMOOTH),
    st.sampled_from(["factor", "inside", "interval", "added"]),
    st.floats(-8, 8).map(lambda y: round(y, 3)),
    st.sampled_from([1e-5, -1e-5, 3e-4, 0.1]),
)
def test_functions_that_differ_a_little_are_refused(f: Expression, kind: str, at: float, by: float) -> None:
    changed = {
        "factor": mul(constant(1 + by), f),
        "inside": add(f, mul(constant(by), apply("exp", neg(mul(sub(Y, constant(at)), sub(Y, constant(at))))))),
        "interval": inside(at, at + 1e-4, add(f, constant(by)), f),
        "added": add(f, constant(by)),
    }[kind]
    assert not of(f, changed).holds
    assert of(f, changed, limit=0.5).holds


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([SIGMOID, SILU, TANH]), st.integers(-9, 9).filter(bool), st.integers(1, 9), st.integers(-5, 5))
def test_functions_written_in_another_way_are_equal(f: Expression, p: int, q: int, shift: int) -> None:
    factor, offset = constant(fmpq(p, q)), constant(shift)
    one = add(mul(factor, mul(f, f)), mul(offset, f))
    other = mul(f, div(add(mul(f, constant(p)), mul(offset, constant(q))), constant(q)))
    found = of(one, other, limit=0.0)
    assert found.exact


def points(count: int, end: float) -> list[float]:
    """Numbers of every size up to an end."""
    rng = np.random.default_rng(3)
    small = [float(rng.uniform(-12, 12)) for _ in range(count // 2)]
    return small + [
        int(rng.choice((-1, 1))) * 2.0 ** float(rng.uniform(-40, math.log2(end))) for _ in range(count - len(small))
    ]


PAIRS = {
    "GELU": (gelu(Y), gelu(Y, approximate=True)),
    "ReLU": (RELU, STEEP),
    "SiLU": (SILU, mul(Y, sigmoid(mul(number("1001/1000"), Y)))),
}


@pytest.mark.sample(0)
@pytest.mark.parametrize("count", [2_000, 20_000])
@pytest.mark.parametrize("name", PAIRS)
def test_no_point_is_above_a_bound(name: str, count: int) -> None:
    a, b = PAIRS[name]
    found = of(a, b, limit=1.0)
    assert found.holds
    with mpmath.workdps(60):
        worst = max(abs(at(b, y) - at(a, y)) / max(1, abs(at(a, y))) for y in map(mpmath.mpf, points(count, 2.0**127)))
    assert 0.98 * found.bound < worst <= found.bound
    assert found.at_least <= found.bound <= 1.2 * found.at_least


@pytest.fixture
def precise() -> Iterator[None]:
    """The ball arithmetic of these tests has 400 bits."""
    before = ctx.prec, ctx.cap
    ctx.prec, ctx.cap = 400, 4
    yield
    ctx.prec, ctx.cap = before


@pytest.mark.usefixtures("precise")
@pytest.mark.parametrize("sign", [-1, 1])
def test_a_tanh_of_a_ball_is_bounded_far_out(sign: int) -> None:
    (far,), _ = on_piece(TANH, low=fmpq(sign * 900), high=fmpq(sign * 900))
    found = evaluate(ordered(far), Taylor(arb(sign * 900, 0.5)))[far]
    assert abs(found[0] - sign) < arb("1e-30")
    assert abs(found[1]) < arb("1e-30")


@pytest.mark.usefixtures("precise")
@pytest.mark.parametrize("lines", [[(1, 0)], [(1, 5), (1, 4)], [(1, 4), (1, 5)], [(1, 0), (0.5, 3)]])
def test_a_weight_of_a_wide_ball_encloses_both_ends(lines: list[tuple[float, float]]) -> None:
    logits = [add(mul(constant(slope), Y), constant(offset)) for slope, offset in lines]
    (weight,), _ = on_piece(mul(constant(fmpq(2) ** 2000), softmax([ZERO, *logits])[0]), low=fmpq(900), high=fmpq(900))
    found = evaluate(ordered(weight), Taylor(arb(900, 40)))[weight][0]
    for y in (860, 900):
        assert found.contains(arb(2) ** 2000 / (1 + sum(arb(slope * y + offset).exp() for slope, offset in lines)))


def test_intervals_are_narrow_where_balls_are_wide() -> None:
    arithmetic = Lines(fmpq(1), fmpq(2) ** 100)
    y = arithmetic.line(THE_VARIABLE)
    found = arithmetic.ends(arithmetic.div((NONE, (arb(1), arb(1))), y))  # a ball would reach below 0
    assert 0 < found[0] <= 2.0**-100 < 1 <= found[1]
    low, high = arithmetic.ends(arithmetic.sub(arithmetic.function("softplus", y), y))
    assert 0 <= low < 1e-100 < 0.31326 < high < 0.31327  # log(1 + 1/e)


def test_what_holds_both_of_two_intervals() -> None:
    wide, narrow, arithmetic = (NONE, (arb(-2), arb(3))), (NONE, (arb(0), arb(1))), Lines(fmpq(0), fmpq(1))
    assert arithmetic.choose(wide, wide, narrow) == arithmetic.choose(wide, narrow, wide) == wide
