"""Which neurons of an MLP are not needed: dead, constant, duplicate or proportional ones.

With y = w.x + b the pre-activation of a neuron and r its row of W2, the MLP is the sum of f(y) r, so

    dead           r = 0, or f(y) = 0 for every x                      drop it
    constant       w = 0                                               f(b) r goes into the output's bias
    duplicate      (w, b) equal those of another, bit for bit          add the rows
    proportional   (w, b) = t (w', b'), f(t y) = t^n f(y)              add t^n r to the other's row

In a gated block f(y) u with u = v.x + c, u = 0 is dead, and (v, c) may be proportional for any f. Factors t are powers
of two, and t^n r must be exact in the type, so that only the sum of rows rounds. All this holds for finite activations;
a neuron with a non-finite weight is never touched. Beyond these cases no two neurons can share a head: different
pre-activations need different logits (docs/programs.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
from numpy.typing import DTypeLike, NDArray

from passes.match.operands import AnyArray
from passes.programs.softmax import Array

Function = Callable[[Array, Array], Array]
"""Activation of gate and value pre-activations in float64; a plain one ignores the second."""

_CHUNK = 1024
"""Rows per batch of normalised copies, which bounds the memory of wide layers."""

_FEWEST = 2


@dataclass(frozen=True)
class Neurons:
    """The neurons of one block; all arrays have a row per neuron.

    Attributes:
        gate: [d_ff, D + biases]: columns of W1 followed by the biases, in the model's type.
        gate_inputs: how many of these multiply the input; the rest are biases.
        value: the same for a gated block's other projection; None in a plain block.
        value_inputs: likewise.
        rows: [d_ff, D_out] of each second operator.
    """

    gate: AnyArray
    gate_inputs: int
    value: AnyArray | None
    value_inputs: int
    rows: tuple[AnyArray, ...]


@dataclass(frozen=True)
class Nature:
    """What is known about the activation.

    Attributes:
        function: its values.
        degree: n where f(t y) = t^n f(y) for every t > 0; None where f is not homogeneous.
        off: [d_ff], True where f(y) = 0 is proved for every input.
        affine: [d_ff], True where y is proved to stay within a linear piece of f.
    """

    function: Function
    degree: int | None
    off: NDArray[np.bool_]
    affine: NDArray[np.bool_]


@dataclass(frozen=True)
class Reduction:
    """The remaining neurons, and how the second operators change.

    Attributes:
        kept: indices of the neurons that stay, ascending.
        rows: for each second operator, neuron to its new row, in float64; other neurons keep theirs.
        shifts: for each second operator, the sum of the constant neurons' outputs, in float64; None if there are none.
        dead: how many of each kind were removed.
        constant: likewise.
        duplicate: likewise.
        proportional: likewise.
        affine: neurons that stay although they compute an affine function.
    """

    kept: NDArray[np.intp]
    rows: tuple[Mapping[int, Array], ...]
    shifts: tuple[Array | None, ...]
    dead: int = 0
    constant: int = 0
    duplicate: int = 0
    proportional: int = 0
    affine: int = 0

    @property
    def removed(self) -> int:
        """The number of removed neurons."""
        return self.dead + self.constant + self.duplicate + self.proportional


def reduce_neurons(neurons: Neurons, nature: Nature) -> Reduction:
    """Decide which neurons can be removed.

    At least two stay: runtimes dislike layers of width 0, and a bias with one entry would be read as a scalar.
    """
    # NaN equals nothing, not even itself, and infinity times 0 is NaN: such neurons have no provable output.
    matrices = [neurons.gate, *neurons.rows, *([] if neurons.value is None else [neurons.value])]
    usable = np.all([_finite(matrix) for matrix in matrices], axis=0)
    held = _held(neurons, nature.function)
    unread = np.all([~_nonzero(rows) for rows in neurons.rows], axis=0)
    dead = usable & (nature.off | unread | (held == 0.0))
    constant = usable & ~dead & np.isfinite(held)
    shifts = tuple(_shift(held, constant, rows) for rows in neurons.rows)
    # In float16 the sum of many constants can overflow although no single term does. Then they all stay.
    if not all(shift is None or _fits(shift, neurons.gate.dtype) for shift in shifts):
        constant, shifts = np.zeros_like(constant), (None,) * len(shifts)
    # Rows that cancel, r and -r for equal neurons, leave a dead neuron.
    fused = _fuse(neurons, nature, usable & ~dead & ~constant)
    dead = dead | fused.cancelled
    kinds = (dead, constant, fused.duplicate, fused.proportional)
    gone = np.any(kinds, axis=0)
    for spare in np.flatnonzero(gone)[: max(0, _FEWEST - int((~gone).sum()))]:
        for kind in (gone, *kinds):
            kind[spare] = False
        for changed, rows in zip(fused.rows, neurons.rows, strict=True):
            changed[int(spare)] = np.zeros(rows.shape[1])  # its contribution is zero, or in the bias or another row
    return Reduction(
        kept=np.flatnonzero(~gone),
        rows=tuple({index: row for index, row in changed.items() if not gone[index]} for changed in fused.rows),
        shifts=shifts,
        dead=int(dead.sum()),
        constant=int(constant.sum()),
        duplicate=int(fused.duplicate.sum()),
        proportional=int(fused.proportional.sum()),
        affine=int((nature.affine & ~gone).sum()),
    )


# -- neurons that no input moves -----------------------------------------------------------------------------


def _held(neurons: Neurons, function: Function) -> Array:
    """Each neuron's activation where it is the same for every input, else NaN."""
    gate, gate_still = _at_rest(neurons.gate, neurons.gate_inputs)
    if neurons.value is None:
        return np.where(gate_still, function(gate, gate), np.nan)
    value, value_still = _at_rest(neurons.value, neurons.value_inputs)
    open_gate = function(gate, np.ones_like(gate))
    # One factor that is always 0 suffices, whatever the other one does.
    nothing = (gate_still & (open_gate == 0.0)) | (value_still & (value == 0.0))
    return np.where(nothing, 0.0, np.where(gate_still & value_still, open_gate * value, np.nan))


def _at_rest(matrix: AnyArray, inputs: int) -> tuple[Array, NDArray[np.bool_]]:
    """The pre-activations at x = 0, and which of them are the same for every input."""
    return matrix[:, inputs:].astype(np.float64).sum(axis=1), ~_nonzero(matrix[:, :inputs])


def _shift(held: Array, constant: NDArray[np.bool_], rows: AnyArray) -> Array | None:
    """The sum of the constant neurons' outputs; None where there are none."""
    chosen = np.flatnonzero(constant)
    return held[chosen] @ rows[chosen].astype(np.float64) if len(chosen) else None


# -- duplicates and multiples --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Fused:
    """Neurons merged into another, keepers whose rows cancelled to zero, and the new rows of the keepers."""

    duplicate: NDArray[np.bool_]
    proportional: NDArray[np.bool_]
    cancelled: NDArray[np.bool_]
    rows: tuple[dict[int, Array], ...]


def _fuse(neurons: Neurons, nature: Nature, usable: NDArray[np.bool_]) -> _Fused:
    duplicate, proportional, cancelled = (np.zeros(len(usable), dtype=bool) for _ in range(3))
    changed: tuple[dict[int, Array], ...] = tuple({} for _ in neurons.rows)
    for keeper, *others in _groups(neurons, nature, np.flatnonzero(usable)):
        totals, taken = _sums(neurons, nature, keeper, others)
        for other in taken:
            (duplicate if other.same_as(keeper) else proportional)[other.index] = True
        if taken:
            cancelled[keeper.index] = not any(total.any() for total in totals)
            for rows, total in zip(changed, totals, strict=True):
                rows[keeper.index] = total
    return _Fused(duplicate, proportional, cancelled, changed)


def _sums(
    neurons: Neurons, nature: Nature, keeper: _Member, others: Sequence[_Member]
) -> tuple[list[Array], list[_Member]]:
    """The keeper's rows plus those of the others, and the others that could be added."""
    totals = [rows[keeper.index].astype(np.float64) for rows in neurons.rows]
    taken = []
    for other in others:
        # f(2^a g) 2^b u = 2^(n a + b) f(g) u. Without a degree, groups hold equal scales of the gate only.
        factor = (other.scale - keeper.scale) * (nature.degree or 0) + other.value_scale - keeper.value_scale
        parts = [_times(rows[other.index], other.sign * keeper.sign, factor) for rows in neurons.rows]
        # All second operators must agree, since they lose the same neuron.
        sums = [total + part for total, part in zip(totals, parts, strict=True) if part is not None]
        if len(sums) == len(totals) and all(_fits(total, neurons.rows[0].dtype) for total in sums):
            totals = sums
            taken.append(other)
    return totals, taken


def _times(row: AnyArray, sign: float, exponent: int) -> Array | None:
    """`sign 2^exponent row` in float64, None where it is not exact in the row's type."""
    # Not exact: an entry would overflow, or lose digits as a denormal.
    with np.errstate(all="ignore"):
        wide = row.astype(np.float64) * sign
        part = np.ldexp(wide, exponent)
        exact = np.array_equal(np.ldexp(part, -exponent), wide)
        return part if exact and np.array_equal(part.astype(row.dtype).astype(np.float64), part) else None


def _groups(neurons: Neurons, nature: Nature, usable: NDArray[np.intp]) -> list[list[_Member]]:
    """Groups of two or more neurons with the same direction, the largest first."""
    # Keyed by a hash of the direction, so that the normalised rows of all neurons need not be kept.
    groups: dict[bytes, list[_Member]] = {}
    for start in range(0, len(usable), _CHUNK):
        chosen = usable[start : start + _CHUNK]
        gate, scales = _directions(neurons.gate[chosen], scaled=nature.degree is not None)
        keys = [row.tobytes() for row in gate]
        values, signs = np.zeros(len(chosen), dtype=int), np.ones(len(chosen))
        if neurons.value is not None:
            directions, values = _directions(neurons.value[chosen], scaled=True)
            # u enters linearly, so its sign may be pulled out as well: directions start with a positive number.
            first = directions[np.arange(len(chosen)), np.argmax(directions != 0.0, axis=1)]
            signs = np.where(first < 0.0, -1.0, 1.0)
            turned = directions * signs[:, None] + 0.0
            keys = [key + row.tobytes() for key, row in zip(keys, turned, strict=True)]
        for key, index, scale, value, sign in zip(keys, chosen, scales, values, signs, strict=True):
            member = _Member(int(index), int(scale), int(value), float(sign))
            groups.setdefault(sha256(key).digest(), []).append(member)
    found = [members for members in groups.values() if len(members) > 1]
    return [sorted(members, key=lambda m: (-m.scale, -m.value_scale, m.index)) for members in found]


@dataclass(frozen=True)
class _Member:
    """A neuron of a group: gate and value are 2^scale and sign 2^value_scale times the group's directions."""

    index: int
    scale: int
    value_scale: int
    sign: float

    def same_as(self, other: _Member) -> bool:
        return (self.scale, self.value_scale, self.sign) == (other.scale, other.value_scale, other.sign)


def _directions(matrix: AnyArray, *, scaled: bool) -> tuple[Array, NDArray[np.intp]]:
    """Rows in float64, divided by a power of two so that the largest entry is in [1/2, 1), and its exponent.

    A row that this would round is returned unchanged, with exponent 0.
    """
    # Adding 0 turns -0 into 0: the two are equal, but their bytes differ.
    rows = matrix.astype(np.float64) + 0.0
    exponents = np.zeros(len(rows), dtype=np.intp)
    if scaled:
        wanted = np.frexp(np.abs(rows).max(axis=1))[1].astype(np.intp)
        divided = np.ldexp(rows, -wanted[:, None])
        exact = (np.ldexp(divided, wanted[:, None]) == rows).all(axis=1)
        rows, exponents = np.where(exact[:, None], divided, rows), np.where(exact, wanted, 0)
    return rows, exponents


def _nonzero(matrix: AnyArray) -> NDArray[np.bool_]:
    return np.asarray(matrix.astype(bool).any(axis=1), dtype=np.bool_)


def _finite(matrix: AnyArray) -> NDArray[np.bool_]:
    return np.asarray(np.isfinite(matrix).all(axis=1))


def _fits(values: Array, dtype: DTypeLike) -> bool:
    """Whether the values stay finite when rounded to the type."""
    with np.errstate(all="ignore"):
        return bool(np.isfinite(values.astype(dtype)).all())
