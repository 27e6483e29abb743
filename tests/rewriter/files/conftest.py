"""Small models for the tests of this folder: with their weights inline or in a data file."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

WEIGHTS = np.arange(4096, dtype=np.float32)
"""More than what is read with the model."""


def answer(path: Path) -> np.ndarray:
    """Run `y = x + W` for x = 0 in onnxruntime: W as the file at `path` has it."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    result: np.ndarray = session.run(None, {"x": np.zeros(4096, np.float32)})[0]
    return result


def refuse(*_: object) -> int:
    raise AssertionError("external data was read")


def _model(weight: onnx.TensorProto) -> onnx.ModelProto:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[4096] x) => (float[4096] y) { y = Add(x, W) }'
    )
    model.graph.initializer.append(weight)
    return model


def make_external(entries: Iterable[tuple[str, str]]) -> onnx.ModelProto:
    """`y = x + W`, W of 4096 floats being external with these entries."""
    weight = onnx.TensorProto(
        name="W", data_type=onnx.TensorProto.FLOAT, dims=[4096], data_location=onnx.TensorProto.EXTERNAL
    )
    for key, value in entries:
        weight.external_data.add(key=key, value=value)
    return _model(weight)


@pytest.fixture
def inline_model() -> onnx.ModelProto:
    """`y = x + W` with W inline."""
    return _model(onnx.numpy_helper.from_array(WEIGHTS, "W"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The path of `y = x + W` with W in `w.bin`, in its own directory."""
    directory = tmp_path / "source"
    directory.mkdir()
    (directory / "w.bin").write_bytes(WEIGHTS.tobytes())
    path = directory / "model.onnx"
    path.write_bytes(make_external([("location", "w.bin")]).SerializeToString())
    return path
