"""How far one scalar function is from another, proved for every real number of an interval.

`bound` decides |F_B(y) - F_A(y)| <= limit max(1, |F_A(y)|) for all |y| <= top, where top is the largest finite number
of a type, or the end of a domain that is claimed. Between kinks, equality is proved by algebra; what is left is
searched best first: the cell with the largest upper bound is split, its centre gives a lower bound, and the search ends
when both are within `SLACK`. Nothing is sampled: a cell counts only once it is enclosed
(`rewriter.proof.certificate.arithmetic`).
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from flint import arb, ctx, fmpq

from rewriter.proof.certificate.arithmetic import (
    NOTHING,
    Algebra,
    Evaluation,
    Interval,
    Intervals,
    Kink,
    Polynomial,
    Taylor,
    Undecided,
    i_inverse,
    i_mul,
    largest,
    low_end,
)
from rewriter.proof.certificate.expressions import Expression, listing, ordered, rational

SLACK = 1.15
"""A bound is at most this many times the proved lower bound of the supremum."""
FLOOR = 1e-15
"""Below this, a bound is not refined further: it is far below the rounding of every type but float64."""
MOST_CELLS = 20_000
"""Cells that are looked at before the search gives up; the programs of this tool take 3 to 17,000."""
_NO_BOUND = "no bound below"
_MOST_COVER, _MOST_RELATIVE = 4_000, 2_000
_MOST_PARTS = 200_000
"""Parts of expressions that are evaluated for the relative bound, which is a figure and decides nothing."""
_ORDER = 8
"""Order of the Taylor series."""
_WIDEST, _FARTHEST = fmpq(1), fmpq(4096)
"""Width of the cells, and |y|, up to which series are tried."""
_PRECISION, _FAR = 128, fmpq(2) ** 40


Cell = tuple[float, fmpq, fmpq]
"""Minus an upper bound, so that the worst cell comes first in a heap, and the ends."""


@dataclass(frozen=True)
class Bound:
    """What was proved about |F_B - F_A| / max(1, |F_A|), F_A and F_B being functions of one number y.

    Attributes:
        holds: whether it is at most `limit` for every y of the domain.
        limit: what was claimed.
        bound: proved upper bound; infinite where none was found.
        at_least: proved lower bound; 0 where the functions are equal.
        at: where the lower bound is attained.
        exact: whether the functions are equal, proved by algebra.
        domain: largest |y| that the claim is about; None for all finite numbers of the type.
        relative: proved upper bound of |F_B - F_A| / |y|; None where there is none.
        cells: the cells that were looked at.
        key: names this claim about these two functions.
        reason: why it does not hold; empty where it does.
    """

    holds: bool
    limit: float
    bound: float
    at_least: float
    at: float | None
    exact: bool
    domain: float | None
    relative: float | None
    cells: int
    key: str
    reason: str = ""

    @property
    def undecided(self) -> bool:
        """Whether the search ended without a bound, and without a point where the claim does not hold."""
        return self.reason.startswith(_NO_BOUND)


def key_of(original: Expression, rewritten: Expression, limit: float, top: fmpq, domain: float | None) -> str:
    """The sha256 of a claim: both functions with all constants, the limit, and the numbers that it is about."""
    parts = [*listing(original), "|", *listing(rewritten), "|", limit.hex(), str(top), repr(domain)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@cache
def _table() -> dict[str, Bound]:
    """The bounds that come with the package: claims of the standard programs, proved anew by the slow tests."""
    path = Path(__file__).with_name("bounds.json")
    return {key: Bound(key=key, **entry) for key, entry in json.loads(path.read_text(encoding="utf-8")).items()}


_PROVED: dict[str, Bound] = {}
"""The claims that this process has looked at: one proof serves all layers and all files."""


def bound(
    original: Expression, rewritten: Expression, *, limit: float, top: fmpq, domain: float | None = None
) -> Bound:
    """Prove or refute that `rewritten` is within `limit` of `original`, both functions of `VARIABLE`.

    Args:
        original: F_A.
        rewritten: F_B.
        limit: the largest |F_B - F_A| / max(1, |F_A|) that is claimed.
        top: the largest finite number of the type that y has.
        domain: the largest |y| that the claim is about; None for all up to `top`. It is never made smaller.
    """
    if original is rewritten:
        return Bound(True, limit, 0.0, 0.0, None, exact=True, domain=domain, relative=0.0, cells=0, key="identical")
    key = key_of(original, rewritten, limit, top, domain)
    found = _table().get(key) or _PROVED.get(key)
    if found is None:
        found = _PROVED[key] = prove(original, rewritten, limit, top, domain)
    return found


def prove(original: Expression, rewritten: Expression, limit: float, top: fmpq, domain: float | None) -> Bound:
    """As `bound`, without looking anything up."""
    end = top if domain is None else min(top, rational(domain))
    key = key_of(original, rewritten, limit, top, domain)
    search = _Search(original, rewritten, end)
    upper = search.run(limit)
    lower, at = max(search.lower, 0.0), None if search.at is None else _float(search.at)
    found = Bound(
        holds=upper <= limit,
        limit=limit,
        bound=upper,
        at_least=lower,
        at=at,
        exact=search.exact and upper == 0.0,
        domain=domain,
        relative=None,
        cells=search.cells,
        key=key,
    )
    if found.holds:
        return replace(found, relative=0.0 if found.exact else search.relative())
    if lower > limit:
        return replace(found, reason=f"differs by {lower:.3g} at y = {at:.9g}, more than {limit:.3g}")
    if search.undefined is not None:
        return replace(found, reason=f"is not defined at y = {_float(search.undefined):.9g}")
    where = "" if search.widest is None else f" on [{_float(search.widest[0]):.6g}, {_float(search.widest[1]):.6g}]"
    return replace(found, reason=f"{_NO_BOUND} {upper:.3g} was found{where} in {search.cells} cells")


@contextmanager
def _precision(bits: int) -> Iterator[None]:
    before = ctx.prec
    ctx.prec = bits
    try:
        yield
    finally:
        ctx.prec = before


class _Search:
    """Branch and bound on [-end, end].

    Attributes:
        lower: proved lower bound of the supremum; negative while there is none.
        at: where it is attained.
        exact: whether all that was proved so far was proved by algebra.
        cells: the cells looked at.
        widest: the cell with the largest upper bound, once the search ended without success.
        undefined: a number at which one of the functions is not defined, if one was met.
    """

    def __init__(self, original: Expression, rewritten: Expression, end: fmpq) -> None:
        self._a, self._b, self._end = original, rewritten, end
        self._parts = ordered(original, rewritten)
        self._bits = int(end.p).bit_length()
        self.lower = -1.0
        self.at: fmpq | None = None
        self.exact = True
        self.cells = 0
        self.widest: tuple[fmpq, fmpq] | None = None
        self.undefined: fmpq | None = None
        self._roots: set[fmpq] = set()
        self._slope = 0.0

    def run(self, limit: float) -> float:
        """An upper bound of the supremum, within `SLACK` of it; a lower bound as soon as that exceeds the limit."""
        pieces = list(self._pieces())
        if not pieces:
            return max((self._at_point(root) for root in sorted(self._roots)), default=0.0)
        self.exact = False
        for low, high in pieces:
            for y in _probes(low, high):
                self._probe(y)
                if self.lower > limit:
                    return self.lower
                if self.undefined is not None:
                    return math.inf
        upper = self._refined(sorted((-math.inf, low, high) for low, high in pieces), limit)
        return max([upper, *(self._at_point(root) for root in sorted(self._roots))])

    def _pieces(self) -> Iterator[tuple[fmpq, fmpq]]:
        """The pieces between kinks on which algebra does not prove that both functions are equal."""
        pending = [(-self._end, self._end)]
        while pending:
            low, high = pending.pop()
            try:
                equal = self._equal(low, high)
            except Kink as kink:
                self._roots.add(kink.at)
                pending += [(low, kink.at), (kink.at, high)]
                continue
            if not equal:
                yield low, high

    def _refined(self, heap: list[Cell], limit: float) -> float:
        while heap:
            upper, low, high = heap[0]
            if -upper <= limit and -upper <= max(SLACK * self.lower, FLOOR):
                return max(-upper, 0.0)
            if self.lower > limit:
                return self.lower
            middle = _middle(low, high)
            if self.cells > MOST_CELLS or middle in (low, high):
                self.widest = low, high
                return -upper
            self._split(heap, self._upper)
        return 0.0

    def _split(self, heap: list[Cell], upper: Callable[[fmpq, fmpq], float]) -> None:
        """Replace the cell with the largest upper bound by its halves, and these at kinks."""
        _, low, high = heapq.heappop(heap)
        middle = _middle(low, high)
        for first, last in ((low, middle), (middle, high)):
            try:
                pieces = [(-upper(first, last), first, last)]
            except Kink as kink:
                self._roots.add(kink.at)
                pieces = [(-math.inf, first, kink.at), (-math.inf, kink.at, last)]
            for piece in pieces:
                heapq.heappush(heap, piece)

    def _upper(self, low: fmpq, high: fmpq) -> float:
        """An upper bound on one cell; infinite where no arithmetic encloses it."""
        self.cells += 1
        try:
            upper = self._by_intervals(low, high)
        except Undecided:
            upper = math.inf
        near = high - low <= _WIDEST and max(abs(low), abs(high)) <= _FARTHEST
        if near and upper > max(self.lower * SLACK, FLOOR):
            with suppress(Undecided):
                upper = min(upper, self._by_series(low, high))
        return upper

    def _intervals(self, low: fmpq, high: fmpq) -> tuple[Intervals, Polynomial, Polynomial]:
        """The arithmetic, F_A, and F_B - F_A."""
        arithmetic = Intervals(low, high)
        found = Evaluation(self._parts, arithmetic, low, high)
        self._roots |= found.roots
        a, b = found.values[self._a], found.values[self._b]
        return arithmetic, a, arithmetic.add(b, arithmetic.neg(a))

    def _by_intervals(self, low: fmpq, high: fmpq) -> float:
        # Far out, 1 + erf(y) cancels to nothing, times a large y.
        far = max(abs(low), abs(high)) >= _FAR
        with _precision(256 + self._bits if far else _PRECISION):
            arithmetic, a, gap = self._intervals(low, high)
            upper = _quotient(_most(arithmetic.range(gap)), _least(arithmetic.range(a)))
            if (low > 0 or high < 0) and not upper < self.lower:
                # Both over y: the relative error of what grows like y.
                inverse = i_inverse(arithmetic.cell)
                size, scale = (_over_y(arithmetic, each, inverse) for each in (gap, a))
                if _least(scale) > 0:
                    upper = min(upper, _rounded_up(_most(size) / _least(scale)))
            return upper

    def _series(self, low: fmpq, high: fmpq) -> _Series:
        """Both functions around the centre of a cell, at the working precision of the caller."""
        centre, radius = arb((low + high) / 2), arb((high - low) / 2).upper()
        before = ctx.cap
        try:
            ctx.cap = _ORDER
            inner = Evaluation(self._parts, Taylor(centre), low, high)
            ctx.cap = _ORDER + 1
            outer = Evaluation(self._parts, Taylor(arb(centre.mid(), radius + centre.rad())), low, high)
            gap = inner.values[self._b] - inner.values[self._a]
            rest = outer.values[self._b] - outer.values[self._a]
        finally:
            ctx.cap = before
        self._roots |= outer.roots
        terms = (*(gap[k] for k in range(_ORDER)), rest[_ORDER])
        return _Series(terms, radius, inner.values[self._a][0], outer.values[self._a][0])

    def _by_series(self, low: fmpq, high: fmpq) -> float:
        with _precision(_PRECISION):
            found = self._series(low, high)
            if found.terms[0].is_finite() and found.at_centre.is_finite():
                self._found(abs(found.terms[0]) / largest(abs(found.at_centre).upper(), arb(1)), (low + high) / 2)
            upper, floor = found.most(), abs(found.on_cell).lower()
            return _quotient(upper, floor) if upper.is_finite() and floor.is_finite() else math.inf

    def _at_point(self, y: fmpq) -> float:
        """The same at a single number, where every condition is decided exactly."""
        self.cells += 1
        try:
            upper = 0.0 if self._equal(y, y) else self._measured(y)
        except Undecided:
            upper = math.inf
        self.exact = self.exact and upper == 0.0
        return upper

    def _probe(self, y: fmpq) -> None:
        """Raise the lower bound, if y does."""
        try:
            self._measured(y)
        except Undecided:
            self.undefined = y

    def _measured(self, y: fmpq) -> float:
        """An upper bound at a number, which may also raise the lower one."""
        with _precision(512 + self._bits):
            arithmetic, a, gap = self._intervals(y, y)
            size, scale = arithmetic.range(gap), arithmetic.range(a)
            self._found(_least(size) / largest(_most(scale), arb(1)), y)
            return _quotient(_most(size), _least(scale))

    def _found(self, share: arb, y: fmpq) -> None:
        lower = float(low_end(share))
        if lower > self.lower:
            self.lower, self.at = lower, y

    def _equal(self, low: fmpq, high: fmpq) -> bool:
        """Whether algebra proves both equal on a piece, on which neither has a pole. Raises Kink."""
        lines: Evaluation[None] = Evaluation(self._parts, None, low, high)
        self._roots |= lines.roots
        rates = set()
        for part in self._parts:
            inner = lines.lines[part.operands[0]] if part.operator in ("exp", "sigmoid", "tanh", "softplus") else None
            if inner is not None and inner[0] != 0:
                rates.add(abs(inner[0]) * (2 if part.operator == "tanh" else 1))
        algebra = Algebra(min(rates) if rates else None)
        try:
            found = Evaluation(self._parts, algebra, low, high)
            if not algebra.equal(found.values[self._a], found.values[self._b]):
                return False
        except Undecided:
            return False
        return self._without_poles(low, high)

    def _without_poles(self, low: fmpq, high: fmpq) -> bool:
        pending, seen = [(low, high)], 0
        while pending:
            first, last = pending.pop()
            seen += 1
            try:
                with _precision(_PRECISION):
                    self._intervals(first, last)
            except Undecided:
                middle = _middle(first, last)
                if seen > _MOST_COVER or middle in (first, last):
                    return False
                pending += [(first, middle), (middle, last)]
        return True

    def relative(self) -> float | None:
        """An upper bound of |F_B - F_A| / |y|, within a factor 2 where that is cheap; None where there is none."""
        if not self._meet_at_zero():
            return None
        heap: list[Cell] = [(-math.inf, -self._end, self._end)]
        for _ in range(min(_MOST_RELATIVE, _MOST_PARTS // len(self._parts))):
            upper, low, high = heap[0]
            if -upper <= max(2.0 * self._slope, FLOOR) or _middle(low, high) in (low, high):
                break
            self._split(heap, self._relative_on)
        return -heap[0][0] if math.isfinite(heap[0][0]) else None

    def _meet_at_zero(self) -> bool:
        """Whether both are proved to have the same value at 0."""
        zero = fmpq(0)
        try:
            if self._equal(zero, zero):
                return True
            with _precision(_PRECISION):
                arithmetic, _, gap = self._intervals(zero, zero)
                return bool(_most(arithmetic.range(gap)) == 0)
        except Undecided:
            return False

    def _relative_on(self, low: fmpq, high: fmpq) -> float:
        """An upper bound of |F_B - F_A| / |y| on a cell, which may also raise the lower one; both are equal at 0."""
        nearest = max(low, -high, fmpq(0))
        upper, lower = math.inf, 0.0
        far = max(abs(low), abs(high)) >= _FAR
        with _precision(256 + self._bits if far else _PRECISION):
            with suppress(Undecided):
                arithmetic, _, gap = self._intervals(low, high)
                if nearest > 0:
                    size = _over_y(arithmetic, gap, i_inverse(arithmetic.cell))
                    upper, lower = _rounded_up(_most(size)), float(_least(size))
                elif gap[0][0] == 0 and gap[0][1] == 0:
                    upper = _rounded_up(_most(arithmetic.range(gap[1:] or [(NOTHING, NOTHING)])))
            if high - low <= _WIDEST and max(abs(low), abs(high)) <= _FARTHEST and upper > 2.0 * lower:
                with suppress(Undecided):
                    found = self._series(low, high)
                    # Next to 0, by the mean value theorem: as much as the derivative at most.
                    most = found.most() / arb(nearest) if nearest > 0 else found.steepest()
                    upper = min(upper, _rounded_up(most))
                    if found.terms[0].is_finite() and low + high != 0:
                        share = abs(found.terms[0]) / abs(arb((low + high) / 2))
                        lower = max(lower, float(low_end(share)))
        self._slope = max(self._slope, lower)
        return upper


@dataclass(frozen=True)
class _Series:
    """F_B - F_A on a cell, as sum terms[k] (y - centre)^k; the last coefficient is that of the remainder.

    Attributes:
        terms: the coefficients.
        radius: half the width of the cell.
        at_centre: F_A at the centre.
        on_cell: F_A on the cell.
    """

    terms: tuple[arb, ...]
    radius: arb
    at_centre: arb
    on_cell: arb

    def most(self) -> arb:
        """An upper bound of its magnitude."""
        return sum((abs(term) * self.radius**k for k, term in enumerate(self.terms)), arb(0)).upper()

    def steepest(self) -> arb:
        """An upper bound of the magnitude of its derivative."""
        slopes = (k * abs(term) * self.radius ** (k - 1) for k, term in enumerate(self.terms) if k)
        return sum(slopes, arb(0)).upper()


def _most(values: Interval) -> arb:
    """The largest magnitude."""
    return largest(abs(values[0]), abs(values[1])).upper()


def _least(values: Interval) -> arb:
    """The smallest magnitude."""
    return values[0] if values[0] > 0 else -values[1] if values[1] < 0 else NOTHING


def _float(number: fmpq) -> float:
    """The nearest finite float: 2^1024, the end of float64, is none."""
    try:
        return float(number)
    except OverflowError:
        return sys.float_info.max if number > 0 else -sys.float_info.max


def _rounded_up(number: arb) -> float:
    """A float that is at least as large; infinite where there is none."""
    upper = number.upper()
    found = float(upper) if number.is_finite() else math.inf
    return 0.0 if upper == 0 else math.nextafter(found, math.inf)


def _quotient(size: arb, scale: arb) -> float:
    """size / max(1, scale), rounded up."""
    return _rounded_up(size / largest(scale, arb(1)))


def _over_y(arithmetic: Intervals, values: Polynomial, inverse: Interval) -> Interval:
    return arithmetic.range(arithmetic.add([i_mul(values[0], inverse)], values[1:] or [(NOTHING, NOTHING)]))


def _probes(low: fmpq, high: fmpq) -> Iterator[fmpq]:
    """Some 500 numbers of a piece: a wrong function is usually refuted by one of them, before any cell is enclosed."""
    grid = [fmpq(k, 16) for k in range(-160, 161)]
    powers = [sign * fmpq(2) ** k for k in range(-44, 120, 3) for sign in (1, -1)]
    yield from (y for y in (*grid, *powers, low, high) if low <= y <= high)


def _middle(low: fmpq, high: fmpq) -> fmpq:
    """Where to split a cell: at 0, halfway between the exponents of a wide tail, or in the middle."""
    if low < 0 < high:
        return fmpq(0)
    if low < 0:
        return -_middle(-high, -low)
    if low >= 1 and high > 4 * low:
        split = fmpq(2) ** ((_exponent(low) + _exponent(high)) // 2)
        if low < split < high:
            return split
    return (low + high) / 2


def _exponent(number: fmpq) -> int:
    return int(number.p // number.q).bit_length()
