"""What operators compute with: residues modulo a prime (`Field`), or float64 (`Floats`).

Both have the same methods on arrays of entries. In the field, linear algebra is exact, and a nonlinear function is a
random oracle: a keyed hash of its operand with those laws of the real function that exporters and optimisers use, which
docs/proof.md lists.
"""

import dataclasses
import hashlib
import itertools
import math
import secrets
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from functools import cache, cached_property, partial, wraps
from typing import Any

import numpy as np

from rewriter.arrays import Array, distinct
from rewriter.errors import RewriteError

_U64 = np.uint64
_LOWEST_EXPONENT, _HIGHEST_EXPONENT = -1200, 1200
_MAX_TERMS = 2**18  # sums of more products of 16-bit limbs are not exact in float64
_MOST_TERMS, _PART = 2**13, 2**18
"""Products of halves whose sum is exact in float64; and entries of a weight that are split at once."""
_CACHED = 2**15  # entries that are computed with at once
_FEW = 32  # numbers that are inverted one by one
_HALF_BITS = 15  # of the exponent of a square
_MAX_KNOWN = 2**26  # entries of all products that are remembered
_SHORT = 2.0**64  # numbers that float32 multiplies without overflow
FARTHEST, UNREACHED = 2.0**59, 1e15
"""Bounds of a Clip beyond which no value is taken to be, since a coin would hide what heads read, which clip there; and
the same where constants are read as the numbers they are rounded from."""
FAR, MANY, INFINITE = 2**20, 2**10, 2**40
"""The counts of masking constants in an entry that one below every score masks, after scaling at least, and in one that
is -infinity."""


class Unsupported(RewriteError):  # noqa: N818 - says what the graph is
    """The evaluation cannot go on: an operator without a definition, or data that decides a shape."""


class Value:
    """A tensor of entries that depend on data: int64 residues, or float64."""

    __slots__ = ("constant", "entries", "grid", "masks", "ndim", "origin", "shape", "size", "whole")

    def __init__(
        self, entries: Array, masks: Array | None = None, origin: Any = None, *, whole: bool = False, grid: Any = None
    ) -> None:
        """`whole`: it holds integers. `grid`: see `rewriter.evaluate.quantised`."""
        self.entries, self.whole, self.grid = entries, whole, grid
        self.shape, self.ndim, self.size = entries.shape, entries.ndim, entries.size
        # How many masking constants each entry contains; None for none at all.
        self.masks = np.broadcast_to(masks, entries.shape) if masks is not None and np.any(masks) else None
        # How it was computed, for a softmax that is spelled out: ("exp", x), ("sumexp", x, axes, keepdims), ...
        self.origin = origin
        self.constant: Array | None = None  # in the arithmetic of the reals, what the runtime makes of constants alone


def is_float(value: Any) -> bool:
    """Whether a tensor holds floating-point numbers, or entries that depend on data."""
    if not isinstance(value, np.ndarray):
        return isinstance(value, Value)
    return value.dtype.kind == "f" or (value.dtype.kind == "V" and "float" in value.dtype.name)


_FACTS: dict[int, tuple[weakref.ref[Array], dict[str, Any]]] = {}
"""By id, arrays that never change, with what is known of them."""


def unchanging(table: Array, facts: dict[str, Any]) -> Array:
    """The array, which never changes; `facts` caches its digest and its ends, and may outlive it."""
    place = id(table)
    _FACTS[place] = weakref.ref(table, lambda _: _FACTS.pop(place, None)), facts
    return table


def _fact(table: Array, name: str, find: Callable[[Array], Any]) -> Any:
    known, facts = _FACTS.get(id(table), (lambda: None, {}))
    facts = facts if known() is table else {}
    if name not in facts:
        facts[name] = find(table)
    return facts[name]


def content(table: Array) -> bytes:
    """A digest of a table's numbers, or text; narrow floats count as float32."""
    return bytes(_fact(table, "content", _digest))


def _digest(table: Array) -> bytes:
    same = table.astype(np.float32) if is_float(table) and table.dtype.itemsize < 4 else table
    digest = hashlib.sha256(f"{same.dtype}{same.shape}".encode())
    text = same.dtype.kind in "OUS"  # all of it: numpy shortens a long array
    digest.update(repr(same.tolist()).encode() if text else np.ascontiguousarray(same).reshape(-1).view(np.uint8).data)
    return digest.digest()


def ends(table: Array) -> tuple[float, float]:
    """The smallest and the largest of a table's numbers and 0."""
    found: tuple[float, float] = _fact(table, "ends", lambda x: (float(x.min(initial=0)), float(x.max(initial=0))))
    return found


# -- residues --------------------------------------------------------------------------------------------------------


def draw_prime() -> int:
    """A random prime between 2^30 and 2^31 modulo which 2, 3, 5, ... 23 have square roots, and -1 has none."""
    from flint import fmpz

    while True:
        p, step = 23, 24  # modulo which 2 and 3 are squares; by reciprocity, the residue of p decides for the others
        for q in (5, 7, 11, 13, 17, 19, 23):
            root = 1 if q % 4 == 1 else q - 1
            p = secrets.choice([each for each in range(p, p + step * q, step) if pow(each, q // 2, q) == root])
            step *= q
        p += step * secrets.randbelow(3)
        if 2**30 < p < 2**31 and fmpz(p).is_prime():
            return p


Product = tuple[float, str, Callable[["Field"], int]]
"""A positive number that constants are rounded from: its value, spelling and residue."""


@cache
def _known_numbers() -> list[tuple[float, str, Fraction, int, Fraction | str]]:
    """Numbers that constants are rounded from, in order: value, spelling, factor, and how many roots of what."""
    one = Fraction(1)
    found: dict[float, tuple[str, Fraction, int, Fraction | str]] = {}
    for a, b in itertools.product(range(1, 65), repeat=2):
        found.setdefault(a / b, (f"{a}/{b}", one, 0, Fraction(a, b)))
    for n in range(2, 4097):
        found.setdefault(math.sqrt(n), (f"sqrt({n})", one, 1, Fraction(n)))
        found.setdefault(1 / math.sqrt(n), (f"1/sqrt({n})", one, 1, Fraction(1, n)))
        found.setdefault(2 / math.sqrt(n), (f"2/sqrt({n})", Fraction(2), 1, Fraction(1, n)))
        if n <= 1024:
            found.setdefault(n**0.25, (f"{n}^(1/4)", one, 2, Fraction(n)))
            found.setdefault(n**-0.25, (f"{n}^(-1/4)", one, 2, Fraction(1, n)))
    for text, value in {"sqrt(2/pi)": math.sqrt(2 / math.pi), "pi": math.pi, "ln 2": math.log(2)}.items():
        for factor in ("1", "2", "0.5", "0.044715", "0.08943"):
            found.setdefault(value * float(factor), (f"{factor} {text}", Fraction(factor), 0, text))
    return sorted((value, *rest) for value, rest in found.items())


def _is_short(value: float) -> bool:
    return not math.isfinite(value) or value == 0 or (value < 4096 and float(value * 4096).is_integer())


def known_number(value: float, size: int) -> tuple[float, str, Fraction, int, Fraction | str] | None:
    """The number that a positive constant of so many bytes is rounded from, as `_known_numbers`; None for any other."""
    ulp, numbers = value * {8: 4e-16, 4: 1.2e-7}.get(size, 1e-3), _known_numbers()
    place = bisect_left(numbers, (value,))
    near = [each for each in numbers[max(place - 1, 0) : place + 1] if abs(each[0] - value) <= ulp]
    if _is_short(value) or not near:
        return None
    return min(near, key=lambda each: (len(each[1]), abs(each[0] - value)))


_Of = Callable[..., Array]


def _powers(base: int, count: int, p: int) -> Array:
    powers = np.ones(1, np.int64)
    while powers.size < count:
        powers = np.append(powers, powers * pow(base, powers.size, p) % p)
    return powers[:count]


def _in_parts(compute: _Of) -> _Of:
    """Compute entry by entry, in parts that a cache of the processor holds, because large temporaries cost most."""

    @wraps(compute)
    def computed(self: Any, *operands: Any) -> Array:
        shapes = {each.shape for each in operands if isinstance(each, np.ndarray)}
        if len(shapes) != 1 or (size := math.prod(*shapes)) <= _CACHED:
            return np.asarray(compute(self, *operands))
        flat = [each.reshape(-1) if isinstance(each, np.ndarray) else each for each in operands]
        parts = (slice(start, start + _CACHED) for start in range(0, size, _CACHED))
        made = [compute(self, *(x[part] if isinstance(x, np.ndarray) else x for x in flat)) for part in parts]
        return np.concatenate(made).reshape(*shapes)

    return computed


class Exact:
    """Functions that fields and expressions compose from arithmetic and the exponential."""

    @_in_parts
    def power(self: Any, a: Array, exponent: int) -> Any:
        if exponent < 2:
            return a if exponent else self.add(1, self.mul(0, a))
        root = self.power(a, exponent // 2)
        squared = self.mul(root, root)
        return self.mul(squared, a) if exponent % 2 else squared

    def expm1(self: Any, a: Array) -> Any:
        return self.sub(self.exp(a), 1)

    def sigmoid(self: Any, a: Array) -> Any:
        return self.inv(self.add(1, self.exp(self.neg(a))))

    def tanh(self: Any, a: Array) -> Any:
        return self.sub(self.mul(2, self.sigmoid(self.mul(2, a))), 1)


@dataclasses.dataclass
class Noted:
    """What decides in a node that is evaluated in a field."""

    # Fingerprints of what a sign was taken of, up to a factor, an order and a shape, and with the factor.
    conditions: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    # Signs that were taken: how many different ones at once, -1 for a root of others than squares, and of which shape.
    coins: list[tuple[float, tuple[int, ...]]] = dataclasses.field(default_factory=list)
    signed: list[Array] = dataclasses.field(default_factory=list)  # of what
    joint: bool = False  # whether equal entries were combined, such as zeros, so that signs may decide together
    # How far masked scores are below the first of their row, and whether a score may be larger than the mask.
    gaps: set[tuple[int, bool]] = dataclasses.field(default_factory=set)
    near: bool = False  # whether a mask decided that a number may exceed


class Field(Exact):
    """Arithmetic modulo a prime, which is 7 modulo 8, on int64 arrays, with oracles under a key."""

    reads_masks = True  # large negative numbers are masks; else entries are numbers, which may decide shapes

    def __init__(
        self, p: "int | Modulus", key: bytes, *, snaps: bool = False, products: Sequence[Product] = (),
        low: float = -200.0,
    ) -> None:  # fmt: skip
        """Of fields of one `Modulus`, weights are lifted once; the key is secret: no file can be built against it.

        With `snaps`, a scalar constant that is a rounded sqrt(2), 1/3 or the like is that number; `products` are more
        of them, in order. Constants of at most `low` count as masking constants.
        """
        self._products = products
        self.modulus = Modulus(p) if isinstance(p, int) else p
        self.p, self.key, self.snaps, self.low = self.modulus.p, key, snaps, low
        self.farthest = UNREACHED if snaps else FARTHEST
        digest = partial(hashlib.blake2b, digest_size=24, key=key)
        self._words = cache(lambda name: np.frombuffer(digest(repr(name).encode()).digest(), "<u8"))
        self.noted = Noted()  # of the node that is evaluated
        # A sign is a coin in the field. Of `settled` ones, masks decide a part; those of `zeroed` are taken for 0.
        self.settled: set[int] = set()
        self.zeroed: set[int] = set()
        self.watched = False  # whether to note what signs were taken of
        self.snapped: dict[float, str] = {}  # constants, and the numbers that they are rounded from
        self._known: dict[tuple[float, int], tuple[int, str] | None] = {}
        self._infinity = int(self.function("infinity", np.array(1)))

    # arithmetic
    def reduced(self, a: Array, p: int = 0) -> Array:
        """Numbers of any size (int64) modulo p, by default the prime."""
        whole = np.floor_divide(a, p or self.p, out=np.empty(np.shape(a), np.int64))
        whole *= p or self.p
        return np.subtract(a, whole, out=whole)

    # Large temporaries cost more than what is computed.
    def add(self, a: Any, b: Any) -> Array:
        return self._wrapped(np.asarray(a + b) - self.p)

    def sub(self, a: Any, b: Any) -> Array:
        return self._wrapped(np.asarray(a - b))

    def mul(self, a: Any, b: Any) -> Array:
        return self.reduced(a * b)

    def div(self, a: Array, b: Array) -> Array:
        return self.mul(a, self.inv(b))

    def neg(self, a: Array) -> Array:
        return self._wrapped(-np.asarray(a))

    def _wrapped(self, a: Any) -> Array:
        """Entries between -p and p modulo p."""
        more = np.right_shift(a, 63, dtype=np.int64)
        more &= self.p
        more += a
        return np.asarray(more)

    @_in_parts
    def inv(self, a: Array) -> Array:
        """1 / a, and an unknown number for 0."""
        a = np.asarray(a, np.int64)
        return np.where(a == 0, self._infinity, self._inverses(np.where(a == 0, 1, a).reshape(-1)).reshape(a.shape))

    def _inverses(self, a: Array) -> Array:
        """Those of two numbers follow from that of their product."""
        if a.size <= _FEW:
            return np.array([pow(each, -1, self.p) for each in a.tolist()], np.int64)
        pairs = np.append(a, np.ones(a.size % 2, np.int64)).reshape(2, -1)
        return self.mul(self._inverses(self.mul(*pairs)), pairs[::-1]).reshape(-1)[: a.size]

    def sqrt(self, a: Array) -> Array:
        root = self.power(np.asarray(a, np.int64), (self.p + 1) // 4)
        if (self.mul(root, root) == a).all():
            self.counted(root)  # that of squares is an absolute value, whose sign is a coin
        else:
            self.noted.coins.append((-1, np.shape(a)))
        return root

    def sign(self, a: Array) -> Array:
        """The Legendre symbol as -1, 0 or 1."""
        self._note(np.asarray(a, np.int64))
        symbol = self.power(np.asarray(a, np.int64), (self.p - 1) // 2)
        return np.where(symbol > 1, -1, symbol) * int(self._last not in self.zeroed)

    def choose(self, a: Array, b: Array, c: Array) -> Array:
        return np.asarray(np.where(self.sign(a) >= 0, b, c))

    def vanishes(self, a: Array) -> Array:
        """Whether entries are 0: a coin of each, since what may be 0, such as a mask, never is at random residues."""
        self._note(np.asarray(a, np.int64))
        return np.asarray((a == 0) | (self.hash64("zero", np.minimum(a, self.neg(a))) % _U64(2) == 0))

    def masks_decide(self, more: Array) -> Array:
        """What the masks of both sides of the last condition decide, as a sign; 0 where they have as many."""
        if more.any():
            self.settled.add(self._last)
        self.note_near(more)
        return -np.sign(more)

    def note_near(self, masks: Array) -> None:
        self.noted.near |= bool(((masks != 0) & (np.abs(masks) < MANY)).any())

    def note_masked(self, gaps: Array, masks: Array) -> None:
        """Note how far numbers that weigh nothing are below others, and how many masking constants more they have."""
        for near in (False, True):
            found = distinct(gaps[((masks < MANY) == near) & (masks > 0) & (masks < INFINITE)])
            self.noted.gaps.update((each, near) for each in found.tolist())
            self.noted.near |= near and found.size > 0

    def _note(self, a: Array) -> None:
        """Note a condition, divided by the sum of its entries: the same for any factor."""
        entries = self.counted(a)
        magnitudes = np.minimum(entries, self.neg(entries))
        exact, scale = self._print(magnitudes), self.reduced(entries.sum())
        shared = entries.size > 1 and scale  # the sign of a single number is the same wherever that is
        self._last = self._print(self.mul(entries, self.inv(scale)) if shared else magnitudes)
        if entries.size:
            self.noted.conditions.add((self._last, exact))

    def counted(self, a: Array) -> Array:
        """The different entries of which signs are taken."""
        entries = distinct(a)
        if entries.size:
            self.noted.coins.append((entries.size, np.shape(a)))
        if self.watched and not self.noted.signed:  # later ones may be of bounds that the first one chose
            self.noted.signed.append(a)
        return entries

    def _print(self, entries: Array) -> int:
        return int(self.hash64("condition", entries).sum(dtype=_U64))

    def positive(self, a: Array) -> Array:
        """max(a, 0), which is not a condition where it is `a`."""
        if (self.power(a, (self.p - 1) // 2) <= 1).all():
            self.counted(a)
            return a
        return np.where(self.sign(a) > 0, a, 0)

    def maximum(self, a: Array, b: Array) -> Array:
        return np.where(self.sign(self.sub(a, b)) > 0, a, b)

    def minimum(self, a: Array, b: Array) -> Array:
        return np.where(self.sign(self.sub(a, b)) > 0, b, a)

    def rational(self, number: float | Fraction) -> Any:
        exact = Fraction(number)
        return exact.numerator * pow(exact.denominator, -1, self.p) % self.p

    def total(self, a: Array, axes: Any, *, keepdims: bool) -> Array:
        """The sum of up to 2^32 entries."""
        return self.reduced(a.sum(axis=axes, keepdims=keepdims))

    # oracles
    @_in_parts
    def hash64(self, name: object, *operands: Array) -> Array:
        """A keyed hash of 64 bits, entry by entry."""
        mixed, factor, added = self._words(name)
        with np.errstate(over="ignore"):
            for operand in operands:
                entries = np.array(operand, _U64)
                entries *= factor | _U64(1)
                entries += added
                mixed = mix(entries ^ mixed)
            return mix(mixed ^ added)

    @_in_parts
    def _drawn(self, count: int, name: object, *operands: Array) -> Array:
        """One of some numbers, entry by entry."""
        return self.reduced((np.asarray(self.hash64(name, *operands)) >> _U64(1)).astype(np.int64), count)

    def function(self, name: object, *operands: Array) -> Array:
        """A function of which nothing is known."""
        return self._drawn(self.p, name, *operands)

    def odd(self, name: str, a: Array) -> Array:
        value = self.even(name, a)
        return np.where(a == 0, 0, np.where(a > self.p // 2, self.neg(value), value))

    def even(self, name: str, a: Array) -> Array:
        return self.function(name, np.minimum(a, self.neg(a)))

    @_in_parts
    def exp(self, a: Array) -> Array:
        """A random power of a generator of the squares, which has a root; that of -a is its inverse."""
        order, (low, high) = self.p // 2, self.modulus.squares
        power = self._drawn(order, "exp", np.minimum(a, self.neg(a)))
        power = np.where(a > order, order - power, power) * (a != 0)
        return self.mul(high[power >> _HALF_BITS], low[power & (2**_HALF_BITS - 1)])

    def log(self, a: Array) -> Array:
        inverse = self.inv(a)
        value = self.function("log", np.minimum(a, inverse))
        return np.where(a == 1, 0, np.where(a <= inverse, value, self.neg(value)))

    def softplus(self, a: Array) -> Array:
        return self.log(self.add(1, self.exp(a)))

    def order(self, a: Array) -> Array:
        """What entries are sorted by: an order that is the same for equal entries, and means nothing else."""
        self._note(np.asarray(a, np.int64))
        return self.hash64("order", a)

    def anchor(self, a: Array) -> Array:
        """What a softmax over the last axis subtracts."""
        return a[..., :1]

    # constants
    def _snapped(self, value: float, dtype: np.dtype[Any]) -> int | None:
        """The residue of the number that a scalar constant is rounded from; None where it is what its bits say."""
        key = abs(value), dtype.itemsize  # a cache of a method would keep the field, and the products of its modulus
        found = self._known[key] if key in self._known else self._known.setdefault(key, self._near(*key))
        if found is None:
            return None
        self.snapped[value] = found[1]
        return found[0] if value > 0 else (self.p - found[0]) % self.p

    def _near(self, value: float, size: int) -> tuple[int, str] | None:
        if _is_short(value) or value >= -self.low:
            return None
        ulp = value * {8: 4e-16, 4: 1.2e-7}.get(size, 1e-3)
        if (known := known_number(value, size)) is not None:
            _, text, factor, roots, base = known
            residue = int(self.function(base, np.array(7))) if isinstance(base, str) else self.rational(base)
            return self.rational(factor) * pow(residue, ((self.p + 1) // 4) ** roots, self.p) % self.p, text
        place = bisect_left(self._products, value - 2 * ulp, key=lambda each: each[0])
        if size >= 4 and place < len(self._products) and self._products[place][0] <= value + 2 * ulp:
            _, text, residue_of = self._products[place]
            return residue_of(self), text
        text = str({8: np.float64, 4: np.float32}.get(size, np.float16)(value))
        if "inf" not in text and len(Decimal(text).as_tuple().digits) <= 6:
            return self.rational(Fraction(Decimal(text))), text
        return None

    def lift(self, x: Any, *, scalar: bool = True) -> Value:
        """An array of numbers as residues: integers, and floats as the dyadic rationals that their bits say."""
        if isinstance(x, Value):
            return x
        x = np.asarray(x)
        if x.dtype.kind in "biu" or x.dtype.name.startswith(("int", "uint")):
            return Value(np.mod(x.astype(np.int64), self.p), whole=True)
        if scalar and self.snaps and x.size and (x.size == 1 or (x.size < 10**5 and (x == x.flat[0]).all())):
            residue = self._snapped(float(x.flat[0]), x.dtype)
            if residue is not None:
                return Value(np.full(x.shape, residue, np.int64))
        x = x.astype(np.float64)
        low, odd = x <= self.low, ~np.isfinite(x)
        fraction, exponent = np.frexp(np.where(odd, 0, x))
        digits = self.reduced((fraction * 2.0**53).astype(np.int64))
        entries = self.mul(digits, self.modulus.powers[exponent.astype(np.int64) - 53 - _LOWEST_EXPONENT])
        if odd.any():
            signed = np.where(x > 0, self._infinity, self.p - self._infinity)
            entries = np.where(np.isnan(x), self._infinity // 2, np.where(odd, signed, entries))
        if not low.any():
            return Value(entries)
        counts = np.where(np.isneginf(x), INFINITE, np.where(x <= -FARTHEST, FAR, 1))
        return Value(entries, np.where(low, counts, 0))

    # products
    def matmul(self, a: Any, b: Any) -> Array:
        """a @ b of Values or numbers with two axes or more."""
        left = self.lift(a, scalar=False).entries
        return self.product(left, b.entries) if isinstance(b, Value) else self.modulus.weighted(self, left, b)

    def product(self, a: Array, b: Array, multiply: _Of = np.matmul, count: int | None = None) -> Array:
        """a @ b of residues, or other sums of `count` products; `multiply` makes those of limbs, in float64."""
        if (a.shape[-1] if count is None else count) > _MAX_TERMS:
            raise Unsupported("a sum of more than 2^18 products")
        return self._summed(*map(multiply, _limbs(a), _limbs(b)))

    @_in_parts
    def _summed(self, high: Array, low: Array, middle: Array) -> Array:
        """The sum of products of the high limbs, of the low ones, and of the sums of both."""
        whole = middle - low
        whole -= high
        highs, middles, lows = (self.reduced(each.astype(np.int64)) for each in (high, whole, low))
        return self.reduced(self.reduced((self.reduced(highs << 16) + middles) << 16) + lows)


class Modulus:
    """A prime, with what fields of it share: powers of 2, and products with weights, which both models have."""

    def __init__(self, p: int | None = None) -> None:
        self.p = p = p or draw_prime()
        lowest, count = pow(2, _LOWEST_EXPONENT, p), _HIGHEST_EXPONENT - _LOWEST_EXPONENT
        self.powers = lowest * _powers(2, count, p) % p
        self.known: dict[tuple[bytes, bytes], Array] = {}
        self._room = _MAX_KNOWN

    @cached_property
    def squares(self) -> tuple[Array, Array]:
        """Powers of a generator of the squares, and those of its power 2^15: a product of two is any square."""
        from flint import fmpz

        order, half = self.p // 2, 2**_HALF_BITS
        parts = [order // int(prime) for prime, _ in fmpz(order).factor()]
        found = next(x for x in range(4, self.p) if all(pow(x * x, part, self.p) > 1 for part in parts))
        root = found * found % self.p
        return _powers(root, half, self.p), _powers(pow(root, half, self.p), half, self.p)

    def weighted(self, field: Field, entries: Array, weight: Array) -> Array:
        """Entries @ a weight; from memory, where both were multiplied before."""
        key = content(weight), content(entries)
        if key in self.known:
            return self.known[key].astype(np.int64)
        (made,) = _weighted([(field, entries)], weight)
        self.keep(key, made)
        return made

    def keep(self, key: tuple[bytes, bytes], made: Array) -> None:
        self._room -= made.size
        if self._room > 0:
            self.known[key] = made.astype(np.uint32)


def multiply(products: "Iterable[tuple[Arithmetic, Any, Any]]") -> None:
    """Multiply entries in several fields by a weight that is split once, for `Modulus.weighted` to find."""
    # By content of the weight, which may depend on a size.
    new = dict[bytes, tuple[Array, dict[tuple[Modulus, bytes], tuple[Field, Array]]]]()
    for field, x, weight in products:
        if not (isinstance(field, Field) and isinstance(x, Value) and isinstance(weight, np.ndarray)):
            continue
        if x.ndim > 1 and weight.ndim == 2 and x.shape[-1] == len(weight):
            key, entries = content(weight), content(x.entries)
            if (key, entries) not in field.modulus.known:
                new.setdefault(key, (weight, {}))[1][field.modulus, entries] = field, x.entries
    for key, (weight, group) in new.items():
        for (modulus, entries), made in zip(group, _weighted([*group.values()], weight), strict=True):
            modulus.keep((key, entries), made)


def _weighted(operands: Sequence[tuple[Field, Array]], weight: Array) -> list[Array]:
    """Entries [..., N, K] in several fields @ a weight [..., K, M], of which a part is read at a time."""
    *lead, terms, count = weight.shape
    top = max(ends(weight), key=abs) if is_float(weight) else np.inf
    # Times 2^scale, entries of 24 bits are integers up to 2^51; integers, infinities and NaN have no scale.
    scale = min(51 - math.frexp(top)[1], 1000) if np.isfinite(top) else None
    step = max(_PART // max(min(terms, _MOST_TERMS), 1), 1)
    flat = [(f, x if lead else x.reshape(math.prod(x.shape[:-1]), terms)) for f, x in operands]
    shapes = ((*np.broadcast_shapes(x.shape[:-2], tuple(lead)), x.shape[-2], count) for _, x in flat)
    made = [np.zeros(shape, np.int64) for shape in shapes]
    for start, row in itertools.product(range(0, count, step), range(0, terms, _MOST_TERMS)):
        columns, rows = slice(start, start + step), slice(row, row + _MOST_TERMS)
        parts = _by_part([(f, x[..., rows]) for f, x in flat], weight[..., rows, columns], scale)
        for sums, part in zip(made, parts, strict=True):
            sums[..., columns] += part
    powers = [field.modulus.powers[-(scale or 0) - _LOWEST_EXPONENT] for field, _ in operands]
    scaled = [f.mul(f.reduced(sums), power) for (f, _), sums, power in zip(operands, made, powers, strict=True)]
    return scaled if lead else [y.reshape(*x.shape[:-1], count) for (_, x), y in zip(operands, scaled, strict=True)]


def _by_part(operands: Sequence[tuple[Field, Array]], part: Array, scale: int | None) -> Iterator[Array]:
    """Entries of each field @ a part of a weight times 2^scale, of which the halves are the same in all fields."""
    if scale is not None:
        low = part.astype(np.float64)
        low *= 2.0 ** (scale - 26)
        high = np.rint(low)
        low -= high
        fine = low.any(tuple(range(low.ndim - 1)))  # few columns, where weights are rounded to bfloat16
        low = low[..., slice(None) if fine.all() else fine]
        low *= 2.0**26
    if scale is None or (np.rint(low) != low).any():
        for field, entries in operands:
            power = field.modulus.powers[(scale or 0) - _LOWEST_EXPONENT]
            yield field.product(entries, field.mul(field.lift(part, scalar=False).entries, power))
        return
    rows = np.concatenate([entries for _, entries in operands], -2)
    upper = (rows + 2**15) >> 16
    halves = np.concatenate([upper, rows - (upper << 16)], -2).astype(np.float64)
    ends = np.cumsum([entries.shape[-2] for _, entries in operands])[:-1]
    upper = (halves @ high).astype(np.int64)
    lower = np.zeros_like(upper)
    lower[..., fine] = halves @ low
    parts = [np.split(each, ends, -2) for both in (upper, lower) for each in np.split(both, 2, -2)]
    for (field, _), a, b, c, d in zip(operands, *parts, strict=True):  # products below 2^53
        upper = field.reduced((field.reduced(a) << 16) + b)
        yield field.reduced((upper << 26) + (field.reduced(c) << 16) + d)


def mix(h: Array) -> Array:
    """The finaliser of splitmix64, a bijection of 64-bit words."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        mixed = h >> _U64(shift)
        mixed ^= h
        mixed *= _U64(factor)
        h = mixed
    return np.asarray(h)


def _limbs(entries: Array) -> Sequence[Array]:
    """The upper and the lower half of the bits, and the sum of both, in the type of products."""
    high, low = (entries >> 16).astype(np.float64), (entries & 0xFFFF).astype(np.float64)
    return high, low, high + low


# -- float64 ---------------------------------------------------------------------------------------------------------


def each(function: Callable[[float], float], x: Array) -> Array:
    """A function, entry by entry; nearly twice as fast as numpy.vectorize."""
    return np.fromiter(map(function, np.asarray(x).flat), np.float64, np.size(x)).reshape(np.shape(x))


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), with a small relative error on both tails."""
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, small) / (1.0 + small)  # exp of a non-positive number cannot overflow


def softplus(x: Array) -> Array:
    """log(1 + exp(x)) without overflow."""
    return np.asarray(np.logaddexp(0.0, x))


_NUMPY: Mapping[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative, "div": np.true_divide,
    "inv": lambda a: np.true_divide(1.0, a), "power": np.power, "sqrt": np.sqrt, "sign": np.sign,
    "exp": np.exp, "expm1": np.expm1, "log": np.log, "tanh": np.tanh, "softplus": softplus, "sigmoid": sigmoid,
    "maximum": np.maximum, "minimum": np.minimum, "positive": lambda a: np.maximum(a, 0.0),
    "choose": lambda a, b, c: np.where(a >= 0, b, c),
    "product": lambda a, b, multiply, _count: multiply(a, b),
    "reduced": np.asarray, "order": np.asarray, "rational": float, "total": np.sum,
    "vanishes": np.logical_not, "masks_decide": lambda more: -np.sign(more),
    "note_masked": lambda *_: None, "note_near": lambda *_: None,
    "anchor": lambda a: a.max(-1, keepdims=True, initial=-np.inf),
    "erf": lambda x: each(math.erf, x),
    "sin": np.sin, "cos": np.cos, "tan": np.tan, "sinh": np.sinh, "cosh": np.cosh, "asin": np.arcsin, "acos": np.arccos,
    "atan": np.arctan, "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh,
    "pow": np.power, "floor": np.floor, "ceil": np.ceil, "round": np.rint, "truncated": np.trunc,
    "clamp": lambda x, low, high: np.minimum(np.maximum(np.rint(x), low), high),
    "mod": np.mod, "fmod": np.fmod,
}  # fmt: skip
"""Methods of the field, and functions that it hashes, in float64."""


class Floats:
    """float64, for the reference evaluation."""

    reads_masks, snaps, low, farthest = False, False, -np.inf, np.inf

    def __init__(self, *, by_kernels: bool = False) -> None:
        """`by_kernels`: in float32 are products with large weights, and what the runtime computes without a row."""
        self.by_kernels = by_kernels

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in _NUMPY:
            raise AttributeError(name)
        return _NUMPY[name]

    def function(self, name: object, *operands: Array) -> Array:
        if name not in _NUMPY:
            raise Unsupported(f"{name} has no float64 form")
        return np.asarray(_NUMPY[str(name)](*operands))

    odd = even = function

    def lift(self, x: Any, *, scalar: bool = True) -> Value:  # noqa: ARG002 - as in the field
        if isinstance(x, Value):
            return x
        x = np.asarray(x)
        return Value(x.astype(np.float64, copy=False), whole=x.dtype.kind in "biu")

    def matmul(self, a: Any, b: Any) -> Array:
        left = self.lift(a).entries
        if isinstance(b, Value) or b.ndim != 2 or b.size <= _PART:
            return np.asarray(np.matmul(left, self.lift(b).entries))
        if self.by_kernels and b.dtype == np.float32 and np.abs(left).max(initial=0) < _SHORT:
            return np.asarray(left.astype(np.float32) @ b, np.float64)
        columns = max(_PART // len(b), 1)  # widened at once
        parts = (b[:, start : start + columns].astype(np.float64) for start in range(0, b.shape[1], columns))
        return np.concatenate([left @ part for part in parts], -1)


Arithmetic = Field | Floats


def plain(x: Any, what: str = "a shape or an index") -> Array:
    """An index, or another operand that data must not decide. Raises Unsupported where it does."""
    if isinstance(x, Value):
        raise Unsupported(f"data decides {what}")
    return np.asarray(x)


def integers(x: Any) -> list[int]:
    """The elements of a tensor that is a shape, an axis or an index. Raises Unsupported where data decides them."""
    return [int(each) for each in plain(x).reshape(-1)]
