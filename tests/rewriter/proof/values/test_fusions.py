"""What other tools fuse, written out by its definition: as onnxruntime computes it, and certified."""

from contextlib import suppress

import numpy as np
import onnx
import pytest

from rewriter import certify
from rewriter.graph.attention import definition
from rewriter.graph.fused import FUSED, with_parts
from rewriter.graph.view import LostError, key_of
from rewriter.ort import open_session
from tests.textmodels import text_model

SUM = "a = Add(p, x) t = Add(a, b2)"
NORM = "out = LayerNormalization<epsilon = 0.001>(t, g, b2)"
RMS = "out = SimplifiedLayerNormalization<axis = -1, epsilon = 0.001>"
SKIP = "com.microsoft.SkipLayerNormalization<epsilon = 0.001>"
SCALED, FUSED_PRODUCT = "m = MatMul(p, square) out = Mul(m, half)", "com.microsoft.FusedMatMul"
PAIRS: dict[str, tuple[str, str]] = {
    "without a bias": (f"t = Add(p, x) {NORM}", f"out = {SKIP}(x, p, g, b2)"),
    "with a bias": (f"{SUM} {NORM}", f"out = {SKIP}(p, x, g, b2, b2)"),
    "a bias that was added first": (f"c = Add(p, b2) t = Add(c, x) {NORM}", f"out = {SKIP}(x, p, g, b2, b2)"),
    "with the sum": (
        f"{SUM} n = {NORM.removeprefix('out = ')} out = Sub(n, t)",
        f"n, , , t = {SKIP}(p, x, g, b2, b2) out = Sub(n, t)",
    ),
    "RMS": (f"t = Add(p, x) {RMS}(t, g)", f"out = {SKIP.replace('Layer', 'SimplifiedLayer')}(x, p, g)"),
    "a product with a factor": (SCALED, f"out = {FUSED_PRODUCT}<alpha = 0.5>(p, square)"),
    "a product": ("out = MatMul(p, square)", f"out = {FUSED_PRODUCT}(p, square)"),
    "a GELU with a bias": ("t = Add(p, b2) out = com.microsoft.Gelu(t)", "out = com.microsoft.BiasGelu(p, b2)"),
    "a cast to the same type": ("out = Tanh(p)", "c = Cast<to = 1>(p) out = Tanh(c)"),
}
WRONG: dict[str, tuple[str, str]] = {
    "another epsilon": (PAIRS["without a bias"][0], f"out = {SKIP.replace('0.001', '0.002')}(x, p, g, b2)"),
    "a term twice": (f"{SUM} {NORM}", f"out = {SKIP}(p, p, g, b2, b2)"),
    "no bias": (f"{SUM} {NORM}", f"out = {SKIP}(p, x, g, b2)"),
    "a bias for the shift": (f"t = Add(p, x) {NORM.replace('b2', 'g')}", f"out = {SKIP}(p, x, g, b2, g)"),
    "another factor": (SCALED, f"out = {FUSED_PRODUCT}<alpha = 0.25>(p, square)"),
    "a factor for a term": ("t = Add(p, x) out = MatMul(t, square)", "t = Mul(p, x) out = MatMul(t, square)"),
    "a sum times a term": (
        "u = Exp(p) t = Add(p, x) w = Mul(t, u) out = MatMul(w, square)",
        "u = Exp(p) t = Add(u, x) w = Mul(t, p) out = MatMul(w, square)"),
    "more terms": (
        "t = Add(p, x) u = Add(t, t) out = MatMul(u, square)", "t = Add(p, x) u = Add(t, p) out = MatMul(u, square)"),
    "a cast to a wider type": ("out = Tanh(p)", "c = Cast<to = 10>(p) d = Cast<to = 1>(c) out = Tanh(d)"),
}  # fmt: skip


def model(body: str) -> onnx.ModelProto:
    numbers = {"g": np.linspace(0.5, 2.0, 4), "square": np.arange(16).reshape(4, 4) / 7 - 1, "half": np.array([0.5])}
    return text_model(f"y = MatMul(x, W1) p = MatMul(y, W2) {body}", constants=numbers, domains={"com.microsoft": 1})


def parts_of(node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
    if node.op_type.startswith("Skip"):
        with suppress(LostError):
            return definition(node, {}, opset=17)
    written = FUSED.get(key_of(node))
    return written(node) if written else None


@pytest.mark.parametrize("name", PAIRS)
def test_a_fusion_is_computed_as_it_is_written_out_and_certified(name: str) -> None:
    plain, fused = map(model, PAIRS[name])
    written = with_parts(fused, parts_of)
    assert written is not fused or "Fused" not in name
    feeds = {"x": np.random.default_rng(0).normal(0.0, 2.0, (2, 5, 4)).astype(np.float32)}
    made = [open_session(each).run(feeds)["out"] for each in (plain, fused, written)]
    for each in made[1:]:
        np.testing.assert_allclose(each, made[0], rtol=1e-4, atol=1e-4)
    assert certify(plain, fused).certificate.certified


@pytest.mark.sample(3, turns=False)
@pytest.mark.parametrize("name", WRONG)
def test_another_fusion_is_not(name: str) -> None:
    plain, fused = map(model, WRONG[name])
    assert not certify(plain, fused).certificate.certified


@pytest.mark.parametrize(
    "text",
    [
        "out = com.microsoft.FusedMatMul<transB = 1>(p, square)",
        f"n, out = {SKIP.replace('Layer', 'SimplifiedLayer')}(x, p, g)",
    ],
)
def test_what_is_not_written_out(text: str) -> None:
    node = model(text).graph.node[-1]
    assert parts_of(node) is None
