"""Heads of a block that was replaced as a whole: what they are tried on, measured by, and what fails."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest

from rewriter.files.load import LoadedModel
from rewriter.proof.blocks.sublayer import (
    Heads,
    _as_heads,
    _inside,
    _linear_size,
    _projected,
    _scaled,
    _tokens,
    prove_heads,
)
from rewriter.proof.claims import Claim
from rewriter.proof.run.whole import Way
from tests.plans import Silu
from tests.textmodels import FIRST, SILU, text_model

WAYS = (Way("cpu", optimise=False), Way("cpu", optimise=True))
SHAPE, WIDE = "float[batch, tokens, 4]", "float[batch, tokens, 8]"
CLAIM = Claim(
    "mlp", ("y",), "h", ("x",), ("out",), 0.0, 1e-6, onnx.TensorProto.FLOAT, Silu(), heads="heads", domain=100.0
)
OUT = "out = MatMul(heads, W2)"
X = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)


def part(body: str, given: str, found: str) -> LoadedModel:
    return LoadedModel(text_model(body, inputs=given, outputs=found), None, None, (), 0)


def heads(activation: str = "heads = Mul(y, s)", *, out: str = OUT, cases: tuple[Any, ...] = ({"x": X},)) -> Heads:
    """The parts of a block; `activation` makes the heads from y and its sigmoid s."""
    return Heads(
        before=part(f"{FIRST} {SILU} out = MatMul(h, W2)", f"{SHAPE} x", f"{WIDE} y, {WIDE} h, {SHAPE} out"),
        front=part(f"{FIRST} s = Sigmoid(y) {activation}", f"{SHAPE} x", f"{WIDE} heads"),
        behind=part(out, f"{WIDE} heads", f"{SHAPE} out"),
        cases=cases,
    )


def test_the_same_heads_are_proved() -> None:
    proof = prove_heads(heads(), CLAIM, WAYS)
    assert proof.failures == ()
    assert proof.exact_error is not None
    assert 0.0 <= proof.exact_error < 1e-14
    assert proof.error == pytest.approx(proof.original_error)
    assert 0.0 < proof.error < 1e-6
    assert proof.ratio == pytest.approx(1.0)
    assert proof.infinite == ()


def test_figures_of_nothing_but_zeros() -> None:
    """Where both are exact, the errors and their ratio are 0, and nothing is below it."""
    exact = heads(cases=({"x": np.zeros((1, 1, 4), np.float32)},))
    for each in (exact.before, exact.front):
        for tensor in each.proto.graph.initializer:
            if tensor.name == "b1":
                tensor.CopyFrom(onnx.numpy_helper.from_array(np.zeros(8, np.float32), "b1"))
    proof = prove_heads(exact, CLAIM, WAYS)
    assert proof.failures == ()
    assert (proof.exact_error, proof.error, proof.ratio, proof.original_error) == (0.0, 0.0, 0.0, 0.0)


def test_heads_that_are_off_fail_in_float64_and_in_every_way() -> None:
    proof = prove_heads(heads("t = Mul(y, s) heads = Add(t, $0.001)"), CLAIM, WAYS)
    assert proof.exact_error == pytest.approx(1e-3, rel=1e-3)
    assert proof.error == pytest.approx(1e-3, rel=1e-3)
    assert proof.ratio == pytest.approx(proof.error / max(proof.original_error, 2.0**-23), rel=1e-3)
    first, *others = proof.failures
    assert first == "mlp: in float64 the heads differ from their program by 0.001, more than rounding explains"
    for text, way in zip(others, WAYS, strict=True):
        assert text.startswith(f"mlp: the heads' error 0.001 on {way} exceeds the allowed ")


def test_an_error_at_one_scale_alone_is_found() -> None:
    """Every case counts: the heads are wrong for large pre-activations only."""
    wrong = "t = Mul(y, s) b = Greater(y, $50.0) f = Cast<to=1>(b) heads = Add(t, f)"
    assert prove_heads(heads(wrong), CLAIM, WAYS).failures == ()
    far = {"x": (100.0 * X).astype(np.float32)}
    for cases in (({"x": X}, far), (far, {"x": X})):
        proof = prove_heads(heads(wrong, cases=cases), CLAIM, WAYS)
        assert len(proof.failures) == 3
        assert proof.exact_error is not None
        assert proof.exact_error > 1e-3


def test_the_domain_ends_the_proof() -> None:
    """Beyond it nothing is asked."""
    wrong = "t = Mul(y, s) b = Greater(y, $50.0) f = Cast<to=1>(b) heads = Add(t, f)"
    far = heads(wrong, cases=({"x": (100.0 * X).astype(np.float32)},))
    proof = prove_heads(far, replace(CLAIM, domain=50.0), WAYS)
    assert proof.failures == ()
    assert proof.exact_error is not None
    assert proof.exact_error < 1e-12


def test_the_plan_is_held_to_its_certificate() -> None:
    """The heads are the plan, and the plan is further from the original than it says."""
    off = replace(CLAIM, planned=Silu(off=float(np.float32(1e-3))))
    made = heads("t = Mul(y, s) heads = Add(t, $0.001)")
    (text,) = prove_heads(made, replace(off, max_error=0.9e-3), WAYS).failures
    assert text.startswith("mlp: the head program's error exceeds the certified 0.0009 by ")
    assert text.endswith("; this is a bug, please report it")
    assert float(text.partition(" by ")[2].partition(";")[0]) == pytest.approx(1e-4, rel=1e-2)
    proof = prove_heads(made, replace(off, max_error=1.1e-3), WAYS)
    assert proof.failures == ()
    assert proof.exact_error == pytest.approx(1e-3, rel=1e-3)
    assert proof.error < 1e-6, "measured against the plan"


@pytest.mark.parametrize(("stated", "holds"), [(0.4e-3, False), (0.6e-3, True)])
def test_twice_the_stated_rounding_lies_between_heads_and_plan(stated: float, holds: bool) -> None:
    planned = replace(CLAIM, planned=Silu(rounding=stated), rounding=1.0)
    failures = prove_heads(heads("t = Mul(y, s) heads = Add(t, $0.001)"), planned, WAYS).failures
    assert (failures == ()) is holds


def test_what_is_projected_to_something_else() -> None:
    """Given the original's activations, only linear operators remain."""
    (text,) = prove_heads(heads(out="t = MatMul(heads, W2) out = Add(t, $0.000001)"), CLAIM, WAYS).failures
    assert text == "mlp: in float64 the heads' outputs are projected to something else, error 1e-06"


@pytest.mark.parametrize(
    ("h", "out", "by", "holds"),
    [
        (1.0, 1.0, 0.9e-12, True),
        (1.0, 1.0, 1.1e-12, False),
        (0.0, 0.0, 0.9e-12, True),
        (0.0, 0.0, 1.1e-12, False),
        (1e3, 1.0, 0.9e-9, True),
        (1.0, 1e3, 0.9e-9, True),
        (1e3, 1e3, 1.1e-9, False),
        (1.0, 1.0, np.nan, False),
    ],
)
def test_linear_operators_may_round(h: float, out: float, by: float, holds: bool) -> None:
    """By 10^-12 of the largest value that they add up, at least 1."""
    truth = {"h": np.full((1, 2, 8), h), "out": np.full((1, 2, 4), out)}
    feeds = {"heads": np.zeros((1, 2, 8))}
    found = _projected(lambda _: {"out": truth["out"] + by}, heads(), CLAIM, feeds, truth)
    assert (found == []) is holds


def test_without_a_float64_evaluation_the_original_stands_in() -> None:
    """An operator that neither onnxruntime's double kernels nor numpy know."""
    shape = "float[batch, tokens, 8]"
    before = part(f"{FIRST} h = Hardmax(y) out = MatMul(h, W2)", f"{SHAPE} x", f"{shape} y, {shape} h, {SHAPE} out")
    front = part(f"{FIRST} heads = Hardmax(y)", f"{SHAPE} x", f"{shape} heads")
    made = replace(heads(), before=before, front=front)
    proof = prove_heads(made, CLAIM, WAYS)
    assert proof.failures == ()
    assert (proof.exact_error, proof.error, proof.ratio, proof.original_error) == (None, 0.0, 0.0, 0.0)
    wrong = replace(made, front=part(f"{FIRST} t = Hardmax(y) heads = Add(t, $0.5)", f"{SHAPE} x", f"{shape} heads"))
    proof = prove_heads(wrong, CLAIM, WAYS)
    assert len(proof.failures) == 2
    assert proof.error == 0.5


def test_scaled_inputs() -> None:
    """The block's float inputs alone, in their type; as they are for 1, and without complaint where they overflow."""
    feeds = {"x": np.array([3.0, -4.0], np.float16), "n": np.array([7]), "mask": np.array([5.0], np.float32)}
    assert _scaled(feeds, ("x", "n"), 1.0) is feeds
    made = _scaled(feeds, ("x", "n"), 0.5)
    assert {name: value.tolist() for name, value in made.items()} == {"x": [1.5, -2.0], "n": [7], "mask": [5.0]}
    assert {name: value.dtype for name, value in made.items()} == {name: each.dtype for name, each in feeds.items()}
    assert _scaled(feeds, ("x",), 1e6)["x"].tolist() == [np.inf, -np.inf]


def test_rows_that_are_tokens() -> None:
    """The first ones of each sequence; a tensor without a batch axis has one sequence."""
    made = np.arange(2 * 5 * 3.0).reshape(2, 5, 3)
    np.testing.assert_array_equal(_tokens(made, np.zeros((2, 4, 3))), made[:, :4])
    np.testing.assert_array_equal(_tokens(made[:1], np.zeros((4, 3))), made[0, :4])
    np.testing.assert_array_equal(_tokens(made, np.zeros((2, 2, 2, 3))), made[:, :4].reshape(2, 2, 2, 3))


def test_other_rows_hold_noise() -> None:
    activation = np.arange(2 * 4 * 3.0).reshape(2, 4, 3)
    found = _as_heads(activation, np.zeros((2, 6, 3)))
    assert found.shape == (2, 6, 3)
    np.testing.assert_array_equal(found[:, :4], activation)
    rest = found[:, 4:]
    assert len(np.unique(rest)) == rest.size
    assert 0.3 < rest.std() < 3.0
    np.testing.assert_array_equal(_as_heads(activation[0], np.zeros((1, 4, 3))), activation[:1])
    np.testing.assert_array_equal(_as_heads(activation, np.zeros((2, 6, 3))), found)


def test_the_scale_of_what_is_added_up() -> None:
    truth = {"y": np.array([0.5, -0.25]), "h": np.array([0.75, np.inf])}
    assert _linear_size(truth, CLAIM) == 1.0
    assert _linear_size({**truth, "y": np.array([-7.0])}, CLAIM) == 7.0
    assert _linear_size({**truth, "h": np.array([9.0])}, CLAIM) == 9.0


def test_the_domain_belongs_to_it() -> None:
    """NaN too; of every channel that the pre-activation broadcasts to."""
    truth = {"y": np.array([[100.0], [-100.5], [np.nan]]), "h": np.zeros((3, 2))}
    assert _inside(truth, CLAIM).tolist() == [[True] * 2, [False] * 2, [True] * 2]


def test_without_a_way_to_run_float64_alone_decides() -> None:
    proof = prove_heads(heads(), CLAIM, ())
    assert (proof.failures, proof.error, proof.ratio, proof.original_error) == ((), 0.0, 0.0, 0.0)


def test_the_first_linear_operator_may_round() -> None:
    """By 10^-12 of the largest pre-activation, at least of 1; not by more."""
    for far, holds in ((2.0**6, True), (2.0**24, False)):
        rounded = part(
            f"{FIRST.replace('y = ', 'r = ')} q = Add(r, ${far}) y = Sub(q, ${far}) s = Sigmoid(y) heads = Mul(y, s)",
            f"{SHAPE} x",
            f"{WIDE} heads",
        )
        failures = prove_heads(replace(heads(), front=rounded), CLAIM, ()).failures
        assert (failures == ()) is holds
