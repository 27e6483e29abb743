"""`head_activity`: the tokens of given inputs at which heads do most, and heads that do nothing on them.

A neuron's activation is what its heads write along its row of W2, as one number; that of an original head at a token is
the norm of what it writes there. Padding is left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rewriter.arrays import Array
from rewriter.errors import UsageError
from rewriter.files.load import Source
from rewriter.interpret.index import HeadIndex, Names, chosen_heads, indexed
from rewriter.interpret.original import Attention
from rewriter.interpret.rank import Best, TokenText, tokens_as_text
from rewriter.interpret.run import cases_of, hooks_of, recorded
from rewriter.interpret.sublayers import Named, NeuronHeads
from rewriter.proof.inputs.cases import Case
from rewriter.proof.inputs.given import InputsOrText
from rewriter.proof.inputs.roles import Role, input_specs

SILENT = 1e-6
"""A head is dead if its activations stay below this share of the largest of its sublayer."""


@dataclass(frozen=True)
class ActiveToken:
    """A token of the inputs.

    Attributes:
        case: the case; empty if there is only one.
        sequence: the sequence in the batch.
        position: the token in the sequence.
        token: its id; None where the model reads no ids.
        value: the activation.
    """

    case: str
    sequence: int
    position: int
    token: int | None
    value: float


@dataclass(frozen=True)
class ActiveHead:
    """What a head does on the inputs.

    Attributes:
        head: as `blocks.1.attn.3`.
        top: the tokens of the largest activations, the largest first.
        mean: the mean activation.
        deviation: its standard deviation.
        largest: the largest absolute activation.
        dead: whether it writes nothing on these inputs.
    """

    head: str
    top: tuple[ActiveToken, ...]
    mean: float
    deviation: float
    largest: float
    dead: bool


@dataclass(frozen=True, eq=False)
class Activity:
    """What the heads that were asked for do.

    Attributes:
        rows: one per head, in order.
        tokens: how many tokens there were, without padding.
        told: token ids in words.
    """

    rows: tuple[ActiveHead, ...]
    tokens: int
    told: TokenText

    def peaks(self, count: int) -> list[ActiveHead]:
        """The heads whose largest activation is most standard deviations above their mean."""
        found = [row for row in self.rows if row.top and row.deviation > 0.0]
        return sorted(found, key=lambda row: -(row.top[0].value - row.mean) / row.deviation)[:count]

    @property
    def dead(self) -> list[ActiveHead]:
        """The heads that write nothing on these inputs."""
        return [row for row in self.rows if row.dead]

    def to_json(self) -> dict[str, Any]:
        """JSON-ready data."""

        def told(place: ActiveToken) -> dict[str, Any]:
            return {**vars(place), "text": None if place.token is None else self.told(place.token)}

        rows = [{**vars(row), "top": [told(place) for place in row.top]} for row in self.rows]
        return {"tokens": self.tokens, "heads": rows}


def head_activity(
    model: Source | HeadIndex,
    inputs: InputsOrText,
    *,
    names: Names = "*",
    top: int = 10,
    tokenizer: str | os.PathLike[str] | None = None,
) -> Activity:
    """Where heads are most active on given inputs.

    Args:
        model: path of an ONNX file, original or rewritten, a model in memory, or the result of `heads`.
        inputs: maps inputs to arrays; or an npz file with any number of cases.
        names: heads, as for `ablate`.
        top: tokens per head.
        tokenizer: a `tokenizer.json` that gives tokens as text.

    Raises:
        UsageError: an argument is out of range, a glob matches nothing, or the inputs do not fit the model.
        ModelError: the model is unreadable, malformed or unsafe.
        ValidationError: onnxruntime does not run the model on these inputs.
    """
    if top < 1:
        raise UsageError(f"{top} tokens cannot be listed; take 1 or more")
    told = tokens_as_text(tokenizer)
    index = indexed(model)
    tallies = {
        named.name: _HeadTally(index, named, np.array(chosen), top) for named, chosen in chosen_heads(index, names)
    }
    known = hooks_of(index)
    cases, _ = cases_of(index, inputs)
    places = _Numbering(index, cases)
    for name, array in recorded(index, cases, {f"{name}.hook_z": known[f"{name}.hook_z"] for name in tallies}):
        case, _, hook = name.rpartition("/") if len(cases) > 1 else ("", "", name)
        tallies[hook.removesuffix(".hook_z")].add(array.astype(np.float64), *places.kept(case, array.shape[:2]))
    rows = [row for tally in tallies.values() for row in tally.rows(places)]
    return Activity(tuple(rows), places.count, told)


class _Numbering:
    """Which token is where in the inputs: all tokens are numbered through; `count` is without padding."""

    def __init__(self, index: HeadIndex, cases: Sequence[Case]) -> None:
        specs = input_specs(index.proto, index.view)
        self._ids = [spec.name for spec in specs if spec.role is Role.IDS]
        self._masks = [spec.name for spec in specs if spec.role is Role.MASK]
        self._cases: dict[str, Case] = {each.name if len(cases) > 1 else "": each for each in cases}
        self._known: dict[str, tuple[int, tuple[int, int]]] = {}
        self._next = 0
        self.count = 0

    def kept(self, case: str, shape: tuple[int, int]) -> tuple[Array, int]:
        """(which tokens [batch, tokens] are no padding, the number of the first)."""
        feeds = self._cases[case].feeds
        kept = np.ones(shape, np.bool_)
        for name in self._masks:
            if name in feeds and feeds[name].shape == shape:
                kept &= feeds[name].astype(np.bool_)
        if case not in self._known:
            self._known[case] = self._next, shape
            self._next += shape[0] * shape[1]
            self.count += int(kept.sum())
        start, known = self._known[case]
        if known != shape:
            raise UsageError(f"sublayers see {shape} and {known} sequences and tokens; choose with names")
        return kept, start

    def place(self, number: int, value: float) -> ActiveToken:
        """The token of a number."""
        case, (start, shape) = max(
            (item for item in self._known.items() if item[1][0] <= number), key=lambda item: item[1][0]
        )
        sequence, position = divmod(number - start, shape[1])
        feeds = self._cases[case].feeds
        ids = next((feeds[name] for name in self._ids if name in feeds and feeds[name].shape == shape), None)
        return ActiveToken(case, sequence, position, None if ids is None else int(ids[sequence, position]), value)


def activations_of(named: Named, z: Array, rows: Array) -> Array:
    """[batch, tokens, members] of z [batch, tokens, heads, d_head]; `rows` is W_O of original heads."""
    z = z.astype(np.float64)
    if isinstance(named.sublayer, NeuronHeads):
        factors = np.array([group.factor for group in named.sublayer.groups])
        return np.asarray(np.einsum("btgn,g->btn", z.reshape(*z.shape[:2], len(factors), -1), factors))
    rows = rows.astype(np.float64)
    squares = np.einsum("bthk,hkl,bthl->bth", z, rows @ np.swapaxes(rows, -1, -2), z, optimize=True)
    return np.asarray(np.sqrt(np.maximum(squares, 0.0)))


class _HeadTally:
    """What the chosen heads of a sublayer do, case after case."""

    def __init__(self, index: HeadIndex, named: Named, chosen: Array, top: int) -> None:
        self._named, self._chosen = named, chosen
        count = len(chosen)
        self._best = Best(count, top, np.dtype(np.float64), floor=-np.inf)
        self._sum, self._squares, self._tokens = np.zeros(count), np.zeros(count), 0
        self._largest, self._peak = np.zeros(count), 0.0
        self._rows = index[f"{named.name}.W_O"] if isinstance(named.sublayer, Attention) else np.zeros(0)

    def add(self, z: Array, kept: Array, start: int) -> None:
        """z of one case; `kept` [batch, tokens] is where there is no padding, `start` the number of the first."""
        values = activations_of(self._named, z, self._rows)[kept]
        self._peak = max(self._peak, float(np.abs(values).max(initial=0.0)))
        values = values[:, self._chosen]
        self._largest = np.maximum(self._largest, np.abs(values).max(axis=0, initial=0.0))
        self._sum += values.sum(axis=0)
        self._squares += (values * values).sum(axis=0)
        self._tokens += len(values)
        if len(values):
            self._best.add(np.arange(values.shape[1]), np.ascontiguousarray(values.T), start + np.flatnonzero(kept))

    def rows(self, places: _Numbering) -> Iterator[ActiveHead]:
        """The results."""
        for row, number in enumerate(self._chosen):
            top = tuple(places.place(place, value) for place, value in self._best.row(row))
            mean, square = (float(each[row]) / max(self._tokens, 1) for each in (self._sum, self._squares))
            deviation = max(square - mean * mean, 0.0) ** 0.5
            largest = float(self._largest[row])
            dead = largest <= SILENT * self._peak
            yield ActiveHead(f"{self._named.name}.{number}", top, mean, deviation, largest, dead)
