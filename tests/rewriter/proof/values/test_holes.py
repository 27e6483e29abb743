"""Pairs that differ, or of which only the original runs, and that certificates once passed."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from rewriter import certify
from rewriter.errors import ModelError
from rewriter.graph.walk import iter_nodes

FOLDER = Path(__file__).parent / "holes"
STEMS = sorted(path.name.removesuffix("_a.onnx") for path in FOLDER.glob("*_a.onnx"))
RIGHT = {"10_folded_in_float64", "10b_folded_weight"}
"""What is added to 1e17 is lost in both models, and in each runtime."""
UNDEFINED = {"a quotient of itself", "a quotient less itself", "0 times a quotient", "a quotient of sums"}
EMPTY = {"13c_empty_sequence", "an empty sequence, shifted", "sizes of 0 beside -1"}
OPEN = UNDEFINED | EMPTY | {"a shape of floats"}
"""Pairs that are still certified: where B is not defined at a point or gets no elements, and what no runtime loads."""
SIZES = {"rows of another width"}
"""The same at the sizes tried, as their certificate says."""


def judged(a: Path | onnx.ModelProto, b: Path | onnx.ModelProto) -> bool:
    """Whether a pair is certified beyond the sizes that are tried."""
    try:
        found = certify(a, b).certificate
    except ModelError:
        return False
    return found.certified and not found.sizes


def cases(names: Iterable[str]) -> list[Any]:
    """Whether a root is taken of a square is chance."""
    marks = {name: pytest.mark.xfail(reason="open", raises=AssertionError, strict="root" not in name) for name in OPEN}
    return [pytest.param(name, marks=[marks[name]] if name in OPEN else []) for name in names]


@pytest.mark.sample(6, turns=False)
@pytest.mark.parametrize("stem", cases(STEMS))
def test_a_pair_of_files(stem: str) -> None:
    assert judged(*(FOLDER / f"{stem}_{side}.onnx" for side in "ab")) is (stem in RIGHT)


RARE = "int64[n] ids, int64 flag, float[n] x"
EITHER = "else_branch = e () => (float[n] w) { w = Neg(x) }"
IFS = f"""c = Equal(flag, large) y = If(c) <{EITHER}, then_branch = t () => (float[n] y) {{
    d = Equal(flag, larger) y = If(d) <{EITHER}, then_branch = u () => (float[n] v) {{ v = Mul(BODY) }}> }}>"""

SAME = "c = Equal(m, i) y = Where(c, k9, x)"
BELOW = "d = Sub(i, large) f = Cast<to = 1>(d) r = Relu(f)"
TWO_ODD = "c = Greater(i, odd) d = Greater(i, odder)"


@pytest.mark.parametrize(
    ("a", "b", "right"),
    [
        ("c = Equal(ids, large) r = Mul(x, k9) y = Where(c, r, x)", "c = Equal(ids, large) y = Where(c, k9, x)", False),
        ("c = Less(ids, large) r = Neg(x) y = Where(c, r, x)",
         "c = GreaterOrEqual(ids, large) r = Neg(x) y = Where(c, x, r)", True),
        ("d = Sub(ids, large) c = Cast<to = 9>(d) y = Where(c, x, k9)",
         "d = Sub(ids, large) c = Cast<to = 9>(d) y = Where(c, x, k1)", False),
        ("c = Equal(ids, large) y = Where(c, k9, x)", "y = Identity(x)", False),
        ("y = Identity(x)", "c = Equal(ids, large) y = Where(c, k9, x)", False),
        (IFS.replace("BODY", "x, k9"), IFS.replace("BODY", "x, k1"), False),
        (IFS.replace("BODY", "x, k9"), IFS.replace("BODY", "k9, x"), True),
        ("c = Equal(ids, large) h = Where(c, k9, x) d = Equal(ids, large) y = Where(d, h, k1)",
         "c = Equal(large, ids) h = Where(c, k9, x) y = Where(c, h, k1)", True),
        ("c = Greater(i, odd) y = Where(c, k9, x)", "c = GreaterOrEqual(i, odd) y = Where(c, k9, x)", False),
        ("c = Greater(i, odd) y = Where(c, k9, x)", "c = Less(odd, i) y = Where(c, k9, x)", True),
        ("c = Less(i, odd) y = Where(c, k9, x)", "c = Greater(i, odd) y = Where(c, x, k9)", False),
        ("c = Greater(i, odd) y = Where(c, k9, x)", "c = Greater(i, odder) y = Where(c, k9, x)", False),
        (f"{TWO_ODD} e = And(c, d) y = Where(e, k9, x)", f"{TWO_ODD} e = Identity(c) y = Where(e, k9, x)", False),
        (f"{TWO_ODD} e = And(c, d) y = Where(e, k9, x)", f"{TWO_ODD} h = Where(d, k9, x) y = Where(c, h, x)", True),
        (f"m = Max(i, odd) {SAME}", f"m = Max(i, odder) {SAME}", False),
        (f"{BELOW} y = Add(x, r)", "y = Identity(x)", False),
        (f"{BELOW} y = Add(x, r)", f"{BELOW} y = Add(r, x)", True),
        (f"m = Max(i) {SAME}", f"m = Identity(i) {SAME}", True),
        (f"m = Clip(i) {SAME}", f"m = Identity(i) {SAME}", True),
        (f"m = Clip(i, odd, large) {SAME}", f"m = Max(i, odd) {SAME}", False),
        (f"m = Clip(i, odd, large) {SAME}", f"l = Max(odd, i) m = Min(l, large) {SAME}", True),
    ],
)  # fmt: skip
def test_integers_that_no_input_drawn_holds(a: str, b: str, right: bool) -> None:
    a, b = (f"i = Mul(ids, k1000) {each}" for each in (a, b))
    assert certify(model(RARE, a), model(RARE, b)).certificate.certified is right


X = "float[n] x"
MATRIX, CUBE = "float[n, 4] x", "float[b, t, 4] x"


def branch(body: str) -> str:
    """A node If with this body, or the negative."""
    then = f"then_branch = t () => (float[n, 4] z) {{ {body} }}"
    return f"b = Cast<to = 9>(k1) y = If(b) <{then}, else_branch = e () => (float[n, 4] z) {{ z = Neg(x) }}>"


def nested(body: str) -> str:
    """A branch with this body in a branch."""
    other = "else_branch = e () => (float[n, 4] z) { z = Neg(x) }"
    inner = f"then_branch = u () => (float[n, 4] z) {{ {body} }}, {other}"
    return f"{TWO} y = If(c) <then_branch = t () => (float[n, 4] y) {{ y = If(d) <{inner}> }}, {other}>"


TWO = "m = ReduceMax<keepdims = 0>(x) c = Greater(m, k9) d = Greater(m, k05)"
LIMITS = "k9", "k1", "k05", "k11", "k121", "k65504", "k1e8"
CHOICES = (f"c{k} = Less({limit}, x) h{k + 1} = Where(c{k}, h{k}, x)" for k, limit in enumerate(LIMITS))
SEVEN = f"{' '.join(CHOICES)} y = Identity(h7)"

VARIANTS: dict[str, tuple[str, str, str]] = {
    # 01: rows of two tensors
    "rows, a sum": (
        "float[b, 3, 3] x, float[b, 3] u",
        "s = Unsqueeze(u, two) m = Add(x, s) r = Reshape(m, rows3) y = MatMul(r, W)",
        "s = Unsqueeze(u, one) m = Add(x, s) r = Reshape(m, rows3) y = MatMul(r, W)"),
    "rows, a gate and a quotient": (
        "float[b, 3, 3] x, float[b, 3] u",
        "e = Exp(u) s = Unsqueeze(e, two) g = Sigmoid(x) m = Div(g, s) r = Reshape(m, rows3) y = MatMul(r, W)",
        "e = Exp(u) s = Unsqueeze(e, one) g = Sigmoid(x) m = Div(g, s) r = Reshape(m, rows3) y = MatMul(r, W)"),
    # 02: entries that are laid out
    "laid out, a sum": (
        "float[b, 9] x, float[b, 3] u",
        "a = Reshape(x, s33) c = Reshape(u, s31) d = Add(a, c) s = Shape(x) y = Reshape(d, s)",
        "a = Reshape(x, s33) c = Reshape(u, s13) d = Add(a, c) s = Shape(x) y = Reshape(d, s)"),
    "laid out, a gate": (
        "float[b, 9] x, float[b, 3] u",
        "g = Relu(x) a = Reshape(g, s33) c = Reshape(u, s31) d = Mul(a, c) s = Shape(g) y = Reshape(d, s)",
        "g = Relu(x) a = Reshape(g, s33) c = Reshape(u, s13) d = Mul(a, c) s = Shape(g) y = Reshape(d, s)"),
    "laid out, the shape of the other": (
        "float[p, q] x, float[q, p] u",
        "a = Reshape(x, s111) c = Reshape(u, s111) d = Add(a, c) s = Shape(x) y = Reshape(d, s)",
        "a = Reshape(x, s111) c = Reshape(u, s111) d = Add(a, c) s = Shape(u) y = Reshape(d, s)"),
    # 03: transposed
    "transposed, a sum": (
        "float[n, n] x, float[n] u", "y = Add(x, u)",
        "a = Transpose(x) c = Transpose(u) d = Add(a, c) y = Transpose(d)"),
    "transposed, another order": (
        "float[n, n, n] x", "y = Relu(x)",
        "a = Transpose<perm = [1, 2, 0]>(x) r = Relu(a) y = Transpose<perm = [1, 2, 0]>(r)"),
    "transposed, one of two": (
        "float[n, n] x, float[n, n] u", "y = Mul(x, u)",
        "a = Transpose<perm = [1, 0]>(x) c = Mul(a, u) y = Transpose<perm = [1, 0]>(c)"),
    # 04: the range of another tensor
    "the range of the value": (
        "float16[n] u, float[n] x", "v = Cast<to = 1>(u) r = Relu(x) y = Mul(r, v)",
        "v = Cast<to = 1>(u) r = Clip(x, k0, k65504) y = Mul(v, r)"),
    "the range of the value, below": (
        "float16[n] u, float[n] x", "v = Cast<to = 1>(u) r = Abs(x) y = Mul(v, r)",
        "v = Cast<to = 1>(u) q = Max(x, km65504) r = Abs(q) y = Mul(v, r)"),
    # 05: undefined
    "a quotient of itself": (X, "y = Relu(x)", "q = Div(x, x) r = Relu(x) y = Mul(q, r)"),
    "a quotient less itself": ("float[64] x", "y = Relu(x)", "q = Div(k1, x) z = Sub(q, q) r = Relu(x) y = Add(r, z)"),
    "0 times a root": (X, "y = Exp(x)", "s = Sqrt(x) z = Mul(s, k0) e = Exp(x) y = Add(e, z)"),
    "0 times a quotient": (X, "y = Exp(x)", "s = Reciprocal(x) z = Mul(k0, s) e = Exp(x) y = Sub(e, z)"),
    "the same branches behind an undefined maximum": (
        X, "y = Abs(x)", "s = Sqrt(x) m = Max(s, k0) z = Sub(m, m) a = Abs(x) y = Add(a, z)"),
    "a quotient of sums": (X, "y = Tanh(x)", "a = Add(x, k1) q = Div(a, a) t = Tanh(x) y = Mul(q, t)"),
    # 07: names of parts
    "the name of a part, a sum": (
        "float[n, 4] x", "y = com.microsoft.FastGelu(x, b4) t = Add(x, b4) z = Tanh(t) o = Add(y, z)",
        '"y/bias" = Neg(x) y = com.microsoft.FastGelu(x, b4) z = Tanh("y/bias") o = Add(y, z)'),
    "the name of a part, a product": (
        "float[n, 4] x", "y = com.microsoft.GemmFastGelu(x, S) t = MatMul(x, S) z = Tanh(t) o = Add(y, z)",
        '"y/matmul" = Neg(x) y = com.microsoft.GemmFastGelu(x, S) z = Tanh("y/matmul") o = Add(y, z)'),
    # 08: defaults
    "the epsilon of a sum with a bias": (
        "float[1, 2, 4] x, float[1, 2, 4] u", "y = com.microsoft.SkipLayerNormalization(x, u, b4, b4, b4)",
        "s = Add(x, u) t = Add(s, b4) y = LayerNormalization<axis = -1>(t, b4, b4)"),
    "the shift of FusedGemm": (
        MATRIX, 'y = com.microsoft.FusedGemm<activation = "LeakyRelu", activation_alpha = 0.3>(x, S)',
        "g = Gemm(x, S) y = LeakyRelu(g)"),
    # 09: leaves
    "a tensor for two": (
        "float[3] x, float[2, 3] u",
        "p = Softmax(x) e = Exp(u) d = Add(e, k1) q = Div(d, d) y = Mul(p, q)",
        "p = Softmax(x) s = Add(p, p) y = Mul(s, k05)"),
    "a tensor for two, a gate": (
        "float[n] x, float[n] u", "p = Softmax(x) q = Softmax(u) r = Relu(p) y = Mul(r, q)",
        "p = Softmax(x) a = Relu(x) q = Softmax(x) r = Relu(p) y = Mul(r, q)"),
    # 10: constants
    "a comparison of rounded sums": (
        MATRIX, "y = MatMul(x, S)", "s = Add(k1e8, k1) m = Less(k1e8, s) Z = Where(m, S, T) y = MatMul(x, Z)"),
    "a comparison of rounded products": (
        MATRIX, "y = MatMul(x, S)", "s = Mul(k11, k11) m = Equal(s, k121) Z = Where(m, T, S) y = MatMul(x, Z)"),
    # 13: where the original runs
    "seven rows, a product": (MATRIX, "y = MatMul(x, S)", "r = Reshape(x, s74) y = MatMul(r, S)"),
    "one row, squeezed": (
        "float[n, m, 4] x", "y = MatMul(x, S)",
        "r = Squeeze(x, zero) p = MatMul(r, S) y = Unsqueeze(p, zero)"),
    "seven rows, an activation": (
        MATRIX, "r = Relu(x) y = MatMul(r, S)", "r = Reshape(x, s74) q = Max(r, k0) y = MatMul(q, S)"),
    "sizes of 0 beside -1": (
        CUBE, "r = Reshape(x, rows4) y = MatMul(r, S)",
        "q = Reshape(x, s0m4) r = Reshape(q, rows4) y = MatMul(r, S)"),
    "rows of another width": (
        CUBE, "r = Reshape(x, rows4) y = MatMul(r, S)",
        "q = Reshape(x, rows8) r = Reshape(q, rows4) y = MatMul(r, S)"),
    "an empty sequence, shifted": (
        CUBE, "p = MatMul(x, S) y = Add(p, b4)",
        "r = Reshape(x, rows4) p = Gemm(r, S, b4) s = Shape(x) y = Reshape(p, s)"),
    "laid out twice, a product": (
        X, "p = Softmax(x) y = Mul(p, p)",
        "p = Softmax(x) a = Reshape(p, s111) c = Reshape(p, sm11) d = Mul(a, c) s = Shape(p) y = Reshape(d, s)"),
    "laid out as 28": (
        MATRIX, "y = Relu(x)", "a = Reshape(x, s741) r = Relu(a) s = Shape(x) y = Reshape<allowzero = 1>(r, s)"),
    "seven rows, in a branch": (MATRIX, branch("z = MatMul(x, S)"), branch("r = Reshape(x, s74) z = MatMul(r, S)")),
    # tensors that say something only about the shape
    "a constant with more axes": (X, "y = Mul(x, k9)", "y = Mul(x, k111)"),
    "a constant with an axis beside a number": ("float[] x", "y = Relu(x)", "y = Max(x, k0_1)"),
    "0 times another tensor": ("float[n] x, float[m, n] u", "y = Relu(x)", "z = Mul(u, k0) r = Relu(x) y = Add(r, z)"),
    "another tensor less itself": (
        "float[n] x, float[m, n] u", "y = Neg(x)", "e = Exp(u) d = Sub(e, e) r = Neg(x) y = Sub(r, d)"),
    "the same branches under another condition": (
        "float[n] x, float[m, n] u", "y = Relu(x)", "c = Less(u, k0) r = Relu(x) y = Where(c, r, r)"),
    "undefined in a branch": (
        MATRIX, branch("z = Relu(x)"), branch("s = Sqrt(x) d = Sub(s, s) r = Relu(x) z = Add(r, d)")),
    # what several signs of data choose together
    "a branch in a branch": (MATRIX, nested("z = Mul(x, k9)"), nested("z = Mul(x, k05)")),
    "entries that two numbers choose": (
        MATRIX, f"{TWO} p = Mul(x, k9) q = Where(d, p, x) n = Neg(x) y = Where(c, q, n)",
        f"{TWO} p = Mul(x, k05) q = Where(d, p, x) n = Neg(x) y = Where(c, q, n)"),
    "entries that seven signs choose": (X, f"h0 = Mul(x, k9) {SEVEN}", f"h0 = Mul(x, k05) {SEVEN}"),
    # 14, 15
    "a shape of floats": (X, "y = Relu(x)", "r = Relu(x) f = Cast<to = 1>(sm1) y = Reshape(r, f)"),
}  # fmt: skip
INTEGERS = {
    "zero": [0], "one": [1], "two": [2], "rows3": [-1, 3], "rows4": [-1, 4], "rows8": [-1, 8], "s33": [-1, 3, 3],
    "s31": [-1, 3, 1], "s13": [-1, 1, 3], "s111": [1, -1, 1], "sm11": [-1, 1, 1], "s74": [7, 4],
    "s741": [7, 4, 1], "s0m4": [0, -1, 4],
    "sm1": [-1], "large": 99_999, "larger": 123_456, "k1000": 1000, "odd": 47_500, "odder": 47_600,
}  # fmt: skip
NUMBERS = {
    "k0": 0.0, "k0_1": [0.0], "k1": 1.0, "k111": [[[12345.0]]],
    "k05": 0.5, "k9": 12345.0, "k65504": 65504.0, "km65504": -65504.0, "k1e8": 1e8,
    "k11": np.float32(1.1), "k121": np.float32(1.1) * np.float32(1.1), "b4": [0.5, -1.0, 2.0, 0.25],
    "W": np.arange(6).reshape(3, 2) - 2.5, "S": np.arange(16).reshape(4, 4) / 7 - 1, "T": np.eye(4),
}  # fmt: skip


def model(inputs: str, body: str) -> onnx.ModelProto:
    outputs = "float[] o" if " o = " in body else "float[] y"
    text = f'<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]> g ({inputs}) => ({outputs}) {{ {body} }}'
    made = onnx.parser.parse_model(text)
    made.graph.output[0].type.tensor_type.ClearField("shape")
    for names, dtype in ((INTEGERS, np.int64), (NUMBERS, np.float32)):
        read = {name for node in iter_nodes(made.graph.node) for name in node.input} & names.keys()
        arrays = ((name, np.array(names[name], dtype)) for name in sorted(read))
        made.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in arrays)
    return made


@pytest.mark.sample(10, turns=False)
@pytest.mark.parametrize("name", cases(VARIANTS))
def test_a_variant_of_them(name: str) -> None:
    inputs, *bodies = VARIANTS[name]
    assert not judged(*(model(inputs, body) for body in bodies))
