import io
import os
import re
import socket
from pathlib import Path

import numpy as np
import onnx
import pytest

from rewriter.errors import ModelError
from rewriter.files.load import load_model, read_tensor
from rewriter.files.tensors import ExternalRef, collect_external, open_inside, read_external
from tests.rewriter.files.conftest import WEIGHTS, answer, make_external, refuse

SIZE = WEIGHTS.nbytes


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A directory with one of everything that a location could name."""
    base = tmp_path / "base"
    (base / "sub").mkdir(parents=True)
    data = WEIGHTS.tobytes()
    for name in ("w.bin", "a b-ü.bin", "sub/w.bin", "one.bin", "../outside.bin"):
        (base / name).write_bytes(data)
    (base / "long.bin").write_bytes(data[:64] + data + data[:64])
    (base / "half.bin").write_bytes(data[: SIZE // 2])
    (base / "empty.bin").touch()
    (base / "link.bin").symlink_to("w.bin")
    (base / "link-out.bin").symlink_to(tmp_path / "outside.bin")
    (base / "dangling.bin").symlink_to("nowhere")
    (base / "linked-sub").symlink_to("sub")
    (base / "two.bin").hardlink_to(base / "one.bin")
    os.mkfifo(base / "fifo")
    return base


ACCEPTED = {
    "location only": [("location", "w.bin")],
    "leading dot": [("location", "./w.bin")],
    "subdirectory": [("location", "sub/w.bin")],
    "blank and umlaut": [("location", "a b-ü.bin")],
    "all keys": [("location", "w.bin"), ("offset", "0"), ("length", str(SIZE)), ("checksum", "unchecked")],
    "offset and length": [("location", "long.bin"), ("offset", "64"), ("length", str(SIZE))],
    "leading zeros": [("location", "w.bin"), ("offset", "000"), ("length", f"0{SIZE}")],
}


@pytest.mark.parametrize("entries", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_sound_references_load_here_and_in_onnxruntime(entries: list[tuple[str, str]], base: Path) -> None:
    path = base / "model.onnx"
    path.write_bytes(make_external(entries).SerializeToString())
    model = load_model(path)
    (ref,) = model.external
    offset = int(dict(entries).get("offset", 0))
    data = base / dict(entries)["location"]
    assert ref == ExternalRef("W", dict(entries)["location"], data, offset, SIZE)
    assert np.array_equal(read_tensor(model, model.proto.graph.initializer[0]), WEIGHTS)
    assert np.array_equal(answer(path), WEIGHTS)


_PLAIN = [
    *("", ".", "./", "..", "../outside.bin", "a/../../outside.bin", "sub/../w.bin", "sub/./w.bin", "sub//w.bin"),
    *("w.bin/", "/etc/passwd", "//host/share/w.bin", "\\\\host\\share\\w.bin", "sub\\w.bin", "..\\outside.bin"),
    *("C:/w.bin", "c:w.bin", "w.bin\0.txt"),
]

LOCATIONS = {
    **dict.fromkeys(_PLAIN, "is not a plain relative path below the model's directory"),
    "missing.bin": "tensor 'W': No such file or directory; put the data file beside the model",
    "missing/w.bin": "put the data file beside the model",
    "x" * 300: "tensor 'W': File name too long; put the data file beside the model",
    "sub": "is not a regular file",
    "w.bin/w.bin": "Not a directory; put the data file beside the model",
    "fifo": "is not a regular file",
    "socket": "No such device or address",
    "link.bin": "is or lies behind a symbolic link; copy the model with its data (`cp -rL",
    "link-out.bin": "is or lies behind a symbolic link",
    "dangling.bin": "is or lies behind a symbolic link",
    "linked-sub/w.bin": "is or lies behind a symbolic link",
    "two.bin": "2 hard links",
    "half.bin": "8192 bytes of external data where its dimensions need 16384",
    "empty.bin": "0 bytes of external data where its dimensions need 16384",
    "long.bin": "16512 bytes of external data where its dimensions need 16384",
}


@pytest.mark.parametrize(("location", "reason"), LOCATIONS.items(), ids=[repr(name)[:30] for name in LOCATIONS])
def test_unsafe_locations_are_refused(location: str, reason: str, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(base)  # the name of a socket is short: the limit is 108 bytes
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        path = base / "model.onnx"
        path.write_bytes(make_external([("location", location)]).SerializeToString())
        with pytest.raises(ModelError, match=re.escape(reason)) as caught:
            load_model(path)
    assert str(caught.value).isprintable()


ENTRIES: dict[str, tuple[dict[str, str] | list[tuple[str, str]], str]] = {
    "no location": ([("offset", "0")], "keys 'offset'; onnxruntime loads location"),
    "unknown key": ({"mode": "rw"}, "keys 'location', 'mode'"),
    "basepath": ({"basepath": "/etc"}, "keys 'location', 'basepath'; onnxruntime loads"),
    "twice": ([("location", "x"), ("location", "w.bin")], "keys 'location', 'location'"),
    "negative offset": ({"offset": "-4"}, "offset '-4', which is not a whole number"),
    "spaces": ({"offset": " 0"}, "offset ' 0'"),
    "newline": ({"length": "4096\n"}, r"length '4096\n'"),
    "superscript": ({"offset": "²"}, "offset '²'"),
    "2**63": ({"offset": str(2**63)}, "offset '9223372036854775808'"),
    "endless": ({"offset": "9" * 5000}, "offset '9999"),
    "sum past 2**63": ({"offset": str(2**63 - 1), "length": str(SIZE)}, "which has 16384; the data file is incomplete"),
    "length past the end": ({"offset": "4", "length": str(SIZE)}, "which has 16384"),
    "long length": ({"location": "long.bin", "length": "4100"}, "4100 bytes of external data where"),
}


@pytest.mark.parametrize(("entries", "reason"), ENTRIES.values(), ids=ENTRIES.keys())
def test_bad_entries_are_refused(entries: dict[str, str] | list[tuple[str, str]], reason: str, base: Path) -> None:
    listed = entries if isinstance(entries, list) else list({"location": "w.bin", **entries}.items())
    with pytest.raises(ModelError, match=re.escape(reason)) as caught:
        collect_external(make_external(listed), base)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (onnx.TensorProto(raw_data=b"1234"), "both inline and external"),
        (onnx.TensorProto(float_data=[1.0]), "both inline and external"),
        (onnx.TensorProto(data_type=onnx.TensorProto.STRING), "string tensor 'W' cannot"),
        (onnx.TensorProto(data_type=99), "unknown element type 99"),
        (onnx.TensorProto(dims=[1024, -1]), "negative dimension -1"),
        (onnx.TensorProto(dims=[2**62, 2**62]), "too large to exist"),
    ],
)
def test_tensors_that_cannot_be_external_are_refused(changes: onnx.TensorProto, reason: str, base: Path) -> None:
    model = make_external([("location", "w.bin")])
    (tensor,) = model.graph.initializer
    if changes.dims:
        tensor.ClearField("dims")
    tensor.MergeFrom(changes)
    with pytest.raises(ModelError, match=reason):
        collect_external(model, base)


def test_location_that_is_not_utf8_is_refused(base: Path) -> None:
    data = make_external([("location", "w.bin")]).SerializeToString().replace(b"w.bin", b"w.b\xff\xfe")
    (base / "model.onnx").write_bytes(data)
    with pytest.raises(ModelError, match="is not a plain relative path"):
        load_model(base / "model.onnx")


def test_file_is_checked_again_when_it_is_read(source: Path) -> None:
    model = load_model(source)
    tensor = model.proto.graph.initializer[0]
    data = source.parent / "w.bin"
    os.truncate(data, SIZE - 1)
    with pytest.raises(ModelError, match="16383 bytes of external data"):
        read_tensor(model, tensor)
    data.unlink()
    data.symlink_to("/etc/passwd")
    with pytest.raises(ModelError, match="is or lies behind a symbolic link"):
        read_tensor(model, tensor)


def test_link_swapped_in_after_the_look_is_refused(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(source)
    data = source.parent / "w.bin"
    (source.parent / "other.bin").write_bytes(WEIGHTS.tobytes())
    open_file = os.open

    def swap(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if path == "w.bin":
            data.unlink()
            data.symlink_to("other.bin")
        return open_file(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", swap)
    with pytest.raises(ModelError, match="is or lies behind a symbolic link"):
        read_tensor(model, model.proto.graph.initializer[0])


@pytest.mark.parametrize(
    ("error", "reason"), [(OSError(5, "Input/output error"), "Input/output error"), (None, "shrank")]
)
def test_disk_failures_while_reading(
    error: OSError | None, reason: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(source)

    class Failing(io.FileIO):
        def readinto(self, _: object) -> int:
            if error:
                raise error
            return 0

    monkeypatch.setattr(os, "fdopen", Failing)
    with pytest.raises(ModelError, match=reason):
        read_external(model.proto.graph.initializer[0], source.parent)


def test_no_file_descriptor_is_left_open(base: Path) -> None:
    before = len([*Path("/dev/fd").iterdir()])
    for location in LOCATIONS:
        with pytest.raises(ModelError):
            collect_external(make_external([("location", location)]), base)
    collect_external(make_external([("location", "sub/w.bin")]), base)
    assert len([*Path("/dev/fd").iterdir()]) == before


def test_four_gigabytes_are_checked_without_reading(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.truncate(source.parent / "w.bin", 2**32)  # sparse: takes no space
    proto = onnx.load(source, load_external_data=False)
    proto.graph.initializer[0].dims[:] = [2**30]
    source.write_bytes(proto.SerializeToString())

    monkeypatch.setattr("rewriter.files.load.read_external", refuse)
    model = load_model(source)
    assert (model.external[0].length, model.size) == (2**32, 2**32 + source.stat().st_size)


def test_a_directory_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        open_inside(tmp_path / "gone", "w.bin", "w")
    assert str(caught.value) == (
        f"cannot open the model's directory '{tmp_path / 'gone'}': No such file or directory; check its path and mode"
    )
    with pytest.raises(ModelError, match="its name cannot be used here; check its path and mode"):
        open_inside(tmp_path / "a\0b", "w.bin", "w")
