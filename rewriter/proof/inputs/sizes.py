"""The size of every axis of every input: declared, named (`past + 1` too), fixed by the caller or by a weight.

A name has the same size in all inputs of a case, and arithmetic on names holds. Sizes that the caller fixes take
precedence, then those that the weights imply, then those of the `Setting` (batch, tokens, past tokens).
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rewriter.errors import UsageError
from rewriter.proof.inputs.roles import InputSpec, Kind, Role, kind_by_name, kind_of
from rewriter.text import quoted

_USUAL = {
    Kind.CHOICES: 2, Kind.CHANNELS: 3, Kind.HEADS: 4, Kind.FEATURES: 80, Kind.HIDDEN: 64, Kind.ONE: 1,
}  # fmt: skip


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


def check_dims(specs: Sequence[InputSpec], fixed: Mapping[str, int]) -> None:
    """Raise UsageError if `fixed` names a dimension that no input has, or gives it a negative size."""
    known = dict.fromkeys(name for _, _, dim in _symbolic(specs) for name in names_in(dim))
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
    hints: Mapping[tuple[str, int], int],
    fixed: Mapping[str, int],
    longest: int | None,
    given: Mapping[Kind, int],
) -> Sizes:
    """Give every dimension a size.

    Args:
        specs: the inputs.
        setting: what the case exercises.
        hints: sizes that the weights imply, by input and axis.
        fixed: sizes of symbolic dimensions that the caller states.
        longest: the largest number of tokens; None if nothing bounds it.
        given: sizes of kinds that replace the usual ones, and what weights imply.
    """
    kinds = {**_kind_sizes(specs, setting, fixed, longest), **given}

    def size(spec: InputSpec, axis: int) -> int:
        kind = kind_of(spec, axis)
        return kinds[kind] if kind in given else hints.get((spec.name, axis), kinds[kind])

    def dimension(spec: InputSpec, axis: int) -> int:
        dim = spec.shape[axis]
        if isinstance(dim, int):
            return dim
        if (
            dim
            and spec.role is Role.MASK
            and dim not in values
            and {kind_by_name(n) for n in names_in(dim)} == {Kind.PAST}
        ):
            # Exporters that trace a single new token write `past + 1` for the total of past and sequence.
            return kinds[Kind.TOTAL]
        value = value_of(dim, values) if dim else None
        return size(spec, axis) if value is None else max(value, 0)

    values = dict(fixed)
    # Dimensions that are a plain name first: their axis tells what they count. Names that occur only inside arithmetic
    # (`past + sequence`) are then sized by the name alone.
    for spec, axis, dim in _symbolic(specs):
        if names_in(dim) == (dim,):
            values.setdefault(dim, size(spec, axis))
    for _, _, dim in _symbolic(specs):
        for name in names_in(dim):
            values.setdefault(name, kinds[kind_by_name(name) or Kind.SEQUENCE])
    shapes = {spec.name: tuple(dimension(spec, axis) for axis in range(len(spec.shape))) for spec in specs}
    varied = {kind_of(spec, axis) for spec in specs for axis, dim in enumerate(spec.shape) if not isinstance(dim, int)}
    if Kind.TOTAL in varied and any(spec.role is Role.PAST for spec in specs):
        varied |= {Kind.PAST, Kind.SEQUENCE}
    return Sizes(shapes, kinds, frozenset(varied))


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
    return {
        **_USUAL,
        Kind.BATCH: setting.batch,
        Kind.ENCODER: encoder,
        Kind.FRAMES: 64 + 2 * sequence,
        Kind.SAMPLES: 3200 + 100 * sequence,
        Kind.HEIGHT: side,
        Kind.WIDTH: side,
        Kind.TOTAL: past + sequence,
        **pinned,
        Kind.PAST: past,
        Kind.SEQUENCE: sequence,
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


# -- arithmetic on names ---------------------------------------------------------------------------------------------

_LONGEST, _LARGEST = 200, 2**31
"""Bounds on the text and on every intermediate result: both come from the model file, which is not trusted."""

_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv, ast.Div: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
_FUNCTIONS: Mapping[str, Callable[..., int]] = {"max": max, "min": min, "floor": int, "ceil": int, "ceiling": int}
_FAILURES = (SyntaxError, ValueError, LookupError, ArithmeticError, TypeError, MemoryError, RecursionError)


def names_in(text: str) -> tuple[str, ...]:
    """The symbolic names in a dimension, such as `past + sequence`; the whole text if it is not arithmetic."""
    found: dict[str, int] = {}
    try:
        _evaluate(_parsed(text), lambda name: found.setdefault(name, 1))
    except ZeroDivisionError:
        pass
    except _FAILURES:
        return (text,)
    return tuple(found) or (text,)


def value_of(text: str, values: Mapping[str, int]) -> int | None:
    """The value of a dimension; None if a name is unknown or the arithmetic has no value."""
    if text in values:
        return values[text]
    try:
        return _evaluate(_parsed(text), values.__getitem__)
    except _FAILURES:
        return None


def _parsed(text: str) -> ast.expr:
    if len(text) > _LONGEST:
        raise ValueError
    return ast.parse(text.strip(), mode="eval").body


def _evaluate(node: ast.expr, value: Callable[[str], int]) -> int:
    """Only what is named here is arithmetic: anything else that Python can parse raises."""
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name):
            return value(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand, value)
        case ast.BinOp(left=left, op=sign, right=right):
            result = _OPERATORS[type(sign)](_evaluate(left, value), _evaluate(right, value))
            if abs(result) > _LARGEST:
                raise OverflowError
            return result
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
            return _FUNCTIONS[name.lower()](*(_evaluate(each, value) for each in args))
    raise ValueError
