"""Inputs made for a model, valid by construction: ids within their tables, masks with padding, positions that agree.

Each entry of `_SETTINGS` exercises one aspect of the model (padding, one token, a past, a long sequence), instead of
all combinations. Random numbers depend on the seed, the name of the input and the number of the case only, so an
additional input does not change the values of the others.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from rewriter.graph.view import view_model
from rewriter.proof.inputs.roles import InputSpec, Kind, Role, input_specs, kind_of
from rewriter.proof.inputs.sizes import Setting, Sizes, check_dims, resolve
from rewriter.proof.inputs.tables import find_tables

# Several sequences and a long one come first, because only the first cases feed the proofs of the blocks.
_SETTINGS = (
    Setting(3, 17), Setting(1, 64), Setting(1, 17), Setting(1, 1), Setting(3, 2), Setting(3, 9, special=True),
)  # fmt: skip
_WITH_PAST = (
    Setting(3, 17), Setting(1, 64), Setting(1, 17), Setting(1, 1, past=9), Setting(3, 1, past=17),
    Setting(1, 2, past=5), Setting(3, 3, past=6, special=True),
)  # fmt: skip
_WITH_BRANCHES = (
    Setting(3, 17), Setting(1, 64), Setting(1, 17), Setting(1, 1, past=9), Setting(3, 1, past=17),
    Setting(1, 1, past=1), Setting(3, 1, past=6, special=True),
)  # fmt: skip
_LENGTHS = ((Kind.SAMPLES,), (Kind.FRAMES,), (Kind.SEQUENCE,), (Kind.ENCODER,), (Kind.HEIGHT, Kind.WIDTH))
LARGEST = 16384
"""The largest size that is searched; images end at 1024."""
_MULTIPLES = {Kind.SAMPLES: (1, 16, 160), Kind.HEIGHT: (1, 14, 16)}
"""Sizes are rounded up to multiples of these; others to multiples of 1 and 16. 160 samples are 10 ms at 16 kHz; images
are cut into patches."""
_GROWTH, _SPAN, _KEPT = 1.2, 4, 4
"""Sizes grow by this factor; once a size is accepted, sizes up to so many times as large are tried; so many of those
that are accepted are kept."""
_NAMED = (Kind.BATCH, Kind.SEQUENCE, Kind.PAST, Kind.ENCODER, Kind.FRAMES, Kind.SAMPLES)
_TOKENS = {Kind.TOTAL, Kind.SEQUENCE, Kind.ENCODER}
_COUNTS = {
    Role.PAST_LENGTH: (Kind.PAST, 0), Role.TOTAL_LENGTH: (Kind.TOTAL, 0), Role.LAST_INDEX: (Kind.TOTAL, 1),
    Role.KEEP: (Kind.ONE, 0),
}  # fmt: skip
"""Roles that are one number: the size of a kind of dimension, less something."""

_VOCABULARY = 100
"""Number of token ids if no table tells how many there are."""


@dataclass(frozen=True, eq=False)
class Case:
    """One set of inputs.

    Attributes:
        name: what distinguishes it, such as `batch 3, sequence 17`.
        feeds: maps every graph input without a default to an array.
    """

    name: str
    feeds: Mapping[str, NDArray[Any]]


def make_cases(
    model: onnx.ModelProto, *, seed: int = 0, dims: Mapping[str, int] | None = None, longest: int = 0
) -> tuple[Case, ...]:
    """Generate inputs for `model`.

    Args:
        model: the model; its weights are not read.
        seed: the same seed gives the same inputs; the values of an input do not depend on the other inputs.
        dims: maps a symbolic dimension to the size that it has in every case.
        longest: a sequence of so many tokens is among the cases, if the model takes it.

    Returns:
        Two to eight cases.

    Raises:
        UsageError: `dims` names a dimension that the model does not have, or no values can be made for an input.
    """
    return Maker(model, seed=seed, dims=dims).usual(longest)


class Maker:
    """Makes inputs for one model.

    Attributes:
        specs: the inputs.
        tables: bounds on integer inputs.
    """

    def __init__(self, model: onnx.ModelProto, *, seed: int = 0, dims: Mapping[str, int] | None = None) -> None:
        """As `make_cases`. Raises UsageError if `dims` names a dimension that the model does not have."""
        view = view_model(model)
        self.specs = input_specs(model, view)
        self._seed, self._fixed = seed, dict(dims or {})
        check_dims(self.specs, self._fixed)
        self.tables = find_tables(model)
        self._masked = any(_masks_tokens(spec) for spec in self.specs)
        self._branches = any(spec.role is Role.FLAG and _is_branch(spec) for spec in self.specs)
        self._open = {
            kind_of(spec, axis)
            for spec in self.specs
            for axis, dim in enumerate(spec.shape)
            if not isinstance(dim, int) and dim not in self._fixed
        }

    @property
    def lengths(self) -> list[tuple[Kind, ...]]:
        """The lengths that the model leaves open, height and width together."""
        groups = (tuple(kind for kind in group if kind in self._open) for group in _LENGTHS)
        return [group for group in groups if group]

    def searched(self, accepts: Callable[[Case], bool]) -> tuple[Case, ...]:
        """Cases of sizes that the model accepts, if it refuses all usual ones: a few from the smallest to the largest.

        A table of positions may be short, a tower of convolutions long. One kind of length is varied at a time
        (samples, frames, tokens, height with width), then all together.
        """
        groups = self.lengths
        together = tuple(kind for group in groups for kind in group)
        for group in (*groups, *((together,) if len(groups) > 1 else ())):
            found: list[int] = []
            for size in _sizes(group):
                if found and size > _SPAN * found[0]:
                    break
                if accepts(self._sized(group, size, 1)):
                    found.append(size)
            if found:
                kept = sorted({found[round(place * (len(found) - 1) / (_KEPT - 1))] for place in range(_KEPT)})
                cases = [self._sized(group, size, batch) for size in kept for batch in (1, 3)]
                # The model may fix the batch.
                shapes = {tuple((n, array.shape) for n, array in case.feeds.items()): case for case in cases[::-1]}
                return tuple(case for case in list(shapes.values())[::-1] if accepts(case))
        return ()

    def _sized(self, group: Sequence[Kind], size: int, batch: int) -> Case:
        return self.case(Setting(batch, size if Kind.SEQUENCE in group else 17), dict.fromkeys(group, size))

    def usual(self, longest: int = 0) -> tuple[Case, ...]:
        """The cases of `make_cases`."""
        cached = any(spec.role is Role.PAST for spec in self.specs)
        settings = _WITH_BRANCHES if self._branches else _WITH_PAST if cached else _SETTINGS
        if longest > max(setting.sequence for setting in settings):
            settings = (*settings, Setting(1, longest))
        rows = any(spec.role is Role.IDS or _masks_tokens(spec) for spec in self.specs)
        # Settings collapse into one where the model fixes what distinguishes them.
        distinct: dict[object, Setting] = {}
        for setting in settings:
            key = (*self.sizes(setting).shapes.values(), self._branches and setting.past > 0, setting.special)
            if rows or not setting.special:
                distinct.setdefault(key, setting)
        cases = [self.case(setting, number=number) for number, setting in enumerate(distinct.values())]
        if len(cases) > 1:
            return tuple(cases)
        # A fixed shape is tried with different values.
        both = (cases[0], self.case(settings[0], number=1))
        return tuple(Case(f"{case.name}, values {number}", case.feeds) for number, case in enumerate(both, 1))

    def sizes(self, setting: Setting, given: Mapping[Kind, int] | None = None) -> Sizes:
        """The sizes of one case; `given` are sizes of kinds that replace the usual ones and what tables allow."""
        longest = None if given else self.tables.sequence
        hints = self.tables.sizes
        return resolve(self.specs, setting, hints=hints, fixed=self._fixed, longest=longest, given=given or {})

    def case(self, setting: Setting, given: Mapping[Kind, int] | None = None, number: int = 0) -> Case:
        """One case; `given` is as in `sizes`, and the number varies the values."""
        sizes = self.sizes(setting, given)
        parts = [f"{kind.value} {sizes.kinds[kind]}" for kind in _NAMED if kind in sizes.varied]
        if self._branches:
            parts.append("cache branch on" if setting.past else "cache branch off")
        parts = parts or ["fixed shapes"]
        name = ", ".join([*parts, "special rows"] if setting.special else parts)
        return Case(name, {spec.name: self._values(spec, sizes, setting, number) for spec in self.specs})

    def _values(self, spec: InputSpec, sizes: Sizes, setting: Setting, number: int) -> NDArray[Any]:
        """The array for one input."""
        shape, kinds, rows = sizes.shapes[spec.name], sizes.kinds, self.tables.rows.get(spec.name)
        random = np.random.default_rng([self._seed, zlib.crc32(spec.name.encode()), number])
        made: Any
        match spec.role:
            case Role.FLOATS | Role.PAST:
                made = random.standard_normal(shape)
            case Role.IDS | Role.INTEGERS | Role.TIMESTEP:
                made = random.integers(0, _most(spec, rows), shape)
                if setting.special and made.size and spec.role is Role.IDS:
                    last = made if made.ndim == 1 else made[-1]
                    last[...] = last[..., :1]
            case Role.FLAG if _is_branch(spec):
                made = setting.past > 0
            case Role.FLAG:
                # A single switch alternates from case to case, so that both of its positions occur.
                made = number % 2 == 0 if np.prod(shape) == 1 else random.integers(0, 2, shape) == 1
            case Role.MASK:
                made = _mask(spec, shape, special=setting.special)
            case Role.POSITIONS:
                made = self._positions(shape, kinds[Kind.PAST], special=setting.special)
                made = made if rows is None else np.minimum(made, rows - 1)
            case Role.TOKEN_TYPES:
                length = (shape or (1,))[-1]
                made = (np.arange(length) >= (length + 1) // 2) * min(1, (rows or 2) - 1)
            case Role.LENGTHS:  # full lengths, but a shorter one for the last row of a batch
                kind = next((kind for kind in (Kind.FRAMES, Kind.SAMPLES) if kind in sizes.varied), Kind.SEQUENCE)
                made = np.full(shape, kinds[kind])
                made.reshape(-1)[1:][-1:] -= kinds[kind] // 3
            case _:
                kind, less = _COUNTS[spec.role]
                made = max(kinds[kind] - less, 0)
        made = np.asarray(made).astype(spec.dtype)
        if made.size == int(np.prod(shape)):
            made = made.reshape(shape)
        return np.array(np.broadcast_to(made, shape), order="C")

    def _positions(self, shape: tuple[int, ...], past: int, *, special: bool) -> NDArray[np.int64]:
        new = (shape or (1,))[-1]
        if not self._masked or len(shape) != 2 or shape[0] == 1:
            return np.arange(past, past + new)
        # With padding on the left, positions start at the first token, as generation with padded batches does it.
        counted = np.cumsum(_token_rows(shape[0], past + new, special=special), axis=1)[:, past:]
        return np.asarray(np.maximum(counted - 1, 0))


def _sizes(group: Sequence[Kind]) -> list[int]:
    """The sizes that are tried, in order."""
    most = 1024 if Kind.HEIGHT in group else LARGEST
    multiples = {each for kind in group for each in _MULTIPLES.get(kind, (1, 16))}
    grown = [1.0]
    while grown[-1] < most:
        grown.append(max(grown[-1] * _GROWTH, grown[-1] + 1.0))
    sizes = {-(-int(size) // multiple) * multiple for size in grown for multiple in multiples}
    return sorted(size for size in sizes if size <= most)


def _most(spec: InputSpec, rows: int | None) -> int:
    """The number of ids, or of small integers, that an input may be."""
    if spec.role is Role.TIMESTEP:
        return min(rows or 1000, 1000)
    usual = _VOCABULARY if spec.role is Role.IDS else 256 if spec.dtype.itemsize == 1 else 8
    return min(rows or usual, int(np.iinfo(spec.dtype.name).max) + 1)


def _is_branch(spec: InputSpec) -> bool:
    return "cache" in spec.name or "branch" in spec.name


def _masks_tokens(spec: InputSpec) -> bool:
    """Whether the input says which tokens of each row are padding."""
    if spec.role is not Role.MASK or len(spec.shape) != 2:
        return False
    return kind_of(spec, 0) is Kind.BATCH and kind_of(spec, 1) in {Kind.TOTAL, Kind.SEQUENCE}


def _mask(spec: InputSpec, shape: tuple[int, ...], *, special: bool) -> NDArray[np.bool_]:
    mask = np.ones(shape, np.bool_)
    kind = kind_of(spec, len(shape) - 1) if shape else Kind.ONE
    if len(shape) < 2 or kind_of(spec, 0) is not Kind.BATCH:
        return mask
    if kind in _TOKENS:
        mask[:] = _token_rows(shape[0], shape[-1], special=special).reshape(
            shape[0], *(1,) * (len(shape) - 2), shape[-1]
        )
    elif kind in {Kind.FRAMES, Kind.SAMPLES} and min(shape[0], shape[-1]) > 1:
        # Sound is padded at the end only: models halve its length repeatedly, and so the length of the mask.
        mask[-1, ..., shape[-1] - max(shape[-1] // 3, 1) :] = False
    return mask


def _token_rows(batch: int, length: int, *, special: bool) -> NDArray[np.bool_]:
    """[batch, length] True where there is a token; masks and position ids both follow from it, so they agree.

    The first row is full and the last one is padded on the right; with three rows or more, the second one is padded on
    the left. In a case of special rows the first row has only its first token and the second only its last; the others
    are full. A batch of one is always full.
    """
    rows = np.ones((batch, length), np.bool_)
    if batch < 2 or length < 2:
        return rows
    if special:
        rows[0, 1:] = False
        rows[1, :-1] = False
        return rows
    padding = max(length // 3, 1)
    rows[-1, length - padding :] = False
    if batch > 2:
        rows[1, :padding] = False
    return rows
