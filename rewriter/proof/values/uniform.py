"""Whether two models whose values are equal at some sizes are equal at every size, as docs/proof.md explains.

Tensors of B are *anchored* to tensors of A, from the inputs on: because the same operator computes both from anchored
operands, or because both are one function of the rows of anchored tensors, and have equal values. A row is what a
tensor holds for one position in its leading axes, those whose sizes vary (batch and tokens).
"""

import hashlib
from collections import ChainMap, Counter
from collections.abc import Container, Mapping, Sequence
from functools import cached_property
from math import prod

import numpy as np
import onnx

from rewriter.arrays import grouped
from rewriter.evaluate.evaluator import Program
from rewriter.evaluate.moves import CASTS, SAME_ENTRIES
from rewriter.evaluate.nodes import version_of
from rewriter.evaluate.scalar import COMPARISONS, LOGIC
from rewriter.evaluate.table import ELEMENTWISE, MOVES, is_random
from rewriter.graph.types import elem_name
from rewriter.graph.view import key_of, label
from rewriter.graph.walk import iter_nodes, reached, reads, subgraphs
from rewriter.proof.values.prints import Fingerprints

_COMMUTATIVE = {"Add", "Mul", "Sum", "Max", "Min", "And", "Or", "Equal"}
_RESHAPING = SAME_ENTRIES - {"Identity", "Dropout"}
_OF_SHAPES = {"Shape", "Gather", "Slice", "Concat", "Unsqueeze", "Squeeze", "Cast", "Mul", "Reshape", "Identity"}
_CHOSEN = MOVES | CASTS | {*COMPARISONS, *LOGIC}
"""Operators that compute no other numbers from integers; comparisons are looked at elsewhere."""
_MOST_CONE, _MOST_AXES = 2_000, 16  # nodes between two anchors; axes that an operator states


class _Side:
    """One model, evaluated at several points."""

    def __init__(self, program: Program, runs: Sequence[Fingerprints]) -> None:
        self.program = program
        self.fixed: Container[str] = runs[0].fixed if runs else ()
        self.prints = runs[0].prints if runs else {}
        self.data: Container[str] = runs[0].data if runs else ()
        self.shapes = [each.shapes for each in runs]
        self.cut = [each.cut for each in runs]
        self.ids: dict[str, str] = {}  # by tensor, a digest of what it is computed from
        self._draws: Counter[str] = Counter()
        # Functions that could not be inlined; one may call another.
        functions = sorted(each.SerializeToString(deterministic=True) for each in program.proto.functions)
        self.functions = dict.fromkeys(((each.domain, each.name) for each in program.proto.functions), functions)
        self.nodes = [node for node, _ in self.program.nodes(self.program.graph)]
        self.makers = {name: node for node in self.nodes for name in node.output if name}
        self.weights = self.program.weights(self.program.graph)
        self.names = dict.fromkeys((*self.weights, *(value.name for value in program.graph.input), *self.makers))

    @cached_property
    def constants(self) -> Mapping[str, np.ndarray]:
        """Short constants, such as axes, that no caller may replace."""
        short = self.program.constants(_MOST_AXES)
        return {name: x for name, x in short.items() if name not in self.program.overridable}

    def rows(self, name: str) -> tuple[int, tuple[int, ...]] | None:
        """The number of leading axes up to the last one that varies, and how many rows there are at each point."""
        shapes = [each[name] for each in self.shapes if name in each]
        if len(shapes) < len(self.shapes) or len({*map(len, shapes)}) > 1:
            return None
        varying = [axis for axis, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1]
        count = max(varying, default=-1) + 1
        return count, tuple(prod(shape[:count]) for shape in shapes)

    @cached_property
    def strided(self) -> str:
        """A tensor whose sizes at the points are not known to be those at others, since a slice leaves out entries."""
        cut = (node for name, node in self.makers.items() if all(name in each for each in self.cut))
        return next((node.output[0] for node in cut if len({each.get(node.input[0]) for each in self.shapes}) > 1), "")

    def shape_of(self, name: str) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.shapes[0].get(name, (0,) * 9)
        return self.weights.described(name)[1] if name in self.weights else shape

    # -- what tensors are computed from
    def number(self, name: str) -> str:
        """A digest of what a tensor is computed from, which uses the `ids` of its operands."""
        if name in self.weights and name not in self.program.overridable:
            return _digest("constant", *self.weights.described(name))
        if name in self.makers:
            return self._of_node(self.makers[name], name, ChainMap(self.ids))
        return _digest("input", name, self.weights.described(name) if name in self.weights else None)

    def _of_node(self, node: onnx.NodeProto, name: str, numbers: ChainMap[str, str]) -> str:
        domain, kind = key_of(node)
        if kind == "Identity" and not domain:
            return numbers.get(node.input[0], name)
        operands = [numbers.get(each, f"of {name}") if each else "" for each in node.input]
        if kind in _COMMUTATIVE and not domain:
            operands.sort()
        graphs = sorted(subgraphs(node), key=lambda each: each[0])
        bodies = [(each, self._of_body(graph, numbers)) for each, graph in graphs]
        attributes = sorted(each.SerializeToString() for each in node.attribute if each.name not in dict(graphs))
        functions, version = self.functions.get((node.domain, kind)), version_of(node, self.program.opsets)
        place = list(node.output).index(name), len(node.output) if kind == "Split" else 0
        made = _digest(domain, version, kind, operands, attributes, place, bodies, functions)
        if is_random(kind) or (kind == "Dropout" and len(node.input) > 2):
            self._draws[made] += 1  # one draw is not another
            return _digest(made, self._draws[made])
        return made

    def _of_body(self, graph: onnx.GraphProto, numbers: ChainMap[str, str]) -> list[str]:
        """The numbers of the outputs of a body, which may read what is around it, inputs of other bodies too."""
        inputs = [value.name for value in graph.input]
        inner = numbers.new_child({name: _digest("body input", len(numbers.maps), k) for k, name in enumerate(inputs)})
        weights = self.program.weights(graph)
        inner.update((name, _digest("constant", *weights.described(name))) for name in weights)
        for node, _ in self.program.nodes(graph):
            inner.update({name: self._of_node(node, name, inner) for name in filter(None, node.output)})
        return [inner.get(value.name, "") for value in graph.output]


class Anchors:
    """Which tensors of B are those of A at every size."""

    def __init__(
        self, a: Program, b: Program, runs: Sequence[Sequence[Fingerprints]] = ((), ()),
        apart: Sequence[tuple[str, str]] = (),
    ) -> None:  # fmt: skip
        """`runs` are the evaluations of both, with fingerprints at the first point; pairs `apart` are not anchored.

        Without any, the same operators must compute all outputs from the same constants and inputs.
        """
        self.a, self.b, self._runs = _Side(a, runs[0]), _Side(b, runs[1]), runs
        self._held: set[str] = set()  # the ids of tensors of B
        self.same: set[str] = set()  # tensors of B that a node computes as one of A does
        self.apart = apart
        # Tensors of A and of B that are anchored by rows, and whether the second one is computed from the first.
        self.pairs: list[tuple[str, str, bool]] = []
        self.leaves: set[str] = set()  # the ids of what they are computed from
        self._by_print = grouped((each.exact, name) for name, each in self.a.prints.items())
        self._failed: str = ""
        for name in self.a.names:
            self.a.ids[name] = self.a.number(name)
        self._known = {*self.a.ids.values()}

    def departs(self) -> str:
        """Why equal values at some points are not known to be equal at every size; empty if they are."""
        for name in self.b.names:
            number = self.b.number(name)
            if number in self._known:
                self.same.add(name)
            else:
                number = self._anchor(name) or number
            self.b.ids[name] = number
            self._held.add(number)
        for value in self.a.program.graph.output:
            if self.b.ids.get(value.name) != self.a.ids[value.name]:
                return self._failed or f"output '{value.name}' is not computed as in the original"
        return ""

    def drawn(self) -> Mapping[str, str]:
        """What one model computes from integers of inputs, and the other in another way: the operators that do.

        Of operators on data, such as TopK, and what is scattered by them, the order is looked at elsewhere.
        """
        found: dict[str, str] = {}
        for side, runs, others in zip((self.a, self.b), self._runs, (self._held, self._known), strict=True):
            decided, computed = runs[0].decided.difference(runs[0].data), set[str]()  # numbers, not only chosen ones
            every = ((name, each, own) for own in side.nodes for each in iter_nodes([own]) for name in each.output)
            for name, node, own in ((name, node, own) for name, node, own in every if name in decided):
                scattered = "Scatter" in node.op_type and not runs[0].ordered.isdisjoint(node.input)
                if scattered or not runs[0].data.keys().isdisjoint(reads(node)):
                    continue
                if node.op_type not in _CHOSEN or not computed.isdisjoint(node.input):
                    computed.add(name)
                truncated = node.op_type in CASTS and node.input[0] in side.prints and name not in side.prints
                told = node.op_type not in _CHOSEN or (truncated and node.input[0] in computed)
                made = [name] if node is own else filter(None, own.output)  # in a body: what the outer node makes
                if told and any(side.ids[each] not in others for each in made):
                    found[name] = node.op_type
        return dict(sorted(found.items()))

    def _anchor(self, name: str) -> str:
        """The id of a tensor of A that has the same rows as one of B, which another node computes; empty without."""
        if name not in self.b.prints or name not in self.b.data:
            return ""
        candidates = self._by_print.get(self.b.prints[name].exact, ())
        if candidates and (strided := self.a.strided or self.b.strided):
            self._failed = self._failed or f"'{strided}' leaves out entries, of which these sizes may have too few"
            return ""
        for other in sorted(candidates, key=lambda each: each != name):
            if (other, name) in self.apart:
                self._failed = self._failed or f"'{name}' equals '{other}' for some values of its operands, not for any"
                continue
            here, there = self.b.rows(name), self.a.rows(other)
            if here is None or here != there:
                continue
            ours, theirs = (self.a, other, here[1]), (self.b, name, here[1])
            ends: tuple[set[str], set[str]] = set(), set()
            why = self._row_by_row(*ours, self._held, ends[0]) or self._row_by_row(*theirs, self._known, ends[1])
            leaves = ends[0]
            if not why and ends[0] != ends[1]:
                # Both have to be computed from the same tensors, so that they have as many rows at every size.
                why = self._row_by_row(*ours, ends[1], set())
                leaves, why = (ends[0], self._row_by_row(*theirs, ends[0], set())) if why else (ends[1], "")
            if not why:
                behind = self.a.ids[other] in ends[1]
                self.pairs.append((other, name, behind))
                self.leaves |= ends[1] if behind else leaves
                return self.a.ids[other]
            self._failed = self._failed or f"{why} (before {name!r})"
        return ""

    def _row_by_row(
        self, side: _Side, name: str, count: tuple[int, ...], anchored: Container[str], ends: set[str]
    ) -> str:
        """Why the path from anchored tensors, which are added to `ends`, is not row by row; empty if it is."""

        def is_end(each: str) -> bool:
            return each != name and (each in side.fixed or side.ids.get(each) in anchored)

        def before(each: str) -> list[str]:
            return [] if is_end(each) else [operand for operand in side.makers[each].input if operand in side.data]

        for place, each in enumerate(reached([name], before)):
            node = side.makers.get(each)
            if is_end(each):
                ends.add(side.ids[each])  # whose rows `_mixes` has counted
            elif node is None or place > _MOST_CONE:
                return f"'{each}' is not what the original has"
            elif why := _mixes(side, node, each, count, anchored):
                return f"{label(node)} {why}"
        return ""


class EqualTensors(Anchors):
    """The tensors that nodes of two models compute alike, from operands that are equal at the first of some points."""

    def __init__(self, a: Program, b: Program, runs: Sequence[Sequence[Fingerprints]]) -> None:
        super().__init__(a, b, runs)
        self.departs()
        held = {self.b.ids[name] for name in self.same}, self._held
        self.of_a = tuple({name for name, number in self.a.ids.items() if number in each} for each in held)
        self.of_b = self.same, {name for name, number in self.b.ids.items() if number in self._known}

    def _anchor(self, name: str) -> str:
        equal = self._by_print.get(self.b.prints[name].exact) if name in self.b.prints else None
        return self.a.ids.get(equal[0], "") if equal else ""


def _mixes(side: _Side, node: onnx.NodeProto, name: str, count: tuple[int, ...], anchored: Container[str]) -> str:
    """Why a node does not act on each row by itself; empty if it does."""
    (domain, kind), shapes = key_of(node), side.shapes[0]
    data = [each for each in node.input if each and each in side.data]
    rows = [side.rows(each) for each in (name, *data)]
    if not data or any(each is None or each[1] != count for each in rows):
        return "has or reads other rows"
    fronts = [each[0] for each in rows if each is not None]
    if kind in _RESHAPING:
        aligned = prod(shapes[data[0]][fronts[1] :]) == prod(shapes[name][fronts[0] :])
        sized = all(_of_shape(side, each, anchored) for each in node.input[1:])
        return "" if aligned and sized else "lays rows out otherwise"
    front = fronts[0]  # axes of rows
    if any(each[operand][:front] != each[name][:front] for each in side.shapes for operand in data):
        return "has operands of other shapes"
    others = [each for each in node.input if each and each not in side.data]
    spread = [each for each in others if each not in side.fixed]
    if not all(_alike(side, each, count, anchored) for each in spread):
        return "reads what depends on sizes or on integers"
    others = [side.shape_of(each) for each in others if each not in spread]
    get, first = side.program.attributes(node).get, node.input[0] in data
    if kind == "Transpose":
        order = get("perm") or range(len(shapes[name]))[::-1]
        alone = [*order[:front]] == [*range(front)]
    elif kind in _PRODUCTS:  # the last axis of a row times constants, or of two matrices in each row
        alone = first and not any(map(get, ("transA", "transBatchA", "transBatchB")))
        alone &= len(data) < 2 or all(len(shapes[each]) >= front + 2 for each in data)
        alone &= all(prod(each[:-2]) == 1 for each in others)
    elif kind == "MatMulNBits":
        alone = data == [node.input[0]]
    elif kind in (*_AXES, *_REDUCED):
        rank = len(shapes[data[0]])
        axes = _axes(side, node) if first or kind != "Gather" else []
        alone = bool(axes) and all((axis + rank if axis < 0 else axis) >= front for axis in axes)
    elif kind in ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"):
        return ""
    elif (domain, kind) not in ELEMENTWISE:
        return "is not known to act on rows"
    else:
        alike = all(_once(each, len(shapes[name]) - front) for each in others)
        return "" if alike else "adds to some rows what others do not get"
    return "" if alone else "works along rows, or on several"


_PRODUCTS = ("MatMul", "Gemm", "FusedMatMul", "FusedGemm", "GemmFastGelu")
_AXES = {
    "Softmax": -1, "LogSoftmax": -1, "Concat": 0, "Split": 0, "Gather": 0,
    "LayerNormalization": -1, "RMSNormalization": -1, "SimplifiedLayerNormalization": -1,
}  # fmt: skip
"""Operators along an axis, with its default."""
_REDUCED = ("Slice", "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceSumSquare")


def _axes(side: _Side, node: onnx.NodeProto) -> Sequence[int]:
    """The axes that an operator works along; none where they are not constant."""
    kind, attributes = node.op_type, side.program.attributes(node)
    if kind in _AXES:
        old = kind in ("Softmax", "LogSoftmax") and side.program.opsets.get("", 13) < 13
        return [attributes.get("axis", 1 if old else _AXES[kind])]
    operand = next(iter(node.input[3 if kind == "Slice" else 1 :]), "")
    return attributes.get("axes") or side.constants.get(operand, np.array(())).reshape(-1).tolist()


def _alike(side: _Side, name: str, count: tuple[int, ...], anchored: Container[str]) -> bool:
    """Whether a tensor without data holds the same in all rows: a constant that is expanded."""
    node, rows = side.makers.get(name), side.rows(name)
    if node is None or node.domain or node.op_type not in ("Expand", "ConstantOfShape") or rows is None:
        return False
    if rows[1] != count or not _of_shape(side, node.input[-1], anchored):
        return False
    if node.op_type == "ConstantOfShape":
        return True
    source, static = node.input[0], len(side.shapes[0][name]) - rows[0]
    return source in side.fixed and _once(side.shape_of(source), static)


def _once(shape: tuple[int, ...], count: int) -> bool:
    """Whether all axes in front of the last ones have size 1."""
    return prod(shape[: max(len(shape) - count, 0)]) == 1


def _of_shape(side: _Side, name: str, anchored: Container[str]) -> bool:
    """Whether a shape is composed of sizes of anchored tensors and constants."""

    def sizes(each: str) -> list[str] | None:
        """What a tensor of sizes is composed of; None where a size decides which size it is, and for other tensors."""
        node = side.makers.get(each)
        if not each or each in side.fixed:
            return []
        if node is None or node.domain or node.op_type not in _OF_SHAPES:
            return None
        if node.op_type == "Cast" and elem_name(side.program.attributes(node)["to"]) not in ("int32", "int64"):
            return None  # others round sizes
        count = len(node.input) if node.op_type in ("Concat", "Mul") else 1  # the others say which sizes
        if any(each and each not in side.fixed for each in node.input[count:]):
            return None
        if node.op_type == "Shape":  # where Reshape takes a size of 0 for another one, it is not known
            empty = any(0 in each.get(node.input[0], ()) for each in side.shapes)
            return [] if side.ids.get(node.input[0]) in anchored and not empty else None
        return list(node.input[:count])

    return all(sizes(each) is not None for each in reached([name], lambda each: sizes(each) or []))


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()
