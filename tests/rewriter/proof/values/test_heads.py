"""Activations that became heads: right pairs are proved in every form, and what onnxruntime says is wrong is not."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from models.variants import get_variant, make_variant
from rewriter import certify, rewrite
from rewriter.evaluate.arithmetic import Field, draw_prime
from rewriter.evaluate.evaluator import Program
from rewriter.files.load import load_model
from rewriter.ort import write_optimised
from rewriter.proof.certificate.expressions import leaf
from rewriter.proof.values.compare import Pair, Reading
from rewriter.proof.values.walk import Kept, Walk, in_field
from tests.committed import FOLDER
from tests.rewriter.files.test_fallbacks import network
from tests.sabotage.oracle import difference
from tests.textmodels import text_model

FORMS = ("local", "compact", "masked", "maskless", "staged", "whole")
STEMS = ("silu-decoder", "relu-decoder", "gelu-encoder", "gelu-vision", "gated-decoder")


def proved(a: onnx.ModelProto, b: onnx.ModelProto) -> bool:
    return certify(a, b).certificate.certified


@cache
def original(stem: str) -> onnx.ModelProto:
    return onnx.load(FOLDER / f"{stem}.onnx")


@cache
def rewritten(stem: str, form: str) -> onnx.ModelProto:
    return rewrite(original(stem), form=form, validate=False).rewritten


@pytest.mark.sample(0)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stem", STEMS)
def test_every_form_of_every_activation_is_proved_and_what_onnxruntime_makes_of_it(
    stem: str, form: str, tmp_path: Path
) -> None:
    assert proved(original(stem), rewritten(stem, form))
    if (STEMS.index(stem) + FORMS.index(form)) % 2:
        return  # onnxruntime optimises every second: each form and each model
    optimised = write_optimised(load_model(rewritten(stem, form)), "extended", tmp_path)
    assert proved(original(stem), onnx.load(optimised))


GATE = "y = MatMul(x, W1) g = MatMul(x, W1) a = Abs(y) s = Add(y, a) r = Mul(s, $0.5) h = Mul(r, g) out = MatMul(h, W2)"


@pytest.mark.sample(0)
@pytest.mark.parametrize(
    "model", [network("body", "Relu", ""), text_model(GATE)], ids=["in a branch", "as (y + |y|) / 2"]
)
def test_heads_are_read_whatever_signs_are_drawn(model: onnx.ModelProto) -> None:
    made = rewrite(model, validate=False).rewritten
    for _ in range(12):
        found = Pair(load_model(model), load_model(made))._read_heads(Reading())
        assert found.regions
        assert not found.failures


@pytest.mark.sample(0)
@pytest.mark.parametrize(
    "variant", ["int4-nbits", "int8-dynamic", "int8-weights", "fp16-all", "function-own", "if-own", "loop"]
)
def test_weights_that_others_store_and_bodies(variant: str, tmp_path: Path) -> None:
    stem = "relu-decoder" if variant == "loop" else "gated-decoder"
    path = make_variant(get_variant(variant), FOLDER / f"{stem}.onnx", tmp_path / "variant.onnx")
    model = onnx.load(path)
    for form in ("local", "compact"):
        assert proved(model, rewrite(model, form=form, validate=False).rewritten)


OPERATORS = (
    "Relu(x)", "Sigmoid(x)", "Tanh(x)", "Erf(x)", "Softplus(x)", "Softsign(x)", "Neg(x)", "Abs(x)", "Reciprocal(x)",
    "Elu<alpha = 0.5>(x)", "Selu(x)", "Celu<alpha = 2.0>(x)", "LeakyRelu<alpha = 0.1>(x)", "HardSigmoid(x)",
    "HardSwish(x)", "Mish(x)", "Gelu(x)", "Gelu<approximate = \"tanh\">(x)", "Sqrt(x)", "Exp(x)", "Pow(x, c)",
    "Max(x, c)", "Min(c, x)", "PRelu(x, c)", "Clip(x, c)", "Clip(x, c, d)", "Div(c, x)", "Sub(x, d)", "Mul(x, x)",
    "com.microsoft.QuickGelu(x)", "com.microsoft.FastGelu(x)", "com.microsoft.Gelu(x)", "Where(low, x, d)",
    "Where(high, c, x)", "Where(between, x, c)",
)  # fmt: skip


@pytest.mark.parametrize("snaps", [False, True])
def test_operators_read_as_expressions_have_the_values_of_their_rows(snaps: bool) -> None:
    number, field = "Constant<value = float {%s}>()", Field(draw_prime(), b"key", snaps=snaps)
    for text in OPERATORS:
        model = onnx.parser.parse_model(
            f"""<ir_version: 10, opset_import: ["" : 22, "com.microsoft" : 1]> g (float[N, 8] x) => (float[N, 8] z)
            {{ c = {number % "2"} d = {number % "5.5"} low = Less(x, c) some = GreaterOrEqual(x, d) high = Not(some)
               up = LessOrEqual(x, d) between = And(up, some) z = {text} }}"""
        )
        run = Kept(Program(load_model(model)), field, {"x": np.zeros((3, 8), np.float32)})
        z = run.run()["z"]
        expression = Walk(run, {int(run.values["x"].entries[1, 2]): leaf(0)}).at("z", (1, 2))
        assert np.array_equal(in_field(field, expression, {leaf(0): run.values["x"].entries}), z.entries), text


CONVOLUTIONS = """
<ir_version: 9, opset_import: ["" : 17]>
pointwise (float[N, 3, L] x) => (float[N, 3, L] z) <
    float[4, 3, 1] W1 = {0.5, -1, 2, 0.25, 1, 1, -0.5, 0.75, 1.5, 1, -2, 0.125},
    float[4] b = {0.5, -0.25, 0.125, 1},
    float[3, 4, 1] W2 = {1, -0.5, 0.75, 2, 0.25, 1.5, -1, 0.5, -2, 1, 0.375, 3}
> {
    y = Conv(x, W1, b)
    s = Sigmoid(y)
    a = Mul(y, s)
    z = Conv(a, W2)
}
"""


def test_pointwise_convolutions() -> None:
    model = onnx.parser.parse_model(CONVOLUTIONS)
    made = rewrite(model, form="compact", validate=False).rewritten
    assert proved(model, made)
    next(each for each in made.graph.initializer if each.name == "W2").float_data[0] = 2.0
    assert not proved(model, made)


# -- planted errors --------------------------------------------------------------------------------------------------


def changed(values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Wrong values of a constant: an entry, a sign, a scale, rows or keys in another order, a smaller mask."""
    if values.dtype.kind == "i" and values.size == 1 and 0 <= values.item() < 8:
        yield "next", values + 1
    if values.dtype != np.float32 or values.size == 0:
        return
    entry = values.copy()
    place = np.unravel_index(np.abs(np.where(np.isfinite(values), values, 0)).argmax(), values.shape)
    entry[place] = entry[place] * np.float32(0.75) + np.float32(0.125)
    yield "entry", entry
    yield "sign", -values
    yield "scale", values * np.float32(0.9375)
    for axis in range(values.ndim):
        if values.shape[axis] > 1:
            yield f"shifted {axis}", np.roll(values, 1, axis)
    if (values <= -200).any():
        yield "omega", np.where(values <= -200, np.float32(-12), values)
        yield "weak omega", np.where(values <= -200, np.float32(-220), values)


def planted(stem: str, form: str) -> Iterator[tuple[str, onnx.ModelProto]]:
    """The rewritten model with one constant changed at a time: the new ones, and the weights that the blocks read."""
    right = rewritten(stem, form)
    for place, tensor in enumerate(right.graph.initializer):
        for what, values in changed(numpy_helper.to_array(tensor)):
            wrong = onnx.ModelProto()
            wrong.CopyFrom(right)
            wrong.graph.initializer[place].CopyFrom(numpy_helper.from_array(values, tensor.name))
            yield f"{tensor.name} {what}", wrong


@pytest.mark.sample(0)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stem", ["relu-decoder", "gated-decoder"])
def test_no_planted_error_that_acts_is_proved(stem: str, form: str, tmp_path: Path) -> None:
    """Some of them, others in each form and model."""
    tried = 0
    for name, wrong in list(planted(stem, form))[FORMS.index(form) * 5 + len(stem) :: 40]:
        if difference(FOLDER / f"{stem}.onnx", wrong.SerializeToString(), tmp_path) > 1e-3:
            tried += 1
            assert not proved(original(stem), wrong), name
    assert tried
