"""System calls of a run that touch its files, as strace sees them."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

WRITING = (
    "write", "pwrite64", "writev", "copy_file_range", "sendfile", "ftruncate", "fsync", "fdatasync",
    "rename", "renameat", "renameat2", "unlink", "unlinkat", "mkdir",
)  # fmt: skip
READING = ("read", "pread64")
_TRACED = ("openat", *WRITING, *READING)
_LINE = re.compile(r"(?P<thread>\d+) +(?P<name>\w+)\((?P<rest>.*)")
HAVE_STRACE = shutil.which("strace") is not None


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


def traced(command: list[str], log: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a command of this interpreter under strace."""
    strace = ["strace", "-f", "-y", "-qq", "-s", "0", "-o", str(log), "-e", f"trace={','.join(_TRACED)}", *options]
    return subprocess.run(
        [*strace, sys.executable, "-B", *command],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        # A shell may have started the tests in the background, where Ctrl-C is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).resolve().parents[2]), "COLUMNS": "200"},
    )


def calls_of(command: list[str], folder: Path, log: Path) -> list[Call]:
    """The calls of a run that create, write, rename, remove or read files below `folder`."""
    run = traced(command, log)
    assert run.returncode == 0, run.stderr
    seen, found = Counter[str](), list[Call]()
    main = ""
    for line in log.read_text(errors="replace").splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        main = main or match["thread"]
        if match["thread"] != main:
            continue
        seen[match["name"]] += 1
        call = Call(match["name"], seen[match["name"]], match["rest"].rpartition(" = ")[0])
        if str(folder) in match["rest"] and (call.name != "openat" or call.writes):
            found.append(call)
    return found
