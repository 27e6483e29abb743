"""Heads compared by their weights: `compositions` with each other, `head_tokens` with the vocabulary.

No d_model by d_model matrix is computed: with W_V = Q R, the norm of W_V W_O X is that of R W_O X, so R W_O,
[d_head, d_model], represents a head's output; likewise for the inputs of W_OV, W_QK and its transpose. A neuron's heads
are one reader and one writer of rank 1: its columns of W1, its row of W2.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial
from math import prod
from typing import Any

import numpy as np

from passes.match.projections import Projection
from rewriter.arrays import Array, distinct, grouped, largest_places
from rewriter.errors import ModelError, UsageError
from rewriter.files.load import Source
from rewriter.files.tokenizer import TokenText, tokens_as_text
from rewriter.inputs.cases import Role
from rewriter.interpret.index import AffineMap, HeadIndex, Names, chosen_heads, indexed
from rewriter.interpret.stream import STREAM, chain_to
from rewriter.interpret.sublayers import Attention, NeuronHeads, Sublayer

Chosen = Sequence[int] | slice  # members
KINDS = "QKV"  # read by queries, keys, values
_MAX_PRODUCT_ENTRIES = 2**20  # of a product, which the processor's cache then holds
_MAX_KEPT_ENTRIES = 2**27  # of writers in memory: further ones are computed for each reader
_MAX_RANKED_ENTRIES = 2**25  # 400 MB of rankings
_RARE, _ROUNDING = 5.0, 1e-5  # standard deviations; of scores in float32
_HEADS_AT_ONCE, _MAX_SCORED_ENTRIES = 2**10, 2**22  # for which a table of embeddings is read once


@dataclass(frozen=True, eq=False)
class HeadSide:
    """The input or output factors of a sublayer's heads."""

    sublayer: Sublayer
    kinds: str  # of composition; empty for an output
    data: str  # the tensor that is read, or the result
    factors: Callable[[Chosen], Array]  # [members, rank, d_model]; members are heads, or neurons

    def make(self, chosen: Chosen = slice(None)) -> Array:
        """The factors, of some members or all, scaled to a product of norm 1 (or 0)."""
        array = _checked(self.factors(chosen), self.sublayer)
        return _unit(array.reshape(len(array), -1)).reshape(array.shape)


def written(index: HeadIndex, own: Sublayer) -> HeadSide:
    """The output factors of heads: R W_O for W_V = Q R, or rows of W2."""
    if isinstance(own, NeuronHeads):
        output = AffineMap(own.output, index.value_of)
        return HeadSide(own, "", own.result, lambda chosen: output.weight()[chosen, None])
    return HeadSide(own, "", own.result, _product(index, own, "V", "O"))


def read(index: HeadIndex, own: Sublayer) -> list[HeadSide]:
    """The input factors of heads; kinds that read the same are one side."""
    if isinstance(own, Attention):
        sides = ("Q", "K", own.query), ("K", "Q", own.key), ("V", "O", own.value)
        return [HeadSide(own, kind, heads.operator.data, _product(index, own, by, kind)) for kind, by, heads in sides]

    def columns(projection: Projection, chosen: Chosen) -> Array:
        affine = AffineMap(projection, index.value_of, index.folded(projection.data))
        return affine.weight(None if isinstance(chosen, slice) else chosen).T[:, None]

    # Keys are constants; so are values in heads with c = 0.
    kinds = {"Q": own.query} | ({"V": own.value} if any(group.head.c for group in own.groups) else {})
    if own.value == own.query:
        kinds = {"".join(kinds): own.query}
    return [HeadSide(own, kind, own.data, partial(columns, each)) for kind, each in kinds.items()]


def _product(index: HeadIndex, own: Sublayer, first: str, second: str) -> Callable[[Chosen], Array]:
    """R X for the other factor, weights `first` = Q R up to transposition; X is `second`, [heads, d_head, d_model]."""

    @cache
    def root() -> Array:
        """R as the square roots of the Gram matrices R^T R, [heads, d_head, d_head]."""
        wide = _tall(index, own, first).astype(np.float64)
        values, vectors = np.linalg.eigh(np.swapaxes(wide, -1, -2) @ wide)
        return np.asarray(np.sqrt(np.maximum(values, 0.0))[..., None] * np.swapaxes(vectors, -1, -2))

    def made(chosen: Chosen) -> Array:
        other = _tall(index, own, second)[chosen]
        return np.asarray(root()[chosen].astype(other.dtype) @ np.swapaxes(other, -1, -2))

    return made


def _tall(index: HeadIndex, own: Sublayer, part: str) -> Array:
    """[heads, d_model, d_head] of the weights Q, K, V or O."""
    array = _checked(index[f"{own.name}.W_{part}"], own)
    return np.swapaxes(array, -1, -2) if part == "O" else array


def _checked(array: Array, own: Sublayer) -> Array:
    """In float32 at least. Raises ModelError for weights that are not finite."""
    if not np.isfinite(array).all():
        raise ModelError(f"weights of {own.name} are not finite: its heads cannot be compared")
    return _wide(array)


def _wide(array: Array) -> Array:
    return np.asarray(array.astype(np.result_type(array.dtype, np.float32), copy=False))


# -- composition ---------------------------------------------------------------------------------------------------


class Best:
    """The k largest positive entries of each row of a matrix seen in blocks only. Raises UsageError for too many."""

    def __init__(self, rows: int, k: int, dtype: np.dtype[Any]) -> None:
        if rows * k > _MAX_RANKED_ENTRIES:
            what = f"the {k:,} largest for each of {rows:,} heads do not fit into memory"
            raise UsageError(f"{what}; take a smaller --top")
        self.scores = np.zeros((rows, k), dtype)  # in falling order, 0 where there are fewer
        self.places = np.full((rows, k), -1, np.int64)  # their columns; -1

    def add(self, rows: Array, scores: Array, columns: Array, least: float = 0.0) -> None:
        """Take the largest above `least` of a block `scores` [R, C] of the whole matrix; no row occurs twice."""
        k = self.scores.shape[1]
        larger = np.flatnonzero(scores > np.maximum(self.scores[rows, -1:], least))  # few
        if not larger.size:
            return
        row, column = np.divmod(larger, scores.shape[1])
        starts = np.searchsorted(row, np.arange(len(rows) + 1))
        at = k + np.arange(len(row)) - starts[row]
        wide = np.zeros((len(rows), k + int(np.diff(starts).max())), scores.dtype)
        places = np.full(wide.shape, -1)
        wide[:, :k], places[:, :k] = self.scores[rows], self.places[rows]
        wide[row, at], places[row, at] = scores[row, column], columns[column]
        best = np.argpartition(wide, -k, axis=1)[:, -k:]
        wide, places = (np.take_along_axis(each, best, axis=1) for each in (wide, places))
        order = np.argsort(-wide, axis=1, kind="stable")
        self.scores[rows], self.places[rows] = (np.take_along_axis(each, order, axis=1) for each in (wide, places))

    def row(self, place: int) -> list[tuple[int, float]]:
        pairs = zip(self.places[place].tolist(), self.scores[place].tolist(), strict=True)
        return [pair for pair in pairs if pair[0] >= 0]


@dataclass(frozen=True)
class Composition:
    """One score."""

    kind: str
    reader: str  # the later head, as `blocks.1.attn.3`; of neurons as `blocks.1.mlp_heads.17`.
    writer: str
    score: float


@dataclass(frozen=True, eq=False)
class Compositions:
    """The strongest compositions of each head."""

    heads: tuple[str, ...]
    reads: Mapping[str, Best]  # kind to the writers that each head reads most
    baseline: float  # the root mean square of scores between unrelated weights

    def of(self, head: str, kind: str) -> list[Composition]:
        """The writers that a head reads, the strongest first. Raises ValueError or KeyError for an unknown one."""
        row = self.reads[kind].row(self.heads.index(head))
        return [Composition(kind, head, self.heads[other], score) for other, score in row]

    def strongest(self, count: int) -> list[Composition]:
        """The strongest of all, `count` up to the `top` of the call; equal kinds of a pair are one, such as `QV`."""
        found: dict[tuple[int, int, float], str] = {}
        for kind, best in self.reads.items():
            rows, columns = np.nonzero(best.places >= 0)
            largest = np.argsort(-best.scores[rows, columns], kind="stable")[:count]
            for row, column in zip(rows[largest].tolist(), columns[largest].tolist(), strict=True):
                key = row, int(best.places[row, column]), float(best.scores[row, column])
                found[key] = found.get(key, "") + kind
        ordered = sorted(found.items(), key=lambda each: (-each[0][2], each[0]))[:count]
        return [Composition(kind, self.heads[a], self.heads[b], score) for (a, b, score), kind in ordered]

    def to_json(self) -> dict[str, Any]:
        """JSON-ready data: per kind and head the writers, as [name, score]."""
        name = self.heads
        kinds = {
            kind: {name[at]: [[name[other], score] for other, score in best.row(at)] for at in range(len(name))}
            for kind, best in self.reads.items()
        }
        return {"baseline": self.baseline, "reads": kinds}


def compositions(model: Source | HeadIndex, *, top: int = 10, every_head: bool = True) -> Compositions:
    """How much each head reads of the outputs of earlier heads, original heads and neurons alike.

    Composition scores of Elhage et al., "A Mathematical Framework for Transformer Circuits", 2021 (docs/heads.md). A
    head B reads A if the result of A is a term of the sum that B reads: earlier layers, and in sequential layers the
    attention before an MLP. Rotary heads are compared without the rotation, and means that a LayerNormalization
    subtracts stay in. The model may be the result of `heads`, such as with `fold_ln`; `top` is per head and kind.
    Without `every_head`, only `strongest` is complete, in a third of the time.

    Raises UsageError if `top` is below 1 or does not fit into memory, ModelError as `heads` and for infinite weights.
    """
    if top < 1:
        raise UsageError(f"the strongest {top} compositions cannot be listed; take 1 or more")
    index = indexed(model)
    names = [head for each in index.sublayers for head in each.members]
    places = {name: place for place, name in enumerate(names)}
    outputs = [index.tensors[f"{each.name}.W_O"] for each in index.sublayers]
    dtype = np.dtype(np.float64 if any(each.dtype == np.float64 for each in outputs) else np.float32)
    reads = {kind: Best(len(names), min(top, len(names)), dtype) for kind in KINDS}
    largest, least = np.zeros(0, dtype), 0.0  # of all scores
    for reader, ours, writer, theirs in _factors(index, turned=not every_head):
        widths = ours.array.shape[-1], theirs.array.shape[-1]
        if widths[0] != widths[1]:
            what = f"{reader.sublayer.name} reads {widths[0]} channels and {writer.sublayer.name} writes {widths[1]}"
            raise ModelError(f"{what}: they cannot be compared")
        rows = places[reader.sublayer.members[0]] + np.arange(len(ours.array))
        columns = places[writer.sublayer.members[0]] + np.arange(len(theirs.array))
        step = max(1, _MAX_PRODUCT_ENTRIES // max(ours.array.shape[1] * theirs.array.shape[1] * len(columns), 1))
        for part in (slice(start, start + step) for start in range(0, len(rows), step)):
            likely, read = _likely(least, ours, theirs, part)
            block = block_scores(ours.array[part][likely], theirs.array[read])
            for kind in reader.kinds:
                reads[kind].add(rows[part][likely], block, columns[read], least)
            if not every_head:
                largest = distinct(np.append(largest, block[block > least]))[-top:]
                least = float(largest[0]) - _ROUNDING if len(largest) == top else 0.0
    return Compositions(tuple(names), reads, float(next((each.shape[-1] for each in outputs), 1) ** -0.5))


def pairs(index: HeadIndex) -> Iterator[tuple[HeadSide, list[HeadSide]]]:
    """Each side that reads the stream, and the earlier writers."""
    sides = {side.data: side for side in (written(index, each) for each in index.sublayers)}
    for own in index.sublayers:
        for reader in read(index, own):
            found = {*index.view.back(reader.data, STREAM, sides)}
            if order := [side for data, side in sides.items() if data in found and side.sublayer is not own]:
                yield reader, order


@dataclass(frozen=True, eq=False)
class _Factors:
    array: Array  # [members, rank, d_model]

    @cached_property
    def largest(self) -> float:
        """A bound of all singular values."""
        grams = self.array @ np.swapaxes(self.array, -1, -2)
        return float(np.sqrt(np.linalg.norm(grams, axis=(1, 2)).max(initial=0.0)))

    @cached_property
    def rest(self) -> Callable[[int], Array]:
        """The number of channels that are left out to half the squared norm of the others, [members]."""
        array = self.array  # without a cycle, which would keep it
        return cache(lambda count: np.einsum("mrd,mrd->m", *[array[..., count:]] * 2) / 2.0)


def _likely(least: float, ours: _Factors, theirs: _Factors, part: slice) -> tuple[Any, Any]:
    """Indices of the members, a part of ours and all of theirs, that may have a larger score, turned by `_cosines`.

    For A and B of norm 1, ||A B^T|| is at most the largest singular value of each, and at most
    ||A1 B1^T|| + (||A2||^2 + ||B2||^2) / 2 if A1, B1 are some of their channels, and A2, B2 the others.
    """
    a, b = ours.array[part], theirs.array
    if any(each.array.shape[1] > 1 and each.largest < least for each in (ours, theirs)):
        return np.zeros(len(a), bool), np.zeros(len(b), bool)
    used = np.arange(1, width := a.shape[-1])  # for so many channels of unrelated heads, the bound is:
    enough = used[1.0 - (used - _RARE * np.sqrt(used)) / width < least].tolist()
    if not enough:
        return slice(None), slice(None)
    bound = block_scores(a[..., : enough[0]], b[..., : enough[0]])
    bound += theirs.rest(enough[0])
    above = least - ours.rest(enough[0])[part]
    rows = bound.max(axis=1) > above
    return rows, np.asarray((bound[rows] > above[rows, None]).any(axis=0))


@cache
def _cosines(width: int) -> Array:
    """An orthogonal matrix, after which a few channels hold about the same share of any factor."""
    waves = np.cos(np.pi / width * np.arange(width) * (np.arange(width)[:, None] + 0.5))
    return np.asarray(waves / np.linalg.norm(waves, axis=0))


def _factors(index: HeadIndex, *, turned: bool) -> Iterator[tuple[HeadSide, _Factors, HeadSide, _Factors]]:
    """All pairs, each with the factors of the reader and of the writer."""
    sizes = [prod(index.tensors[f"{each.name}.W_O"].shape) for each in index.sublayers]

    def made(side: HeadSide) -> _Factors:
        array = side.make()
        width = array.shape[-1]
        flat = array.reshape(-1, width) @ _cosines(width).astype(array.dtype) if turned else array
        return _Factors(flat.reshape(array.shape))

    kept = lru_cache(max(1, _MAX_KEPT_ENTRIES // max(sizes, default=1)))(made)
    # Late writers first, for a large `least` soon: few heads read them.
    for reader, writers in pairs(index):
        ours = made(reader)
        yield from ((reader, ours, writer, kept(writer)) for writer in writers[:: -1 if turned else 1])


def block_scores(ours: Array, theirs: Array) -> Array:
    """Norms of all products of factors [a, r, d] and [b, s, d], [a, b]."""
    (a, r, d), (b, s, _) = ours.shape, theirs.shape
    if s > r:  # sums over rows are faster than sums inside them
        return block_scores(theirs, ours).T
    product = ours.reshape(a * r, d) @ theirs.reshape(b * s, d).T
    if r == s == 1:
        return np.asarray(np.abs(product, out=product))
    np.square(product, out=product)
    return np.asarray(np.sqrt(product.reshape(a, r, b * s).sum(axis=1).reshape(a, b, s).sum(axis=2)))


# -- tokens --------------------------------------------------------------------------------------------------------

Ranked = tuple[tuple[int, float], ...]  # (token id, score), the largest score first, or the smallest


@dataclass(frozen=True)
class TokenScores:
    """The tokens of one side of a head."""

    head: str
    side: str  # `Q`, `K`, `V` or `O` (output); equal ones together, such as `QV`.
    share: float  # of the weights' squared norm in this direction; 1 for neurons.
    selectivity: float  # the largest score divided by the root mean square over all tokens
    top: Ranked
    bottom: Ranked


@dataclass(frozen=True, eq=False)
class HeadTokens:
    """The tokens of all requested heads."""

    rows: tuple[TokenScores, ...]
    missing: Mapping[str, str]  # `reads` or `writes` to why it is missing
    text_of: TokenText

    def selective(self, count: int) -> list[TokenScores]:
        """The rows with the fewest distinguished tokens."""
        return sorted(self.rows, key=lambda row: -row.selectivity)[:count]

    def to_json(self) -> dict[str, Any]:
        """JSON-ready data: each row with its tokens as [id, text, score]."""

        def ranked(tokens: Ranked) -> list[list[Any]]:
            return [[token, self.text_of(token), score] for token, score in tokens]

        rows = [{**vars(row), "top": ranked(row.top), "bottom": ranked(row.bottom)} for row in self.rows]
        return {"rows": rows, "missing": dict(self.missing)}


def head_tokens(model: Source | HeadIndex, *, names: Names = "*", top: int = 10, tokenizer: Any = None) -> HeadTokens:
    """The tokens whose embeddings heads read most, and those whose logits they raise most.

    A head reads or writes along a unit vector: for neurons the column of W1 or the row of W2, for original
    heads the first singular direction of W_QK or W_OV, whose share of the squared norm is stated. Signs are such that a
    positive component of the input gives a positive component of the output, or of the score of the other side;
    original heads may flip both. Later layers read the embedding together with other terms; normalisations after it are
    not applied. `model` and `names` are as for `compositions` and `ablate`; `top` tokens are listed at either end, as
    text with a `tokenizer.json` (extra `text`), else as ids.

    Raises UsageError if a glob matches nothing or the tokenizer cannot be read, ModelError as `compositions`.
    """
    if top < 1:
        raise UsageError(f"{top} tokens cannot be listed; take 1 or more")
    told = tokens_as_text(tokenizer)
    index = indexed(model)
    missing: dict[str, str] = {}
    embeddings, outputs = cache(lambda table: _wide(index.value_of(table))), cache(lambda: unembedding(index).T)

    @cache
    def table_of(side: str, data: str, width: int) -> Array | None:
        try:
            table = outputs() if side == "O" else embeddings(embedding_table(index, data, width))
        except UsageError as error:
            missing["writes" if side == "O" else "reads"] = str(error)
            return None
        return table if table.shape[1] == width else None

    wanted = chosen_heads(index, names) if index.sublayers else []
    groups = np.cumsum([len(chosen) for _, chosen in wanted]) // _HEADS_AT_ONCE
    rows: dict[str, list[TokenScores]] = {}
    for group in grouped(zip(groups.tolist(), wanted, strict=True)).values():
        blocks = list[tuple[list[tuple[str, str, float]], Array, Array]]()  # (head, side, share), vectors, table
        for named, chosen in group:
            for side, (data, vectors, shares) in directions(index, named, chosen).items():
                table = table_of(side, data, vectors.shape[1])
                if table is not None:
                    keys = [(named.members[n], side, float(share)) for n, share in zip(chosen, shares, strict=True)]
                    blocks.append((keys, vectors, table))
        tables = {id(table): table for *_, table in blocks}
        joined = {key: np.concatenate([each for _, each, own in blocks if own is tables[key]]) for key in tables}
        scored = {key: _scored(vectors, tables[key], top) for key, vectors in joined.items()}
        for keys, _, table in blocks:
            for head, side, share in keys:
                rows.setdefault(head, []).append(TokenScores(head, side, share, *next(scored[id(table)])))
    missing = {what: missing[what] for what in ("writes", "reads") if what in missing}
    return HeadTokens(tuple(row for of_head in rows.values() for row in of_head), missing, told)


def directions(index: HeadIndex, own: Sublayer, chosen: Sequence[int]) -> dict[str, tuple[str, Array, Array]]:
    """Side to (the tensor that is read or written, unit vectors [K, d_model], shares [K]) of K chosen members."""
    sides = {side.kinds: side for side in read(index, own)} | {"O": written(index, own)}
    if isinstance(own, NeuronHeads):
        return {kinds: (side.data, side.make(chosen)[:, 0], np.ones(len(chosen))) for kinds, side in sides.items()}
    found = dict[str, tuple[str, Array, Array]]()
    for first, second in ("QK", "VO"):
        factors = sides[first].make(chosen)
        # The first right singular vectors.
        values, vectors = np.linalg.eigh((factors @ np.swapaxes(factors, -1, -2)).astype(np.float64))
        leading = _unit(np.einsum("mr,mrd->md", vectors[..., -1].astype(factors.dtype), factors))
        # The second singular vector is the first one's image, with its sign.
        theirs, ours = (_tall(index, own, part)[chosen] for part in (first, second))
        image = _unit((ours @ (leading[:, None] @ theirs).swapaxes(1, 2))[..., 0])
        for side, ends in ((first, leading), (second, image)):
            found[side] = sides[side].data, ends, np.maximum(values[..., -1], 0.0)
    return found


def _unit(vectors: Array) -> Array:
    norms = np.sqrt(np.einsum("md,md->m", vectors, vectors, dtype=np.float64))[:, None]
    return np.asarray((vectors / np.where(norms == 0.0, 1.0, norms)).astype(vectors.dtype))


def _scored(vectors: Array, table: Array, top: int) -> Iterator[tuple[float, Ranked, Ranked]]:
    """(selectivity, largest, smallest) of each vector [members, d_model] over the rows of a table."""
    step = max(1, _MAX_SCORED_ENTRIES // len(table))
    for start in range(0, len(vectors), step):
        for scores in vectors[start : start + step] @ table.T:
            rms = float(np.sqrt(np.mean(np.square(scores, dtype=np.float64))))
            largest, smallest = (
                tuple((token, float(scores[token])) for token in largest_places(sign * scores, top)) for sign in (1, -1)
            )
            yield max(largest[0][1], -smallest[0][1]) / rms if rms else 0.0, largest, smallest


def embedding_table(index: HeadIndex, tensor: str, width: int) -> str:
    """The constant [tokens, width] read at token ids to begin the stream of `tensor`. Raises UsageError for none."""
    view = index.view
    ids = {spec.name for spec in index.maker().specs if spec.role in (Role.IDS, Role.INTEGERS)}
    makers = filter(None, map(view.made_by, view.back(tensor, STREAM)))
    gathers = [node for node in makers if node.op_type == "Gather" and view.before(node.input[1]) in ids]
    found = {node.input[0] for node in gathers if node.input[0] in view.constants}
    if len(found) != 1:
        many = "several tables of embeddings begin the stream"
        raise UsageError(many if found else "no table of embeddings is read at token ids")
    (table,) = found
    if (shape := view.sizes_of(table)) is None or len(shape) != 2 or shape[1] != width:
        raise UsageError(f"the embeddings have shape {list(shape or ())}, and the stream has {width} channels")
    return str(table)


def unembedding(index: HeadIndex) -> Array:
    """[d_model, tokens], with the last scale if the index folds normalisations. Raises UsageError."""
    name = index.view.outputs[0]
    chain = chain_to(index.view, index.sublayers, index.writes, name)
    if chain.unembedding is None:
        raise UsageError(f"output {name} is the normalised stream itself: there is no unembedding")
    return _wide(AffineMap(chain.unembedding, index.value_of, index.folded(chain.norm.output)).weight())
