"""Three arithmetics in which an expression is evaluated on a whole cell [low, high] of pre-activations at once.

- `Taylor`: series around the centre of a cell and around the whole cell, in ball arithmetic, for smooth pieces.
- `Intervals`: two ends. What is positive stays so, however wide, while a ball of 100 % width has no inverse.
- `Algebra`: quotients of polynomials over the rationals in y and E = exp(c y). Since y and exp(c y) are algebraically
  independent, two functions are equal on a piece if and only if they are the same element there.

Everything is rigorous: a value that cannot be enclosed raises `Undecided`, never returns a guess.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from flint import Ordering, arb, arb_series, fmpq, fmpq_mpoly_ctx

from rewriter.proof.certificate.expressions import Expression, Line

V = TypeVar("V")


class Undecided(Exception):  # noqa: N818 - not an error: a smaller cell may be decided
    """An arithmetic cannot enclose a value on this cell."""


class NumberSystem(Generic[V]):
    """The operations that `evaluate` needs, with defaults for an arithmetic that knows no better."""

    @abstractmethod
    def line(self, line: Line) -> V:
        """The function a y + b: a constant, y itself, or a line, which may be enclosed better than its parts."""

    @abstractmethod
    def div(self, a: V, b: V) -> V:
        """Raises Undecided where b may be 0."""

    @abstractmethod
    def function(self, name: str, a: V) -> V:
        """A function of a, by name."""

    def pi(self) -> V:
        raise Undecided

    def add(self, a: V, b: V) -> V:
        return a + b  # type: ignore[operator, no-any-return]

    def mul(self, a: V, b: V) -> V:
        return a * b  # type: ignore[operator, no-any-return]

    def choose(self, x: V, a: V, b: V) -> V:  # noqa: ARG002
        """a where x >= 0, b where x < 0: what both of them are where the cell has both."""
        raise Undecided


def evaluate(parts: Sequence[Expression], arithmetic: NumberSystem[V]) -> dict[Expression, V]:
    """The values of all parts of functions on a piece (`on_piece`), operands first. Raises Undecided."""
    values: dict[Expression, V] = {}
    operations: Mapping[str, Callable[..., V]] = {
        "pi": arithmetic.pi, "+": arithmetic.add, "*": arithmetic.mul, "/": arithmetic.div, "where": arithmetic.choose,
    }  # fmt: skip
    for part in parts:
        if isinstance(part.value, tuple):
            values[part] = arithmetic.line(part.value)
        else:
            operation = operations.get(part.operator, partial(arithmetic.function, part.operator))
            values[part] = operation(*(values[each] for each in part.operands))
    return values


# -- Taylor series --------------------------------------------------------------------------------------------------


class Taylor(NumberSystem[arb_series]):
    """Series in y - centre, of as many terms as flint's context says; around a ball, each encloses all its numbers."""

    def __init__(self, centre: arb) -> None:
        self.centre = centre

    def pi(self) -> arb_series:
        return arb_series([arb.pi()])

    def line(self, line: Line) -> arb_series:
        """The function a y + b, enclosed as one: for wide balls, a difference of steep lines is less precise."""
        # Products round radii up, even those with 1.
        start = self.centre if line == (fmpq(1), fmpq(0)) else line[0] * self.centre + line[1]
        return arb_series([start, *([line[0]] if line[0] != 0 else [])])

    def div(self, a: arb_series, b: arb_series) -> arb_series:
        if b[0].contains(0):
            raise Undecided
        return a / b

    def function(self, name: str, a: arb_series) -> arb_series:
        """A function of a; softplus by the sign of a, where exp(a) could be large."""
        if name == "softplus":
            return a + ((-a).exp() + 1).log() if a[0] > 0 else (a.exp() + 1).log()
        return {"exp": a.exp, "erf": a.erf, "sqrt": a.sqrt}[name]()

    def choose(self, x: arb_series, a: arb_series, b: arb_series) -> arb_series:
        if not (x[0] >= 0 or x[0] < 0):
            raise Undecided
        return a if x[0] >= 0 else b


# -- intervals ------------------------------------------------------------------------------------------------------

Interval = tuple[arb, arb]


class Intervals(NumberSystem[Interval]):
    """All numbers between two ends, for the cell [low, high]."""

    def __init__(self, low: fmpq, high: fmpq) -> None:
        self._cell = low, high

    def pi(self) -> Interval:
        return arb.pi().lower(), arb.pi().upper()

    def line(self, line: Line) -> Interval:
        low, high = sorted(line[0] * end + line[1] for end in self._cell)
        return arb(low).lower(), arb(high).upper()

    def add(self, a: Interval, b: Interval) -> Interval:
        return (a[0] + b[0]).lower(), (a[1] + b[1]).upper()

    def mul(self, a: Interval, b: Interval) -> Interval:
        products = [x * y for x in a for y in b]
        return min(each.lower() for each in products), max(each.upper() for each in products)

    def div(self, a: Interval, b: Interval) -> Interval:
        if not b[0] > 0 and not b[1] < 0:
            raise Undecided
        return self.mul(a, ((1 / b[1]).lower(), (1 / b[0]).upper()))

    def function(self, name: str, a: Interval) -> Interval:
        """A function of a: all of them rise."""
        rising = {"exp": arb.exp, "erf": arb.erf, "sqrt": arb.sqrt, "softplus": _softplus}[name]
        low, high = rising(a[0]).lower(), rising(a[1]).upper()
        if not low.is_finite() or not high.is_finite():
            raise Undecided
        return low, high

    def choose(self, x: Interval, a: Interval, b: Interval) -> Interval:
        if x[0] >= 0 or x[1] < 0:
            return a if x[0] >= 0 else b
        return min(a[0], b[0]), max(a[1], b[1])


def _softplus(x: arb) -> arb:
    return x + (-x).exp().log1p() if x > 0 else x.exp().log1p()


# -- algebra --------------------------------------------------------------------------------------------------------

_MOST_DEGREE, _MOST_POWER = 200, 40


class Quotient(NamedTuple):
    """numerator / denominator, or the logarithm of one that is positive."""

    numerator: Any
    denominator: Any
    logarithm: bool = False


class Algebra(NumberSystem[Quotient]):
    """Quotients of polynomials over the rationals in y and E = exp(rate y), without poles on the cell [low, high]."""

    def __init__(self, rate: fmpq | None, low: fmpq, high: fmpq) -> None:
        self._rate, self._low, self._high = rate, low, high
        ring = fmpq_mpoly_ctx.get(("y", "E"), Ordering.lex)
        self._constant = ring.constant
        self._y, self._e = ring.gens()
        self._one = ring.constant(1)

    def line(self, line: Line) -> Quotient:
        return Quotient(self._constant(line[0]) * self._y + self._constant(line[1]), self._one)

    def add(self, a: Quotient, b: Quotient) -> Quotient:
        (n, d), (m, e) = self._parts(a), self._parts(b)
        return Quotient(n * e + m * d, d * e)

    def mul(self, a: Quotient, b: Quotient) -> Quotient:
        """Of a logarithm, by an integer."""
        if b.logarithm:
            a, b = b, a
        m, e = self._parts(b)
        n, d = a.numerator, a.denominator
        if a.logarithm:
            times = m.leading_coefficient() if m.is_constant() and e == 1 else fmpq(0)
            if times.q != 1 or not 0 < abs(times) <= _MOST_POWER:
                raise Undecided
            power = abs(int(times.p))
            n, d = (n, d) if times > 0 else (d, n)
            return Quotient(n**power, d**power, logarithm=True)
        if n.total_degree() + m.total_degree() > _MOST_DEGREE:
            raise Undecided
        return Quotient(n * m, d * e)

    def div(self, a: Quotient, b: Quotient) -> Quotient:
        """Raises Undecided unless all terms of b have one sign on the cell, and one of them is nowhere 0."""
        (n, d), (m, e) = self._parts(a), self._parts(b)
        sides = {min(self._low, 0), max(self._high, 0)} - {0} or {0}
        values = [term * side**power for (power, _), term in m.terms() for side in sides]
        away = self._low > 0 or self._high < 0
        nowhere = any(power == 0 or away for (power, _), _ in m.terms())
        if not nowhere or len({value > 0 for value in values if value != 0}) != 1:
            raise Undecided
        return Quotient(n * e, d * m)

    def function(self, name: str, a: Quotient) -> Quotient:
        """exp and softplus of multiples of y, and their compositions that stay in the field."""
        if name == "softplus":
            inner = self.function("exp", a)
            return Quotient(inner.numerator + inner.denominator, inner.denominator, logarithm=True)
        if name == "exp" and a.logarithm:
            return Quotient(a.numerator, a.denominator)
        terms = dict(a.numerator.terms())
        slope = terms.pop((1, 0), fmpq(0))
        if name != "exp" or terms or a.denominator != self._one:
            raise Undecided
        power = slope / self._rate if self._rate else fmpq(0)
        if power.q != 1 or abs(power) > _MOST_POWER:
            raise Undecided
        exponent = int(power.p)
        return Quotient(self._e**exponent, self._one) if exponent >= 0 else Quotient(self._one, self._e**-exponent)

    def equal(self, a: Quotient, b: Quotient) -> bool:
        if a.logarithm != b.logarithm:
            return False
        return bool(a.numerator * b.denominator - b.numerator * a.denominator == 0)

    @staticmethod
    def _parts(a: Quotient) -> tuple[Any, Any]:
        if a.logarithm:
            raise Undecided
        return a.numerator, a.denominator
