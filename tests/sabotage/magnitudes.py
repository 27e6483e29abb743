"""Heads that are wrong for some pre-activations."""

from __future__ import annotations

from tests.sabotage.edits import applied, heads
from tests.sabotage.sabotages import Expect, Sabotage
from tests.sabotage.subjects import on

_WRONG = "out = Where(wrong, bad, own)"


def where(condition: str, bad: str = "Mul(own, $1.001)") -> str:
    """A text that is wrong where a condition on `y`, or its magnitude `a`, holds."""
    return f"a = Abs(y) wrong = {condition} bad = {bad} {_WRONG}"


def between(low: str, high: str) -> str:
    """A text that is off by a thousandth in a band of pre-activations."""
    return (
        f"above = GreaterOrEqual(y, ${low}) below = LessOrEqual(y, ${high}) wrong = And(above, below) "
        f"bad = Add(own, $0.001) {_WRONG}"
    )


_NEGATIVE_ZERO = (
    "zero = Equal(y, $0.0) one = Div($1.0, y) minus = Less(one, $0.0) wrong = And(zero, minus) "
    f"bad = Add(own, $0.001) {_WRONG}"
)
_DENORMAL = (
    "a = Abs(y) some = Greater(a, $0.0) small = Less(a, $1e-38) wrong = And(some, small) "
    f"bad = Add(own, $0.001) {_WRONG}"
)
_HALF = "half = Cast<to = 10>(own) out = CastLike(half, own)"
_PAIR = ("silu-decoder", "gelu-vision")
_OTHER = ("relu-decoder", "gelu-encoder")

VALUES = (
    Sabotage("negated", applied(heads("out = Neg(own)")), on("relu-decoder", "gated-decoder", "silu-decoder")),
    Sabotage("magnitude instead of value", applied(heads("out = Abs(own)")), on(*_PAIR)),
    Sabotage("zero", applied(heads("out = Mul(own, $0.0)")), on("conformer-encoder", "relu-decoder")),
    Sabotage("the pre-activation itself", applied(heads("z = Mul(own, $0.0) out = Add(z, y)")), on(*_PAIR)),
    *(
        Sabotage(f"times 1 + {by}", applied(heads(f"out = Mul(own, ${1 + float(by)!r})")), on(*models))
        for by, models in (
            ("1e-3", ("relu-decoder", "gelu-vision")),
            ("1e-4", ("silu-decoder", "gated-decoder")),
            ("1e-5", ("relu-decoder", "gelu-encoder")),
            ("1e-6", ("silu-decoder", "relu-decoder")),
        )
    ),
    Sabotage("a constant 1e-4 added", applied(heads("out = Add(own, $0.0001)")), on(*_OTHER)),
    Sabotage(
        "a constant 1e-5 added, in the second block", applied(heads("out = Add(own, $0.00001)", 1)), on(*_PAIR), block=1
    ),
    Sabotage("off by 1e-3 beyond |y| = 30", applied(heads(where("Greater(a, $30.0)"))), on(*_PAIR)),
    Sabotage("1 instead of 0 below y = -30", applied(heads(where("Less(y, $-30.0)", "Add(own, $1.0)"))), on(*_OTHER)),
    Sabotage("off by 1e-3 beyond |y| = 1e5", applied(heads(where("Greater(a, $1e5)"))), on(*_PAIR)),
    Sabotage(
        "off by 1e-3 between |y| = 2e4 and 1e15",
        applied(
            heads(
                f"a = Abs(y) b = Greater(a, $2e4) c = Less(a, $1e15) wrong = And(b, c) bad = Mul(own, $1.001) {_WRONG}"
            )
        ),
        on(*_OTHER),
    ),
    Sabotage("infinite beyond y = 1e30", applied(heads(where("Greater(y, $1e30)", "Add(own, $inf)"))), on(*_PAIR)),
    Sabotage("off by 1e-3 between y = 1 and 1.001", applied(heads(between("1.0", "1.001"))), on(*_PAIR)),
    Sabotage(
        "off by 1e-3 between y = 0.7 and 0.700001",
        applied(heads(between("0.7", "0.700001"))),
        on(*_PAIR),
        Expect.UNSEEN,
    ),
    Sabotage("off by 1e-3 between y = 0 and 1e-6", applied(heads(between("1e-9", "1e-6"))), on(*_OTHER)),
    Sabotage("1e-3 at negative zero", applied(heads(_NEGATIVE_ZERO)), on(*_PAIR)),
    Sabotage("1e-3 at denormal numbers", applied(heads(_DENORMAL)), on(*_OTHER)),
    Sabotage("NaN at y = 1.5", applied(heads(where("Equal(y, $1.5)", "Add(own, $nan)"))), on(*_PAIR)),
    Sabotage(
        "NaN becomes 0",
        applied(
            heads(
                "wrong = IsNaN(own) bad = Sub(y, y) c = IsNaN(bad) z = Where(c, $0.0, own) out = Where(wrong, z, own)"
            )
        ),
        on(*_PAIR),
    ),
    Sabotage("rounded to float16", applied(heads(_HALF)), on("silu-decoder", "gated-decoder", "gelu-encoder")),
    Sabotage(
        "rounded to a grid of 2^-12",
        applied(heads("s = Mul(own, $4096.0) r = Round(s) out = Div(r, $4096.0)")),
        on(*_PAIR),
    ),
)
