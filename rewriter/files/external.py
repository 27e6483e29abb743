"""External data: which bytes of which file a tensor may read.

The rules are deliberately stricter than those of onnx and onnxruntime (CVE-2022-25882, CVE-2024-27318, CVE-2025-51480
and related ones):

- A location is a relative path of plain names separated by `/`; a leading `./` is dropped.
- No part of it below the model's directory is a symbolic link, and the file is regular with one hard link.
- The keys are location, offset, length and checksum, each at most once. The checksum is not verified, since that would
  read every byte. `basepath` is refused because onnxruntime does not load a model that has it.
- Offset and length are decimal numbers below 2**63, and the range lies inside the file; the length is what dims and
  element type require. A missing offset is 0, a missing length extends to the end of the file.

Every part of the path is opened relative to its parent without following links, so a link that is swapped in between
check and open is refused as well.

Where a user allows links, they are those of a Hugging Face cache, which has one directory per model: files in
`snapshots/REVISION/` are links to `../../blobs/HASH`. The locations of a model's external data are rewritten as paths
below that directory, without a link: `blobs/HASH`. From then on the rules above hold as ever. So a link only ever says
which of the blobs is meant; whatever it is changed to, nothing outside of `blobs` is opened through it.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx

from rewriter.errors import ModelError
from rewriter.files.tensors import MAX_BYTES, TYPED_FIELDS, byte_count, element_type
from rewriter.files.walk import is_external, iter_tensors
from rewriter.text import quoted

KEYS = frozenset({"location", "offset", "length", "checksum"})
_READ = 64 * 2**20
_BLOBS, _SNAPSHOTS = "blobs", "snapshots"
_LINK_ADVICE = (
    "copy the model with its data (`cp -rL DIRECTORY COPY`), or pass --allow-links (allow_links=True) for a model in "
    "a Hugging Face cache, which stores links"
)


@dataclass(frozen=True)
class ExternalRef:
    """A checked reference: `length` bytes at `offset` of the regular file `path`."""

    tensor: str
    location: str
    path: Path
    offset: int
    length: int


def resolve(tensor: onnx.TensorProto, base_dir: str | os.PathLike[str]) -> ExternalRef:
    """Check the external reference of a tensor without reading data. Raises ModelError for any broken rule."""
    with _opened(tensor, base_dir) as (_, ref):
        return ref


def read_external(tensor: onnx.TensorProto, base_dir: str | os.PathLike[str]) -> npt.NDArray[np.uint8]:
    """Read the bytes of an external tensor, after checking it again. Raises ModelError."""
    with _opened(tensor, base_dir) as (handle, ref):
        data = np.empty(ref.length, np.uint8)
        done = 0
        while done < ref.length:
            try:
                got = os.preadv(handle, [data[done : done + _READ].data], ref.offset + done)
            except OSError as error:
                raise ModelError(
                    f"cannot read {quoted(ref.path)} for tensor {quoted(ref.tensor)}: {error.strerror}; check the disk"
                ) from error
            if not got:
                # A file that shrinks would otherwise leave uninitialised memory at the end of the array.
                raise ModelError(f"{quoted(ref.path)} shrank while it was read; run again when nothing writes to it")
            done += got
        return data


def open_inside(base_dir: Path, location: str, tensor: str) -> int:
    """Open the data file `location` below `base_dir` and return its file descriptor. Raises ModelError."""
    parts = location_parts(location, tensor)
    try:
        handle = os.open(base_dir, os.O_RDONLY | os.O_DIRECTORY)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"cannot open the model's directory {quoted(base_dir)}: {_reason(error)}; check its path and mode"
        ) from error
    for index, part in enumerate(parts):
        parent, last = handle, index == len(parts) - 1
        try:
            # stat before open: opening a device can have side effects, and opening a FIFO would block.
            _check_kind(os.stat(part, dir_fd=parent, follow_symlinks=False), location, tensor, last=last)
            flags = os.O_NONBLOCK if last else os.O_DIRECTORY
            handle = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | flags, dir_fd=parent)
        except (OSError, ValueError) as error:
            raise ModelError(
                f"cannot open external data {quoted(location)} of tensor {quoted(tensor)}: {_reason(error)}; "
                "put the data file beside the model, where it was saved"
            ) from error
        finally:
            os.close(parent)
    try:
        # Checked again on the open file, which may not be the one that stat saw.
        _check_kind(os.fstat(handle), location, tensor, last=True)
    except ModelError:
        os.close(handle)
        raise
    return handle


@contextmanager
def _opened(tensor: onnx.TensorProto, base_dir: str | os.PathLike[str]) -> Iterator[tuple[int, ExternalRef]]:
    base, name = Path(base_dir).absolute(), quoted(tensor.name)
    if element_type(tensor).name == "STRING":
        raise ModelError(f"string tensor {name} cannot have external data; export the model again")
    inline = any(len(getattr(tensor, field)) for field in TYPED_FIELDS)
    if inline or tensor.HasField("raw_data") or tensor.HasField("segment"):
        raise ModelError(f"tensor {name} has both inline and external data; export the model again")
    entries = _entries(tensor)
    location = entries["location"]
    need = byte_count(tensor)
    offset = _number(entries.get("offset", "0"), "offset", tensor.name)
    handle = open_inside(base, location, tensor.name)
    try:
        size = os.fstat(handle).st_size
        rest = str(max(size - offset, 0))
        length = _number(entries.get("length", rest), "length", tensor.name)
        if offset + length > size:
            raise ModelError(
                f"tensor {name} reads bytes {offset} to {offset + length} of {quoted(location)}, which has "
                f"{size}; the data file is incomplete: download or export it again"
            )
        if length != need:
            raise ModelError(
                f"tensor {name} has {length} bytes of external data where its dimensions need {need}; "
                "model and data file do not belong together: export the model again"
            )
        yield handle, ExternalRef(tensor.name, location, base.joinpath(*location_parts(location, "")), offset, length)
    finally:
        os.close(handle)


def _entries(tensor: onnx.TensorProto) -> dict[str, str]:
    entries: dict[str, str] = {}
    name = quoted(tensor.name)
    for entry in tensor.external_data:
        if entry.key in entries:
            raise ModelError(f"tensor {name} has the external data key {quoted(entry.key)} twice; export it again")
        if entry.key not in KEYS:
            raise ModelError(
                f"tensor {name} has the external data key {quoted(entry.key)}, which onnxruntime does not "
                "load; save the model again with onnx.save(..., save_as_external_data=True)"
            )
        entries[entry.key] = entry.value
    if "location" not in entries:
        raise ModelError(f"tensor {name} has external data without a location; export the model again")
    return entries


def location_parts(location: str, tensor: str) -> list[str]:
    """The names on the way to a data file. Raises ModelError where it could leave the model's directory."""
    parts: list[str] = []
    # protobuf returns bytes for a string that is not valid UTF-8.
    fault = "is empty" if not location else None if isinstance(location, str) else "is not UTF-8"
    if fault is None:
        parts = location.removeprefix("./").split("/")
        faults = (
            ("\0" in location, "contains a NUL"),
            ("\\" in location, "contains a backslash"),
            (location.startswith("/"), "is absolute"),
            (re.match(r"[A-Za-z]:", location) is not None, "names a drive"),
            (".." in parts, "leaves its directory with '..'"),
            (bool({"", "."} & set(parts)), "is not a plain path to a file"),
        )
        fault = next((text for broken, text in faults if broken), None)
    if fault:
        raise ModelError(
            f"external data location {quoted(location)} of tensor {quoted(tensor)} {fault}; "
            "it must be a relative path below the model's directory: save the model again"
        )
    return parts


def _check_kind(status: os.stat_result, location: str, tensor: str, *, last: bool) -> None:
    what = f"external data {quoted(location)} of tensor {quoted(tensor)}"
    if stat.S_ISLNK(status.st_mode):
        raise ModelError(f"{what} {'is' if last else 'lies behind'} a symbolic link; {_LINK_ADVICE}")
    if last and not stat.S_ISREG(status.st_mode):
        kind = "a directory" if stat.S_ISDIR(status.st_mode) else "a FIFO, socket or device"
        raise ModelError(f"{what} is {kind}, not a regular file; export the model again")
    if not last and not stat.S_ISDIR(status.st_mode):
        raise ModelError(f"{what} lies below something that is not a directory; export the model again")
    if last and status.st_nlink > 1:
        # It may be a file that the author of the model could not read, linked into the directory from elsewhere.
        raise ModelError(
            f"{what} has {status.st_nlink} hard links, so it may be someone else's file; "
            "copy the model and its data to a new directory (`cp -r`, without -l) and use the copy"
        )


def _number(text: str, key: str, tensor: str) -> int:
    # int() alone accepts '+1', ' 1', '1_0' and Arabic digits, which onnxruntime parses differently.
    if not isinstance(text, str) or not re.fullmatch(r"[0-9]{1,19}", text, re.ASCII) or int(text) > MAX_BYTES:
        raise ModelError(
            f"tensor {quoted(tensor)} has the external data {key} {quoted(text)}, which is not a whole "
            "number from 0 to 2**63 - 1; export the model again"
        )
    return int(text)


def _reason(error: OSError | ValueError) -> str:
    return (isinstance(error, OSError) and error.strerror) or "its name cannot be used here"


def without_links(proto: onnx.ModelProto, folder: Path) -> Path:
    """Let the external data of `proto` name the files that its links point to.

    Args:
        proto: a model that was read from `folder`; changed in place if one of its data files is a link.
        folder: the directory of the model.

    Returns:
        The directory in which external data is resolved from now on: `folder` if no data file is a link, else that
        of the cache.

    Raises:
        ModelError: a link is not one of a Hugging Face cache, or does not lead into its `blobs`.
    """
    tensors = [tensor for tensor in iter_tensors(proto) if is_external(tensor)]
    entries = [entry for tensor in tensors for entry in tensor.external_data if entry.key == "location"]
    parts = {entry.value: location_parts(entry.value, "") for entry in entries}
    links = [location for location, each in parts.items() if os.path.islink(folder.joinpath(*each))]  # noqa: PTH114 - no error
    if not links:
        return folder
    here = folder.resolve()
    cache = next((parent.parent for parent in here.parents if parent.name == _SNAPSHOTS), None)
    if cache is None or not (cache / _BLOBS).is_dir() or (cache / _BLOBS).is_symlink():
        raise ModelError(
            f"external data {quoted(links[0])} is a link, and the model is not in a Hugging Face cache: "
            "--allow-links follows links from snapshots/REVISION into blobs only; copy the model with `cp -rL`"
        )
    inside = here.relative_to(cache)
    for entry in entries:
        plain, location = inside.joinpath(*parts[entry.value]), entry.value
        entry.value = (
            _blob(plain, folder.joinpath(*parts[location]), location) if location in links else plain.as_posix()
        )
    return cache


def _blob(plain: Path, link: Path, location: str) -> str:
    """The blob that a link points to, which is at `plain` relative to the cache directory. Raises ModelError."""
    try:
        target = os.readlink(link)  # noqa: PTH115 - the text, not a path
    except OSError as error:
        raise ModelError(f"external data {quoted(location)} cannot be read: {error.strerror}; run again") from error
    # By its text alone: parts of the way that are links themselves lead elsewhere, and are never opened.
    found = os.path.normpath(plain.parent / target)
    if Path(target).is_absolute() or Path(found).parent.as_posix() != _BLOBS or "\0" in target:
        raise ModelError(
            f"external data {quoted(location)} is a link to {quoted(target)}, which is not in {_BLOBS} of its own "
            "cache directory; download the model again, or copy it with `cp -rL`"
        )
    return Path(found).as_posix()
