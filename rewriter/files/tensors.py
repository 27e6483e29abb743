"""Count the elements and bytes that a TensorProto must hold, and check that it does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import onnx

from rewriter.errors import ModelError
from rewriter.text import quoted

MAX_BYTES = 2**63 - 1
MAX_RANK = 64  # of a NumPy array


def malformed(fault: str) -> ModelError:
    """An error that only a new export can fix."""
    return ModelError(f"{fault}; export the model again")


@dataclass(frozen=True)
class ElementType:
    """One ONNX element type: its width in bits, and the typed field that holds values that are not raw."""

    name: str
    bits: int  # in raw_data and external data, packed without padding
    field: str  # the typed field of TensorProto
    eighths: int = 8  # entries of that field per element, in eighths: 16 for complex, 4 for packed 4-bit


_PACKED = {"UINT2": 2, "INT2": 2, "UINT4": 4, "INT4": 4, "FLOAT4E2M1": 4, "FLOAT6E2M3": 6, "FLOAT6E3M2": 6}


def _element(name: str, kind: int) -> ElementType:
    whole = 0 if name == "STRING" else 8 * onnx.helper.tensor_dtype_to_np_dtype(kind).itemsize
    bits = _PACKED.get(name, whole)
    eighths = 16 if name.startswith("COMPLEX") else bits if bits in (2, 4) else 8
    return ElementType(name, bits, onnx.helper.tensor_dtype_to_field(kind), eighths)


ELEMENT_TYPES = {kind: _element(name, kind) for name, kind in onnx.TensorProto.DataType.items() if kind}
TYPED_FIELDS = tuple(sorted({element.field for element in ELEMENT_TYPES.values()}))


def element_type(tensor: onnx.TensorProto) -> ElementType:
    """The element type of a tensor. Raises ModelError if it is undefined or unknown."""
    found = ELEMENT_TYPES.get(tensor.data_type)
    if found is None:
        raise malformed(f"tensor {quoted(tensor.name)} has the unknown element type {tensor.data_type}")
    return found


def count_elements(dims: Iterable[int], name: str, bits: int = 8) -> int:
    """Multiply dims. Raises ModelError for negative ones, or more than 2**63 bytes (zeros ignored)."""
    count, nonzero = 1, 1
    for rank, dim in enumerate(dims, 1):
        count *= dim
        nonzero *= dim or 1
        if dim < 0:
            raise malformed(f"tensor {quoted(name)} has the negative dimension {dim}")
        if nonzero * max(bits, 8) > MAX_BYTES * 8 or rank > MAX_RANK:
            raise malformed(
                f"tensor {quoted(name)} has dimensions too large to exist (2**63 bytes or over {MAX_RANK} axes)"
            )
    return count


def byte_count(tensor: onnx.TensorProto) -> int:
    """The bytes of raw or external data that this tensor must have."""
    bits = element_type(tensor).bits
    return (count_elements(tensor.dims, tensor.name, bits) * bits + 7) // 8


def filled_fields(tensor: onnx.TensorProto) -> list[str]:
    """The fields of a tensor that hold values."""
    filled = [name for name in TYPED_FIELDS if len(getattr(tensor, name))]
    # Asking for the size of raw data would copy it; strings may have it, if it is empty.
    raw = tensor.HasField("raw_data") and (tensor.data_type != onnx.TensorProto.STRING or tensor.raw_data)
    return [*filled, "raw_data"] if raw else filled


def check_inline(tensor: onnx.TensorProto) -> None:
    """Raise ModelError unless a tensor holds its values inline, in one field, and as many as its dims require."""
    element, name = element_type(tensor), quoted(tensor.name)
    count = count_elements(tensor.dims, tensor.name, element.bits)
    if tensor.HasField("segment"):
        raise malformed(f"tensor {name} is stored in segments, which no runtime reads")
    filled, text = filled_fields(tensor), element.name == "STRING"
    if filled not in ([], [element.field], [] if text else ["raw_data"]):
        raise malformed(
            f"tensor {name} ({element.name}) holds values in {', '.join(filled)} where {element.field}"
            f"{'' if text else ' or raw_data'} belongs"
        )
    have, need = len(getattr(tensor, element.field)), (count * element.eighths + 7) // 8
    if "raw_data" in filled:
        have, need = len(tensor.raw_data), (count * element.bits + 7) // 8
    if have != need:
        unit = "bytes of raw data" if "raw_data" in filled else f"entries of {element.field}"
        raise ModelError(
            f"tensor {name} ({element.name}) holds {have} {unit} where its dimensions need {need}; "
            "the file is damaged: download or export it again"
        )
