"""Activations with QuantizeLinear and DequantizeLinear inside, as onnxruntime's static quantisation writes them.

What rounds stays where it is. Every function between two such pairs is a block of its own, certified over the reals.
"""

import re
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest

from passes.plan import lower
from rewriter import inspect, rewrite, validate
from tests.cases import proved
from tests.changes import copied, run
from tests.textmodels import findings, integers, mlp, only_left, tensor

pytestmark = pytest.mark.sample(1)

FIRST, SECOND = "y0 = MatMul(x, W1)", "out = MatMul(h, W2)"
UP = f"{FIRST} u0 = MatMul(x, V1)"
SILU = "y = @(y0) s0 = Sigmoid(y) s = @(s0) h0 = Mul(y, s) h = @(h0)"
GATED = "y = @(y0) u = @(u0) s0 = Sigmoid(y) s = @(s0) g0 = Mul(y, s) g = @(g0) h0 = Mul(g, u) h = @(h0)"
BENT = (
    "y = @(y0) t0 = Tanh(y) t = @(t0) a0 = Add(t, $1.0) a = @(a0) b0 = Mul($0.5, a) b = @(b0) h0 = Mul(y, b) h = @(h0)"
)
CUBE = "y = @(y0) c0 = Mul(y, y) c = @(c0) a0 = Add(y, c) a = @(a0) h0 = Tanh(a) h = @(h0)"
RELU = "y = @(y0) h0 = Relu(y) h = @(h0)"
INTEGERS = {"W1q": np.arange(32).reshape(4, 8) - 15, "W2q": 15 - np.arange(32).reshape(8, 4), "b1q": np.arange(8) - 3,
            "W1t": np.arange(32).reshape(8, 4) - 15, "W2t": 15 - np.arange(32).reshape(4, 8),
            "E1q": np.arange(192).reshape(3, 4, 16) % 31 - 15, "e1q": np.arange(48).reshape(3, 16) % 7 - 3,
            "E2q": 15 - np.arange(96).reshape(3, 8, 4) % 31, "e2q": np.arange(12).reshape(3, 4) - 5,
            "zero": np.array(3), "none": np.array(0), "lowest": np.array(-128)}  # fmt: skip
CONSTANTS: dict[str, Any] = {
    "fine": np.array(0.0613),  # with powers of 2 many numbers are halfway between two integers
    **{name: onnx.numpy_helper.from_array(each.astype(np.int8), name) for name, each in INTEGERS.items()},
    "c1q": onnx.numpy_helper.from_array(np.arange(8, dtype=np.int32) - 3, "c1q"),
    **integers(shape=[0, 0, 8], n0=[0], n1=[1], n2=[2], end=[16]),
}  # fmt: skip


PRODUCT = "{} = QLinearMatMul({}, fine, zero, {}, fine, none, fine, {})"
GEMM = "{} = com.microsoft.QGemm<transB = 1>({}, fine, zero, {}, fine, none, {}, fine, {})"
ON_QUANTISED = "s_q = com.microsoft.QLinearSigmoid(y_q, fine, zero, fine, zero) "
LEAKY = "h_q = com.microsoft.QLinearLeakyRelu<alpha = 0.1>(y_q, fine, zero, fine, zero)"
BIASED = "y_q = com.microsoft.QLinearAdd(b1q, fine, zero, y1, fine, zero, fine, {})"
EXPERT = ("w{0} = Gather(E{0}q, e) v{0} = Gather(e{0}q, e) d{0} = Unsqueeze({1}, n1) "
          f"{PRODUCT.format('m{0}', 'd{0}', 'w{0}', 'zero')} f{{0}} = Squeeze(m{{0}}, n1) "
          "{2} = com.microsoft.QLinearAdd(f{0}, fine, zero, v{0}, fine, zero, fine, zero)")  # fmt: skip
PAIRED = ("p = DequantizeLinear(p_q, fine, zero) g = Slice(p, n0, end, n1, n2) u = Slice(p, n1, end, n1, n2) "
          "g0 = Clip(g, , $1.0) y_q = QuantizeLinear(g0, fine, zero) "
          "u0 = Clip(u, $-1.0, $1.0) u_q = QuantizeLinear(u0, fine, zero) "
          f"{ON_QUANTISED} i_q = com.microsoft.QLinearMul(y_q, fine, zero, s_q, fine, zero, fine, zero) "
          "h_q = com.microsoft.QLinearMul(i_q, fine, zero, u_q, fine, zero, fine, zero)")  # fmt: skip
SILU_Q = f"{ON_QUANTISED} h_q = com.microsoft.QLinearMul(s_q, fine, zero, y_q, fine, zero, fine, zero)"


def on_integers(text: str, *, first: str = PRODUCT.format("y1", "xq", "W1q", "zero"), tokens: str = "batch, tokens",
                second: str = PRODUCT.format("o", "h_q", "W2q", "zero"),
                chosen: str = "") -> onnx.ModelProto:  # fmt: skip
    """A model of operators on quantised numbers, from y1 to h_q."""
    ends = ("xq = QuantizeLinear(x, fine, zero)", "out = DequantizeLinear(o, fine, zero)")
    return mlp(text, first=f"{ends[0]} {first}", second=f"{second} {ends[1]}", constants=CONSTANTS,
               inputs=f"float[{tokens}, 4] x{chosen}", outputs=f"float[{tokens}, 4] out",
               domains={"com.microsoft": 1})  # fmt: skip


def quantised(text: str, **options: Any) -> onnx.ModelProto:
    """A model in whose text `b = @(a)` is a pair of QuantizeLinear and DequantizeLinear."""
    body = re.sub(
        r"(\w+) = @\((\w+)\)", r"\1_q = QuantizeLinear(\2, fine, zero) \1 = DequantizeLinear(\1_q, fine, zero)", text
    )
    return mlp(body, **{"first": FIRST, "second": SECOND, "constants": CONSTANTS, **options})


@pytest.mark.sample(0)
@pytest.mark.parametrize(("text", "first", "labels"), [
    (RELU, FIRST, ["relu"]),
    (SILU, FIRST, ["sigmoid", "linear(gate) * value"]),
    (GATED, UP, ["sigmoid", "linear(gate) * value", "linear(gate) * value"]),
    (BENT, FIRST, ["tanh", "linear(gate) * value"]),
    (CUBE, FIRST, ["square", "tanh"]),
], ids=["relu", "silu", "gated", "affine-between", "sum"])  # fmt: skip
def test_every_function_between_two_roundings_is_a_block(text: str, first: str, labels: list[str]) -> None:
    model = quantised(text, first=first)
    report = proved(model)
    assert [row.activation for row in report.converted] == labels
    assert [bool(row.second) for row in report.converted] == [False] * (len(labels) - 1) + [True]
    assert report.validation.certified
    made = report.rewritten
    kept = [[node.name for node in each.graph.node if "Linear" in node.op_type] for each in (model, made)]
    assert kept[0] == kept[1]
    accounting = inspect(model).accounting
    assert accounting.remaining == {}
    assert accounting.share == pytest.approx(1.0)


GEMMS = {"first": GEMM.format("h_q", "xq", "W1t", "c1q", "lowest"), "tokens": "tokens",
         "second": "o = com.microsoft.QGemm<transB = 1>(h_q, fine, lowest, W2t, fine, none, , fine, zero)"}  # fmt: skip
CHOSEN = {"first": EXPERT.format(1, "xq", "p_q"), "tokens": "tokens", "second": EXPERT.format(2, "h_q", "o"),
          "chosen": ", int64[tokens] e"}  # fmt: skip
QUANTISED = pytest.mark.parametrize(("model", "labels"), [
    (on_integers(f"{BIASED.format('zero')} {SILU_Q}"), ["sigmoid", "linear(gate) * value"]),
    (on_integers(f"{BIASED.format('zero')} {LEAKY}"), ["leaky_relu(right=1, left=0.1)"]),
    (on_integers(BIASED.format("lowest").replace("y_q", "h_q")), ["relu"]),
    (on_integers("", first=PRODUCT.format("h_q", "xq", "W1q", "lowest")), ["relu"]),
    (on_integers("", **GEMMS), ["relu"]),
    (on_integers(PAIRED, **CHOSEN), ["clip(slope=1, offset=0, left=-inf, right=1)",
     "clip(slope=1, offset=0, left=-1, right=1)", "sigmoid", "linear(gate) * value", "linear(gate) * value"]),
    (quantised("h_q = QuantizeLinear(y0, fine, lowest) h = DequantizeLinear(h_q, fine, lowest)"), ["relu"]),
], ids=["silu", "leaky-relu", "sum", "product", "gemm", "experts", "pair"])  # fmt: skip


@pytest.mark.sample(0)
@QUANTISED
def test_operators_on_quantised_numbers_and_zero_points_that_are_relus(
    model: onnx.ModelProto, labels: list[str]
) -> None:
    report = proved(model)
    assert [(row.activation, (row.heads or 0) // 8) for row in report.converted] == [
        (label, 2 if "gate" in label else 1) for label in labels
    ]
    assert report.validation.certified
    made = report.rewritten
    # Biases are not replaced, so they are unchanged.
    operators = [[node.op_type for node in each.graph.node] for each in (model, made)]
    assert labels == ["relu"] or operators[0].count("QLinearAdd") == operators[1].count("QLinearAdd") > 0
    # What rounds, with which scale and zero point, belongs to what is compared.
    for place in (1, 2):
        wrong = onnx.ModelProto.FromString(made.SerializeToString())
        spoiled = [node for node in wrong.graph.node if node.op_type == "QuantizeLinear"][-1]
        spoiled.input[place] = {"fine": "coarse", "zero": "none", "lowest": "none"}[spoiled.input[place]]
        wrong.graph.initializer.append(tensor("coarse", np.array(1 / 8)))
        assert not validate(model, wrong).same


@pytest.mark.parametrize("text", [
    "y = com.microsoft.QGemm(x, fine, zero, W1q, fine, lowest) h = Sigmoid(y)",
    "y = MatMul(x, W1) h = com.microsoft.QLinearSigmoid(y, fine, zero, fine)",
    "y = MatMul(x, W1) h = com.microsoft.QLinearAdd(y, fine, zero, y, fine, zero, fine)",
    "y = QLinearMatMul(x, fine, zero, W1q, fine, lowest, fine, zero) h = Sigmoid(y)",
], ids=["gemm", "sigmoid", "sum", "product"])  # fmt: skip
def test_without_a_zero_point_of_the_result_nothing_is_taken_apart(text: str) -> None:
    model = mlp(text, first="", second=SECOND, constants=CONSTANTS, domains={"com.microsoft": 1})
    assert lower(model)[0] is model


@pytest.mark.parametrize(("zero", "options", "same"), [
    ("lowest", {}, True),
    ("zero", {}, False),
    ("none", {}, False),
    ("lowest", {"constants": {**CONSTANTS, "fine": np.array(-0.0613)}}, False),
    ("lowest", {"inputs": "float[batch, tokens, 4] x, int8 lowest"}, False),
], ids=["lowest", "middle", "zero", "negative-scale", "may-be-replaced"])  # fmt: skip
def test_which_zero_points_are_relus(zero: str, options: dict[str, Any], same: bool) -> None:
    text = f"h_q = QuantizeLinear(y0, fine, {zero}) h = DequantizeLinear(h_q, fine, {zero})"
    model = quantised(text, **options)
    found = validate(model, quantised(f"r = Relu(y0) {text.replace('(y0', '(r')}", **options))
    assert (found.same, found.validation.certified) == (same, same)
    if "constants" not in options:  # of negative scales the proof knows, and the plan does not
        assert len(rewrite(model, dry_run=True).converted) == same


PLANTED = {
    "another scale within the activation": 'add_weight(m, "coarse", np.float32(1 / 8)); '
    'reads(m, "s", 1, "coarse"); reads(m, "s_q", 1, "coarse")',
    "nothing rounds within the activation": """
for node in m.graph.node: node.input[:] = ["s0" if name == "s" else name for name in node.input]""",
    "the product reads another tensor": """
product = [node for node in m.graph.node if "y" in node.input][-1]
product.input[:] = ["y0" if name == "y" else name for name in product.input]""",
}


@cache
def pair() -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """A model and its heads, which are right."""
    model = quantised(SILU)
    made = rewrite(model, validate=False).rewritten
    assert validate(model, made).same
    return model, made


@pytest.mark.sample(0)
@pytest.mark.parametrize("name", PLANTED)
def test_planted_errors_are_refused(name: str) -> None:
    model, right = pair()
    made = copied(right)
    run(PLANTED[name], m=made)
    found = validate(model, made)
    assert (found.validation.certified, found.same) == (False, False)


def test_without_rounding_a_second_activation_is_none() -> None:
    left = only_left(quantised("y = @(y0) s0 = Sigmoid(y) s = Reshape(s0, shape) h = Mul(y, s)"))
    assert left.miss.reason == "a second activation follows in Mul 'h'"


def test_a_part_is_converted_with_the_whole_only() -> None:
    found = findings(quantised(SILU, second=""))
    assert not found.blocks
    assert [left.miss.reason for left in found.left] == [
        "the activation that it is a part of is not converted",
        "no linear operator reads its output",
    ]


def test_the_product_may_stay() -> None:
    found = inspect(quantised(SILU), gate="product")
    assert [row.activation for row in found.report.converted] == ["sigmoid"]
    assert found.accounting.remaining == {"activation linear(gate) * value": 1}
