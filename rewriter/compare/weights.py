"""Compare weights bit for bit, in bounded memory, and compute fingerprints by which renamed weights are found.

External data is read piece by piece. Two references to the same bytes of the same file are equal without being read.
Values in typed fields (`float_data` and the like) are converted to the layout of raw data.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from numpy.typing import NDArray

from rewriter.errors import ModelError
from rewriter.files.external import ExternalRef, open_inside, resolve
from rewriter.files.load import LoadedModel, read_tensor
from rewriter.files.tensors import ELEMENT_TYPES, byte_count, element_type
from rewriter.files.walk import is_external
from rewriter.text import quoted

_PIECE = 8 * 2**20
"""Number of bytes of each tensor in memory at once; a multiple of every element size."""

Status = Literal["changed", "only in A", "only in B"]

_SAMPLE = 4096
"""Number of bytes at either end of a large tensor that enter its fingerprint."""


@dataclass(frozen=True)
class TensorChange:
    """One weight that differs.

    Attributes:
        name: its name in A, or in B if it is only there.
        status: `changed`, `only in A` or `only in B`.
        kind: element type and dims in A and in B; empty where it is missing.
        bytes: size of the data in A, or in B if it is only there.
        elements: number of elements that differ; None if element types or dims differ.
        max_difference: largest |B - A|; None if it is not defined.
        index: the index of that element.
    """

    name: str
    status: Status
    kind: tuple[str, str]
    bytes: int
    elements: int | None = None
    max_difference: float | None = None
    index: tuple[int, ...] | None = None


def kind_of(tensor: onnx.TensorProto) -> str:
    """Element type and dims, such as `float32[768, 3072]`."""
    known = ELEMENT_TYPES.get(tensor.data_type)
    name = "?" if known is None else known.name.lower()
    return f"{'float32' if name == 'float' else name}[{', '.join(map(str, tensor.dims))}]"


def only(name: str, tensor: onnx.TensorProto, status: Status) -> TensorChange:
    """The change for a weight that only one model has."""
    kind = kind_of(tensor)
    return TensorChange(name, status, (kind, "") if status == "only in A" else ("", kind), byte_count(tensor))


def compare_tensors(
    name: str, a: tuple[LoadedModel, onnx.TensorProto], b: tuple[LoadedModel, onnx.TensorProto]
) -> TensorChange | None:
    """Compare two weights bit for bit; the result calls them `name` and is None if they are equal.

    Raises:
        ModelError: data cannot be read, or does not match the dims.
    """
    first, second = a[1], b[1]
    kinds = kind_of(first), kind_of(second)
    with ExitStack() as stack:
        left, right = (_Source.of(model, tensor, stack) for model, tensor in (a, b))
        if kinds[0] != kinds[1]:
            return TensorChange(name, "changed", kinds, left.size)
        if left.place is not None and left.place == right.place:
            return None  # the same bytes of the same file
        if left.size != right.size:
            return TensorChange(name, "changed", kinds, left.size)
        tally = _Tally.of(first)
        for start in range(0, left.size, _PIECE):
            ours, theirs = left.piece(start, _PIECE), right.piece(start, _PIECE)
            if ours != theirs:
                tally.count(start, ours, theirs)
    return tally.change(name, first, kinds, left.size) if tally.differs else None


def fingerprint(model: LoadedModel, tensor: onnx.TensorProto) -> bytes:
    """A digest of type, dims and the data, or of both ends of the data of a large tensor.

    Equal weights have equal fingerprints, but not conversely.

    Raises:
        ModelError: data cannot be read.
    """
    return _digest(model, tensor, lambda size: dict.fromkeys((0, max(size - _SAMPLE, 0))), _SAMPLE)


def digest(model: LoadedModel, tensor: onnx.TensorProto) -> bytes:
    """A digest of type, dims and all of the data, equal for equal tensors only.

    Raises:
        ModelError: data cannot be read.
    """
    return _digest(model, tensor, lambda size: range(0, size, _PIECE), _PIECE)


def _digest(model: LoadedModel, tensor: onnx.TensorProto, starts: Callable[[int], Iterable[int]], length: int) -> bytes:
    found = hashlib.blake2b(kind_of(tensor).encode(), digest_size=16)
    with ExitStack() as stack:
        source = _Source.of(model, tensor, stack)
        for start in starts(source.size):
            found.update(source.piece(start, length))
    return found.digest()


@dataclass(frozen=True, eq=False)
class _Source:
    """The bytes of one tensor: in memory, or a range of an open file.

    Attributes:
        size: size in bytes.
        place: device, inode and offset of external data, which identify it; None for data in memory.
    """

    size: int
    place: tuple[int, int, int] | None
    _data: bytes
    _handle: int
    _ref: ExternalRef | None

    @classmethod
    def of(cls, model: LoadedModel, tensor: onnx.TensorProto, stack: ExitStack) -> _Source:
        if not is_external(tensor):
            data = tensor.raw_data if tensor.HasField("raw_data") else _packed(model, tensor)
            return cls(len(data), None, data, -1, None)
        base = model.base_dir or Path()
        ref = resolve(tensor, base)
        handle = open_inside(base, ref.location, tensor.name)
        stack.callback(os.close, handle)
        status = os.fstat(handle)
        return cls(ref.length, (status.st_dev, status.st_ino, ref.offset), b"", handle, ref)

    def piece(self, start: int, length: int) -> bytes:
        length = min(length, self.size - start)
        if self._ref is None:
            return self._data[start : start + length]
        pieces, done = [], 0
        while done < length:
            try:
                got = os.pread(self._handle, length - done, self._ref.offset + start + done)
            except OSError as error:
                raise ModelError(f"cannot read {quoted(self._ref.path)}: {error.strerror}; check the disk") from error
            if not got:
                raise ModelError(
                    f"{quoted(self._ref.path)} shrank while it was read; run again when nothing writes to it"
                )
            pieces.append(got)
            done += len(got)
        return b"".join(pieces)


def _packed(model: LoadedModel, tensor: onnx.TensorProto) -> bytes:
    """The data of a tensor with typed fields in the layout of raw data; each string is preceded by its length."""
    if tensor.data_type == onnx.TensorProto.STRING:
        return b"".join(len(text).to_bytes(8, "little") + text for text in tensor.string_data)
    return bytes(onnx.numpy_helper.from_array(np.ascontiguousarray(read_tensor(model, tensor)), "").raw_data)


@dataclass
class _Tally:
    """Running totals of the comparison of two tensors."""

    dtype: np.dtype[Any] | None
    elements: int = 0
    largest: float = 0.0
    place: int = 0
    differs: bool = False

    @classmethod
    def of(cls, tensor: onnx.TensorProto) -> _Tally:
        element = element_type(tensor)
        if element.bits == 0 or element.bits % 8:
            return cls(None)  # strings and packed types: elements have no bytes of their own
        return cls(np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)))

    def count(self, start: int, ours: bytes, theirs: bytes) -> None:
        self.differs = True
        if self.dtype is None:
            return
        width = self.dtype.itemsize
        bits = [np.frombuffer(each, np.uint8).reshape(-1, width) for each in (ours, theirs)]
        unequal = (bits[0] != bits[1]).any(-1)
        self.elements += int(unequal.sum())
        gap = _gap(*(np.frombuffer(each, self.dtype)[unequal] for each in (ours, theirs)))
        if gap is None or not gap.size:
            return
        # A NaN in only one of the weights counts as an infinite difference.
        top = int(np.argmax(np.where(np.isnan(gap), np.inf, gap)))
        far = float("inf") if np.isnan(gap[top]) else float(gap[top])
        if far >= self.largest:
            self.largest, self.place = far, start // width + int(np.flatnonzero(unequal)[top])

    def change(self, name: str, tensor: onnx.TensorProto, kinds: tuple[str, str], size: int) -> TensorChange:
        if self.dtype is None or self.dtype.kind == "c":
            return TensorChange(name, "changed", kinds, size)
        index = tuple(int(place) for place in np.unravel_index(self.place, tuple(tensor.dims)))
        return TensorChange(name, "changed", kinds, size, self.elements, self.largest, index)


def _gap(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.float64] | None:
    """|b - a| in float64; None for complex numbers."""
    if a.dtype.kind == "c":
        return None
    with np.errstate(all="ignore"):
        return np.abs(b.astype(np.float64) - a.astype(np.float64))
