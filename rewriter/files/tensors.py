"""The values of a tensor: how many elements and bytes it must hold, inline or in another file, and which it may read.

The rules for external data are stricter than those of onnx and onnxruntime (CVE-2022-25882, CVE-2024-27318,
CVE-2025-51480):

- A location is a relative path of plain names separated by `/`; a leading `./` is dropped.
- No part of it below the model's directory is a symbolic link: each is opened relative to its parent, without following
  links, so that none can be swapped in. The file is regular with one hard link.
- The keys are location, offset, length and checksum (not verified), each at most once, and not `basepath`.
- Offset (default 0) and length (default: the rest of the file) are decimal numbers below 2**63, and the range lies
  inside the file; the length is what dims and element type require.
- Links are read in a Hugging Face cache alone, from `snapshots/REVISION/` to `../../blobs/HASH` (`through_cache`).
"""

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from io import BufferedReader
from itertools import chain
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from rewriter.errors import ModelError
from rewriter.graph.walk import is_external, iter_tensors
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
    bits = _PACKED.get(name, 0 if name == "STRING" else 8 * onnx.helper.tensor_dtype_to_np_dtype(kind).itemsize)
    eighths = 16 if name.startswith("COMPLEX") else bits if bits in (2, 4) else 8
    return ElementType(name, bits, onnx.helper.tensor_dtype_to_field(kind), eighths)


ELEMENT_TYPES = {kind: _element(name, kind) for name, kind in onnx.TensorProto.DataType.items() if kind}
TYPED_FIELDS = tuple(sorted({element.field for element in ELEMENT_TYPES.values()}))


def element_type(tensor: onnx.TensorProto) -> ElementType:
    """The element type of a tensor. Raises ModelError if it is undefined or unknown."""
    if (found := ELEMENT_TYPES.get(tensor.data_type)) is None:
        raise malformed(f"tensor {quoted(tensor.name)} has the unknown element type {tensor.data_type}")
    return found


def count_elements(dims: Sequence[int], name: str, bits: int = 8) -> int:
    """Multiply dims. Raises ModelError for negative ones, or more than 2**63 bytes (zeros ignored)."""
    if negative := [dim for dim in dims if dim < 0]:
        raise malformed(f"tensor {quoted(name)} has the negative dimension {negative[0]}")
    if len(dims) > MAX_RANK or prod(dim or 1 for dim in dims) * max(bits, 8) > MAX_BYTES * 8:
        limits = f"2**63 bytes or over {MAX_RANK} axes"
        raise malformed(f"tensor {quoted(name)} has dimensions too large to exist ({limits})")
    return prod(dims)


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
        wanted = element.field if text else f"{element.field} or raw_data"
        raise malformed(f"tensor {name} ({element.name}) holds values in {', '.join(filled)} where {wanted} belongs")
    field, unit, eighths = element.field, f"entries of {element.field}", element.eighths
    if "raw_data" in filled:
        field, unit, eighths = "raw_data", "bytes of raw data", element.bits
    have, need = len(getattr(tensor, field)), (count * eighths + 7) // 8
    if have != need:
        fault = f"tensor {name} ({element.name}) holds {have} {unit} where its dimensions need {need}"
        raise ModelError(f"{fault}; the file is damaged: download or export it again")


# -- external data -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExternalRef:
    """A checked reference: `length` bytes at `offset` of the regular file `path`, which has no other name."""

    tensor: str
    location: str
    path: Path
    offset: int
    length: int


def collect_external(proto: onnx.ModelProto, base_dir: Path | None) -> tuple[ExternalRef, ...]:
    """Check all external references of a model without reading data. Raises ModelError for any broken rule."""
    found = list[ExternalRef]()
    for tensor in filter(is_external, iter_tensors(proto)):
        if base_dir is None:
            fault = f"tensor {quoted(tensor.name)} has external data and the model was given in memory"
            raise ModelError(f"{fault}, without a directory; pass the path of the model instead")
        with _opened(tensor, base_dir) as (_, ref):
            found.append(ref)
    return tuple(found)


def read_external(tensor: onnx.TensorProto, base_dir: Path, *, mapped: bool = False) -> npt.NDArray[np.uint8]:
    """The bytes of an external tensor, checked again; if `mapped`, read-only in their file. Raises ModelError."""
    with _opened(tensor, base_dir) as (file, ref):
        if mapped and ref.length:
            with suppress(OSError):  # of file systems that cannot map
                return np.asarray(np.memmap(file, np.uint8, "r", ref.offset, ref.length))
        data = np.empty(ref.length, np.uint8)
        try:
            file.seek(ref.offset)
            complete = file.readinto(data.data) == ref.length
        except OSError as error:
            what = f"{quoted(ref.path)} for tensor {quoted(ref.tensor)}"
            raise ModelError(f"cannot read {what}: {error.strerror}; check the disk") from error
        if not complete:
            # A file that shrinks would otherwise leave uninitialised memory at the end of the array.
            raise ModelError(f"{quoted(ref.path)} shrank while it was read; run again when nothing writes to it")
        return data


def open_inside(base_dir: Path, location: str, tensor: str) -> BufferedReader:
    """A data file below `base_dir`, open. Raises ModelError."""
    what, parent = f"external data {quoted(location)} of tensor {quoted(tensor)}", None
    for part in (str(base_dir), *_parts(location, tensor)):
        # Non-blocking, because opening a FIFO would wait for a writer.
        flags = os.O_DIRECTORY if parent is None else os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            handle = os.open(part, os.O_RDONLY | flags, dir_fd=parent)
        except (OSError, ValueError) as error:
            reason = (isinstance(error, OSError) and error.strerror) or "its name cannot be used here"
            fault = f"cannot open {what}: {reason}; put the data file beside the model, where it was saved"
            if parent is None:
                fault = f"cannot open the model's directory {quoted(base_dir)}: {reason}; check its path and mode"
            elif isinstance(error, OSError) and error.errno == errno.ELOOP:
                copy = "copy the model with its data (`cp -rL DIRECTORY COPY`)"
                fault = f"{what} is or lies behind a symbolic link; {copy}"
            raise ModelError(fault) from error
        finally:
            if parent is not None:
                os.close(parent)
        parent = handle
    status = os.fstat(handle)
    if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
        return os.fdopen(handle, "rb")
    os.close(handle)
    if not stat.S_ISREG(status.st_mode):
        raise malformed(f"{what} is not a regular file")
    # It may be a file that the author of the model could not read, linked into the directory from elsewhere.
    fault = f"{what} has {status.st_nlink} hard links, so it may be someone else's file"
    raise ModelError(f"{fault}; copy the model and its data to a new directory (`cp -r`, without -l) and use the copy")


@contextmanager
def _opened(tensor: onnx.TensorProto, base_dir: Path) -> Iterator[tuple[BufferedReader, ExternalRef]]:
    base, name = base_dir.absolute(), quoted(tensor.name)
    if element_type(tensor).name == "STRING":
        raise malformed(f"string tensor {name} cannot have external data")
    if filled_fields(tensor) or tensor.HasField("segment"):
        raise malformed(f"tensor {name} has both inline and external data")
    entries = {entry.key: entry.value for entry in tensor.external_data}
    odd = entries.keys() - {"location", "offset", "length", "checksum"}
    if "location" not in entries or len(entries) < len(tensor.external_data) or odd:
        keys = ", ".join(quoted(entry.key) for entry in tensor.external_data)
        known = "onnxruntime loads location, offset, length and checksum, each once"
        advice = "save the model again with onnx.save(..., save_as_external_data=True)"
        raise ModelError(f"tensor {name} has the external data keys {keys}; {known}: {advice}")
    location, need = entries["location"], byte_count(tensor)
    offset = _number(entries.get("offset", "0"), "offset", tensor.name)
    with open_inside(base, location, tensor.name) as file:
        size = os.fstat(file.fileno()).st_size
        length = _number(entries.get("length", str(max(size - offset, 0))), "length", tensor.name)
        if offset + length > size:
            fault = f"reads bytes {offset} to {offset + length} of {quoted(location)}, which has {size}"
            raise ModelError(f"tensor {name} {fault}; the data file is incomplete: download or export it again")
        if length != need:
            fault = f"tensor {name} has {length} bytes of external data where its dimensions need {need}"
            raise ModelError(f"{fault}; model and data file do not belong together: export the model again")
        yield file, ExternalRef(tensor.name, location, base.joinpath(*_parts(location, "")), offset, length)


def _parts(location: str, tensor: str) -> list[str]:
    """The path components of a data file. Raises ModelError if they could leave the model's directory."""
    # protobuf returns bytes for a string that is not valid UTF-8.
    parts = location.removeprefix("./").split("/") if isinstance(location, str) else [""]
    if {"", ".", ".."} & {*parts} or re.search(r"[\0\\]|^[A-Za-z]:", location):
        what = f"external data location {quoted(location)} of tensor {quoted(tensor)}"
        wanted = "a plain relative path below the model's directory (without '..', backslashes and drives)"
        raise ModelError(f"{what} is not {wanted}; save the model again")
    return parts


def _number(text: str, key: str, tensor: str) -> int:
    # int() alone accepts '+1', ' 1', '1_0' and Arabic digits, which onnxruntime parses differently.
    if not isinstance(text, str) or not re.fullmatch(r"[0-9]{1,19}", text, re.ASCII) or int(text) > MAX_BYTES:
        what = f"tensor {quoted(tensor)} has the external data {key} {quoted(text)}"
        raise malformed(f"{what}, which is not a whole number from 0 to 2**63 - 1")
    return int(text)


def through_cache(proto: onnx.ModelProto, folder: Path) -> Path:
    """Replace links in a cache by the blobs behind them: the directory of external data, else `folder`."""
    tensors = [tensor for tensor in iter_tensors(proto) if is_external(tensor)]
    entries = [entry for tensor in tensors for entry in tensor.external_data if entry.key == "location"]
    here = folder.resolve()
    cache = next((parent.parent for parent in here.parents if parent.name == "snapshots"), None)
    paths = {entry.value: here.joinpath(*_parts(entry.value, "")) for entry in entries}
    links = {location: path for location, path in paths.items() if os.path.islink(path)}  # noqa: PTH114 - no error
    if not links or cache is None or (cache / "blobs").is_symlink():
        return folder
    for location, link in links.items():
        # By its text alone: components of the path that are links themselves lead elsewhere, and are never opened.
        target = Path(os.path.normpath(link.parent / os.readlink(link)))  # noqa: PTH115 - the text, not a path
        if Path(os.readlink(link)).is_absolute() or target.parent != cache / "blobs":  # noqa: PTH115
            return folder  # as for any other link, `open_inside` says what to do
        paths[location] = target
    for entry in entries:
        entry.value = paths[entry.value].relative_to(cache).as_posix()
    return cache


# -- weights that stay in the model file, to which the model then refers for external data -----------------------------

# Passes, copies and sessions of such a model cost little memory. Only large initializers of the main graph stay.

MIN_MAPPED_BYTES = 2**16  # no pass reads the values of constants this large
_GRAPH, _INITIALIZER, _RAW = 7, 5, 9  # field numbers of graph, initializer, raw_data
# Fields beside raw data; onnx writes data_location, as the default, after it has loaded external data.
_BESIDE = {"dims", "data_type", "name", "doc_string", "metadata_props", "data_location"}
_VARINT, _BYTES = 0, 2  # wire types of protobuf; no message here has fields of another one, unless they are packed


def without_weights(data: bytes, location: str) -> bytes | None:
    """The model with references to the file `location` instead of large weights; None if it has none or is unusual."""
    try:
        small = _shrunk(memoryview(data), 0, len(data), location, (_GRAPH, _INITIALIZER))
    except DecodeError:  # which protobuf reports when it reads the whole
        return None
    return small if len(small) < len(data) else None


def inlined(
    model: onnx.ModelProto, lengths: Mapping[str, int], read: Callable[[onnx.TensorProto], bytes | memoryview]
) -> tuple[int, Iterator[bytes | memoryview]]:
    """The size and the pieces of a model with initializers of these lengths inline, each read when it is due."""
    if not lengths:
        whole = model.SerializeToString(deterministic=True)
        return len(whole), iter([whole])
    rest, graph = deepcopy(model), deepcopy(model.graph)
    rest.ClearField("graph")
    graph.ClearField("initializer")
    head, bare = (each.SerializeToString(deterministic=True) for each in (rest, graph))
    inside, pieces = len(bare), list[bytes | onnx.TensorProto]()  # a tensor marks where its bytes go
    for tensor in model.graph.initializer:
        length, inline = lengths.get(tensor.name), tensor
        if length is not None:
            inline = deepcopy(tensor)
            inline.ClearField("external_data")
            inline.ClearField("data_location")
        data = inline.SerializeToString(deterministic=True) + (b"" if length is None else _tag(_RAW, length))
        start = _tag(_INITIALIZER, len(data) + (length or 0)) + data
        pieces += [start] if length is None else [start, tensor]
        inside += len(start) + (length or 0)
    head += _tag(_GRAPH, inside)
    written = (each if isinstance(each, bytes) else read(each) for each in pieces)
    return len(head) + inside, chain([head + bare], written)


def _shrunk(data: memoryview, first: int, last: int, location: str, way: tuple[int, ...]) -> bytes:
    """A message without its weights, which are behind the fields `way`."""
    pieces: list[bytes | memoryview] = []
    for number, begin, start, end in _fields(data, first, last, way[0]):
        small = None
        if number == way[0] and end - start >= MIN_MAPPED_BYTES:
            small = _shrunk(data, start, end, location, way[1:]) if way[1:] else _tensor(data, start, end, location)
        pieces += [data[begin:end]] if small is None else [_tag(number, len(small)), small]
    return b"".join(pieces)


def _tensor(data: memoryview, first: int, last: int, location: str) -> bytes | None:
    """The tensor with a reference to its raw data; None without raw data, or with unusual fields."""
    fields = list(_fields(data, first, last, _RAW))
    raw = [(start, end) for number, _, start, end in fields if number == _RAW]
    if len(raw) != 1 or raw[0][1] - raw[0][0] < MIN_MAPPED_BYTES:
        return None
    made = onnx.TensorProto.FromString(b"".join(data[begin:end] for number, begin, _, end in fields if number != _RAW))
    if is_external(made) or not {field.name for field, _ in made.ListFields()} <= _BESIDE:
        return None
    made.data_location = onnx.TensorProto.EXTERNAL
    ((start, end),) = raw
    for key, value in {"location": location, "offset": str(start), "length": str(end - start)}.items():
        made.external_data.add(key=key, value=value)
    return bytes(made.SerializeToString(deterministic=True))


def _fields(data: memoryview, start: int, last: int, message: int) -> Iterator[tuple[int, int, int, int]]:
    """(number, start, start and end of contents) of the fields of a message. Raises DecodeError."""
    begin = start
    while begin < last:
        tag, start = _varint(data, begin, last)
        number, wire = tag >> 3, tag & 7
        value, end = _varint(data, start, last)  # the contents, or their length
        if wire == _BYTES:
            start, end = end, end + value
        if wire not in (_VARINT, _BYTES) or end > last or (number == message and wire != _BYTES):
            raise DecodeError
        yield number, begin, start, end
        begin = end


def _varint(data: memoryview, start: int, last: int) -> tuple[int, int]:
    """A number and its end. Raises DecodeError."""
    value = 0
    for place in range(start, min(start + 10, last)):
        value |= (data[place] & 127) << 7 * (place - start)
        if data[place] < 128:
            return value, place + 1
    raise DecodeError


def _tag(number: int, length: int) -> bytes:
    made = bytearray([number << 3 | _BYTES])
    while length > 127:
        made.append(length & 127 | 128)
        length >>= 7
    return bytes([*made, length])
