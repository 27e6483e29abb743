"""System calls of a run that touch its files, as strace sees them."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

WRITING = (
    "write", "pwrite64", "writev", "copy_file_range", "sendfile", "ftruncate", "fsync", "fdatasync",
    "rename", "renameat", "renameat2", "unlink", "unlinkat", "mkdir", "rmdir",
)  # fmt: skip
READING = ("read", "pread64")
_TRACED = ("openat", *WRITING, *READING)
_LINE = re.compile(r"(?P<name>\w+)\((?P<rest>.*)")
_END = re.compile(r"(\)\s+= .*| <unfinished \.\.\.>)$")
_RANDOM = re.compile(r'\w*\d\w*|""(\.\.\.)?')
"""What contains digits, and buffers: of a read that fails, strace prints the address instead."""
HAVE_STRACE = shutil.which("strace") is not None
STRACE = ("strace", "-y", "-s", "0", "-e", f"trace={','.join(_TRACED)}")
"""Says when it is attached. It follows no threads: their calls have numbers of their own, which a fault would meet."""


@dataclass(frozen=True)
class Call:
    """One system call of the main thread.

    Attributes:
        name: of the system call.
        number: the how-manieth of this name it is, from 1.
        text: its arguments.
    """

    name: str
    number: int
    text: str

    @property
    def writes(self) -> bool:
        return self.name in WRITING or "O_CREAT" in self.text

    def like(self, folder: Path) -> str:
        """The call without what differs between two runs: the folder, whatever contains digits, and what is read."""
        return f"{self.name} " + _RANDOM.sub("#", self.text.replace(str(folder), ""))


def logged(log: Path) -> list[Call]:
    """The calls of the main thread in a log, which may end where the process was killed."""
    seen, found = Counter[str](), list[Call]()
    for line in log.read_text(errors="replace").splitlines():
        if match := _LINE.match(line):
            seen[match["name"]] += 1
            found.append(Call(match["name"], seen[match["name"]], _END.sub("", match["rest"])))
    return found
