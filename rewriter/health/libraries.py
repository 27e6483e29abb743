"""Which shared libraries onnxruntime's CUDA provider is linked to, read from the file, and whether they load."""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

DRIVER = "libcuda.so.1"
"""Comes with the NVIDIA driver; the others come with CUDA, from pip as well."""

_CUDA = ("libcu", "libnv")
_DYNAMIC, _NEEDED = 6, 1


def cuda_libraries(package: Path) -> dict[str, bool]:
    """The CUDA libraries that the provider in onnxruntime's folder needs, and whether each loads; empty without it."""
    provider = package / "capi" / "libonnxruntime_providers_cuda.so"
    if not provider.exists():
        return {}
    wanted = [name for name in needed(provider) if name.startswith(_CUDA)]
    return {name: _loads(name) for name in dict.fromkeys((DRIVER, *wanted))}


def needed(path: Path) -> tuple[str, ...]:
    """The names of the libraries that a 64-bit ELF file is linked to; none of another kind of file."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return tuple(_needed(data)) if data[:6] == b"\x7fELF\x02\x01" else ()
        except (struct.error, IndexError, OverflowError, UnicodeDecodeError):  # cut off, or not what it says
            return ()


def _needed(data: mmap.mmap) -> Iterator[str]:
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    for number in range(count):
        header = table + number * size
        (kind,) = struct.unpack_from("<I", data, header + 4)
        if kind != _DYNAMIC:
            continue
        start, length = struct.unpack_from("<QQ", data, header + 24)
        (link,) = struct.unpack_from("<I", data, header + 40)
        (strings,) = struct.unpack_from("<Q", data, table + link * size + 24)
        for entry in range(start, start + length, 16):
            tag, value = struct.unpack_from("<qQ", data, entry)
            if tag == _NEEDED:
                place = strings + value
                yield data[place : data.find(b"\0", place)].decode("ascii")


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True
