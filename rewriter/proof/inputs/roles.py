"""Infer what each graph input means, and what its dimensions count.

An `InputSpec` describes an input that must be fed: element type, shape and `Role`. The role follows from name and type
by the first matching line of `_NAMES`. The `Kind` of a dimension (batch, tokens, pixels) follows from its name, or else
from the role and the axis.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
import onnx

from rewriter.errors import UsageError
from rewriter.graph.types import Dim, elem_name
from rewriter.graph.view import GraphView
from rewriter.text import quoted


class Role(Enum):
    """What an input means, and therefore which values are valid."""

    FLAG = auto()
    MASK = auto()
    PAST = auto()
    POSITIONS = auto()
    TOKEN_TYPES = auto()
    PAST_LENGTH = auto()
    TOTAL_LENGTH = auto()
    LAST_INDEX = auto()
    LENGTHS = auto()
    TIMESTEP = auto()
    KEEP = auto()
    IDS = auto()
    INTEGERS = auto()
    FLOATS = auto()


@dataclass(frozen=True)
class InputSpec:
    """One graph input.

    Attributes:
        name: its name.
        dtype: its numpy element type.
        shape: its dimensions; each a number, a symbolic name, or None.
        role: its role.
    """

    name: str
    dtype: np.dtype[np.generic]
    shape: tuple[Dim, ...]
    role: Role


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
)
"""Pattern in the lower-case name, kinds of numpy element types, role. The order matters: `position_ids` matches the
pattern of token ids too."""


def input_specs(model: onnx.ModelProto, view: GraphView) -> tuple[InputSpec, ...]:
    """One entry per input without a default.

    Raises:
        UsageError: no values can be made for an input: it is not a tensor, has no shape, or has an element type such as
            string.
    """
    needed = set(view.inputs)
    return tuple(_spec(value) for value in model.graph.input if value.name in needed)


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


def _spec(value: onnx.ValueInfoProto) -> InputSpec:
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
    shape = tuple(_dim(dim) for dim in tensor.shape.dim)
    return InputSpec(value.name, dtype, shape, _role(value.name, dtype))


def _dim(dim: onnx.TensorShapeProto.Dimension) -> Dim:
    # Some exporters write -1 or 0 for a dynamic dimension.
    if dim.HasField("dim_value") and dim.dim_value > 0:
        return dim.dim_value
    return dim.dim_param or None


def _role(name: str, dtype: np.dtype[np.generic]) -> Role:
    kind = _FLOATS if is_float(dtype) else dtype.kind
    for pattern, kinds, role in _NAMES:
        if kind in kinds and re.search(pattern, name.lower()):
            return role
    # Unknown names: a boolean switches something on, floats are activations, integers are small numbers.
    if kind == _BOOL:
        return Role.FLAG
    return Role.FLOATS if kind == _FLOATS else Role.INTEGERS


class Kind(Enum):
    """What a dimension counts; the values appear in the names of cases."""

    BATCH = "batch"
    SEQUENCE = "sequence"
    PAST = "past"
    TOTAL = "past and sequence"
    ENCODER = "encoder sequence"
    FRAMES = "frames"
    SAMPLES = "samples"
    CHOICES = "choices"
    CHANNELS = "channels"
    HEIGHT = "height"
    WIDTH = "width"
    HEADS = "heads"
    FEATURES = "features"
    HIDDEN = "hidden size"
    ONE = "one"


_DIMENSION_NAMES: tuple[tuple[str, Kind], ...] = (
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
_TEXT_AXES = {1: (Kind.SEQUENCE,), 2: (Kind.BATCH, Kind.SEQUENCE), 3: (Kind.BATCH, Kind.CHOICES, Kind.SEQUENCE)}
_COUNT_AXES = {1: (Kind.BATCH,)}
_AXES: Mapping[Role, Mapping[int, tuple[Kind, ...]]] = {
    Role.IDS: _TEXT_AXES,
    Role.INTEGERS: _TEXT_AXES,
    Role.POSITIONS: _TEXT_AXES,
    Role.TOKEN_TYPES: _TEXT_AXES,
    Role.MASK: {
        1: (Kind.TOTAL,),
        2: (Kind.BATCH, Kind.TOTAL),
        3: (Kind.BATCH, Kind.SEQUENCE, Kind.TOTAL),
        4: (Kind.BATCH, Kind.ONE, Kind.SEQUENCE, Kind.TOTAL),
    },
    Role.PAST: {
        3: (Kind.BATCH, Kind.PAST, Kind.HIDDEN),
        4: (Kind.BATCH, Kind.HEADS, Kind.PAST, Kind.HIDDEN),
        5: (Kind.ONE, Kind.BATCH, Kind.HEADS, Kind.PAST, Kind.HIDDEN),
    },
    Role.LENGTHS: _COUNT_AXES,
    Role.TIMESTEP: _COUNT_AXES,
    Role.LAST_INDEX: _COUNT_AXES,
    Role.PAST_LENGTH: _COUNT_AXES,
    Role.FLOATS: {
        1: (Kind.BATCH,),
        2: (Kind.BATCH, Kind.SAMPLES),
        3: (Kind.BATCH, Kind.SEQUENCE, Kind.HIDDEN),
        4: (Kind.BATCH, Kind.CHANNELS, Kind.HEIGHT, Kind.WIDTH),
        5: (Kind.BATCH, Kind.FRAMES, Kind.CHANNELS, Kind.HEIGHT, Kind.WIDTH),
    },
}
"""Maps role and rank to what the axes count."""


def kind_by_name(name: str) -> Kind | None:
    """What a dimension called `name` counts; None if the name does not tell."""
    lowered = name.lower()
    return next((kind for pattern, kind in _DIMENSION_NAMES if re.search(pattern, lowered)), None)


def kind_of(spec: InputSpec, axis: int) -> Kind:
    """What axis `axis` of `spec` counts."""
    dim = spec.shape[axis]
    by_name = kind_by_name(dim) if isinstance(dim, str) else None
    by_place = _by_place(spec, axis)
    if by_name is Kind.PAST and spec.role is Role.MASK:
        return Kind.TOTAL  # `past_sequence_length + sequence_length`, however it is written
    if by_name is Kind.SEQUENCE and spec.role is Role.FLOATS:
        # Speech models call their samples or frames a sequence.
        return {(2, 1): Kind.SAMPLES, (3, 2): Kind.FRAMES}.get((len(spec.shape), axis), by_name)
    return by_name or by_place


def _by_place(spec: InputSpec, axis: int) -> Kind:
    name = spec.name.lower()
    kinds = _AXES.get(spec.role, {}).get(len(spec.shape), ())
    # Models such as DETR take a mask of pixels, whose axes are not tokens.
    if spec.role is Role.MASK and "pixel" in name:
        kinds = (Kind.BATCH, Kind.HEIGHT, Kind.WIDTH)[: len(spec.shape)]
    kind = kinds[axis] if axis < len(kinds) else Kind.ONE
    if "encoder" in name and kind in {Kind.PAST, Kind.TOTAL, Kind.SEQUENCE} and "decoder" not in name.split("_")[0]:
        return Kind.ENCODER
    if "image" in name or "pixel" in name or not is_float(spec.dtype):
        return kind
    # Spectrograms have their frames last, other three-dimensional floats their channels.
    if re.search(r"feature|mel|spectro|audio", name) and len(spec.shape) == 3:
        return (Kind.BATCH, Kind.FEATURES, Kind.FRAMES)[axis]
    return kind
