"""Inputs of a block that is tested: of several batches and lengths, unless the model fixes them; no two rows alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from rewriter.proof.tested import SCALES, drawn_case, recorded

from rewriter.errors import ValidationError
from rewriter.files.load import load_model
from rewriter.graph.view import GraphView, all_views
from rewriter.proof.inputs.cases import Case
from rewriter.proof.records import Claim
from rewriter.proof.run import Side, Way
from tests.textmodels import text_model


def _view(shape: Any, kind: int = TensorProto.FLOAT) -> GraphView:
    graph = helper.make_graph([], "block", [helper.make_tensor_value_info("x", kind, shape)], [])
    return next(iter(all_views(helper.make_model(graph))))


def _drawn(shape: Any, kind: int = TensorProto.FLOAT, scale: float = 1.0, width: int | None = 8, axis: int = -1) -> Any:
    claim = Claim("mlp", ("y",), "h", ("x",), ("out",), 0.0, TensorProto.FLOAT, width=width, axis=axis)
    return drawn_case(_view(shape, kind), claim, 2, 67, scale, seed=0).feeds["x"]


@pytest.mark.parametrize(
    ("shape", "axis", "expected"),
    [
        (["b", "s", 8], -1, (2, 67, 8)),
        (["s", 8], -1, (67, 8)),
        ([8], -1, (8,)),
        (["b", 4, "s", 8], -1, (2, 4, 67, 8)),
        (["b", "h", "w", "c"], -1, (2, 1, 67, 8)),
        (["b", "c", "s"], -2, (2, 8, 67)),
        (["b", "c", "h", "w"], -3, (2, 8, 1, 67)),
        (["b", 17, 8], -1, (2, 17, 8)),
        ([1, "s", 8], -1, (1, 67, 8)),
        (None, -1, (2, 67, 8)),
    ],
)
def test_sizes(shape: Any, axis: int, expected: tuple[int, ...]) -> None:
    assert _drawn(shape, axis=axis).shape == expected


def test_values() -> None:
    made = _drawn(["b", "s", 8], TensorProto.FLOAT16, scale=8.0)
    assert made.dtype == np.float16
    assert 7 < made.astype(float).std() < 9
    rows = made.reshape(-1, 8)
    assert len(np.unique(rows, axis=0)) == len(rows)
    packed = _drawn(["b", "s", 8], TensorProto.UINT8)
    assert packed.dtype == np.uint8
    assert len(np.unique(packed)) > 100


def test_unknown_channels() -> None:
    assert _drawn(["b", "s", 5], width=None).shape == (2, 67, 5)
    with pytest.raises(ValidationError, match="nothing tells how many channels 'x' has"):
        _drawn(["b", "s", "c"], width=None)


@pytest.mark.parametrize("by_blocks", [False, True])
def test_what_the_model_gives_a_block_that_reads_shapes_made_elsewhere(*, by_blocks: bool) -> None:
    """Floats are scaled, shapes are not."""
    side = Side.of(
        load_model(text_model("a = Relu(x) n = Shape(x) y = MatMul(a, W1) z = MatMul(y, W2) out = Reshape(z, n)"))
    )
    claim = Claim("mlp", ("y",), "y", ("a",), ("out",), 0.0, TensorProto.FLOAT)
    x = np.array([[[-1, 2, 3, 4]]], np.float32)
    way = Way("cpu", optimise=False)
    cases = recorded(side, claim, ("a", "n"), way, [Case("one", {"x": x})], by_blocks=by_blocks)
    assert [case.name for case in cases] == [f"one, times {scale:g}" for scale in SCALES]
    for case, scale in zip(cases, SCALES, strict=True):
        np.testing.assert_allclose(case.feeds["a"], scale * np.maximum(x, 0), rtol=1e-6)
        assert case.feeds["n"].tolist() == [1, 1, 4]
    with pytest.raises(ValidationError, match="it reads what is made elsewhere"):
        recorded(side, claim, ("a", "m"), way, [], by_blocks=by_blocks)
