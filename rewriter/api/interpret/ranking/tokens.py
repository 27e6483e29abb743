"""`head_tokens`: the tokens whose embeddings a head reads most, and those whose logits it raises most.

What a head reads or writes is a direction of unit length: of neurons the column of W1 or the row of W2, of original
heads the first singular direction of W_QK or W_OV, whose share of the squared norm is stated. Signs are such that a
positive component of what is read gives a positive component of what is written, or of the score of the other side;
original heads may turn both. Later layers read the embedding with much else; normalisations after it are not applied.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from passes.heads.layers import Named
from passes.heads.original import Attention
from rewriter.api.interpret.index import HeadIndex, heads
from rewriter.api.interpret.ranking.best import Best
from rewriter.api.interpret.ranking.members import Members
from rewriter.api.interpret.ranking.sides import read, written
from rewriter.api.interpret.ranking.vocabulary import Told, embedding, embedding_table, tokens_as_text, unembedding
from rewriter.api.interpret.selection import Names
from rewriter.arrays import Array
from rewriter.errors import UsageError
from rewriter.files.load import Source

SIDES = "QKVO"
"""What queries, keys and values read, and what is written."""

_ENTRIES = 2**23
"""Largest number of entries of a product that is in memory."""


@dataclass(frozen=True)
class TokenScores:
    """The tokens of one side of a head.

    Attributes:
        head: as `blocks.1.attn.3`.
        side: one of `SIDES`, or several that are the same, such as `QV`.
        share: of the squared norm of the weights that this direction has; 1 for neurons.
        selectivity: the largest score divided by the root mean square over all tokens.
        top: (token id, score), the largest first.
        bottom: the same for the smallest.
    """

    head: str
    side: str
    share: float
    selectivity: float
    top: tuple[tuple[int, float], ...]
    bottom: tuple[tuple[int, float], ...]


@dataclass(frozen=True, eq=False)
class HeadTokens:
    """The tokens of all heads that were asked for.

    Attributes:
        rows: the sides of the heads, in order.
        missing: what is not there, and why: `reads` or `writes` to a reason.
        told: token ids in words.
    """

    rows: tuple[TokenScores, ...]
    missing: Mapping[str, str]
    told: Told

    def selective(self, count: int) -> list[TokenScores]:
        """The rows that tell few tokens from all others."""
        return sorted(self.rows, key=lambda row: -row.selectivity)[:count]

    def to_json(self) -> dict[str, Any]:
        """JSON-ready data: each row with its tokens as [id, text, score]."""
        rows = [
            {
                "head": row.head,
                "side": row.side,
                "share": row.share,
                "selectivity": row.selectivity,
                **{
                    name: [[token, self.told(token), score] for token, score in found]
                    for name, found in (("top", row.top), ("bottom", row.bottom))
                },
            }
            for row in self.rows
        ]
        return {"rows": rows, "missing": dict(self.missing)}


def head_tokens(
    model: Source | HeadIndex,
    *,
    names: Names = "*",
    top: int = 10,
    fold_ln: bool = False,
    output: str | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
) -> HeadTokens:
    """The tokens that heads read and write.

    Args:
        model: as for `compositions`.
        names: heads, as for `ablate`.
        top: tokens at either end.
        fold_ln: with the scales of the normalisations before heads and before the unembedding.
        output: whose unembedding; default: the first one.
        tokenizer: a `tokenizer.json` that gives tokens as text (extra `text`); default: ids.

    Raises:
        UsageError: a glob matches nothing, or the tokenizer cannot be read.
        ModelError: the model is unreadable, malformed or unsafe, or its weights are not finite.
    """
    if top < 1:
        raise UsageError(f"{top} tokens cannot be listed; take 1 or more")
    told = tokens_as_text(tokenizer)
    index = model if isinstance(model, HeadIndex) else heads(model, fold_ln=fold_ln)
    numbering = Members.of(index, names)
    tables = _Tables(index, output)
    rows = [
        row
        for named in index.sublayers
        if named.name in numbering.chosen
        for row in _rows(tables, named, numbering, top)
    ]
    order = {side: place for place, side in enumerate(SIDES)}
    rows.sort(key=lambda row: (numbering.place(row.head), order[row.side[0]]))
    return HeadTokens(tuple(rows), tables.missing, told)


class _Tables:
    """Embeddings and the unembedding, each read once; reasons for those that are missing."""

    def __init__(self, index: HeadIndex, output: str | None) -> None:
        self.index, self.missing = index, dict[str, str]()
        self._read: dict[str, Array] = {}
        self._output: Array | None = None
        try:
            self._output = unembedding(index, output)
        except UsageError as error:
            self.missing["writes"] = str(error)

    def embeddings(self, data: str, width: int) -> Array | None:
        """[tokens, d_model] of the stream that `data` is part of."""
        try:
            table = embedding_table(self.index, data, width)
        except UsageError as error:
            self.missing["reads"] = str(error)
            return None
        if table not in self._read:
            self._read[table] = embedding(self.index, table)
        return self._read[table]

    def unembedded(self, width: int) -> Array | None:
        """[tokens, d_model] of the output; None where there is none, or it has another width."""
        return None if self._output is None or len(self._output) != width else self._output.T


def _rows(tables: _Tables, named: Named, numbering: Members, top: int) -> Iterator[TokenScores]:
    chosen = numbering.chosen[named.name]
    for side, data, (vectors, shares) in directions(tables.index, named):
        table = tables.unembedded(vectors.shape[1]) if side == "O" else tables.embeddings(data, vectors.shape[1])
        if table is not None:
            for place, found in zip(chosen, _scored(vectors[chosen], table, top), strict=True):
                yield TokenScores(f"{named.name}.{place}", side, float(shares[place]), *found)


def directions(index: HeadIndex, named: Named) -> Iterator[tuple[str, str, tuple[Array, Array]]]:
    """(side, the tensor that is read or written, (unit vectors [members, d_model], shares [members]))."""
    own = named.sublayer
    sides = {side.kinds: side for side in read(index, named) if side.kinds}
    sides["O"] = written(index, named)
    found = {side: _leading(each.make()) for side, each in sides.items()}
    if isinstance(own, Attention):
        for first, second in (("V", "O"), ("Q", "K")):
            pair = (
                (found[first][0], index[f"{named.name}.W_{first}"]),
                (found[second][0], index[f"{named.name}.W_{second}"]),
            )
            inner = np.einsum("hd,hdk->hk", *pair[0])
            other = np.einsum("hd,hkd->hk" if second == "O" else "hd,hdk->hk", *pair[1])
            signs = np.where((inner * other).sum(axis=1) < 0.0, -1.0, 1.0).astype(inner.dtype)
            found[second] = (found[second][0] * signs[:, None], found[second][1])
    for side, each in found.items():
        yield side, sides[side].data, each


def _leading(factors: Array) -> tuple[Array, Array]:
    """(the first right singular vectors [members, d_model], their shares) of factors [members, rank, d_model]."""
    if factors.shape[1] == 1:
        return factors[:, 0], np.ones(len(factors))
    gram = factors @ np.swapaxes(factors, -1, -2)
    values, vectors = np.linalg.eigh(gram.astype(np.float64))
    leading = np.einsum("mr,mrd->md", vectors[..., -1].astype(factors.dtype), factors)
    norms = np.linalg.norm(leading, axis=1, keepdims=True)
    return leading / np.where(norms == 0.0, 1.0, norms), np.maximum(values[..., -1], 0.0)


Found = tuple[float, tuple[tuple[int, float], ...], tuple[tuple[int, float], ...]]


def _scored(vectors: Array, table: Array, top: int) -> Iterator[Found]:
    """(selectivity, largest, smallest) of each vector [members, d_model] over the rows of a table."""
    count = min(top, len(table))
    dtype = np.result_type(vectors, table)
    for start in range(0, len(vectors), _MEMBERS):
        some = vectors[start : start + _MEMBERS]
        rows, squares = np.arange(len(some)), np.zeros(len(some))
        ends = [Best(len(some), count, np.dtype(dtype), floor=-np.inf) for _ in range(2)]
        step = max(1, _ENTRIES // len(some))
        for first in range(0, len(table), step):
            scores = some @ table[first : first + step].T
            squares += np.einsum("mt,mt->m", scores, scores)
            places = np.arange(first, first + scores.shape[1])
            ends[0].add(rows, scores, places)
            ends[1].add(rows, np.negative(scores, out=scores), places)
        for place in rows:
            largest, smallest = (
                list(zip(e.places[place].tolist(), e.scores[place].tolist(), strict=True)) for e in ends
            )
            rms = float(np.sqrt(squares[place] / len(table)))
            peak = max(abs(largest[0][1]), abs(smallest[0][1]))
            yield peak / rms if rms else 0.0, tuple(largest), tuple((token, -score) for token, score in smallest)


_MEMBERS = 2048
"""Vectors that are scored at a time."""
