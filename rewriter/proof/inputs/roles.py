"""The inputs of a model: element type, shape, what each means and what its axes count.

Operators that read an input say it best (`rewriter.proof.inputs.facts`). What they leave open follows from names: the
role from the first line of `_NAMES` that matches, the kind of an axis from the name of its dimension, or else from role
and place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx

from rewriter.arrays import Array
from rewriter.errors import UsageError
from rewriter.graph.types import Dim, elem_name
from rewriter.proof.inputs.facts import Facts, Kind, Role, facts_of
from rewriter.text import quoted


@dataclass(frozen=True)
class InputSpec:
    """One graph input that has no default.

    Attributes:
        name: its name.
        dtype: its numpy element type.
        shape: its dimensions; each a number, a symbolic name, or None.
        role: its role.
        kinds: what each axis counts.
        rows: its numbers are below this, because it selects rows of a table; None if nothing bounds them.
    """

    name: str
    dtype: np.dtype[np.generic]
    shape: tuple[Dim, ...]
    role: Role
    kinds: tuple[Kind, ...]
    rows: int | None


_INTEGERS, _BOOL, _FLOATS = "iu", "b", "f"
_NAMES: tuple[tuple[str, str, Role], ...] = (
    (r"use_cache|branch", _BOOL, Role.FLAG),
    (r"mask|padding", _INTEGERS + _BOOL + _FLOATS, Role.MASK),
    (r"past_seq(uence)?_len|past_len", _INTEGERS, Role.PAST_LENGTH),
    (r"past|cache\.|kv_cache|(key|value)_cache|cache_(key|value)|(^|[._])mems?[._]?\d", _FLOATS, Role.PAST),
    (r"position|^pos(_ids)?$", _INTEGERS, Role.POSITIONS),
    (r"token_type|segment", _INTEGERS, Role.TOKEN_TYPES),
    (r"total_seq(uence)?_len", _INTEGERS, Role.TOTAL_LENGTH),
    (r"seqlens_k", _INTEGERS, Role.LAST_INDEX),
    (r"to_keep", _INTEGERS, Role.KEEP),
    (r"length|lengths|_lens?$", _INTEGERS, Role.LENGTHS),
    (r"time_?steps?$|^t$", _INTEGERS + _FLOATS, Role.TIMESTEP),
    (r"(^|[._/:])(ids?|tokens?|input|inputs)$|_ids?$|_tokens?$|ids?[._:]?\d*$", _INTEGERS, Role.IDS),
    ("", _BOOL, Role.FLAG),
    ("", _INTEGERS, Role.INTEGERS),
    ("", _FLOATS, Role.FLOATS),
)
"""Pattern in the lower-case name, kinds of numpy element types, role. The order matters: `position_ids` matches the
pattern of token ids too. Unknown booleans switch something on, floats are activations, integers small numbers."""

_DIMENSIONS: tuple[tuple[str, Kind], ...] = (
    (r"encoder", Kind.ENCODER),
    (r"total|kv_len|mask.*(len|seq)", Kind.TOTAL),
    (r"past|mem(s|ory)?_len|cache", Kind.PAST),
    (r"batch|^b$|^n$|^bs$", Kind.BATCH),
    (r"choices", Kind.CHOICES),
    (r"channel", Kind.CHANNELS),
    (r"height|^h$", Kind.HEIGHT),
    (r"width|^w$", Kind.WIDTH),
    (r"head", Kind.HEADS),
    (r"samples|audio|wave", Kind.SAMPLES),
    (r"frame|time|^t$", Kind.FRAMES),
    (r"feature|mel|bins|freq", Kind.FEATURES),
    (r"hidden|embed|dim$", Kind.HIDDEN),
    (r"seq|len|token|^s$|^l$", Kind.SEQUENCE),
)


def _axes(*spelled: str) -> dict[int, tuple[Kind, ...]]:
    return {len(each.split()): tuple(Kind[name] for name in each.split()) for each in spelled}


_TEXT = _axes("SEQUENCE", "BATCH SEQUENCE", "BATCH CHOICES SEQUENCE")
_COUNT = _axes("BATCH")
_AXES: Mapping[Role, Mapping[int, tuple[Kind, ...]]] = {
    **dict.fromkeys((Role.IDS, Role.INTEGERS, Role.POSITIONS, Role.TOKEN_TYPES), _TEXT),
    **dict.fromkeys((Role.LENGTHS, Role.TIMESTEP, Role.LAST_INDEX, Role.PAST_LENGTH), _COUNT),
    Role.MASK: _axes("TOTAL", "BATCH TOTAL", "BATCH SEQUENCE TOTAL", "BATCH ONE SEQUENCE TOTAL"),
    Role.PAST: _axes("BATCH PAST HIDDEN", "BATCH HEADS PAST HIDDEN", "ONE BATCH HEADS PAST HIDDEN"),
    Role.FLOATS: _axes(
        *("BATCH", "BATCH SAMPLES", "BATCH SEQUENCE HIDDEN", "BATCH CHANNELS HEIGHT WIDTH"),
        "BATCH FRAMES CHANNELS HEIGHT WIDTH",
    ),
}
"""Maps role and rank to what the axes count."""


def input_specs(model: onnx.ModelProto, facts: Facts | None = None) -> tuple[InputSpec, ...]:
    """One entry per input without a default; `facts` are those of `facts_of`.

    Raises:
        UsageError: no values can be made for an input: it is not a tensor, has no shape, or has an element type such as
            string.
    """
    defaults = {tensor.name for tensor in model.graph.initializer}
    values = [value for value in model.graph.input if value.name not in defaults]
    facts = facts_of(model) if facts is None else facts
    return tuple(_spec(value, facts) for value in values)


def token_ids(model: onnx.ModelProto, feeds: Mapping[str, Array], length: int) -> tuple[int, ...] | None:
    """The token ids of the first sequence; None where no input has ids for that many tokens."""
    for spec in input_specs(model):
        array = feeds.get(spec.name)
        if spec.role is Role.IDS and array is not None and array.ndim > 1 and array.shape[-1] == length:
            return tuple(int(number) for number in array.reshape(-1, length)[0])
    return None


def numpy_type(elem_type: int) -> np.dtype[np.generic] | None:
    """The numpy element type for `elem_type`; None if no values of that type can be generated."""
    try:
        found: np.dtype[np.generic] = onnx.helper.tensor_dtype_to_np_dtype(elem_type)
    except KeyError:
        return None
    return found if found.kind in "biu" or found.name in ("float16", "float32", "float64", "bfloat16") else None


def is_float(dtype: np.dtype[np.generic]) -> bool:
    """Whether `dtype` is a floating point type, bfloat16 included."""
    return dtype.kind == "f" or dtype.name == "bfloat16"


def kind_by_name(name: str) -> Kind | None:
    """What a dimension called `name` counts; None if the name does not tell."""
    return next((kind for pattern, kind in _DIMENSIONS if re.search(pattern, name.lower())), None)


def _spec(value: onnx.ValueInfoProto, facts: Facts) -> InputSpec:
    name = quoted(value.name)
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        what = (kind or "unknown type").removesuffix("_type").replace("_", " ")
        raise UsageError(f"input {name} is not a tensor ({what}): models with such inputs cannot be validated")
    tensor = value.type.tensor_type
    dtype = numpy_type(tensor.elem_type)
    if dtype is None:
        spelled = elem_name(tensor.elem_type)
        raise UsageError(f"no values can be made for input {name} of type {spelled}: give them with --inputs")
    if not tensor.HasField("shape"):
        raise UsageError(f"input {name} has no declared shape: give its values with --inputs")
    # Some exporters write -1 or 0 for a dynamic dimension.
    shape = tuple(dim.dim_value if dim.dim_value > 0 else dim.dim_param or None for dim in tensor.shape.dim)
    letter = _FLOATS if is_float(dtype) else dtype.kind
    by_name = next(r for pattern, kinds, r in _NAMES if letter in kinds and re.search(pattern, value.name.lower()))
    role = facts.roles.get(value.name, by_name)
    places = _places(value.name.lower(), role, len(shape), floats=letter == _FLOATS)
    kinds = tuple(
        facts.kinds.get((value.name, axis)) or _kind(dim, place, role, (len(shape), axis))
        for axis, (dim, place) in enumerate(zip(shape, places, strict=True))
    )
    return InputSpec(value.name, dtype, shape, role, kinds, facts.rows.get(value.name))


def _kind(dim: Dim, place: Kind, role: Role, where: tuple[int, int]) -> Kind:
    by_name = kind_by_name(dim) if isinstance(dim, str) else None
    if by_name is Kind.PAST and role is Role.MASK:
        return Kind.TOTAL  # `past_sequence_length + sequence_length`, however it is written
    if by_name is Kind.SEQUENCE and role is Role.FLOATS:
        # Speech models call their samples or frames a sequence.
        return {(2, 1): Kind.SAMPLES, (3, 2): Kind.FRAMES}.get(where, by_name)
    return by_name or place


def _places(name: str, role: Role, rank: int, *, floats: bool) -> tuple[Kind, ...]:
    """What the axes of an input usually count."""
    kinds = _AXES.get(role, {}).get(rank, ())
    if role is Role.MASK and "pixel" in name:  # DETR takes a mask of pixels, whose axes are not tokens
        kinds = (Kind.BATCH, Kind.HEIGHT, Kind.WIDTH)[:rank]
    if floats and rank == 3 and re.search(r"feature|mel|spectro|audio", name) and not re.search(r"image|pixel", name):
        kinds = (Kind.BATCH, Kind.FEATURES, Kind.FRAMES)  # spectrograms have their frames last
    if "encoder" in name and "decoder" not in name.split("_", maxsplit=1)[0]:
        tokens = {Kind.PAST, Kind.TOTAL, Kind.SEQUENCE}
        kinds = tuple(Kind.ENCODER if kind in tokens else kind for kind in kinds)
    return (*kinds, *(Kind.ONE,) * rank)[:rank]
