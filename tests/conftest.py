"""Skips slow tests, shares cores among workers and exported models among all tests."""

from __future__ import annotations

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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without ATTNONLY_SLOW, slow tests are skipped: with `sample(N)`, all cases of a test but N drawn by their names.

    Those in `tests/exports` are marked `exports`, and what PyTorch warns of is its own affair.
    """
    sampled = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if item.path.parent.name == "exports":
            item.add_marker("exports")
            item.add_marker(pytest.mark.filterwarnings("ignore"))
        if item.get_closest_marker("sample") and not item.get_closest_marker("slow"):
            sampled[item.nodeid.partition("[")[0]].append(item)
    for cases in sampled.values():
        (count,) = next(cases[0].iter_markers("sample")).args
        for item in sorted(cases, key=lambda item: crc32(item.nodeid.encode()))[count:]:
            item.add_marker("slow")
    if not os.environ.get("ATTNONLY_SLOW"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: set ATTNONLY_SLOW=1"))


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


def exporters_of(entry: Entry) -> tuple[Exporter, ...]:
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

    def exported(name: str, exporter: Exporter, dtype: Dtype = "fp32") -> Path:
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
