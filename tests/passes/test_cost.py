"""Costs of the forms: the figures are those of what is then built, and of what a run then needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from benchmarks.memory import available, peak_bytes
from passes.cost import COSTS, FormCost, Setting, cost
from passes.forms import FORMS
from passes.plan import Options, apply, make_plan
from tests.textmodels import ERF_GELU, SILU, mlp, text_model

MISH = "p = Softplus(y) t = Tanh(p) h = Mul(y, t)"
GLU = "s = Sigmoid(y) g = MatMul(x, V1) u = Add(g, c1) h = Mul(s, u)"
TEXTS = {
    "silu": SILU,
    "silu-scaled": "s = Sigmoid(y) t = Mul(y, s) h = Mul(t, $1.5)",
    "relu": "h = Relu(y)",
    "leaky-relu": "h = LeakyRelu<alpha = 0.1>(y)",
    "tanh": "h = Tanh(y)",
    "gelu": ERF_GELU,
    "mish": MISH,
    "glu": GLU,
}
LOCAL_LIVE = {"silu": 3, "relu": 3, "gelu": 21, "mish": 7, "leaky-relu": 6, "glu": 3}
"""Tensors [N, d_ff] alive at once in form `local`, counted by hand."""


def planned(model: onnx.ModelProto, form: str = "local", setting: Setting | None = None) -> tuple[Any, FormCost]:
    plan = make_plan(model, Options(form=form))
    (conversion,) = plan.conversions
    found = cost(conversion, form, setting or Setting())
    assert found is not None
    return plan, found


def test_every_form_has_a_cost() -> None:
    assert list(COSTS) == list(FORMS)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("form", FORMS)
def test_added_weights_are_those_of_the_built_model(form: str, text: str) -> None:
    model = mlp(text)
    plan, found = planned(model, form)
    old = {tensor.name for tensor in model.graph.initializer}
    added = [tensor for tensor in apply(plan).graph.initializer if tensor.name not in old]
    sizes = [int(np.prod(tensor.dims)) for tensor in added if tensor.data_type == onnx.TensorProto.FLOAT]
    assert found.parameters_added == sum(sizes)
    assert found.parameters_reused == (2 if text != GLU else 3) * 4 * 8


def test_costs_grow_with_tokens_as_the_forms_do() -> None:
    plan, short = planned(mlp(SILU), setting=Setting(tokens=100))
    long = cost(plan.conversions[0], "local", Setting(tokens=200))
    assert long is not None
    assert (long.peak_bytes, long.rows) == (2 * short.peak_bytes, 200)
    assert (short.heads, short.head_dimension, short.keys, short.width) == ((8,), 1, 2, 4)


def test_unknown_sizes_give_no_cost() -> None:
    plan = make_plan(mlp(SILU), Options())
    (conversion,) = plan.conversions
    first = tuple(replace(operator, in_features=None) for operator in conversion.block.first)
    assert cost(replace(conversion, block=replace(conversion.block, first=first)), "local", Setting()) is None


@pytest.mark.skipif(not available(), reason="this system cannot reset the peak of a process's memory")
@pytest.mark.parametrize("name", LOCAL_LIVE)
def test_peak_memory_is_what_a_run_of_form_local_needs(name: str, tmp_path: Path) -> None:
    tokens, width, neurons = 2048, 8, 512
    weights = {"W1": (width, neurons), "V1": (width, neurons), "b1": (neurons,), "c1": (neurons,)}
    weights |= {"W2": (neurons, width), "b2": (width,)}
    rng = np.random.default_rng(0)
    model = text_model(
        f"first = MatMul(x, W1) y = Add(first, b1) {TEXTS[name]} second = MatMul(h, W2) out = Add(second, b2)",
        inputs=f"float[batch, tokens, {width}] x",
        outputs=f"float[batch, tokens, {width}] out",
        constants={key: rng.normal(0.0, 0.3, shape) for key, shape in weights.items()},
    )
    plan, found = planned(model, setting=Setting(tokens=tokens))
    assert found.peak_bytes == LOCAL_LIVE[name] * tokens * neurons * 4
    path = tmp_path / "local.onnx"
    onnx.save(apply(plan), path)
    assert peak_bytes(path, tokens) == pytest.approx(found.peak_bytes, rel=0.1)
