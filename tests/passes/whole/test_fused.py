"""Blocks whose gate and value are one projection: the same function in every form."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest

from passes.options import FormOptions, Options
from passes.plan import apply, make_plan
from tests.oracle import evaluate
from tests.textmodels import mlp

LONGEST = 24
WHOLE = Options(form="whole", forms=FormOptions(max_tokens=LONGEST))
GATED = 1e-7

CHUNK = (
    "m = MatMul(x, W1wide) size = Shape(m) width = Gather(size, axis) odd = Add(width, one) half = Div(odd, two) "
    "end = Mul(half, two) y = Slice(m, zero, half, axis) u = Slice(m, half, end, axis)"
)
SPLIT = "m = MatMul(x, W1wide) y, u = Split<axis = -1>(m)"
STRIDED = "m = MatMul(x, W1wide) y = Slice(m, zero, most, axis, two) u = Slice(m, one, most, axis, two)"


def stacked(first: str) -> onnx.ModelProto:
    integers = {"axis": 2, "zero": 0, "one": 1, "two": 2, "most": 99}
    constants: dict[str, Any] = {
        name: onnx.numpy_helper.from_array(np.array([number]), name) for name, number in integers.items()
    }
    second = "second = MatMul(h, W2) out = Add(second, x)"
    return mlp("s = Sigmoid(y) g = Mul(y, s) h = Mul(g, u)", first=first, second=second, constants=constants)


@pytest.mark.parametrize("form", ["masked", "maskless", "staged", "compact", "whole"])
@pytest.mark.parametrize("first", [CHUNK, SPLIT], ids=["chunk", "split"])
def test_gate_and_value_of_one_projection_are_parts_of_its_weight(first: str, form: str) -> None:
    model = stacked(first)
    plan = make_plan(model, replace(WHOLE, form=form))
    (conversion,) = plan.conversions
    assert conversion.projections is not None
    bounds = [(each.start, each.stop) for each in (conversion.projections.query, conversion.projections.value)]
    assert bounds == [(0, 8), (8, 16)]
    result = apply(plan)
    x = np.random.default_rng(0).normal(size=(2, 7, 4)).astype(np.float32)
    expected, found = (evaluate(each, {"x": x})["out"] for each in (model, result))
    np.testing.assert_allclose(found, expected, rtol=0.0, atol=GATED)


def test_every_second_channel_is_no_projection() -> None:
    plan = make_plan(stacked(STRIDED), WHOLE)
    assert not plan.conversions
