"""The values of one input in one case.

Comes in: an input, the sizes of the case, the table rows it may address. Goes out: an array that is valid by
construction. Each role has its maker in `_MAKERS`. Random numbers depend on the seed, the input's name and
the case, so that another input changes nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rewriter.proof.dims import Sizes
from rewriter.proof.kinds import Kind, kind_of
from rewriter.proof.roles import InputSpec, Role

_PADDED = {Kind.TOTAL, Kind.SEQUENCE, Kind.ENCODER, Kind.FRAMES, Kind.SAMPLES}
_VOCABULARY = 100
"""Token ids where no table tells how many there are."""


@dataclass(frozen=True)
class Request:
    """What an array is made from.

    Attributes:
        spec: the input.
        sizes: the dimensions of the case.
        rows: number of table rows that the input may address, None where it addresses none.
        cached: whether the case takes the branch with a cache.
        seed: the caller's seed.
        case: number of the case.
    """

    spec: InputSpec
    sizes: Sizes
    rows: int | None
    cached: bool
    seed: int
    case: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape to make."""
        return self.sizes.shapes[self.spec.name]

    @property
    def random(self) -> np.random.Generator:
        """Random numbers of this input in this case."""
        return np.random.default_rng([self.seed, zlib.crc32(self.spec.name.encode()), self.case])


def make_values(request: Request) -> NDArray[Any]:
    """The array for one input."""
    made = np.asarray(_MAKERS[request.spec.role](request))
    values: NDArray[Any] = np.ascontiguousarray(made.astype(request.spec.dtype)).reshape(request.shape)
    return values


def _flag(request: Request) -> NDArray[Any]:
    if "cache" in request.spec.name or "branch" in request.spec.name:
        return np.full(request.shape, request.cached)
    if int(np.prod(request.shape)) == 1:
        return np.full(request.shape, request.case % 2 == 0)
    return np.asarray(request.random.integers(0, 2, request.shape) == 1)


def _mask(request: Request) -> NDArray[Any]:
    shape = request.shape
    mask = np.ones(shape, np.int64)
    if len(shape) < 2 or shape[0] < 2 or shape[-1] < 2:
        return mask
    if kind_of(request.spec, 0) is Kind.BATCH and kind_of(request.spec, len(shape) - 1) in _PADDED:
        mask[-1, ..., shape[-1] - max(shape[-1] // 3, 1) :] = 0
    return mask


def _positions(request: Request) -> NDArray[Any]:
    past, length = request.sizes.kinds[Kind.PAST], request.shape[-1] if request.shape else 1
    numbers = np.arange(past, past + length)
    if request.rows is not None:
        numbers = np.minimum(numbers, request.rows - 1)
    return np.broadcast_to(numbers, request.shape or (1,))


def _token_types(request: Request) -> NDArray[Any]:
    length = request.shape[-1] if request.shape else 1
    kinds = np.arange(length) >= (length + 1) // 2
    second = min(1, (request.rows or 2) - 1)
    return np.broadcast_to(kinds * second, request.shape or (1,))


def _ids(request: Request) -> NDArray[Any]:
    return _integers(request, request.rows or _VOCABULARY)


def _integers(request: Request, count: int | None = None) -> NDArray[Any]:
    limit = np.iinfo(request.spec.dtype.name).max
    usual = 256 if request.spec.dtype.itemsize == 1 else 8
    count = min(count or request.rows or usual, int(limit) + 1)
    return request.random.integers(0, count, request.shape)


def _lengths(request: Request) -> NDArray[Any]:
    """Whole lengths, the last one of a batch shorter."""
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
