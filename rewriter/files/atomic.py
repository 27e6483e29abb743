"""Write files and folders so that a reader sees the old one or the new one at any time.

Every file is written under a hidden name beside OUT, synced, and renamed. The hidden name holds a digest of OUT's name,
and the file is locked until its process ends: one without a lock is that of a killed run, which the next run removes
(`sweep`); without locks (on some network file systems) nothing is removed.
"""

import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from rewriter.errors import UsageError
from rewriter.text import quoted

FOLDER = ".folder"  # suffix of the hidden name of a folder

_ADVICE = {
    errno.ENOSPC: "free some space, or choose an output on another disk",
    errno.EDQUOT: "free some of your quota, or choose an output on another disk",
    errno.EFBIG: "raise the file size limit (ulimit -f), or choose an output on another disk",
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "choose an output directory that you may write to"),
    errno.ENAMETOOLONG: "choose a shorter output name",
}


@contextmanager
def os_errors(action: str, path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a UsageError."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason, advice = "the name cannot be used", "choose another"  # because of a NUL
        if isinstance(error, OSError):
            reason = error.strerror or "input/output error"
            advice = _ADVICE.get(error.errno or 0, "check the path and the disk")
        raise UsageError(f"cannot {action} {quoted(path)}: {reason}; {advice}") from error


def check_directory(folder: Path) -> None:
    """Raise UsageError unless a directory accepts files."""
    if not folder.exists():
        raise UsageError(f"the directory of the output, {quoted(folder)}, does not exist; create it first (mkdir -p)")
    if not folder.is_dir():
        raise UsageError(f"{quoted(folder)} is not a directory; choose an output in a directory")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{quoted(folder)} is not writable; choose an output directory that you may write to")


@contextmanager
def hidden(out: Path, suffix: str) -> Iterator[tuple[Path, int]]:
    """A hidden file or folder beside `out` and its descriptor, locked, removed after the block. Raises UsageError."""
    # Without the name of `out`, which may already be as long as a name can be.
    path = out.parent / f".rewrite-{_tag(out)}-{secrets.token_hex(8)}{suffix}"
    handle: int | None = None
    try:
        with os_errors("write", out):
            while handle is None:
                if suffix == FOLDER:
                    path.mkdir()
                    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
                else:  # with the permissions that the umask leaves
                    handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW, 0o666)
                with suppress(OSError):  # a file system without locks
                    fcntl.flock(handle, fcntl.LOCK_EX)
                if not os.path.lexists(path):  # another run swept it before it was locked
                    os.close(handle)
                    handle = None
        yield path, handle
    finally:
        _remove(path)
        if handle is not None:
            os.close(handle)


def sweep(out: Path) -> None:
    """Remove what killed runs for `out` left. Failures are ignored: a later run tries again."""
    ours = re.compile(rf"\.rewrite-{_tag(out)}-[0-9a-f]{{16}}\.(onnx|data|tmp|folder)")
    with suppress(OSError):
        for path in [each for each in out.parent.iterdir() if ours.fullmatch(each.name)]:
            with suppress(OSError):
                access = os.O_RDONLY if path.suffix == FOLDER else os.O_RDWR
                handle = os.open(path, access | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(path)
                finally:
                    os.close(handle)


def _remove(path: Path) -> None:
    with suppress(OSError):
        if path.suffix == FOLDER:
            shutil.rmtree(path, ignore_errors=True)  # does not follow links
        else:
            path.unlink(missing_ok=True)


def _tag(out: Path) -> str:
    return hashlib.sha256(os.fsencode(out.name)).hexdigest()[:8]


def atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let `write` create the contents of a file. Raises UsageError."""
    path = path.absolute()
    sweep(path)
    with os_errors("write", path), hidden(path, ".tmp") as (temporary, handle):
        with os.fdopen(handle, "w+b", closefd=False) as file:
            write(file)
            file.flush()
            os.fsync(handle)
        os.replace(temporary, path)  # noqa: PTH105 - the name says what happens, Path.replace does not
        sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` as UTF-8, atomically. Raises UsageError."""
    atomically(path, lambda file: file.write(text.encode("utf-8")))


def sync(path: Path) -> None:
    """Make a file durable, or the names in a directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network and FUSE file systems cannot sync a directory. The rename itself was atomic.
        if not path.is_dir() or error.errno not in {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}:
            raise
    finally:
        os.close(handle)


_TOOL_FOLDERS = {".git", ".cache", ".ipynb_checkpoints", "__pycache__"}


def files_of(folder: Path) -> tuple[Path, ...]:
    """All files of a folder except those of tools, sorted, relative to it. Raises UsageError for links and devices."""

    def fail(error: OSError) -> None:
        raise error

    found = []
    with os_errors("read", folder):
        for here, folders, names in os.walk(folder, onerror=fail):
            folders[:] = sorted({*folders} - _TOOL_FOLDERS)
            for path in (Path(here, name) for name in (*folders, *names)):
                mode = path.lstat().st_mode
                if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                    fault = f"{quoted(path)} is a link or no regular file"
                    raise UsageError(f"{fault}; copy the folder with its contents (cp -rL), and convert the copy")
            found += [Path(here, name).relative_to(folder) for name in names]
    return tuple(sorted(found))


def check_new_folder(out: Path, source: Path) -> None:
    """Refuse an existing output folder, and remove what killed runs for it left. Raises UsageError."""
    with os_errors("write", out):
        sweep(out.absolute())
        if os.path.lexists(out):
            raise UsageError(f"{quoted(out)} exists; a folder is never replaced: remove it, or choose another output")
        parent = out.absolute().parent
        check_directory(parent)
        if parent.resolve().is_relative_to(source.resolve()):
            raise UsageError(f"{quoted(out)} would lie in the folder that is converted; choose another output")


@contextmanager
def copied_folder(source: Path, files: Sequence[Path], out: Path) -> Iterator[Path]:
    """Copy files of `source` to a hidden folder beside `out`, for `publish` to rename."""
    with hidden(out, FOLDER) as (staged, _):
        with os_errors("write", out):
            for path in files:
                (staged / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source / path, staged / path, follow_symlinks=False)
        yield staged


def publish(staged: Path, out: Path) -> None:
    """Give a staged folder its name, atomically and durably. Raises UsageError if the name was taken meanwhile."""
    with os_errors("rename to", out):
        for path in (staged, *staged.rglob("*")):
            sync(path)
        if os.path.lexists(out):  # a rename would replace an empty folder
            raise UsageError(f"{quoted(out)} exists by now; choose another output and run again")
        os.rename(staged, out)  # noqa: PTH104 - Path.rename replaces files on some systems, and says less
        sync(out.absolute().parent)
