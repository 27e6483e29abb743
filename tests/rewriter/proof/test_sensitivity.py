"""How far rounding moves a model: the noise compared with numpy, and what is made of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from rewriter.arrays import Array
from rewriter.files.load import load_model
from rewriter.ort.sessions import open_session
from rewriter.proof import noise
from rewriter.proof.claims import Claim
from rewriter.proof.distance import FACTOR
from rewriter.proof.inputs.cases import Case
from rewriter.proof.noise import FREQUENCY, moved, relative_size, with_noise
from rewriter.proof.pass_rule import Channels
from rewriter.proof.sensitivity import CAP, DRAWS, LUCK, SIZES, Sensitivity, own_rounding, rounding, sensitivity
from tests.textmodels import text_model, values

EPS = 2.0**-23
TWO_CASES = [
    Case(str(size), {"x": np.random.default_rng(size).normal(size=(2, size, 4)).astype(np.float32)}) for size in (3, 5)
]


def measured(model: onnx.ModelProto, cases: list[Case] = TWO_CASES, **options: Any) -> Sensitivity:
    session = open_session(model, optimise=False)
    plain = [session.run(case.feeds) for case in cases]
    return sensitivity(load_model(model), cases, plain, "cpu", **options)


def largest(found: Sensitivity, name: str = "out") -> float:
    return max(float(each.max()) for each in found.moved[name])


# -- the noise -------------------------------------------------------------------------------------------------------


def test_noise_is_what_the_formula_says() -> None:
    """Against numpy: noise of a tenth on what a MatMul reads, so that rounding does not blur it."""
    found = measured(
        text_model("a = Relu(x) out = MatMul(a, W1)", outputs="float[b, t, 8] out"), still=("x",), sizes=(0.1 / EPS,)
    )
    weight = values("W1").astype(np.float32).astype(np.float64)
    for case, got in zip(TWO_CASES, found.moved["out"], strict=True):
        read = np.maximum(case.feeds["x"].astype(np.float64), 0)
        each = [np.abs((0.1 * read * np.sin(FREQUENCY * read + draw)) @ weight) for draw in range(DRAWS)]
        np.testing.assert_allclose(got, np.max(each, axis=0), rtol=0.02, atol=2e-3)
    assert (found.draws, found.tensors) == (DRAWS, 1)


def test_noise_is_a_few_units_in_the_last_place() -> None:
    found = measured(text_model("a = Relu(x) out = MatMul(a, W1)", outputs="float[b, t, 8] out"), still=("x",))
    for case, got in zip(TWO_CASES, found.moved["out"], strict=True):
        most = 8 * EPS * np.maximum(case.feeds["x"], 0).astype(np.float64) @ np.abs(values("W1"))
        assert np.all(got <= 1.5 * most + 8 * EPS)
        assert got.max() > 0.2 * most.max()


def test_the_same_at_every_call() -> None:
    model = text_model("a = Relu(x) out = MatMul(a, W1)", outputs="float[b, t, 8] out")
    first, second = measured(model), measured(model)
    for one, other in zip(first.moved["out"], second.moved["out"], strict=True):
        np.testing.assert_array_equal(one, other)


def test_draws_differ() -> None:
    model = with_noise(text_model("a = Relu(x) out = MatMul(a, W1)", outputs="float[b, t, 8] out"))
    session = open_session(model.proto, optimise=False)
    found = [session.run({**TWO_CASES[0].feeds, **model.feeds(8.0, draw)})["out"].tobytes() for draw in range(DRAWS)]
    assert len(set(found)) == DRAWS


@pytest.mark.parametrize(
    ("body", "tensors"),
    [
        ("a = Relu(x) out = MatMul(a, W1)", 1),
        ("a = Relu(x) b = Add(a, $1.0) c = Mul(a, b) out = MatMul(c, W1)", 1),
        ("a = Relu(x) q = MatMul(a, W1) out = MatMul(a, W1)", 1),
        ("a = Relu(x) b = Relu(W1) out = MatMul(a, b)", 1),
        ("a = Relu(x) q, s, z = DynamicQuantizeLinear(a) out = DequantizeLinear(q, s, z)", 1),
        ("a = Relu(x) b = com.microsoft.QuickGelu<alpha=1.0>(a) out = MatMul(b, W1)", 2),
        ("out = MatMul(x, W1)", 0),
        ("a = Relu(x) out = Abs(a)", 0),
    ],
    ids=["linear", "elementwise", "read twice", "constant", "quantiser", "other domain", "input", "nothing mixes"],
)
def test_which_tensors_get_noise(body: str, tensors: int) -> None:
    """Those that linear operators, quantisers and operators of other domains read, and no constants."""
    model = text_model(body, outputs="float[b, t, c] out", domains={"com.microsoft": 1})
    assert measured(model).tensors == tensors


def test_noise_in_bodies_of_control_flow() -> None:
    branch = "{name} () => (float[b, t, 4] {out}) {{ {h} = Relu(x) {out} = MatMul({h}, W) }}"
    bodies = [branch.format(name=name, out=f"o_{name}", h=f"h_{name}") for name in ("yes", "no")]
    attributes = f"then_branch={bodies[0]}, else_branch={bodies[1]}"
    body = f"c = Constant<value_int=1>() flag = Cast<to=9>(c) out = If(flag) <{attributes}>"
    model = text_model(body, constants={"W": np.eye(4)})
    assert len(with_noise(model).points) == 2
    assert largest(measured(model, still=("x",))) > 0.5 * EPS


def test_noise_in_front_of_control_flow_leaves_its_bodies_where_they_are() -> None:
    """Nodes are inserted in front of the If, which its bodies are found by the place of."""
    bodies = ", ".join(
        f"{name}_branch={name} () => (float[b, t, 4] o_{name}) {{ h_{name} = Relu(m) o_{name} = MatMul(h_{name}, W) }}"
        for name in ("then", "else")
    )
    body = f"a = Relu(x) m = MatMul(a, W) c = Constant<value_int=1>() flag = Cast<to=9>(c) out = If(flag) <{bodies}>"
    model = text_model(body, constants={"W": np.eye(4)})
    noisy = with_noise(model)
    onnx.checker.check_model(noisy.proto)
    assert len(noisy.points) == 3
    assert largest(measured(model, still=("x",))) > EPS


def test_names_of_the_model_are_left_alone() -> None:
    model = text_model("a = Relu(x) out = MatMul(a, W1)", outputs="float[b, t, 8] out")
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = ["noise/a/x" if name == "a" else name for name in names]
    onnx.checker.check_model(model)
    assert largest(measured(model)) > 0


def test_half_precision_has_coarse_units_already() -> None:
    model = text_model("a = Relu(x) out = MatMul(a, W1)", outputs="float[b, t, 8] out", elem="float16")
    cases = [Case(case.name, {"x": case.feeds["x"].astype(np.float16)}) for case in TWO_CASES]
    found = measured(model, cases, still=("x",))
    most = max(2 * 2.0**-10 * np.maximum(case.feeds["x"], 0) @ np.abs(values("W1")) for case in cases[:1])
    assert 0 < found.moved["out"][0].max() <= 2 * most.max()
    assert relative_size(np.float16, 8.0) == 2 * 2.0**-10
    assert relative_size(np.float32, 8.0) == 8 * EPS


def test_old_opsets_have_no_noise() -> None:
    """Their elementwise operators do not broadcast by themselves."""
    assert not with_noise(text_model("a = Relu(x) out = MatMul(a, W1)", opset=6)).points


def test_whole_numbers_in_inputs_are_exact() -> None:
    """Masks, flags and positions; 1 - mask, times -1e9, must not be moved."""
    array = np.asarray([0.0, 1.0, -10000.0, 0.5, np.inf, np.nan], np.float32)
    noisy = moved(array, 8.0, 1)
    np.testing.assert_array_equal(noisy[[0, 1, 2, 4, 5]], array[[0, 1, 2, 4, 5]])
    assert 0 < abs(noisy[3] - 0.5) <= 0.5 * 8 * EPS
    assert noisy.dtype == np.float32


def test_inputs_have_noise_unless_they_are_still() -> None:
    model = text_model("out = Abs(x)")
    assert 0 < largest(measured(model)) <= 8 * EPS * max(float(np.abs(case.feeds["x"]).max()) for case in TWO_CASES)
    assert largest(measured(model, still=("x",))) == 0.0


def test_ends_have_noise_of_their_own() -> None:
    model = text_model("a = Abs(x) out = Neg(a)")
    assert largest(measured(model, still=("x",))) == 0.0
    assert 0 < largest(measured(model, still=("x",), ends=["a"])) <= 8 * EPS * 4


# -- certified errors ------------------------------------------------------------------------------------------------


class Unplanned:
    """The numbers of a program play no part here."""

    crossings = np.zeros(0)

    def evaluate(self, y: Array, z: Array | None = None) -> Array:
        raise NotImplementedError

    def float64_rounding(self, y: Array, z: Array | None = None) -> Array:
        raise NotImplementedError


def claim(*inputs: str, output: str, error: float) -> Claim:
    return Claim(
        "mlp", inputs, output, (), (), error, 0.0, TensorProto.FLOAT, Unplanned(), gated=len(inputs) > 1
    )  # fmt: skip


@pytest.mark.parametrize(
    ("body", "claimed", "unit"),
    [
        ("h = Relu(x) out = Abs(h)", claim("x", output="h", error=1e-3), lambda x: np.maximum(x, 1)),
        ("t = Tanh(x) u = Abs(x) h = Mul(t, u) out = Abs(h)", claim("x", "u", output="h", error=1e-3),
         lambda x: np.maximum(np.abs(x), 1)),
    ],
    ids=["plain", "gated"],
)  # fmt: skip
def test_activations_are_off_by_what_their_programs_are_granted(body: str, claimed: Claim, unit: Any) -> None:
    """Over max(1, |f|), of a gate h(g) u also over |u|."""
    cases = [Case(case.name, {"x": 3 * case.feeds["x"]}) for case in TWO_CASES]
    found = measured(text_model(body), cases, claims=[claimed], still=("x",))
    for case, got in zip(cases, found.moved["out"], strict=True):
        share = got / (1e-3 * unit(case.feeds["x"].astype(np.float64)))
        assert np.all(share <= 1.001 + 1e-2)
        assert np.median(share) > 0.9


def test_claims_about_tensors_that_are_not_there_are_left_out() -> None:
    assert not with_noise(text_model("out = Abs(x)"), [claim("x", output="elsewhere", error=1.0)]).points


# -- what is made of it ----------------------------------------------------------------------------------------------


def test_a_quantiser_amplifies_rounding() -> None:
    """Values next to a step: noise in the last place moves the output by a whole step."""
    zero = numpy_helper.from_array(np.asarray(0, np.uint8), "zero")
    constants = {"scale": numpy_helper.from_array(np.asarray(0.1, np.float32), "scale"), "zero": zero}
    body = "a = Relu(x) q = QuantizeLinear(a, scale, zero) out = DequantizeLinear(q, scale, zero)"
    model = text_model(body, constants=constants)
    near = Case("", {"x": np.float32(0.1) * (np.arange(24, dtype=np.float32).reshape(2, 3, 4) + np.float32(0.5))})
    far = Case("", {"x": np.float32(0.1) * (np.arange(24, dtype=np.float32).reshape(2, 3, 4) + np.float32(0.3))})
    assert largest(measured(model, [near], still=("x",))) == pytest.approx(0.1, rel=1e-3)
    assert largest(measured(model, [far], still=("x",))) == 0.0


def test_what_becomes_infinite_or_nan_says_nothing() -> None:
    """Noise carries 3.4e38 beyond the largest number, and a root below 0."""
    top = float(np.finfo(np.float32).max)
    model = text_model("a = Relu(x) b = MatMul(a, W) out = Sub(b, $0.5)", constants={"W": np.eye(4)})
    found = measured(model, [Case("", {"x": np.full((1, 3, 4), top, np.float32)})], still=("x",))
    assert np.isfinite(found.moved["out"][0]).all()


def test_another_shape_says_nothing() -> None:
    body = "a = Relu(x) b = MatMul(a, W) g = Greater(b, $1.0) n = NonZero(g) t = Cast<to=1>(n) out = Abs(t)"
    model = text_model(body, outputs="float[i, j] out", constants={"W": np.eye(4)})
    above = float(np.nextafter(np.float32(1), np.float32(2)))
    found = measured(model, [Case("", {"x": np.full((1, 3, 4), above, np.float32)})], still=("x",))
    assert found.moved["out"][0].shape == (3, 12)
    assert not found.moved["out"][0].any()


def channels(scale: list[float]) -> Channels:
    return Channels.of([np.asarray([scale])])


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([1e-3, 1e-3, 1e-3], [1e-3 * LUCK] * 3),
        ([1e-2, 1e-3, 1e-3], [1e-2, 1e-3 * LUCK, 1e-3 * LUCK]),
        ([0.0, 0.0, 1e-3], [EPS, EPS, 1e-3]),
        ([0.0, 0.0, 0.0], [EPS] * 3),
        ([1.0, 0.0, 0.0], [CAP / FACTOR, EPS, EPS]),
        ([np.inf, 0.0, 0.0], [CAP / FACTOR, EPS, EPS]),
        ([1.0, 1.0, 1.0], [CAP / FACTOR] * 3),
    ],
    ids=["alike", "one moves more", "two do not move", "none does", "one is capped", "infinite", "all are capped"],
)
def test_rounding_by_channel(errors: list[float], expected: list[float]) -> None:
    one = channels([1.0, 1.0, 1.0])
    np.testing.assert_allclose(rounding(one, np.asarray(errors), EPS), expected)
    wide = channels([1e9, 1.0, 1.0])
    scaled = np.asarray(errors) * [1e9, 1.0, 1.0]
    np.testing.assert_allclose(rounding(wide, scaled, EPS), np.asarray(expected) * [1e9, 1.0, 1.0])


def test_channels_of_zeros_have_no_rounding() -> None:
    none = Channels(samples=(0,), scale=np.array([0.0, 2.0, 0.0]))
    np.testing.assert_array_equal(rounding(none, np.zeros(3), EPS), [0.0, 2.0 * EPS, 0.0])
    assert rounding(Channels(samples=(0,), scale=np.zeros((3, 0))), np.zeros((3, 0)), EPS).shape == (3, 0)


def test_the_numbers_are_those_of_the_description() -> None:
    """Larger ones let more pass."""
    assert (DRAWS, LUCK, CAP, SIZES) == (8, 2.0, 2.0, (1.0, 2.0, 4.0, 8.0))


def test_deviations_by_channel() -> None:
    made = [np.zeros((2, 3, 2)), np.zeros((2, 5, 2))]
    made[1][1, 4, 1] = 0.25
    found = Sensitivity({"out": tuple(made)}, 8, 1)
    same = Channels.of([np.ones((2, 3, 2)), np.ones((2, 5, 2))])
    np.testing.assert_array_equal(found.errors("out", same), [0.0, 0.25])


def test_only_floats_are_measured() -> None:
    outputs = "int64[b, t] ids, float[b, t, 4] out"
    found = measured(text_model("ids = ArgMax<axis=-1, keepdims=0>(x) out = Abs(x)", outputs=outputs))
    assert list(found.moved) == ["out"]


def test_the_model_is_not_changed() -> None:
    model = text_model("a = Relu(x) out = MatMul(a, W1)", outputs="float[b, t, 8] out")
    before = model.SerializeToString(deterministic=True)
    measured(model)
    assert model.SerializeToString(deterministic=True) == before


def test_every_quantiser_is_a_mixer() -> None:
    assert noise.QUANTISERS <= noise._MIXERS


def test_own_rounding_is_noise_of_one_unit_in_a_few_runs() -> None:
    model = text_model("a = Relu(x) out = MatMul(a, W1)", outputs="float[b, t, 8] out")
    session = open_session(model, optimise=False)
    found = own_rounding(load_model(model), TWO_CASES, [session.run(case.feeds) for case in TWO_CASES], "cpu")
    assert found.draws == 4
    assert 0.0 < largest(found) < largest(measured(model))
