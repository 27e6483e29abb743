"""Rules for the output path, checked before the long work and again before the rename.

OUT is a new file or, with `force`, an existing regular file in an existing directory. It is never the source or one of
its data files, under whatever name, and never a symbolic link, a directory, a FIFO or a device.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from rewriter.errors import UsageError
from rewriter.files.durable import os_errors
from rewriter.files.load import LoadedModel
from rewriter.text import quoted


def check_output(out: Path, *, source: LoadedModel, force: bool) -> None:
    """Check that `out` may be written, without writing anything. Raises UsageError for the first broken rule."""
    with os_errors("write", out):
        _check_directory(out)
        _check_not_source(out, source)
        _check_existing(out, force=force)


def _check_directory(out: Path) -> None:
    directory = out.parent
    if not directory.exists():
        raise UsageError(
            f"the directory of the output, {quoted(directory)}, does not exist; create it first (mkdir -p)"
        )
    if not directory.is_dir():
        raise UsageError(f"{quoted(directory)} is not a directory; choose an output in a directory")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise UsageError(f"{quoted(directory)} is not writable; choose an output directory that you may write to")


def _check_not_source(out: Path, source: LoadedModel) -> None:
    try:
        # Compared by inode and through links: a link, a hard link or another spelling of the path is the same file.
        target = out.stat()
    except (FileNotFoundError, NotADirectoryError):
        return
    if source.path and _is(target, source.path):
        raise UsageError(f"{quoted(out)} is the input itself, which is never overwritten; choose another output")
    for path in {ref.path for ref in source.external}:
        if _is(target, path):
            raise UsageError(f"{quoted(out)} holds the weights of the input; choose another output")


def _is(target: os.stat_result, path: Path) -> bool:
    try:
        return os.path.samestat(target, path.stat())
    except FileNotFoundError:
        return False


def _check_existing(out: Path, *, force: bool) -> None:
    if not os.path.lexists(out):
        return
    mode = out.lstat().st_mode
    if stat.S_ISLNK(mode):
        raise UsageError(f"{quoted(out)} is a symbolic link; remove it, or choose the file that it points to")
    if stat.S_ISDIR(mode):
        raise UsageError(f"{quoted(out)} is a directory; choose a file name in it, such as model.onnx")
    if not stat.S_ISREG(mode):
        raise UsageError(f"{quoted(out)} is not a regular file; choose another output")
    if not force:
        raise UsageError(f"{quoted(out)} exists; pass --force to replace it, or choose another output")
