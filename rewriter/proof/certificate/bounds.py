"""How far one scalar function is from another, proved for every real number of an interval.

`bound` decides |F_B(y) - F_A(y)| <= limit max(1, |F_A(y)|) for all |y| <= top, where top is the largest finite number
of a type, or the end of a domain that is claimed. Between kinks, equality is proved by algebra; what is left is
searched best first: the cell with the largest upper bound is split, its centre gives a lower bound, and the search ends
when both are within `SLACK`. Nothing is sampled: a cell [low, high] of pre-activations counts only once it is enclosed
as a whole, by one of three arithmetics: `Taylor` for smooth pieces, `Lines` and `Algebra`. Everything is rigorous:
a value that cannot be enclosed raises `Undecided`, never returns a guess.
"""

import heapq
import math
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from flint import Ordering, arb, arb_series, ctx, fmpq, fmpq_mpoly_ctx

from rewriter.proof.certificate.expressions import Expression, Kink, Line, on_piece, ordered, rational

SLACK = 1.0001
"""A bound is at most this many times the proved lower bound; series converge so fast that more saves little."""
FLOOR = 1e-15  # below this, a bound is not refined further: it is far below the rounding of every type but float64
MOST_CELLS = 20_000  # cells that are looked at before the search gives up; the programs of this tool take 3 to 4,400
_ORDER = 8  # order of the Taylor series
_LARGEST = rational(sys.float_info.max)
_PRECISION = 128  # bits, besides those of |y|: far out, 1 + erf(y) cancels to nothing, times a large y


class _Piece(NamedTuple):
    """[low, high] without kinks, both functions as they are on it, and the bits of the steepest line in them."""

    low: fmpq
    high: fmpq
    a: Expression
    b: Expression
    parts: tuple[Expression, ...]
    steep: int


_Cell = tuple[float, fmpq, fmpq, _Piece]
"""Minus an upper bound, so that the worst cell comes first in a heap; its ends; and the piece that it is in."""


@dataclass(frozen=True)
class Bound:
    """What was proved about |F_B - F_A| / max(1, |F_A|), F_A and F_B being functions of one number y."""

    holds: bool  # whether it is at most `limit` for every y of the domain
    limit: float  # what was claimed
    bound: float  # proved upper bound; infinite where none was found
    at_least: float  # proved lower bound; 0 where the functions are equal
    at: float | None  # where the lower bound is attained
    exact: bool  # whether the functions are equal, proved by algebra
    domain: float | None  # largest |y| that the claim is about; None for all finite numbers of the type
    cells: int  # the cells that were looked at
    reason: str = ""  # why it does not hold; empty where it does


@cache
def bound(
    original: Expression, rewritten: Expression, *, limit: float, top: fmpq, domain: float | None = None
) -> Bound:
    """Prove or refute |F_B - F_A| / max(1, |F_A|) <= limit for F_A `original` and F_B `rewritten` of `VARIABLE`.

    `top` is the largest finite number of the type that y has, `domain` the largest |y| that the claim is about; None
    for all up to `top`. It is never made smaller. Within a process, one proof serves all layers and all files.
    """
    if original is rewritten:
        return Bound(True, limit, 0.0, 0.0, None, exact=True, domain=domain, cells=0)
    end = top if domain is None else min(top, rational(domain))
    search = _Search(original, rewritten, end)
    upper = search.run(limit)
    lower, at = max(search.lower, 0.0), None if search.at is None else _float(search.at)
    reason = ""
    if lower > limit:
        reason = f"differs by {lower:.3g} at y = {at:.9g}, more than {limit:.3g}"
    elif search.undefined is not None:
        reason = f"is not defined at y = {_float(search.undefined):.9g}"
    elif upper > limit:
        where = "" if search.widest is None else f" on [{_float(search.widest[0]):.6g}, {_float(search.widest[1]):.6g}]"
        reason = f"no bound below {upper:.3g} was found{where} in {search.cells} cells"
    return Bound(upper <= limit, limit, upper, lower, at, search.exact, domain, search.cells, reason)


class _Search:
    """Branch and bound on [-end, end]."""

    def __init__(self, original: Expression, rewritten: Expression, end: fmpq) -> None:
        self._a, self._b, self._end = original, rewritten, end
        self.lower = -1.0  # proved lower bound of the supremum; negative while there is none
        self.at: fmpq | None = None  # where it is attained
        self.exact = True  # whether algebra alone proved everything so far
        self.cells = 0  # looked at
        self.widest: tuple[fmpq, fmpq] | None = None  # the worst cell, once the search ended without success
        self.undefined: fmpq | None = None  # a number at which one of the functions is not defined
        self.roots: set[fmpq] = set()  # where conditions are 0, which have to be looked at by themselves

    def run(self, limit: float) -> float:
        """An upper bound of the supremum, within `SLACK` of it; a lower bound as soon as that exceeds the limit."""
        pieces = [piece for piece in self._between_kinks() if not self.equal(piece)]
        self.exact = not pieces
        for piece in pieces:
            for y in _probes(piece.low, piece.high):
                if y not in self.roots:
                    self._measured(piece, y)
                if self.lower > limit:
                    return self.lower
                if self.undefined is not None:
                    return math.inf
        upper = self._refined(sorted((-math.inf, each.low, each.high, each) for each in pieces), limit)
        return max([upper, *(self._at_point(root) for root in sorted(self.roots))])

    def piece(self, low: fmpq, high: fmpq) -> _Piece:
        """Both functions on a piece. Raises Kink."""
        (a, b), zeros = on_piece(self._a, self._b, low=low, high=high)
        self.roots |= zeros
        parts = tuple(ordered(a, b))
        slopes = (int(abs(part.value[0])).bit_length() for part in parts if isinstance(part.value, tuple))
        return _Piece(low, high, a, b, parts, max(slopes, default=0))

    def _between_kinks(self) -> Iterator[_Piece]:
        pending = [(-self._end, self._end)]
        while pending:
            low, high = pending.pop()
            try:
                yield self.piece(low, high)
            except Kink as kink:
                pending += [(low, kink.at), (kink.at, high)]

    def _refined(self, heap: list[_Cell], limit: float) -> float:
        while heap:
            upper, low, high, piece = heap[0]
            middle = _middle(low, high)
            if -upper <= limit and -upper <= max(SLACK * self.lower, FLOOR):
                return max(-upper, 0.0)
            if self.lower > limit:
                return self.lower
            if self.cells > MOST_CELLS or middle in (low, high):
                self.widest = low, high
                return -upper
            heapq.heappop(heap)
            for first, last in ((low, middle), (middle, high)):
                heapq.heappush(heap, (-self._upper(piece, first, last), first, last, piece))
        return 0.0

    def _upper(self, piece: _Piece, low: fmpq, high: fmpq) -> float:
        """An upper bound on one cell; infinite where no arithmetic encloses it."""
        self.cells += 1
        for enclosed in (self.by_series, self.by_lines):
            with suppress(Undecided), ctx.workprec(_PRECISION + _bits(piece, low, high)):
                upper = enclosed(piece, low, high)
                if math.isfinite(upper):
                    return upper
        return math.inf

    def by_series(self, piece: _Piece, low: fmpq, high: fmpq) -> float:
        """An upper bound on one cell, whose centre may raise the lower one. Raises Undecided."""
        middle, radius = arb((low + high) / 2), arb((high - low) / 2).upper()
        balls = middle, arb(middle.mid(), radius + middle.rad())
        cell = evaluate(piece.parts, Taylor(balls[1]))
        wide_a, wide_gap = cell[piece.a], cell[piece.b] - cell[piece.a]
        if not abs(wide_gap[_ORDER]) * radius**_ORDER < arb(1).max(abs(wide_a[0]).upper()):
            return math.inf  # the series around the centre cannot lower the remainder
        centre = evaluate(piece.parts, Taylor(balls[0]))
        a, gap = centre[piece.a], centre[piece.b] - centre[piece.a]
        self._found(gap[0], a[0], (low + high) / 2)
        upper = _quotient(_most(gap, wide_gap, radius), abs(wide_a[0]).lower())
        if upper > self.lower and abs(wide_a[0]) > 1:  # so that it is nowhere 0
            upper = min(upper, _rounded_up(_most(gap / a, wide_gap / wide_a, radius)))
        return upper

    def by_lines(self, piece: _Piece, low: fmpq, high: fmpq) -> float:
        """The same; only at a single number the lower bound may rise. Raises Undecided."""
        lines = Lines(low, high)
        values = evaluate(piece.parts, lines)
        a, gap = lines.ends(values[piece.a]), lines.ends(lines.sub(values[piece.b], values[piece.a]))
        if low == high:
            self._found(arb.union(*gap), arb.union(*a), low)
        least = arb(0) if a[0] <= 0 <= a[1] else min(abs(a[0]), abs(a[1]))
        return _quotient(max(abs(each).upper() for each in gap), least)

    def _at_point(self, y: fmpq) -> float:
        """The same at a single number, where every condition is decided exactly."""
        self.cells += 1
        piece = self.piece(y, y)
        upper = 0.0 if self.equal(piece) else self._measured(piece, y)
        self.exact = self.exact and upper == 0.0
        return upper

    def _measured(self, piece: _Piece, y: fmpq) -> float:
        """An upper bound at a number, which may also raise the lower one; infinite where it is not defined."""
        with suppress(Undecided), ctx.workprec(4 * _PRECISION + _bits(piece, y, y)):
            return self.by_lines(piece, y, y)
        self.undefined = y
        return math.inf

    def _found(self, gap: arb, a: arb, y: fmpq) -> None:
        """Raise the lower bound, if F_B - F_A and F_A at y do."""
        if gap.is_finite() and a.is_finite():
            lower = float((abs(gap) / arb(1).max(abs(a))).lower())
            if lower > self.lower:
                self.lower, self.at = lower, y

    def equal(self, piece: _Piece) -> bool:
        """Whether algebra proves both equal on a piece, on which neither has a pole."""
        inner = [part.operands[0].value for part in piece.parts if part.operator in ("exp", "softplus")]
        rates = [abs(line[0]) for line in inner if isinstance(line, tuple) and line[0] != 0]
        algebra = Algebra(min(rates, default=None), piece.low, piece.high)
        try:
            values = evaluate(piece.parts, algebra)
        except Undecided:
            return False
        return algebra.equal(values[piece.a], values[piece.b])


def _most(centre: arb_series, cell: arb_series, radius: arb) -> arb:
    """An upper bound of |f| on a cell: by the magnitudes of all coefficients, and of that of the remainder.

    `centre` is f around the centre, `cell` around the whole cell, whose last coefficient bounds the remainder; `radius`
    is half the width of the cell.
    """
    terms = [*(abs(centre[k]) for k in range(_ORDER)), abs(cell[_ORDER])]
    return sum((term * radius**k for k, term in enumerate(terms)), arb(0)).upper()


def _bits(piece: _Piece, low: fmpq, high: fmpq) -> int:
    """Bits of the largest |y|^3, whose exponential GELU by tanh takes, and bits lost by the steepest line."""
    return 3 * int(max(abs(low), abs(high))).bit_length() + piece.steep


def _float(number: fmpq) -> float:
    """The nearest finite float: 2^1024, the end of float64, is none."""
    return float(max(min(number, _LARGEST), -_LARGEST))


def _rounded_up(number: arb) -> float:
    """A float that is at least as large; infinite where there is none."""
    upper = number.upper()
    found = float(upper) if number.is_finite() else math.inf
    return 0.0 if upper == 0 else math.nextafter(found, math.inf)


def _quotient(size: arb, scale: arb) -> float:
    return _rounded_up(size / arb(1).max(scale))


def _probes(low: fmpq, high: fmpq) -> Iterator[fmpq]:
    """Some 70 numbers of a piece: a wrong function is usually refuted by one of them, before any cell is enclosed."""
    grid = [fmpq(k, 2) for k in range(-20, 21)]
    powers = [sign * fmpq(2) ** k for k in range(-44, 120, 12) for sign in (1, -1)]
    yield from (y for y in (*grid, *powers, low, high) if low <= y <= high)


def _middle(low: fmpq, high: fmpq) -> fmpq:
    """Where to split a cell: at 0, halfway between the exponents of a wide one, or in the middle."""
    if low < 0 < high:
        return fmpq(0)
    if low < 0:
        return -_middle(-high, -low)
    if 0 < 4 * low < high:
        split = fmpq(2) ** ((_exponent(low) + _exponent(high)) // 2)
        if low < split < high:
            return split
    return (low + high) / 2


def _exponent(number: fmpq) -> int:
    return int(number.p).bit_length() - int(number.q).bit_length()


# -- arithmetics, in which an expression is evaluated on a whole cell at once


class Undecided(Exception):  # noqa: N818 - not an error: a smaller cell may be decided
    """An arithmetic cannot enclose a value on this cell."""


def evaluate(parts: Sequence[Expression], arithmetic: "Taylor | Lines | Algebra") -> dict[Expression, Any]:
    """The values of all parts of functions on a piece (`on_piece`), operands first. Raises Undecided."""
    values: dict[Expression, Any] = {}
    operations: Mapping[str, Callable[..., Any]] = {
        "pi": arithmetic.pi, "+": arithmetic.add, "*": arithmetic.mul, "/": arithmetic.div, "where": arithmetic.choose,
    }  # fmt: skip
    for part in parts:
        if isinstance(part.value, tuple):
            values[part] = arithmetic.line(part.value)
        elif part.operator in operations:
            values[part] = operations[part.operator](*[values[each] for each in part.operands])
        else:
            values[part] = arithmetic.function(part.operator, values[part.operands[0]])
    return values


# -- Taylor series --------------------------------------------------------------------------------------------------


class Taylor:
    """Series in y - centre; around a ball, each encloses all its numbers."""

    add: Callable[[arb_series, arb_series], arb_series] = staticmethod(operator.add)
    mul: Callable[[arb_series, arb_series], arb_series] = staticmethod(operator.mul)

    def __init__(self, centre: arb) -> None:
        self.centre = centre
        ctx.cap = max(ctx.cap, _ORDER + 1)  # flint cuts series to so many terms

    def pi(self) -> arb_series:
        return arb_series([arb.pi()], _ORDER + 1)

    def line(self, line: Line) -> arb_series:
        """The function a y + b, enclosed as one: for wide balls, a difference of steep lines is less precise."""
        if not line[0]:
            return arb_series([line[1]], _ORDER + 1)
        # Products round radii up, even those with 1.
        start = self.centre if line == (fmpq(1), fmpq(0)) else line[0] * self.centre + line[1]
        return arb_series([start, line[0]], _ORDER + 1)

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
Sloped = tuple[Interval, Interval]
NONE = arb(0), arb(0)  # no slope, by identity


class Lines:
    """s y + r for intervals s and r, by their ends: what approaches a line is narrow on a cell of any width.

    What is positive stays so, however wide, while a ball of 100 % width has no inverse.
    """

    def __init__(self, low: fmpq, high: fmpq) -> None:
        self._low, self._single = low, low == high
        self._y = arb(low).lower(), arb(high).upper()

    def ends(self, a: Sloped) -> Interval:
        """The interval of all values."""
        slope, rest = a
        return rest if slope is NONE else _sum(_product(slope, self._y), rest)

    def pi(self) -> Sloped:
        return NONE, _around(arb.pi())

    def line(self, line: Line) -> Sloped:
        slope, start = line
        if self._single or not slope:
            return NONE, _around(slope * self._low + start)
        return _around(slope), _around(start)

    def add(self, a: Sloped, b: Sloped) -> Sloped:
        slope = a[0] if b[0] is NONE else b[0] if a[0] is NONE else _sum(a[0], b[0])
        return slope, _sum(a[1], b[1])

    def sub(self, a: Sloped, b: Sloped) -> Sloped:
        return self.add(a, self.mul(b, (NONE, (arb(-1), arb(-1)))))

    def mul(self, a: Sloped, b: Sloped) -> Sloped:
        """Of two with slopes, as intervals."""
        (slope, rest), (other, factor) = (a, b) if b[0] is NONE else (b, a)
        if slope is NONE or other is not NONE:
            return NONE, _product(self.ends(a), self.ends(b))
        return _product(slope, factor), _product(rest, factor)

    def div(self, a: Sloped, b: Sloped) -> Sloped:
        low, high = self.ends(b)
        if not low > 0 and not high < 0:
            raise Undecided
        return self.mul(a, (NONE, ((1 / high).lower(), (1 / low).upper())))

    def function(self, name: str, a: Sloped) -> Sloped:
        """A function of a: all of them rise. softplus(a) = a + softplus(-a)."""
        low, high = self.ends(a)
        if name == "softplus" and low > 0:
            return self.add(a, self.function(name, (NONE, (-high, -low))))
        rising: Callable[[arb], arb] = {"exp": arb.exp, "erf": arb.erf, "sqrt": arb.sqrt, "softplus": _softplus}[name]
        low, high = rising(low).lower(), rising(high).upper()
        if not low.is_finite() or not high.is_finite():
            raise Undecided
        return NONE, (low, high)

    def choose(self, x: Sloped, a: Sloped, b: Sloped) -> Sloped:
        """Both, where the cell has both."""
        low, high = self.ends(x)
        if low >= 0 or high < 0:
            return a if low >= 0 else b
        both = *self.ends(a), *self.ends(b)
        return NONE, (min(both), max(both))


def _softplus(x: arb) -> arb:
    return x.exp().log1p()


def _around(number: fmpq | arb) -> Interval:
    return arb(number).lower(), arb(number).upper()


def _sum(a: Interval, b: Interval) -> Interval:
    return (a[0] + b[0]).lower(), (a[1] + b[1]).upper()


def _product(a: Interval, b: Interval) -> Interval:
    products = [x * y for x in a for y in b]
    return min(each.lower() for each in products), max(each.upper() for each in products)


# -- algebra --------------------------------------------------------------------------------------------------------

_MOST_DEGREE, _MOST_POWER = 200, 40
_RING = fmpq_mpoly_ctx.get(("y", "E"), Ordering.lex)
(_Y, _E), _ONE = _RING.gens(), _RING.constant(1)


class Quotient(NamedTuple):
    """numerator / denominator, or the logarithm of one that is positive."""

    numerator: Any
    denominator: Any
    logarithm: bool = False


class Algebra:
    """Quotients of polynomials over the rationals in y and E = exp(rate y), without poles on the cell [low, high].

    Since y and E are algebraically independent, functions are equal if and only if they are the same element.
    """

    def __init__(self, rate: fmpq | None, low: fmpq, high: fmpq) -> None:
        self._rate, self._low, self._high = rate, low, high

    def choose(self, *_operands: Quotient) -> Quotient:
        """Neither what a sign decides nor pi belongs to this algebra."""
        raise Undecided

    pi = choose

    def line(self, line: Line) -> Quotient:
        return Quotient(_RING.constant(line[0]) * _Y + _RING.constant(line[1]), _ONE)

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
        if name != "exp" or terms or a.denominator != _ONE:
            raise Undecided
        power = slope / self._rate if self._rate else fmpq(0)
        if power.q != 1 or abs(power) > _MOST_POWER:
            raise Undecided
        exponent = int(power.p)
        return Quotient(_E**exponent, _ONE) if exponent >= 0 else Quotient(_ONE, _E**-exponent)

    def equal(self, a: Quotient, b: Quotient) -> bool:
        if a.logarithm != b.logarithm:
            return False
        return bool(a.numerator * b.denominator - b.numerator * a.denominator == 0)

    @staticmethod
    def _parts(a: Quotient) -> tuple[Any, Any]:
        if a.logarithm:
            raise Undecided
        return a.numerator, a.denominator
