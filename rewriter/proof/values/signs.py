"""How often the signs of data that decide what a model computes were drawn: each is a coin in the field."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Sequence

from rewriter.evaluate.evaluator import Program
from rewriter.evaluate.table import ELEMENTWISE, MOVES
from rewriter.graph.view import key_of
from rewriter.graph.walk import iter_nodes
from rewriter.proof.values.prints import Fingerprints

_APART = ("Add", "Sub", "Sum", "Concat")
"""Operators whose result shows a change of any operand."""


class Signs:
    """The signs that one model took in all its evaluations, by node."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._taken = Counter[str]()
        self._single: set[str] = set()  # nodes that take one sign, of which all entries of a tensor depend
        self._floats: set[str] = set()

    def add(self, runs: Sequence[Fingerprints]) -> None:
        """Count the signs of some evaluations."""
        for run in runs:
            self._taken += Counter(run.signs)
            self._single |= {name for name, count in run.signs.items() if count == 1}
            self._floats.update(run.prints)

    def fewest(self, same: Container[str] = (), equal: Container[str] = ()) -> float:
        """How many signs each result of a decision was drawn with, of the least tried decision; infinite without one.

        k signs that decide together have 2^k results. Tensors of `same` are computed by a node that the other model
        has, too, and `equal` ones have values that it has.
        """
        behind: dict[str, frozenset[str]] = {}  # signs that decide which entries reach a tensor
        least = math.inf
        for node in iter_nodes(self._program.graph.node):
            given = [behind.get(name, frozenset()) for name in node.input]
            signs = max(given, key=len) if node.op_type in _APART else frozenset[str]().union(*given)
            if key_of(node) not in ELEMENTWISE and node.op_type not in MOVES:  # several entries meet here
                signs &= self._single
            signs |= self._taken.keys() & {*node.output}
            if signs and not all(name in same for name in node.output if name):
                least = min(least, min(map(self._taken.__getitem__, signs)) / 2 ** (len(signs) - 1))
            behind |= {n: frozenset() if n in equal and n in self._floats else signs for n in node.output}
        return least
