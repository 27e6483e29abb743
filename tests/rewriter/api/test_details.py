"""Programs as curves, and the accounting, for the page."""

from __future__ import annotations

import numpy as np
import pytest

from passes.accounting import account
from passes.plan import make_plan
from rewriter import rewrite
from rewriter.api.run import checked_options
from rewriter.report.details import Details, Drawing
from tests.textmodels import ERF_GELU, FIRST, SILU, mlp, text_model

TWO_PROGRAMS = (
    f"{FIRST} {SILU} second = MatMul(h, W2) z = Add(second, x) "
    "f2 = MatMul(z, V1) y2 = Add(f2, c1) h2 = Relu(y2) out = MatMul(h2, W2)"
)
GATED = "s = Sigmoid(y) u = MatMul(x, V1) h = Mul(s, u)"


def details(activation: str) -> Details:
    found = rewrite(mlp(activation), dry_run=True, details=True).details
    assert found is not None
    return found


def only(activation: str) -> Drawing:
    (drawing,) = details(activation).drawings
    return drawing


def test_not_asked_for_not_made() -> None:
    assert rewrite(mlp(SILU), dry_run=True).details is None
    assert "details" not in rewrite(mlp(SILU), dry_run=True, details=True).to_json()


@pytest.mark.parametrize(
    ("activation", "function"),
    [
        (SILU, lambda y: y / (1 + np.exp(-y))),
        ("h = Relu(y)", lambda y: np.maximum(y, 0)),
        ("h = Tanh(y)", np.tanh),
    ],
)
def test_both_curves_are_the_activation(activation: str, function: np.ufunc) -> None:
    drawing = only(activation)
    y = np.array(drawing.points)
    np.testing.assert_allclose(drawing.target.values, function(y), atol=1e-12)
    np.testing.assert_allclose(drawing.values.values, function(y), atol=1e-6)
    assert (y[0], y[-1], y[y.size // 2]) == (-6.0, 6.0, 0.0)


@pytest.mark.parametrize("activation", [SILU, ERF_GELU, "h = Relu(y)", GATED])
def test_weights_sum_to_one_and_errors_stay_certified(activation: str) -> None:
    drawing = only(activation)
    for head in drawing.heads:
        assert [key.label for key in head.keys] == [curve.label for curve in head.weights]
        np.testing.assert_allclose(np.sum([curve.values for curve in head.weights], axis=0), 1.0, rtol=1e-12)
    # What is certified holds for the graph's own spelling; the drawn target is the named activation.
    assert max(np.abs(drawing.error.values)) <= drawing.certified * 1.01 + 1e-14


def test_a_steep_head_is_drawn_close_up() -> None:
    relu, silu = only("h = Relu(y)"), only(SILU)
    assert relu.near[-1] == pytest.approx(12 / 2**40)
    assert relu.near[-1] < 1e-10 < silu.near[-1] == 6.0
    peak = max(np.abs(relu.error.values))
    assert 0.5 * relu.certified < peak <= relu.certified, "the error is seen where it is"


def test_gate_is_drawn_for_a_value_of_one() -> None:
    drawing = only(GATED)
    np.testing.assert_allclose(drawing.values.values, drawing.target.values, atol=1e-12)
    assert max(drawing.values.values) < 1.0
    assert drawing.heads[0].keys[0].value == "u"


def test_heads_over_equally_spaced_keys_are_drawn_once() -> None:
    drawing = only(ERF_GELU)
    (head,) = drawing.heads
    assert (drawing.count, drawing.tokens, len(head.keys), head.shared) == (9, 10, 11, True)
    assert [key.value for key in head.keys].count("0") == 2


@pytest.mark.parametrize(
    ("gate", "keys", "shared", "value"),
    [("s = Sigmoid(y) g = Mul(y, s)", 2, False, "line(y) u"), ("g = Identity(y)", 13, True, "-1897.49 u")],
)
def test_gates_with_a_line(gate: str, keys: int, shared: bool, value: str) -> None:
    drawing = only(f"{gate} u = MatMul(x, V1) h = Mul(g, u)")
    (head,) = drawing.heads
    assert (drawing.count, len(head.keys), head.shared, head.keys[0].value) == (2, keys, shared, value)
    np.testing.assert_allclose(drawing.values.values, drawing.target.values, atol=1e-6)


def test_one_drawing_per_program() -> None:
    found = rewrite(text_model(TWO_PROGRAMS), dry_run=True, details=True).details
    assert found is not None
    assert [(drawing.program, drawing.blocks) for drawing in found.drawings] == [("silu", 1), ("relu", 1)]


def test_accounting_is_the_one_of_inspect() -> None:
    found, expected = details(SILU), account(make_plan(mlp(SILU), checked_options()))
    assert [(each.name, each.heads, each.parameters) for each in found.counts] == [
        (each.name, each.heads, each.parameters) for each in expected.blocks
    ]
    assert found.share == expected.share == 1.0
    assert found.remaining == ""


def test_what_remains_is_told() -> None:
    model = mlp(SILU, second="second = MatMul(h, W2) out = Relu(second)")
    found = rewrite(model, dry_run=True, details=True).details
    assert found is not None
    assert found.remaining == "1 Relu"
