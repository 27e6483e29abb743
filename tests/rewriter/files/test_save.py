import errno
import hashlib
import os
import resource
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from rewriter.errors import ModelError, UsageError
from rewriter.files.load import LoadedModel, load_model
from rewriter.files.save import check_output, staged_output
from tests.cases import names
from tests.rewriter.files.conftest import WEIGHTS, answer, make_external, refuse

DIGEST = hashlib.sha256(WEIGHTS.tobytes()).hexdigest()[:12]


def save(
    model: LoadedModel, out: Path, *, force: bool = False, before_commit: Callable[[], object] = lambda: None
) -> None:
    with staged_output(model.proto, out, source=model, force=force) as staged:
        before_commit()
        staged.commit()


@pytest.fixture
def inline(tmp_path: Path, inline_model: onnx.ModelProto) -> LoadedModel:
    """`y = x + W`, W inline, in the file inline.onnx."""
    (tmp_path / "inline.onnx").write_bytes(inline_model.SerializeToString())
    return load_model(tmp_path / "inline.onnx")


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """An empty directory on the same file system as the source."""
    (tmp_path / "elsewhere").mkdir()
    return tmp_path / "elsewhere"


def test_staged_file_is_complete_before_commit(inline: LoadedModel, elsewhere: Path) -> None:
    out = elsewhere / "out"  # any suffix will do
    with staged_output(inline.proto, out, source=inline, force=False) as staged:
        assert staged.path.parent == elsewhere
        assert (staged.path.name[0], staged.path.suffix) == (".", ".onnx")
        assert np.array_equal(answer(staged.path), WEIGHTS)
        assert staged.size == staged.path.stat().st_size == load_model(staged.path).size
        assert not out.exists()
        staged.commit()
        assert names(elsewhere) == {"out"}
    assert np.array_equal(answer(out), WEIGHTS)
    assert out.read_bytes() == inline.proto.SerializeToString(deterministic=True)


def test_permissions_follow_the_umask(inline: LoadedModel, elsewhere: Path) -> None:
    before = os.umask(0o027)
    try:
        save(inline, elsewhere / "out.onnx")
    finally:
        os.umask(before)
    assert stat.S_IMODE((elsewhere / "out.onnx").stat().st_mode) == 0o640


class Stop(BaseException):
    """Any exception that is not an Exception, as KeyboardInterrupt is."""


@pytest.mark.parametrize("stop", [None, ValueError, KeyboardInterrupt, SystemExit, Stop])
@pytest.mark.parametrize("committed", [False, True])
def test_what_a_block_leaves(
    stop: type[BaseException] | None, source: Path, elsewhere: Path, *, committed: bool
) -> None:
    model = load_model(source)
    (elsewhere / "mine.data").touch()

    def block() -> None:
        with staged_output(model.proto, elsewhere / "out.onnx", source=model, force=False) as staged:
            assert len(names(elsewhere)) == 3  # the model, its data, and mine.data
            if committed:
                staged.commit()
            if stop:
                raise stop

    if stop:
        with pytest.raises(stop):
            block()
    else:
        block()
    made = {"out.onnx", f"out-{DIGEST}.data"} if committed else set()
    assert names(elsewhere) == {"mine.data"} | made


FORBIDDEN: dict[str, tuple[Callable[[Path], object], bool, str]] = {
    "exists": (lambda path: path.write_bytes(b"precious"), False, "exists; pass --force"),
    "link": (lambda path: path.symlink_to("mine.data"), True, "is a symbolic link"),
    "dangling link": (lambda path: path.symlink_to("nowhere"), True, "is a symbolic link"),
    "directory": (Path.mkdir, True, "is a directory"),
    "FIFO": (os.mkfifo, True, "is not a regular file"),
}


@pytest.mark.parametrize(("make", "force", "reason"), FORBIDDEN.values(), ids=FORBIDDEN.keys())
def test_what_may_not_be_replaced(
    make: Callable[[Path], object], reason: str, inline: LoadedModel, elsewhere: Path, *, force: bool
) -> None:
    out = elsewhere / "out\n.onnx"
    (elsewhere / "mine.data").touch()
    with pytest.raises(UsageError, match=reason):
        save(inline, out, force=force, before_commit=lambda: make(out))
    before = names(elsewhere)
    with pytest.raises(UsageError, match=reason) as caught:
        check_output(out, source=inline, force=force)
    assert str(caught.value).isprintable()
    with pytest.raises(UsageError, match=reason):
        save(inline, out, force=force)
    assert names(elsewhere) == before


@pytest.mark.parametrize(
    ("out", "reason"),
    [
        ("missing/out.onnx", "does not exist; create it first"),
        ("inline.onnx/out.onnx", "is not a directory"),
        (".", "is a directory"),
        ("x" * 300, "File name too long; choose a shorter output name"),
        ("nul\0.onnx", "the name cannot be used"),
    ],
)
def test_paths_that_cannot_be_written(out: str, reason: str, inline: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=reason) as caught:
        save(inline, tmp_path / out)
    assert str(caught.value).isprintable()


def test_input_is_never_the_output(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link.onnx").symlink_to(source)
    (tmp_path / "hard.onnx").hardlink_to(source)
    (tmp_path / "linked").symlink_to("source")
    model = load_model(source)
    linked = LoadedModel(model.proto, tmp_path / "link.onnx", tmp_path, (), 0)
    for out in ("source/model.onnx", "source/../source/model.onnx", "link.onnx", "hard.onnx", "linked/model.onnx"):
        for given in (model, linked):
            with pytest.raises(UsageError, match="is the input itself"):
                check_output(tmp_path / out, source=given, force=True)


def test_weights_of_the_input_are_never_the_output(source: Path, tmp_path: Path) -> None:
    model = load_model(source)
    (tmp_path / "hard.bin").hardlink_to(source.parent / "w.bin")
    for out in (source.parent / "w.bin", tmp_path / "hard.bin"):
        with pytest.raises(UsageError, match="holds the weights of the input"):
            check_output(out, source=model, force=True)


def test_same_directory_keeps_references_and_reads_nothing(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source.parent.parent / "alias").symlink_to("source")
    model = load_model(source)

    with monkeypatch.context() as patched:
        patched.setattr("rewriter.files.save.read_external", refuse)
        for function in ("copy_file_range", "sendfile"):
            patched.setattr(os, function, refuse)
        with staged_output(
            model.proto, source.parent.parent / "alias" / "out.onnx", source=model, force=False
        ) as staged:
            assert staged.size == model.size
            staged.commit()
    assert names(source.parent) == {"model.onnx", "w.bin", "out.onnx"}
    assert np.array_equal(answer(source.parent / "out.onnx"), WEIGHTS)


def test_other_directory_gets_the_data_under_its_digest(source: Path, elsewhere: Path) -> None:
    model = load_model(source)
    before = model.proto.SerializeToString()
    with staged_output(model.proto, elsewhere / "out.onnx", source=model, force=False) as staged:
        assert np.array_equal(answer(staged.path), WEIGHTS)
        assert staged.size == load_model(staged.path).size
        staged.commit()
    assert model.proto.SerializeToString() == before
    assert names(elsewhere) == {"out.onnx", f"out-{DIGEST}.data"}
    assert (elsewhere / f"out-{DIGEST}.data").read_bytes() == WEIGHTS.tobytes()
    source.unlink()
    (source.parent / "w.bin").unlink()
    assert np.array_equal(answer(elsewhere / "out.onnx"), WEIGHTS)


def test_second_run_writes_the_same_bytes_and_reuses_the_data(source: Path, elsewhere: Path) -> None:
    model = load_model(source)
    save(model, elsewhere / "out.onnx")
    data = elsewhere / f"out-{DIGEST}.data"
    first, inode = (elsewhere / "out.onnx").read_bytes(), data.stat().st_ino
    (elsewhere / "out-other.data").write_bytes(bytes(WEIGHTS.nbytes))  # same size, other content
    save(load_model(source), elsewhere / "out.onnx", force=True)
    assert (elsewhere / "out.onnx").read_bytes() == first
    assert data.stat().st_ino == inode
    with staged_output(model.proto, elsewhere / "out.onnx", source=model, force=True):
        pass
    assert names(elsewhere) == {"out.onnx", data.name, "out-other.data"}


@pytest.mark.parametrize("kind", ["other content", "other size", "link", "directory"])
def test_data_name_taken_by_something_else(kind: str, source: Path, elsewhere: Path) -> None:
    data = elsewhere / f"out-{DIGEST}.data"
    if kind == "link":
        data.symlink_to(source.parent / "w.bin")
    elif kind == "directory":
        data.mkdir()
    else:
        data.write_bytes(bytes(WEIGHTS.nbytes if kind == "other content" else 3))
    model = load_model(source)
    with pytest.raises(UsageError, match="holds other data than its name says; remove it"):
        save(model, elsewhere / "out.onnx")
    assert names(elsewhere) == {data.name}


def test_data_with_a_second_hard_link_is_replaced(source: Path, elsewhere: Path) -> None:
    data = elsewhere / f"out-{DIGEST}.data"
    data.write_bytes(WEIGHTS.tobytes())
    (elsewhere / "backup").hardlink_to(data)
    save(load_model(source), elsewhere / "out.onnx")
    load_model(elsewhere / "out.onnx")
    assert names(elsewhere) == {"out.onnx", data.name, "backup"}


def test_files_of_the_same_content_become_one(source: Path, elsewhere: Path) -> None:
    (source.parent / "sub").mkdir()
    (source.parent / "sub" / "v.bin").write_bytes(WEIGHTS.tobytes())
    (source.parent / "u.bin").write_bytes(bytes(8) + WEIGHTS.tobytes())
    proto = make_external([("location", "w.bin")])
    for name, offset, location in (("v", "0", "sub/v.bin"), ("v2", "0", "./sub/v.bin"), ("u", "8", "u.bin")):
        tensor = make_external([("location", location), ("offset", offset)]).graph.initializer[0]
        tensor.name = name
        proto.graph.initializer.append(tensor)
    source.write_bytes(proto.SerializeToString())
    save(load_model(source), elsewhere / "out.onnx")
    assert len(names(elsewhere)) == 3
    out = load_model(elsewhere / "out.onnx")
    assert [ref.offset for ref in out.external] == [0, 0, 0, 8]
    assert len({ref.location for ref in out.external}) == 2


@pytest.mark.parametrize("name", ["a\\b.onnx", "C:x.onnx", "nl\n.onnx", "\udcff.onnx", "ü b.onnx", ".onnx", "x.y.onnx"])
def test_odd_output_names_give_locations_that_load(name: str, source: Path, elsewhere: Path) -> None:
    save(load_model(source), elsewhere / name)
    assert load_model(elsewhere / name).external


def test_data_that_turned_unsafe_is_refused(source: Path, elsewhere: Path) -> None:
    model = load_model(source)
    (source.parent / "w.bin").rename(elsewhere.parent / "moved.bin")
    (source.parent / "w.bin").symlink_to("../moved.bin")
    for out in (elsewhere / "out.onnx", source.parent / "out.onnx"):
        with pytest.raises(ModelError, match="is or lies behind a symbolic link"):
            save(model, out)
    assert not names(elsewhere)


@pytest.mark.parametrize("taken", [f"out-{DIGEST}.data", ".rewrite-*"])
def test_files_taken_away_before_commit(source: Path, elsewhere: Path, taken: str) -> None:
    with pytest.raises(UsageError, match=r"was removed before the output was complete; run again|No such file"):
        save(load_model(source), elsewhere / "out.onnx", before_commit=lambda: next(elsewhere.glob(taken)).unlink())
    assert not names(elsewhere)


# The call that fails, after how many that do not, and how: the first of most is for the data, the next for the graph.
CALLS = [
    ("open", 0, errno.ENOSPC),
    ("open", 1, errno.EROFS),
    ("fsync", 0, errno.EIO),
    ("fsync", 1, errno.EDQUOT),
    ("fsync", 2, errno.EIO),
    ("replace", 0, errno.EROFS),
    ("replace", 1, errno.ENOSPC),
]


@pytest.mark.parametrize(("call", "skip", "number"), CALLS)
def test_disk_failures_leave_nothing(
    call: str, skip: int, number: int, source: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = elsewhere / "out.onnx"
    out.write_bytes(b"previous")
    model = load_model(source)
    real: Callable[..., object] = getattr(os, call)
    calls = 0

    def fail(*arguments: object, **options: object) -> object:
        nonlocal calls
        # Only opens that create a file: the checks before them raise other errors.
        if call != "open" or (isinstance(arguments[1], int) and arguments[1] & os.O_CREAT):
            calls += 1
            if calls > skip:
                raise OSError(number, os.strerror(number))
        return real(*arguments, **options)

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(UsageError, match=os.strerror(number)) as caught:
        save(model, out, force=True)
    monkeypatch.undo()
    assert "; " in str(caught.value)
    assert str(caught.value).isprintable()
    assert names(elsewhere) == {"out.onnx"}
    assert out.read_bytes() == b"previous"


@pytest.mark.parametrize("external", [False, True])
def test_file_size_limit(inline: LoadedModel, source: Path, elsewhere: Path, *, external: bool) -> None:
    model = load_model(source) if external else inline
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(UsageError, match="File too large; raise the file size limit"):
            save(model, elsewhere / "out.onnx")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not names(elsewhere)


def test_directory_that_cannot_be_synced_is_tolerated(
    inline: LoadedModel, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def refuse(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", refuse)
    save(inline, elsewhere / "out.onnx")
    assert names(elsewhere) == {"out.onnx"}


def test_two_gigabytes_inline_cannot_be_written(source: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(source)
    monkeypatch.setattr("rewriter.files.save.MAX_FILE", 10)
    with pytest.raises(ModelError, match="2 GiB or more inline"):
        save(model, elsewhere / "out.onnx")
    assert not names(elsewhere)
