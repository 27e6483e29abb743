"""`changed_heads`: which heads and neurons another model, such as a quantised one, computes most differently.

The heads of both models are evaluated on the inputs of the other model's heads, so that their outputs differ only by
their weights. A head is restored by adding this difference to its sublayer's output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

import numpy as np

from rewriter.arrays import Array
from rewriter.errors import UsageError
from rewriter.files.load import Source
from rewriter.interpret.index import AffineMap, HeadIndex, heads
from rewriter.interpret.interventions import replaced, written_by
from rewriter.interpret.original import Attention
from rewriter.interpret.rank import read, written
from rewriter.interpret.run import values_of
from rewriter.interpret.sublayers import Named
from rewriter.interpret.text import InputsOrText, cases_of
from rewriter.proof.run import open_model


@dataclass(frozen=True)
class ChangedHead:
    """One head or neuron."""

    head: str
    weights: float  # the norm of the change over the original's, as root mean square over W_Q, W_K, W_V and W_O
    written: float  # the norm of the change of its output on the inputs, over that of its sublayer's output
    restored: float | None = None  # share of the outputs' error removed by restoring this head alone; None if not run


@dataclass(frozen=True)
class ChangedHeads:
    """The differences between two models with the same heads."""

    error: float  # the norm of the change of all outputs, over that of the original's
    rows: tuple[ChangedHead, ...]  # of all heads and neurons, those with the largest changed output first


def changed_heads(model: Source, other: Source, inputs: InputsOrText, *, top: int = 10) -> ChangedHeads:
    """The heads and neurons that `other`, such as a quantised or fine-tuned model, has changed most.

    `top` of them are restored, one by one. Inputs are those of `attribute`, errors those of `run_with_cache`; a
    UsageError is also that the models have different heads, or no tensor of what neurons write.
    """
    index, changed = (heads(each, program="fast", wide=True) for each in (model, other))
    kinds, others = ({each.name: _described(found, each) for each in found.sublayers} for found in (index, changed))
    for name in {**kinds, **others}:
        if kinds.get(name) != others.get(name):
            told = f"{kinds.get(name, 'missing')} in one and {others.get(name, 'missing')} in the other"
            raise UsageError(f"the models do not have the same heads: {name} is {told}")
    pairs = list(zip(index.sublayers, changed.sublayers, strict=True))
    case, other_case = (cases_of(each.proto, inputs).only for each in (index, changed))
    results = {two.name: written(changed, two).data for _, two in pairs}
    sides = [side for one, two in pairs for side in zip(read(index, one), read(changed, two), strict=True)]
    names = [*(side.data for _, side in sides), *(written_by(two) for _, two in pairs), *results.values()]
    theirs = values_of(changed, other_case, names)
    own = values_of(index, case, [*(side.data for side, _ in sides), *index.view.outputs])
    # Batch and tokens may be one axis in one of the two.
    given = {side.data: theirs[other.data].reshape(own[side.data].shape) for side, other in sides}
    ours = values_of(index, replace(case, feeds={**case.feeds, **given}), [written_by(one) for one, _ in pairs])
    rows, moved = list[ChangedHead](), dict[str, tuple[str, Array]]()
    for one, two in pairs:
        (z, out), (other_z, other_out) = _members(index, one, ours), _members(changed, two, theirs)
        # z W - z' W' as one product, whose norm has no small difference of large numbers.
        left = np.concatenate([z - other_z, other_z], axis=2)
        right = np.concatenate([out, out - other_out], axis=1)
        squares = (left.swapaxes(1, 2) @ left) * (right @ right.swapaxes(1, 2))
        size = np.linalg.norm(theirs[results[two.name]].astype(np.float64)) or 1.0
        sizes = np.sqrt(np.maximum(squares.sum(axis=(1, 2)), 0.0)) / size
        for number, share in enumerate(_changes(index, changed, one, two)):
            rows.append(ChangedHead(f"{one.name}.{number}", share, float(sizes[number])))
        for number in np.argsort(-sizes, kind="stable")[:top].tolist():
            moved[f"{one.name}.{number}"] = results[two.name], left[number] @ right[number]
    rows.sort(key=lambda row: -row.written)
    outputs = [own[name] for name in index.view.outputs]
    error = _error([*values_of(changed, other_case, changed.view.outputs).values()], outputs)
    for place, row in enumerate(rows[:top]):
        tensor, change = moved[row.head]
        held = {tensor: theirs[tensor] + change.reshape(theirs[tensor].shape)}
        proto = replaced(changed, deepcopy(changed.proto), [(tensor, np.ones(1, np.bool_))], held)
        session = open_model(replace(changed.source, proto=proto, path=None), "cpu", optimise=False)
        made = session.run(other_case.feeds, changed.view.outputs)
        still = _error([made[name] for name in changed.view.outputs], outputs)
        rows[place] = replace(row, restored=1.0 - still / error if error else 0.0)
    return ChangedHeads(error, tuple(rows))


def _error(made: Sequence[Array], wanted: Sequence[Array]) -> float:
    """The norm of the difference of all outputs, over that of the wanted ones. Raises UsageError."""
    if [array.shape for array in made] != [array.shape for array in wanted]:
        raise UsageError("the models have different outputs, or outputs of different shapes")
    pairs = [(a.astype(np.float64), b.astype(np.float64)) for a, b in zip(made, wanted, strict=True)]
    off, size = np.sqrt(np.sum([[np.sum((a - b) ** 2), np.sum(b**2)] for a, b in pairs], axis=0))
    return float(off / (size or 1.0))


def _described(index: HeadIndex, named: Named) -> str:
    own, (*_, width, channels) = named.sublayer, index.tensors[f"{named.name}.W_O"].shape
    kind = f"heads of width {width}" if isinstance(own, Attention) else f"{'gated ' * own.gated}neurons"
    return f"{named.sublayer.count} {kind} on {channels} channels"


def _members(index: HeadIndex, named: Named, values: Mapping[str, Array]) -> tuple[Array, Array]:
    """The members' input to the output projection, [members, tokens, K], and its rows, [members, K, D]."""
    own, z = named.sublayer, values[written_by(named)].astype(np.float64)
    z = z.reshape(-1, z.shape[-1])
    if isinstance(own, Attention):
        return z[:, own.channels].swapaxes(0, 1), index[f"{named.name}.W_O"]
    return z.T[..., None], AffineMap(own.output, index.value_of).weight()[:, None]


def _changes(index: HeadIndex, changed: HeadIndex, one: Named, two: Named) -> list[float]:
    """The change of each member's weights, over their norm."""
    shares = []
    for part in ("W_Q", "W_K", "W_V", "W_O"):
        ours, theirs = index[f"{one.name}.{part}"], changed[f"{two.name}.{part}"]
        # A neuron has all heads g * members + n of its program.
        apart = [each.reshape(-1, one.sublayer.count, each[0].size) for each in (ours - theirs, ours)]
        change, size = (np.linalg.norm(each, axis=(0, 2)) for each in apart)
        shares += [change / np.where(size == 0.0, 1.0, size)] if ours.any() else []
    return list(map(float, np.sqrt(np.mean(np.square(shares), axis=0))))
