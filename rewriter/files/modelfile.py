"""Read a model file, and name the likeliest cause where it is not a model."""

from __future__ import annotations

import difflib
import os
import stat
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError, EncodeError  # type: ignore[import-untyped]

from rewriter.errors import ModelError
from rewriter.files.mapped import without_weights
from rewriter.text import quoted

MAX_FILE = 2**31 - 1
"""Protobuf cannot read a message of 2 GiB or more."""

TOO_LARGE = (
    "the model holds 2 GiB or more inline, which protobuf cannot write; save it with external data "
    "(onnx.save(..., save_as_external_data=True)) and rewrite that"
)

# Signatures of files that people pass by mistake: (offset, bytes, what it is and what to do).
_FOREIGN = (
    (0, b"version https://git-lfs", "a Git LFS pointer, not the model; run `git lfs pull` in its repository"),
    (0, b"PK\x03\x04", "a zip archive (or a PyTorch checkpoint); extract or export the .onnx model from it"),
    (0, b"\x1f\x8b", "gzip-compressed; decompress it first"),
    (4, b"ORTM", "in the ORT format, which cannot be rewritten; pass the .onnx model it was made from"),
    (4, b"TFL3", "a TensorFlow Lite model; convert it to ONNX first"),
    (0, b"\x89HDF", "an HDF5 file; export the model to ONNX first"),
)


def read_model(path: Path, *, mapped: bool = False) -> tuple[onnx.ModelProto, int]:
    """Read and parse a model file.

    Args:
        path: the file.
        mapped: leave its large weights in the file, as external data of that file (`rewriter.files.mapped`).

    Returns:
        The model, which has a graph, and the size of the file in bytes.

    Raises:
        ModelError: the file cannot be read; the message says why and what to do.
    """
    data = _read(path)
    return parse_model(data, quoted(path), (without_weights(data, path.name) if mapped else None) or data), len(data)


def parse_model(data: bytes, what: str, content: bytes = b"") -> onnx.ModelProto:
    """Parse the bytes of a model file, or `content` in their place; `what` is how messages call the model.

    Raises:
        ModelError: the bytes are no model; the message says what they look like.
    """
    try:
        proto: onnx.ModelProto = onnx.ModelProto.FromString(content or data)
    except DecodeError as error:
        reason = "its subgraphs nest too deep" if "MaxDepth" in str(error) else "truncated or damaged"
        raise ModelError(f"{what} is {_foreign(data) or _damaged(reason)}") from error
    # Some text parses as an empty protobuf message by accident.
    if not proto.HasField("graph"):
        raise ModelError(f"{what} is {_foreign(data) or _damaged('it has no graph')}")
    return proto


def byte_size(proto: onnx.ModelProto) -> int:
    """Return the size of a model as a file in bytes. Raises ModelError where protobuf cannot write it."""
    try:
        return int(proto.ByteSize())
    except (EncodeError, ValueError) as error:
        raise ModelError(TOO_LARGE) from error


def _read(path: Path) -> bytes:
    try:
        # stat before open: opening a device can have side effects. Non-blocking, because opening a FIFO that was
        # swapped in meanwhile would wait for a writer.
        _check_regular(path.stat(), path)
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with open(handle, "rb") as file:  # noqa: PTH123 - a descriptor, not a path
            status = os.fstat(handle)
            _check_regular(status, path)
            data = file.read(status.st_size + 1)  # one byte more, to notice a file that grows
    except FileNotFoundError as error:
        raise ModelError(f"{quoted(path)} does not exist; {_instead(path)}") from error
    except PermissionError as error:
        raise ModelError(f"{quoted(path)} may not be read: permission denied; change its mode or copy it") from error
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or "the name cannot be used"
        raise ModelError(f"{quoted(path)} cannot be read: {reason}; check the path and the disk") from error
    if len(data) != status.st_size:
        raise ModelError(f"{quoted(path)} changed while it was read; run again when nothing writes to it")
    return data


def _instead(path: Path) -> str:
    """What was meant by the path of a file that does not exist."""
    if path.name == "-":
        return "only `rewrite` and `rewrite inspect` read standard input: give the path of a file"
    try:
        names = [each.name for each in path.parent.iterdir() if each.suffix == ".onnx"]
    except OSError:
        names = []
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.8)
    return f"did you mean {quoted(path.parent / near[0])}?" if near else "check the path (a link may point to nothing)"


def _check_regular(status: os.stat_result, path: Path) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise ModelError(f"{quoted(path)} is a directory; pass the .onnx file in it")
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(f"{quoted(path)} is not a regular file; save the model to a file and pass that")
    if not status.st_size:
        raise ModelError(f"{quoted(path)} is empty; download or export the model again")
    if status.st_size > MAX_FILE:
        raise ModelError(
            f"{quoted(path)} has {status.st_size} bytes, and protobuf reads at most {MAX_FILE}; "
            "save the model with external data (onnx.save(..., save_as_external_data=True))"
        )


def _damaged(reason: str) -> str:
    return f"not a readable ONNX model ({reason}); download or export it again"


def _foreign(data: bytes) -> str | None:
    for offset, start, what in _FOREIGN:
        if data.startswith(start, offset):
            return what
    # A serialised model has control bytes near its start (field tags and lengths); text does not.
    text = data[:512].decode("latin-1")
    if text.isascii() and all(char.isprintable() or char in "\t\r\n" for char in text):
        return f"a text file, not an ONNX model (it starts with {quoted(text[:40])}); pass the .onnx file"
    return None
