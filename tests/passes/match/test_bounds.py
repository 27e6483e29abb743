"""Bounds on pre-activations, normalisation by normalisation, against the formula of each: reached, and not exceeded."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from passes.match.bounds import NORMS, _rounding, preactivation_bounds, reach, read_preactivation
from passes.options import Options
from passes.plan import make_plan
from rewriter.graph.constants import Constants
from tests.textmodels import FIRST, SILU, Array, mlp, values

SCALE = np.array([0.5, 1.0, 2.0, -1.0])
SHIFT = np.array([0.25, -0.5, 0.0, 1.0])

ROOT = "p = Mul(x, x) m = ReduceMean<axes = [-1]>(p) e = Add(m, $0.00001) r = Sqrt(e) "

SPELLED: dict[str, tuple[str, bool, bool, int]] = {
    "LayerNormalization": ("n = LayerNormalization<axis = -1>(x, scale, shift)", True, True, 17),
    "LayerNormalization, epsilon": ("n = LayerNormalization<epsilon = 0.0001>(x, scale, shift)", True, True, 17),
    "LayerNormalization, epsilon 0": ("n = LayerNormalization<epsilon = 0.0>(x, scale, shift)", True, True, 17),
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
        f"{ROOT.replace('Mul(x, x)', 'Pow(x, $1.0)')} d = Div(x, r) n = Mul(d, scale)",
        f"{ROOT.replace('Mul(x, x)', 'Pow(x, x)')} d = Div(x, r) n = Mul(d, scale)",
        f"{ROOT.replace('(p) e', '(x) e')} d = Div(x, r) n = Mul(d, scale)",  # the mean of the data themselves
        f"{ROOT.replace('Add(m, $0.00001)', 'Add(x, $0.00001)')} d = Div(x, r) n = Mul(d, scale)",
        f"{ROOT.replace('Sqrt(e)', 'Sqrt(x)')} d = Div(x, r) n = Mul(d, scale)",
        f"{ROOT} d = Div(x, x) n = Mul(d, scale)",
        f"{ROOT} d = Mul(x, r) n = Mul(d, scale)",
        f"{ROOT} d = Div(r, x) n = Mul(d, scale)",
        f"{ROOT} i = Div($2.0, r) d = Mul(i, x) n = Mul(d, scale)",
        f"{ROOT} z = Neg(x) d = Div(z, r) n = Mul(d, scale)",
        f"{ROOT} d = Div(x, r) n = Add(d, scale)",  # no scale
        f"{ROOT} d = Div(x, r) n = Mul(d, x)",
        f"{ROOT.replace('$0.00001', 'x')} d = Div(x, r) n = Mul(d, scale)",
        f"{ROOT.replace('<axes = [-1]>', '')} d = Div(x, r) n = Mul(d, scale)",
        f"{ROOT} i = Sqrt(r) d = Mul(i, x) n = Mul(d, scale)",
        "n = LayerNormalization<axis = -1, epsilon = -0.5>(x, scale, shift)",
        "n = LayerNormalization<axis = -1>(x, x, shift)",
        "n = LayerNormalization<axis = -1>(x, scale, x)",
        "n = custom.LayerNormalization<axis = -1>(x, scale, shift)",
        "s, m0, v, n = com.microsoft.SkipLayerNormalization(x, x, scale, shift)",  # the sum, which is not normalised
        "n = LayerNormalization<axis = -1>(x, one)",  # a scale for all channels
        "n = Add(x, x)",
    ],
)
def test_no_reach_behind_something_else(text: str) -> None:
    first = f"{text} {FIRST.replace('x, W1', 'n, W1')}"
    constants = {"scale": SCALE, "shift": SHIFT, "one": np.array([2.0])}
    domains = {"com.microsoft": 1, "custom": 1}
    plan = make_plan(mlp(SILU, first=first, constants=constants, domains=domains), Options())
    (conversion,) = plan.conversions
    assert reach(plan.views[0], conversion.block, read) is None


TABLE = np.array([[3.0, 4.0, 0.0, 0.0], [1.0, 0.0, 0.0, 2.0]])
"""Rows of norms 5 and sqrt(5)."""

IDS = "ids = Cast<to = 7>(x) one = Gather<axis = -1>(ids, zero)"


@pytest.mark.parametrize(
    ("text", "longest"),
    [
        ("n = Gather(table, one)", 5.0),
        ("n = Gather<axis = 0>(table, one)", 5.0),
        ("p = Gather(table, one) q = Gather(other, one) n = Add(p, q)", 5.0 + 2.0),
        ("p = Gather(table, one) q = Gather(other, one) r = Add(p, q) n = Add(r, p)", 5.0 + 2.0 + 5.0),
        ("p = Gather(table, one) n = Add(p, x)", None),
        ("n = Gather<axis = 1>(square, one)", None),
        ("p = Gather(table, one) n = Mul(p, p)", None),
        ("n = Gather(x, zero)", None),
    ],
)
def test_the_reach_of_rows_of_tables(text: str, longest: float | None) -> None:
    """A neuron that is aligned with the longest row reaches the bound."""
    model = mlp(
        SILU,
        first=f"{IDS} {text} {FIRST.replace('x, W1', 'n, W1')}",
        constants={
            "table": TABLE,
            "other": np.array([[0.0, 0.0, 2.0, 0.0]] * 2),
            "square": np.ones((4, 4)),
            "zero": onnx.numpy_helper.from_array(np.array(0), "zero"),
        },
    )
    plan = make_plan(model, Options())
    found = [reach(plan.views[0], conversion.block, read) for conversion in plan.conversions]
    if longest is None:
        assert found in ([None], [])
        return
    weight, bias = values("W1").T, values("b1")
    expected = float(np.max(np.sqrt((weight**2).sum(1)) * longest + np.abs(bias)))
    assert found[0] is not None
    assert expected <= found[0] <= expected * (1 + 1e-4)


@pytest.mark.parametrize("name", ["LayerNormalization", "LayerNormalization, no bias", "divided"])
def test_bounds_of_each_neuron(name: str) -> None:
    """Both ends of each interval: the middle is the bias's and the shift's, the reach is on either side of it."""
    text, centred, biased, _ = SPELLED[name]
    shift = SHIFT if biased else np.zeros(4)
    first = f"{text} {FIRST.replace('x, W1', 'n, W1')}"
    plan = make_plan(mlp(SILU, first=first, constants={"scale": SCALE, "shift": SHIFT}), Options())
    (conversion,) = plan.conversions
    view, block = plan.views[0], conversion.block
    found = preactivation_bounds(view, read_preactivation(view, Constants(view), block, block.gate, read), read)
    assert found is not None
    weight = values("W1").astype(np.float32).T.astype(np.float64)
    steered = weight * SCALE.astype(np.float32)
    if centred:
        steered -= steered.mean(1, keepdims=True)
    middle = weight @ shift + values("b1").astype(np.float32)
    reaches = 2.0 * np.sqrt((steered**2).sum(1))  # sqrt(D) = 2
    for bound, exact, sign in ((found[0], middle - reaches, -1.0), (found[1], middle + reaches, 1.0)):
        assert np.all(sign * (bound - exact) > 0.0), "rounding is included"
        # 4 (terms + 8) units in the last place of float32 of the sum of all magnitudes.
        size = reaches + np.abs(values("b1").astype(np.float32)) + np.abs(weight) @ np.abs(shift)
        np.testing.assert_allclose(sign * (bound - exact), 4 * 12 * 2.0**-23 * size, rtol=1e-4)


def test_bounds_of_each_neuron_behind_a_table() -> None:
    """The bias is the middle, and on either side of it lie the longest row and the rounding of the sum."""
    first = f"{IDS} n = Gather(table, one) {FIRST.replace('x, W1', 'n, W1')}"
    constants = {"table": TABLE, "zero": onnx.numpy_helper.from_array(np.array(0), "zero")}
    plan = make_plan(mlp(SILU, first=first, constants=constants), Options())
    (conversion,) = plan.conversions
    view, block = plan.views[0], conversion.block
    found = preactivation_bounds(view, read_preactivation(view, Constants(view), block, block.gate, read), read)
    assert found is not None
    weight, bias = (values(name).astype(np.float32).astype(np.float64) for name in ("W1", "b1"))
    reaches = 5.0 * np.sqrt((weight**2).sum(0))
    slack = 4 * 12 * 2.0**-23 * (reaches + np.abs(bias))
    np.testing.assert_allclose(bias - reaches - found[0], slack, rtol=1e-4)
    np.testing.assert_allclose(found[1] - bias - reaches, slack, rtol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "terms", "expected"),
    [("float16", 4, 48 * 2.0**-10), ("float32", 8, 64 * 2.0**-23), ("float64", 0, 32 * 2.0**-52)],
)
def test_rounding(dtype: str, terms: int, expected: float) -> None:
    assert _rounding(np.dtype(dtype), terms) == expected


def test_rounding_of_bfloat16_and_of_what_is_unknown() -> None:
    bfloat16 = onnx.helper.tensor_dtype_to_np_dtype(onnx.TensorProto.BFLOAT16)
    assert _rounding(bfloat16, 4) == _rounding(np.dtype(np.int8), 4) == 48 * 2.0**-7


@pytest.mark.parametrize(("rank", "axis"), [(2, -1), (2, 0), (2, 1), (2, -2), (3, -1), (3, 0), (3, 1), (3, 2), (3, -2)])
def test_an_axis_is_the_last_one(rank: int, axis: int) -> None:
    shape = "float[batch, tokens, 4]" if rank == 3 else "float[tokens, 4]"
    first = f"n = LayerNormalization<axis = {axis}>(x, scale, shift) {FIRST.replace('x, W1', 'n, W1')}"
    constants = {"scale": SCALE, "shift": SHIFT}
    model = mlp(SILU, first=first, constants=constants, inputs=f"{shape} x", outputs=f"{shape} out")
    plan = make_plan(model, Options())
    (conversion,) = plan.conversions
    expected = axis in (-1, rank - 1)
    assert (reach(plan.views[0], conversion.block, read) is not None) is expected
