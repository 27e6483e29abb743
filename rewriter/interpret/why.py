"""`why`: a neuron's pre-activation, or an original head's score of a pair of tokens, as a sum over its sources.

With the denominators of normalisations frozen, a pre-activation y = x w + b is a sum over all terms of the residual
stream at its token, and a score scale (q k) a sum over pairs of these sources, at the query's and the key's token.
Rotations of q and k are linear too, and frozen. Shapes: D = d_model, K = d_head, or 1 for a neuron.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from glob import escape
from typing import Any

import numpy as np

from rewriter.arrays import Array, largest_places
from rewriter.errors import UsageError
from rewriter.files.load import Source
from rewriter.interpret.attribute import FrozenRun, Terms, Written, by_head
from rewriter.interpret.index import AffineMap, HeadIndex, chosen_heads
from rewriter.interpret.run import InputsOrText, tensors_of
from rewriter.interpret.stream import held_norm
from rewriter.interpret.sublayers import Attention


@dataclass(frozen=True, eq=False)
class Why:
    """A pre-activation or a score as a sum."""

    head: str
    query: int
    key: int | None  # the token with the score; None for a neuron
    total: float  # the neuron's pre-activation, or the score before the softmax, as in the model
    product: float  # the model's `scale (q k)` in it, or the pre-activation
    # `embed`, `blocks.0.attn[2]`, `b_Q`, ...; neurons are one row each for a neuron, and one per sublayer for a score
    sources: tuple[str, ...]
    keys: tuple[str, ...]  # likewise; an empty one for a neuron
    table: Array  # [sources, keys], contributions
    tokens: tuple[str, ...] = ()  # of a text

    @property
    def added(self) -> float:
        """Masks and position biases on top of `scale (q k)`; 0 for a neuron."""
        return self.total - self.product

    @property
    def residual(self) -> float:
        """The product minus the sum of the table."""
        return self.product - float(self.table.sum())

    def top(self, count: int) -> list[tuple[str, str, float]]:
        """(source, source at the key or empty, contribution), the largest first."""
        places = (divmod(place, len(self.keys)) for place in largest_places(np.abs(self.table).reshape(-1), count))
        return [(self.sources[row], self.keys[column], float(self.table[row, column])) for row, column in places]

    def largest(self, axis: int, count: int) -> list[tuple[str, float]]:
        """(source, total), the largest first; `axis` is 0 at the query, 1 at the key."""
        sums = self.table.sum(axis=1 - axis)
        return [((self.sources, self.keys)[axis][at], float(sums[at])) for at in largest_places(np.abs(sums), count)]

    def to_json(self) -> dict[str, Any]:
        names = ("head", "query", "key", "total", "added", "residual", "sources", "keys", "table", "tokens")
        return {**{name: getattr(self, name) for name in names}, "table": self.table.tolist()}


def why(model: Source, inputs: InputsOrText, head: str, *, query: int = -1, key: int | None = None) -> Why:
    """Explain a neuron's pre-activation, or an original head's score, as a sum, evaluated in float64.

    Inputs and errors are those of `attribute`; a UsageError is also a product of queries and keys that is not followed.
    `head` is as `blocks.1.attn[3]` or `blocks.1.attn.3`; of a gated neuron it is the pre-activation of its gate.
    `query` is the token of the neuron or the query, `key` by default the one that the head attends to most.
    """
    run = FrozenRun(model, inputs)
    # One name matches one head or, as chosen_heads says, none.
    ((named, (number,)),) = chosen_heads(run.index, escape(re.sub(r"\[(\d+)\]$", r".\1", head)))
    place = run.places.get(named.name)
    if place is None:
        raise UsageError(f"{named.name} is not on the way to the output")
    run.start(place + 1)
    if isinstance(named, Attention):
        scores = ScoreTerms(run, named.name)
        t, s = scores.tokens(number, query, key)
        written = Written(run.stages(place), run.beginning, by_head(sorted({t, t if named.cross else s})))
        return scores.whys(written, [(number, t, s)])(number, t, s)
    if key is not None:
        raise UsageError(f"{head} is a neuron, which reads one token: it has no key")
    values, affine = run.hooked(f"{named.name}.hook_pre"), AffineMap(named.query, run.index.value_of)
    t = _at(query, len(values))
    total = float(values[t, number])
    weight, bias = affine.weight([number]), affine.bias()[[number]]
    written = Written(run.stages(place), run.beginning, None)
    norm, names = run.frozen(named.name, named.query.data), (f"{named.name}.b_in", f"{named.name}.ln.b")
    terms = written.read(place, t, norm, weight, bias, names)
    rows = listed(run.index, named.name, terms)
    return Why(f"{named.name}[{number}]", t, None, total, total, rows, ("",), terms.table, run.words)


class ScoreTerms:
    """The scores of an attention sublayer before the softmax; keys of another sequence are one source."""

    def __init__(self, run: FrozenRun, name: str) -> None:
        """Further tensors are computed from those of a run that has started."""
        self._name, self._own, view = name, run.attention[name], run.index.view
        self._sides = sides = {"Q": self._own.query, "K": self._own.key}
        self._operands: Sequence[str] = view.nodes[view.producer[self._own.product]].input
        self._turning = {side: f"{side.lower()}_normed" if each.norm else side.lower() for side, each in sides.items()}
        parts = ("pattern", "attn_scores", "q", "k", *self._turning.values())
        hooked = tensors_of(run.hooks[f"{name}.hook_{part}"] for part in parts)
        norms = (run.norm_of(name, sides[side].operator.data) for side in ("Q" if self._own.cross else "QK"))
        read = {norm.output for norm in norms if norm is not None}
        self.run = made = run.extended({*read, self._own.product, *self._operands, *hooked})
        # Without a cycle, which would keep all arrays.
        self._frozen = cache(lambda side: made.frozen(name, sides[side].operator.data))
        self._hooked = cache(lambda part: made.hooked(f"{name}.hook_{part}"))
        # [heads, K, D] and [heads, K], of which some heads are read in one copy
        self._weights = cache(lambda part: np.ascontiguousarray(run.index[f"{name}.{part}"].swapaxes(1, -1)))

    def tokens(self, head: int, query: int, key: int | None = None) -> tuple[int, int]:
        """The query and a token that it may attend to, by default that with the largest weight. Raises UsageError."""
        pattern = self._hooked("pattern")  # [heads, T, sources]
        query = _at(query, pattern.shape[1])
        key = int(pattern[head, query].argmax()) if key is None else key
        return query, _at(key, pattern.shape[2 if self._own.cross else 1])  # a cache may have places without tokens

    def at(self, head: int, query: int, key: int) -> tuple[float, float]:
        """The model's score, and the `scale (q k)` in it."""
        scores = self._hooked("attn_scores")
        product = self.run.values[self._own.product].reshape(-1, *scores.shape)[0]
        return float(scores[head, query, key]), float(product[head, query, key] * self._own.factor)

    def whys(self, written: Written, places: Sequence[tuple[int, int, int]]) -> Callable[[int, int, int], Why]:
        """A function of one of the `places`, (head, query, key), to its score as a sum. Raises UsageError."""

        @cache
        def side(kind: str, token: int) -> tuple[tuple[str, ...], Mapping[int, Array]]:
            at = "HQK".index(kind)
            heads = sorted({place[0] for place in places if place[at] == token})
            terms = self.side(written, kind, token, heads)
            words = listed(self.run.index, self._name, terms)
            return words, dict(zip(heads, terms.table.swapaxes(0, 1), strict=True))

        def why(head: int, query: int, key: int) -> Why:
            (asked, first), (told, second) = side("Q", query), side("K", key)
            sums = *self.at(head, query, key), asked, told, first[head] @ second[head].T
            return Why(f"{self._name}[{head}]", query, key, *sums, self.run.words)

        return why

    def side(self, written: Written, side: str, token: int, heads: Sequence[int]) -> Terms:
        """The terms [terms, heads, K] of queries or keys at a token: tables are their products."""
        given = self._hooked(self._turning[side])[token, heads]
        if side == "K" and self._own.cross:
            terms = Terms([(f"{self._name}.other_sequence", 1)], given[None])
        else:
            weight, bias = (self._weights(f"{part}_{side}")[heads] for part in "Wb")
            weight = weight.reshape(-1, weight.shape[-1]).T
            names, place = (f"{self._name}.b_{side}", f"{self._name}.ln.b"), self.run.places[self._name]
            terms = written.read(place, token, self._frozen(side), weight, bias.reshape(-1), names)
            terms = Terms(terms.sources, terms.table.reshape(-1, *given.shape))
            terms = self._normed(terms, side, token, heads) if self._turning[side] != side.lower() else terms
        turned = self.rotation_at(side, token) if self._own.query.rotary else np.eye(given.shape[-1])
        turned = turned * (self._own.scale if side == "Q" else 1.0)
        made = terms.table.reshape(-1, len(turned)) @ turned  # one product
        return Terms(terms.sources, made.reshape(terms.table.shape))

    def _normed(self, terms: Terms, side: str, token: int, heads: Sequence[int]) -> Terms:
        before, after = (self._hooked(part)[token] for part in (side.lower(), self._turning[side]))
        name = f"{self._name}.{side.lower()}_norm"
        names = {part: f"{name}.{part}" for part in "wb" if f"{name}.{part}" in self.run.index}
        constants = {part: self.run.index[each][heads] for part, each in names.items()}
        norm = held_norm(before[heads], after[heads], constants, name)
        found = Terms(terms.sources, norm.linear(terms.table))
        return Terms.joined(found, Terms([(names["b"], 1)], constants["b"][None])) if "b" in names else found

    def rotation_at(self, side: str, token: int) -> Array:
        """[K, K], as factor on the right."""
        after = self.run.values[self._operands["QK".index(side)]]
        after = after if side == "Q" else after.swapaxes(-1, -2)
        after = after.reshape(self.run.batch, -1, *after.shape[-2:])[0, :, token]
        after = np.repeat(after, self._own.heads // len(after), axis=0)
        return rotation(self._hooked(self._turning[side])[token] * self._sides[side].factor, after, self._name)


def _at(token: int, count: int) -> int:
    if not -count <= token < count:
        raise UsageError(f"there is no token {token}: the sequence has {count}")
    return token % count


def listed(index: HeadIndex, own: str, terms: Terms) -> tuple[str, ...]:
    """The name of each term; heads and neurons have their numbers, `own` constants no sublayer."""
    sublayers = {each.name for each in index.sublayers}
    return tuple(
        f"{name}[{place}]" if name in sublayers and count > 1 else name.removeprefix(f"{own}.")
        for name, count in terms.sources
        for place in range(count)
    )


_MAX_DISTANCE = 1e-9  # of rotated vectors from a rotation's result, relative
_MAX_LENGTH_DIFFERENCE = 1e-6  # of factors of pairs' lengths: cosines and sines may be float32 constants


def rotation(before: Array, after: Array, where: str) -> Array:
    """[K, K]: the rotation by pairs of channels from rows `before` [heads, K] to `after`, as right factor.

    Pairs are neighbours, or halves of the channels that turn; further channels stay. Raises UsageError.
    """
    width = before.shape[1]
    for size in range(width - width % 2, 0, -2):  # the largest first: the identity rotates all channels
        for first, second in (np.arange(size).reshape(2, -1), np.arange(size).reshape(-1, 2).T):
            (a, b), (c, d) = ((rows[:, first], rows[:, second]) for rows in (before, after))
            power = np.maximum((a * a + b * b).sum(axis=0), np.finfo(np.float64).tiny)
            cos, sin = (a * c + b * d).sum(axis=0) / power, (a * d - b * c).sum(axis=0) / power
            found = np.eye(width)
            found[first, first] = found[second, second] = cos
            found[first, second], found[second, first] = sin, -sin
            # A single head can be matched by any pairs, if they may be scaled.
            turns = np.ptp(np.hypot(cos, sin)) <= _MAX_LENGTH_DIFFERENCE
            if turns and np.abs(before @ found - after).max() <= _MAX_DISTANCE * np.abs(after).max():
                return found
    raise UsageError(f"{where} turns queries or keys in a way that is not understood: its scores cannot be taken apart")
