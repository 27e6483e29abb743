"""`idle_heads`: heads whose weights say that they do nothing or always the same, and heads that do the same.

Two neurons of a sublayer that read the same direction up to a factor, and two original heads with the same W_QK and
W_OV up to factors, are duplicates. Similarities are cosines between directions, or between matrices as vectors, which
products of low-rank factors give.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from passes.heads.layers import Named
from passes.heads.neurons import NeuronHeads
from rewriter.api.interpret.index import HeadIndex, heads
from rewriter.api.interpret.ranking.members import Members
from rewriter.api.interpret.ranking.sides import read, written
from rewriter.api.interpret.selection import Names
from rewriter.arrays import Array
from rewriter.errors import UsageError
from rewriter.files.load import Source

_ROWS = 2048
"""Neurons that are compared with all others at a time."""


@dataclass(frozen=True)
class Idle:
    """A head that does nothing, or always the same.

    Attributes:
        head: as `blocks.1.attn.3`.
        reason: why.
    """

    head: str
    reason: str


@dataclass(frozen=True)
class Duplicate:
    """Two heads of a sublayer that do the same up to factors.

    Attributes:
        first: the one.
        second: the other.
        reads: cosine between what they read: of neurons that of smaller size of pre-activations and values; of
            original heads between W_QK.
        writes: cosine between what they write: rows of W2, or W_OV.
    """

    first: str
    second: str
    reads: float
    writes: float


@dataclass(frozen=True)
class IdleHeads:
    """What weights alone say.

    Attributes:
        idle: heads that do nothing, or always the same.
        duplicates: pairs of heads, the most similar first.
        similarity: the smallest cosine that counts.
    """

    idle: tuple[Idle, ...]
    duplicates: tuple[Duplicate, ...]
    similarity: float

    def to_json(self) -> dict[str, Any]:
        """JSON-ready data."""
        return {
            "similarity": self.similarity,
            "idle": [vars(each) for each in self.idle],
            "duplicates": [vars(each) for each in self.duplicates],
        }


def idle_heads(model: Source | HeadIndex, *, names: Names = "*", similarity: float = 0.999) -> IdleHeads:
    """Heads that are idle by their weights, and duplicates.

    Args:
        model: as for `compositions`.
        names: heads, as for `ablate`; of duplicates at least one is named.
        similarity: the smallest absolute cosine of duplicates, 0 to 1.

    Raises:
        UsageError: the similarity is out of range, or a glob matches nothing.
        ModelError: the model is unreadable, malformed or unsafe, or its weights are not finite.
    """
    if not 0.0 < similarity <= 1.0:
        raise UsageError(f"the similarity is {similarity:g}, which is not between 0 and 1")
    index = model if isinstance(model, HeadIndex) else heads(model)
    numbering = Members.of(index, names)
    idle: list[Idle] = []
    pairs: list[Duplicate] = []
    for named in index.sublayers:
        if named.name in numbering.chosen:
            chosen = numbering.chosen[named.name]
            sides = _sides(index, named)
            idle += [Idle(f"{named.name}.{place}", reason) for place, reason in _idle(sides) if place in chosen]
            found = (
                _neurons(sides, similarity)
                if isinstance(named.sublayer, NeuronHeads)
                else _heads(index, named, similarity)
            )
            pairs += [
                Duplicate(f"{named.name}.{a}", f"{named.name}.{b}", reads, writes)
                for a, b, reads, writes in found
                if a in chosen or b in chosen
            ]
    pairs.sort(key=lambda each: (-abs(each.reads), -abs(each.writes)))
    return IdleHeads(tuple(idle), tuple(pairs), similarity)


def _sides(index: HeadIndex, named: Named) -> dict[str, Array]:
    """Side to factors [members, rank, d_model]."""
    found = {}
    for side in read(index, named):
        factors = side.make()
        found.update(dict.fromkeys(side.kinds, factors))
    return {**found, "O": written(index, named).make()}


_REASONS = {
    "O": "writes nothing: W_OV or W_O is zero",
    "V": "its values are constant: W_V is zero",
    "Q": "its pattern does not depend on the tokens: W_QK is zero",
}


def _idle(sides: dict[str, Array]) -> Iterator[tuple[int, str]]:
    silent = {
        side: (sides[side] == 0.0).reshape(len(sides[side]), -1).all(axis=1) for side in _REASONS if side in sides
    }
    for place in range(len(sides["O"])):
        reason = next((text for side, text in _REASONS.items() if side in silent and silent[side][place]), "")
        if reason:
            yield place, reason


Pair = tuple[int, int, float, float]


def _neurons(sides: dict[str, Array], similarity: float) -> Iterator[Pair]:
    """Pairs of neurons with the same direction of pre-activations, and of values."""
    reading = [sides[side][:, 0] for side in "QV" if side in sides]
    writing = sides["O"][:, 0]
    for start in range(0, len(writing), _ROWS):
        smallest = None
        for rows in {id(each): each for each in reading}.values():
            cosines = rows[start : start + _ROWS] @ rows.T
            smallest = cosines if smallest is None else np.where(np.abs(cosines) < np.abs(smallest), cosines, smallest)
        if smallest is None:
            return
        first, second = np.nonzero(np.abs(smallest) >= similarity)
        for a, b in zip(first.tolist(), second.tolist(), strict=True):
            if start + a < b:
                yield start + a, b, float(smallest[a, b]), float(writing[start + a] @ writing[b])


def _heads(index: HeadIndex, named: Named, similarity: float) -> Iterator[Pair]:
    """Pairs of original heads with the same W_QK and W_OV."""
    own = {part: index[f"{named.name}.{part}"].astype(np.float64) for part in ("W_Q", "W_K", "W_V", "W_O")}
    reads, writes = _cosines(own["W_Q"], own["W_K"]), _cosines(own["W_V"], np.swapaxes(own["W_O"], -1, -2))
    for a, b in zip(*np.nonzero((np.abs(reads) >= similarity) & (np.abs(writes) >= similarity)), strict=True):
        if a < b:
            yield int(a), int(b), float(reads[a, b]), float(writes[a, b])


def _cosines(left: Array, right: Array) -> Array:
    """[heads, heads] between the matrices A B^T: <A B^T, C D^T> is the sum over entries of (A^T C) * (B^T D)."""
    inner = np.empty((len(left), len(left)))
    for place in range(len(left)):
        a, b = np.swapaxes(left[place], 0, 1) @ left, np.swapaxes(right[place], 0, 1) @ right
        inner[place] = (a * b).sum(axis=(1, 2))
    norms = np.sqrt(np.maximum(np.diagonal(inner), 0.0))
    return inner / np.where(norms == 0.0, 1.0, norms)[:, None] / np.where(norms == 0.0, 1.0, norms)
