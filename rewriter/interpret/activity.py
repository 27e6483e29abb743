"""`head_activity`: the tokens of given inputs at which heads do most, and heads that do nothing on them.

A neuron's activation is what its heads write along its row of W2, as one number; that of an original head at a token is
the norm of what it writes there. With `by="self"` it is the weight of a token in its own pattern instead. Padding is
left out.
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
from rewriter.interpret.index import HeadIndex, Members, Names, heads
from rewriter.interpret.original import Attention
from rewriter.interpret.rank import Best, Told, tokens_as_text
from rewriter.interpret.run import Recording, hooks_of
from rewriter.interpret.sublayers import Named, NeuronHeads
from rewriter.proof.inputs.cases import Case
from rewriter.proof.inputs.given import InputsOrText
from rewriter.proof.inputs.roles import Role, input_specs

MEASURES = ("z", "self")
"""What counts as activation."""

SILENT = 1e-6
"""A head is silent if its activations stay below this share of the largest of its sublayer."""


@dataclass(frozen=True)
class Place:
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
class Active:
    """What a head does on the inputs.

    Attributes:
        head: as `blocks.1.attn.3`.
        top: the tokens of the largest activations, the largest first.
        mean: the mean activation.
        deviation: its standard deviation.
        largest: the largest absolute activation.
        dead: why it does nothing, or always the same; empty if it does something.
    """

    head: str
    top: tuple[Place, ...]
    mean: float
    deviation: float
    largest: float
    dead: str


@dataclass(frozen=True, eq=False)
class Activity:
    """What the heads that were asked for do.

    Attributes:
        rows: one per head, in order.
        by: the measure.
        tokens: how many tokens there were, without padding.
        told: token ids in words.
    """

    rows: tuple[Active, ...]
    by: str
    tokens: int
    told: Told

    def peaks(self, count: int) -> list[Active]:
        """The heads whose largest activation is most standard deviations above their mean."""
        found = [row for row in self.rows if row.top and row.deviation > 0.0]
        return sorted(found, key=lambda row: -(row.top[0].value - row.mean) / row.deviation)[:count]

    @property
    def dead(self) -> list[Active]:
        """The heads that do nothing on these inputs, or always the same."""
        return [row for row in self.rows if row.dead]

    def to_json(self) -> dict[str, Any]:
        """JSON-ready data."""
        return {"by": self.by, "tokens": self.tokens, "heads": [self._row(row) for row in self.rows]}

    def _row(self, row: Active) -> dict[str, Any]:
        places = [{**vars(place), "text": None if place.token is None else self.told(place.token)} for place in row.top]
        return {
            "head": row.head,
            "mean": row.mean,
            "deviation": row.deviation,
            "largest": row.largest,
            "dead": row.dead,
            "top": places,
        }


def head_activity(
    model: Source | HeadIndex,
    inputs: InputsOrText,
    *,
    names: Names = "*",
    top: int = 10,
    by: str = "z",
    tokenizer: str | os.PathLike[str] | None = None,
) -> Activity:
    """Where heads are most active on given inputs.

    Args:
        model: path of an ONNX file, original or rewritten, a model in memory, or the result of `heads`.
        inputs: maps inputs to arrays; or an npz file with any number of cases.
        names: heads, as for `ablate`.
        top: tokens per head.
        by: `z`, the activation, or `self`, the weight of the token itself in the pattern; of neurons with several
            heads the weight in the first one.
        tokenizer: a `tokenizer.json` that gives tokens as text.

    Raises:
        UsageError: an argument is out of range, a glob matches nothing, or the inputs do not fit the model.
        ModelError: the model is unreadable, malformed or unsafe.
        ValidationError: onnxruntime does not run the model on these inputs.
    """
    if by not in MEASURES:
        raise UsageError(f"unknown measure '{by}'; known are: {', '.join(MEASURES)}")
    if top < 1:
        raise UsageError(f"{top} tokens cannot be listed; take 1 or more")
    told = tokens_as_text(tokenizer)
    index = model if isinstance(model, HeadIndex) else heads(model)
    numbering = Members.of(index, names)
    wanted = [each for each in index.sublayers if each.name in numbering.chosen]
    hooks = _hooks(index, wanted, by)
    recording = Recording.of(index, inputs, list(hooks), "cpu")
    tallies = {each.name: _Tally(index, each, numbering.chosen[each.name], by, top) for each in wanted}
    places = _Places(index, recording.cases)
    for name, array in recording.arrays():
        case, hook = _parted(name, hooks)
        tally = tallies[hook.rpartition(".")[0]]
        by_head = tally.by_head and hook.endswith("pattern")
        kept, start = places.kept(case, (len(array), array.shape[2 if by_head else 1]))
        tally.add(hook.rpartition(".")[2], array.astype(np.float64), kept, start)
    rows = [row for each in wanted for row in tallies[each.name].rows(places)]
    return Activity(tuple(rows), by, places.count, told)


def _hooks(index: HeadIndex, wanted: list[Named], by: str) -> list[str]:
    """The hooks to record. Raises UsageError if a pattern is wanted that an operator keeps."""
    known = hooks_of(index)
    found = []
    for each in wanted:
        pattern = f"{each.name}.hook_pattern"
        if by == "self":
            if pattern not in known:
                raise UsageError(f"{each.name} keeps its pattern inside an operator; choose other heads with --names")
            if isinstance(each.sublayer, Attention) and each.sublayer.cross:
                raise UsageError(f"{each.name} attends to another sequence; choose other heads with --names")
        found += [name for name in (f"{each.name}.hook_z", pattern) if name in known]
    return found


def _parted(name: str, hooks: list[str]) -> tuple[str, str]:
    """(case, hook) of what was recorded."""
    hook = next(hook for hook in hooks if name == hook or name.endswith(f"/{hook}"))
    return name[: -len(hook) - 1] if name != hook else "", hook


class _Places:
    """Which token is where in the inputs: all tokens but padding are numbered through."""

    def __init__(self, index: HeadIndex, cases: Sequence[Case]) -> None:
        specs = input_specs(index.proto, index.view)
        self._ids = [spec.name for spec in specs if spec.role is Role.IDS]
        self._masks = [spec.name for spec in specs if spec.role is Role.MASK]
        self._cases: dict[str, Case] = {each.name if len(cases) > 1 else "": each for each in cases}
        self._starts: dict[str, int] = {}
        self._shapes: dict[str, tuple[int, int]] = {}
        self.count = 0
        self._next = 0

    def kept(self, case: str, shape: tuple[int, int]) -> tuple[Array, int]:
        """(which tokens [batch, tokens] are no padding, the number of the first)."""
        feeds = self._cases[case].feeds
        kept = np.ones(shape, np.bool_)
        for name in self._masks:
            if name in feeds and feeds[name].shape == shape:
                kept &= feeds[name].astype(np.bool_)
        if case not in self._starts:
            self._starts[case], self._shapes[case] = self._next, shape
            self._next += shape[0] * shape[1]
            self.count += int(kept.sum())
        elif self._shapes[case] != shape:
            raise UsageError(
                f"sublayers see {shape} and {self._shapes[case]} sequences and tokens; choose with --names"
            )
        return kept, self._starts[case]

    def place(self, number: int, value: float) -> Place:
        """The token of a number."""
        case = next(case for case, start in reversed(list(self._starts.items())) if start <= number)
        sequence, position = divmod(number - self._starts[case], self._shapes[case][1])
        feeds = self._cases[case].feeds
        ids = next(
            (feeds[name] for name in self._ids if name in feeds and feeds[name].shape == self._shapes[case]), None
        )
        token = None if ids is None else int(ids[sequence, position])
        return Place(case, sequence, position, token, value)


def activations_of(named: Named, z: Array, rows: Array) -> Array:
    """[batch, tokens, members] of z [batch, tokens, heads, d_head]; `rows` is W_O of original heads."""
    z = z.astype(np.float64)
    if isinstance(named.sublayer, NeuronHeads):
        factors = np.array([group.factor for group in named.sublayer.groups])
        return np.asarray(np.einsum("btgn,g->btn", z.reshape(*z.shape[:2], len(factors), -1), factors))
    rows = rows.astype(np.float64)
    squares = np.einsum("bthk,hkl,bthl->bth", z, rows @ np.swapaxes(rows, -1, -2), z, optimize=True)
    return np.asarray(np.sqrt(np.maximum(squares, 0.0)))


class _Tally:
    """What the chosen heads of a sublayer do, case after case."""

    def __init__(self, index: HeadIndex, named: Named, chosen: Array, by: str, top: int) -> None:
        self._named, self._own, self._chosen, self._by = named, named.sublayer, chosen, by
        count = len(chosen)
        self._best = Best(count, top, np.dtype(np.float64), floor=-np.inf)
        self._sum, self._squares, self._tokens = np.zeros(count), np.zeros(count), 0
        self._largest, self._peak = np.zeros(count), 0.0
        self._low: Array = np.array(np.inf)
        self._high: Array = np.array(-np.inf)
        self._pattern: Array | None = None
        self._same = np.ones(count, np.bool_)
        self._sequences = 0
        self._rows = index[f"{named.name}.W_O"] if isinstance(self._own, Attention) else np.zeros(0)

    @property
    def by_head(self) -> bool:
        """Whether patterns are [batch, heads, dest, src]."""
        return isinstance(self._own, Attention)

    def add(self, hook: str, array: Array, kept: Array, start: int) -> None:
        """One recorded array; `kept` [batch, tokens] is where there is no padding, `start` the number of the first."""
        if hook == "hook_z":
            self._activations(array, kept, start)
        elif self.by_head:
            self._attention(array, kept, start)
        else:
            self._ranges(array[kept])
            if self._by == "self":
                self._take(array[:, :, self._chosen, 0], kept, start)

    def _activations(self, z: Array, kept: Array, start: int) -> None:
        values = activations_of(self._named, z, self._rows)
        self._peak = max(self._peak, float(np.abs(values[kept]).max(initial=0.0)))
        values = values[:, :, self._chosen]
        self._largest = np.maximum(self._largest, np.abs(values[kept]).max(axis=0, initial=0.0))
        if self._by == "z":
            self._take(values, kept, start)

    def _ranges(self, pattern: Array) -> None:
        """The smallest and the largest weights of each key so far; [tokens, heads, 1 + m] of neurons."""
        neurons = self._own.neurons if isinstance(self._own, NeuronHeads) else 1
        by_neuron = pattern.reshape(len(pattern), -1, neurons, pattern.shape[-1])[:, :, self._chosen]
        self._low = np.minimum(self._low, by_neuron.min(axis=0, initial=np.inf))
        self._high = np.maximum(self._high, by_neuron.max(axis=0, initial=-np.inf))

    def _attention(self, pattern: Array, kept: Array, start: int) -> None:
        """[batch, heads, dest, src]."""
        chosen = pattern[:, self._chosen]
        if self._by == "self":
            if pattern.shape[2] != pattern.shape[3]:
                raise UsageError(f"{self._named.name} attends to more tokens than it has; choose others with --names")
            self._take(np.moveaxis(np.diagonal(chosen, axis1=2, axis2=3), 1, 2), kept, start)
        # Sequences of one length without padding are compared with the first.
        for sequence, own in zip(kept, chosen, strict=True):
            if not sequence.all() or (self._pattern is not None and own.shape != self._pattern.shape):
                continue
            self._pattern = own if self._pattern is None else self._pattern
            self._sequences += 1
            self._same &= np.abs(own - self._pattern).max(axis=(1, 2), initial=0.0) <= SILENT

    def _take(self, values: Array, kept: Array, start: int) -> None:
        """[batch, tokens, chosen]."""
        flat, numbers = values[kept], start + np.flatnonzero(kept)
        self._sum += flat.sum(axis=0)
        self._squares += (flat * flat).sum(axis=0)
        self._tokens += len(flat)
        if len(flat):
            self._best.add(np.arange(flat.shape[1]), np.ascontiguousarray(flat.T), numbers)

    def rows(self, places: _Places) -> Iterator[Active]:
        """The results."""
        for row, number in enumerate(self._chosen):
            pairs = zip(self._best.places[row].tolist(), self._best.scores[row].tolist(), strict=True)
            top = tuple(places.place(place, value) for place, value in pairs if place >= 0)
            mean, square = (float(each[row]) / max(self._tokens, 1) for each in (self._sum, self._squares))
            deviation = max(square - mean * mean, 0.0) ** 0.5
            largest = float(self._largest[row])
            yield Active(f"{self._named.name}.{number}", top, mean, deviation, largest, self._dead(row))

    def _dead(self, row: int) -> str:
        if self._largest[row] <= SILENT * self._peak:
            return "writes nothing on these inputs"
        if isinstance(self._own, NeuronHeads):
            spread = (self._high - self._low).max(axis=(0, 2))[row] if self._low.ndim else 0.0
            constant = self._tokens > 1 and spread <= SILENT
            return "its pattern is the same at all tokens" if constant else ""
        return "its pattern is the same in all sequences" if self._sequences > 1 and self._same[row] else ""
