"""No sequence or no token: what is written runs where the original does, and gives outputs of the same shapes."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from rewriter import rewrite
from tests.committed import FOLDER
from tests.textmodels import SILU, mlp

FORMS: tuple[dict[str, Any], ...] = (
    {},
    {"inline": True},
    {"form": "compact"},
    {"form": "masked"},
    {"form": "maskless", "max_tokens": 20},
    {"form": "staged", "max_tokens": 20},
    {"form": "whole", "max_tokens": 20},
)
GATED = "v = MatMul(x, V1) s = Sigmoid(y) t = Mul(y, s) h = Mul(t, v)"
LORA = "first = MatMul(x, W1) low = MatMul(x, A1) high = MatMul(low, B1) y = Add(first, high)"
AXES = {2: "tokens", 3: "batch, tokens", 4: "one, batch, tokens"}


def of_rank(rank: int, activation: str = SILU, opset: int = 17, **parts: str) -> onnx.ModelProto:
    shape = f"float[{AXES[rank]}, 4]"
    return mlp(activation, inputs=f"{shape} x", outputs=f"{shape} out", opset=opset, **parts)


OPSETS = ((2, 13), (3, 13), (2, 17), (4, 17))
MODELS = {
    **{f"{rank} axes, opset {opset}": of_rank(rank, opset=opset) for rank, opset in OPSETS},
    **{f"gate of {rank} axes": of_rank(rank, GATED) for rank in (2, 3, 4)},
    **{f"two projections of {rank} axes": of_rank(rank, first=LORA) for rank in (2, 3, 4)},
    "convolution": mlp(
        SILU,
        first="y = Conv(x, K1)",
        second="out = Conv(h, K2)",
        inputs="float[batch, 4, positions] x",
        outputs="float[batch, 4, positions] out",
    ),
}


def session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def runs(model: onnx.ModelProto) -> Iterator[tuple[dict[str, Any], list[Any]]]:
    """Inputs with one symbolic size 0, and what the model makes of them, where it runs."""
    sizes = [dim.dim_param for each in model.graph.input for dim in each.type.tensor_type.shape.dim if dim.dim_param]
    original = session(model)
    for empty in dict.fromkeys(sizes):
        feeds = {}
        for value in model.graph.input:
            kind = value.type.tensor_type
            shape = [dim.dim_value or (0 if dim.dim_param == empty else 3) for dim in kind.shape.dim]
            feeds[value.name] = np.ones(shape, onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))
        with suppress(Exception):  # the original does not run: onnxruntime raises of many kinds
            yield feeds, original.run(None, feeds)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [*MODELS, "relu-decoder", "gated-decoder", "gelu-encoder"])
def test_sizes_of_0(name: str) -> None:
    model = MODELS.get(name) or onnx.load(FOLDER / f"{name}.onnx")
    known = [*runs(model)]
    assert known
    for options in FORMS:
        report = rewrite(model, validate=False, **options)
        if not report:
            continue
        made = session(report.rewritten)
        for feeds, outputs in known:
            found = made.run(None, feeds)
            assert [each.shape for each in found] == [each.shape for each in outputs], options
