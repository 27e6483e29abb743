"""Activations that became heads: found, replaced in A by what B computes there, and bounded.

B is never cut. An activation of A, a tensor F_A(y) of one or two leaves in front of a linear layer, which B has not, is
*replaced in A* by F_B(y), the function that B computes of the same leaves; then A' is compared with B in the field. The
weights inside the heads, their masks, their layout and their output projection are linear algebra there.

1. `proposals` reads F_A and F_B at one size, by following an entry backwards (`rewriter.proof.values.walk`).
2. `Kept` evaluates A' at any size, and checks F_A against what A computes; without regions it evaluates B. Both
   note how far below its row's first score each masked score is (`Regions.unmasked`).
3. `distance` encloses |F_B - F_A| for every real y, by ball arithmetic.

What has to be trusted: that A' has the same values as B, and the enclosures of F_A and F_B. A wrong walk, name or plan
can only leave a pair undecided, because a wrong F_A is not what A computes, and a wrong F_B not what B does.
"""

import secrets
import sys
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache, partial
from typing import Any

import numpy as np
import onnx
from flint import fmpq

from rewriter.arrays import Array, grouped
from rewriter.evaluate.arithmetic import INFINITE, Field, Modulus, Unsupported, Value, content
from rewriter.evaluate.evaluator import Program, in_step
from rewriter.evaluate.moves import CASTS, SAME_NUMBERS
from rewriter.evaluate.scalar import BROADCAST
from rewriter.evaluate.table import ELEMENTWISE, MOVES
from rewriter.graph.fused import einsum_map
from rewriter.graph.view import SIZES, key_of
from rewriter.graph.walk import iter_nodes, reached, subgraphs
from rewriter.inputs.cases import Maker
from rewriter.proof.certificate import expressions as ex
from rewriter.proof.certificate.bounds import Bound, bound
from rewriter.proof.certificate.expressions import Expression, NotAFunction, leaf, ordered
from rewriter.proof.records import CEILINGS, TOPS, Claimed
from rewriter.proof.values.walk import PRODUCTS, UNFIT, Kept, Region, Walk, aligned, replaced, wide

MOST_LEAVES, _MOST_ENDS = 2, 8
_DEEPEST = 100_000
_MOST_PLACES, _MOST_READ = 400, 3
"""Places of a tensor of B that are tried for one row of weights, and entries of A that the heads are read at."""
SMALL = ((1, 3, 2), (1, 3, 0))
"""The size at which heads are read; and without a past, for models with a branch for that."""
_CHOICES = 12  # how often a model with branches is evaluated there until all of them were, twice where no sign decides
_DOMAINS = (None, 512.0, 508.0)
"""What is tried: all numbers and, where a function does not hold for these, how far the programs of this tool reach."""
_ROOM = 1.02  # a claim is held to this many times its limit: it is itself a bound, rounded to a float
_EXACT = 1e-15  # what a claim of 0 allows
_FAR = fmpq(2) ** 60
_LEAST_MASK = -200  # what a masked score is at least below the others: exp(-200) is 1e-87
LAYERS = ("MatMul", "Gemm", "Conv", "Add", "FusedMatMul", "MatMulNBits", "DequantizeLinear")
"""Linear layers, which may compute every number of inputs that may be any."""
_LINEAR = ("Cast", "Identity", "Add")
_AFFINE = ("Mul", "Div", "Neg", "Cast", "Identity", "Add", "Sub")
_MEETING = {"Softmax", "QuantizeLinear", "LayerNormalization", "BatchNormalization", "Einsum"}.union(
    MOVES - SAME_NUMBERS - SIZES
)
_QUANTISERS = ("DynamicQuantizeLinear", "QuantizeLinear", "DequantizeLinear")
_ROWS = (*PRODUCTS, "MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "QLinearMatMul")
_WEIGHTS: Mapping[str, int] = {**dict.fromkeys((*_ROWS, "MatMulNBits", "Conv"), 1), "QLinearMatMul": 3}
"""Linear layers, with the place of their weights among their operands; of `_ROWS` they are a matrix."""


@dataclass
class Regions:
    """What was proposed for a pair, at one or several sizes."""

    regions: dict[str, Region] = field(default_factory=dict)  # by output
    # By softmax of B, how far below their row's first score masked ones are; none where that is not a number.
    masks: dict[str, frozenset[Fraction]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)  # by activation of A that B has not, why it was not read
    forgotten: list[str] = field(default_factory=list)  # softmaxes whose scores may be larger than the masking number
    inside: set[str] = field(default_factory=set)  # tensors of B that entries were followed through
    cones: set[str] = field(default_factory=set)  # tensors of A between the leaves of regions and their outputs

    def add(self, reader: "_Reader") -> None:
        """Add what was read at a size, and what masks the softmaxes of B there."""
        theirs = reader.theirs
        for name, node in theirs.makers.items():
            scores = theirs.values.get(node.input[0]) if node.op_type == "Softmax" else None
            if not isinstance(scores, Value) or scores.masks is None:
                continue
            numbers = _all_gaps(theirs, name, reader.read.get(name, {}))
            if numbers or name in reader.read:
                before = self.masks.get(name, numbers)
                self.masks[name] = before | numbers if before and numbers else frozenset()
                # Scores of numbers up to 2^60, as far as they are piecewise linear functions.
                ends = (x for each in reader.scores.get(name, ()) for x in _values(each, _FAR, -_FAR))
                if numbers and max((abs(x) for x in ends if x is not None), default=0) > -max(numbers):
                    self.forgotten.append(name)
        self.regions = reader.regions
        failures = reader.failures | self.failures
        self.failures = {name: text for name, text in failures.items() if name not in self.regions}
        self.inside |= reader.inside
        self.cones.update(*(_between(reader, each.output, each.leaves) for each in reader.regions.values()))

    def unmasked(self, a: Kept, b: Kept) -> Iterator[str]:
        """Nodes of both models with masked scores that are not known to be far below the others.

        A score that is masked by a number weighs nothing in the field. That is right where the number is below every
        score, where the other model masks a score by the same, and in heads, where it is one of `masks`.
        """
        allowed = {name: {b.field.rational(gap) for gap in gaps} for name, gaps in self.masks.items()}
        for run, other, inside in ((b, a, self.masks.keys()), (a, b, set[str]())):
            known = {residue for _, noted in other.noted for residue, _ in noted.gaps}
            for name, noted in ((node.output[0], noted) for node, noted in run.noted):
                apart = {gap for gap, near in noted.gaps if near or name in inside} - known
                if apart - allowed.get(name, set()) and not (run is a and name in self.cones):
                    yield name


# -- proposals -------------------------------------------------------------------------------------------------------


def proposals(
    a: Program, b: Program, field: Callable[[Modulus, bytes], Field], maker: Maker, runs: Sequence[Kept] = (),
    **options: Any,
) -> Regions:  # fmt: skip
    """Read the activations of A that became heads in B, in some evaluations of B, or at small sizes.

    Sizes at which a model cannot be evaluated are left out. Flags of inputs and signs of data may decide which bodies
    are evaluated. `options` are those of `Evaluator`.
    """
    found, before, decided = Regions(), sys.getrecursionlimit(), False
    options["constants"] = False  # only activations are looked up
    sys.setrecursionlimit(max(before, _DEEPEST))
    missing = {value.name for node in iter_nodes(a.graph.node) if node.op_type == "If" for _, graph in subgraphs(node)
               for value in graph.output if value.name in a.makers}  # fmt: skip
    try:
        for number in range(_CHOICES):
            if not runs or number:
                cases, f = maker.cases(SMALL[: 1 + maker.branches], number), partial(field, Modulus())
                runs = [Kept(b, f(secrets.token_bytes(16)), case.feeds, **options) for case in cases]
                in_step(runs)
            for other in runs:
                with suppress(Unsupported):
                    other.outputs()  # the error where it failed
                    reader = _Reader(a, other, regions=found.regions, **options)
                    reader.run()
                    found.add(reader)
                    missing.difference_update(reader.values)
                    decided |= any(count == 1 for _, noted in reader.noted for count, _ in noted.coins)
            if not missing or (number and not decided):
                break
    finally:
        sys.setrecursionlimit(before)
    return found


def _between(run: Kept, output: str, leaves: Sequence[str]) -> set[str]:
    """The tensors of a region, its conditions included."""

    def before(name: str) -> list[str]:
        names = run.makers[name].input if name in run.makers and name not in leaves else ()
        return [each for each in names if each and run.depends(each)]

    return {*reached([output], before)} - {*leaves}


def _all_gaps(run: Kept, name: str, gaps: Mapping[int, Expression]) -> frozenset[Fraction]:
    """The numbers that mask scores of a softmax, also the ones that no walk met; none if one is not far below."""
    node, found = run.makers[name], dict(gaps)
    scores = run.values[node.input[0]]
    axis = run.program.attributes(node).get("axis", 1 if run.opsets.get("", 13) < 13 else -1)
    if axis % scores.ndim != scores.ndim - 1:
        return frozenset()
    first = scores.masks.argmin(-1)[..., None]
    below = run.field.sub(scores.entries, np.take_along_axis(scores.entries, first, -1))
    dropped = (scores.masks > scores.masks.min(-1, keepdims=True)) & (scores.masks < INFINITE)
    residues, chosen = np.unique(below[dropped], return_index=True)
    try:
        for residue, (*row, key) in zip(residues.tolist(), np.argwhere(dropped)[chosen].tolist(), strict=True):
            if residue not in found:
                walk = Walk(run, {})
                start = walk.at(node.input[0], (*row, int(first[*row, 0])))
                found[residue] = ex.sub(walk.at(node.input[0], (*row, key)), start)
    except NotAFunction:
        return frozenset()
    numbers = [_number(each) for each in found.values()]
    low = [each for each in numbers if each is not None and each <= _LEAST_MASK]
    return frozenset(low) if len(low) == len(numbers) else frozenset()


def _number(expression: Expression) -> Fraction | None:
    """The constant that an expression is at two points; None where it is none."""
    first, second = _values(expression, fmpq(3, 7), fmpq(-11, 5))
    return first if first == second else None


def _values(expression: Expression, *numbers: fmpq) -> list[Fraction | None]:
    """What an expression is where its leaves are each of some numbers; None where no operator says so exactly."""
    leaves = [part for part in ordered(expression) if part.operator == "leaf"]
    made = (wide(expression, dict.fromkeys(leaves, ex.constant(each))).value for each in numbers)
    return [Fraction(int(x.p), int(x.q)) if isinstance(x, fmpq) else None for x in made]


@dataclass(frozen=True)
class _Layer:
    """What an activation meets: a linear layer, or another node that is not an elementwise function."""

    data: str  # the tensor, before it was quantised in front of a linear layer
    weight: Any  # or the kind of the node, where it has none
    axis: int = -1  # of the tensor, that the weights are along
    matrix: Array | None = None  # the weights by row, where they are laid out so
    others: Array | None = None  # all matrices, where that is one of several


def _layers(run: Kept, node: onnx.NodeProto, values: Mapping[str, Any]) -> Iterator[_Layer]:
    """A node as what an activation meets; of a product of two tensors, either may be the weights."""
    kind, attributes = node.op_type, run.program.attributes(node)
    for weights in (1, 0) if kind == "Einsum" and len(node.input) > 1 else ():
        weight, data = values.get(node.input[weights]), node.input[1 - weights]
        found = einsum_map(attributes["equation"].decode(), weights)
        if found and isinstance(weight, np.ndarray) and isinstance(values.get(data), Value):
            axis, *ends, axes = found
            yield _Layer(data, weight, axis, None if axes > len(ends) else np.moveaxis(weight, ends, (0, 1)))
            return
    place = _WEIGHTS.get(kind)
    unread = () if place is not None or kind in BROADCAST else run.program.weights(run.program.graph)  # large tables
    given = [None if name in unread else values.get(name) for name in node.input]
    if kind in _MEETING or (kind in BROADCAST and any(isinstance(x, np.ndarray) and x.size > 1 for x in given)):
        yield from (_Layer(name, kind) for name, x in zip(node.input, given, strict=True) if isinstance(x, Value))
    if place is None or len(node.input) <= place:
        return
    for weights, operand in ((place, 0), (0, place))[: 1 + (kind in PRODUCTS)]:
        weight, data, x = given[weights], node.input[operand], given[operand]
        turned, apart = (attributes.get(each) for each in ("transB", "transA")[:: 1 if weights else -1])
        if isinstance(weight, Value):  # such as the rows of a table that an input chooses
            weight = weight.entries
        if apart or not isinstance(x, Value) or not isinstance(weight, np.ndarray):
            continue
        while (maker := run.makers.get(data)) is not None and maker.op_type in _QUANTISERS:
            data = maker.input[0]
        if kind not in _ROWS or weight.ndim < 2:
            yield _Layer(data, weight, 1 if kind == "Conv" else -1)
        elif operand == 0 or x.ndim > 1:
            matrix = weight if bool(turned) != (operand == 0) else np.swapaxes(weight, -1, -2)
            yield _Layer(data, weight, -1 if operand == 0 else -2, matrix)


class _Reader(Kept):
    """Evaluates A at a small size; where an activation meets its linear layer, both functions are read."""

    def __init__(self, program: Program, theirs: Kept, **options: Any) -> None:
        super().__init__(program, theirs.field, theirs.feeds, **options)
        self.failures: dict[str, str] = {}
        self.read: dict[str, dict[int, Expression]] = {}  # by softmax of B, what masks it
        self.scores: dict[str, list[Expression]] = {}  # by softmax of B, scores that are not masked
        self.inside: set[str] = set()  # tensors of B that entries were followed through
        self.theirs = theirs
        self._prints = {each.loose for each in theirs.prints.values()}
        # By content of its weights, the linear layers of B.
        nodes, values = theirs.makers.values(), theirs.values
        layers = ((each.matrix, node) for node in nodes for each in _layers(theirs, node, values))
        self._twins = grouped((content(matrix), node) for matrix, node in layers if matrix is not None)
        self._evaluated: dict[int, tuple[MutableMapping[str, Any], list[onnx.NodeProto]]] = {}

    def node(self, node: onnx.NodeProto, environment: MutableMapping[str, Any]) -> None:
        """Evaluate a node; in front of a linear layer, replace the activation in everything computed from it."""
        _, before = self._evaluated.setdefault(id(environment), (environment, []))
        for layer in _layers(self, node, environment):
            name = self._activation(layer.data)
            leaves = None if name is None else self._leaves(name)
            if name is None or leaves is None:
                continue
            try:
                region = self._read(name, leaves, layer)
                new = {name: replaced(self.field, region, self.values, self.values[name])}
                around = ChainMap(dict(new), environment, self.values)  # what is no longer needed included
                for each in before:
                    if not new.keys().isdisjoint(each.input):
                        super().node(each, around)
                        new |= {made: around[made] for made in each.output if made}
                self.values.update(new)
                environment.update(new)
                self.regions[name] = region
            except (NotAFunction, Unsupported, *UNFIT) as error:
                self.failures[name] = str(error)
        super().node(node, environment)
        before.append(node)

    def _activation(self, name: str) -> str | None:
        """The tensor that is only laid out in another way, or quantised; None where B has it."""
        while name in self.makers and self.makers[name].op_type in (*SAME_NUMBERS, *_QUANTISERS):
            name = self.makers[name].input[0]
        known = name in self.regions or name in self.failures or name not in self.prints
        return None if known or self._partnered(name) else name

    def _leaves(self, name: str) -> list[str] | None:
        """The leaves of the elementwise function that makes a tensor; None where it is none, or has too many."""
        leaves = self._ends(name, self._is_leaf) or []
        for one in leaves if len(leaves) > 1 else ():
            others = [each for each in leaves if each != one]
            ends = self._ends(one, others.__contains__)
            if ends and set(ends) <= set(others):  # a function of the others: the error may not hide in a factor
                leaves = others
        return leaves if 0 < len(leaves) <= MOST_LEAVES else None

    def _ends(self, name: str, stops: Callable[[str], bool]) -> list[str] | None:
        """What an elementwise function is of; `stops` says which tensors are not looked behind."""
        shape, leaves, real = self.values[name].shape, list[str](), False

        def before(each: str) -> list[str]:
            nonlocal real
            node = None if each != name and stops(each) else self.makers.get(each)
            operands = [] if node is None else self._operands(node, shape)
            if node is None or not operands:
                leaves.append(each)
            else:
                real |= node.op_type not in _LINEAR
            return operands[::-1]

        few = all(len(leaves) <= _MOST_ENDS for _ in reached([name], before))
        return leaves if few and real and leaves != [name] else None

    def _is_leaf(self, name: str) -> bool:
        """Whether B has a tensor, and not also one that it is an affine image of, which its heads may read too."""

        def before(each: str) -> list[str]:
            affine = each in self.makers and self.makers[each].op_type in _AFFINE
            operands = [*filter(self.depends, self.makers[each].input)] if affine else []
            return operands if len(operands) == 1 else []

        return self._partnered(name) and not any(map(self._partnered, [*reached([name], before)][1:]))

    def _partnered(self, name: str) -> bool:
        """Whether B has a tensor too: then it is what both are functions of."""
        return name in self.prints and self.prints[name].loose in self._prints

    def _operands(self, node: onnx.NodeProto, shape: tuple[int, ...]) -> list[str]:
        """The operands of an elementwise node that depend on data; none where it is something else."""
        if key_of(node) not in ELEMENTWISE:
            return []
        data = []
        for name in filter(None, node.input[:1] if node.op_type in CASTS else node.input):
            if self.depends(name) and self.values[name].shape == shape:
                data.append(name)
            elif self.depends(name) or self.values[name].size != 1:
                return []
        return data

    def _read(self, name: str, leaves: Sequence[str], layer: _Layer) -> Region:
        """Both functions. Raises NotAFunction."""
        shape = self.values[layer.data].shape
        middle, front = [size // 2 for size in shape], tuple[int, ...]()
        if layer.matrix is not None and layer.matrix.ndim > 2:  # one of several
            front = aligned(middle[:-2], layer.matrix.shape[:-2])
            layer = replace(layer, matrix=layer.matrix[front], others=layer.matrix)
        # Clip and Relu may be 0 at an entry of A or of B, and so may pruned neurons: it says nothing about heads.
        values = [self.values[each].entries.reshape(shape) for each in (layer.data, *leaves)]
        live = np.logical_and.reduce([each != 0 for each in values])
        n = _telling(live.any(tuple({*range(len(shape))} - {layer.axis % len(shape)})), layer.matrix)
        middle[layer.axis] = n
        *others, last = _spots(live, layer.axis, n, middle, front)[:_MOST_READ] or [tuple(middle)]
        for each in others:
            with suppress(NotAFunction):
                return self._read_at(name, leaves, layer, each)
        return self._read_at(name, leaves, layer, last)

    def _read_at(self, name: str, leaves: Sequence[str], layer: _Layer, spot: Sequence[int]) -> Region:
        """Both functions at one entry of what the layer reads. Raises NotAFunction."""
        entries = [self.values[each].entries for each in leaves]
        symbols = [leaf(place) for place in range(len(leaves))]
        # What lays the activation out keeps the order of its entries.
        flat = np.ravel_multi_index([*spot], self.values[layer.data].shape)
        place = np.unravel_index(int(flat), self.values[name].shape)
        here = {int(each[place]): part for each, part in zip(entries, symbols, strict=True)}
        # Other tensors may happen to be a leaf in the field, as (y + |y|) / 2 is where y is a square.
        mine = Walk(self, dict(here), leaves).at(name, place)
        for factor, number in self._scalars(name, leaves):  # which a weight of the heads may contain
            here |= {key * factor % self.field.p: ex.mul(number, part) for key, part in [*here.items()]}
        other = ex.total(self._terms(layer, spot[layer.axis], here, spot))
        if layer.matrix is not None and layer.others is not None:
            # Each of several equal tokens that chose the same matrix has added a term.
            shape = self.values[layer.data].shape
            equal = np.logical_and.reduce([each.reshape(shape) == each[place] for each in entries])
            fronts = {aligned(each[:-2], layer.others.shape[:-2]) for each in np.argwhere(equal).tolist()}
            count = sum(np.array_equal(layer.others[front], layer.matrix) for front in fronts)
            other = ex.div(other, ex.constant(count))
        return Region(name, tuple(leaves), mine, other)

    def _scalars(self, name: str, leaves: Sequence[str]) -> Iterator[tuple[int, Expression]]:
        """The numbers that leaves are multiplied by, as residues too."""
        for node in map(self.makers.get, _between(self, name, leaves)):
            if node is not None and node.op_type == "Mul" and not {*leaves}.isdisjoint(node.input):
                for each in node.input:
                    value = self.values[each]
                    if value.size == 1 and not self.depends(each):
                        number = Walk(self, {}).at(each, (0,) * value.ndim)
                        yield int(self.field.lift(value).entries.reshape(())), number

    def _terms(self, layer: _Layer, n: int, leaves: Mapping[int, Expression], place: Sequence[int]) -> list[Expression]:
        """Entries of B that multiply a row of weights. Raises NotAFunction where there are none."""
        run, terms, why = self.theirs, list[Expression](), ""
        nodes = self._twins.get(b"" if layer.matrix is None else content(layer.matrix)) or [*run.makers.values()]
        if isinstance(layer.weight, str):
            nodes = [node for node in nodes if layer.data in node.input]
        for name, front, k in dict.fromkeys(_multiplied(run, nodes, layer, n)):  # what several nodes read is one term
            for spot in _spots(run.values[name].entries, layer.axis, k, place, front):
                walk = Walk(run, leaves)
                try:
                    made = walk.at(name, spot)
                except NotAFunction as error:
                    why = why or str(error)
                    continue
                if not set(ordered(made)).isdisjoint(leaves.values()):
                    terms.append(made)
                    self.inside |= {each for each, _ in walk.known}
                    for softmax, gaps in walk.gaps.items():
                        self.read.setdefault(softmax, {}).update(gaps)
                        self.scores.setdefault(softmax, []).append(walk.scores[softmax])
                    break
        if not terms:
            raise NotAFunction(why or "its row of weights is in no constant factor")
        return terms


def _telling(live: Array, weight: Array | None) -> int:
    """A channel that is not 0, and has a row of weights that is not 0, or that has different entries."""
    first: int = min(7, len(live) - 1)
    if weight is not None:
        live = live & (weight[:, 0] != 0) & ((weight != weight[:, :1]).any(1) | (weight.shape[1] == 1))
    return next((n for n in (*range(first, len(live)), *range(first)) if live[n]), first)


def _multiplied(
    run: Kept, nodes: Iterable[onnx.NodeProto], layer: _Layer, n: int
) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Tensors of B that are multiplied by what n is in A: which of several matrices does so, and its row."""
    for node in nodes:
        for other in _layers(run, node, run.values):
            named = not isinstance(layer.weight, str) or other.data == layer.data
            if other.data not in run.values or other.axis != layer.axis or not named:
                continue
            if layer.matrix is not None and other.matrix is not None:
                rows = _rows_with(other.matrix, layer.matrix[n], len(layer.matrix))
                yield from ((other.data, front, k) for front, k in rows)
            elif np.array_equal(layer.weight, other.weight):
                yield other.data, (), n


def _rows_with(matrix: Array, row: Array, count: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """The index in front, and the row, of where a row of weights is in a matrix."""
    if matrix.shape[-1] < row.size or matrix.size < count * matrix.shape[-1]:
        return
    for *front, k, c in np.argwhere(matrix[..., : matrix.shape[-1] - row.size + 1] == row[0]).tolist():
        if np.array_equal(matrix[(*front, k)][c : c + row.size], row):
            yield tuple(front), k


def _spots(x: Array, axis: int, n: int, near: Sequence[int], front: Sequence[int]) -> list[tuple[int, ...]]:
    """Places of entries that are not 0 and the n-th along an axis; of several matrices, that of `front` reads them.

    Those close to the place `near`, such as of the same token, come first, as far as both have the same axes.
    """
    found = np.argwhere(np.take(x, [n], axis))
    found[:, axis] = n
    for back, place in enumerate(front[::-1], 3):
        if back <= x.ndim and x.shape[-back] > 1:
            found = found[found[:, -back] == place]
    shared = min(x.ndim, len(near))
    distances = np.abs(found[:, x.ndim - shared :] - near[len(near) - shared :]).sum(axis=1)
    return [*map(tuple, found[distances.argsort(kind="stable")[:_MOST_PLACES]].tolist())]


# -- bounds ----------------------------------------------------------------------------------------------------------


def linear_leaf(region: Region) -> int | None:
    """Which of two leaves both functions are linear in; None without such a one."""
    if len(region.leaves) < MOST_LEAVES:
        return None
    both = wide(region.original), wide(region.rewritten)
    places = range(len(region.leaves))
    return next((place for place in places if all(ex.degree_in(side, leaf(place)) == 1 for side in both)), None)


def distance(region: Region, claim: Claimed | None, limit: float, elem_types: Sequence[int]) -> Bound:
    """A bound on the distance of both as functions of one leaf.

    Of two leaves, both must be linear in one; or they are products of a function of each, which are bounded one by one.
    The `limit` is that of a region without a claim; `elem_types` are those of the activation and the pre-activation. A
    claimed limit above both what the user asked for and the spacing of the type's numbers is lowered, so that no file
    sets its own limit.
    """
    domains: Sequence[float | None] = _DOMAINS
    if claim is not None:
        ceilings = (CEILINGS.get(each, 0.0) for each in elem_types[:2])
        limit, domains = min(claim.limit, max(claim.accuracy, *ceilings)) * _ROOM + _EXACT, (claim.domain,)
    return _distance(region, limit, domains, TOPS[elem_types[1]])


def distance_up_to(largest: float, region: Region, found: Bound) -> Bound:
    """As `found`, which `distance` gave, for numbers of at most that size."""
    domain = min(largest, np.inf if found.domain is None else found.domain)
    return found if domain == np.inf else _distance(region, found.limit, (domain,), ex.rational(domain))


def _distance(region: Region, limit: float, domains: Sequence[float | None], top: fmpq) -> Bound:
    value = linear_leaf(region)
    if value is None and len(region.leaves) == MOST_LEAVES:
        ours, theirs = _factors(region.original), _factors(region.rewritten)
        if ours is None or theirs is None:
            reason = "combines two tensors in a way that is not linear in one of them"
            return Bound(False, limit, np.inf, 0.0, None, False, None, 0, reason)
        alone = [replace(region, leaves=(each,)) for each in region.leaves]
        pairs = zip(alone, ours, theirs, strict=True)
        found = [_distance(replace(x, original=f, rewritten=g), limit, domains, top) for x, f, g in pairs]
        worst = max(found, key=lambda each: (not each.holds, each.bound))
        return replace(worst, domain=min((x.domain for x in found if x.domain is not None), default=None))
    values = {leaf(place): ex.ONE if place == value else ex.VARIABLE for place in range(MOST_LEAVES)}
    one, two = wide(region.original, values), wide(region.rewritten, values)
    # Without a claim, only heads are taken to be meant for some numbers alone: several exponentials share their weight.
    kinds = [part.operator for part in ordered(region.rewritten)]
    limited = "softmax" in kinds or kinds.count("exp") > 1
    tried = (bound(one, two, limit=limit, top=top, domain=each) for each in (domains if limited else domains[:1]))
    everywhere = next(tried)
    return everywhere if everywhere.holds else next((each for each in tried if each.holds), everywhere)


@cache
def _factors(function: Expression) -> tuple[Expression, ...] | None:
    """A product as its factors of either leaf, constants with the last; None where it is none.

    A sum is one if both terms have the same factor of a leaf, as heads with one value.
    """
    places = [place for place in range(MOST_LEAVES) if leaf(place) in ordered(function)]
    if len(places) < MOST_LEAVES:
        alone = places[0] if places else MOST_LEAVES - 1
        return tuple(function if place == alone else ex.ONE for place in range(MOST_LEAVES))
    sides = [made for each in function.operands if (made := _factors(each)) is not None]
    if len(sides) < len(function.operands) or function.operator not in ("*", "+"):
        return None
    pairs = [*zip(*sides, strict=True)]
    if function.operator == "*":
        return tuple(ex.mul(*pair) for pair in pairs)
    for shared, (one, other) in enumerate(pairs):
        if one is other:
            return tuple(one if place == shared else ex.add(*pair) for place, pair in enumerate(pairs))
    return None
