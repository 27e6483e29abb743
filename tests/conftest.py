"""Skips slow tests, shares cores among workers and exported models among all tests."""

import gc
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

import pytest

WORKER = "PYTEST_XDIST_WORKER" in os.environ
"""Whether other workers of pytest-xdist use the cores too. Threads that wait for each other spin: one each then."""

if WORKER:  # before numpy is imported, which reads them
    os.environ.update({f"{library}_NUM_THREADS": "1" for library in ("OPENBLAS", "MKL", "OMP")})

if TYPE_CHECKING:
    from models.entry import Dtype, Entry, Exporter

Export = Callable[..., Path]
"""Entry name, exporter and element type (fp32 by default) to the exported file."""


class Printed(NamedTuple):
    out: str
    err: str

    @property
    def refusal(self) -> str:
        """The error, which must be one line and no traceback."""
        assert self.err.count("\n") == 1
        assert "Traceback" not in self.err
        return self.err


Ran = Callable[[int, Sequence[str]], Printed]


@pytest.fixture
def ran(capsys: pytest.CaptureFixture[str]) -> Ran:
    """A function that runs a command, which must end with this status, and gives what it printed."""
    from rewriter.cli import run

    def ran(status: int, arguments: Sequence[str]) -> Printed:
        assert run(list(arguments)) == status
        return Printed(*capsys.readouterr())

    return ran


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without the extended suite its files are not read: they import PyTorch."""
    return True if collection_path.name == "exports" and config.option.markexpr == "not exports" else None


def drawn(cases: Sequence[str], turn: str) -> Sequence[str]:
    """The cases that have this turn, a number or all, by the parameters in their names; at least one."""
    own = [name for name in cases if turn == "all" or (crc32(name.partition("[")[2].encode()) - int(turn)) % 6 == 0]
    return own or cases[:1]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip slow tests without ATTNONLY_SLOW, and of tests marked `sample(N)` the cases whose turn it is not.

    All cases but N, drawn by their names, are slow, and a sixth of them has the turn of ATTNONLY_TURN: a number, 0 if
    it is not set, or all. `sample(N, turns=False)` has no turns. Tests in `tests/exports` are marked `exports` and take
    turns without being slow; those with the same parameters share a turn, and so an export.
    """
    sampled = defaultdict[str, dict[str, pytest.Item]](dict)
    for item in items:
        if item.path.parent.name == "exports":
            for added in (pytest.mark.exports, pytest.mark.sample(0), pytest.mark.filterwarnings("ignore")):
                item.add_marker(added)  # what PyTorch warns of is its own affair
        if item.get_closest_marker("sample") and not item.get_closest_marker("slow"):
            sampled[item.nodeid.partition("[")[0]][item.nodeid] = item
    for cases in sampled.values():
        mark = next(next(iter(cases.values())).iter_markers("sample"))
        others = sorted(cases, key=lambda name: crc32(name.encode()))[mark.args[0] :]
        now = drawn(others, os.environ.get("ATTNONLY_TURN", "0") if mark.kwargs.get("turns", True) else "all")
        for name in others:
            if not cases[name].get_closest_marker("exports"):
                cases[name].add_marker("slow")
            if name not in now:
                cases[name].add_marker(pytest.mark.skip(reason="has its turn with another ATTNONLY_TURN"))
    if not os.environ.get("ATTNONLY_SLOW"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: set ATTNONLY_SLOW=1"))


def pytest_collection_finish() -> None:
    """Keep the collected tests out of the garbage collector's way, which would walk them again and again."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=WORKER)
def sessions_of_one_thread() -> Iterator[None]:
    """Sessions of onnxruntime that are opened in this process; without pytest-xdist they have all cores."""
    import onnxruntime

    class OneThread(onnxruntime.SessionOptions):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.intra_op_num_threads = 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnxruntime, "SessionOptions", OneThread)
        yield


def exporters_of(entry: "Entry") -> "tuple[Exporter, ...]":
    """The exporters whose files are tested: one of them, drawn by its name, for an entry with one size.

    `python -m models coverage` exports these with both.
    """
    small = set(entry.sizes) == {"tiny"} and len(entry.exporters) > 1
    return (entry.exporters[crc32(entry.name.encode()) % 2],) if small else entry.exporters


@pytest.fixture(scope="session")
def export(tmp_path_factory: pytest.TempPathFactory) -> Export:
    """A function that gives the file of an entry, exported once, at its smallest size.

    Workers of pytest-xdist share the files: an export appears under its name only when it is complete.
    """
    from models.entry import DEFAULT_OPSETS
    from models.export import export_model
    from models.registry import get

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    folder = folder / "exports"

    def exported(name: str, exporter: "Exporter", dtype: "Dtype" = "fp32") -> Path:
        path = folder / name / f"{name}-{exporter}-{dtype}.onnx"  # trained weights come with their tokenizer.json
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            entry = get(name)
            done = export_model(entry, path, size=entry.default_size, exporter=exporter, dtype=dtype)
            assert done.opset == DEFAULT_OPSETS[exporter]
            assert done.size_bytes == path.stat().st_size
            assert done.difference < (1e-5 if dtype == "fp32" else 3e-2)
        return path

    return exported
