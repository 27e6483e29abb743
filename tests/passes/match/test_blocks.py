"""Which graphs are MLP blocks: spellings of activations, kinds of linear operators, and a near miss beside each."""

import re
from typing import Any

import numpy as np
import onnx
import pytest

from passes.match.blocks import kinds
from rewriter import ExitStatus, rewrite
from tests.cases import proved
from tests.spellings import FIRSTS, GATES, OPERATORS, PLANES, ROWS, SPELLINGS
from tests.textmodels import ERF_GELU, FIRST, SILU, findings, integers, mlp, only_block, only_left, text_model, values

SPELLED = [*((*each, {}) for each in SPELLINGS), *OPERATORS]


@pytest.mark.sample(11)
@pytest.mark.parametrize(("label", "text", "options"), [s[1:] for s in SPELLED], ids=[s[0] for s in SPELLED])
def test_spelling(label: str, text: str, options: dict[str, Any]) -> None:
    block = only_block(mlp(text, **options))
    assert (block.identified.label, block.gate, block.value, block.output) == (label, "y", "y", "h")
    assert (block.neurons, block.elem_type) == (8, onnx.TensorProto.FLOAT)


@pytest.mark.sample(20)
@pytest.mark.parametrize("elem", ["double", "float16"])
@pytest.mark.parametrize(("label", "text"), [s[1:] for s in SPELLINGS], ids=[s[0] for s in SPELLINGS])
def test_spelling_in_every_element_type(label: str, text: str, elem: str) -> None:
    if "Cast" in text:
        text = text.replace("to = 1>", {"double": "to = 11>", "float16": "to = 10>"}[elem])
    block = only_block(mlp(text, elem=elem))
    assert block.identified.activation.name == label.partition("(")[0].replace("quick_gelu", "silu")


def _as_onnxscript(text: str) -> str:
    """The nodes with every number as onnxscript writes it in a function: a Constant, cast like the data."""
    numbers = re.findall(r"\$(-?[0-9.]+)", text)
    cast = " ".join(
        f"k{place} = Constant<value_float = {float(number)}>() like{place} = CastLike(k{place}, y)"
        for place, number in enumerate(numbers)
    )
    for place, number in enumerate(numbers):
        text = text.replace(f"${number}", f"like{place}", 1)
    return f"{cast} {text}"


@pytest.mark.parametrize("elem", ["float", "float16", "double"])
@pytest.mark.parametrize(
    ("text", "name"),
    [
        (ERF_GELU, "gelu"),
        ("a = Mul(y, $1.702) s = Sigmoid(a) h = Mul(y, s)", "silu"),
        ("h = Clip(y, $0.0, $6.0)", "relu6"),
    ],
)
def test_numbers_of_onnxscript(text: str, name: str, elem: str) -> None:
    model = mlp(_as_onnxscript(text), elem=elem)
    assert only_block(model).identified.activation.name == name
    if (elem, name) == ("float", "silu"):
        assert rewrite(model).exit_status == 0


def test_numbers_cast_to_integers_are_integers() -> None:
    """1.7 cast like an index is 1, and the activation another one."""
    cast = "k = Constant<value_float = 1.7>() n = Shape(y) i = CastLike(k, n) one = CastLike(i, y)"
    model = mlp(f"{cast} a = Mul(y, one) s = Sigmoid(a) h = Mul(y, s)")
    assert only_block(model).identified.label == "silu"
    assert rewrite(model).exit_status == 0


@pytest.mark.parametrize("text", ["h = Mul(s, u)", "h = Mul(u, s)"], ids=["sigmoid-left", "sigmoid-right"])
@pytest.mark.parametrize(("first", "label"), [g[1:] for g in GATES], ids=[g[0] for g in GATES])
def test_gate(first: str, label: str, text: str) -> None:
    block = only_block(mlp(f"s = Sigmoid(y) {text}", first=first, opset=13))
    assert (block.identified.label, block.gate, block.value) == (label, "y", "u")


SILU_GATE = "s = Sigmoid(y) g = Mul(y, s)"
TWO_PROJECTIONS = "y = MatMul(x, W1) u = MatMul(x, V1)"


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("text", "label", "value"),
    [
        ("t = Tanh(y) h = Mul(t, u)", "tanh(gate) * value", "u"),
        (f"{SILU_GATE} h = Mul(g, u)", "silu(gate) * value", "u"),
        ("t = Sigmoid(y) g = Mul(u, y) h = Mul(g, t)", "silu(gate) * value", "u"),
        ("t = Relu(y) h = Mul(u, t)", "relu(gate) * value", "u"),
        (ERF_GELU.replace("h =", "g =") + " h = Mul(g, u)", "gelu(gate) * value", "u"),
        ("b = Mul(y, $1.702) s = Sigmoid(b) g = Mul(y, s) h = Mul(g, u)", "quick_gelu(gate) * value", "u"),
        (f"{SILU_GATE} v = Add(u, $1.0) h = Mul(g, v)", "silu(gate) * value", "v"),
        (f"{SILU_GATE} v = Sub($1.0, u) h = Mul(v, g)", "silu(gate) * value", "v"),
        (f"{SILU_GATE} w = Mul(u, $2.0) v = Add(w, $1.0) h = Mul(v, g)", "silu(gate) * value", "v"),
        (f"{SILU_GATE} w = Add(u, $1.0) v = Mul(w, $2.0) h = Mul(g, v)", "silu(gate) * value", "v"),
        (f"{SILU_GATE} v = Mul(u, $2.0) h = Mul(g, v)", "silu(beta=1, factor=2)(gate) * value", "u"),
    ],
)
def test_gated_activation(text: str, label: str, value: str) -> None:
    """A constant that is added to the value of a gate is its bias."""
    model = mlp(text, first=TWO_PROJECTIONS)
    block = only_block(model)
    assert (block.identified.label, block.gate, block.value) == (label, "y", value)
    assert {operator.weight for operator in block.first} == {"W1", "V1"}
    assert rewrite(model).exit_status is ExitStatus.CONVERTED


def test_gate_and_value_in_exchanged_roles() -> None:
    text, second = "a = Tanh(y) h = Mul(a, u) b = Tanh(u) k = Mul(y, b)", "r = MatMul(h, W2) s = MatMul(k, W2)"
    model = mlp(text, first=TWO_PROJECTIONS, second=f"{second} out = Add(r, s)")
    assert {(block.gate, block.value) for block in findings(model).blocks} == {("y", "u"), ("u", "y")}


def test_a_constant_added_to_the_same_projection_is_part_of_the_function() -> None:
    """Hard swish, whose y + 3 is not a bias, a SiLU with a detour, and a gate that is a function of y + 1."""
    detour = only_block(mlp("a = Add(y, $1.0) b = Sub(a, $1.0) s = Sigmoid(y) h = Mul(b, s)"))
    assert (detour.identified.label, detour.value) == ("silu", "y")
    assert only_block(mlp("a = Add(y, $3.0) c = Clip(a, $0.0, $6.0) d = Mul(y, c) h = Div(d, $6.0)")).value == "y"
    block = only_block(mlp("a = Add(y, $1.0) s = Relu(a) h = Mul(s, u)", first=TWO_PROJECTIONS))
    assert (block.gate, block.value) == ("y", "u")
    assert block.identified.label.startswith("clip(slope=1, offset=1,")


@pytest.mark.parametrize(
    ("text", "label", "leaves"),
    [
        ("a = Sub($0.5, y) s = Sigmoid(a) h = Mul(a, s)", "silu", ("a", "a")),
        ("a = Mul(y, $-0.7) b = Add(a, $0.5) s = Sigmoid(b) h = Mul(b, s)", "silu", ("b", "b")),
        ("a = Add(y, $0.5) s = Sigmoid(a) g = Mul(a, s) h = Mul(g, u)", "silu(gate) * value", ("a", "u")),
    ],
)
def test_an_activation_of_a_projection_that_a_scalar_shifts(text: str, label: str, leaves: tuple[str, str]) -> None:
    model = mlp(text, first="y = MatMul(x, W1)" + " u = MatMul(x, V1)" * ("u" in leaves))
    block = only_block(model)
    assert (block.identified.label, (block.gate, block.value)) == (label, leaves)
    assert rewrite(model, fit=False).exit_status is ExitStatus.CONVERTED


NORMALISED = {
    name: np.abs(values("b1")) * factor + 0.3
    for name, factor in zip(("ns", "nt", "nm", "nv"), (1, 2, 0.5, 1), strict=True)
}
"""Scale, shift, mean and variance of 8 channels."""
NORMALISE = "ns, nt, nm, nv"


SEVENTEEN: dict[str, Any] = {"inputs": "float[batch, 17, 4] x", "outputs": "float[batch, 17, 4] out"}
TO_OUT = "out = MatMul(h, W2)"
BIASED_OUT = "n = MatMul(h, W2) out = Add(n, b2)"


@pytest.mark.parametrize(
    ("constants", "options"),
    [
        (NORMALISED, {"first": f"p = Gemm(x, W1, b1) y = BatchNormalization(p, {NORMALISE})",
                      "second": TO_OUT, **ROWS}),
        (NORMALISED, {"first": f"p = MatMul(x, W1) f = Flatten<axis = 2>(p) q = BatchNormalization(f, {NORMALISE}) "
                      "n = Shape(p) y = Reshape(q, n)", "second": TO_OUT}),
        (NORMALISED, {"first": "p = MatMul(x, W1) q = Transpose<perm = [0, 2, 1]>(p) "
                      f"r = BatchNormalization(q, {NORMALISE}) y = Transpose<perm = [0, 2, 1]>(r)", "second": TO_OUT}),
        (NORMALISED, {"first": "y = MatMul(x, W1)",
                      "second": f"k = BatchNormalization(h, {NORMALISE}) out = MatMul(k, W2)", **ROWS}),
        (NORMALISED, {"first": f"p = MatMul(x, W1) y = BatchNormalization(p, {NORMALISE})",
                      "inputs": "float[batch, 8, 4] x"}),
        ({"t": np.arange(17.0)[:, None]}, {"first": "m = MatMul(x, W1) y = Add(m, t)", **SEVENTEEN}),
        ({"t": np.arange(136.0).reshape(17, 8)}, {"first": "m = MatMul(x, W1) y = Add(m, t)", **SEVENTEEN}),
        ({"p": np.ones((4, 17))}, {"second": "out = MatMul(p, h)", **SEVENTEEN, "outputs": "float[batch, 4, 8] out"}),
    ],
    ids=["rows", "flattened", "transposed", "behind", "normalised-tokens", "bias-of-tokens",
         "bias-of-tokens-and-channels", "second-over-tokens"],
)  # fmt: skip
def test_what_is_linear_along_any_axis_bounds_an_activation(constants: dict[str, Any], options: dict[str, Any]) -> None:
    """Normalisation of channels is affine; so is what differs between tokens."""
    model = mlp(SILU, constants=constants, **options)
    block = only_block(model)
    assert (block.identified.label, block.gate) == ("silu", "y")
    assert proved(model).validation.certified


@pytest.mark.parametrize(
    ("normalised", "options"),
    [
        ("BatchNormalization<training_mode = 1>(p, ns, nt, nm, nv)", ROWS),
        ("BatchNormalization(p, ns, nt, nm, w)", {"inputs": "float[tokens, 4] x, float[8] w"}),
        ("BatchNormalization(p, ns, nt, nm, nv)", {**ROWS, "opset": 13, "more": ", m1, v1, m2, v2"}),
    ],
    ids=["training", "variance-given", "training-by-outputs"],
)
def test_normalisation_of_anything_else_is_not(normalised: str, options: dict[str, Any]) -> None:
    given = dict(options)
    first = f"p = MatMul(x, W1) y{given.pop('more', '')} = {normalised}"
    left = only_left(mlp(SILU, first=first, constants=NORMALISED, **given))
    assert left.miss.reason.startswith(
        "'y', which BatchNormalization 'y' makes, is not the output of a linear operator"
    )


@pytest.mark.parametrize(
    ("axes", "steps"), [([-1], [2]), ([2], [2]), ([1], [2]), ([-2], [2]), ([1, 2], [2, 1]), ([1, 2], [2, -1])]
)
def test_parts_of_a_projection_with_a_stride(axes: list[int], steps: list[int]) -> None:
    constants = integers(start=[0] * len(axes), end=[8] * len(axes), axis=axes, step=steps)
    first = "p = MatMul(x, W1) y = Slice(p, start, end, axis, step)"
    assert only_block(mlp(SILU, first=first, second=TO_OUT, constants=constants)).gate == "y"


ONE = {"W1": values("W1")[:, :1], "W2": values("W2")[:1], "b1": np.array([0.7]), "three": np.array([3.0])}
"""A layer of one neuron: its bias has the shape of a scalar."""


HARD_SWISH = "a = Add(y, three) c = Clip(a, $0.0, $6.0) d = Mul(y, c) h = Div(d, $6.0)"
SINGLE = [(SILU, "silu"), (ERF_GELU, "gelu"), ("h = Relu(y)", "relu"), (HARD_SWISH, "hard_swish")]


@pytest.mark.parametrize(("text", "label"), SINGLE)
@pytest.mark.parametrize(
    "first", [FIRST, FIRST.replace("first, b1", "b1, first"), "y = Gemm(x, W1, b1)", "y = MatMul(x, W1)"]
)
def test_a_single_neuron_with_and_without_a_bias(first: str, text: str, label: str) -> None:
    shapes = ROWS if "Gemm" in first else {}
    model = mlp(text, first=first, second=TO_OUT, constants=ONE, **shapes)
    block = only_block(model)
    assert (block.identified.label, block.gate) == (label, "y")
    if label == "silu":
        assert rewrite(model).exit_status is ExitStatus.CONVERTED


@pytest.mark.parametrize(
    ("first", "second", "shown", "options"),
    [
        *((first, BIASED_OUT, f"{shown}, MatMul 8x4", options) for _, first, shown, options in FIRSTS),
        ("y = Gemm(x, W1, b1)", "out = Gemm(h, W2, b2)", "Gemm 4x8, Gemm 8x4", ROWS),
        ("y = Gemm<transB = 1>(x, W1t, b1)", "out = Gemm<transB = 1>(h, W2t)", "Gemm 4x8, Gemm 8x4", ROWS),
        ("y = Gemm<alpha = 0.5>(x, W1)", "out = Gemm<transB = 1>(h, W2t, b2)", "Gemm 4x8, Gemm 8x4", ROWS),
        ("y = Conv(x, K1, b1)", "out = Conv(h, K2, b2)", "Conv 1 4x8, Conv 1 8x4", PLANES),
        ("y = Conv<kernel_shape = [1]>(x, K1)", "out = Conv(h, K2)", "Conv 1 4x8, Conv 1 8x4", PLANES),
        (FIRST, "n = MatMul(h, W2) out = Add(b2, n)", "MatMul 4x8, MatMul 8x4", {}),
        (FIRST, "w = Transpose<perm = [1, 0]>(W2t) out = MatMul(h, w)", "MatMul 4x8, MatMul 8x4", {}),
        (FIRST, "k = Mul(h, c1) out = MatMul(k, W2)", "MatMul 4x8, MatMul 8x4", {}),
        (FIRST, "k = Identity(h) j = Dropout(k) out = MatMul(j, W2)", "MatMul 4x8, MatMul 8x4", {}),
    ],
    ids=[
        *(name for name, *_ in FIRSTS),
        *("gemm", "gemm-trans", "gemm-alpha", "conv", "conv-no-bias", "bias-left", "transpose", "scaled", "dropout"),
    ],
)
def test_pair_of_operators(first: str, second: str, shown: str, options: dict[str, Any]) -> None:
    block = only_block(mlp(SILU, first=first, second=second, **options))
    assert (f"{kinds(block.first)}, {kinds(block.second)}", block.neurons, block.gate) == (shown, 8, "y")


@pytest.mark.parametrize(
    ("first", "cut", "options"),
    [
        (FIRST, "part = Slice(h, start, five, last)", {}),
        (FIRST, "part, rest = Split<axis = -1>(h, sizes)", {}),
        (FIRST, "k = Mul(h, c1) cut = Slice(k, start, five, last) part = Identity(cut)", {}),
        ("y = MatMul(W2, x)", "cut = Slice(h, start, five, before) part = Transpose<perm = [0, 2, 1]>(cut)", PLANES),
        ("odd = strange.Op(x) y = MatMul(odd, W1)", "part = Slice(h, start, five, last)", {"domains": {"strange": 1}}),
    ],
    ids=["slice", "split", "scaled", "rows", "unknown shape"],
)
def test_neurons_of_which_a_part_is_read(first: str, cut: str, options: dict[str, Any]) -> None:
    given = {"W": np.ones((5, 4)), **integers(start=[0], five=[5], last=[-1], before=[-2], sizes=[5, 3])}
    block = only_block(mlp(SILU, first=first, second=f"{cut} out = MatMul(part, W)", constants=given, **options))
    assert ([operator.in_features for operator in block.second], block.neurons) == ([5], 8)


def test_neurons_of_an_activation_beside_its_value_in_one_weight() -> None:
    first = "m = MatMul(x, W1wide) y, u = Split<axis = -1>(m)"
    report = rewrite(mlp("s = Sigmoid(y) h = Mul(s, u)", first=first, opset=13), gate="product", dry_run=True)
    assert [row.heads for row in report.converted] == [8]


def test_one_activation_into_several_operators() -> None:
    second = "a = MatMul(h, W2) c = MatMul(h, U2) out = Add(a, c)"
    block = only_block(mlp(SILU, second=second, constants={"U2": values("W2")}))
    assert [operator.weight for operator in block.second] == ["W2", "U2"]


def test_two_blocks_with_tied_weights() -> None:
    second = f"{FIRST} {SILU} n = MatMul(h, W2) z = Add(n, x) "
    again = "m_ = MatMul(z, W1) y_ = Add(m_, b1) s_ = Sigmoid(y_) h_ = Mul(y_, s_) out = MatMul(h_, W2)"
    found = findings(text_model(second + again))
    assert [block.output for block in found.blocks] == ["h", "h_"]
    assert len({block.name for block in found.blocks}) == 2


# -- functions close to a table entry, but different ------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("b = Mul(y, $1.7) s = Sigmoid(b) h = Mul(y, s)", "silu(beta=1.7, factor=1)"),
        ("d = Div(y, $1.4142135623730951) e = Erf(d) p = Add(e, $1.0) h = Mul(y, p)", "gelu(inner=1, factor=2)"),
        (
            "d = Mul(y, $0.7) e = Erf(d) p = Add(e, $1.0) q = Mul(y, p) h = Mul(q, $0.5)",
            "gelu(inner=0.989949, factor=1)",
        ),
        ("h = Max(y, $-0.0)", "relu"),
        ("h = Max(y, $0.001)", "clip(slope=1, offset=0, left=0.001, right=inf)"),
        ("h = Clip(y, $0.0, $100.0)", "clip(slope=1, offset=0, left=0, right=100)"),
        ("h = Clip(y, $0.0, $6.5)", "clip(slope=1, offset=0, left=0, right=6.5)"),
        ("h = Elu<alpha = 0.5>(y)", "elu(right=1, depth=0.5, rate=1)"),
        ("c = Min(y, $7.0) s = Sigmoid(c) h = Mul(c, s)", "silu_clipped(beta=1, factor=1, low=-inf, high=7)"),
    ],
)
def test_near_miss_is_another_activation(text: str, label: str) -> None:
    assert only_block(mlp(text)).identified.label == label


TANH_TAIL = "i = Mul(z, $0.7978845608028654) t = Tanh(i) p = Add(t, $1.0) g = Mul(y, p) h = Mul(g, $0.5)"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            f"c = Pow(y, $3.0) a = Mul(c, $0.0447) z = Add(y, a) {TANH_TAIL}",
            "no known activation; the nearest, gelu_tanh, differs by ",
        ),
        (f"c = Pow(y, $2.0) a = Mul(c, $0.044715) z = Add(y, a) {TANH_TAIL}", "no known activation; the nearest, "),
        ("h = Sin(y)", "no known activation; the nearest, "),
        ("a = Sigmoid(y) b = Mul(y, a) h = Add(b, $0.01)", "no known activation; the nearest, silu, differs by 0.01"),
        ("a = Relu(y) b = Neg(y) c = Relu(b) h = Sub(a, c)", "the function between the operators is affine"),
        ("p = Softplus(y) t = Tanh(p) u = Mul(y, t) v = Tanh(y) h = Add(u, v)", "no known activation; the nearest, "),
        ("a = Log(y) h = Mul(y, a)", "no known activation has these values: f(-1) = nan, f(1) = 0, f(3) = 3.29584"),
    ],
)
def test_no_known_activation(text: str, reason: str) -> None:
    assert reason in only_left(mlp(text)).miss.reason


REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    *(
        (name, {"activation": f"h = com.microsoft.{name}(y, c1)", "domains": {"com.microsoft": 1}},
         f"com.microsoft::{name} 'h' has a constant of shape [8] where a scalar is needed")
        for name in ("BiasGelu", "FastGelu")
    ),
    ("second-activation", {"activation": "s = Sigmoid(y) k = Mul(y, s) z = Mul(k, c1) h = Tanh(z)"},
     "a second activation follows in Tanh 'h'"),
    ("per-channel-slope", {"activation": "h = PRelu(y, c1)"},
     "PRelu 'h' has a constant of shape [8] where a scalar is needed"),
    ("per-channel-inside", {"activation": "d = Mul(y, c1) s = Sigmoid(d) k = Max(s, b1) h = Mul(d, k)"},
     "Max 'k' has a constant of shape [8] where a scalar is needed"),
    ("second-weight-not-constant",
     {"activation": SILU, "second": "out = MatMul(h, w)", "inputs": "float[batch, tokens, 4] x, float[8, 4] w"},
     "neither factor is constant"),
    ("layer-normalisation", {"activation": SILU, "second": "k = LayerNormalization(h, c1) out = MatMul(k, W2)"},
     "its output feeds LayerNormalization 'k', which is not a linear operator"),
    ("softmax", {"activation": SILU, "second": "k = Softmax(h) out = MatMul(k, W2)"},
     "its output feeds Softmax 'k', which is not a linear operator"),
    *(
        (f"normalised-gate-{name}",  # as in BitNet: the square of the norm is not a larger activation
         {"activation": f"s = Relu(y) g = Mul(s, u) q = {square} m = ReduceMean(q) r = Sqrt(m) h = Div(g, r)",
          "first": f"{FIRST} u = MatMul(x, V1)", "constants": {"two": np.array(2.0)}},
         "its output feeds ReduceMean 'm', which is not a linear operator",
     )
     for name, square in (("product", "Mul(g, g)"), ("power", "Pow(g, two)"))),
    ("graph-output",
     {"activation": "s = Sigmoid(y) out = Mul(y, s)", "second": "", "outputs": "float[batch, tokens, 8] out"},
     "its output is an output of the graph, and no linear operator reads it"),
    ("dead-end", {"activation": "s = Sigmoid(y) h = Mul(y, s)", "second": "out = Add(x, x)"},
     "no linear operator reads its output"),
    ("residual-inside",
     {"activation": "s = Sigmoid(y) k = Mul(y, s) h = Add(k, r)",
      "inputs": "float[batch, tokens, 4] x, float[batch, tokens, 8] r"},
     "it meets 'r', not from a linear operator, in Add 'h'"),
    ("kernel-of-three-first",
     {"activation": SILU, "first": "y = Conv<pads = [1, 1]>(x, K3, b1)", "second": "out = Conv(h, K2)", **PLANES},
     "the first operator is a Conv 3, which mixes positions"),
    ("kernel-of-three-second",
     {"activation": SILU, "first": "y = Conv(x, K1)", "second": "out = Conv<pads = [1, 1]>(h, k)",
      "constants": {"k": np.ones((4, 8, 3))}, **PLANES},
     "the second operator is a Conv 3, which mixes positions"),
    ("strided-pointwise",
     {"activation": SILU, "first": "y = Conv<strides = [2]>(x, K1)", "second": "out = Conv(h, K2)", **PLANES},
     "the first operator is a Conv 1, which mixes positions"),
    ("gemm-transposed-data",
     {"activation": SILU, "first": "y = Gemm(x, W1)", "second": "out = Gemm<transA = 1>(h, p)",
      "constants": {"p": np.ones((17, 4))}, "inputs": "float[17, 4] x", "outputs": "float[8, 4] out"},
     "the data factor is transposed, so input and output lie on different axes"),
    ("three-projections",
     {"activation": "s = Sigmoid(y) k = Mul(s, u) h = Mul(k, v)",
      "first": "y = MatMul(x, W1) u = MatMul(x, V1) v = MatMul(x, T1)", "constants": {"T1": values("W1")}},
     "Mul 'h' joins more than two projections"),
    ("joined-but-no-gate",
     {"activation": "s = Sigmoid(y) t = Sigmoid(u) k = Add(s, t) h = Mul(k, y)",
      "first": "y = MatMul(x, W1) u = MatMul(x, V1)"},
     "two projections are joined, but not as activation(gate) * value"),
    ("training-dropout",
     {"activation": "s = Sigmoid(y) k = Mul(y, s) h = Dropout(k, ratio, on)",
      "constants": {"ratio": np.array(0.1), "on": onnx.numpy_helper.from_array(np.array(True), "on")}},
     "its output feeds Dropout 'h', which is not elementwise"),
    ("unknown-operator",  # which a projection passes through
     {"activation": "s = custom.Sigmoid(y) h = Mul(y, s)", "domains": {"custom": 1}},
     "custom::Sigmoid 's' is an unknown operator"),
    ("integers", {"activation": "s = Sigmoid(y) k = Mul(y, s) i = Cast<to = 7>(k) h = Cast<to = 1>(i)"},
     "its output feeds Cast 'i', which is not elementwise"),
)  # fmt: skip


@pytest.mark.parametrize(("options", "reason"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_refused(options: dict[str, Any], reason: str) -> None:
    found = findings(mlp(**options))
    assert found.blocks == ()
    assert reason in [left.miss.reason for left in found.left]


@pytest.mark.parametrize(("rank", "output"), [(3, "h"), (4, "k")])
def test_a_scalar_has_at_most_the_rank_of_the_data(rank: int, output: str) -> None:
    """[1, 1, 1, 1] adds an axis, which the heads would lose: the product with it stays, behind the heads."""
    text = "s = Sigmoid(y) k = Mul(y, s) h = Mul(k, one)"
    outputs = f"float[{'one, ' * (rank - 3)}batch, tokens, 4] out"
    block = only_block(mlp(text, constants={"one": np.full((1,) * rank, 1.5)}, outputs=outputs))
    assert (block.output, block.identified.label) == (output, f"silu{'(beta=1, factor=1.5)' if rank == 3 else ''}")


def with_axes(text: str, axes: int, root: float) -> onnx.ModelProto:
    shape = ", ".join(["one", "batch", "tokens", "4"][-axes:])
    return mlp(text, constants={"root": np.full((1,) * axes, root)}, outputs=f"float[{shape}] out")


@pytest.mark.parametrize(
    ("text", "root"),
    [
        (ERF_GELU.replace("$1.4142135623730951", "root"), 2.0**0.5),
        ("d = Mul(y, root) s = Sigmoid(d) h = Mul(y, s)", 1.5),
        ("s = Sigmoid(y) t = Mul(s, root) h = Mul(y, t)", 1.5),
        ("t = Tanh(y) p = Add(t, root) h = Mul(y, p)", 1.0),
    ],
)
def test_constants_that_add_axes_in_the_middle(text: str, root: float) -> None:
    (left,) = rewrite(with_axes(text, 4, root), dry_run=True).left
    assert "joins tensors with 3 and 4 axes" in (left.reason or "")
    assert only_block(with_axes(text, 3, root)).gate == "y"


def test_overridable_constant_is_no_constant() -> None:
    """A scalar that a caller may override is not read: it scales the gate."""
    model = mlp("b = Mul(y, beta) s = Sigmoid(b) h = Mul(y, s)", constants={"beta": np.array(1.5)})
    model.graph.input.append(onnx.helper.make_tensor_value_info("beta", onnx.TensorProto.FLOAT, []))
    block = only_block(model)
    assert (block.identified.label, block.gate, block.value) == ("sigmoid(gate) * value", "b", "y")


def test_overridable_weights_are_still_linear() -> None:
    """IR versions before 4 list every initializer as an input."""
    model = mlp(SILU)
    for initializer in model.graph.initializer:
        info = onnx.helper.make_tensor_value_info(initializer.name, initializer.data_type, list(initializer.dims))
        model.graph.input.append(info)
    assert only_block(model).identified.label == "silu"


def test_blocks_do_not_overlap_and_stand_in_graph_order() -> None:
    text = f"{FIRST} {SILU} n = MatMul(h, W1x) y2 = Add(n, b1) d = Mul(y2, y2) out = MatMul(d, W2)"
    found = findings(text_model(text, constants={"W1x": np.ones((8, 8))}))
    assert [block.identified.label for block in found.blocks] == ["silu", "square"]
    assert [block.output for block in found.blocks] == ["h", "d"]


@pytest.mark.parametrize(("text", "left"), [
    ("s = Mul(y, y) m = ReduceMean(s)", False),
    ("s = Pow(y, two) m = ReduceMean(s)", False),
    ("s = Relu(y) m = ReduceMean(s)", True),
    ("s = Mul(y, y) m = Softmax(s)", True),
])  # fmt: skip
def test_the_square_of_a_normalisation_is_no_activation(text: str, left: bool) -> None:
    nodes = f"y = MatMul(x, W1) {text} r = Sqrt(m) n = Div(y, r) out = MatMul(n, W2)"
    model = text_model(nodes, constants={"two": np.array(2.0)})
    found = findings(model)
    assert (bool(found.left), found.blocks) == (left, ())
