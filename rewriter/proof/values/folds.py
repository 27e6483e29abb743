"""Constants that a tool folded in float32: which product of A's constants each is a rounding of.

A factor is a scalar, or a vector along one axis: a constant, its inverse, an attribute, or the scale of a batch
normalisation. How far a rounding may be off:

- **A weight times a factor**: 4 units in the last place (ulp), entry by entry. A batch normalisation's g / sqrt(v + e)
  takes three roundings, of which the square root halves the first, and the product one more: 3.5 half-ulps.
- **A weight that neither file computes**, under another name: 4 ulp, too. Two tools folded the same.
- **A bias through a batch normalisation**, (b - m) s + c, which may cancel: 4 ulp of the sum of its terms.
- **What A computes of constants alone**: 4 ulp of what changing these in their last places, at random, does to it.

Only float32: an ulp of float16 is as large as a change that matters, and float64 is not what tools fold in.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import onnx

from rewriter.arrays import Array, grouped
from rewriter.evaluate.arithmetic import Field, Floats, Product, Unsupported, Value, content, is_float
from rewriter.evaluate.evaluator import Evaluator, Program
from rewriter.graph.view import label, needed
from rewriter.text import one_line, quoted

ULPS = 4.0
_TINY = float(np.finfo(np.float32).tiny)
_SAMPLES = 64
_CHUNK = 2**20
_NEAR = 2.0**-20  # relative distance of a quotient from a factor that is worth a look
_NUDGE = 2.0**-20
_DIRECTIONS = 6
_SCALARS, _APART = 64, 1e-6
_TRIED = 64  # products compared entry by entry, for one constant
LAST_PLACES = "in other last places"
Residues = Callable[[Field], Array]


@dataclass(frozen=True)
class Fold:
    """What a constant of B is a rounding of."""

    spelling: str  # what it is in A: "'conv.weight' times the scale of BatchNormalization 'bn'"
    residues: Residues  # the exact value in a field, in the constant's shape


def folded(a: Program, b: Program, computed: Mapping[str, Array]) -> dict[str, Fold]:
    """The constants of B that A lacks and that are roundings; `computed` is what A computes of constants, by name."""
    ours = _float32(a.constants())
    known, theirs = contents(ours.values()), _float32(b.constants())
    lost = {name: y for name, y in theirs.items() if _rounds(y) and content(y.reshape(-1)) not in known}
    if not lost:
        return {}
    made = {name: x for name, x in _float32(computed).items() if name not in ours}
    search = _ConstantIndex(a, ours, made)
    found = ((name, search.find(name, y)) for name, y in lost.items())
    return {name: fold for name, fold in found if fold is not None}


def products(program: Program) -> list[Product]:
    """Products and quotients of two scalars of a model, such as scales that a tool merges into one or an attribute."""
    every = {float(abs(x.reshape(-1)[0])) for x in program.constants(most=1).values() if is_float(x)}
    numbers = sorted(x for x in every if math.isfinite(x) and x not in (0.0, 1.0))[:_SCALARS]
    found: dict[float, Product] = {}
    for a in numbers:
        for b in numbers:
            for value, text, inverse in ((a * b, f"{a:.7g} * {b:.7g}", False), (a / b, f"{a:.7g} / {b:.7g}", True)):
                place = bisect_left(numbers, value * (1 - _APART))
                if place == len(numbers) or numbers[place] > value * (1 + _APART):  # not what the model itself has
                    found.setdefault(value, (value, text, partial(_product, a, b, inverse=inverse)))
    return [found[value] for value in sorted(found)]


def _product(a: float, b: float, field: Field, *, inverse: bool) -> int:
    left, right = (field.lift(np.float32(each)).entries for each in (a, b))
    return int(field.mul(left, field.inv(right) if inverse else right))


def _float32(constants: Mapping[str, Any]) -> dict[str, Array]:
    return {name: x for name, x in constants.items() if isinstance(x, np.ndarray) and x.dtype == np.float32 and x.size}


def _rounds(y: Array) -> bool:
    """Whether a constant looks computed: finite, not one number all over, and not a short one such as 0.125."""
    first = float(y.flat[0])
    if y.size == 1:
        return math.isfinite(first) and not (first * 4096).is_integer()
    return not bool((y == y.flat[0]).all()) and bool(np.isfinite(y).all())


def contents(arrays: Iterable[Array]) -> set[bytes]:
    """Digests of arrays as vectors; of a matrix, also of the transposed one."""
    return {content(view.reshape(-1)) for x in arrays for view in _views(x)}


def _views(x: Array) -> list[Array]:
    """An array without axes of size 1, and transposed."""
    squeezed = x.squeeze()
    return [squeezed, squeezed.T] if squeezed.ndim == 2 else [squeezed]


def _sample(shape: tuple[int, ...]) -> tuple[Array, ...]:
    """The same positions for every array of one size."""
    size = math.prod(shape)
    flat = np.random.default_rng(size).integers(0, size, _SAMPLES)
    return np.unravel_index(flat, shape) if shape else ()


# -- factors ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Vector(Fold):
    """A factor, which may be a scalar, or a bias through an affine node."""

    values: Array  # in float64
    units: Any = None  # by how much a bias changes if each constant changes in its last place


class _Affine:
    """A batch normalisation, whose parameters are constant vectors."""

    def __init__(self, program: Program, node: onnx.NodeProto, constants: Mapping[str, Array]) -> None:
        self._program, self._node, self._constants = program, node, constants
        self._text, self.data, self.size = one_line(label(node), 120), node.input[0], constants[node.input[1]].size

    def of(self, arithmetic: Any, entries: Array, constants: Mapping[str, Array] | None = None) -> Array:
        """Its output for a vector of channels."""
        given = {**(constants or self._constants), self.data: Value(entries[None])}
        return np.asarray(_outcome(self._program, arithmetic, [self._node], given, self._node.output[0])[0])

    def scale(self) -> _Vector:
        def difference(f: Any, dtype: type = np.int64) -> Array:
            one, none = (self.of(f, np.full(self.size, each, dtype)) for each in (1, 0))
            return np.asarray(f.sub(one, none))

        return _Vector(f"times the scale of {self._text}", difference, difference(Floats(), np.float64))

    def bias(self, given: Array, spelling: str) -> _Vector:
        def values(constants: Mapping[str, Array]) -> Array:
            return self.of(Floats(), constants[self.data], constants)

        every = {**self._constants, self.data: given}
        found = _units(values, every, [[name] for name in every])
        return _Vector(f"{spelling} through {self._text}", lambda f: self.of(f, f.lift(given).entries), *found)


def _outcome(
    program: Program, arithmetic: Any, nodes: Sequence[onnx.NodeProto], constants: Mapping[str, Any], name: str
) -> Array:
    """What nodes make of constants. Raises Unsupported."""
    evaluator, environment = Evaluator(program, arithmetic, {}, in_reals=True), dict(constants)
    for node in nodes:
        evaluator.node(node, environment)
    made = environment[name]
    return np.asarray(made.entries if isinstance(made, Value) else made)


def _units(
    values: Callable[[Mapping[str, Array]], Array], constants: Mapping[str, Array], groups: Sequence[Collection[str]]
) -> tuple[Array, Array]:
    """Values; and how much they change with the last places of constants, at random: the sum over groups."""
    known = {name: x.astype(np.float64) if is_float(x) else x for name, x in constants.items()}
    start, terms, random = values(known), list[Any](), np.random.default_rng(len(known))
    for _ in range(max(_DIRECTIONS // len(groups), 1)):
        nudged = {n: x * (1 + _NUDGE * random.choice((-1, 1), x.shape)) for n, x in known.items() if is_float(x)}
        changed = (known | {n: x for n, x in nudged.items() if n in group} for group in groups)
        terms.append(sum(np.abs(values(each) - start) for each in changed))
    return start, np.asarray(_unit(np.maximum(np.max(terms, 0) / _NUDGE, np.abs(start))))


def _vector(x: Array) -> bool:
    return bool(x.size == max(x.shape, default=1))


def _factors(program: Program, constants: Mapping[str, Array], affine: Sequence[_Affine]) -> Iterator[_Vector]:
    """All scalars and vectors, each once."""
    yield _Vector(LAST_PLACES, lambda _: np.ones(1, np.int64), np.ones(1))
    for each in affine:
        yield each.scale()
    seen = set[bytes]()
    numbers = {quoted(name): x.reshape(-1) for name, x in constants.items() if _vector(x)}
    for node in program.graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.FLOAT:
                name = f"{attribute.name} of {one_line(label(node), 120)}"
                numbers.setdefault(name, np.array([attribute.f], np.float32))
    for name, x in numbers.items():
        exact = x.astype(np.float64)
        rounds = (np.abs(np.frexp(exact)[0]) != 0.5).any()  # unlike products by powers of 2, or copies
        if rounds and x.all() and np.isfinite(x).all() and x.tobytes() not in seen:
            seen.add(x.tobytes())
            yield _Vector(f"times {name}", _lifted(x), exact)
            yield _Vector(f"divided by {name}", _lifted(x, inverse=True), 1 / exact)


def _lifted(x: Array, *, inverse: bool = False) -> Residues:
    return lambda field: field.inv(field.lift(x).entries) if inverse else field.lift(x).entries


# -- the search ------------------------------------------------------------------------------------------------------


class _ConstantIndex:
    """A's constants and factors, indexed for look-ups by one quotient."""

    def __init__(self, program: Program, constants: Mapping[str, Array], computed: Mapping[str, Array]) -> None:
        self._computed = computed
        every = ((name, zip(_views(x), ("", "transposed "), strict=False)) for name, x in constants.items())
        self._weights = grouped((x.shape, (f"{how}{quoted(name)}", x)) for name, views in every for x, how in views)
        self._program, self._known = program, {**computed, **constants}

    @cached_property
    def _affine(self) -> list[_Affine]:
        found = []
        for node in self._program.graph.node:
            constants = {name: self._known[name] for name in node.input[1:] if name in self._known}
            trains = any(node.output[1:]) or self._program.attributes(node).get("training_mode")
            fixed = node.op_type == "BatchNormalization" and not trains and constants.keys() == {*node.input[1:]}
            if fixed and len({x.shape for x in constants.values()}) == 1 and constants[node.input[1]].ndim == 1:
                found.append(_Affine(self._program, node, constants))
        return found

    @cached_property
    def _factors(self) -> dict[int, tuple[list[_Vector], Array]]:
        """By size, with all their values."""
        every = _factors(self._program, self._known, self._affine)
        found = grouped((each.values.size, each) for each in every)
        return {size: (each, np.stack([factor.values for factor in each])) for size, each in found.items()}

    @cached_property
    def _biases(self) -> dict[int, list[_Vector]]:
        """What a bias becomes in an affine node: none, and each vector that the node before it reads."""
        makers, found = self._program.makers, dict[int, list[_Vector]]()
        for affine in self._affine:
            given = {"no bias": np.zeros(affine.size, np.float32)}
            for name in makers[affine.data].input if affine.data in makers else ():
                x = self._known.get(name)
                if x is not None and _vector(x) and x.size == affine.size:
                    given[quoted(name)] = x.reshape(-1)
            found.setdefault(affine.size, []).extend(affine.bias(x, name) for name, x in given.items())
        return found

    def find(self, own: str, y: Array) -> Fold | None:
        sample, squeezed = _sample(y.shape), y.squeeze()
        for name, x in self._computed.items():
            alike = x.shape == y.shape and _near(x[sample], y[sample], _unit(np.abs(y).max()))
            if alike and _near(x, y, self._units_of(name, x)):
                return Fold(f"{quoted(name)}, computed", _lifted(x))
        found = self._product(own, squeezed)
        if found is None and squeezed.ndim == 1:
            biases = self._biases.get(squeezed.size, ())
            found = next((each for each in biases if _near(each.values, squeezed, each.units)), None)
        if found is None:
            return None
        residues = found.residues
        return Fold(found.spelling, lambda field: residues(field).reshape(y.shape))

    def _units_of(self, name: str, x: Array) -> Array:
        every = self._program.graph.node
        nodes = [every[place] for place in needed(every, [name])]
        read = {each for node in nodes for each in node.input if each in self._known}
        given = {each: self._known[each] for each in read.difference(*(node.output for node in nodes))}
        try:
            return _units(lambda known: _outcome(self._program, Floats(), nodes, known, name), given, [given])[1]
        except Unsupported:
            return np.asarray(_unit(np.abs(x)))

    def _product(self, own: str, y: Array) -> Fold | None:
        """A weight times a factor; a weight of the same name is a copy."""
        peak, tried, sample = np.unravel_index(int(np.abs(y).argmax()), y.shape), 0, _sample(y.shape)
        axes = [(0, 1), *((axis, size) for axis, size in enumerate(y.shape) if size > 1)]
        along = [(axis, *self._factors[size]) for axis, size in axes if size in self._factors]
        for name, x in self._weights.get(y.shape, ()):
            if not x[peak]:
                continue
            quotient = float(y[peak]) / float(x[peak])
            for axis, factors, values in along:
                column = values[:, peak[axis] if values.shape[1] > 1 else 0]
                for place in np.flatnonzero(np.abs(column - quotient) <= abs(quotient) * _NEAR):
                    factor = factors[place]
                    shape = [-1 if each == axis else 1 for each in range(y.ndim)]
                    spread = np.broadcast_to(factor.values.reshape(shape), y.shape)
                    if factor.spelling == LAST_PLACES and name.endswith(quoted(own)):
                        continue
                    if not _near(x[sample] * spread[sample], y[sample]) or (tried := tried + 1) > _TRIED:
                        continue
                    if _near(x, y, None, spread):
                        return Fold(f"{name} {factor.spelling}", _times(x, factor, shape))
        return None


def _times(x: Array, factor: Fold, shape: Sequence[int]) -> Residues:
    def residues(field: Field) -> Array:
        weight = field.lift(np.ascontiguousarray(x), scalar=x.ndim < 2).entries
        return field.mul(weight, factor.residues(field).reshape(shape))

    return residues


def _unit(magnitude: Any) -> Any:
    """One unit in the last place of float32."""
    return np.spacing(np.maximum(magnitude, _TINY).astype(np.float32)).astype(np.float64)


def _near(x: Array, y: Array, unit: Any = None, factor: Any = 1.0) -> bool:
    """Whether x times a factor is as near to y as roundings are, in units that are by default those of y."""
    units = None if unit is None else np.atleast_1d(np.broadcast_to(unit, y.shape))
    x, y, factors = np.atleast_1d(x, y, np.broadcast_to(factor, y.shape))
    rows = max(_CHUNK // max(math.prod(y.shape[1:]), 1), 1)
    for start in range(0, len(y), rows):
        cut = slice(start, start + rows)
        exact, part = x[cut].astype(np.float64) * factors[cut], y[cut].astype(np.float64)
        scale = _unit(np.abs(part)) if units is None else units[cut]
        if not (np.abs(exact - part) / scale <= ULPS).all():  # nor where one of them is NaN
            return False
    return True
