"""Runs of the command line as forks of a process that has imported everything: no run spends seconds on imports.

`python -m tests.faults.forked` is that process: it reads requests from its standard input, one a line as JSON, and
answers each with the exit status. `traced` and `run` send them; every thread has a process of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from tests.faults.calls import STRACE

_IMPORTED = ("rewriter", "passes", "onnx", "onnxruntime", "numpy", "rich", "click")
_SECONDS = 300
_SET_PTRACER, _ANY = 0x59616D61, ctypes.c_ulong(-1)
_servers = threading.local()


def traced(arguments: list[str], log: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run `rewrite ARGUMENTS` under strace, which starts when everything is imported and writes `log`."""
    return run(arguments, [*STRACE, "-o", str(log), *options])


def run(arguments: list[str], strace: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Run `rewrite ARGUMENTS`.

    Raises:
        RuntimeError: the process that makes the runs has ended.
    """
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps([arguments, strace]) + "\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    if not answer:
        raise RuntimeError(f"no run of {arguments}: the process that makes them ended with {server.wait()}")
    status, said = json.loads(answer)
    return subprocess.CompletedProcess(arguments, status, "", said)


def _server() -> subprocess.Popen[str]:
    """The process of this thread, which lives until this process ends."""
    known: subprocess.Popen[str] | None = getattr(_servers, "process", None)
    if known is None or known.poll() is not None:
        known = subprocess.Popen(
            [sys.executable, "-B", "-m", "tests.faults.forked"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).resolve().parents[2]), "COLUMNS": "200"},
        )
        _servers.process = known
        atexit.register(_end, known)
    return known


def _end(server: subprocess.Popen[str]) -> None:
    with server:
        assert server.stdin is not None
        server.stdin.close()


# -- in the process that forks -----------------------------------------------------------------------------------------


def import_all(arguments: list[str], folder: Path) -> None:
    """Import what a run imports, so that no fork does; a fork tells what, since a run would start threads here."""
    names = folder / "names"
    child = os.fork()
    if not child:
        with (folder / "log").open("wb") as said:
            work(arguments, said.fileno(), then=lambda: names.write_text("\n".join(sys.modules)))
    os.waitpid(child, 0)
    for name in names.read_text(encoding="utf-8").split():
        if name.partition(".")[0] in _IMPORTED:
            importlib.import_module(name)


def work(
    arguments: list[str], said: int, before: Callable[[], object] = int, then: Callable[[], object] = int
) -> NoReturn:
    """In a fork: run the command as the console script does, with its errors in the file `said`, and end."""
    status: object = 99
    try:
        os.dup2(said, 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        from rewriter.cli import main

        before()
        main(arguments)
    except SystemExit as ended:
        status = ended.code
    except BaseException:  # noqa: BLE001 - the checks look for tracebacks
        traceback.print_exc()
    finally:
        then()
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(status if isinstance(status, int) else 99)


def _forked(arguments: list[str], strace: list[str]) -> tuple[int, str]:
    """The exit status of a run, negative for a signal, and what it said."""
    with tempfile.TemporaryFile() as said:
        gate, opened = os.pipe()
        child = os.fork()
        if not child:
            os.close(opened)
            # A shell may have started the tests in the background, where Ctrl-C is ignored.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            ctypes.CDLL(None).prctl(_SET_PTRACER, _ANY, 0, 0, 0)
            # Not a read, which strace would count if it is attached before: all numbers would be one higher.
            work(arguments, said.fileno(), before=lambda: select.select([gate], [], []))
        os.close(gate)
        tracer = _attached(child, strace) if strace else None
        os.close(opened)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if tracer is not None:
            tracer.communicate(timeout=_SECONDS)
        said.seek(0)
        return status, said.read().decode()


def _attached(child: int, strace: list[str]) -> subprocess.Popen[str]:
    """A tracer of the fork, which waits until it is there."""
    tracer = subprocess.Popen([*strace, "-p", str(child)], stderr=subprocess.PIPE, text=True)
    assert tracer.stderr is not None
    line = tracer.stderr.readline()
    if "attached" not in line:
        os.kill(child, signal.SIGKILL)
        raise RuntimeError(f"strace cannot trace a run: {line.strip()}")
    return tracer


def _serve() -> None:
    from tests.faults.trial import SETTINGS

    with tempfile.TemporaryDirectory() as place:
        SETTINGS[0].prepare(Path(place) / "imports")
        import_all(SETTINGS[0].arguments(Path(place) / "imports"), Path(place) / "imports")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests, which then close the pipe
    for line in sys.stdin:
        sys.stdout.write(json.dumps(_forked(*json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve()
