"""Kill a process before and after every call that changes the disk, in forks of one interpreter.

A child process imports once and forks once per directory. Fork n is killed at the n-th event of its work, an event
being the moment before or after a call; the first fork that ends by itself tells that all events were reached.
"""

import inspect
import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_CALLS = ("open", "write", "fsync", "replace", "rename", "unlink", "mkdir", "rmdir")


def killed_everywhere(
    work: Callable[[Path], object], directories: Sequence[Path], *, every: int = 1, by: int = signal.SIGKILL
) -> list[int]:
    """The exit code of `work`, a module's function, in each directory: killed at event 1, 1 + `every`, ...; 0 at last.

    There is one directory for each kill, and one for the run that ends by itself; further ones are not used.
    """
    given = json.dumps([inspect.getfile(work), work.__name__, [str(path) for path in directories], every, by])
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run(
        [sys.executable, "-m", "tests.faults.killing", given],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        check=True,
        timeout=120,
    )
    codes: list[int] = json.loads(run.stdout)
    return codes


def _main(file: str, name: str, directories: list[str], every: int, by: int) -> None:
    work = runpy.run_path(file)[name]
    results: list[int] = []
    for number, directory in enumerate(directories):
        child = os.fork()
        if not child:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            _kill_at(1 + number * every, by)
            try:
                work(Path(directory))
            except SystemExit as ended:
                os._exit(int(ended.code or 0))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        results.append(os.waitstatus_to_exitcode(status))
        if results[-1] == 0:
            break
    sys.stdout.write(json.dumps(results))


def _kill_at(point: int, by: int) -> None:
    events = 0

    def event() -> None:
        nonlocal events
        events += 1
        if events == point:
            os.kill(os.getpid(), by)

    def counting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            if name == "open" and not arguments[1] & os.O_CREAT:
                return call(*arguments, **options)
            event()
            result = call(*arguments, **options)
            event()
            return result

        return counted

    for name in _CALLS:
        setattr(os, name, counting(name, getattr(os, name)))


if __name__ == "__main__":
    _main(*json.loads(sys.argv[1]))
