"""Fingerprints of the tensors of an evaluation: equal tensors have equal ones, whatever their names and shapes."""

import math
from collections import defaultdict
from collections.abc import Container, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx

from rewriter.arrays import Array, distinct
from rewriter.evaluate.arithmetic import Field, Noted, Value, content, ends, is_float
from rewriter.evaluate.evaluator import Evaluator, Program
from rewriter.evaluate.moves import REARRANGED
from rewriter.evaluate.table import ELEMENTWISE, MOVES, OPERATORS, TABLES, Call
from rewriter.graph.view import SIZES, key_of
from rewriter.graph.walk import iter_nodes

_U64 = np.uint64
_SMALL_TABLE = 32
_LARGE = 2**16
_APART = ("Add", "Sub", "Sum", "Concat")  # operators whose result shows a change of any operand
_MANY = 2**6  # entries of which a change of all may be needed to be seen, where equal ones are combined
_PICKING = MOVES - REARRANGED  # some of the entries, or several tensors


@dataclass(frozen=True)
class Print:
    """The fingerprint of a tensor."""

    exact: tuple[Any, ...]  # of its shape and its entries in their order
    loose: tuple[Any, ...]  # of its entries in any order and shape


class Fingerprints(Evaluator):
    """An evaluation that takes a fingerprint of every tensor of floats."""

    def __init__(
        self,
        program: Program,
        field: Field,
        feeds: Mapping[str, Array],
        *,
        printing: bool = True,
        constants: bool = True,
        cover: dict[bytes, Array] | None = None,
        **options: Any,
    ) -> None:
        """As `Evaluator`; without `printing`, no fingerprints are taken, and without `constants` none of these.

        `cover` gets, by content of a constant table, which of its entries were read in all evaluations so far.
        """
        super().__init__(program, field, feeds, **options)
        self.field, self.cover = field, {} if cover is None else cover
        self._printing, self._constants = printing, constants
        # Tables of which this size may read only a part, by content: name and shape.
        self.partial: dict[bytes, tuple[str, tuple[int, ...]]] = {}
        self.chosen: dict[bytes, str] = {}  # those of which the values of inputs choose what is read
        self.kept: dict[bytes, tuple[tuple[int, ...], str]] = {}  # and whose numbers are not redrawn: shape and name
        self.prints: dict[str, Print] = {}  # in the order of the evaluation; of inner graphs too
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._factors = cache(lambda count: field.hash64("place", np.arange(count)))  # that tell places apart
        self.noted: list[tuple[onnx.NodeProto, Noted]] = []

    def node(self, node: onnx.NodeProto, environment: MutableMapping[str, Any]) -> None:
        self.field.noted = noted = Noted()
        super().node(node, environment)
        if noted != Noted():
            noted.signed = [_unvarying(each, self.field.p) for each in noted.signed]  # what may be constant
            self.noted.append((node, noted))

    @property
    def signs(self) -> dict[str, Noted]:
        """By output of a node, the signs that it took; of a loop, those of the last round."""
        return {next(filter(None, node.output)): noted for node, noted in self.noted if noted.coins}

    def conditions(self, inside: set[str]) -> set[tuple[int, int]]:
        """The conditions of all nodes but those inside of heads, which have them in other rows too."""
        return {each for node, noted in self.noted if inside.isdisjoint(node.output) for each in noted.conditions}

    def record(self, name: str, value: Any) -> None:
        super().record(name, value)
        if isinstance(value, (Value, np.ndarray)):
            self.shapes[name] = value.shape
        if self._printing and is_float(value) and (self._constants or isinstance(value, Value)):
            # A constant has the fingerprint of the entries that it is, a large one that of its bits.
            size = value.size
            if isinstance(value, Value) or size <= _LARGE:
                words: Any = self.field.hash64("fingerprint", self.field.lift(value).entries).reshape(-1)
                exact, loose = words @ self._factors(1 << size.bit_length())[:size], words.sum(dtype=_U64)
            else:
                exact = loose = content(value)
            self.prints[name] = Print((value.shape, exact), (size, loose))

    def note_tables(self, call: Call, operands: list[Any]) -> None:
        """Note constant tables of which a part may be read, and which entries were; redraw what inputs choose from."""
        if call.kind not in TABLES or self.fixed.issuperset(name for name in call.node.input if name):
            return
        blended: Sequence[int] = (2,) if call.kind == "EmbedLayerNormalization" else ()
        if call.decided and not blended and self.takes_rows(call, operands):
            blended = range(4)  # scales of quantised tables included
        for place, (name, table) in enumerate(zip(call.node.input, operands, strict=True)):
            if name not in self.fixed or not isinstance(table, np.ndarray) or place in blended:
                continue  # of blended ones, every row is in what is read
            least = 2 if call.decided and (is_float(table) or place == 0) else _SMALL_TABLE
            if table.size < least or not (table.ndim > 1 or is_float(table) or call.decided):
                continue
            key = content(table)
            self.partial[key] = name, table.shape
            if call.decided:
                self.chosen[key] = name
                if place == 0 and table.dtype.kind in "iuf" and ends(table)[0] > self.field.low:
                    # At random, so that entries that no drawn input chooses are compared, too.
                    numbers, drawn = distinct(table), self.field.hash64(key, np.arange(table.size))
                    operands[place] = numbers[drawn % _U64(numbers.size)].reshape(table.shape)
                elif place == 0:  # masks, of which no row may be masked whole
                    self.kept[key] = table.shape, name
            if call.kind in ("Slice", "Gather") and place == 0:
                read = OPERATORS["", call.kind](call, np.arange(table.size).reshape(table.shape), *operands[1:])
                self.cover.setdefault(key, np.zeros(table.size, bool))[read.reshape(-1)] = True


def _unvarying(a: Array, p: int) -> Array:
    """Entries except 0 that are the same in all rows, with their column, or in all columns."""
    t = a.reshape(-1, a.shape[-1] if a.ndim else 1)
    columns = np.flatnonzero((t == t[:1]).all(0)) if t.size else np.arange(0)
    rows = t[(t == t[:, :1]).all(1), 0] if t.size and t.shape[1] > 1 else t[:0, :0].reshape(-1)
    found = np.concatenate([t[0, columns] + p * (columns + 1) if columns.size else rows[:0], rows])
    return np.asarray(found[found % p != 0])


def same_value(field: Field, a: Any, b: Any) -> bool:
    """Whether two outputs are the same: entries, integers, sequences, maps, text."""
    if isinstance(a, dict) and isinstance(b, dict):
        return same_value(field, [*a.keys()], [*b.keys()]) and same_value(field, [*a.values()], [*b.values()])
    if isinstance(a, list) or isinstance(b, list):
        pair = isinstance(a, list) and isinstance(b, list) and len(a) == len(b)
        return pair and all(same_value(field, x, y) for x, y in zip(a, b, strict=True))
    if a is None or b is None:
        return a is b
    if np.shape(a) != np.shape(b):
        return False
    if is_float(a) or is_float(b):
        return bool((field.lift(a).entries == field.lift(b).entries).all())
    return bool((np.asarray(a) == np.asarray(b)).all())


Sign = tuple[str, str | tuple[str, int]]
"""A node that takes signs, and a part of its entries or one of the entries that decide together."""


class Signs:
    """The signs of data that one model took in all its evaluations, by node: each is a coin in the field."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._taken = defaultdict[str, float](float)
        # By node, the fewest signs that it took at once; -1 for a root of others than squares.
        self._least = defaultdict[str, float](lambda: math.inf)
        self._constant: set[str] = set()  # nodes that take a sign of a constant, which is one coin of each prime
        self._primes: set[int] = set()
        self._varying: dict[str, list[list[int]]] = {}  # axes of what each sign is taken of, whose sizes vary
        self._data: set[str] = set()
        self._joint: set[str] = set()

    def add(self, runs: Sequence[Fingerprints]) -> None:
        """Count the signs of some evaluations."""
        p, signs = runs[0].field.p, [run.signs for run in runs]
        alike = [each for each, run in zip(signs, runs, strict=True) if run.field.p == p]  # with other keys
        for name in alike[0].keys() - self._varying.keys():
            coins = [each[name].coins if name in each else () for each in alike]
            shapes = zip(*([shape for _, shape in each] for each in coins), strict=False)
            self._varying[name] = [
                [axis for axis, sizes in enumerate(zip(*each, strict=False)) if len(set(sizes)) > 1] for each in shapes
            ]
        for name in alike[0] if len(alike) > 1 else ():
            taken = [{x for part in each[name].signed for x in part.tolist()} for each in alike if name in each]
            if len(taken) == len(alike) and set.intersection(*taken):  # what is the same is constant
                self._constant.add(name)
        for run, taken_there in zip(runs, signs, strict=True):
            for name, noted in taken_there.items():
                self._taken[name] += self._draws(name, noted.coins)
                self._least[name] = min(self._least[name], min(noted.coins)[0])
            self._primes.add(run.field.p)
            self._data.update(run.data)
            self._joint.update(name for node, noted in run.noted if noted.joint for name in node.output)

    def _draws(self, name: str, calls: Sequence[tuple[float, tuple[int, ...]]]) -> float:
        """How often an evaluation drew the signs at one place, such as a channel, whose parameters may differ."""
        axes = self._varying.get(name, [])
        shapes = [shape for _, shape in calls]
        if len(axes) != len(calls) or any(k and k[-1] >= len(shape) for k, shape in zip(axes, shapes, strict=True)):
            return 1
        sizes = (math.prod(shape[k] for k in each) for shape, each in zip(shapes, axes, strict=True))
        return min(min(count, size) for (count, _), size in zip(calls, sizes, strict=True))

    def fewest(self, same: Container[str] = (), equal: Container[str] = ()) -> float:
        """How many signs each result of a decision was drawn with, of the least tried decision; infinite without one.

        k signs that decide together have 2^k results. Tensors of `same` are computed by a node that the other model
        has, too; what that decides matters where the models compute something else from them. `equal` ones have values
        that the other model has, so that what decides all of their entries does as much there.
        """
        # Signs that decide which entries reach a tensor: nodes, with the part of their entries.
        behind: dict[str, frozenset[Sign]] = {}
        least = math.inf
        for node in iter_nodes(self._program.graph.node):
            kind, read = node.op_type, node.input if node.op_type not in SIZES else ()
            given = [behind.get(name, frozenset()) for name in read]
            signs = max(given, key=len) if kind in _APART else frozenset[Sign]().union(*given)
            known = all(name in same for name in node.output if name)
            several = key_of(node) not in ELEMENTWISE and kind not in MOVES and "Scatter" not in kind  # entries meet
            counted = several and self._data.isdisjoint((*node.output, *node.input))
            if counted or not self._joint.isdisjoint(node.output):  # and decide together
                signs = frozenset((taken, (node.output[0], k)) for taken, _ in signs for k in range(_MANY))
            elif several:
                if sum(map(bool, given)) < 2:  # a sum shows each of them
                    least = least if known else min([least, *map(self._count, signs)])
                    signs = frozenset(each for each in signs if self._least[each[0]] == 1)
                if node.output[0] in equal:
                    signs = frozenset(each for each in signs if not isinstance(each[1], str))
            signs |= {(name, "") for name in node.output if self._least.get(name, -1) > 0}
            if signs and not known:
                least = min(least, min(map(self._count, signs)) / 2.0 ** (len(signs) - 1))
            for name in node.output:
                behind[name] = signs if kind not in _PICKING else frozenset((taken, name) for taken, _ in signs)
        return least

    def _count(self, sign: Sign) -> float:
        return len(self._primes) if sign[0] in self._constant else self._taken[sign[0]]
