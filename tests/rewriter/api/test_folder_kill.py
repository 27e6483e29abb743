"""Kill -9 while a folder is converted: it appears whole or not at all, and the next run removes the rest."""

import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest

from rewriter import rewrite
from rewriter.files.atomic import check_new_folder, copied_folder, sweep
from tests.faults.killing import killed_everywhere
from tests.textmodels import SILU, mlp

WHOLE = {"model.onnx", "sub", "sub/same.onnx", "sub/same.data", "config.json", "attnonly-report.json"}


def convert(directory: Path) -> None:
    rewrite(directory / "in", directory / "out", validate=False)


def prepare(directory: Path) -> None:
    (directory / "in" / "sub").mkdir(parents=True)
    (directory / "in" / "config.json").write_text("{}", encoding="utf-8")
    onnx.save(mlp(SILU), directory / "in" / "model.onnx")
    external: dict[str, Any] = {"save_as_external_data": True, "location": "same.data", "size_threshold": 0}
    onnx.save(mlp("h = Identity(y)"), directory / "in" / "sub" / "same.onnx", **external)


def below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.slow
def test_kill_at_every_third_point(tmp_path: Path) -> None:
    directories = [tmp_path / str(point) for point in range(70)]
    for directory in directories:
        prepare(directory)
    codes = killed_everywhere(convert, directories, every=3)
    assert codes[-1] == 0, "not every point was reached: give more directories"
    assert set(codes[:-1]) == {-9}
    states = set()
    for directory in directories[: len(codes)]:
        left = {path.name for path in directory.iterdir()} - {"in"}
        states.add((any(name.endswith(".folder") for name in left), "out" in left))
        if "out" in left:
            assert below(directory / "out") == WHOLE
            # A folder is never replaced: its name is free again only once the user has removed it.
            shutil.rmtree(directory / "out")
        convert(directory)
        assert {path.name for path in directory.iterdir()} == {"in", "out"}
        assert below(directory / "out") == WHOLE
    # Killed before there was a folder, in the middle, and when it had its name.
    assert states == {(False, False), (True, False), (False, True)}


def test_the_next_run_removes_the_folder_of_a_killed_one(tmp_path: Path) -> None:
    out, copy = tmp_path / "out", tmp_path / "copy"
    with copied_folder(tmp_path, (), out) as staged:
        (staged / "onnx").mkdir()
        (staged / "onnx" / "model.onnx").write_bytes(b"half")
        shutil.copytree(staged, copy)
    copy.rename(staged)
    sweep(tmp_path / "other")
    assert below(staged) == {"onnx", "onnx/model.onnx"}
    check_new_folder(out, tmp_path / "in")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_another_run_stays(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with copied_folder(tmp_path, (), out) as running:
        (running / "model.onnx").write_bytes(b"half")
        sweep(out)
        with copied_folder(tmp_path, (), out) as second:
            assert second != running
        sweep(out)
        assert below(running) == {"model.onnx"}
    assert list(tmp_path.iterdir()) == []
