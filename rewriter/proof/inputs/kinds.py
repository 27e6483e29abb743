"""What a dimension counts: sequences, tokens, pixels.

Comes in: an input and one of its axes. Goes out: a `Kind`, told by the dimension's name, else by the input's
role and the axis. Used by `rewriter.proof.inputs.dims`, which gives each kind a size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum

from rewriter.proof.inputs.roles import InputSpec, Role, is_float


class Kind(Enum):
    """What a dimension counts; the value is how case names call it."""

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


_NAMES: tuple[tuple[str, Kind], ...] = (
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
_TEXT = {1: (Kind.SEQUENCE,), 2: (Kind.BATCH, Kind.SEQUENCE), 3: (Kind.BATCH, Kind.CHOICES, Kind.SEQUENCE)}
_COUNT = {1: (Kind.BATCH,)}
_AXES: Mapping[Role, Mapping[int, tuple[Kind, ...]]] = {
    Role.IDS: _TEXT,
    Role.INTEGERS: _TEXT,
    Role.POSITIONS: _TEXT,
    Role.TOKEN_TYPES: _TEXT,
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
    Role.LENGTHS: _COUNT,
    Role.TIMESTEP: _COUNT,
    Role.LAST_INDEX: _COUNT,
    Role.PAST_LENGTH: _COUNT,
    Role.FLOATS: {
        1: (Kind.BATCH,),
        2: (Kind.BATCH, Kind.SAMPLES),
        3: (Kind.BATCH, Kind.SEQUENCE, Kind.HIDDEN),
        4: (Kind.BATCH, Kind.CHANNELS, Kind.HEIGHT, Kind.WIDTH),
        5: (Kind.BATCH, Kind.FRAMES, Kind.CHANNELS, Kind.HEIGHT, Kind.WIDTH),
    },
}
"""Role to rank to what the axes count."""


def kind_by_name(name: str) -> Kind | None:
    """What a dimension called `name` counts; None where the name does not tell."""
    lowered = name.lower()
    return next((kind for pattern, kind in _NAMES if re.search(pattern, lowered)), None)


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
    if spec.role is Role.MASK and "pixel" in name:
        kinds = (Kind.BATCH, Kind.HEIGHT, Kind.WIDTH)[: len(spec.shape)]
    kind = kinds[axis] if axis < len(kinds) else Kind.ONE
    if "encoder" in name and kind in {Kind.PAST, Kind.TOTAL, Kind.SEQUENCE} and "decoder" not in name.split("_")[0]:
        return Kind.ENCODER
    if "image" in name or "pixel" in name or not is_float(spec.dtype):
        return kind
    if re.search(r"feature|mel|spectro|audio", name) and len(spec.shape) == 3:
        return (Kind.BATCH, Kind.FEATURES, Kind.FRAMES)[axis]
    return kind
