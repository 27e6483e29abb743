"""Large weights stay in the model file, and the output holds them inline again."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from rewriter.errors import ModelError
from rewriter.files.load import LoadedModel, load_model, read_tensor
from rewriter.files.save import staged_output
from rewriter.files.tensors import MIN_MAPPED_BYTES, inlined, without_weights
from tests.changes import add_weight

BIG = np.random.default_rng(0).normal(size=(MIN_MAPPED_BYTES // 32, 16)).astype(np.float32)
SMALL = np.arange(16, dtype=np.float32)
TEXT = """<ir_version: 8, opset_import: ["": 17], producer_name: "test">
    g (float[n, k] x) => (float[n, 16] y) { p = MatMul(x, BIG) y = Add(p, SMALL) }"""


def model() -> onnx.ModelProto:
    result = onnx.parser.parse_model(TEXT)
    add_weight(result, "BIG", BIG)
    add_weight(result, "SMALL", SMALL)
    result.graph.doc_string = "after the weights in the file"
    return result


@pytest.fixture
def path(tmp_path: Path) -> Path:
    onnx.save(model(), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def external(loaded: LoadedModel) -> list[str]:
    return [tensor.name for tensor in loaded.proto.graph.initializer if tensor.data_location]


def test_large_weights_stay_in_the_file(path: Path) -> None:
    loaded, plain = load_model(path, mapped=True), load_model(path)
    assert (loaded.mapped, plain.mapped, external(loaded), external(plain)) == (True, False, ["BIG"], [])
    assert loaded.proto.ByteSize() < 1000 < MIN_MAPPED_BYTES < plain.proto.ByteSize()
    assert (loaded.external, loaded.size, loaded.base_dir) == ((), plain.size, path.parent)
    for one, other in zip(loaded.proto.graph.initializer, plain.proto.graph.initializer, strict=True):
        np.testing.assert_array_equal(read_tensor(replace(loaded, lazy=True), one), read_tensor(plain, other))
    del loaded.proto.graph.initializer[:], plain.proto.graph.initializer[:]
    assert loaded.proto == plain.proto


@pytest.mark.parametrize("where", ["beside", "elsewhere"])
def test_the_output_holds_them_inline(path: Path, where: str) -> None:
    loaded = load_model(path, mapped=True)
    folder = path.parent / where if where == "elsewhere" else path.parent
    folder.mkdir(exist_ok=True)
    written = []
    for name in ("one.onnx", "two.onnx"):
        with staged_output(loaded.proto, folder / name, source=loaded, force=False) as staged:
            assert staged.size == staged.path.stat().st_size
            staged.commit()
        written.append((folder / name).read_bytes())
    assert written[0] == written[1]
    assert onnx.ModelProto.FromString(written[0]) == model()
    path.unlink()
    session = ort.InferenceSession(str(folder / "one.onnx"), providers=["CPUExecutionProvider"])
    x = np.ones((1, len(BIG)), np.float32)
    np.testing.assert_allclose(session.run(None, {"x": x})[0], x @ BIG + SMALL, rtol=1e-3, atol=1e-3)


def test_one_weight_is_in_memory_at_a_time(path: Path) -> None:
    loaded = load_model(path, mapped=True)
    size, pieces = inlined(loaded.proto, {"BIG": BIG.nbytes}, lambda tensor: read_tensor(loaded, tensor).tobytes())
    lengths = [len(piece) for piece in pieces]
    assert sum(lengths) == size == path.stat().st_size
    assert max(lengths) == BIG.nbytes
    assert sum(lengths) - BIG.nbytes < 1000


def test_other_data_files_are_still_moved(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "other").mkdir()
    both = model()
    add_weight(both, "MORE", BIG + 1)
    onnx.external_data_helper.set_external_data(both.graph.initializer[2], "more.bin")
    onnx.save(both, tmp_path / "source" / "model.onnx")
    loaded = load_model(tmp_path / "source" / "model.onnx", mapped=True)
    assert external(loaded) == ["BIG", "MORE"]
    assert [ref.tensor for ref in loaded.external] == ["MORE"]
    with staged_output(loaded.proto, tmp_path / "other" / "out.onnx", source=loaded, force=False) as staged:
        staged.commit()
    again = load_model(tmp_path / "other" / "out.onnx")
    assert external(again) == ["MORE"]
    for tensor, expected in zip(again.proto.graph.initializer, (BIG, SMALL, BIG + 1), strict=True):
        np.testing.assert_array_equal(read_tensor(again, tensor), expected)


@pytest.mark.parametrize("kind", ["symbolic link", "hard link", "backslash"])
def test_a_file_that_may_not_hold_external_data_is_loaded_as_a_whole(path: Path, kind: str) -> None:
    other = path.with_name("a\\b.onnx" if kind == "backslash" else "other.onnx")
    if kind == "symbolic link":
        other.symlink_to(path)
    elif kind == "hard link":
        os.link(path, other)
    else:
        path.rename(other)
    loaded = load_model(other, mapped=True)
    assert (loaded.mapped, external(loaded)) == (False, [])
    np.testing.assert_array_equal(read_tensor(loaded, loaded.proto.graph.initializer[0]), BIG)


def test_unsound_weights_are_refused(path: Path) -> None:
    spoiled = model()
    spoiled.graph.initializer[0].float_data.extend([1.0])
    path.write_bytes(spoiled.SerializeToString())
    for choice in (False, True):
        with pytest.raises(ModelError, match=r"'BIG' .* holds values in float_data, raw_data"):
            load_model(path, mapped=choice)


def test_damaged_files_are_left_to_protobuf(path: Path) -> None:
    data = path.read_bytes()
    places = [*range(0, 200, 7), *range(len(data) - 200, len(data), 7)]
    for place in places:
        path.write_bytes(data[:place] or b"\0")
        found = []
        for choice in (False, True):
            try:
                loaded = load_model(path, mapped=choice)
                found.append(str([(each.name, list(each.dims)) for each in loaded.proto.graph.initializer]))
            except ModelError as error:
                found.append(str(error))
        assert found[0] == found[1], place


def weight(size: int = MIN_MAPPED_BYTES, **values: Any) -> onnx.TensorProto:
    return onnx.TensorProto(name="w", data_type=onnx.TensorProto.UINT8, dims=[size], raw_data=bytes(size), **values)


@pytest.mark.parametrize(
    ("tensor", "stays"),
    [
        (weight(MIN_MAPPED_BYTES - 1), False),
        (weight(), True),
        (weight(MIN_MAPPED_BYTES + 1), True),
        (weight(doc_string="about it"), True),
        (weight(metadata_props=[onnx.StringStringEntryProto(key="k", value="v")]), True),
        (weight(data_location=onnx.TensorProto.DEFAULT), True),  # onnx writes it after it has loaded external data
        (weight(data_location=onnx.TensorProto.EXTERNAL), False),
        (weight(segment=onnx.TensorProto.Segment(begin=0, end=1)), False),
        (weight(int32_data=[1]), False),
        (weight(external_data=[onnx.StringStringEntryProto(key="location", value="x")]), False),
    ],
)
def test_which_weights_stay(tensor: onnx.TensorProto, stays: bool) -> None:
    """Large ones; what stands beside their bytes is kept, and anything odd is left to the checks of a whole model."""
    given = onnx.ModelProto()
    given.graph.initializer.append(tensor)
    data = given.SerializeToString()
    small = without_weights(data, "m.onnx")
    assert (small is not None) is stays
    if small is not None:
        (made,) = onnx.ModelProto.FromString(small).graph.initializer
        assert (made.name, made.doc_string, made.metadata_props) == ("w", tensor.doc_string, tensor.metadata_props)
        assert not made.HasField("raw_data")
        size, reference = tensor.dims[0], {item.key: item.value for item in made.external_data}
        place = int(reference["offset"])
        assert reference == {"location": "m.onnx", "offset": str(place), "length": str(size)}
        assert data[place : place + size] == bytes(size)
        assert data[place - 2 : place] != bytes(2), "the contents start there"
