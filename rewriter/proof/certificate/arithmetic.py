"""Three arithmetics in which an expression is evaluated on a whole cell [low, high] of pre-activations at once.

- `Intervals`: polynomials in y whose coefficients are intervals. Their ends stay finite up to the largest float, so
  they cover the tails, and kinks: a difference that has the factor y keeps it.
- `Taylor`: series around the centre of a cell, in ball arithmetic. For smooth pieces of width up to 1.
- `Algebra`: quotients of polynomials over the rationals in y and E = exp(c y). Since y and exp(c y) are algebraically
  independent, two functions are equal on a piece if and only if they are the same element there.

Everything is rigorous: a value that cannot be enclosed raises `Undecided`, never returns a guess.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from flint import Ordering, arb, arb_series, fmpq, fmpq_mpoly_ctx

from rewriter.proof.certificate.expressions import ONE, Expression

Interval = tuple[arb, arb]
Line = tuple[fmpq, fmpq]
"""a y + b, as (a, b)."""
V = TypeVar("V")


class Undecided(Exception):  # noqa: N818 - not an error: a smaller cell may be decided
    """An arithmetic cannot enclose a value on this cell."""


class Kink(Exception):  # noqa: N818 - likewise
    """A condition changes its sign inside the cell, exactly at `at`."""

    def __init__(self, at: fmpq) -> None:
        self.at = at


class Arithmetic(Generic[V]):
    """What `evaluate` needs, with what holds where an arithmetic knows no better."""

    @abstractmethod
    def line(self, line: Line) -> V:
        """The function a y + b: a constant, y itself, and what an arithmetic may know better than by its parts."""

    @abstractmethod
    def div(self, a: V, b: V) -> V:
        """a / b. Raises Undecided where b may be 0."""

    @abstractmethod
    def function(self, name: str, a: V, line: Line | None) -> V:
        """A function of a, by name; `line` is a as a line where it is one."""

    def share(self, exponents: Sequence[tuple[V, Line | None]]) -> V:  # noqa: ARG002
        """1 / (1 + sum exp(x)), for all exponents x, where `div` does not know it; each with its line, if it is one."""
        raise Undecided

    def pi(self) -> V:
        """The number pi."""
        raise Undecided

    def add(self, a: V, b: V) -> V:
        """a + b."""
        return a + b  # type: ignore[operator, no-any-return]

    def neg(self, a: V) -> V:
        """-a."""
        return -a  # type: ignore[operator, no-any-return]

    def mul(self, a: V, b: V) -> V:
        """a b."""
        return a * b  # type: ignore[operator, no-any-return]

    def sign(self, a: V) -> int:  # noqa: ARG002
        """1 where a >= 0 on the whole cell, -1 where a < 0, else 0."""
        return 0

    def hull(self, a: V, b: V) -> V:  # noqa: ARG002
        """Everything that is in a or in b."""
        raise Undecided


class Evaluation(Generic[V]):
    """The values of expressions on one cell.

    Attributes:
        values: by part.
        lines: the parts that are a y + b on this cell, as (a, b); None for the others.
        roots: where conditions are 0 on the closed cell. There `where` takes its first branch, which may not be the one
            that was evaluated: these points have to be looked at by themselves.
    """

    def __init__(self, parts: Sequence[Expression], arithmetic: Arithmetic[V] | None, low: fmpq, high: fmpq) -> None:
        """Evaluate; without an arithmetic only the lines and roots are found."""
        self.values: dict[Expression, Any] = {}
        self.lines: dict[Expression, Line | None] = {}
        self.roots: set[fmpq] = set()
        self._cell = low, high
        self._arithmetic = arithmetic
        for part in parts:
            self.values[part], self.lines[part] = self._evaluated(part)

    def _evaluated(self, part: Expression) -> tuple[Any, Line | None]:
        arithmetic, operator = self._arithmetic, part.operator
        if operator == "where":
            return self._chosen(*part.operands)
        line = _line(part, [self.lines[each] for each in part.operands])
        if arithmetic is None:
            return None, line
        if line is not None:
            return arithmetic.line(line), line
        operands = [self.values[each] for each in part.operands]
        if operator == "pi":
            return arithmetic.pi(), None
        if operator in ("+", "-"):
            return arithmetic.add(operands[0], operands[1] if operator == "+" else arithmetic.neg(operands[1])), None
        if operator == "*":
            return arithmetic.mul(*operands), None
        if operator == "/":
            try:
                return arithmetic.div(*operands), None
            except Undecided:
                return arithmetic.share([(self.values[x], self.lines[x]) for x in _exponents(part)]), None
        if operator == "neg":
            return arithmetic.neg(operands[0]), None
        return arithmetic.function(operator, operands[0], self.lines[part.operands[0]]), None

    def _chosen(self, condition: Expression, a: Expression, b: Expression) -> tuple[Any, Line | None]:
        line, arithmetic = self.lines[condition], self._arithmetic
        if line is None:
            sign = 0 if arithmetic is None else arithmetic.sign(self.values[condition])
        else:
            first, last = (line[0] * end + line[1] for end in self._cell)
            if first != last:
                root = -line[1] / line[0]
                if first < 0 < last or last < 0 < first:
                    raise Kink(root)
                if first == 0 or last == 0:
                    self.roots.add(root)
            sign = 1 if first >= 0 and last >= 0 else -1
        if sign:
            chosen = a if sign > 0 else b
            return self.values[chosen], self.lines[chosen]
        return None if arithmetic is None else arithmetic.hull(self.values[a], self.values[b]), None


def _exponents(part: Expression) -> list[Expression]:
    """The x of 1 / (1 + sum exp(x)), a weight of a softmax. Raises Undecided for any other part."""
    terms, pending = list[Expression](), [part.operands[1]]
    while pending:
        term = pending.pop()
        if term.operator == "+":
            pending += term.operands
        else:
            terms.append(term)
    powers = [term.operands[0] for term in terms if term.operator == "exp"]
    if part.operands[0] is not ONE or len(powers) != len(terms) - 1 or ONE not in terms:
        raise Undecided
    return powers


def _line(part: Expression, lines: list[Line | None]) -> Line | None:
    """A part as a line, from the lines of its operands; None where it is something else."""
    operator = part.operator
    if isinstance(part.value, fmpq):
        return fmpq(0), part.value
    if operator == "variable":
        return fmpq(1), fmpq(0)
    known = [line for line in lines if line is not None]
    if len(known) < len(lines) or not known:
        return None
    (a, b), (c, d) = known[0], known[-1]
    if operator == "neg":
        return -a, -b
    if operator == "+":
        return a + c, b + d
    if operator == "-":
        return a - c, b - d
    if operator == "*" and (a == 0 or c == 0):
        return a * d + c * b, b * d
    if operator == "/" and c == 0 and d != 0:
        return a / d, b / d
    return None


# -- intervals ------------------------------------------------------------------------------------------------------

INFINITY, NOTHING = arb.pos_inf(), arb(0)
_FAR = arb(10) ** 6
"""Beyond this, exp is bounded by powers of 2 with integer exponents, and sigmoids by their limits."""
_MOST_TERMS = 6


class _Key:
    """Exact numbers in order: arb compares balls, and may answer no to both < and >."""

    def __init__(self, number: arb) -> None:
        self.number = number

    def __lt__(self, other: _Key) -> bool:
        return bool(self.number < other.number)

    def __gt__(self, other: _Key) -> bool:
        return bool(self.number > other.number)


def least(*numbers: arb) -> arb:
    """The smallest of exact numbers."""
    return min(numbers, key=_Key)


def largest(*numbers: arb) -> arb:
    """The largest of exact numbers."""
    return max(numbers, key=_Key)


def low_end(number: arb) -> arb:
    """The lower end of a ball, as an exact number."""
    return -INFINITY if number.is_nan() else number.lower()


def high_end(number: arb) -> arb:
    """The upper end of a ball, as an exact number."""
    return INFINITY if number.is_nan() else number.upper()


def interval(number: fmpq | arb) -> Interval:
    """The smallest interval around a number."""
    ball = arb(number)
    return ball.lower(), ball.upper()


def i_add(a: Interval, b: Interval) -> Interval:
    """a + b."""
    return low_end(a[0] + b[0]), high_end(a[1] + b[1])


def i_neg(a: Interval) -> Interval:
    """-a."""
    return -a[1], -a[0]


def i_mul(a: Interval, b: Interval) -> Interval:
    """a b; 0 times an unbounded interval is 0, since its members are finite."""
    products = [NOTHING if x == 0 or y == 0 else x * y for x in a for y in b]
    return least(*map(low_end, products)), largest(*map(high_end, products))


def i_inverse(a: Interval) -> Interval:
    """1 / a. Raises Undecided where a contains 0."""
    if a[0] > 0 or a[1] < 0:
        low = low_end(1 / a[1]) if a[1].is_finite() else NOTHING
        return low, high_end(1 / a[0]) if a[0].is_finite() else NOTHING
    raise Undecided


def _power_of_two(x: arb) -> arb:
    """exp(x) from below where x < -10^6, from above where x > 10^6; log2(e) < 3/2, and exponents are big integers."""
    k = int(str(x.floor().unique_fmpz())) + (x > 0)
    return arb((1, 3 * k // 2 + (1 if x > 0 else -1)))


def _exp(a: Interval) -> Interval:
    low, high = a
    below, above = NOTHING, INFINITY
    if low >= -_FAR:
        below = low_end(least(low, _FAR).exp())
    elif low.is_finite():
        below = _power_of_two(low)
    if high <= _FAR:
        above = high_end(largest(high, -_FAR).exp())
    elif high.is_finite():
        above = _power_of_two(high)
    return below, above


def _rising(function: Callable[[arb], arb], floor: int, ceiling: int) -> Callable[[Interval], Interval]:
    """A rising function with these limits, on intervals."""

    def on(a: Interval) -> Interval:
        low = arb(floor) if a[0] < -_FAR else low_end(function(least(a[0], _FAR)))
        return low, arb(ceiling) if a[1] > _FAR else high_end(function(largest(a[1], -_FAR)))

    return on


_ON_INTERVALS: dict[str, Callable[[Interval], Interval]] = {
    "exp": _exp,
    "sigmoid": _rising(lambda x: 1 / (1 + (-x).exp()), 0, 1),
    "tanh": _rising(lambda x: x.tanh(), -1, 1),
    "erf": _rising(lambda x: x.erf(), -1, 1),
}


def _log1p_exp(a: Interval) -> Interval:
    """log(1 + exp(x)) for x <= 0."""
    low, high = _exp(a)
    return low_end(low.log1p()), high_end(high.log1p())


def _root(a: Interval) -> Interval:
    if not a[0] >= 0:
        raise Undecided
    return low_end(a[0].sqrt()), high_end(a[1].sqrt())


Polynomial = list[Interval]


class Intervals(Arithmetic[Polynomial]):
    """[c_0, c_1, ...]: all functions sum c_k(y) y^k with c_k(y) in the interval c_k, on one cell."""

    def __init__(self, low: fmpq, high: fmpq) -> None:
        self.cell = interval(low)[0], interval(high)[1]

    def pi(self) -> Polynomial:
        """The number pi."""
        return [interval(arb.pi())]

    def line(self, line: Line) -> Polynomial:
        """The function a y + b."""
        return [interval(line[1]), *([interval(line[0])] if line[0] != 0 else [])]

    def range(self, a: Polynomial) -> Interval:
        """The values on the cell."""
        found = a[-1]
        for coefficient in a[-2::-1]:
            found = i_add(i_mul(found, self.cell), coefficient)
        if len(a) == 3:
            squared = i_mul(self.cell, self.cell)
            squared = (NOTHING if self.cell[0] < 0 < self.cell[1] else squared[0]), squared[1]
            other = i_add(i_add(i_mul(a[2], squared), i_mul(a[1], self.cell)), a[0])
            found = largest(found[0], other[0]), least(found[1], other[1])
        return found

    def add(self, a: Polynomial, b: Polynomial) -> Polynomial:
        """a + b."""
        zero = (NOTHING, NOTHING)
        return [i_add(a[k] if k < len(a) else zero, b[k] if k < len(b) else zero) for k in range(max(len(a), len(b)))]

    def neg(self, a: Polynomial) -> Polynomial:
        """-a."""
        return [i_neg(each) for each in a]

    def mul(self, a: Polynomial, b: Polynomial) -> Polynomial:
        """a b; long products lose the form of one factor."""
        if len(a) + len(b) > _MOST_TERMS:
            a = [self.range(a)]
        product = [(NOTHING, NOTHING)] * (len(a) + len(b) - 1)
        for i, x in enumerate(a):
            for j, y in enumerate(b):
                product[i + j] = i_add(product[i + j], i_mul(x, y))
        return product

    def div(self, a: Polynomial, b: Polynomial) -> Polynomial:
        """a / b; the factor y is cancelled where both are multiples of it."""
        inverse = i_inverse(self.range(b))  # first: 0 / 0 is undefined, whatever could be cancelled
        if len(b) == 2 and _multiple_of_y(b) and _multiple_of_y(a):
            a, inverse = a[1:], i_inverse(b[1])
        return [i_mul(each, inverse) for each in a]

    def function(self, name: str, a: Polynomial, line: Line | None) -> Polynomial:  # noqa: ARG002
        """A function of a."""
        x = self.range(a)
        if name == "sqrt":
            return [_root(x)]
        if name != "softplus":
            return [_ON_INTERVALS[name](x)]
        if x[0] >= 0:  # x + log(1 + exp(-x)) keeps its line
            return self.add(a, [_log1p_exp(i_neg(x))])
        if x[1] <= 0:
            return [_log1p_exp(x)]
        below = NOTHING if x[0] < -_FAR else low_end(x[0].exp().log1p())
        return [(below, high_end(x[1] + (-x[1]).exp().log1p()) if x[1].is_finite() else INFINITY)]

    def sign(self, a: Polynomial) -> int:
        """1 where a >= 0 on the whole cell, -1 where a < 0, else 0."""
        low, high = self.range(a)
        return 1 if low >= 0 else -1 if high < 0 else 0

    def hull(self, a: Polynomial, b: Polynomial) -> Polynomial:
        """Everything that is in a or in b."""
        x, y = self.range(a), self.range(b)
        return [(least(x[0], y[0]), largest(x[1], y[1]))]


def _multiple_of_y(a: Polynomial) -> bool:
    return len(a) > 1 and a[0][0] == 0 and a[0][1] == 0


# -- Taylor series --------------------------------------------------------------------------------------------------


class Taylor(Arithmetic[arb_series]):
    """Series in y - centre; around a ball, their last coefficient bounds the remainder."""

    def __init__(self, centre: arb) -> None:
        self.centre = centre

    def pi(self) -> arb_series:
        """The number pi."""
        return arb_series([arb.pi()])

    def line(self, line: Line) -> arb_series:
        """The function a y + b: of wide balls, the difference of two steep lines knows less than its line."""
        # Products round radii up, even those with 1.
        start = self.centre if line == (fmpq(1), fmpq(0)) else line[0] * self.centre + line[1]
        return arb_series([start, *([line[0]] if line[0] != 0 else [])])

    def div(self, a: arb_series, b: arb_series) -> arb_series:
        """a / b. Raises Undecided where b may be 0."""
        if b[0].contains(0):
            raise Undecided
        return a / b

    def share(self, exponents: Sequence[tuple[arb_series, Line | None]]) -> arb_series:
        """1 / (1 + sum exp(x)), over the largest of the powers, so that nothing is large."""
        most, its_line = max(exponents, key=lambda each: _Key(each[0][0].mid()))
        if not most[0] > 0 or abs(most[0]) > 10**30:
            raise Undecided
        least = (-most).exp()
        total = least + 1
        for each, line in exponents:
            if each is not most:
                gap = each - most
                if line is not None and its_line is not None:
                    gap = self.line((line[0] - its_line[0], line[1] - its_line[1]))
                total += gap.exp()
        return self.div(least, total)

    def function(self, name: str, a: arb_series, line: Line | None) -> arb_series:  # noqa: ARG002
        """A function of a, by the sign of a where it could overflow."""
        if not a[0].is_finite() or abs(a[0]) > 10**30:
            raise Undecided
        if name == "exp":
            return a.exp()
        if name == "erf":
            return a.erf()
        if name == "sqrt":
            if not a[0] > 0:
                raise Undecided
            return a.sqrt()
        if name == "softplus":
            return a + ((-a).exp() + 1).log() if a[0] > 0 else (a.exp() + 1).log()
        scaled = a if name == "sigmoid" else 2 * a
        e = (-scaled).exp() if a[0] > 0 else scaled.exp()
        if name == "sigmoid":
            return self.div(arb_series([1]) if a[0] > 0 else e, 1 + e)
        return self.div(1 - e if a[0] > 0 else e - 1, 1 + e)

    def sign(self, a: arb_series) -> int:
        """1 where a >= 0 on the whole cell, -1 where a < 0, else 0."""
        return 1 if a[0] >= 0 else -1 if a[0] < 0 else 0


# -- algebra --------------------------------------------------------------------------------------------------------

_MOST_DEGREE, _MOST_POWER = 200, 40


class Quotient:
    """numerator / denominator, or its logarithm."""

    __slots__ = ("denominator", "logarithm", "numerator")

    def __init__(self, numerator: Any, denominator: Any, *, logarithm: bool = False) -> None:
        self.numerator, self.denominator, self.logarithm = numerator, denominator, logarithm


class Algebra(Arithmetic[Quotient]):
    """Quotients of polynomials over the rationals in y and E = exp(rate y)."""

    def __init__(self, rate: fmpq | None) -> None:
        self._rate = rate
        ring = fmpq_mpoly_ctx.get(("y", "E"), Ordering.lex)
        self._constant = ring.constant
        self._y, self._e = ring.gens()
        self._one = ring.constant(1)

    def line(self, line: Line) -> Quotient:
        """The function a y + b."""
        return Quotient(self._constant(line[0]) * self._y + self._constant(line[1]), self._one)

    def add(self, a: Quotient, b: Quotient) -> Quotient:
        """a + b."""
        (n, d), (m, e) = self._parts(a), self._parts(b)
        return Quotient(n * e + m * d, d * e)

    def neg(self, a: Quotient) -> Quotient:
        """-a."""
        if a.logarithm:
            return Quotient(a.denominator, a.numerator, logarithm=True)
        n, d = self._parts(a)
        return Quotient(-n, d)

    def mul(self, a: Quotient, b: Quotient) -> Quotient:
        """a b."""
        (n, d), (m, e) = self._parts(a), self._parts(b)
        if n.total_degree() + m.total_degree() > _MOST_DEGREE:
            raise Undecided
        return Quotient(n * m, d * e)

    def div(self, a: Quotient, b: Quotient) -> Quotient:
        """a / b; that b is nowhere 0 is not checked here."""
        (n, d), (m, e) = self._parts(a), self._parts(b)
        return Quotient(n * e, d * m)

    def function(self, name: str, a: Quotient, line: Line | None) -> Quotient:
        """exp, sigmoid, tanh and softplus of multiples of y, and their compositions that stay in the field."""
        if a.logarithm and name in ("exp", "tanh"):
            n, d = a.numerator, a.denominator
            return Quotient(n, d) if name == "exp" else Quotient(n * n - d * d, n * n + d * d)
        if name == "softplus":
            inner = self.function("exp", a, line)
            return Quotient(inner.numerator + inner.denominator, inner.denominator, logarithm=True)
        if line is None or line[1] != 0 or name not in ("exp", "sigmoid", "tanh"):
            raise Undecided
        power = line[0] * (2 if name == "tanh" else 1) / self._rate if self._rate else fmpq(0)
        if power.q != 1 or abs(power) > _MOST_POWER:
            raise Undecided
        exponent = int(power.p)
        n, d = (self._e**exponent, self._one) if exponent >= 0 else (self._one, self._e**-exponent)
        return {"exp": Quotient(n, d), "sigmoid": Quotient(n, n + d), "tanh": Quotient(n - d, n + d)}[name]

    def equal(self, a: Quotient, b: Quotient) -> bool:
        """Whether a and b are the same element."""
        if a.logarithm != b.logarithm:
            return False
        return bool(a.numerator * b.denominator - b.numerator * a.denominator == 0)

    @staticmethod
    def _parts(a: Quotient) -> tuple[Any, Any]:
        if a.logarithm:
            raise Undecided
        return a.numerator, a.denominator
