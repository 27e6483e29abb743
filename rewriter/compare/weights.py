"""Weights, compared bit for bit: read when a verdict depends on their data, one or two at a time.

Two references to the same bytes of the same file are equal without being read. Values in typed fields (`float_data`
and the like) count as the same as raw data.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from numpy.typing import NDArray

from rewriter.files.external import resolve
from rewriter.files.load import LoadedModel, read_tensor
from rewriter.files.tensors import ELEMENT_TYPES, byte_count, element_type
from rewriter.files.walk import is_external

Status = Literal["changed", "only in A", "only in B"]


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


@dataclass(frozen=True, eq=False)
class Weight:
    """A tensor of a model.

    Attributes:
        model: the model.
        tensor: the tensor.
    """

    model: LoadedModel
    tensor: onnx.TensorProto

    @cached_property
    def kind(self) -> str:
        """Element type and dims, such as `float32[768, 3072]`."""
        return kind_of(self.tensor)

    @cached_property
    def place(self) -> tuple[int, int, int] | None:
        """Device, inode and offset of external data; None for data in memory. Raises ModelError."""
        if not is_external(self.tensor):
            return None
        ref = resolve(self.tensor, self.model.base_dir or Path())
        status = ref.path.stat()
        return status.st_dev, status.st_ino, ref.offset

    @cached_property
    def digest(self) -> bytes:
        """A digest of type, dims and all of the data. Raises ModelError."""
        found = hashlib.blake2b(self.kind.encode(), digest_size=16)
        found.update(self.data().data)
        return found.digest()

    def data(self) -> NDArray[np.uint8]:
        """The bytes of the data. Raises ModelError: they cannot be read, or do not match the dims."""
        if self.tensor.data_type == onnx.TensorProto.STRING:
            # Each string is preceded by its length.
            packed = b"".join(len(text).to_bytes(8, "little") + text for text in self.tensor.string_data)
            return np.frombuffer(packed, np.uint8)
        return np.ascontiguousarray(read_tensor(self.model, self.tensor)).reshape(-1).view(np.uint8)

    def same(self, other: Weight) -> bool:
        """Whether both are equal bit for bit. Raises ModelError."""
        if self.kind != other.kind:
            return False
        return (self.place is not None and self.place == other.place) or self.digest == other.digest


def kind_of(tensor: onnx.TensorProto) -> str:
    """Element type and dims, such as `float32[768, 3072]`."""
    known = ELEMENT_TYPES.get(tensor.data_type)
    name = "?" if known is None else known.name.lower()
    return f"{'float32' if name == 'float' else name}[{', '.join(map(str, tensor.dims))}]"


def only(name: str, weight: Weight, status: Status) -> TensorChange:
    """The change for a weight that only one model has."""
    kinds = (weight.kind, "") if status == "only in A" else ("", weight.kind)
    return TensorChange(name, status, kinds, byte_count(weight.tensor))


def compared(name: str, a: Weight, b: Weight) -> TensorChange | None:
    """Compare two weights bit for bit; the result calls them `name` and is None if they are equal.

    Raises:
        ModelError: data cannot be read, or does not match the dims.
    """
    kinds = a.kind, b.kind
    if a.kind == b.kind and a.place is not None and a.place == b.place:
        return None
    left = a.data()
    if a.kind != b.kind:
        return TensorChange(name, "changed", kinds, left.size)
    right = b.data()
    if np.array_equal(left, right):
        return None
    element = element_type(a.tensor)
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(a.tensor.data_type)) if element.bits else np.dtype(object)
    if element.bits % 8 or dtype.kind in "cO":
        return TensorChange(name, "changed", kinds, byte_count(a.tensor) or left.size)
    unequal = np.flatnonzero((left.reshape(-1, dtype.itemsize) != right.reshape(-1, dtype.itemsize)).any(-1))
    far = _gap(left.view(dtype)[unequal], right.view(dtype)[unequal])
    top = int(np.argmax(far))
    index = tuple(int(place) for place in np.unravel_index(unequal[top], tuple(a.tensor.dims)))
    return TensorChange(name, "changed", kinds, left.size, unequal.size, float(far[top]), index)


def _gap(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.float64]:
    """|b - a| in float64; a NaN in one of them counts as an infinite difference, one in both as well."""
    with np.errstate(all="ignore"):
        far = np.abs(b.astype(np.float64) - a.astype(np.float64))
    return np.where(np.isnan(far), np.inf, far)
