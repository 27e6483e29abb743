"""Write a file so that a reader sees the old one or the new one, whatever happens meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from rewriter.files.durable import create, hidden_path, os_errors, sync_directory
from rewriter.files.journal import journal


def atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let `write` make the contents of a file. What a killed run left is removed. Raises UsageError."""
    path = path.absolute()
    with os_errors("write", path), journal(path) as made:
        temporary = hidden_path(path.parent, ".tmp")
        made.append(temporary)
        try:
            with os.fdopen(create(temporary), "w+b") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)  # noqa: PTH105 - as in `save`
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` as UTF-8, atomically. Raises UsageError."""
    atomically(path, lambda file: file.write(text.encode("utf-8")))
