"""Write files so that a reader sees the old one or the new one, whatever happens meanwhile.

Every file is written under a hidden name beside OUT, synced, and renamed. The hidden name holds a digest of OUT's name,
and the file is locked as long as its run goes on; the system releases the lock when the process ends, however it ends.
A hidden file of the same OUT without a lock is therefore that of a killed run, which the next run removes (`sweep`).
Without locks (Windows, some network file systems) nothing is removed. OSErrors become UsageErrors that say what to do.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from rewriter.errors import UsageError
from rewriter.text import quoted

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

FOLDER = ".folder"
"""How the hidden name of a folder ends."""

CHUNK = 8 * 2**20

_ADVICE = {
    errno.ENOSPC: "free some space, or choose an output on another disk",
    errno.EDQUOT: "free some of your quota, or choose an output on another disk",
    errno.EFBIG: "raise the file size limit (ulimit -f), or choose an output on another disk",
    errno.EACCES: "choose an output directory that you may write to",
    errno.EPERM: "choose an output directory that you may write to",
    errno.EROFS: "choose an output directory that you may write to",
    errno.ENAMETOOLONG: "choose a shorter output name",
}


@contextmanager
def os_errors(action: str, path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a one-line UsageError: what failed, where, and what to do."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "check the path and the disk")
        raise UsageError(
            f"cannot {action} {quoted(path)}: {error.strerror or 'input/output error'}; {advice}"
        ) from error
    except ValueError as error:  # a NUL in the path
        raise UsageError(f"cannot {action} {quoted(path)}: the name cannot be used; choose another") from error


def create(path: Path) -> int:
    """Create a new file, with the permissions that the umask leaves, and return its descriptor."""
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW, 0o666)


@contextmanager
def hidden(out: Path, suffix: str) -> Iterator[tuple[Path, int]]:
    """A new hidden file beside `out`, or a folder if `suffix` says so, with its descriptor.

    It is locked until the end of the block, and removed there if it still has the hidden name.
    """
    # Without the name of `out`, which may already be as long as a name can be.
    path = out.parent / f".rewrite-{_tag(out)}-{secrets.token_hex(8)}{suffix}"
    handle: int | None = None
    try:
        while handle is None:
            if suffix == FOLDER:
                path.mkdir()
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY) if suffix == FOLDER else create(path)
            _locked(handle, wait=True)
            if not os.path.lexists(path):  # another run swept it before it was locked
                os.close(handle)
                handle = None
        yield path, handle
    finally:
        _remove(path)
        if handle is not None:
            os.close(handle)


def sweep(out: Path) -> None:
    """Remove what runs for `out` that were killed left. Failures are ignored: a later run tries again."""
    ours = re.compile(rf"\.rewrite-{_tag(out)}-[0-9a-f]{{16}}\.(onnx|data|tmp|folder)")
    with suppress(OSError):
        for path in [each for each in out.parent.iterdir() if ours.fullmatch(each.name)]:
            with suppress(OSError):
                access = os.O_RDONLY if path.suffix == FOLDER else os.O_RDWR
                handle = os.open(path, access | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    if _locked(handle, wait=False):
                        _remove(path)
                finally:
                    os.close(handle)


def _remove(path: Path) -> None:
    """Remove a file or a folder. A failure must not hide the error that led here."""
    with suppress(OSError):
        if path.suffix == FOLDER:
            shutil.rmtree(path, ignore_errors=True)  # does not follow links
        else:
            path.unlink(missing_ok=True)


def _tag(out: Path) -> str:
    return hashlib.sha256(os.fsencode(out.name)).hexdigest()[:8]


def _locked(handle: int, *, wait: bool) -> bool:
    """Take the lock, if the file system has locks and nobody else has it."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let `write` make the contents of a file. What a killed run left is removed. Raises UsageError."""
    path = path.absolute()
    sweep(path)
    with os_errors("write", path), hidden(path, ".tmp") as (temporary, handle):
        with os.fdopen(handle, "w+b", closefd=False) as file:
            write(file)
            file.flush()
            os.fsync(handle)
        os.replace(temporary, path)  # noqa: PTH105 - the name says what happens, Path.replace does not
        sync_directory(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` as UTF-8, atomically. Raises UsageError."""
    atomically(path, lambda file: file.write(text.encode("utf-8")))


def write_all(handle: int, data: bytes | memoryview) -> None:
    """Write all of `data`, in chunks: a single write may accept less than it is given."""
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view[:CHUNK]) :]


def sync_directory(directory: Path) -> None:
    """Make renames in a directory durable."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network and FUSE file systems cannot sync a directory. The rename itself was atomic.
        if error.errno not in {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}:
            raise
    finally:
        os.close(handle)
