"""A rewriter that is wrong, which every adapter must notice."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from rewriter.api import rewriting


@pytest.fixture
def wrong_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bias of the second operator comes out 0.01 too large."""
    right = rewriting.made

    def wrong(unit: Any) -> onnx.ModelProto:
        model = onnx.ModelProto()
        model.CopyFrom(right(unit))
        (weight,) = (each for each in model.graph.initializer if each.name == "b2")
        weight.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(weight) + np.float32(1e-2), "b2"))
        return model

    monkeypatch.setattr(rewriting, "made", wrong)
