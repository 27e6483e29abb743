"""A note beside an output of what a run is making, so that the next run can remove what a killed one left.

The journal is a hidden file that lists names, one per line, each before the file is created. The run holds a lock on it
that the system releases when the process ends, however it ends. A journal of the same OUT without a lock is therefore
that of a killed run, and what it lists is removed: nothing else, and no data file from the moment of the commit on,
since OUT may refer to it. The hidden folder in which a folder is made is listed, and removed, as one thing. Without
locks (Windows, some network file systems) there is no journal, and nothing is removed.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rewriter.files.durable import create, hidden_path, write_all

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_COMMITTED = "/committed"
"""A line that no file name can be."""
_OURS = re.compile(r"\.rewrite-[0-9a-f]{16}\.(onnx|data|tmp|folder)|.+-[0-9a-f]{12}\.data")
_LONGEST = 2**20
FOLDER = ".folder"
"""How the hidden name of a folder ends."""


class Journal:
    """The files that one run makes in the directory of OUT."""

    def __init__(self, handle: int | None = None) -> None:
        self._handle = handle
        self.paths: list[Path] = []

    def append(self, path: Path) -> None:
        """Note a file, or a folder, that is about to be created."""
        self.paths.append(path)
        self._write(path.name)

    def commit(self) -> None:
        """Note that OUT is about to refer to the data files."""
        self._write(_COMMITTED)

    def _write(self, line: str) -> None:
        if self._handle is None:
            return
        # A full disk is reported where the file itself cannot be written.
        with suppress(OSError):
            write_all(self._handle, f"{line}\n".encode("utf-8", "surrogateescape"))


@contextmanager
def journal(out: Path) -> Iterator[Journal]:
    """Remove what killed runs left for `out`, and keep a journal until the end of the block."""
    if fcntl is None:
        yield Journal()
        return
    sweep(out)
    path = hidden_path(out.parent, f"{_tag(out)}.journal")
    handle: int | None = None
    try:
        # What is wrong with the directory is reported where OUT is written.
        with suppress(OSError, ValueError):
            handle = create(path)
        # Another run may have swept the journal before it was locked. Then it is as if there were none.
        yield Journal(handle if handle is not None and _locked(handle) and path.exists() else None)
    finally:
        with suppress(OSError, ValueError):
            path.unlink(missing_ok=True)
        if handle is not None:
            os.close(handle)


def sweep(out: Path) -> None:
    """Remove the files of runs for `out` that were killed. Failures are ignored: a later run tries again."""
    journals = re.compile(rf"\.rewrite-[0-9a-f]{{16}}{_tag(out)}\.journal")
    with suppress(OSError):
        found = [path for path in out.parent.iterdir() if journals.fullmatch(path.name)]
        handles = {path: os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK) for path in found}
        try:
            dead = [path for path, handle in handles.items() if _locked(handle)]
            for path in dead:
                _remove(path, handles[path], alone=len(dead) == len(found))
        finally:
            for handle in handles.values():
                os.close(handle)


def _remove(path: Path, handle: int, *, alone: bool) -> None:
    """Remove what a journal lists, then the journal; visible data files only if no other run may be using them."""
    names = os.pread(handle, _LONGEST, 0).decode("utf-8", "surrogateescape").split("\n")
    for name in names:
        hidden = name.startswith(".rewrite-")
        if _OURS.fullmatch(name) and "/" not in name and (hidden or (alone and _COMMITTED not in names)):
            if name.endswith(FOLDER):
                shutil.rmtree(path.parent / name, ignore_errors=True)  # does not follow links
                continue
            with suppress(OSError):
                (path.parent / name).unlink(missing_ok=True)
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _tag(out: Path) -> str:
    """What tells the journals of one OUT from those of others; its name may be too long to be part of another."""
    return "-" + hashlib.sha256(os.fsencode(out.name)).hexdigest()[:8]


def _locked(handle: int) -> bool:
    """Take the lock, if nobody has it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
