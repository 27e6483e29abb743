"""Inputs of a block that is tested: of several batches and lengths, unless the model fixes them; no two rows alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from rewriter.errors import ValidationError
from rewriter.graph.view import GraphView, all_views
from rewriter.proof.claims import Claim
from rewriter.proof.tested import drawn_case


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
