"""A folder of a model, such as optimum writes: what is in it, and a copy that appears only when it is complete."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rewriter.errors import UsageError
from rewriter.files.atomic import CHUNK, FOLDER, create, hidden, os_errors, sweep, sync_directory, write_all
from rewriter.text import quoted

_SKIPPED = (".git", ".cache", ".ipynb_checkpoints", "__pycache__")
"""Folders that belong to tools, not to the model."""


def files_of(folder: Path) -> tuple[Path, ...]:
    """The files of a folder and of the folders in it, sorted, relative to it; folders of tools are left out.

    Raises:
        UsageError: the folder cannot be read, or holds links or devices, which are not followed.
    """
    with os_errors("read", folder):
        return tuple(sorted(path.relative_to(folder) for path in _walk(folder)))


def _walk(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            raise UsageError(
                f"{quoted(path)} is a link, which may lead anywhere; copy the folder with its contents (cp -rL), and "
                "convert the copy"
            )
        if stat.S_ISDIR(mode):
            if path.name not in _SKIPPED:
                yield from _walk(path)
        elif stat.S_ISREG(mode):
            yield path
        else:
            raise UsageError(f"{quoted(path)} is not a regular file; remove it from the folder")


def check_new_folder(out: Path, source: Path) -> None:
    """Refuse, before the long work, a folder that exists or cannot be made. Raises UsageError.

    What a killed run for `out` left is removed even then: a folder that exists is never written again.
    """
    with os_errors("write", out):
        sweep(out.absolute())
        if os.path.lexists(out):
            raise UsageError(f"{quoted(out)} exists; a folder is never replaced: remove it, or choose another output")
        parent = out.absolute().parent
        if not parent.is_dir():
            raise UsageError(f"the directory of the output, {quoted(parent)}, does not exist; create it first")
        if not os.access(parent, os.W_OK | os.X_OK):
            raise UsageError(f"{quoted(parent)} is not writable; choose an output directory that you may write to")
        if parent.resolve().is_relative_to(source.resolve()):
            raise UsageError(f"{quoted(out)} would lie in the folder that is converted; choose another output")


@contextmanager
def staged_folder(out: Path) -> Iterator[Path]:
    """A hidden folder beside `out`; `publish` renames it. Without that, it is removed when the block ends."""
    out = out.absolute()
    sweep(out)
    with ExitStack() as stack:
        with os_errors("write", out):
            staged, _ = stack.enter_context(hidden(out, FOLDER))
        yield staged


def publish(staged: Path, out: Path) -> None:
    """Give a staged folder its name, atomically and durably. Raises UsageError where the name is taken meanwhile."""
    with os_errors("rename to", out):
        for folder, _, _ in os.walk(staged):
            sync_directory(Path(folder))
        if os.path.lexists(out):  # a rename would replace an empty folder
            raise UsageError(f"{quoted(out)} exists by now; choose another output and run again")
        os.rename(staged, out)  # noqa: PTH104 - Path.rename replaces files on some systems, and says less
        sync_directory(out.absolute().parent)


def copy_file(source: Path, target: Path) -> None:
    """Copy a regular file, durably; the folders of `target` are made. Raises UsageError."""
    with os_errors("copy", source):
        target.parent.mkdir(parents=True, exist_ok=True)
        reading = os.open(source, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(reading, "rb") as file:
            writing = create(target)
            try:
                while piece := file.read(CHUNK):
                    write_all(writing, piece)
                os.fsync(writing)
            finally:
                os.close(writing)
