"""Weights in data files: the same bytes, in one file or another, at one place or another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

import rewriter
from tests.textmodels import text_model

WIDTH = 64
SIZE = 4 * WIDTH * WIDTH
RELU = "first = MatMul(x, W1) y = Add(first, $0.5) h = Relu(y) out = MatMul(h, W2)"
OTHERS = RELU.replace("Relu(y)", "Max(y, $0.0)")
"""The same, by other operators."""


def stored(folder: Path, name: str, nodes: str, data: str = "weights", **places: int) -> Path:
    """A model with W1 and W2 at some bytes of a data file, which holds W1, W2, W1 again, and it with another number."""
    dims = [WIDTH, WIDTH]
    weights = {}
    for weight, place in ({"W1": 0, "W2": SIZE} | places).items():
        found = onnx.TensorProto(name=weight, data_type=onnx.TensorProto.FLOAT, dims=dims, data_location="EXTERNAL")
        for key, value in {"location": data, "offset": place, "length": SIZE}.items():
            found.external_data.add(key=key, value=str(value))
        weights[weight] = found
    shape = f"float[b, t, {WIDTH}]"
    path = folder / f"{name}.onnx"
    path.write_bytes(
        text_model(nodes, constants=weights, inputs=f"{shape} x", outputs=f"{shape} out").SerializeToString()
    )
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    one, two = (rng.normal(0.0, 0.2, (WIDTH, WIDTH)).astype(np.float32) for _ in range(2))
    other = one.copy()
    other[3, 5] = np.nextafter(other[3, 5], np.float32(1))
    (tmp_path / "weights").write_bytes(b"".join(each.tobytes() for each in (one, two, one, other)))
    shutil.copy(tmp_path / "weights", tmp_path / "elsewhere")
    return tmp_path


@pytest.mark.parametrize(
    ("data", "places", "certified"),
    [
        ("weights", {}, True),
        ("weights", {"W1": 2 * SIZE}, True),
        ("weights", {"W1": 3 * SIZE}, False),
        ("weights", {"W1": 4}, False),
        ("weights", {"W1": SIZE, "W2": 0}, False),
        ("elsewhere", {}, True),
        ("elsewhere", {"W1": 3 * SIZE}, False),
    ],
)
@pytest.mark.parametrize("activation", [RELU, OTHERS])
def test_weights_that_lie_elsewhere(
    activation: str, data: str, places: dict[str, int], certified: bool, folder: Path
) -> None:
    pair = stored(folder, "a", RELU), stored(folder, "b", activation, data, **places)
    assert rewriter.certify(*pair).certificate.certified is certified
    found = rewriter.diff(*pair, outputs=False)
    assert [each.name for each in found.graph.tensors if each.name in places] == ([] if certified else [*places])


def test_equal_weights_that_change_places(folder: Path) -> None:
    """Both are taken from the same two places, the other way round."""
    pair = stored(folder, "a", RELU, W2=2 * SIZE), stored(folder, "b", RELU, W1=2 * SIZE, W2=0)
    assert rewriter.certify(*pair).certificate.certified
    assert rewriter.diff(*pair, outputs=False).graph.tensors == ()


def test_what_a_certificate_states(folder: Path) -> None:
    """Digests of data files are computed when it is written or checked."""
    pair = stored(folder, "a", RELU), stored(folder, "b", OTHERS)
    rewriter.certify(*pair).write(folder / "certificate.json")
    stated = json.loads((folder / "certificate.json").read_text(encoding="utf-8"))
    assert rewriter.certify(*pair).checked(stated)
    (folder / "weights").write_bytes(bytes(4 * SIZE))
    problems = rewriter.certify(*pair).checked(stated).problems
    assert [each.partition(":")[0] for each in problems] == ["original.data.weights", "rewritten.data.weights"]
