"""Kill -9 before and after every call that changes the disk: the previous output stays whole, and nothing is left."""

import json
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from rewriter.cli import main
from rewriter.files.load import load_model
from rewriter.files.save import staged_output
from tests.faults.killing import killed_everywhere
from tests.rewriter.files.conftest import answer, make_external
from tests.textmodels import SILU, mlp

OLD = np.full(4096, 7, np.float32)
NEW = np.arange(4096, dtype=np.float32)
POINTS = 40


def elsewhere(directory: Path) -> None:
    _save(directory, "elsewhere")


def source(directory: Path) -> None:
    _save(directory, "source")


def _save(directory: Path, place: str) -> None:
    model = load_model(directory / "source" / "model.onnx")
    with staged_output(model.proto, directory / place / "out.onnx", source=model, force=True) as staged:
        staged.commit()


def _prepare(directory: Path, place: str, proto: onnx.ModelProto) -> None:
    """Make a source, and an output that an earlier run made from other weights."""
    for name in {"source", place}:
        (directory / name).mkdir(parents=True)
    (directory / "source" / "model.onnx").write_bytes(proto.SerializeToString())
    (directory / "source" / "w.bin").write_bytes(OLD.tobytes())
    _save(directory, place)
    if place != "source":
        (directory / "source" / "w.bin").write_bytes(NEW.tobytes())


@pytest.mark.sample(0)
@pytest.mark.parametrize("work", [elsewhere, source])
def test_previous_output_survives_a_kill_at_any_point(work: Callable[[Path], None], tmp_path: Path) -> None:
    place = work.__name__
    directories = [tmp_path / str(point) for point in range(POINTS)]
    for directory in directories:
        _prepare(directory, place, make_external([("location", "w.bin")]))
    results = killed_everywhere(work, directories)
    assert results[-1] == 0, "not every point was reached: raise POINTS"
    assert set(results[:-1]) == {-9}
    assert len(results) > (12 if place == "elsewhere" else 8)
    expected = [OLD, NEW] if place == "elsewhere" else [OLD]
    answers = [answer(directory / place / "out.onnx") for directory in directories[: len(results)]]
    changes = [next(i for i, weights in enumerate(expected) if np.array_equal(got, weights)) for got in answers]
    # Old until some point, new from there on; and the new one only once the run that was not killed is near.
    assert changes == sorted(changes)
    assert (changes[0], changes[-1]) == (0, len(expected) - 1)
    for directory in directories[: len(results)]:
        _save(directory, place)
        assert np.array_equal(answer(directory / place / "out.onnx"), expected[-1])
        # The run after a kill removes what that one left. The data of an earlier output stay (decision 0005).
        left = {path.name for path in (directory / place).iterdir()}
        assert not [name for name in left if name.startswith(".")]
        assert len(left) == 3


def command(directory: Path) -> None:
    options = ("--force", "--no-validate", "--report", str(directory / "r.json"))
    main([str(directory / "model.onnx"), "-o", str(directory / "out.onnx"), *options])


@pytest.mark.sample(0)
@pytest.mark.parametrize(("by", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_output_and_report_of_a_command_are_old_or_new(by: int, code: int, tmp_path: Path) -> None:
    directories = [tmp_path / str(point) for point in range(POINTS)]
    for directory in directories:
        directory.mkdir()
        onnx.save(mlp(SILU), directory / "model.onnx")
        (directory / "out.onnx").write_bytes(b"old")
    results = killed_everywhere(command, directories, every=3, by=by)
    assert (results[-1], set(results[:-1])) == (0, {code})
    assert len(results) > 4
    outputs = [(directory / "out.onnx").read_bytes() for directory in directories[: len(results)]]
    assert {*outputs} == {b"old", outputs[-1]}
    for directory in directories[: len(results)]:
        if (directory / "r.json").exists():
            assert json.loads((directory / "r.json").read_text(encoding="utf-8"))["exit_status"] == 0
        if by != signal.SIGKILL:  # such a run cleans up itself
            assert not [path.name for path in directory.iterdir() if path.name.startswith(".")]
        with pytest.raises(SystemExit, match="0"):
            command(directory)
        assert {path.name for path in directory.iterdir()} == {"model.onnx", "out.onnx", "r.json"}
