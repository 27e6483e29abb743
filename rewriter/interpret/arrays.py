"""Write named arrays to a file, one at a time, so that no more than one is in memory.

The format follows from the suffix: `.safetensors`, which is a length, a JSON header and the bytes of the arrays, or
`.npz`. The file appears under its name only when it is complete.
"""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from rewriter.arrays import Array
from rewriter.errors import UsageError
from rewriter.files.atomic import atomically
from rewriter.text import quoted

SUFFIXES = (".safetensors", ".npz")

_NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64", "int32": "I32", "bool": "BOOL"}
METADATA = "__metadata__"
"""The key of what describes the arrays: JSON, in the header of safetensors or as an array of one string."""


def check_suffix(path: Path) -> None:
    """Refuse a path with another suffix. Raises UsageError."""
    if path.suffix not in SUFFIXES:
        raise UsageError(f"{quoted(path)} must end in {' or '.join(SUFFIXES)}, which says the format")


def write_arrays(
    path: Path,
    shapes: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]],
    array_of: Callable[[str], Array],
    described: Mapping[str, Any],
) -> None:
    """Write arrays whose shapes and types are known beforehand.

    Raises:
        UsageError: the file cannot be written, or has another suffix.
    """
    check_suffix(path)

    def write(file: BinaryIO) -> None:
        if path.suffix == ".npz":
            write_npz(file, ((name, array_of(name)) for name in shapes), described)
        else:
            _safetensors(file, shapes, array_of, described)

    atomically(path, write)


def write_npz(file: BinaryIO, arrays: Iterable[tuple[str, Array]], described: Mapping[str, Any]) -> None:
    """Write an npz archive array by array; numpy's own function takes all at once."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, array in arrays:
            _entry(archive, name, array)
        _entry(archive, METADATA, np.array(json.dumps(described)))


def _entry(archive: zipfile.ZipFile, name: str, array: Array) -> None:
    # A fixed time, so that the same arrays give the same bytes.
    info = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
    with archive.open(info, "w", force_zip64=True) as entry:
        np.lib.format.write_array(entry, np.asarray(array, order="C"), allow_pickle=False)


def _safetensors(
    file: BinaryIO,
    shapes: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]],
    array_of: Callable[[str], Array],
    described: Mapping[str, Any],
) -> None:
    header: dict[str, Any] = {METADATA: {"format": "np", "attnonly": json.dumps(described)}}
    start = 0
    for name, (shape, dtype) in shapes.items():
        end = start + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype.name], "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode("utf-8")
    text += b" " * (-len(text) % 8)  # the data is aligned to 8 bytes
    file.write(struct.pack("<Q", len(text)) + text)
    for name, (_, dtype) in shapes.items():
        array = np.ascontiguousarray(array_of(name), dtype=dtype.newbyteorder("<"))
        file.write(array.reshape(-1).view(np.uint8).data if array.size else b"")
