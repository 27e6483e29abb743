"""Determine the size of every dimension of every input in one case.

A symbolic name has the same size in all inputs of a case, and arithmetic on names holds. Sizes that the caller fixes
take precedence, then those that the weights imply, then those of the `Setting` (batch, tokens, past tokens).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rewriter.errors import UsageError
from rewriter.proof.inputs.roles import InputSpec, Kind, Role, kind_by_name, kind_of
from rewriter.proof.inputs.symbolic_dims import names_in, value_of
from rewriter.text import quoted

Hints = Mapping[tuple[str, int], int]

_USUAL = {
    Kind.CHOICES: 2, Kind.CHANNELS: 3, Kind.HEIGHT: 224, Kind.WIDTH: 224, Kind.HEADS: 4, Kind.FEATURES: 80,
    Kind.HIDDEN: 64, Kind.ONE: 1,
}  # fmt: skip
# No weight fixes the batch or the length of the past; a hint for one of these would be a coincidence.
_NOT_FIXED_BY_WEIGHTS = {Kind.BATCH, Kind.PAST, Kind.TOTAL}


@dataclass(frozen=True)
class Setting:
    """What a case exercises; sizes apply only to dimensions that the model leaves open.

    Attributes:
        batch: number of rows.
        sequence: number of tokens.
        past: number of past tokens.
        special: whether the rows are degenerate: almost all padding, or one token repeated.
    """

    batch: int
    sequence: int
    past: int = 0
    special: bool = False


@dataclass(frozen=True)
class Sizes:
    """The dimensions of one case.

    Attributes:
        shapes: maps an input to its shape.
        kinds: size of each kind of dimension in this case.
        varied: the kinds that the model leaves open, so that the setting decides.
    """

    shapes: Mapping[str, tuple[int, ...]]
    kinds: Mapping[Kind, int]
    varied: frozenset[Kind]


def symbolic_names(specs: Sequence[InputSpec]) -> tuple[str, ...]:
    """Names of the dimensions that a caller may fix, in the order of the inputs."""
    texts = [dim for spec in specs for dim in spec.shape if isinstance(dim, str)]
    return tuple(dict.fromkeys(name for text in texts for name in names_in(text)))


def check_dims(specs: Sequence[InputSpec], fixed: Mapping[str, int]) -> None:
    """Raise UsageError if `fixed` names a dimension that no input has, or gives it a negative size."""
    known = symbolic_names(specs)
    for name, value in fixed.items():
        if name not in known:
            listed = ", ".join(quoted(each) for each in known) or "none"
            raise UsageError(f"no input has a dimension {quoted(name)}; the model's symbolic dimensions: {listed}")
        if value < 0:
            raise UsageError(f"dimension {quoted(name)} cannot be {value}: give a non-negative number")


def resolve(
    specs: Sequence[InputSpec],
    setting: Setting,
    *,
    hints: Hints,
    fixed: Mapping[str, int],
    longest: int | None,
    given: Mapping[Kind, int] | None = None,
) -> Sizes:
    """Give every dimension a size; `given` are sizes of kinds that replace the usual ones, and what weights imply."""
    given = given or {}
    kinds = {**_kind_sizes(specs, setting, fixed, longest), **given}
    hints = {place: size for place, size in hints.items() if place not in _places(specs, given)}
    values = dict(fixed)
    # Dimensions that are a plain name first: their axis tells what they count. Names that occur only inside arithmetic
    # (`past + sequence`) are then sized by the name alone.
    for spec, axis, dim in _symbolic(specs):
        if names_in(dim) == (dim,) and dim not in values:
            values[dim] = _size(spec, axis, kinds, hints)
    for _, _, dim in _symbolic(specs):
        for name in names_in(dim):
            values.setdefault(name, kinds[kind_by_name(name) or Kind.SEQUENCE])
    shapes = {spec.name: _shape(spec, kinds, values, hints) for spec in specs}
    used = {kind_of(spec, axis) for spec in specs for axis, dim in enumerate(spec.shape) if not isinstance(dim, int)}
    if Kind.TOTAL in used and any(spec.role is Role.PAST for spec in specs):
        used |= {Kind.PAST, Kind.SEQUENCE}
    return Sizes(shapes, kinds, frozenset(used))


def _places(specs: Sequence[InputSpec], kinds: Mapping[Kind, int]) -> set[tuple[str, int]]:
    """The axes of the inputs that count one of these kinds."""
    return {(spec.name, axis) for spec in specs for axis in range(len(spec.shape)) if kind_of(spec, axis) in kinds}


def _shape(spec: InputSpec, kinds: Mapping[Kind, int], values: Mapping[str, int], hints: Hints) -> tuple[int, ...]:
    return tuple(
        dim if isinstance(dim, int) else _dimension(spec, axis, dim, kinds, values, hints)
        for axis, dim in enumerate(spec.shape)
    )


def _dimension(
    spec: InputSpec,
    axis: int,
    dim: str | None,
    kinds: Mapping[Kind, int],
    values: Mapping[str, int],
    hints: Hints,
) -> int:
    if dim is None:
        return _size(spec, axis, kinds, hints)
    named = {kind_by_name(name) for name in names_in(dim)}
    if spec.role is Role.MASK and axis == len(spec.shape) - 1 and dim not in names_in(dim) and named == {Kind.PAST}:
        # Exporters that trace a single new token write `past + 1` for the total of past and sequence.
        return kinds[Kind.TOTAL]
    value = value_of(dim, values)
    return _size(spec, axis, kinds, hints) if value is None else max(value, 0)


def _size(spec: InputSpec, axis: int, kinds: Mapping[Kind, int], hints: Hints) -> int:
    kind = kind_of(spec, axis)
    if kind not in _NOT_FIXED_BY_WEIGHTS and (spec.name, axis) in hints:
        return hints[spec.name, axis]
    return kinds[kind]


def _kind_sizes(
    specs: Sequence[InputSpec], setting: Setting, fixed: Mapping[str, int], longest: int | None
) -> dict[Kind, int]:
    pinned = _pinned(specs)
    pinned.update((kind, value) for name, value in fixed.items() if (kind := kind_by_name(name)) is not None)
    past = pinned.get(Kind.PAST, setting.past)
    sequence = setting.sequence
    if longest is not None:
        # Positions beyond the table would be out of range; at least one new token must remain.
        past = min(past, max(longest - 1, 0))
        sequence = max(min(sequence, longest - past), 1)
    sequence = pinned.get(Kind.SEQUENCE, sequence)
    alone = not any(kind_of(spec, axis) is Kind.SEQUENCE for spec in specs for axis in range(len(spec.shape)))
    # Different from the decoder's length, so that a mix-up shows, and even, because speech encoders halve it.
    encoder = sequence if alone else sequence + sequence % 2 + 4
    encoder = encoder if longest is None or alone else min(encoder, longest - longest % 2)
    side = 224 if pinned.get(Kind.CHANNELS, 3) == 3 else 32
    sizes = {
        **_USUAL,
        Kind.BATCH: setting.batch,
        Kind.ENCODER: encoder,
        Kind.FRAMES: 64 + 2 * sequence,
        Kind.SAMPLES: 3200 + 100 * sequence,
        Kind.HEIGHT: side,
        Kind.WIDTH: side,
    }
    total = past + sequence
    return {
        **sizes,
        **pinned,
        Kind.PAST: past,
        Kind.SEQUENCE: sequence,
        Kind.TOTAL: pinned.get(Kind.TOTAL, total),
    }


def _pinned(specs: Sequence[InputSpec]) -> dict[Kind, int]:
    """Sizes of kinds that an input declares as a number; declarations of token ids take precedence."""
    pinned: dict[Kind, int] = {}
    for spec in sorted(specs, key=lambda spec: spec.role is not Role.IDS):
        if spec.role not in {Role.IDS, Role.POSITIONS, Role.TOKEN_TYPES, Role.PAST, Role.FLOATS}:
            continue
        for axis, dim in enumerate(spec.shape):
            kind = kind_of(spec, axis)
            # A batch of 1 in one input (position ids) is often meant to broadcast.
            if isinstance(dim, int) and kind not in {Kind.ONE, Kind.TOTAL} and not (dim == 1 and kind is Kind.BATCH):
                pinned.setdefault(kind, dim)
    return pinned


def _symbolic(specs: Sequence[InputSpec]) -> Iterator[tuple[InputSpec, int, str]]:
    for spec in specs:
        for axis, dim in enumerate(spec.shape):
            if isinstance(dim, str):
                yield spec, axis, dim
