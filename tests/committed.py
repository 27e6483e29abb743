"""The committed example models as the tests see them: what they are fed with, and where their activations are.

Both were read off the files, so that nothing here depends on what the tool finds in them.
"""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path

import numpy as np
import onnx
import pytest

from passes.plan import Plan
from tests.attention import Array
from tests.errors import Feeds, InPlace

FOLDER = Path(__file__).resolve().parents[1] / "models"
FILES = sorted(FOLDER.glob("*.onnx"))
EACH_FILE = pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])

VOCABULARY = 128
"""Rows of the embedding table, in all of them that have one."""

Names = tuple[str, str, str | None]
"""An activation's output, its pre-activation, and the value that a gate is multiplied with."""


def _torchscript(module: str, output: str, gate: str) -> Names:
    return (f"/model/{module}/{output}_output_0", f"/model/{module}/{gate}_output_0", None)


ACTIVATIONS: Mapping[str, tuple[Names, ...]] = {
    "silu-decoder.onnx": tuple(
        _torchscript(f"transformer/h.{layer}/mlp", "act/Mul", "c_fc/Reshape_1") for layer in range(2)
    ),
    "relu-decoder.onnx": (("relu", "linear_4", None), ("relu_1", "linear_10", None)),
    "gelu-encoder.onnx": (("gelu", "linear_4", None), ("gelu_1", "linear_10", None)),
    "conformer-encoder.onnx": tuple(
        _torchscript(f"layers.{layer}/ffn{half}", "intermediate_act_fn/Mul", "intermediate_dense/Add")
        for layer in range(2)
        for half in (1, 2)
    ),
    "gelu-vision.onnx": tuple(
        _torchscript(f"vit/layers.{layer}/mlp", "activation_fn/Mul_1", "fc1/Add") for layer in range(2)
    ),
    "gated-decoder.onnx": (("mul_378", "linear_4", "linear_5"), ("mul_681", "linear_11", "linear_12")),
}
"""File to the activations of its MLP blocks, in the order of the graph."""


def emitted(file: str) -> float:
    """A bound on what exact arithmetic makes of the nodes against the programs' numbers, over the largest output.

    Measured were 3.1e-15 for the encoder, whose last norm amplifies; for gates, which are small differences scaled by
    2^24, 1.71e-9; and 9.2e-16 for the rest.
    """
    return {"gelu-encoder.onnx": 6.2e-15, "gated-decoder.onnx": 3.5e-9}.get(file, 1.9e-15)


def in_place(file: str, plan: Plan) -> list[InPlace]:
    """The programs of a plan that converts all blocks, in place of the activations."""
    pairs = zip(plan.conversions, ACTIVATIONS[file], strict=True)
    return [InPlace(conversion.program.as_heads, *names) for conversion, names in pairs]


def feeds(model: onnx.ModelProto, seed: int = 0, batch: int = 3, tokens: int = 19) -> Feeds:
    """Random tokens or data; the second sequence is padded."""
    rng = np.random.default_rng(seed)
    mask = np.ones((batch, tokens), np.int64)
    mask[1:2, -5:] = 0
    made: dict[str, Array] = {
        "input_ids": rng.integers(0, VOCABULARY, (batch, tokens)),
        "attention_mask": mask,
        "hidden_states": rng.normal(size=(batch, tokens, 32)).astype(np.float32),
        "pixel_values": rng.normal(size=(batch, 3, 16, 16)).astype(np.float32),
    }
    return {value.name: made[value.name] for value in model.graph.input}


def in_float64(model: onnx.ModelProto) -> onnx.ModelProto:
    single, double = onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE
    result = deepcopy(model)

    def widen(tensor: onnx.TensorProto) -> None:
        if tensor.data_type == single:
            tensor.CopyFrom(
                onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor).astype(np.float64), tensor.name)
            )

    for tensor in result.graph.initializer:
        widen(tensor)
    for node in result.graph.node:
        for entry in node.attribute:
            widen(entry.t)
            if node.op_type == "Cast" and entry.name == "to" and entry.i == single:
                entry.i = double
    for value in (*result.graph.input, *result.graph.output):
        if value.type.tensor_type.elem_type == single:
            value.type.tensor_type.elem_type = double
    del result.graph.value_info[:]
    return result
