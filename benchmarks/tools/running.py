"""Running a tool's command in a separate process: its exit status, what it printed, time and memory."""

import os
import resource
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import ROOT


@dataclass(frozen=True)
class Run:
    """What became of a command.

    Attributes:
        status: exit status; negative for a signal.
        output: what it wrote to standard output and standard error.
        cpu_seconds: user and system time of the process and of its finished children.
        peak_mb: high-water mark of the resident set, 10^6 bytes.
    """

    status: int
    output: str
    cpu_seconds: float
    peak_mb: float

    @property
    def traceback(self) -> bool:
        """Whether the user saw a Python traceback, or the process was killed."""
        return "Traceback (most recent call last)" in self.output or self.status < 0

    @property
    def last_line(self) -> str:
        """The last line that is not empty."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return lines[-1] if lines else ""


def run(command: Sequence[str], folder: Path, *, largest_file: int | None = None) -> Run:
    """Run a command in `folder`.

    Args:
        command: program and arguments.
        folder: working directory.
        largest_file: bytes after which a write to any file fails, as on a full disk.
    """

    def limit() -> None:
        if largest_file is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))

    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "NO_COLOR": "1",
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": "120",
    }
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=limit,  # noqa: PLW1509 - this process has one thread
    )
    if process.stdout is None:  # for the type checker: it is a pipe
        raise RuntimeError("no output")
    with process.stdout as printed:
        text = printed.read().decode(errors="replace")
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return Run(process.returncode, text, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e6)
