"""Networks that onnxruntime optimised, and blocks whose gate and value are one projection: the same function."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from passes.match.lower import network_parts
from passes.options import FormOptions, Options
from passes.plan import apply, make_plan
from tests.attention import Array
from tests.committed import FOLDER, feeds
from tests.conftest import slow
from tests.oracle import evaluate
from tests.textmodels import mlp, text_model

LONGEST = 24
WHOLE = Options(form="whole", forms=FormOptions(max_tokens=LONGEST))
NAMES = ("silu-decoder", "gated-decoder", "relu-decoder", "gelu-encoder", "gelu-vision")
FITTED, GATED = 1e-6, 1e-7


def optimised(name: str, folder: Path, level: str) -> onnx.ModelProto:
    """What onnxruntime makes of a committed model."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
    options.optimized_model_filepath = str(folder / "optimised.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(str(FOLDER / f"{name}.onnx"), options, providers=["CPUExecutionProvider"])
    return onnx.load(folder / "optimised.onnx")


CASES = [
    pytest.param(name, level, marks=() if name == NAMES[0] else slow, id=f"{name}-{level}")
    for name in NAMES
    for level in ("BASIC", "EXTENDED")
]


@pytest.mark.parametrize(("name", "level"), CASES)
def test_optimised_models_are_the_same_function(name: str, level: str, tmp_path: Path) -> None:
    """In float64, against the model that was not optimised."""
    before, model = onnx.load(FOLDER / f"{name}.onnx"), optimised(name, tmp_path, level)
    if level == "EXTENDED" and name != "relu-decoder":
        assert any(node.domain == "com.microsoft" for node in model.graph.node)
    plan = make_plan(model, WHOLE)
    assert len(plan.conversions) == 2, plan.left
    result = apply(plan)
    onnx.checker.check_model(result, full_check=False)
    fed = feeds(before, 0, 2, 9)
    expected, found = evaluate(before, fed), evaluate(result, fed)
    tolerance = FITTED if "gelu" in name else GATED
    for output, array in expected.items():
        np.testing.assert_allclose(found[output], array, rtol=0.0, atol=tolerance * np.abs(array).max())


def test_fused_operators_stay_where_nothing_is_carried(tmp_path: Path) -> None:
    model = optimised("silu-decoder", tmp_path, "EXTENDED")
    result = apply(make_plan(model, Options()))
    assert [node.op_type for node in result.graph.node].count("FusedMatMul") == 2
    refused = make_plan(model, replace(WHOLE, only=("*.0.*",)))
    assert not refused.conversions
    assert [node.op_type for node in refused.model.graph.node].count("FusedMatMul") == 2


# -- one operator at a time ------------------------------------------------------------------------------------------

SHAPES = {"a": (2, 3, 5, 4), "b": (2, 3, 4, 6), "at": (2, 3, 4, 5), "bt": (2, 3, 6, 4)}


def fused(text: str) -> onnx.ModelProto:
    inputs = ", ".join(f"double[{', '.join(map(str, shape))}] {name}" for name, shape in SHAPES.items())
    return text_model(
        text,
        inputs=f"{inputs}, double[2, 5, 4] x, double[2, 5, 4] skip",
        outputs="double[_, _, _] out",
        constants={"gain": np.linspace(0.5, 2.0, 4), "shift": np.arange(4.0), "bias": np.ones(4)},
        domains={"com.microsoft": 1},
        elem="double",
    )


def numbers() -> dict[str, Array]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape) for name, shape in {**SHAPES, "x": (2, 5, 4), "skip": (2, 5, 4)}.items()}


def normed(x: Array, epsilon: float) -> Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    return np.asarray(centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + epsilon))


GAIN, SHIFT = np.linspace(0.5, 2.0, 4), np.arange(4.0)
PARTS: dict[str, Any] = {
    "out = com.microsoft.FusedMatMul(a, b)": lambda v: v["a"] @ v["b"],
    "out = com.microsoft.FusedMatMul<alpha = 0.25>(a, b)": lambda v: 0.25 * v["a"] @ v["b"],
    "out = com.microsoft.FusedMatMul<alpha = 0.5, transB = 1>(a, bt)": lambda v: 0.5 * v["a"] @ v["bt"].swapaxes(2, 3),
    "out = com.microsoft.FusedMatMul<transA = 1, transB = 1>(at, bt)": lambda v: (
        v["at"].swapaxes(2, 3) @ v["bt"].swapaxes(2, 3)
    ),
    "out = com.microsoft.SkipLayerNormalization<epsilon = 0.5>(x, skip, gain)": lambda v: (
        normed(v["x"] + v["skip"], 0.5) * GAIN
    ),
    "out = com.microsoft.SkipLayerNormalization<epsilon = 0.5>(x, skip, gain, shift, bias)": lambda v: (
        normed(v["x"] + v["skip"] + 1.0, 0.5) * GAIN + SHIFT
    ),
    "n, m, v, out = com.microsoft.SkipLayerNormalization(x, skip, gain, shift)": None,
    "n,,, out = com.microsoft.SkipLayerNormalization(x, skip, gain, shift)": lambda v: v["x"] + v["skip"],
}


@pytest.mark.parametrize("text", PARTS)
def test_parts_are_what_the_operator_computes(text: str) -> None:
    model = fused(text)
    parts = network_parts(model)
    if PARTS[text] is None:
        assert parts == {}
        return
    (nodes,) = parts.values()
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    assert {node.domain for node in model.graph.node} == {""}
    np.testing.assert_allclose(evaluate(model, numbers())["out"], PARTS[text](numbers()), rtol=0.0, atol=1e-13)


@pytest.mark.parametrize(
    "text",
    [
        "out = com.microsoft.FusedMatMul<transBatchA = 1>(a, b)",
        "out = com.microsoft.FusedMatMul<alpha = 0.5>(x, square)",
        "out = com.microsoft.Gelu(x)",
    ],
)
def test_what_has_no_parts_stays(text: str) -> None:
    model = fused(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(4), "square"))
    assert network_parts(model) == {}


# -- a gate and a value in one projection ----------------------------------------------------------------------------

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
