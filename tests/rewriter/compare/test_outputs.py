"""The rule for any two models, tolerances, and agreement of the best entries."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from numpy.typing import DTypeLike
from onnx import numpy_helper

from rewriter.compare.outputs import Programs, compare_pair
from rewriter.compare.verdicts import OutputVerdict, Rules, Tolerance
from rewriter.errors import ValidationError
from rewriter.files.load import LoadedModel, load_model
from rewriter.proof.inputs.cases import Case
from rewriter.proof.judging import ratio_of
from rewriter.proof.pass_rule import FACTOR, LUCK
from rewriter.proof.statistics import compare, top_k_agreement
from tests.textmodels import text_model


def constant(value: float) -> LoadedModel:
    """x plus a number."""
    return load_model(text_model("out = Add(x, given)", constants={"given": np.asarray([value])}))


CASE = Case("some", {"x": np.full((2, 3, 4), 0.9, np.float32)})
"""All channels have the same values."""

LARGEST = FACTOR * LUCK
"""Errors that are the same in all channels may be so many times the original's."""


def judged(
    a: LoadedModel, b: LoadedModel, *, truth: float | None, rules: Rules | None = None, moved: float | None = None
) -> OutputVerdict:
    """The verdict where x plus `truth` is right, and certified programs may give x plus `moved`."""
    wide = CASE.feeds["x"].astype(np.float64)
    right = None if truth is None else [{"out": wide + truth}]
    proof = compare_pair(
        (a, b),
        [CASE],
        right,
        "cpu",
        rules or Rules({}),
        Programs(planned=lambda: () if moved is None else [[{"out": wide + moved}]]),
    )
    return proof.outputs["out"]


@pytest.mark.parametrize(
    ("error_a", "error_b", "passed"),
    [
        (1e-5, 0.97e-5 * LARGEST, True),
        (1e-5, 1.03e-5 * LARGEST, False),
        (-1e-5, 1e-5, True),
        (1e-5, -1.03e-5 * LARGEST, False),
        (0.0, 1e-5, False),
    ],
)
def test_so_many_times_the_error_of_the_original(error_a: float, error_b: float, passed: bool) -> None:
    verdict = judged(constant(0.5 + error_a), constant(0.5 + error_b), truth=0.5)
    assert verdict.passed is passed
    assert verdict.rule == "float64"
    assert verdict.error_b == pytest.approx(abs(error_b), rel=1e-2)
    if error_a:
        assert verdict.error_ratio == pytest.approx(abs(error_b / error_a), rel=1e-2)


def test_certified_errors_are_allowed_for_but_not_more() -> None:
    assert not judged(constant(0.5), constant(0.5004), truth=0.5).passed
    assert judged(constant(0.5), constant(0.5004), truth=0.5, moved=0.5004).passed
    assert not judged(constant(0.5), constant(0.501), truth=0.5, moved=0.5004).passed
    assert not judged(constant(0.5), constant(0.51), truth=0.5, moved=0.51).passed, "they are capped"


def test_without_truth_what_rounding_moves_the_original_by() -> None:
    """Noise of up to 8 units in the last place on the input moves the output by as much, and four times that is
    allowed."""
    assert judged(constant(0.5), constant(0.5 + 16 * 2.0**-23), truth=None).passed
    verdict = judged(constant(0.5), constant(0.5 + 64 * 2.0**-23), truth=None)
    assert (verdict.passed, verdict.rule, verdict.error_ratio, verdict.error_a) == (False, "original", None, None)
    assert verdict.error_b == pytest.approx(64 * 2.0**-23, rel=1e-2)
    assert verdict.reason is not None
    assert verdict.reason.startswith(f"error {verdict.error_b:.3g} in channel")
    assert f"exceeds the allowed {verdict.allowed:.3g} = 4 x " in verdict.reason


def test_a_float64_evaluation_of_another_function_excuses_nothing() -> None:
    """The original is 0.1 off: four times that would let any difference pass."""
    assert judged(constant(0.5), constant(0.5), truth=0.6).passed
    verdict = judged(constant(0.5), constant(0.501), truth=0.6)
    assert (verdict.passed, verdict.rule, verdict.error_ratio) == (False, "original", None)
    assert not judged(constant(0.5), constant(0.501), truth=0.6, moved=0.501).passed, "nor do certified errors"
    assert judged(constant(0.5), constant(0.501), truth=0.5 + 1e-4).rule == "float64"


def test_rounding_of_the_largest_value_is_always_allowed() -> None:
    """The original happens to be exact."""
    verdict = judged(constant(0.5), constant(0.5 + 3 * 2.0**-23), truth=0.5)
    assert verdict.passed


def test_nan_elsewhere_never_passes() -> None:
    loose = Rules({None: Tolerance(1e9)})
    verdict = judged(constant(0.5), constant(float("nan")), truth=0.5, rules=loose)
    assert (verdict.passed, verdict.reason) == (False, "is NaN in other places")
    assert judged(constant(0.5), constant(float("inf")), truth=0.5).reason == "is infinite in other places"


def test_another_shape() -> None:
    turned = text_model("given = Add(x, x) out = Transpose<perm=[1, 0, 2]>(given)", outputs="float[a, b, 4] out")
    assert judged(constant(0.5), load_model(turned), truth=0.5).reason == "has shape [3, 2, 4] instead of [2, 3, 4]"


def test_values_that_are_no_floats_must_be_equal() -> None:
    outputs = "int64[batch, tokens] out"
    a, b, c = (
        load_model(text_model(f"y = Mul(x, ${sign}) out = ArgMax<axis=-1, keepdims=0>(y)", outputs=outputs))
        for sign in ("1.0", "2.0", "-1.0")
    )
    case = Case("some", {"x": np.linspace(-1, 1, 24, dtype=np.float32).reshape(2, 3, 4)})
    assert compare_pair((a, b), [case], None, "cpu", Rules({})).outputs["out"].passed
    verdict = compare_pair((a, c), [case], None, "cpu", Rules({None: Tolerance(100.0)})).outputs["out"]
    assert (verdict.passed, verdict.rule) == (False, "equal")
    assert verdict.reason == "holds values that are not floating-point, and they differ"


def test_a_model_that_refuses_what_the_other_takes() -> None:
    picky = text_model("y = Reshape(x, two) out = Relu(y)", constants={"two": _dims(2, 2, 4)})
    with pytest.raises(ValidationError, match="model B does not run on the input 'some'"):
        judged(constant(0.5), load_model(picky), truth=0.5)


def _dims(*dims: int) -> onnx.TensorProto:
    return numpy_helper.from_array(np.asarray(dims, np.int64), "two")


@pytest.mark.parametrize(
    ("tolerance", "excess"),
    [(Tolerance(0.1), 0.1), (Tolerance(0.2), 0.0), (Tolerance(0.0, 0.1), 0.1), (Tolerance(0.1, 0.1), 0.0)],
)
def test_tolerances_add_up(tolerance: Tolerance, excess: float) -> None:
    a, b = np.asarray([1.0, 2.0]), np.asarray([1.2, 2.0])
    assert tolerance.excess(a, b) == pytest.approx(excess)


def test_a_named_tolerance_goes_before_that_of_all() -> None:
    rules = Rules({None: Tolerance(1.0), "x": Tolerance(2.0)})
    assert rules.tolerance("x") == Tolerance(2.0)
    assert rules.tolerance("y") == Tolerance(1.0)
    assert Rules({"x": Tolerance(2.0)}).tolerance("y") is None


def test_a_ratio_of_equal_errors_is_one() -> None:
    assert [ratio_of(error, error, 1e-7) for error in (0.0, 1e-9, 1e-3)] == [1.0, 1.0, 1.0]
    assert ratio_of(1e-3, 0.0, 0.0) > 1e300


# -- statistics ------------------------------------------------------------------------------------------------------


def test_relative_differences_near_zero_are_not_told() -> None:
    expected, actual = np.asarray([1e-30, 1e-4, 0.5, 1.0, -np.inf]), np.asarray([1e-2, 2e-4, 0.6, 1.0, -np.inf])
    stats = compare("y", expected, actual)
    assert stats.max_rel == pytest.approx(0.2)
    assert stats.worst_rel == (2,)
    assert stats.max_abs == pytest.approx(0.1)
    assert compare("y", np.zeros(3), np.ones(3)).max_rel == 0.0


def test_relative_differences() -> None:
    expected = np.asarray([[0.0, 1.0, -2.0, 100.0]])
    actual = np.asarray([[5.0, 1.5, -2.0, 101.0]])
    stats = compare("x", expected, actual)
    assert stats.max_rel == 0.5
    assert stats.worst_rel == (0, 1)
    assert stats.worst == (0, 0)
    assert stats.mean_rel == pytest.approx((0.5 + 0.0 + 0.01) / 3)
    assert stats.p99_rel == pytest.approx(0.5)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_top_k(dtype: DTypeLike) -> None:
    a = np.asarray([[5, 4, 3, 2, 1], [1, 2, 3, 4, 5]], dtype)
    b = np.asarray([[4, 5, 3, 2, 1], [5, 2, 3, 4, 1]], dtype)
    found = [top_k_agreement(a, b, k) for k in (1, 2, 5, 9)]
    assert found == [(0.0, 2), (0.75, 2), (1.0, 2), (1.0, 2)]


def test_top_k_of_what_is_no_ranking() -> None:
    assert top_k_agreement(np.zeros((2, 3), np.int64), np.zeros((2, 3), np.int64), 1) is None
    assert top_k_agreement(np.zeros((2, 3)), np.zeros((3, 2)), 1) is None
    assert top_k_agreement(np.full((1, 3), np.nan), np.zeros((1, 3)), 1) is None
