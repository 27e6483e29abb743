"""The JSON of a comparison and its schema: each describes the other."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import jsonschema
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from rewriter import Comparison, diff, rewrite, validate
from tests.rewriter.report.test_report import undocumented
from tests.textmodels import SILU, mlp, text_model

SCHEMA: dict[str, Any] = json.loads(
    files("rewriter.report").joinpath("comparison.schema.json").read_text(encoding="utf-8")
)


def rewritten(delta: float = 0.0) -> onnx.ModelProto:
    model = rewrite(mlp(SILU), validate=False).rewritten
    assert model is not None
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == "mlp/heads/key")
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) + np.float32(delta), tensor.name))
    return model


COMPARISONS: dict[str, Callable[[], Comparison]] = {
    "passed": lambda: validate(mlp(SILU), rewritten(), taps=True),
    "failed": lambda: diff(mlp(SILU), rewritten(1e-2), taps=True, bisect=True),
    "graph": lambda: diff(mlp(SILU), mlp("h = Relu(y)", opset=18), outputs=False),
    "signature": lambda: diff(mlp(SILU), text_model("z = Relu(x)", outputs="float[a, b, 4] z")),
    "nan": lambda: validate(mlp("h = Relu(y)"), mlp("n = Sqrt(y) m = Mul(n, n) h = Relu(m)"), taps=True, bisect=True),
    "tolerance": lambda: validate(mlp(SILU), rewritten(1e-2), atol=1e-9),
}


@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons_follow_the_schema(name: str) -> None:
    data = json.loads(json.dumps(COMPARISONS[name]().to_json(), allow_nan=False))
    jsonschema.Draft202012Validator(SCHEMA).validate(data)
    assert undocumented(data, SCHEMA, SCHEMA) == []
    assert data["verdict"] == ("same" if name == "passed" else "different")
    assert (data["exit_status"] == 0) is (name == "passed")
