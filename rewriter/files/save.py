"""Stage an output, and commit it once it is proved.

The rewritten model is written under a hidden name beside OUT, where onnxruntime loads it for the proof of the very
bytes that `commit` then renames to OUT. The same proto gives the same bytes.

In the directory of the source, external data stay where they are. Into another one, data files are copied first, as
`<stem of OUT>-<first 12 hex digits of its SHA-256>.data`: the content of a name never changes, so that older outputs
stay intact. Files that no model refers to any more are kept.
"""

import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

import onnx
from google.protobuf.message import EncodeError  # type: ignore[import-untyped]

from rewriter.errors import ModelError, UsageError
from rewriter.files.atomic import check_directory, hidden, os_errors, sweep, sync
from rewriter.files.load import MAX_FILE, TOO_LARGE, LoadedModel, as_stored, external_bytes
from rewriter.files.tensors import ExternalRef, collect_external, inlined, open_inside, read_external
from rewriter.graph.walk import is_external, iter_tensors
from rewriter.text import quoted


@dataclass(frozen=True, eq=False)
class StagedModel:
    """An output that is complete on disk under a hidden name, `path`, with its external data."""

    path: Path
    size: int  # as `LoadedModel.size`
    files: tuple[str, ...]  # names of OUT and of its data files
    commit: Callable[[], None]  # renames the staged file to OUT, atomically and durably; raises UsageError


@contextmanager
def staged_output(proto: onnx.ModelProto, out: Path, *, source: LoadedModel, force: bool) -> Iterator[StagedModel]:
    """Write a model built from `source`, without its fallbacks, beside OUT; unless it is committed, all is removed.

    Raises UsageError as `check_output` and if the disk refuses, ModelError if the model cannot be written.
    """
    out = Path(out).absolute()
    check_output(out, source=source, force=force)
    proto = source.complete(proto)
    sweep(out)
    made: list[Path] = []
    locations: dict[str, str] = {}

    def commit() -> None:
        # The proof may have taken hours since the first check; someone may have created OUT.
        check_output(out, source=source, force=force)
        for placed in map(out.with_name, locations.values()):
            # Another run with the same data beside the same OUT shares these files, and removes them if it fails.
            if not placed.exists():
                raise UsageError(f"{quoted(placed)} was removed before the output was complete; run again")
        with os_errors("rename to", out):
            os.replace(path, out)  # noqa: PTH105 - the name says what happens, Path.replace does not
            sync(out.parent)

    with hidden(out, ".onnx") as (path, handle):
        try:
            proto = as_stored(proto) if source.base_dir is not None else proto
            external = collect_external(proto, source.base_dir)
            # Weights that a mapped model left in its own file go inline again.
            own = tuple(ref for ref in external if source.mapped and ref.path == source.path)
            references = tuple(ref for ref in external if not source.mapped or ref.path != source.path)
            if references and source.base_dir is not None and not _is_same_file(out.parent, source.base_dir):
                for ref in {each.location: each for each in references}.values():
                    with open_inside(source.base_dir, ref.location, ref.tensor) as data:
                        locations[ref.location] = _place(data, out, made).name
                with os_errors("sync", out.parent):
                    sync(out.parent)
            length, pieces = _serialise(proto, locations, own, source)
            with os_errors("write", out):
                with os.fdopen(handle, "wb", closefd=False) as file:
                    file.writelines(pieces)
                os.fsync(handle)
            del pieces  # up to 2 GiB, not needed while the caller proves the staged file
            yield StagedModel(path, length + external_bytes(references), (out.name, *locations.values()), commit)
        finally:
            # Once the hidden file is renamed, its data stay. The file system decides, not a flag, which an interrupt
            # after the rename could leave unset; a file that somebody removed has no link.
            for data_file in made if os.path.lexists(path) or not os.fstat(handle).st_nlink else ():
                with suppress(OSError):  # which must not hide the error that led here
                    data_file.unlink(missing_ok=True)


def check_output(out: Path, *, source: LoadedModel, force: bool) -> None:
    """Check that `out` may be written, without writing anything. Raises UsageError for the first broken rule."""
    with os_errors("write", out):
        check_directory(out.parent)
        try:
            mode = out.lstat().st_mode
        except FileNotFoundError:
            return
        # Compared by inode and through links: a link, a hard link or another spelling of the path is the same file.
        if source.path and _is_same_file(out, source.path):
            fault = "is the input itself, which is never overwritten; choose another output"
        elif any(_is_same_file(out, path) for path in {ref.path for ref in source.external}):
            fault = "holds the weights of the input; choose another output"
        elif stat.S_ISLNK(mode):
            fault = "is a symbolic link; remove it, or choose the file that it points to"
        elif stat.S_ISDIR(mode):
            fault = "is a directory; choose a file name in it, such as model.onnx"
        elif not stat.S_ISREG(mode):
            fault = "is not a regular file; choose another output"
        elif force:
            return
        else:
            fault = "exists; pass --force to replace it, or choose another output"
    raise UsageError(f"{quoted(out)} {fault}")


def _is_same_file(one: Path, other: Path) -> bool:
    with suppress(FileNotFoundError, NotADirectoryError):
        return one.samefile(other)
    return False


def _serialise(
    proto: onnx.ModelProto, locations: dict[str, str], own: tuple[ExternalRef, ...], source: LoadedModel
) -> tuple[int, Iterable[bytes | memoryview]]:
    lengths = {ref.tensor: ref.length for ref in own}
    if len(own) != sum(is_external(tensor) and tensor.name in lengths for tensor in proto.graph.initializer):
        raise ModelError("a weight of the main graph was moved into a body; this is a bug, please report it")
    try:
        if locations:
            proto = deepcopy(proto)
            for tensor in iter_tensors(proto):
                for entry in tensor.external_data if is_external(tensor) else ():
                    if entry.key == "location":
                        entry.value = locations.get(entry.value, entry.value)
        size, pieces = inlined(proto, lengths, lambda tensor: read_external(tensor, source.base_dir or Path()).data)
    except (EncodeError, ValueError) as error:
        raise ModelError(TOO_LARGE) from error
    if size > MAX_FILE:
        raise ModelError(TOO_LARGE)
    return size, pieces


def _place(data: BufferedReader, out: Path, made: list[Path]) -> Path:
    """A copy of a data file beside `out`, or the one that is there; `made` gets the path of a new one beforehand."""
    # The name becomes a location, which may not hold backslashes, drives or bytes that are not UTF-8.
    prefix = re.sub(r"[^\w.+ -]", "_", out.stem) + "-"
    with os_errors("write", out):
        # Looked for before anything is written, so that a second run does not need the disk space of a second copy.
        if any(out.parent.glob(f"{prefix}*.data")):
            digest = hashlib.file_digest(data, "sha256").hexdigest()
            target = out.parent / f"{prefix}{digest[:12]}.data"
            if os.path.lexists(target):
                status = target.lstat()
                if not stat.S_ISREG(status.st_mode) or sha256_of(target) != digest:
                    fault = "holds other data than its name says"
                    raise UsageError(f"{quoted(target)} {fault}; remove it or choose another output name")
                if status.st_nlink == 1:  # `load` refuses data files with several hard links
                    return target
            data.seek(0)
        with hidden(out, ".data") as (temporary, handle):
            copied = hashlib.sha256()
            with os.fdopen(handle, "wb", closefd=False) as file:
                while part := data.read(2**16):
                    copied.update(part)
                    file.write(part)
            os.fsync(handle)
            target = out.parent / f"{prefix}{copied.hexdigest()[:12]}.data"
            if not os.path.lexists(target):
                made.append(target)
            os.replace(temporary, target)  # noqa: PTH105 - the name says what happens, Path.replace does not
    return target


def sha256_of(path: Path) -> str:
    """The digest of a file. Raises ModelError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"{quoted(path)} cannot be read: {error.strerror}; check the disk") from error
