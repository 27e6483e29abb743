"""Bounds on pre-activations, normalisation by normalisation, against the formula of each: reached, and not exceeded."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from passes.neurons.bounds import NORMS, reach
from passes.options import Options
from passes.plan import make_plan
from tests.textmodels import FIRST, SILU, Array, mlp, values

SCALE = np.array([0.5, 1.0, 2.0, -1.0])
SHIFT = np.array([0.25, -0.5, 0.0, 1.0])

ROOT = "p = Mul(x, x) m = ReduceMean<axes = [-1]>(p) e = Add(m, $0.00001) r = Sqrt(e) "

SPELLED: dict[str, tuple[str, bool, bool, int]] = {
    "LayerNormalization": ("n = LayerNormalization<axis = -1>(x, scale, shift)", True, True, 17),
    "LayerNormalization, no bias": ("n = LayerNormalization<axis = -1>(x, scale)", True, False, 17),
    "RMSNormalization": ("n = RMSNormalization(x, scale)", False, False, 23),
    "SimplifiedLayerNormalization": ("n = SimplifiedLayerNormalization(x, scale)", False, False, 17),
    "SkipLayerNormalization": ("n = com.microsoft.SkipLayerNormalization(x, x, scale, shift)", True, True, 17),
    "SkipSimplifiedLayerNormalization": (
        "n = com.microsoft.SkipSimplifiedLayerNormalization(x, x, scale)", False, False, 17,
    ),
    "divided": (f"{ROOT} d = Div(x, r) n = Mul(d, scale)", False, False, 17),
    "divided, and a bias": (f"{ROOT} d = Div(x, r) g = Mul(scale, d) n = Add(g, shift)", False, True, 17),
    "a power": (f"{ROOT.replace('Mul(x, x)', 'Pow(x, $2.0)')} d = Div(x, r) n = Mul(d, scale)", False, False, 17),
    "one over it": (f"{ROOT} i = Div($1.0, r) d = Mul(x, i) n = Mul(d, scale)", False, False, 17),
    "axis from the front": (f"{ROOT.replace('[-1]', '[2]')} d = Div(x, r) n = Mul(d, scale)", False, False, 17),
    "reciprocal": (f"{ROOT} i = Reciprocal(r) d = Mul(i, x) n = Mul(d, scale)", False, False, 17),
}  # fmt: skip
"""Name to text, whether the mean is subtracted, whether there is a bias, opset."""


def read(proto: onnx.TensorProto) -> Array:
    return onnx.numpy_helper.to_array(proto)


def reached(centred: bool, biased: bool) -> float:
    """The largest |pre-activation|: that of the input which points along a neuron's weights."""
    weight, bias = values("W1").T, values("b1")
    steered = weight * SCALE
    if centred:
        steered = steered - steered.mean(1, keepdims=True)
    middle = bias + (weight @ SHIFT if biased else 0.0)
    along = steered / np.sqrt((steered**2).mean(1, keepdims=True))  # normalised, as the operator would
    return float(np.max(np.abs(middle) + np.sum(along * steered, axis=1)))


@pytest.mark.parametrize("name", SPELLED)
def test_the_reach_behind_a_normalisation(name: str) -> None:
    text, centred, biased, opset = SPELLED[name]
    model = mlp(
        SILU,
        first=f"{text} {FIRST.replace('x, W1', 'n, W1')}",
        constants={"scale": SCALE, "shift": SHIFT},
        opset=opset,
        domains={"com.microsoft": 1},
    )
    plan = make_plan(model, Options())
    (conversion,) = plan.conversions
    found = reach(plan.views[0], conversion.block, read)
    expected = reached(centred, biased)
    assert found is not None
    assert expected <= found <= expected * (1 + 1e-4)


def test_every_normalisation_is_tried() -> None:
    assert {name for _, name in NORMS} == {name for name in SPELLED if name.endswith("Normalization")}


@pytest.mark.parametrize(
    "text",
    [
        "n = Mul(x, scale)",
        "n = LayerNormalization<axis = 1>(x, scale, shift)",
        f"{ROOT.replace('[-1]', '[1]')} d = Div(x, r) n = Mul(d, scale)",
        f"{ROOT.replace('[-1]', '[1, 2]')} d = Div(x, r) n = Mul(d, scale)",
        f"{ROOT.replace('$0', '$-0')} d = Div(x, r) n = Mul(d, scale)",
        f"{ROOT.replace('ReduceMean', 'ReduceMax')} d = Div(x, r) n = Mul(d, scale)",
        f"{ROOT.replace('Sqrt', 'Abs')} d = Div(x, r) n = Mul(d, scale)",
        f"{ROOT.replace('Add', 'Sub')} d = Div(x, r) n = Mul(d, scale)",
        f"{ROOT.replace('Mul(x, x)', 'Mul(x, scale)')} d = Div(x, r) n = Mul(d, scale)",
        f"{ROOT.replace('Mul(x, x)', 'Pow(x, $3.0)')} d = Div(x, r) n = Mul(d, scale)",
        f"{ROOT} d = Mul(x, r) n = Mul(d, scale)",
        f"{ROOT} d = Div(r, x) n = Mul(d, scale)",
        f"{ROOT} i = Div($2.0, r) d = Mul(i, x) n = Mul(d, scale)",
        f"{ROOT} z = Neg(x) d = Div(z, r) n = Mul(d, scale)",
    ],
)
def test_no_reach_behind_something_else(text: str) -> None:
    first = f"{text} {FIRST.replace('x, W1', 'n, W1')}"
    plan = make_plan(mlp(SILU, first=first, constants={"scale": SCALE, "shift": SHIFT}), Options())
    (conversion,) = plan.conversions
    assert reach(plan.views[0], conversion.block, read) is None
