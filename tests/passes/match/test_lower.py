"""Fused operators taken apart: operands that are left out."""

from __future__ import annotations

from itertools import pairwise

import pytest
from onnx import helper

from passes.match.lower import _fast_gelu, _gemm_fast_gelu


@pytest.mark.parametrize(
    ("inputs", "operators"),
    [
        (["x", "w"], ["MatMul", "FastGelu"]),
        (["x", "w", ""], ["MatMul", "FastGelu"]),
        (["x", "w", "b"], ["MatMul", "Add", "FastGelu"]),
    ],
)
def test_gemm_fast_gelu(inputs: list[str], operators: list[str]) -> None:
    made = _gemm_fast_gelu(helper.make_node("GemmFastGelu", inputs, ["y"], "n", domain="com.microsoft"))
    assert made is not None
    assert [node.op_type for node in made] == operators
    assert list(made[0].input) == ["x", "w"]
    for one, other in pairwise(made):
        assert other.input[0] == one.output[0]
    assert list(made[-1].output) == ["y"]
    if "b" in inputs:
        assert made[1].input[1] == "b"


@pytest.mark.parametrize(("inputs", "apart"), [(["x"], False), (["x", ""], False), (["x", "b"], True)])
def test_fast_gelu(inputs: list[str], apart: bool) -> None:
    """Without a bias there is nothing to take apart."""
    made = _fast_gelu(helper.make_node("FastGelu", inputs, ["y"], "n", domain="com.microsoft"))
    assert [node.op_type for node in made or []] == (["Add", "FastGelu"] if apart else [])
