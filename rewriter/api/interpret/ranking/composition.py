"""`compositions`: how much of what a head reads is what other heads write.

Composition scores of Elhage et al., "A Mathematical Framework for Transformer Circuits", 2021, for a head B that reads
what A wrote to the residual stream, x being rows (||.|| is the Frobenius norm):

    V   ||W_OV^A W_OV^B|| / (||W_OV^A|| ||W_OV^B||)
    Q   ||W_OV^A W_QK^B|| / (||W_OV^A|| ||W_QK^B||)
    K   ||W_OV^A W_QK^B^T|| / (||W_OV^A|| ||W_QK^B||)

Heads of a neuron have rank 1 and share what they read and write, so they are one reader and one writer: its row of W2,
its column of W1. Their keys are constants of the bias tokens, so Q is about the column alone. Between weights without
any relation the root mean square of a score is 1 / sqrt(d_model).

B reads A if the result of A is a term of the sum that B reads: earlier layers, and in sequential layers the attention
before an MLP. Rotary heads are compared without the rotation, and means that a LayerNormalization subtracts stay in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from passes.heads.original import Attention
from passes.heads.residual import parts_of
from rewriter.api.interpret.index import HeadIndex, heads
from rewriter.api.interpret.ranking.best import Best
from rewriter.api.interpret.ranking.members import Members, Places
from rewriter.api.interpret.ranking.sides import KINDS, Side, read, written
from rewriter.api.interpret.selection import Names
from rewriter.arrays import Array
from rewriter.errors import ModelError, UsageError
from rewriter.files.load import Source
from rewriter.graph.constants import Constants

_ENTRIES = 2**23
"""Largest number of entries of a product that is in memory."""


@dataclass(frozen=True)
class Composition:
    """One score.

    Attributes:
        kind: `Q`, `K` or `V`: which side of the reader.
        reader: the later head, as `blocks.1.attn.3`; of neurons as `blocks.1.mlp_heads.17`.
        writer: the earlier one.
        score: 0 to 1.
    """

    kind: str
    reader: str
    writer: str
    score: float


@dataclass(frozen=True, eq=False)
class Compositions:
    """The strongest compositions of each head.

    Attributes:
        members: the numbering of heads.
        reads: kind to the writers that each head reads most.
        read_by: kind to the readers that read each head most.
        kinds: the kinds that were asked for.
        folded: whether scales of normalisations are in the weights.
        baseline: the root mean square of scores between weights without any relation.
        compared: how many pairs of a writer and a reader's side were compared.
    """

    members: Members
    reads: Mapping[str, Best]
    read_by: Mapping[str, Best]
    kinds: str
    folded: bool
    baseline: float
    compared: int

    def of(self, head: str, kind: str) -> tuple[list[Composition], list[Composition]]:
        """(what a head reads, what reads it), the strongest first; of heads that were asked for.

        Raises:
            KeyError: there is no such head or kind.
        """
        place = self.members.place(head)
        reads = [Composition(kind, head, other, score) for other, score in self._row(self.reads[kind], place)]
        return reads, [Composition(kind, other, head, score) for other, score in self._row(self.read_by[kind], place)]

    def strongest(self, count: int) -> list[Composition]:
        """The strongest of all, `count` up to the `top` of the call; equal kinds of a pair are one, such as `QV`."""
        found: dict[tuple[int, int, float], str] = {}
        for kind in self.kinds:
            own: dict[tuple[int, int], float] = {}
            for best, turned in ((self.reads[kind], False), (self.read_by[kind], True)):
                rows, columns = np.nonzero(best.places >= 0)
                largest = np.argsort(-best.scores[rows, columns], kind="stable")[:count]
                for row, column in zip(rows[largest].tolist(), columns[largest].tolist(), strict=True):
                    pair = (row, int(best.places[row, column]))
                    own[pair[::-1] if turned else pair] = float(best.scores[row, column])
            for (reader, writer), score in own.items():
                found[reader, writer, score] = found.get((reader, writer, score), "") + kind
        ordered = sorted(found.items(), key=lambda each: (-each[0][2], each[0]))[:count]
        name = self.members.name
        return [Composition(kind, name(reader), name(writer), score) for (reader, writer, score), kind in ordered]

    def to_json(self) -> dict[str, Any]:
        """JSON-ready data: per kind and head what it reads and what reads it, as [name, score]."""
        kinds = {
            kind: {
                "reads": dict(self._listed(self.reads[kind])),
                "read_by": dict(self._listed(self.read_by[kind])),
            }
            for kind in self.kinds
        }
        return {"fold_ln": self.folded, "baseline": self.baseline, "kinds": kinds}

    def _listed(self, best: Best) -> Iterator[tuple[str, list[list[Any]]]]:
        for place in self.members.places():
            row = [[other, score] for other, score in self._row(best, place)]
            if row:
                yield self.members.name(place), row

    def _row(self, best: Best, place: int) -> Iterator[tuple[str, float]]:
        """(head, score) of a row."""
        for other, score in zip(best.places[place].tolist(), best.scores[place].tolist(), strict=True):
            if other >= 0:
                yield self.members.name(other), score


def compositions(
    model: Source | HeadIndex,
    *,
    kinds: str = KINDS,
    names: Names = "*",
    top: int = 10,
    fold_ln: bool = False,
) -> Compositions:
    """The strongest compositions of each head with earlier and with later heads, original and of neurons.

    Args:
        model: path of an ONNX file, original or rewritten, a model in memory, or the result of `heads`, whose precision
            and normalisations then count.
        kinds: some of `Q`, `K` and `V`.
        names: heads, as for `ablate`: globs such as `blocks.1.attn.*`.
        top: how many per head and kind.
        fold_ln: compare the weights with the scales of the normalisations before them.

    Raises:
        UsageError: a kind is unknown, or a glob matches nothing.
        ModelError: the model is unreadable, malformed or unsafe, or its weights are not finite.
    """
    if not kinds or set(kinds) - set(KINDS):
        raise UsageError(f"unknown kinds of composition '{kinds}'; known are Q, K and V, as in 'QV'")
    if top < 1:
        raise UsageError(f"the strongest {top} compositions cannot be listed; take 1 or more")
    index = model if isinstance(model, HeadIndex) else heads(model, fold_ln=fold_ln)
    folded = any(index.folded(side.data) is not None for each in index.sublayers for side in read(index, each))
    numbering = Members.of(index, names)
    wide = any(index.tensors[f"{each.name}.W_O"].dtype == np.float64 for each in index.sublayers)
    dtype = np.dtype(np.float64 if wide else np.float32)
    reads, read_by = (
        {kind: Best(numbering.count, min(top, max(numbering.count, 1)), dtype) for kind in kinds} for _ in range(2)
    )
    compared = 0
    for reader, writers in pairs(index):
        used = "".join(kind for kind in kinds if kind in reader.kinds)
        if used:
            compared += _compare(
                numbering, reader, writers, [reads[kind] for kind in used], [read_by[kind] for kind in used]
            )
    width = next((index.tensors[f"{each.name}.W_O"].shape[-1] for each in index.sublayers), 1)
    return Compositions(numbering, reads, read_by, kinds, folded, float(width**-0.5), compared)


def pairs(index: HeadIndex) -> Iterator[tuple[Side, list[Side]]]:
    """Each side that reads the stream, and what is written to it before."""
    constants = Constants(index.view)
    sides = {side.data: side for side in (written(index, each) for each in index.sublayers)}
    added = {
        side.data: side.named.sublayer.output.added
        for side in sides.values()
        if isinstance(side.named.sublayer, Attention) and side.named.sublayer.output.added
    }
    for named in index.sublayers:
        for reader in read(index, named):
            found: dict[str, None] = {}
            pending = [reader.data]
            while pending:
                parts = [each for each in parts_of(index.view, constants, pending.pop(), sides) if each not in found]
                found.update(dict.fromkeys(each for each in parts if each in sides))
                # An operator that adds the stream itself, such as Gemm, ends the way; what it adds goes on.
                pending += [added[each] for each in parts if each in added]
            order = [data for data, side in sides.items() if data in found and side.named is not named]
            if order:
                yield reader, [sides[data] for data in order]


def _compare(numbering: Members, reader: Side, writers: list[Side], reads: list[Best], read_by: list[Best]) -> int:
    """The scores of all members of one side with those of earlier sublayers, block by block; how many there were."""
    compared = 0
    chosen, everyone = numbering.of_sublayer(reader.named)
    rows = reader.make()
    for writer in writers:
        asked, others = numbering.of_sublayer(writer.named)
        if not chosen.size and not asked.size:
            continue
        columns = writer.make()
        if columns.shape[-1] != rows.shape[-1]:
            raise ModelError(
                f"{reader.named.name} reads {rows.shape[-1]} channels and {writer.named.name} writes "
                f"{columns.shape[-1]}: they cannot be compared"
            )
        if len(chosen) == len(everyone) and len(asked) == len(others):
            compared += _block_by_block(rows, columns, everyone, others, (reads, read_by))
            continue
        if chosen.size:
            compared += _block_by_block(rows[chosen - everyone[0]], columns, chosen, others, (reads, []))
        if asked.size:
            compared += _block_by_block(rows, columns[asked - others[0]], everyone, asked, ([], read_by))
    return compared


def _block_by_block(
    ours: Array, theirs: Array, own: Places, others: Places, into: tuple[Sequence[Best], Sequence[Best]]
) -> int:
    """Add the scores of readers `own` with writers `others`, by reader and by writer; how many there were."""
    width = ours.shape[1] * theirs.shape[1] * len(theirs)
    step = max(1, _ENTRIES // max(width, 1))
    for start in range(0, len(ours), step):
        block, at = block_scores(ours[start : start + step], theirs), own[start : start + step]
        for best in into[0]:
            best.add(at, block, others)
        for best in into[1]:
            best.add(others, block.T, at)
    return len(ours) * len(theirs)


def block_scores(ours: Array, theirs: Array) -> Array:
    """Norms of all products of factors [a, r, d] and [b, s, d], [a, b]."""
    (a, r, d), (b, s, _) = ours.shape, theirs.shape
    product = ours.reshape(a * r, d) @ theirs.reshape(b * s, d).T
    if r == s == 1:
        return np.asarray(np.abs(product, out=product))
    np.square(product, out=product)
    if s > 1:
        product = product.reshape(a * r, b, s).sum(axis=2)
    return np.asarray(np.sqrt(product.reshape(a, r, b).sum(axis=1)))
