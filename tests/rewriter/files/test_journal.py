"""What a killed run left is removed by the next run for the same OUT, and nothing else is."""

from __future__ import annotations

import os
from pathlib import Path

import onnx
import pytest

from rewriter.files.journal import Journal, journal, sweep
from rewriter.files.load import load_model
from rewriter.files.save import staged_output

pytest.importorskip("fcntl")

HIDDEN, DATA = ".rewrite-0123456789abcdef.onnx", "out-0123456789ab.data"


def killed(out: Path, *names: str, committed: bool = False) -> None:
    """A run that made these files and was killed: its lock is gone, its journal is there."""
    before = set(out.parent.glob(".rewrite-*.journal"))
    with journal(out) as made:
        for name in names:
            made.append(out.with_name(name))
            out.with_name(name).write_bytes(b"left")
        if committed:
            made.commit()
        (path,) = set(out.parent.glob(".rewrite-*.journal")) - before
        content = path.read_bytes()
    path.write_bytes(content)


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"
    killed(out, HIDDEN, DATA)
    assert len(names(tmp_path)) == 3
    sweep(tmp_path / "other.onnx")
    assert len(names(tmp_path)) == 3, "the journal of another output is not ours"
    sweep(out)
    assert names(tmp_path) == set()


def test_data_of_a_committed_output_stay(tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"
    killed(out, HIDDEN, DATA, committed=True)
    sweep(out)
    assert names(tmp_path) == {DATA}


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
        # While a run goes on, a killed one's data may be what it refers to.
        killed(out, HIDDEN, DATA)
        sweep(out)
        assert names(out.parent) == before | {DATA}
        staged.commit()
    assert load_model(out).external
    assert {name for name in names(out.parent) if name.startswith(".")} == set()


@pytest.mark.parametrize(
    "name",
    [
        "../victim.onnx",
        "../../victim",
        "model.onnx",
        "mine.data",
        ".rewrite-x.onnx",
        ".rewrite-0123456789abcdef.onnx/..",
        "",
    ],
)
def test_a_forged_journal_removes_nothing(name: str, tmp_path: Path) -> None:
    room = tmp_path / "room"
    room.mkdir()
    out = room / "out.onnx"
    for victim in (tmp_path / "victim.onnx", room / "model.onnx", room / "mine.data", room / ".rewrite-x.onnx"):
        victim.write_bytes(b"precious")
    with journal(out) as made:
        made._write(name)
        (path,) = room.glob(".rewrite-*.journal")
        content = path.read_bytes()
    path.write_bytes(content)
    sweep(out)
    assert names(room) == {"model.onnx", "mine.data", ".rewrite-x.onnx"}
    assert (tmp_path / "victim.onnx").exists()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"
    killed(out, HIDDEN)
    (path,) = tmp_path.glob(".rewrite-*.journal")
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    sweep(out)
    assert (tmp_path / HIDDEN).exists()


def test_without_locks_nothing_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewriter.files.journal._locked", lambda _: False)
    killed(tmp_path / "out.onnx", HIDDEN)
    sweep(tmp_path / "out.onnx")
    assert HIDDEN in names(tmp_path)


def test_names_that_are_no_text(tmp_path: Path, inline_model: onnx.ModelProto) -> None:
    out = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.onnx"))
    path = tmp_path / "in.onnx"
    onnx.save(inline_model, path)
    model = load_model(path)
    with staged_output(model.proto, out, source=model, force=False) as staged:
        staged.commit()
    assert names(tmp_path) == {"in.onnx", out.name}
    made = Journal()
    made.append(out)
    assert made.paths == [out]


def test_no_journal_stays_open(tmp_path: Path) -> None:
    """Neither of runs that were killed nor of those that go on."""
    out = tmp_path / "out.onnx"

    def opened() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = opened()
    with journal(out):
        inside = opened()
        for _ in range(3):
            killed(out, HIDDEN, DATA)
            sweep(out)
            assert opened() == inside
    sweep(out)
    assert opened() == before
