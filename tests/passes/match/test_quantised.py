"""Activations with QuantizeLinear and DequantizeLinear inside, as onnxruntime's static quantisation writes them.

What rounds stays where it stands. Every function between two such pairs is a block of its own, certified over the
reals.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import onnx
import pytest

from rewriter import ExitStatus, inspect, rewrite, validate
from tests.textmodels import findings, mlp, only_left, tensor

FIRST, SECOND = "y0 = MatMul(x, W1)", "out = MatMul(h, W2)"
UP = f"{FIRST} u0 = MatMul(x, V1)"
SILU = "y = @(y0) s0 = Sigmoid(y) s = @(s0) h0 = Mul(y, s) h = @(h0)"
GATED = "y = @(y0) u = @(u0) s0 = Sigmoid(y) s = @(s0) g0 = Mul(y, s) g = @(g0) h0 = Mul(g, u) h = @(h0)"
BENT = (
    "y = @(y0) t0 = Tanh(y) t = @(t0) a0 = Add(t, $1.0) a = @(a0) b0 = Mul($0.5, a) b = @(b0) h0 = Mul(y, b) h = @(h0)"
)
CUBE = "y = @(y0) c0 = Mul(y, y) c = @(c0) a0 = Add(y, c) a = @(a0) h0 = Tanh(a) h = @(h0)"
RELU = "y = @(y0) h0 = Relu(y) h = @(h0)"
CONSTANTS: dict[str, Any] = {
    "fine": np.array(1 / 16),
    "zero": onnx.numpy_helper.from_array(np.array(3, np.int8), "zero"),
    "shape": onnx.numpy_helper.from_array(np.array([0, 0, 8]), "shape"),
}


def quantised(text: str, **options: Any) -> onnx.ModelProto:
    """A model in whose text `b = @(a)` is a pair of QuantizeLinear and DequantizeLinear."""
    body = re.sub(
        r"(\w+) = @\((\w+)\)", r"\1_q = QuantizeLinear(\2, fine, zero) \1 = DequantizeLinear(\1_q, fine, zero)", text
    )
    return mlp(body, **{"first": FIRST, "second": SECOND, "constants": CONSTANTS, **options})


@pytest.mark.parametrize(("text", "first", "labels"), [
    (RELU, FIRST, ["relu"]),
    (SILU, FIRST, ["sigmoid", "linear(gate) * value"]),
    (GATED, UP, ["sigmoid", "linear(gate) * value", "linear(gate) * value"]),
    (BENT, FIRST, ["tanh", "linear(gate) * value"]),
    (CUBE, FIRST, ["square", "tanh"]),
], ids=["relu", "silu", "gated", "affine-between", "sum"])  # fmt: skip
def test_every_function_between_two_roundings_is_a_block(text: str, first: str, labels: list[str]) -> None:
    model = quantised(text, first=first)
    report = rewrite(model)
    assert report.exit_status is ExitStatus.CONVERTED, (report.left, report.problems)
    assert [row.activation for row in report.converted] == labels
    assert [bool(row.second) for row in report.converted] == [False] * (len(labels) - 1) + [True]
    assert report.validation is not None
    assert report.validation.certified
    made = report.rewritten
    assert isinstance(made, onnx.ModelProto)
    kept = [[node.name for node in each.graph.node if "Linear" in node.op_type] for each in (model, made)]
    assert kept[0] == kept[1]
    accounting = inspect(model).accounting
    assert accounting.remaining == {}
    assert accounting.share == pytest.approx(1.0)


def _coarser(model: onnx.ModelProto) -> None:
    """The scale within the activation."""
    model.graph.initializer.append(tensor("coarse", np.array(1 / 8)))
    for node in model.graph.node:
        if node.output[0] in ("s", "s_q"):
            node.input[1] = "coarse"


def _unrounded(model: onnx.ModelProto) -> None:
    """Nothing rounds within the activation."""
    for node in model.graph.node:
        node.input[:] = ["s0" if name == "s" else name for name in node.input]


def _other(model: onnx.ModelProto) -> None:
    """The product reads another tensor."""
    product = [node for node in model.graph.node if "y" in node.input][-1]
    product.input[:] = ["y0" if name == "y" else name for name in product.input]


@pytest.mark.parametrize("spoil", [_coarser, _unrounded, _other], ids=["scale", "unrounded", "operand"])
def test_planted_errors_are_refused(spoil: Any) -> None:
    model = quantised(SILU)
    made = rewrite(model, validate=False).rewritten
    assert isinstance(made, onnx.ModelProto)
    assert validate(model, made).same
    spoil(made)
    found = validate(model, made)
    assert found.validation is not None
    assert not found.validation.certified
    assert not found.same


def test_without_rounding_a_second_activation_is_none() -> None:
    left = only_left(quantised("y = @(y0) s0 = Sigmoid(y) s = Reshape(s0, shape) h = Mul(y, s)"))
    assert left.miss.reason == "a second activation follows in Mul 'h'"


def test_a_part_is_converted_with_the_whole_only() -> None:
    found = findings(quantised(SILU, second=""))
    assert not found.blocks
    assert [left.miss.reason for left in found.left] == [
        "the activation that it is a part of is not converted",
        "no linear operator reads its output",
    ]


def test_the_product_may_stay() -> None:
    """With `--gate product` the heads of the sigmoid are all, and the product counts."""
    found = inspect(quantised(SILU), gate="product")
    assert [row.activation for row in found.report.converted] == ["sigmoid"]
    assert found.accounting.remaining == {"activation linear(gate) * value": 1}
