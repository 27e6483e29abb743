"""Traces single entries of an evaluation back to the function of other entries that they are.

What is read here is a proposal, and never believed: whoever uses it checks in the field that it is right. An entry that
has the residue of a leaf is that leaf, and a factor that is 0 ends the walk, so that of a masked weight matrix or of
attention to other tokens nothing is left.

`softmax` stays a single symbol, because the field and ball arithmetic write it differently (`wide`, `in_field`).
"""

from collections import ChainMap
from collections.abc import Callable, Container, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import product
from typing import Any

import numpy as np
import onnx
from flint import fmpq

from rewriter.arrays import Array
from rewriter.evaluate.arithmetic import INFINITE, Field, Unsupported, Value, is_float, known_number
from rewriter.evaluate.evaluator import Program
from rewriter.evaluate.moves import CASTS
from rewriter.evaluate.nodes import CONTROL
from rewriter.evaluate.reductions import axes_of, flat
from rewriter.evaluate.scalar import COMPARISONS, LOGIC
from rewriter.evaluate.table import ELEMENTWISE, MOVES, Call, row, tuple_of
from rewriter.graph.view import key_of
from rewriter.graph.walk import reached, reads
from rewriter.proof.certificate import expressions as ex
from rewriter.proof.certificate.expressions import Expression, NotAFunction, ordered
from rewriter.proof.values.prints import Fingerprints

Index = tuple[Any, ...]  # integers, numpy's too
_CONDITIONS = (*COMPARISONS, *LOGIC, "Cast")
PRODUCTS = ("MatMul", "Gemm", "FusedMatMul")
_MOVED = (MOVES | CASTS) - {"Shape", "Size", "Where"}
_MOST_STEPS, _MOST_MOVED = 20_000, 2**24
_SMALL = 2**10  # entries of a constant that a linear layer may add
_SHORT, _SCALES = 2**10, tuple(2**each for each in range(7))  # the numerator and the denominators of a short number
UNFIT = (IndexError, KeyError, ValueError, TypeError, AttributeError, RecursionError)
"""Exceptions raised by a walk where names or shapes are unexpected."""


@dataclass(frozen=True)
class Region:
    """An activation of A that became heads."""

    output: str  # its tensor in A
    leaves: tuple[str, ...]  # tensors of A that it is a function of: the pre-activation, or both operands of a gate
    original: Expression  # F_A, of `leaf(0)` and `leaf(1)`
    rewritten: Expression  # F_B


class Kept(Fingerprints):
    """An evaluation whose tensors are kept; of a loop, those of the first round. With regions replaced, it is A'."""

    def __init__(
        self, program: Program, field: Field, feeds: Mapping[str, Array], *,
        regions: Mapping[str, Region] | None = None, keep: Container[str] | None = None,
        wanted: Iterable[str] = (), **options: Any,
    ) -> None:  # fmt: skip
        """`regions` by output; `keep`: which tensors are kept, the leaves of regions among them; by default all.

        Only what is `wanted`, if any is, is evaluated, behind what is replaced.
        """
        super().__init__(program, field, feeds, **options)
        self.makers, self.regions, self._keep = program.makers, dict(regions or {}), keep
        self.values: ChainMap[str, Any] = ChainMap({}, program.weights(program.graph))
        self.wanted: dict[str, Any] = dict.fromkeys(wanted)

        def before(name: str) -> list[str]:
            leaves = self.regions[name].leaves if name in self.regions else ()
            names = (*reads(self.makers[name]), *leaves) if name in self.makers else ()
            return [each for each in names if each not in self.replaced]

        self.needed = {*reached(self.wanted, before)} if self.wanted else None

    def computed(self, node: onnx.NodeProto, name: str, environment: MutableMapping[str, Any]) -> None:
        """Replace a region, and keep what is computed. Raises Unsupported where F_A is not what A computes."""
        own = self.makers.get(name) is node  # not a part of a definition, of any name
        if own and name in self.regions:  # leaves of this round of a loop are in the environment
            around = ChainMap(environment, self.values, dict(self.replaced))
            environment[name] = replaced(self.field, self.regions[name], around, environment[name])
        if own and name in self.wanted:
            self.wanted[name] = environment[name]
        super().computed(node, name, environment)
        if own and name not in self.values:
            weights, names = self.program.weights(self.program.graph), [each for each in (*node.input, name) if each]
            kept = [each for each in names if (self._keep is None or each in self._keep) and each not in weights]
            walked = bool(kept) and any(isinstance(environment[each], Value) for each in names)
            for each in kept:
                value = environment[each]
                if isinstance(value, Value) or getattr(value, "size", 0) <= _SMALL:
                    self.values[each] = value
                elif walked and each not in self.values:  # no walk enters other large constants
                    self.values[each] = _narrow(value)

    @cached_property
    def numbers(self) -> dict[int, float]:
        """The entries of small constants, by residue."""
        small = [x.ravel() for x in self.program.constants(_SMALL).values() if is_float(x)]
        found = np.concatenate([np.zeros(1), *(x[np.isfinite(x)] for x in small)])
        return dict(zip(self.field.lift(found, scalar=False).entries.tolist(), found.tolist(), strict=True))

    def operands(self, node: onnx.NodeProto) -> list[Any]:
        return [self.values[name] if name else None for name in node.input]

    def depends(self, name: str) -> bool:
        """Whether a tensor depends on entries; numbers computed from constants, and conditions on them, do not."""
        value, node = self.values.get(name), self.makers.get(name)
        entries = isinstance(value, Value)
        if node is None or not (value.size == 1 if isinstance(value, Value) else node.op_type in _CONDITIONS):
            return entries
        return (entries and node.op_type in CONTROL) or any(self.depends(each) for each in node.input)


def replaced(f: Field, region: Region, values: Mapping[str, Any], value: Value) -> Value:
    """What F_B is, of the values of the leaves. Raises Unsupported where the tensor is not F_A."""
    leaves = {ex.leaf(place): values[name].entries for place, name in enumerate(region.leaves)}
    if not np.array_equal(np.broadcast_to(in_field(f, region.original, leaves), value.shape), value.entries):
        raise Unsupported(f"the activation {region.output} is not the function that was read")
    return Value(np.ascontiguousarray(np.broadcast_to(in_field(f, region.rewritten, leaves), value.shape)))


def _narrow(constant: Array) -> Array:
    """A float64 constant in float32, where that has the same numbers."""
    if constant.dtype != np.float64:
        return constant
    with np.errstate(over="ignore"):
        narrow = constant.astype(np.float32)
    return narrow if np.array_equal(narrow, constant) else constant


class Walk:
    """Walks in one evaluation."""

    def __init__(self, run: Kept, leaves: Mapping[int, Expression], ends: Container[str] | None = None) -> None:
        """`leaves`: what entries with these residues are, of the tensors `ends`, or of any."""
        # By softmax that was met: how far masked keys are below the first that is not, by residue; the score of that.
        self.gaps: dict[str, dict[int, Expression]] = {}
        self.scores: dict[str, Expression] = {}
        self._run, self._leaves, self._ends = run, leaves, ends
        self.known: dict[tuple[str, Index], Expression] = {}
        self._sources: dict[str, Sequence[Any]] = {}

    def at(self, name: str, index: Index) -> Expression:
        """What an entry is. Raises NotAFunction where it is not seen to be a function of the leaves."""
        key = name, index
        if key not in self.known:
            if len(self.known) > _MOST_STEPS:
                raise NotAFunction("it is a function of too many entries")
            try:
                self.known[key] = self._followed(name, index)
            except UNFIT as error:
                raise NotAFunction(f"{name} cannot be followed: {type(error).__name__}") from error
        return self.known[key]

    def _followed(self, name: str, index: Index) -> Expression:
        value, node = self._run.values[name], self._run.makers.get(name)
        if not isinstance(value, Value) and node is not None and self._run.depends(name):
            return self._behind(node, name, index)
        if not isinstance(value, Value):
            numbers = np.asarray(value)  # one number may be none of numpy's arrays
            return self._number(numbers[index]) if is_float(numbers) else ex.constant(int(numbers[index]))
        ends, entry = self._ends is None or name in self._ends, int(value.entries[index])
        leaf = self._leaves.get(entry) if ends else None
        if node is not None and (leaf is None or self._goes_on(node, index)):
            try:  # Clip(y), or 1 times it, may happen to be y in the field: there is a y behind it
                return self._behind(node, name, index)
            except NotAFunction:
                leaf = leaf or self._shifted(entry)
                if leaf is None:
                    raise
        if leaf is None:
            raise NotAFunction(f"it reads the input {name}")
        return leaf

    def _number(self, number: Any) -> Expression:
        """A constant, as the root that the field reads it as, if it is one."""
        value, size = float(number), np.asarray(number).dtype.itemsize
        known = known_number(abs(value), size) if self._run.field.snaps else None
        if known is None or isinstance(known[4], str) or known[3] != 1:
            return ex.constant(value)
        factor = known[2] if value > 0 else -known[2]
        return ex.mul(ex.constant(factor), ex.apply("sqrt", ex.constant(known[4])))

    def _shifted(self, entry: int) -> Expression | None:
        """A leaf and a number, short or of a small constant, that a linear layer adds to it; None otherwise."""
        p = self._run.field.p
        for (known, leaf), sign in product(self._leaves.items(), (1, -1)):
            added = (entry - sign * known) % p
            shorts = (short / scale for scale in _SCALES if (short := (added * scale + _SHORT) % p - _SHORT) <= _SHORT)
            if (number := self._run.numbers.get(added, next(shorts, None))) is not None:
                return ex.add(ex.mul(ex.constant(sign), leaf), ex.constant(number))
        return None

    def _goes_on(self, node: onnx.NodeProto, index: Index) -> bool:
        """Whether an entry that is a leaf is computed from a leaf."""
        if node.op_type in _MOVED:
            return True
        given = [(place, x) for place, x in enumerate(self._run.operands(node)) if isinstance(x, Value)]
        if node.op_type in PRODUCTS:
            read = [_factors(self._run, node, x, index, place) for place, x in given if place < 2 <= x.ndim]
        elif key_of(node) in ELEMENTWISE:
            read = [x.entries[aligned(index, x.shape)] for _, x in given]
        else:
            return False
        return any(np.isin(each, list(self._leaves)).any() for each in read)

    def _behind(self, node: onnx.NodeProto, name: str, index: Index) -> Expression:
        """What a node makes an entry of."""
        kind, attributes, given = node.op_type, self._run.program.attributes(node), self._run.operands(node)

        def operand(place: int) -> Expression:
            return self.at(node.input[place], aligned(index, given[place].shape))

        if kind in CASTS and self._run.depends(node.input[0]) and not isinstance(given[0], Value):
            return self._chosen(node.input[0], index, ex.ONE, ex.ZERO)
        if kind in _MOVED:
            return self._moved(node, name, index)
        combined = {"Softmax": self._softmax, "ReduceSum": self._sum, **dict.fromkeys(PRODUCTS, self._product)}
        if kind in combined:
            return combined[kind](node, index)
        if kind == "Where":
            if self._run.depends(node.input[0]):
                return self._chosen(node.input[0], index, operand(1), operand(2))
            return operand(1 if given[0][aligned(index, given[0].shape)] else 2)
        known = kind in ("Clip", "Pow")  # bounds, and exponents
        parts = [
            each if each is None or (place and known and not isinstance(each, Value)) else operand(place)
            for place, each in enumerate(given)
        ]
        return ex.scalar_operator(key_of(node), attributes, parts)

    def _moved(self, node: onnx.NodeProto, name: str, index: Index) -> Expression:
        """The entry that was moved here, found by applying the operator to the numbers of entries, from 1."""
        given = self._run.operands(node)
        ends = np.cumsum([each.size if is_float(each) else 0 for each in given])
        if ends[-1] > _MOST_MOVED:
            raise NotAFunction("it is an entry of a large table")
        if node.output[0] not in self._sources:
            numbered = [
                Value(np.arange(end - each.size + 1, end + 1).reshape(each.shape)) if is_float(each) else each
                for each, end in zip(given, ends.tolist(), strict=True)
            ]
            if (operator := row(*key_of(node))) is None:
                raise NotAFunction(f"{node.op_type} has no row")
            self._sources[node.output[0]] = tuple_of(operator(self._call(node), *numbered))
        number = int(self._sources[node.output[0]][list(node.output).index(name)].entries[index])
        if number == 0:
            return ex.ZERO  # what is filled in by default
        source = int(np.searchsorted(ends, number))
        shape = given[source].shape
        return self.at(node.input[source], np.unravel_index(number - 1 - int(ends[source] - given[source].size), shape))

    def _product(self, node: onnx.NodeProto, index: Index) -> Expression:
        """The sum of the products that are not 0; their second factor first, which is constant in a linear layer."""
        run, attributes = self._run, self._run.program.attributes(node)
        a, b, *bias = run.operands(node)
        if a.ndim < 2 or b.ndim < 2 or attributes.get("transBatchA") or attributes.get("transBatchB"):
            raise NotAFunction("a product with a vector")
        live = (_factors(run, node, a, index, 0) != 0) & (_factors(run, node, b, index, 1) != 0)
        terms = []
        for k in np.flatnonzero(live).tolist():
            second = self.at(node.input[1], _factor(run, node, b, index, 1, k))
            if second is not ex.ZERO:
                terms.append(ex.mul(self.at(node.input[0], _factor(run, node, a, index, 0, k)), second))
        made = _scaled(attributes, "alpha", ex.total(terms) if terms else ex.ZERO)
        if node.op_type == "Gemm" and bias and bias[0] is not None:
            offset = self.at(node.input[2], aligned(index, bias[0].shape))
            return ex.add(made, _scaled(attributes, "beta", offset))
        return made

    def _softmax(self, node: onnx.NodeProto, index: Index) -> Expression:
        scores, weights = self._run.values[node.input[0]], self._run.values[node.output[0]].entries
        axis = self._run.program.attributes(node).get("axis", -1) % scores.ndim
        if weights[index] == 0:
            return ex.ZERO

        def place(key: int) -> Index:
            return (*index[:axis], key, *index[axis + 1 :])

        line = (*index[:axis], slice(None), *index[axis + 1 :])
        kept = np.flatnonzero(weights[line]).tolist()
        logits = [self.at(node.input[0], place(key)) for key in kept]
        if scores.masks is not None and axis == scores.ndim - 1:
            gaps = self.gaps.setdefault(node.output[0], {})
            self.scores[node.output[0]] = logits[0]
            masks = scores.masks[line]
            for key in np.flatnonzero((masks > masks.min()) & (masks < INFINITE)).tolist():
                residue = int(self._run.field.sub(scores.entries[place(key)], scores.entries[place(kept[0])]))
                if residue not in gaps:
                    gaps[residue] = ex.sub(self.at(node.input[0], place(key)), logits[0])
        return ex.ONE if len(logits) == 1 else ex.symbol("softmax", tuple(logits), kept.index(index[axis]))

    def _sum(self, node: onnx.NodeProto, index: Index) -> Expression:
        x, *stated = self._run.operands(node)
        call = self._call(node)
        axes = axes_of(call, x, *stated or [None])
        if call.get("keepdims", 1):
            index = tuple(i for axis, i in enumerate(index) if axis not in axes)
        numbers = flat(np.arange(x.size).reshape(x.shape), axes)[index]
        return ex.total([self.at(node.input[0], np.unravel_index(number, x.shape)) for number in numbers])

    def _call(self, node: onnx.NodeProto) -> Call:
        return Call(node, node.op_type, self._run.program.attributes(node), self._run)

    def _chosen(self, name: str, index: Index, a: Expression, b: Expression) -> Expression:
        """`a` where an entry of a condition holds, else `b`."""
        run, node = self._run, self._run.makers.get(name)
        index = aligned(index, run.values[name].shape)
        if node is None or not run.depends(name):
            return a if run.values[name][index] else b
        if isinstance(run.values[name], Value):
            raise NotAFunction("a condition that is a number")
        if node.op_type == "Not":
            return self._chosen(node.input[0], index, b, a)
        if node.op_type in LOGIC:
            inner = self._chosen(node.input[1], index, a, b)
            return self._chosen(node.input[0], index, *((inner, b) if node.op_type == "And" else (a, inner)))
        x, y = (self.at(each, aligned(index, run.values[each].shape)) for each in node.input)
        if node.op_type == "Equal":
            return ex.where(ex.sub(x, y), ex.where(ex.sub(y, x), a, b), b)
        if node.op_type.startswith("Less"):
            x, y = y, x
        return ex.where(ex.sub(x, y), a, b) if node.op_type.endswith("OrEqual") else ex.where(ex.sub(y, x), b, a)


def aligned(index: Sequence[Any], shape: Sequence[int]) -> tuple[Any, ...]:
    """The index of an entry as that of an operand which is broadcast to it."""
    tail = index[len(index) - len(shape) :]
    return tuple(0 if size == 1 else each for each, size in zip(tail, shape, strict=True))


def _factor(run: Kept, node: onnx.NodeProto, operand: Any, index: Index, place: int, k: Any) -> tuple[Any, ...]:
    """The index of the k-th factor in an operand of a product."""
    front = aligned(index[:-2], operand.shape[:-2])
    turned = bool(run.program.attributes(node).get("transB" if place else "transA"))
    own = index[-1] if place else index[-2]
    return (*front, *((k, own) if turned != bool(place) else (own, k)))


def _factors(run: Kept, node: onnx.NodeProto, operand: Any, index: Index, place: int) -> Array:
    """What an operand of a product contributes to an entry."""
    entries: Array = operand.entries if isinstance(operand, Value) else operand
    return np.asarray(entries[_factor(run, node, operand, index, place, slice(None))])


def _scaled(attributes: Mapping[str, Any], key: str, value: Expression) -> Expression:
    return value if attributes.get(key, 1.0) == 1.0 else ex.mul(ex.constant(float(np.float32(attributes[key]))), value)


# -- what the symbols mean -------------------------------------------------------------------------------------------


def wide(expression: Expression, values: Mapping[Expression, Expression] | None = None) -> Expression:
    """The expression for ball arithmetic: softmax less the largest score; leaves replaced."""
    made = {**(values or {})}
    for part in ordered(expression):
        if part in made:
            continue
        operands, build = tuple(made[each] for each in part.operands), ex.BUILDERS.get(part.operator)
        if part.operator == "softmax":
            made[part] = ex.softmax(operands)[int(str(part.value))]
        else:
            made[part] = build(*operands) if build else ex.symbol(part.operator, operands, part.value)
    return made[expression]


def in_field(field: Field, expression: Expression, leaves: Mapping[Expression, Array]) -> Array:
    """The expression at residues, entry by entry; softmax less its first score."""
    made: dict[Expression, Any] = {**leaves}
    weights: dict[tuple[Expression, ...], list[Array]] = {}
    for part in ordered(expression):
        if part in made:
            continue
        operands = [made[each] for each in part.operands]
        if part.operator == "where" and _unreached(field, part):
            made[part] = operands[1]
        elif part.operator == "softmax":
            if part.operands not in weights:
                powers = [field.exp(field.sub(each, operands[0])) for each in operands]
                whole = field.inv(reduce(field.add, powers))
                weights[part.operands] = [field.mul(each, whole) for each in powers]
            made[part] = weights[part.operands][int(str(part.value))]
        elif part.operator == "constant" or part in _IRRATIONAL:
            made[part] = _number_in(field, part)
        else:
            made[part] = _IN_FIELD[part.operator](field, *operands)
    return np.asarray(made[expression])


def _unreached(field: Field, part: Expression) -> bool:
    """Whether a part is bounded by a number that no value reaches, as a Clip in the evaluation."""
    _, a, end = part.operands
    if not isinstance(end.value, fmpq) or abs(end.value) < fmpq(int(field.farthest)):
        return False
    return part is (ex.maximum if end.value < 0 else ex.minimum)(a, end)


def _number_in(field: Field, part: Expression) -> Array:
    """A constant, as evaluations have it: those of definitions in float64, and floats as what they are rounded from."""
    number: Any = _IRRATIONAL.get(part)
    if number is None and field.snaps and isinstance(part.value, fmpq):
        short = np.float32(int(part.value.p) / int(part.value.q))
        number = short if ex.rational(float(short)) == part.value else None
    if number is not None:
        return np.asarray(field.lift(number).entries)
    exact = part.value if isinstance(part.value, fmpq) else fmpq(0)
    return np.asarray(int(exact.p) * pow(int(exact.q), -1, field.p) % field.p)


_IRRATIONAL: Mapping[Expression, np.float64] = {each: np.float64(number) for number, each in ex.NUMBERS.items()}
_IN_FIELD: Mapping[str, Callable[..., Array]] = {
    "+": Field.add, "*": Field.mul, "/": Field.div, "where": Field.choose, "exp": Field.exp, "sqrt": Field.sqrt,
    "softplus": Field.softplus, "erf": lambda field, a: field.odd("erf", a),
    "pi": lambda field: field.function("pi", np.array(7)),  # a part of what is irrational
}  # fmt: skip
