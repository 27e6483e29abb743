"""Write files so that a crash never leaves a partial one under a name that anyone reads.

Every file is written under a hidden name, synced, and renamed. OSErrors become UsageErrors that say what to do.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rewriter.errors import UsageError
from rewriter.text import quoted

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


def hidden_path(directory: Path, suffix: str) -> Path:
    """Return a fresh hidden name. It does not contain the output's name, which may already be as long as allowed."""
    return directory / f".rewrite-{secrets.token_hex(8)}{suffix}"


def create(path: Path) -> int:
    """Create a new file, with the permissions that the umask leaves, and return its descriptor."""
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW, 0o666)


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
