"""Costs of the forms: the figures match what is built, and what a run needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from benchmarks.memory import available, peak_bytes
from passes.forms import FORMS
from passes.forms.cost import COSTS, FormCost, Setting, cost
from passes.match.linear import Miss
from passes.options import FormOptions, Options
from passes.plan import apply, make_plan
from tests.conftest import slow
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
LOCAL_LIVE = {"silu": 3, "relu": 3, "gelu": 7, "mish": 4, "leaky-relu": 4, "glu": 3}
"""Number of tensors [N, d_ff] alive at once in form `local`, counted by hand."""


def planned(model: onnx.ModelProto, form: str = "local", setting: Setting | None = None) -> tuple[Any, FormCost]:
    plan = make_plan(model, Options(form=form))
    (conversion,) = plan.conversions
    found = cost(plan.views[0], conversion, form, setting or Setting())
    assert isinstance(found, FormCost)
    return plan, found


def test_every_form_has_a_cost() -> None:
    assert set(FORMS) <= set(COSTS)


FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("form", FORMS)
def test_added_weights_are_those_of_the_built_model(form: str, text: str) -> None:
    model = mlp(text)
    plan, found = planned(model, form)
    old = {tensor.name for tensor in model.graph.initializer}
    added = [tensor for tensor in apply(plan).graph.initializer if tensor.name not in old]
    sizes = [int(np.prod(tensor.dims)) for tensor in added if tensor.data_type in FLOATS]
    assert found.parameters_added == sum(sizes)
    assert found.parameters_reused == (2 if text != GLU else 3) * 4 * 8


def test_costs_grow_with_tokens_as_the_forms_do() -> None:
    plan, short = planned(mlp(SILU), setting=Setting(tokens=100))
    long = cost(plan.views[0], plan.conversions[0], "local", Setting(tokens=200))
    assert isinstance(long, FormCost)
    assert (long.peak_bytes, long.rows) == (2 * short.peak_bytes, 200)
    assert (short.heads, short.head_dimension, short.keys, short.width) == ((8,), 1, 2, 4)


def test_unknown_sizes_give_no_cost() -> None:
    plan = make_plan(mlp(SILU), Options())
    (conversion,) = plan.conversions
    first = tuple(replace(operator, in_features=None) for operator in conversion.block.first)
    unknown = replace(conversion, block=replace(conversion.block, first=first))
    assert cost(plan.views[0], unknown, "local", Setting()) is None


def test_a_form_that_does_not_take_the_block_says_why() -> None:
    plan = make_plan(mlp(SILU, opset=10), Options())
    (conversion,) = plan.conversions
    found = cost(plan.views[0], conversion, "masked", Setting())
    assert isinstance(found, Miss)
    assert "needs opset 11" in found.reason


def test_chunks_bound_the_pattern_at_the_size_of_gpt_2() -> None:
    plan = make_plan(wide(SILU, 768, 3072), Options())
    found = cost(plan.views[0], plan.conversions[0], "masked", Setting(tokens=1024))
    assert isinstance(found, FormCost)
    assert found.whole_pattern_bytes == 3072 * 1025 * 1025 * 4
    assert 32 * 2**20 < found.pattern_bytes <= 64 * 2**20
    assert (found.heads, found.head_dimension, found.rows, found.width) == ((3072,), 1, 1025, 770)
    few = cost(plan.views[0], plan.conversions[0], "masked", Setting(tokens=10**5, max_pattern_mb=1.0))
    assert isinstance(few, FormCost)
    assert few.pattern_bytes <= 2**20


def test_staged_counts_heads_by_rank() -> None:
    plan = make_plan(wide(SILU, 768, 3072), Options())
    found = cost(plan.views[0], plan.conversions[0], "staged", Setting(head_dimension=64, max_tokens=512))
    assert isinstance(found, FormCost)
    # W1, one per neuron, and W2 together with the clearing of the hidden columns
    assert found.heads == (48, 3072, (768 + 3072) // 64)
    assert found.width == 768 + 3072 + 513


def wide(text: str, width: int, neurons: int) -> onnx.ModelProto:
    """An MLP of any size."""
    weights = {"W1": (width, neurons), "V1": (width, neurons), "b1": (neurons,), "c1": (neurons,)}
    weights |= {"W2": (neurons, width), "b2": (width,)}
    rng = np.random.default_rng(0)
    return text_model(
        f"first = MatMul(x, W1) y = Add(first, b1) {text} second = MatMul(h, W2) out = Add(second, b2)",
        inputs=f"float[batch, tokens, {width}] x",
        outputs=f"float[batch, tokens, {width}] out",
        constants={key: rng.normal(0.0, 0.3, shape) for key, shape in weights.items()},
    )


@pytest.mark.skipif(not available(), reason="this system cannot reset the peak of a process's memory")
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in ("silu", "gelu") else slow) for n in LOCAL_LIVE])
def test_peak_memory_is_what_a_run_of_form_local_needs(name: str, tmp_path: Path) -> None:
    tokens, neurons = 2048, 512
    plan, found = planned(wide(TEXTS[name], 8, neurons), setting=Setting(tokens=tokens))
    assert found.peak_bytes == LOCAL_LIVE[name] * tokens * neurons * 4
    path = tmp_path / "local.onnx"
    onnx.save(apply(plan), path)
    assert peak_bytes(path, tokens) == pytest.approx(found.peak_bytes, rel=0.1)


@pytest.mark.skipif(not available(), reason="this system cannot reset the peak of a process's memory")
@pytest.mark.parametrize("form", ["masked", *(pytest.param(form, marks=slow) for form in ("maskless", "staged"))])
@pytest.mark.parametrize("name", [pytest.param("silu", marks=slow), "gelu"])
def test_peak_memory_of_forms_with_square_patterns_is_bounded(form: str, name: str, tmp_path: Path) -> None:
    tokens, limit = 192, 2.0
    plan = make_plan(
        wide(TEXTS[name], 8, 1024), Options(form=form, forms=FormOptions(max_pattern_mb=limit, max_tokens=tokens))
    )
    setting = Setting(tokens=tokens, max_pattern_mb=limit, max_tokens=tokens)
    found = cost(plan.views[0], plan.conversions[0], form, setting)
    assert isinstance(found, FormCost)
    path = tmp_path / "square.onnx"
    onnx.save(apply(plan), path)
    measured = peak_bytes(path, tokens)
    assert 0.6 * found.peak_bytes < measured <= found.peak_bytes
    assert found.peak_bytes < found.whole_pattern_bytes / 5
