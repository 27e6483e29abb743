"""Generate the values of one input in one case, valid by construction.

Each role has a function in `_MAKERS`. Random numbers depend on the seed, the name of the input and the case only, so an
additional input does not change the values of the others.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rewriter.proof.inputs.dims import Sizes
from rewriter.proof.inputs.padding import positions_of, token_rows
from rewriter.proof.inputs.roles import InputSpec, Kind, Role, kind_of

_TOKENS = {Kind.TOTAL, Kind.SEQUENCE, Kind.ENCODER}
_SOUND = {Kind.FRAMES, Kind.SAMPLES}
_VOCABULARY = 100
"""Number of token ids if no table tells how many there are."""


@dataclass(frozen=True)
class Request:
    """Everything that the values of an input depend on.

    Attributes:
        spec: the input.
        sizes: the dimensions of the case.
        rows: number of table rows that the input may address; None if it addresses no table.
        cached: whether the case takes the branch with a cache.
        special: whether the rows are degenerate: almost all padding, or one token repeated.
        masked: whether the model takes a mask of its tokens, so that positions count tokens only, not padding.
        seed: the caller's seed.
        case: number of the case.
    """

    spec: InputSpec
    sizes: Sizes
    rows: int | None
    cached: bool
    special: bool
    masked: bool
    seed: int
    case: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.sizes.shapes[self.spec.name]

    @property
    def random(self) -> np.random.Generator:
        """Generator of random numbers for this input in this case."""
        return np.random.default_rng([self.seed, zlib.crc32(self.spec.name.encode()), self.case])


def make_values(request: Request) -> NDArray[Any]:
    """Make the array for one input."""
    made = np.asarray(_MAKERS[request.spec.role](request))
    values: NDArray[Any] = np.ascontiguousarray(made.astype(request.spec.dtype)).reshape(request.shape)
    return values


def _flag(request: Request) -> NDArray[Any]:
    if "cache" in request.spec.name or "branch" in request.spec.name:
        return np.full(request.shape, request.cached)
    if int(np.prod(request.shape)) == 1:
        # A single switch alternates from case to case, so that both of its positions occur.
        return np.full(request.shape, request.case % 2 == 0)
    return np.asarray(request.random.integers(0, 2, request.shape) == 1)


def _mask(request: Request) -> NDArray[Any]:
    shape = request.shape
    mask = np.ones(shape, np.int64)
    kind = kind_of(request.spec, len(shape) - 1) if shape else Kind.ONE
    if len(shape) < 2 or kind_of(request.spec, 0) is not Kind.BATCH:
        return mask
    if kind in _TOKENS:
        rows = token_rows(shape[0], shape[-1], special=request.special)
        mask[:] = rows.reshape(shape[0], *(1,) * (len(shape) - 2), shape[-1])
    elif kind in _SOUND and min(shape[0], shape[-1]) > 1:
        # Sound is padded at the end only: models halve its length repeatedly, and so the length of the mask.
        mask[-1, ..., shape[-1] - max(shape[-1] // 3, 1) :] = 0
    return mask


def masks_tokens(spec: InputSpec) -> bool:
    """Whether the input says which tokens of each row are padding."""
    if spec.role is not Role.MASK or len(spec.shape) != 2:
        return False
    return kind_of(spec, 0) is Kind.BATCH and kind_of(spec, 1) in {Kind.TOTAL, Kind.SEQUENCE}


def _positions(request: Request) -> NDArray[Any]:
    past, shape = request.sizes.kinds[Kind.PAST], request.shape or (1,)
    numbers = np.broadcast_to(np.arange(past, past + shape[-1]), shape)
    # With padding on the left, positions start at the first token, as generation with padded batches does it.
    if request.masked and len(shape) == 2 and shape[0] > 1:
        numbers = positions_of(token_rows(shape[0], past + shape[-1], special=request.special))[:, past:]
    return numbers if request.rows is None else np.minimum(numbers, request.rows - 1)


def _token_types(request: Request) -> NDArray[Any]:
    length = request.shape[-1] if request.shape else 1
    kinds = np.arange(length) >= (length + 1) // 2
    second = min(1, (request.rows or 2) - 1)
    return np.broadcast_to(kinds * second, request.shape or (1,))


def _ids(request: Request) -> NDArray[Any]:
    ids = _integers(request, request.rows or _VOCABULARY)
    if request.special and ids.size:
        last = ids if ids.ndim == 1 else ids[-1]
        last[...] = last[..., :1]
    return ids


def _integers(request: Request, count: int | None = None) -> NDArray[Any]:
    limit = np.iinfo(request.spec.dtype.name).max
    usual = 256 if request.spec.dtype.itemsize == 1 else 8
    count = min(count or request.rows or usual, int(limit) + 1)
    return request.random.integers(0, count, request.shape)


def _lengths(request: Request) -> NDArray[Any]:
    """Full lengths, but a shorter one for the last row of a batch."""
    varied = request.sizes.varied
    kind = next((kind for kind in (Kind.FRAMES, Kind.SAMPLES) if kind in varied), Kind.SEQUENCE)
    lengths = np.full(request.shape, request.sizes.kinds[kind])
    if lengths.size > 1:
        lengths.reshape(-1)[-1] -= lengths.reshape(-1)[-1] // 3
    return lengths


def _timestep(request: Request) -> NDArray[Any]:
    return request.random.integers(0, min(request.rows or 1000, 1000), request.shape)


def _floats(request: Request) -> NDArray[Any]:
    return request.random.standard_normal(request.shape)


def _constant(kind: Kind, less: int = 0) -> Callable[[Request], NDArray[Any]]:
    return lambda request: np.full(request.shape, max(request.sizes.kinds[kind] - less, 0))


_MAKERS: Mapping[Role, Callable[[Request], NDArray[Any]]] = {
    Role.FLAG: _flag,
    Role.MASK: _mask,
    Role.PAST: _floats,
    Role.POSITIONS: _positions,
    Role.TOKEN_TYPES: _token_types,
    Role.PAST_LENGTH: _constant(Kind.PAST),
    Role.TOTAL_LENGTH: _constant(Kind.TOTAL),
    Role.LAST_INDEX: _constant(Kind.TOTAL, less=1),
    Role.LENGTHS: _lengths,
    Role.TIMESTEP: _timestep,
    Role.KEEP: _constant(Kind.ONE),
    Role.IDS: _ids,
    Role.INTEGERS: _integers,
    Role.FLOATS: _floats,
}
