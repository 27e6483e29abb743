"""`why`: why a neuron's pre-activation, or the score that an original head gives to a pair of tokens, is what it is.

With the denominators of normalisations held, what a neuron or a head reads is a sum over all that was written to the
residual stream at its token: the embedding, heads and neurons of earlier layers, biases. So a pre-activation
y = x w + b is a sum over these sources, and a score scale (q k) a sum over pairs of them, one at the query's token and
one at the key's. Rotations of q and k are linear too, and held. Shapes: D = d_model, K = d_head, or 1 for a neuron.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from glob import escape
from typing import Any

import numpy as np

from rewriter.arrays import Array
from rewriter.errors import UsageError
from rewriter.files.load import Source
from rewriter.interpret.attribute import FrozenRun, FrozenStage, NeuronStep, Step, sources
from rewriter.interpret.index import AffineMap, HeadIndex, chosen_heads
from rewriter.interpret.original import Attention
from rewriter.interpret.rank import token_rows
from rewriter.interpret.stream import norm_of
from rewriter.interpret.sublayers import Named, NeuronHeads
from rewriter.proof.inputs.given import InputsOrText

Parts = Mapping[str, Array]
"""Source to [members, K], what each of its members gives to what is read."""


@dataclass(frozen=True, eq=False)
class Why:
    """A pre-activation or a score as a sum.

    Attributes:
        head: the neuron or head, as `blocks.1.attn[3]`.
        query: its token.
        key: the token that it gives the score to; None for a neuron.
        total: the model's value: the neuron's pre-activation, or the score before the softmax.
        added: what the model adds to `scale (q k)`: masks and position biases; 0 for a neuron.
        residual: the model's `scale (q k)`, or the pre-activation, minus the sum of the table.
        sources: what the rows are of: `embed`, `pos_embed`, `blocks.0.attn[2]`, `b_Q`, ...; neurons are one row each
            for a neuron, and one per sublayer for a score.
        keys: the same of the columns; one without a name for a neuron.
        table: [sources, keys], contributions.
        tokens: the tokens of the text; empty where inputs are arrays.
    """

    head: str
    query: int
    key: int | None
    total: float
    added: float
    residual: float
    sources: tuple[str, ...]
    keys: tuple[str, ...]
    table: Array
    tokens: tuple[str, ...] = ()

    def top(self, count: int) -> list[tuple[str, str, float]]:
        """(source, source at the key or empty, contribution), the largest first."""
        largest = np.argsort(-np.abs(self.table), axis=None, kind="stable")[:count]
        places = zip(*np.unravel_index(largest, self.table.shape), strict=True)
        return [(self.sources[row], self.keys[column], float(self.table[row, column])) for row, column in places]

    def to_json(self) -> dict[str, Any]:
        """JSON-ready data."""
        return {**vars(self), "table": self.table.tolist()}


def why(
    model: Source,
    inputs: InputsOrText,
    head: str,
    *,
    query: int = -1,
    key: int | None = None,
    output: str | None = None,
    sequence: int = 0,
) -> Why:
    """Why a neuron's pre-activation, or an original head's score, is what it is, evaluated in float64.

    Args:
        model: path of an ONNX file, original or rewritten, or a model in memory.
        inputs: maps inputs to arrays; an npz file with one case; or a `Text`.
        head: a neuron or an original head, as `blocks.1.attn[3]` or `blocks.1.attn.3`. Of a gated neuron it is the
            pre-activation of its gate.
        query: the token of the neuron, or of the query.
        key: the token that the head gives the score to; default: the one that it attends to most. None for a neuron.
        output: the output [batch, tokens, entries] that the sublayer works for; default: the first one.
        sequence: the sequence in the batch.

    Raises:
        UsageError: there is no such head or token; the sublayer does not read the residual stream through a
            normalisation; or queries meet keys in a way that is not followed.
        ModelError: the model is unreadable, malformed or unsafe.
        ValidationError: the model cannot be evaluated in float64.
    """
    run = FrozenRun(model, inputs, output=output, sequence=sequence)
    # One name matches one head or, as chosen_heads says, none.
    ((named, (number,)),) = chosen_heads(run.index, escape(re.sub(r"\[(\d+)\]$", r".\1", head)))
    place = next((at for at, each in enumerate(run.chain.stages) if named in each.sublayers), None)
    if place is None:
        raise UsageError(f"{named.name} is not on the way to the output")
    reader = _Reader(run, named, number, place)
    if isinstance(named.sublayer, Attention):
        return reader.score(named.sublayer, query, key)
    if key is not None:
        raise UsageError(f"{head} is a neuron, which reads one token: it has no key")
    return reader.pre_activation(named.sublayer, query)


class _Reader:
    """A neuron or a head, and what it reads of the stream."""

    def __init__(self, run: FrozenRun, named: Named, number: int, place: int) -> None:
        self._run, self._named, self._number, self._place = run, named, number, place
        own, self._before = named.sublayer, run.chain.stages[place].before
        self._token_part = _token_part(run.index, run.chain.stages[0].before)
        needed, data = {self._token_part}, [own.data] if isinstance(own, NeuronHeads) else []
        if isinstance(own, Attention):
            data = [own.query.operator.data] + [own.key.operator.data] * (not own.cross)
            hooks = (run.hooks[f"{named.name}.hook_{part}"] for part in ("attn_scores", "q", "k"))
            needed |= {own.product, *self._operands(own), *(name for hook in hooks for name in hook.tensors)}
        self._norms = {each: norm_of(run.index.view, named.name, each, self._before) for each in data}
        run.start(place + 1, needed | {norm.output for norm in self._norms.values() if norm})

    def pre_activation(self, own: NeuronHeads, query: int) -> Why:
        """That of a neuron, or of its gate."""
        values, affine = self._hooked("pre"), AffineMap(own.query, self._run.index.value_of)
        token, column = _at(query, len(values)), slice(self._number, self._number + 1)
        parts = self._parts(own.data, token, affine.weight()[:, column], affine.bias()[column], "b_in")
        value = float(values[token, self._number])
        return self._made((token, None), parts, {"": np.ones((1, 1))}, value, value)

    def score(self, own: Attention, query: int, key: int | None) -> Why:
        """The score of an original head before the softmax."""
        run, head, name = self._run, self._number, self._named.name
        pattern, scores, queries, keys = (self._hooked(part) for part in ("pattern", "attn_scores", "q", "k"))
        t = _at(query, pattern.shape[1])
        s = _at(int(pattern[head, t].argmax()) if key is None else key, pattern.shape[2])
        w_q, b_q, w_k, b_k = (run.index[f"{name}.{part}"][head] for part in ("W_Q", "b_Q", "W_K", "b_K"))
        asked = self._parts(own.query.operator.data, t, w_q, b_q, "b_Q")
        told: Parts = {"other_sequence": keys[s, head][None]}
        if not own.cross:
            told = self._parts(own.key.operator.data, s, w_k, b_k, "b_K")
        met = np.eye(keys.shape[-1]) * own.scale
        if own.rotary:
            after_q, after_k = (run.values[operand] for operand in self._operands(own))
            turned = (each.reshape(run.batch, -1, *each.shape[-2:]) for each in (after_q, after_k.swapaxes(-1, -2)))
            after_q, after_k = (np.repeat(each, own.heads // len(each), axis=0) for each in map(run.own, turned))
            turn_q = rotation(queries[t] * own.query.factor, after_q[:, t], name)
            met = turn_q @ rotation(keys[s] * own.key.factor, after_k[:, s], name).T * own.scale
        product = run.own(run.values[own.product].reshape(-1, *scores.shape))[head, t, s] * own.factor
        met_keys = {source: part @ met.T for source, part in told.items()}
        return self._made((t, s), asked, met_keys, float(product), float(scores[head, t, s]))

    def _operands(self, own: Attention) -> tuple[str, str]:
        """Queries and keys, as they meet."""
        query, key = self._run.index.view.nodes[self._run.index.view.producer[own.product]].input
        return query, key

    def _hooked(self, part: str) -> Array:
        """What a hook of the sublayer records."""
        return self._run.hooked(f"{self._named.name}.hook_{part}")

    @cached_property
    def _stages(self) -> list[FrozenStage]:
        return [*self._run.stages(self._place), FrozenStage({}, self._run.between(self._place))]

    def _parts(self, data: str, token: int, weight: Array, bias: Array, name: str) -> Parts:
        """Source to what it gives to `data weight + bias` at a token, [D, K] and [K]; `name` is that of the bias."""
        run, stages = self._run, self._stages
        frozen = run.freeze(self._norms[data], self._before, self._named.name)
        found = {name: bias[None], "ln.b": (weight.T @ frozen.bias)[None]}
        start = {"embed": run.stream(run.chain.stages[0].before)}
        if self._token_part:
            embedded = run.stream(self._token_part)
            start = {"embed": embedded, "pos_embed": start["embed"] - embedded}
        for source, written, rows in sources(stages, start, self._place, token, frozen.back_at(token, weight.T)):
            vectors = written
            if isinstance(written, NeuronStep) and isinstance(self._named.sublayer, Attention):
                # A pair of neurons is one of too many: for a score the neurons of a sublayer are one source.
                vectors = written.written[token].reshape(-1) @ written.weight()
            found[source] = vectors.along(token, rows) if isinstance(vectors, Step) else (vectors @ rows.T)[None]
        return {source: part for source, part in found.items() if part.any()}

    def _made(self, tokens: tuple[int, int | None], left: Parts, right: Parts, product: float, total: float) -> Why:
        (rows, first), (columns, second) = (_listed(self._run.index, side) for side in (left, right))
        table, words = first @ second.T, () if self._run.tokens is None else self._run.tokens.spelled[0]
        head, residual = f"{self._named.name}[{self._number}]", product - float(table.sum())
        return Why(head, *tokens, total, total - product, residual, rows, columns, table, words)


def _at(token: int, count: int) -> int:
    """A token's place from the start. Raises UsageError."""
    if not -count <= token < count:
        raise UsageError(f"there is no token {token}: the sequence has {count}")
    return token % count


def _token_part(index: HeadIndex, start: str) -> str:
    """The rows of the token table that the stream begins with, where something else is added to them; else empty."""
    leaves, pending = list[str](), [start]
    while pending:
        tensor = index.view.before(pending.pop())
        node = index.view.made_by(tensor)
        if node is not None and node.op_type == "Add":
            pending += node.input
        else:
            leaves.append(tensor)
    found = token_rows(index, leaves)
    return found[0] if len(found) == 1 < len(leaves) else ""


def _listed(index: HeadIndex, parts: Parts) -> tuple[tuple[str, ...], Array]:
    """(names [S], what each gives [S, K]); heads and neurons have their numbers."""
    sublayers = {each.name for each in index.sublayers}
    names = [
        f"{name}[{place}]" if name in sublayers and len(part) > 1 else name
        for name, part in parts.items()
        for place in range(len(part))
    ]
    return tuple(names), np.concatenate(list(parts.values()))


_SAME, _LENGTH = 1e-9, 1e-6
"""Largest relative distance between rotated vectors and what a rotation makes, and between factors of pairs' lengths:
cosines and sines may be float32 constants."""


def rotation(before: Array, after: Array, where: str) -> Array:
    """[K, K]: the rotation by pairs of channels that takes rows `before` [heads, K] to `after`, as factor on the right.

    Pairs are neighbours, or halves of the channels that turn; further channels stay as they are.

    Raises:
        UsageError: there is none.
    """
    width = before.shape[1]
    for size in range(width - width % 2, 0, -2):  # the largest first: a turn by nothing is one of all channels
        for first, second in (np.arange(size).reshape(2, -1), np.arange(size).reshape(-1, 2).T):
            (a, b), (c, d) = ((rows[:, first], rows[:, second]) for rows in (before, after))
            power = np.maximum((a * a + b * b).sum(axis=0), np.finfo(np.float64).tiny)
            cos, sin = (a * c + b * d).sum(axis=0) / power, (a * d - b * c).sum(axis=0) / power
            found = np.eye(width)
            found[first, first] = found[second, second] = cos
            found[first, second], found[second, first] = sin, -sin
            # One head alone can be turned by any pairs, if they may grow or shrink.
            turns = np.ptp(np.hypot(cos, sin)) <= _LENGTH
            if turns and np.abs(before @ found - after).max() <= _SAME * np.abs(after).max():
                return found
    raise UsageError(f"{where} turns queries or keys in a way that is not understood: its scores cannot be taken apart")
