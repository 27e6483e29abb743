"""The rule on arrays by hand, and the noise that it is fed with."""

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest

from rewriter import rewrite
from rewriter.files.load import LoadedModel, load_model
from rewriter.ort import open_session
from rewriter.proof.rule import FACTOR, Judgement, Results, compared, uncompared
from rewriter.proof.run import Point, nudged, run_model
from rewriter.proof.settings import Settings
from rewriter.proof.validate import Judge
from tests.textmodels import SILU, mlp, tensor, values

RNG = np.random.default_rng(0)
A = RNG.normal(0.0, 1.0, (3, 5)).astype(np.float32)
EPS = float(np.finfo(np.float32).eps)


def judged(b: Any, *variants: Any, a: Any = A) -> Judgement:
    return compared("out", [{"out": a}], [[{"out": v}] for v in variants], [{"out": b}])


def test_rounding_passes_and_more_does_not() -> None:
    assert judged(A).error == 0.0
    assert judged(A * np.float32(1 + 8 * EPS)).holds
    assert not judged(A * np.float32(1 + 64 * EPS)).holds


def test_the_original_s_own_rounding_is_the_measure() -> None:
    moved = A * np.float32(1.001)
    found = judged(A * np.float32(1.01), moved)
    assert found.holds
    assert found.allowed == pytest.approx(FACTOR * 1e-3, rel=1e-3)
    assert not judged(A * np.float32(1.02), moved).holds


def test_a_single_wrong_entry_shows() -> None:
    wrong = A.copy()
    wrong[2, 4] += np.float32(1e-3)
    assert "is off by" in judged(wrong).reason


@pytest.mark.parametrize(
    ("a", "b", "largest"),
    [
        (A, A + np.float32(0.5), 0.5),
        (np.where(A > 0, np.inf, A), np.where(A > 0, np.inf, A - 0.25), 0.25),
        (np.array([1, 2, 9]), np.array([1, 5, 9]), 3.0),
        (np.array([True, False]), np.array([True, True]), 1.0),
        (np.array(["a", "b"], object), np.array(["a", "c"], object), np.inf),
        (A, A[:2], np.inf),
        (A, np.where(A > 0, np.nan, A), np.inf),
    ],
)
def test_the_largest_difference(a: Any, b: Any, largest: float) -> None:
    assert judged(b, a=a).max_abs == pytest.approx(largest, rel=1e-6)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ([A[:0]], "has no elements in any case"),
        ([A[:0], A], ""),
        ([A * np.nan, A * np.inf], "is NaN or infinite throughout, in every case"),
        ([np.array(["a"], object)], ""),
        ([np.array([False])], ""),
    ],
)
def test_what_cannot_be_compared(values: Any, why: str) -> None:
    assert uncompared(values) == why


def test_what_rounding_moves_as_far_as_it_is_large_proves_nothing() -> None:
    found = judged(-A, 1.1 * A)
    assert (found.proves_nothing, found.holds) == (True, True)
    assert not judged(-A).holds


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_places_of_nan_and_infinities(value: float) -> None:
    odd = A.copy()
    odd[1, 1] = value
    assert "finite in one model only" in judged(odd).reason
    assert "finite in one model only" in judged(A, a=odd).reason
    assert judged(odd, a=odd).holds
    assert judged(A, odd).holds  # the original's own rounding decides it


def test_shape_and_type() -> None:
    assert judged(A[:2]).reason == "has shape [2, 5] instead of [3, 5]"
    assert judged(A.astype(np.float64)).reason == "has type float64 instead of float32"


def test_integers_may_differ_as_often_as_noise_changes_them() -> None:
    a = np.arange(100)
    one, many = a.copy(), a.copy()
    one[0], many[:40] = -1, -1
    assert not judged(one, a=a).holds
    assert judged(one, one, a=a).holds
    assert not judged(many, one, a=a).holds


def test_a_small_case_is_measured_on_the_scale_of_the_others() -> None:
    small = (A * 1e-9).astype(np.float32)
    cases = [{"out": A}, {"out": small}]
    assert compared("out", cases, [], [{"out": A}, {"out": small * np.float32(1.5)}]).holds
    assert not compared("out", cases, [], [{"out": A}, {"out": A}]).holds
    nothing = [{"out": np.zeros_like(A)}]
    assert compared("out", nothing, [], nothing).holds
    assert not compared("out", nothing, [], [{"out": A}]).holds


def _moved(point: Point, draw: int) -> Any:
    model = mlp(SILU)
    x = {"x": RNG.normal(0.0, 1.0, (2, 3, 4)).astype(np.float32)}
    noisy, draws = nudged(load_model(model), [point])
    plain = open_session(model, "cpu", optimise=False).run(x)["out"]
    return np.abs(open_session(noisy, "cpu", optimise=False).run({**x, **draws[draw]})["out"] - plain)


def test_noise_is_of_the_size_that_is_asked_for() -> None:
    rounding = _moved(Point("h", (), 1, argument="y"), 0).max()
    coarse = _moved(Point("h", (), 1, 0.05, argument="y"), 0).max()
    steady = _moved(Point("h", (), 1, 0.05, argument="y"), 2).max()
    assert 1e-8 < rounding < 1e-4
    assert 1e-2 < coarse < 10.0
    assert steady > 1e-2


def miscompile(monkeypatch: pytest.MonkeyPatch, made: LoadedModel, factor: float) -> None:
    """Let every run of `made` return results that are wrong by a factor."""
    right = run_model

    def miscompiled(model: Any, *arguments: Any, **options: Any) -> Any:
        runs = right(model, *arguments, **options)
        if model.proto is not made.proto:
            return runs
        ways = {
            way: replace(
                ran,
                results=[{name: value * np.float32(factor) for name, value in case.items()} for case in ran.results],
            )
            for way, ran in runs.ways.items()
        }
        return replace(runs, ways=ways)

    monkeypatch.setattr("rewriter.proof.validate.run_model", miscompiled)


@pytest.mark.parametrize(
    "point",
    [
        Point("absent", (), 1),
        Point("h", (("absent", "body"),), 1),
        Point("h", (), onnx.TensorProto.INT32),
        Point("h", (), 1, value="absent"),
    ],
)
def test_unknown_tensors_get_no_noise(point: Point) -> None:
    assert nudged(load_model(mlp(SILU)), [point])[1] == ()


def in_half() -> onnx.ModelProto:
    """An activation that is computed in float16, and then cast."""
    weight = tensor("W2", values("W2"))
    last = f"{SILU.replace('h =', 'p =')} h = Cast<to = 1>(p)"
    model = mlp(last, second="out = MatMul(h, W2)", elem="float16", constants={"W2": weight})
    model.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    return model


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("model", "least"),
    [
        (mlp(SILU), 0.0),
        (in_half(), 1e-4),
        (
            mlp("h = com.microsoft.BiasGelu(first, b1)", first="first = MatMul(x, W1)", domains={"com.microsoft": 1}),
            EPS,
        ),
    ],
)
def test_noise_reaches_activations_that_are_cast_or_fused(
    monkeypatch: pytest.MonkeyPatch, model: onnx.ModelProto, least: float
) -> None:
    """What is computed in float16 may differ by that much, if it is cast; a fused operator has no tensor y.

    More than that fails. The certificate holds even so, since what ran was something else than what the file says.
    """
    original = load_model(model)
    report = rewrite(original.proto)
    made = load_model(report.rewritten)
    settings = Settings(providers=("cpu",))
    noise = [Point("h", (), onnx.TensorProto.FLOAT16 if least == 1e-4 else onnx.TensorProto.FLOAT)]
    found = Judge(original, made, (), settings, noise=noise).verdict()
    assert found.passed, found.failures
    (seen,) = found.providers["cpu"].compared.values()
    assert seen.allowed > FACTOR * least
    assert not seen.proves_nothing
    miscompile(monkeypatch, made, 1.0 + 2.0 * seen.allowed)
    wrong = Judge(original, made, (), settings, noise=noise).verdict()
    assert (wrong.certified, wrong.passed) == (True, False)
    assert "is off by" in wrong.failures[0]


# -- tolerances in place of the rule ----------------------------------------------------------------------------------


def results(*values: float) -> Results:
    return [{"out": np.asarray(values, np.float32)}]


def test_a_tolerance_takes_the_place_of_the_rule() -> None:
    a, b = results(1.0, 2.0), results(1.0, 2.5)
    assert compared("out", [{}, *a], [], [{}, *b]).case == 1
    found = compared("out", a, [], b, (0.6, 0.0))
    assert (found.holds, found.error, found.allowed) == (True, 0.5, 0.6)
    found = compared("out", a, [], b, (0.25, 0.05))
    assert found.reason == "error 0.5 exceeds atol 0.25, rtol 0.05 by 0.15; at [1] 2.5 instead of 2.0"


def test_no_tolerance_excuses_other_places_of_nan_or_another_shape() -> None:
    a, loose = results(1.0, 2.0), (1e9, 0.0)
    assert "finite in one model only" in compared("out", a, [], results(1.0, np.nan), loose).reason
    assert "finite in one model only" in compared("out", a, [], results(1.0, np.inf), loose).reason
    assert compared("out", a, [], results(1.0), loose).reason == "has shape [1] instead of [2]"


def test_values_that_are_no_floats_must_be_equal() -> None:
    a, b = ([{"out": np.asarray([1, each])}] for each in (2, 3))
    assert not compared("out", a, [], b, (100.0, 0.0)).holds


@pytest.mark.parametrize(
    ("atol", "rtol", "holds"), [(0.1, 0, False), (0.21, 0, True), (0, 0.1, False), (0.1, 0.11, True)]
)
def test_tolerances_add_up(atol: float, rtol: float, *, holds: bool) -> None:
    assert compared("out", results(1.0, 2.0), [], results(1.2, 2.0), (atol, rtol)).holds is holds
