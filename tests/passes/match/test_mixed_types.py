"""Blocks whose region changes its element type, or whose types inference cannot determine."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from passes.options import Options
from passes.plan import make_plan
from rewriter import ExitStatus, rewrite
from tests.errors import accurate, feeds_of


def mixed(gate: int, out: int) -> onnx.ModelProto:
    """W1 in float32, the activation between casts, W2 in float32."""
    rng = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(rng.normal(size=(8, 16)).astype(np.float32), "W1"),
        numpy_helper.from_array(rng.normal(size=16).astype(helper.tensor_dtype_to_np_dtype(gate)), "b1"),
        numpy_helper.from_array(rng.normal(size=(16, 8)).astype(helper.tensor_dtype_to_np_dtype(out)), "W2"),
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "W1"], ["m"]),
        helper.make_node("Cast", ["m"], ["half"], to=gate),
        helper.make_node("Add", ["half", "b1"], ["y"]),
        helper.make_node("Sigmoid", ["y"], ["s"]),
        helper.make_node("Mul", ["y", "s"], ["a"]),
        helper.make_node("Cast", ["a"], ["h"], to=out),
        helper.make_node("MatMul", ["h", "W2"], ["out"]),
    ]
    graph = helper.make_graph(
        nodes,
        "mixed",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 8])],
        [helper.make_tensor_value_info("out", out, ["n", 8])],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("inline", [False, True], ids=["function", "inline"])
@pytest.mark.parametrize(
    ("gate", "out"),
    [
        pytest.param(TensorProto.FLOAT16, TensorProto.FLOAT, id="half-inside"),
        pytest.param(TensorProto.FLOAT, TensorProto.FLOAT16, id="half-after"),
        pytest.param(TensorProto.FLOAT, TensorProto.DOUBLE, id="double-after"),
        pytest.param(TensorProto.DOUBLE, TensorProto.FLOAT, id="double-inside"),
    ],
)
def test_casts_around_the_activation(gate: int, out: int, inline: bool) -> None:
    """Heads are computed in float32 or better; the largest error measured is 1.0 times the original's."""
    model = mixed(gate, out)
    accurate(model, make_plan(model, Options(inline=inline)), ratio=1.5)


def test_casts_are_proved() -> None:
    report = rewrite(mixed(TensorProto.FLOAT16, TensorProto.FLOAT))
    assert report.exit_status is ExitStatus.CONVERTED


def test_type_behind_an_operator_that_inference_does_not_know() -> None:
    """MatMulNBits stops onnx's inference; its scales have the type of the product."""
    rng = np.random.default_rng(0)
    constants: dict[str, np.ndarray] = {
        "B": rng.integers(0, 255, (32, 1, 16)).astype(np.uint8),
        "scales": np.full((32,), 0.05, np.float32),
        "W2": rng.normal(size=(32, 8)).astype(np.float32),
    }
    nodes = [
        helper.make_node(
            "MatMulNBits", ["x", "B", "scales"], ["y"], domain="com.microsoft", K=32, N=32, bits=4, block_size=32
        ),
        helper.make_node("Sigmoid", ["y"], ["s"]),
        helper.make_node("Mul", ["y", "s"], ["h"]),
        helper.make_node("MatMul", ["h", "W2"], ["out"]),
    ]
    graph = helper.make_graph(
        nodes,
        "nbits",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 32])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, ["n", 8])],
        [numpy_helper.from_array(values, name) for name, values in constants.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    report = rewrite(model)
    assert report.exit_status is ExitStatus.CONVERTED
    assert [row.first for row in report.converted] == ["MatMulNBits 32x32"]
    accurate(model, make_plan(model, Options()), cases=[feeds_of(model)])
