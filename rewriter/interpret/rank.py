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

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from passes.match.projections import Projection
from rewriter.arrays import Array
from rewriter.errors import ModelError, UsageError
from rewriter.files.load import Source
from rewriter.graph.constants import Constants
from rewriter.graph.view import SAME_NUMBERS
from rewriter.interpret.index import HeadIndex, Members, Names, Places, heads
from rewriter.interpret.original import Attention
from rewriter.interpret.stream import chain_to, parts_of
from rewriter.interpret.sublayers import Named, NeuronHeads
from rewriter.interpret.tensors import Affine
from rewriter.proof.inputs.read import open_tokenizer, spelling
from rewriter.proof.inputs.roles import Role, input_specs
from rewriter.text import quoted

# -- best ----------------------------------------


_MOST = 2**25
"""Entries that are kept at most: 400 MB."""

_MANY = 4
"""Entries per kept entry from which on a partial sort of whole rows is faster than sorting the entries."""


class Best:
    """The k largest entries per row so far, in falling order.

    Attributes:
        scores: [rows, k]; `floor` where there are fewer.
        places: [rows, k], their columns; -1 where there are fewer.

    Raises:
        UsageError: they would not fit into memory.
    """

    def __init__(self, rows: int, k: int, dtype: np.dtype[Any], floor: float = 0.0) -> None:
        if rows * k > _MOST:
            raise UsageError(
                f"the {k:,} largest for each of {rows:,} heads do not fit into memory; take a smaller --top"
            )
        self.scores = np.full((rows, k), floor, dtype)
        self.places = np.full((rows, k), -1, np.int64)

    def add(self, rows: Places, scores: Array, columns: Places) -> None:
        """Take entries that are larger than the smallest kept ones.

        Args:
            rows: [R], which rows of the whole matrix; no row twice.
            scores: [R, C], a block.
            columns: [C], which columns of the whole matrix.
        """
        k = self.scores.shape[1]
        larger = scores > self.scores[rows, -1][:, None]
        count = int(np.count_nonzero(larger))
        if count > _MANY * k * len(rows) and scores.shape[1] > k:
            # At first almost everything is larger than what is kept: k entries per row are enough.
            chosen = np.argpartition(scores, -k, axis=1)[:, -k:]
            self._merge(rows, np.take_along_axis(scores, chosen, axis=1), columns[chosen])
        elif count:
            self._merge_few(rows, scores, columns, *_nonzero(larger))

    def _merge_few(self, rows: Places, scores: Array, columns: Places, row: Places, column: Places) -> None:
        """Take some entries of a block, of which row `row` may have any number."""
        touched, short = np.unique(row, return_inverse=True)
        order = np.argsort(short, kind="stable")
        short, values, column = short[order], scores[row, column][order], column[order]
        rank = np.arange(len(short)) - np.searchsorted(short, short)
        dense = np.full((len(touched), int(rank.max()) + 1), -np.inf, values.dtype)
        places = np.full(dense.shape, -1, np.int64)
        dense[short, rank], places[short, rank] = values, columns[column]
        self._merge(rows[touched], dense, places)

    def _merge(self, rows: Places, scores: Array, places: Places) -> None:
        """Merge entries [R, n] with their columns into rows."""
        k = self.scores.shape[1]
        wide = np.concatenate([self.scores[rows], scores], axis=1)
        columns = np.concatenate([self.places[rows], places], axis=1)
        best = np.argsort(-wide, axis=1, kind="stable")[:, :k]
        self.scores[rows] = np.take_along_axis(wide, best, axis=1)
        self.places[rows] = np.take_along_axis(columns, best, axis=1)


def _nonzero(mask: Array) -> tuple[Places, Places]:
    """`numpy.nonzero`, in the order in which the mask lies in memory."""
    if mask.flags.f_contiguous and not mask.flags.c_contiguous:
        column, row = np.nonzero(mask.T)
    else:
        row, column = np.nonzero(mask)
    return row, column


# -- sides ----------------------------------------


KINDS = "QKV"
"""What is read: by queries, by keys, by values."""


@dataclass(frozen=True, eq=False)
class Side:
    """What the heads of a sublayer read, or what they write.

    Attributes:
        named: the sublayer.
        kinds: the kinds of composition that it is for; empty for what is written.
        data: the tensor that is read, or the result that is written.
        make: [members, rank, d_model]; members are heads, or neurons.
    """

    named: Named
    kinds: str
    data: str
    make: Callable[[], Array]


def written(index: HeadIndex, named: Named) -> Side:
    """What heads write: R W_O for W_V = Q R, or rows of W2."""
    own = named.sublayer
    if isinstance(own, NeuronHeads):
        return Side(named, "", own.result, lambda: _unit(_plain(index, own.output).weight()[:, None], named))
    return Side(named, "", own.output.output, _product(index, named, "W_V", "W_O"))


def read(index: HeadIndex, named: Named) -> list[Side]:
    """What heads read; kinds that read the same are one side."""
    own = named.sublayer
    if isinstance(own, NeuronHeads):
        return _read_by_neurons(index, named, own)
    return [
        Side(named, "Q", own.query.operator.data, _product(index, named, "W_K", "W_Q")),
        Side(named, "K", own.key.operator.data, _product(index, named, "W_Q", "W_K")),
        Side(named, "V", own.value.operator.data, _product(index, named, "W_O", "W_V")),
    ]


def _read_by_neurons(index: HeadIndex, named: Named, own: NeuronHeads) -> list[Side]:
    groups = own.groups
    # Keys are constants; so are values in heads with c = 0.
    passing = any(group.head.c for group in groups)
    if own.value == own.query:
        kinds = "Q" + "V" * passing
        return [Side(named, kinds, own.data, lambda: _columns(index, named, own.query))]
    gate = Side(named, "Q", own.data, lambda: _columns(index, named, own.query))
    return [gate, Side(named, "V" * passing, own.data, lambda: _columns(index, named, own.value))]


def _plain(index: HeadIndex, projection: Projection) -> Affine:
    return Affine(projection, index.value_of)


def _columns(index: HeadIndex, named: Named, projection: Projection) -> Array:
    """[neurons, 1, d_model]."""
    weight = Affine(projection, index.value_of, index.folded(projection.data)).weight()
    return _unit(weight.T[:, None], named)


def _product(index: HeadIndex, named: Named, first: str, second: str) -> Callable[[], Array]:
    """R X for the other factor `first` = Q R up to transposition; X is `second` as [heads, d_head, d_model]."""

    @cache
    def triangle() -> Array:
        return triangles(_tall(_checked(index[f"{named.name}.{first}"], named), first))

    def make() -> Array:
        inner = _tall(_checked(index[f"{named.name}.{second}"], named), second)
        return _unit(triangle() @ np.swapaxes(inner, -1, -2), named)

    return make


def triangles(tall: Array) -> Array:
    """R of the QR decompositions of [heads, d_model, d_head].

    By blocks of rows whose R are decomposed again (Demmel et al., 2012): as accurate, and small enough for LAPACK not
    to share the work among threads, which on a busy machine wait for each other hundreds of times as long.
    """
    count, _, width = tall.shape
    while tall.shape[1] > 2 * width:
        lacking = -tall.shape[1] % (2 * width)
        if lacking:
            tall = np.concatenate([tall, np.zeros((count, lacking, width), tall.dtype)], axis=1)
        blocks = np.asarray(np.linalg.qr(tall.reshape(count, -1, 2 * width, width), mode="r"))
        tall = blocks.reshape(count, -1, width)
    return np.asarray(np.linalg.qr(tall, mode="r"))


def _tall(array: Array, name: str) -> Array:
    """[heads, d_model, d_head]."""
    return np.swapaxes(array, -1, -2) if name == "W_O" else array


def _unit(array: Array, named: Named) -> Array:
    """Each member divided by its norm."""
    array = np.ascontiguousarray(_checked(array, named))
    # Scaled first, so that squares of small or large weights neither vanish nor overflow.
    largest = np.abs(array).max(axis=(1, 2), keepdims=True, initial=0.0)
    array = array / np.where(largest == 0.0, 1.0, largest)
    norms = np.sqrt(np.einsum("mrd,mrd->m", array, array))
    return np.asarray(array / np.where(norms == 0.0, 1.0, norms)[:, None, None])


def _checked(array: Array, named: Named) -> Array:
    """In float32 at least. Raises ModelError for weights that are not finite."""
    array = array.astype(np.result_type(array.dtype, np.float32), copy=False)
    if not np.isfinite(array).all():
        raise ModelError(f"weights of {named.name} are not finite: its heads cannot be compared")
    return array


# -- vocabulary ----------------------------------------


Told = Callable[[int], str]
"""A token id in words."""

_LONGEST = 40


def embedding_table(index: HeadIndex, tensor: str, width: int) -> str:
    """The name of the constant [tokens, width] whose rows the stream begins with that `tensor` is part of.

    Raises:
        UsageError: there is none; the message says why.
    """
    view, constants = index.view, Constants(index.view)
    ids = {spec.name for spec in input_specs(index.proto, view) if spec.role in (Role.IDS, Role.INTEGERS)}
    found: list[str] = []
    for part in parts_of(view, constants, tensor, ()):
        node = view.made_by(part)
        if node is None or node.op_type != "Gather" or node.input[0] not in constants:
            continue
        source = node.input[1]
        while source not in ids and (maker := view.made_by(source)) is not None and maker.op_type in SAME_NUMBERS:
            source = maker.input[0]
        if source in ids:
            found.append(node.input[0])
    if len(set(found)) != 1:
        many = (
            "several tables of embeddings begin the stream" if found else "no table of embeddings is read at token ids"
        )
        raise UsageError(many)
    shape = constants.shape(found[0])
    if shape is None or len(shape) != 2 or shape[1] != width:
        raise UsageError(f"the embeddings have shape {list(shape or ())}, and the stream has {width} channels")
    return found[0]


def embedding(index: HeadIndex, table: str) -> Array:
    """[tokens, d_model]."""
    return np.asarray(_wide(index.constant(table)))


def unembedding(index: HeadIndex, output: str | None = None) -> Array:
    """[d_model, tokens], with the last normalisation's scale where the index has normalisations folded.

    Raises:
        UsageError: the output is not a linear map of the normalised stream; the message says why.
    """
    name = index.view.outputs[0] if output is None else output
    if name not in index.view.outputs:
        raise UsageError(f"the model has no output {quoted(name)}")
    chain = chain_to(index.view, index.sublayers, name)
    if chain.unembedding is None:
        raise UsageError(f"output {name} is the normalised stream itself: there is no unembedding")
    norm = index.folded(chain.norm.output)
    return np.asarray(_wide(Affine(chain.unembedding, index.value_of, norm).weight()))


def _wide(array: Array) -> Array:
    return array.astype(np.result_type(array.dtype, np.float32), copy=False)


def tokens_as_text(tokenizer: str | os.PathLike[str] | None) -> Told:
    """Token ids in words: by a `tokenizer.json`, or as numbers without one.

    Raises:
        UsageError: the package tokenizers is missing, or it does not read the file.
    """
    if tokenizer is None:
        return str
    opened = open_tokenizer(tokenizer)

    def told(token: int) -> str:
        text = spelling(opened, token)[:_LONGEST]
        return f"'{text}'" if text else str(token)

    return told


# -- tokens ----------------------------------------


SIDES = "QKVO"
"""What queries, keys and values read, and what is written."""

_PRODUCT = 2**23
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
        step = max(1, _PRODUCT // len(some))
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


# -- copies ----------------------------------------


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


# -- composition ----------------------------------------


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
