"""The proof of one region: units and allowances of errors, and what fails where the heads are not the plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest

from rewriter.files.load import LoadedModel
from rewriter.proof.blocks.activation import (
    _feeds,
    _inside,
    evaluated,
    excess,
    largest_share,
    prove_region,
    regions_of,
    unit,
)
from rewriter.proof.claims import Claim, Side
from rewriter.proof.run.whole import Way
from tests.plans import Exp, Silu
from tests.textmodels import text_model

CLAIM = Claim("mlp", ("y",), "h", ("x",), ("out",), 0.0, 1e-6, onnx.TensorProto.FLOAT, Silu(), domain=50.0)
GATED = replace(CLAIM, inputs=("y", "u"), gated=True)
WAYS = (Way("cpu", optimise=False), Way("cpu", optimise=True))
SILU = "s = Sigmoid(y) h = Mul(y, s)"
GATE = "s = Sigmoid(y) g = Mul(y, s) h = Mul(g, u)"


def side(body: str, inputs: str = "float[b, n, 4] y") -> Side:
    model = text_model(f"{body} out = Identity(h)", inputs=inputs, outputs="float[b, n, 4] out")
    return Side.of(LoadedModel(model, None, None, (), 0))


def proved(body: str, claim: Claim = CLAIM, ways: tuple[Way, ...] = WAYS, original: str = SILU) -> Any:
    inputs = "float[b, n, 4] y, float[b, n, 4] u" if claim.gated else "float[b, n, 4] y"
    return prove_region(regions_of(side(original, inputs), side(body, inputs), claim), claim, ways)


# -- units, allowances, domains ----------------------------------------------------------------------------------------


def test_units() -> None:
    """max(1, |f|), and of a gate max(|u|, |h u|), which is never 0."""
    right = np.array([0.0, -0.5, 3.0, -4.0], np.float32)
    np.testing.assert_array_equal(unit(right, CLAIM, {}), [1.0, 1.0, 3.0, 4.0])
    values = {"u": np.array([0.0, -2.0, 1.0, 8.0], np.float32)}
    tiny = float(np.finfo(np.float32).tiny)
    np.testing.assert_array_equal(unit(right, GATED, values), [tiny, 2.0, 3.0, 8.0])


def test_the_largest_share_is_of_the_entries_that_are_judged() -> None:
    values, truth = np.array([1.0, 2.0, 9.0]), np.array([1.5, 4.0, 1.0])
    units = np.array([1.0, 4.0, 1.0])
    assert largest_share(values, truth, units, np.array([True, True, False])) == 0.5
    assert largest_share(values, truth, units, np.array([False, True, True])) == 8.0
    assert largest_share(values, truth, units, np.zeros(3, bool)) == 0.0
    assert largest_share(values, np.array([np.inf, 2.0, 9.0]), np.array([np.inf, 1.0, 1.0]), np.ones(3, bool)) == 0.0


@pytest.mark.parametrize(("error", "holds"), [(0.0, True), (4.5e-6, True), (5e-6, True), (5.01e-6, False)])
def test_the_allowance_is_four_times_the_originals_and_what_is_stated(error: float, holds: bool) -> None:
    claim = replace(CLAIM, rounding=2.0**-20)
    allowed = 4 * 2.0**-20 + 2.0**-20
    found = excess(claim, error * allowed / 5e-6, 2.0**-20, WAYS[0])
    assert (found == []) is holds
    if not holds:
        (text,) = found
        assert text.startswith(f"mlp: the heads' error {error * allowed / 5e-6:.3g} on cpu, no optimisation exceeds ")
        assert text.endswith(f" {allowed:.3g} = 4 x 9.54e-07 (the original's) + 9.54e-07 (stated rounding)")


def test_a_nan_is_no_small_error() -> None:
    assert excess(CLAIM, float("nan"), 1.0, WAYS[0])


def test_inside_the_domain() -> None:
    """Its ends belong to it, and so does NaN."""
    points = np.array([-50.0, 50.0, 50.1, -51.0, np.nan, 0.0, np.inf], np.float32)
    assert _inside({"y": points}, CLAIM).tolist() == [True, True, False, False, True, True, False]


def test_values_beside_the_points() -> None:
    """A gated block gets normally distributed values of the same type and shape, the same at every call."""
    points = np.linspace(-1, 1, 4000, dtype=np.float16).reshape(2, 500, 4)
    found = _feeds(GATED, points)
    assert list(found) == ["y", "u"]
    assert found["y"] is points
    assert found["u"].shape == points.shape
    assert found["u"].dtype == np.float16
    assert 1.8 < float(found["u"].astype(np.float64).std()) < 2.2
    assert abs(float(found["u"].astype(np.float64).mean())) < 0.2
    np.testing.assert_array_equal(found["u"], _feeds(GATED, points)["u"])
    assert list(_feeds(CLAIM, points)) == ["y"]


def test_the_plan_is_evaluated_in_float64() -> None:
    y, u = np.array([[0.5, -2.0]], np.float32), np.array([[3.0, 4.0]], np.float32)
    plan, rounding = evaluated(CLAIM, {"y": y, "u": u})
    assert plan.dtype == np.float64
    assert plan.shape == rounding.shape == (1, 2)
    exact = y.astype(np.float64)
    np.testing.assert_allclose(plan, exact / (1 + np.exp(-exact)), rtol=1e-15)
    gated, _ = evaluated(GATED, {"y": y, "u": u})
    np.testing.assert_allclose(gated, u.astype(np.float64) / (1 + np.exp(-exact)), rtol=1e-15)


# -- regions -----------------------------------------------------------------------------------------------------------


def test_the_same_region_is_proved() -> None:
    proof = proved(SILU)
    assert proof.failures == ()
    assert proof.infinite == ()
    assert 0 <= proof.exact_error < 1e-15
    assert 2.0**-26 < proof.error < 2.0**-18
    assert proof.original_error == pytest.approx(proof.error, rel=0.5)
    assert 0.5 < proof.ratio < 2.0


def test_no_way_no_measurement() -> None:
    proof = proved(SILU, ways=())
    assert (proof.error, proof.ratio, proof.original_error, proof.failures) == (0.0, 0.0, 0.0, ())


def test_a_gate_is_proved() -> None:
    gated = replace(GATED, planned=Gate())
    proof = proved(GATE, gated, original=GATE)
    assert proof.failures == ()
    assert proof.error < 1e-5
    wrong = proved(GATE.replace("Mul(g, u)", "Add(g, u)"), gated, original=GATE)
    assert any("in float64 the heads differ from their program" in failure for failure in wrong.failures)


class Gate(Silu):
    """silu(y) u."""

    def evaluate(self, y: Any, z: Any | None = None) -> Any:
        return super().evaluate(y) * (1.0 if z is None else z)

    def float64_rounding(self, y: Any, z: Any | None = None) -> Any:
        return super().float64_rounding(y) * (1.0 if z is None else 1.0 + np.abs(z))


def test_heads_of_another_shape_fail_in_every_way() -> None:
    """And what comes after the first way is still tried."""
    proof = proved("s = Sigmoid(y) g = Mul(y, s) h = ReduceSum(g)")
    assert [failure.split(" shape ")[0] for failure in proof.failures] == ["mlp: the heads give"] * 3
    assert proof.failures[0].startswith("mlp: the heads give shape (1, 1, 1), not (2, ")
    for way, failure in zip(WAYS, proof.failures[1:], strict=True):
        assert failure.endswith(f" on {way}")
    assert proof.exact_error is None
    assert (proof.error, proof.original_error) == (0.0, 0.0)


@pytest.mark.parametrize(("off", "holds"), [(0.0, True), (0.5e-3, True), (2e-3, False)])
def test_the_certified_error_bounds_the_plan(off: float, holds: bool) -> None:
    """Against the original's own nodes, relative to max(1, |f|)."""
    claim = replace(CLAIM, planned=Silu(off=off), max_error=1e-3)
    # The emitted region is the plan.
    proof = proved(f"s = Sigmoid(y) p = Mul(y, s) h = Add(p, ${off})", claim)
    mine = [failure for failure in proof.failures if "certified" in failure]
    said = f"mlp: the head program's error {off:.3g} exceeds the certified 0.001; this is a bug, please report it"
    assert mine == ([] if holds else [said])
    assert proof.exact_error == pytest.approx(off, rel=1e-6, abs=1e-15)


@pytest.mark.parametrize(("off", "holds"), [(1e-15, True), (1e-7, False)])
def test_the_heads_are_the_plan(off: float, holds: bool) -> None:
    """However large the certified error."""
    claim = replace(CLAIM, max_error=1.0, rounding=1.0)
    proof = proved(f"s = Sigmoid(y) p = Mul(y, s) h = Add(p, ${off})", claim)
    assert [failure[:48] for failure in proof.failures] == (
        [] if holds else ["mlp: in float64 the heads differ from their prog"]
    )


def test_the_stated_rounding_counts_twice() -> None:
    """Either side may be that far from exact arithmetic."""
    for off, holds in ((1.9e-9, True), (2.1e-9, False)):
        claim = replace(CLAIM, planned=Silu(rounding=1e-9), max_error=1.0, rounding=1.0)
        proof = proved(f"s = Sigmoid(y) p = Mul(y, s) h = Add(p, ${off})", claim)
        assert (proof.failures == ()) is holds, off


def test_errors_in_the_models_own_type_are_judged() -> None:
    """A detour through float16, which float64 does not see."""
    body = "c = Cast<to = 10>(y) k = Cast<to = 1>(c) s = Sigmoid(k) h = Mul(k, s)"
    proof = proved(body, replace(CLAIM, domain=8.0))
    assert sum("the heads' error" in failure for failure in proof.failures) == len(WAYS)
    assert proof.error > 1e-4
    assert proof.original_error < 1e-5
    assert proof.ratio > 10.0


def test_points_beyond_the_domain_are_not_judged() -> None:
    """There only parity counts."""
    body = f"{SILU.replace('h =', 'p =')} a = Abs(y) c = Greater(a, $8.0) h = Where(c, $0.0, p)"
    assert proved(body, replace(CLAIM, domain=8.0)).failures == ()
    assert proved(body, replace(CLAIM, domain=9.0)).failures != ()


def test_nan_where_the_original_has_none() -> None:
    body = f"{SILU.replace('h =', 'p =')} n = Log(y) z = Mul(n, $0.0) h = Add(p, z)"
    proof = proved(body)
    assert [failure for failure in proof.failures if "NaN" in failure] == [
        f"mlp: NaN at other points than in the original on {where}" for where in ("float64", *map(str, WAYS))
    ]


def test_an_overflow_of_the_heads_is_a_failure() -> None:
    """Where the original overflows, so must they."""
    original = "h = Exp(y)"

    claim = replace(CLAIM, planned=Exp(), domain=100.0, rounding=1.0)
    assert proved(original, claim, original=original).failures == ()
    # Overflow in float64 hides nothing at other points.
    wrong = proved("p = Exp(y) h = Mul(p, $1.01)", replace(claim, domain=1000.0), original=original)
    assert any("in float64 the heads differ from their program" in failure for failure in wrong.failures)
    clipped = proved("p = Exp(y) h = Min(p, $3e38)", claim, original=original)
    assert [failure for failure in clipped.failures if "infinite" in failure] == [
        f"mlp: infinite at other points than in the original on {way}" for way in WAYS
    ]
