"""Model files and models in memory of each kind: what is read, and what a result is handed back as."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from rewriter.errors import ModelError
from rewriter.files.external import ExternalRef
from rewriter.files.load import external_bytes, like, load_model
from rewriter.files.modelfile import TOO_LARGE, byte_size, parse_model, read_model

TEXT = '<ir_version: 8, opset_import: ["": 17]> g (float[32768] x) => (float[32768] out) { out = Add(x, w) }'


def model() -> onnx.ModelProto:
    """A model with a weight of 128 KiB, enough to stay in the file of a mapped model."""
    made = onnx.parser.parse_model(TEXT)
    made.graph.initializer.append(numpy_helper.from_array(np.arange(32768, dtype=np.float32), "w"))
    return made


def test_a_file_is_read_whole_unless_it_is_mapped(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(model().SerializeToString())
    whole, size = read_model(path)
    assert (whole, size) == (model(), path.stat().st_size)
    mapped, same = read_model(path, mapped=True)
    assert same == size
    assert mapped.graph.initializer[0].data_location == onnx.TensorProto.EXTERNAL
    loaded = load_model(path)
    assert (loaded.proto, loaded.path, loaded.base_dir, loaded.external) == (model(), path, tmp_path, ())
    assert (loaded.file_size, loaded.size, loaded.mapped) == (size, size, False)
    kept = load_model(path, mapped=True)
    assert kept.mapped
    assert (kept.size, kept.external) == (size, ())


def test_a_model_in_memory_has_the_size_of_its_file() -> None:
    loaded = load_model(model())
    assert loaded.file_size == loaded.size == len(model().SerializeToString()) == byte_size(model())
    assert (loaded.path, loaded.base_dir, loaded.external, loaded.mapped) == (None, None, (), False)
    assert load_model(model().SerializeToString()).proto == model()


def test_a_model_that_protobuf_cannot_write() -> None:
    class Sizeless:
        def ByteSize(self) -> int:  # noqa: N802 - as protobuf calls it
            raise ValueError("too large")

    with pytest.raises(ModelError) as caught:
        byte_size(Sizeless())  # type: ignore[arg-type]
    assert str(caught.value) == TOO_LARGE


@pytest.mark.parametrize("source", [3, object(), [], None])
def test_other_objects_are_refused(source: object) -> None:
    with pytest.raises(ModelError, match=rf"a model must be a path, .* not {type(source).__name__}$"):
        load_model(source)  # type: ignore[arg-type]


def test_results_are_of_the_kind_of_their_source(tmp_path: Path) -> None:
    """Bytes for bytes; a path and a proto give a proto, the same one."""
    result = model()
    assert like(b"", result) == result.SerializeToString()
    for source in ("model.onnx", tmp_path, onnx.ModelProto()):
        assert like(source, result) is result


def test_models_of_onnx_ir() -> None:
    onnx_ir = pytest.importorskip("onnx_ir", reason="needs the extra ir")
    source = onnx_ir.from_proto(model())
    loaded = load_model(source)
    assert [node.op_type for node in loaded.proto.graph.node] == ["Add"]
    assert loaded.proto.graph.initializer[0].name == "w"
    back = like(source, model())
    assert isinstance(back, onnx_ir.Model)
    assert [node.op_type for node in back.graph] == ["Add"]


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"version https://git-lfs.github.com", "a Git LFS pointer"),
        (b"PK\x03\x04rest", "a zip archive"),
        (b"\x1f\x8b\x00", "gzip-compressed"),
        (b"\x20\x00\x00\x00ORTM\x00", "in the ORT format"),
        (b"\x20\x00\x00\x00TFL3\x00", "a TensorFlow Lite model"),
        (b"\x89HDF\r\n", "an HDF5 file"),
        (b"plain text\n", "a text file, not an ONNX model (it starts with 'plain text"),
        (b"tab\tand\r\n", "a text file"),
        (b"\x00\x01\x02", "not a readable ONNX model (truncated or damaged)"),
        (b"caf\xc3\xa9 text", "not a readable ONNX model"),
        (b"x" * 600, f"a text file, not an ONNX model (it starts with '{'x' * 40}'); pass the .onnx file"),
        (b"x" * 512 + b"\x00", "a text file"),
        (b"x" * 511 + b"\x00", "not a readable ONNX model"),
        (b"", "a text file"),
        (onnx.ModelProto(ir_version=8).SerializeToString(), "not a readable ONNX model (it has no graph)"),
    ],
)
def test_what_a_file_looks_like(data: bytes, what: str) -> None:
    with pytest.raises(ModelError) as caught:
        parse_model(data, "THE FILE")
    assert str(caught.value).startswith(f"THE FILE is {what}")


def test_content_in_place_of_the_data() -> None:
    other = onnx.parser.parse_model(TEXT)
    assert parse_model(model().SerializeToString(), "m", other.SerializeToString()) == other
    assert parse_model(other.SerializeToString(), "m") == other


@pytest.mark.parametrize(
    ("ranges", "total"),
    [
        ([], 0),
        ([("a", 0, 10)], 10),
        ([("a", 0, 10), ("a", 0, 10)], 10),
        ([("a", 0, 10), ("a", 5, 10)], 15),
        ([("a", 0, 10), ("a", 10, 5)], 15),
        ([("a", 0, 20), ("a", 5, 5), ("a", 18, 4)], 22),
        ([("a", 100, 10), ("a", 0, 10)], 20),
        ([("a", 0, 10), ("b", 0, 10), ("b", 4, 10)], 24),
        ([("b", 3, 4), ("a", 90, 10)], 14),
        ([("a", 0, 1), ("a", 0, 2), ("a", 2, 0)], 2),
    ],
)
def test_bytes_are_counted_once(ranges: list[tuple[str, int, int]], total: int) -> None:
    references = tuple(ExternalRef("w", name, Path("/", name), offset, length) for name, offset, length in ranges)
    assert external_bytes(references) == total


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gone.onnx", "does not exist; check the path (a link may point to nothing)"),
        ("modle.onnx", "does not exist; did you mean '*/model.onnx'?"),
        ("-", "does not exist; only `rewrite` and `rewrite inspect` read standard input: give the path of a file"),
        ("elsewhere/model.onnx", "does not exist; check the path (a link may point to nothing)"),
        ("x" * 300, "cannot be read: File name too long; check the path and the disk"),
        ("model.onnx/inside", "cannot be read: Not a directory; check the path and the disk"),
        ("a\0b", "cannot be read: the name cannot be used; check the path and the disk"),
        ("folder", "is a directory; pass the .onnx file in it"),
        ("empty.onnx", "is empty; download or export the model again"),
    ],
)
def test_paths_that_are_no_models(name: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(model().SerializeToString())
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.onnx").touch()
    with pytest.raises(ModelError) as caught:
        read_model(tmp_path / name)
    # Long paths are shortened in the middle.
    for part in said.split("*"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError(13, "Permission denied"), "may not be read: permission denied; change its mode or copy it"),
        (OSError(5, "Input/output error"), "cannot be read: Input/output error; check the path and the disk"),
    ],
)
def test_what_the_system_refuses(error: OSError, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.onnx").write_bytes(model().SerializeToString())

    def refuse(*_: object) -> int:
        raise error

    monkeypatch.setattr("rewriter.files.modelfile.os.open", refuse)
    with pytest.raises(ModelError, match=said):
        read_model(tmp_path / "model.onnx")


@pytest.mark.parametrize("size", [-1, 1])
def test_a_file_that_changes_while_it_is_read(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(model().SerializeToString())
    fstat = os.fstat

    def other(handle: int) -> os.stat_result:
        found = list(fstat(handle))
        found[6] += size
        return os.stat_result(found)

    monkeypatch.setattr("rewriter.files.modelfile.os.fstat", other)
    with pytest.raises(ModelError, match="changed while it was read; run again when nothing writes to it"):
        read_model(path)
