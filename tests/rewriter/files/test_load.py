import os
import re
from contextlib import suppress
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto

from rewriter.errors import ModelError
from rewriter.files.load import MAX_FILE, load_model, read_tensor
from tests.rewriter.files.conftest import WEIGHTS, make_external

# Every kind of place a tensor can hide in, small enough to cut at every byte.
SMALL = """<ir_version: 10, opset_import: ["": 17, "local": 1]>
g (float[2] x, bool c) => (float[2] y) <float[2] w = {1, 2}, int64[1] i = {3}> {
  k = Constant <value = float[2] {3, 4}> ()
  a = Add(x, w)
  b = local.twice(a)
  y = If(c) <then_branch = t () => (float[2] o) { o = Add(b, k) },
             else_branch = e () => (float[2] o) { o = Neg(b) }>
}
<domain: "local", opset_import: ["": 17]> twice (p) => (q) { q = Add(p, p) }"""


def test_path_gives_an_absolute_path(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(source.parent)
    model = load_model("model.onnx")
    assert (model.path, model.base_dir) == (source, source.parent)
    assert [ref.path for ref in model.external] == [source.parent / "w.bin"]
    assert model.proto.graph.initializer[0].data_location == TensorProto.EXTERNAL
    assert model.size == source.stat().st_size + WEIGHTS.nbytes


def test_proto_in_memory_is_used_as_it_is(inline_model: onnx.ModelProto) -> None:
    model = load_model(inline_model)
    assert model.proto is inline_model
    assert (model.path, model.base_dir, model.external) == (None, None, ())
    assert model.size == len(inline_model.SerializeToString())


def test_proto_in_memory_with_external_data_is_refused() -> None:
    with pytest.raises(ModelError, match="pass the path of the model instead"):
        load_model(make_external([("location", "w.bin")]))


CONTENTS = {
    "empty": (b"", "is empty; download"),
    "text": (b"hello world\n" * 50, "a text file, not an ONNX model (it starts with 'hello world"),
    "text with accents": (b"caf\xc3\xa9 text", "not a readable ONNX model"),
    "a long text": (b"x" * 600, f"a text file, not an ONNX model (it starts with '{'x' * 40}'); pass the .onnx file"),
    "a NUL after the part that is looked at": (b"x" * 512 + b"\x00", "a text file"),
    "a NUL before its end": (b"x" * 511 + b"\x00", "not a readable ONNX model"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "run `git lfs pull`"),
    "zip": (b"PK\x03\x04" + bytes(100), "a zip archive"),
    "gzip": (b"\x1f\x8b\x08" + bytes(100), "decompress it first"),
    "ort": (b"\x20\x00\x00\x00ORTM" + bytes(100), "in the ORT format"),
    "tflite": (b"\x1c\x00\x00\x00TFL3" + bytes(100), "a TensorFlow Lite model"),
    "safetensors": (
        b'\x40\0\0\0\0\0\0\0{"w":{"dtype":"F32"',
        "a safetensors file, weights without a graph; export the",
    ),
    "hdf5": (b"\x89HDF\r\n\x1a\n" + bytes(100), "an HDF5 file"),
    "noise": (bytes(range(255, 0, -1)), "not a readable ONNX model (truncated or damaged)"),
    "no graph": (b"\x08\x08", "not a readable ONNX model (it has no graph)"),
}


@pytest.mark.parametrize(("content", "reason"), CONTENTS.values(), ids=CONTENTS.keys())
def test_files_that_are_not_models(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "model\n\x1b[31m.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=re.escape(reason)) as caught:
        load_model(path)
    assert str(caught.value).isprintable()


def test_things_that_are_no_files_or_too_large(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "to-fifo").symlink_to("fifo")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "model.onnx").touch()
    (tmp_path / "two-gigabytes").touch()
    os.truncate(tmp_path / "two-gigabytes", MAX_FILE + 1)
    for name, reason in {
        "": "is a directory; pass the .onnx file in it",
        "fifo": "not a regular file",
        "to-fifo": "not a regular file",
        "/dev/null": "not a regular file",
        "/dev/zero": "not a regular file",
        "missing.onnx": "does not exist; check the path",
        "modle.onnx": "does not exist; did you mean",
        "dangling": "does not exist",
        "loop": "cannot be read",
        "x" * 300: "cannot be read",
        "nul\0": "cannot be read",
        "fifo/model.onnx": "cannot be read",
        "two-gigabytes": "save the model with external data",
    }.items():
        with pytest.raises(ModelError, match=reason) as caught:
            load_model(tmp_path / name)
        assert str(caught.value).isprintable(), name


def test_file_swapped_for_a_fifo_after_the_look(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_file = os.open

    def swap(path: Path, flags: int) -> int:
        path.unlink()
        os.mkfifo(path)
        return open_file(path, flags)

    monkeypatch.setattr(os, "open", swap)
    with pytest.raises(ModelError, match="not a regular file"):
        load_model(source)


@pytest.mark.parametrize("by", [-1, 1])
def test_a_file_that_grows_or_shrinks_while_it_is_read(by: int, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = os.fstat

    def earlier(handle: int) -> os.stat_result:
        fields = list(looked(handle))
        fields[6] += by
        return os.stat_result(fields)

    monkeypatch.setattr("os.fstat", earlier)
    with pytest.raises(ModelError, match="changed while it was read; run again when nothing writes to it"):
        load_model(source)


def test_linked_model_reads_data_beside_the_link(source: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    link = snapshot / "model.onnx"
    link.symlink_to(source)
    with pytest.raises(ModelError, match=r"external data 'w\.bin'.*beside the model"):
        load_model(link)
    (snapshot / "w.bin").symlink_to(source.parent / "w.bin")
    with pytest.raises(ModelError, match=r"is or lies behind a symbolic link; copy the model with its data \(`cp -rL"):
        load_model(link)
    (snapshot / "w.bin").unlink()
    (snapshot / "w.bin").write_bytes(WEIGHTS.tobytes())
    model = load_model(link)
    assert (model.path, model.base_dir) == (link, snapshot)


def test_external_tensors_are_found_wherever_they_hide(tmp_path: Path) -> None:
    def external(name: str) -> TensorProto:
        tensor = TensorProto(name=name, data_type=TensorProto.INT64, dims=[1], data_location=TensorProto.EXTERNAL)
        tensor.external_data.add(key="location", value="w.bin")
        return tensor

    def sparse(name: str) -> onnx.SparseTensorProto:
        return onnx.SparseTensorProto(values=external(f"{name} values"), indices=external(f"{name} indices"), dims=[9])

    model = onnx.parser.parse_model(SMALL)
    branch = model.graph.node[-1].attribute[0].g
    nodes = (model.graph.node[0], branch.node[0], model.functions[0].node[0])
    for node in nodes:
        node.op_type = "Unheard"  # onnx's checker would not know the attributes
    for name, attributes in {
        "constant": nodes[0].attribute,
        "subgraph constant": nodes[1].attribute,
        "function constant": nodes[2].attribute,
        "function default": model.functions[0].attribute_proto,
    }.items():
        attributes.add(name="one", t=external(name))
        attributes.add(name="many", tensors=[external(f"{name} list")])
        attributes.add(name="sparse", sparse_tensor=sparse(name), sparse_tensors=[sparse(f"{name} list")])
    model.graph.initializer.append(external("initializer"))
    model.graph.sparse_initializer.append(sparse("sparse"))
    branch.initializer.append(external("subgraph initializer"))
    model.training_info.add().algorithm.initializer.append(external("training"))
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    (tmp_path / "w.bin").write_bytes(bytes(8))
    assert len(load_model(path).external) == 4 * 6 + 5
    (tmp_path / "w.bin").unlink()
    with pytest.raises(ModelError, match="put the data file beside the model"):
        load_model(path)


ARRAYS = {
    "float": np.array([[1.5, -2], [np.inf, 0]], np.float32),
    "scalar": np.array(3.0, np.float64),
    "no elements": np.zeros((0, 3), np.float16),
    "integers": np.array([-1, 2**62], np.int64),
    "bool": np.array([True, False]),
    "complex": np.array([1 + 2j], np.complex64),
    "bfloat16": np.array([1, 2, 3], ml_dtypes.bfloat16),
    "float8": np.array([1, 2], ml_dtypes.float8_e4m3fn),
    "int4": np.array([1, -2, 7], ml_dtypes.int4),
}


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS.keys())
@pytest.mark.parametrize("place", ["raw", "typed", "external"])
def test_read_tensor(array: np.ndarray, place: str, tmp_path: Path) -> None:
    tensor = onnx.numpy_helper.from_array(array, "w")
    if place == "typed":
        tensor = onnx.helper.make_tensor("w", tensor.data_type, array.shape, array.flatten())
        assert not tensor.HasField("raw_data")
    if place == "external":
        (tmp_path / "w.bin").write_bytes(tensor.raw_data)
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="w.bin")
    model = onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 17]> g (float[1] x) => (float[1] x) {}')
    model.graph.initializer.append(tensor)
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    loaded = load_model(path)
    result = read_tensor(loaded, loaded.proto.graph.initializer[0])
    assert (result.dtype, result.shape) == (array.dtype, array.shape)
    assert result.tobytes() == array.tobytes()


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (TensorProto(data_type=TensorProto.STRING, dims=[1], string_data=[b"\xff"]), "outside its element type"),
        (TensorProto(data_type=TensorProto.FLOAT, dims=[2], raw_data=b"1234"), "4 bytes of raw data"),
        (TensorProto(data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL), "pass the path"),
    ],
)
def test_read_tensor_refuses(tensor: TensorProto, reason: str, inline_model: onnx.ModelProto) -> None:
    with pytest.raises(ModelError, match=reason):
        read_tensor(load_model(inline_model), tensor)


def test_truncation_at_every_byte(tmp_path: Path) -> None:
    """A model that is cut at the end of a field and still sound is a model; few cuts are."""
    data, path, loaded = onnx.parser.parse_model(SMALL).SerializeToString(), tmp_path / "model.onnx", 0
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        with suppress(ModelError):
            model = load_model(path)
            loaded += 1
            for tensor in model.proto.graph.initializer:
                read_tensor(model, tensor)
    assert 1 <= loaded <= 4
