"""What a killed run left is removed by the next run for the same OUT, and nothing else is."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from rewriter.files.atomic import FOLDER, hidden, sweep, write_text
from rewriter.files.load import load_model
from rewriter.files.save import staged_output
from tests.cases import names

SUFFIXES = (".onnx", ".data", ".tmp", FOLDER)


def killed(out: Path, suffix: str) -> Path:
    """What a run that was killed left: its lock is gone, its file is there."""
    copy = out.with_name("copy")
    with hidden(out, suffix) as (path, _):
        (shutil.copytree if path.is_dir() else shutil.copyfile)(path, copy)
    return copy.rename(path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_a_killed_run_left_is_removed(suffix: str, tmp_path: Path) -> None:
    left = killed(tmp_path / "out.onnx", suffix)
    sweep(tmp_path / "other.onnx")
    assert left.exists(), "what another output left is not ours"
    write_text(tmp_path / "out.onnx", "new")
    assert names(tmp_path) == {"out.onnx"}


def test_a_run_that_goes_on_is_left_alone(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "elsewhere" / "out.onnx"
    out.parent.mkdir()
    model = load_model(source)
    with staged_output(model.proto, out, source=model, force=False) as staged:
        before = names(out.parent)
        sweep(out)
        with staged_output(model.proto, out, source=model, force=False):
            assert before < names(out.parent)
        assert names(out.parent) == before
        staged.commit()
    assert load_model(out).external
    assert {name for name in names(out.parent) if name.startswith(".")} == set()


def test_nothing_else_is_removed(tmp_path: Path) -> None:
    """Neither what merely looks alike, nor what a link points to."""
    out, victim = tmp_path / "out.onnx", tmp_path / "victim"
    victim.mkdir()
    (victim / "precious").write_bytes(b"x")
    name = killed(out, FOLDER).name
    (tmp_path / name).rmdir()
    (tmp_path / name).symlink_to(victim)
    alike = {f"{name}.mine", name.replace(".rewrite-", "rewrite-"), ".rewrite-0123456789abcdef.onnx"}
    for each in alike:
        (tmp_path / each).touch()
    sweep(out)
    assert names(tmp_path) == {"victim", name, *alike}
    assert names(victim) == {"precious"}


def test_without_locks_nothing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = killed(tmp_path / "out.onnx", ".onnx")

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("rewriter.files.atomic.fcntl.flock", refuse)
    write_text(tmp_path / "out.onnx", "new")
    assert names(tmp_path) == {"out.onnx", left.name}


def test_a_file_that_was_swept_before_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[bool] = []

    def exists(path: Path) -> bool:
        found.append(len(found) > 0)
        if not found[-1]:
            path.unlink()
        return found[-1]

    monkeypatch.setattr("rewriter.files.atomic.os.path.lexists", exists)
    with hidden(tmp_path / "out.onnx", ".tmp") as (path, _):
        assert path.exists()
    assert found == [False, True]
