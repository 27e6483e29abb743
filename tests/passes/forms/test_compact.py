"""Form `compact`: its pattern, its weights and its memory."""

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from passes.plan import apply
from rewriter import certify, rewrite
from rewriter.errors import ValidationError
from tests import cases
from tests.attention import Array, HeadNumbers
from tests.changes import body as body_of
from tests.changes import copied, maker
from tests.headmath import tapped
from tests.oracle_operators import softmax
from tests.textmodels import ERF_GELU, SECOND, SILU, integers, mlp, text_model, values

TEXTS = {"silu": SILU, "relu": "h = Relu(y)", "tanh": "h = Tanh(y)", "gelu": ERF_GELU}
NO_PLAIN_WEIGHT = "m = MatMul(x, W1) y = Sub(m, b1)"


def softmax_weights(head: HeadNumbers, y: Array) -> Array:
    """Theorem 3 in numpy: the weights of a head's own key and of its bias tokens, [..., 1 + m]."""
    own = head.beta * y + head.gamma
    logits = np.stack([own, *(token.slope * y + token.offset for token in head.bias_tokens)], axis=-1)
    return softmax(logits)


@pytest.mark.parametrize("first", [None, NO_PLAIN_WEIGHT], ids=["matrices", "by-reference"])
@pytest.mark.parametrize("name", TEXTS)
def test_the_pattern_is_the_softmax_of_theorem_3(name: str, first: str | None) -> None:
    """[batch, tokens, heads, 1 + m]: rows sum to one, and each entry is what the head program states."""
    model = mlp(TEXTS[name], **({} if first is None else {"first": first}))
    plan = cases.planned(model, form="compact")
    (head,) = plan.conversions[0].program.heads
    x = np.random.default_rng(0).normal(size=(2, 5, 4)).astype(np.float32)
    result = apply(plan)
    # The constant of tanh is a second head, which attends only to itself.
    tensor = "mlp/heads/pattern_0" if name == "tanh" else "mlp/heads/pattern"
    pattern = tapped(result, {"x": x}, [tensor])[tensor].astype(np.float64)
    sign = -1.0 if first else 1.0
    y = x.astype(np.float64) @ values("W1").astype(np.float32) + sign * values("b1").astype(np.float32)
    expected = softmax_weights(head, y)
    assert pattern.shape == (2, 5, 8, 1 + len(head.bias_tokens)) == expected.shape
    assert np.abs(pattern.sum(axis=-1) - 1.0).max() <= 2.0**-22
    assert np.abs(pattern - expected).max() <= 1e-6  # measured: 3e-7


SHAPES = {
    "W_Q": (8, 5, 1),
    "W_O": (8, 1, 4),
    "b_O_bias_0": (4,),
    "k": (2, 5, 2, 1),
    "k_bias": (1, 1),
    "v_rows": (2, 1),
    **dict.fromkeys(("pattern", "scores"), (2, 5, 8, 2)),
    **dict.fromkeys(("q", "z"), (2, 5, 8, 1)),
}


def test_weights_and_tensors_have_the_names_and_shapes_of_the_field() -> None:
    result = apply(cases.planned(mlp("t = Tanh(y) s = Mul(t, $0.5) h = Add(s, $0.5)"), form="compact"))
    made = tapped(result, {"x": np.zeros((2, 5, 4), np.float32)}, [f"mlp/heads/{name}" for name in SHAPES])
    assert {name: made[f"mlp/heads/{name}"].shape for name in SHAPES} == SHAPES


def test_gelu_is_float32_with_offsets_first() -> None:
    """A float32 product that is added to an offset is rounded once; the other way round, the product is as well."""
    model = mlp(ERF_GELU)
    result = apply(cases.planned(model, form="compact"))
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in result.graph.initializer}
    assert not any(values.dtype == np.float64 for values in constants.values())
    assert not any(node.op_type == "Cast" for node in result.graph.node)
    keys = constants["mlp/heads/k_bias"].astype(np.float64)
    (head,) = cases.planned(model, form="masked").conversions[0].program.heads  # the same one, in float64
    tokens = [(token.offset, token.slope) for token in head.bias_tokens]
    np.testing.assert_allclose(keys[1:] - keys[0], np.asarray(tokens)[1:] - tokens[0], rtol=0, atol=2e-6)
    query = tapped(result, {"x": np.ones((2, 5, 4), np.float32)}, ["mlp/heads/q"])["mlp/heads/q"]
    assert query.shape == (2, 5, 8, 2)
    assert (query[..., 0] == 1.0).all()


INTEGER = "{} = Constant<value_ints = [{}]>()".format
SIZED = f"""k = Shape(h) {INTEGER("i", 0)} {INTEGER("j", 2)} a = Slice(k, i, j) {INTEGER("l", 4)}
    s = Concat<axis = 0>(a, l) f = Flatten<axis = 2>(h) g = Gemm(f, W2) out = Reshape(g, s)"""


@pytest.mark.parametrize(("rows", "second"), [("batch, tokens", SECOND), ("tokens", SECOND), ("batch, tokens", SIZED)])
@pytest.mark.parametrize("name", ["relu", "gelu"])
def test_the_certificate_is_for_every_size(name: str, rows: str, second: str) -> None:
    model = mlp(TEXTS[name], second=second, inputs=f"float[{rows}, 4] x", outputs=f"float[{rows}, 4] out")
    assert cases.proved(model, form="compact").validation.certificate.sizes == ()


def test_values_beyond_float32_are_float64() -> None:
    """The values of exp reach e^160; as float32 numbers they would be infinite."""
    cases.proved(mlp("k = Mul(y, $0.3) h = Exp(k)"), form="compact")


def test_rows_that_the_original_lays_out_by_computed_sizes_are_certified() -> None:
    """As in the patch merger of a vision encoder: four rows side by side are a token."""
    body = (
        "s = Shape<start = 0, end = 1>(x) n = Div(s, four) t = Concat<axis = 0>(n, four) r = Reshape(x, t) "
        "y = MatMul(r, W1) h = Relu(y) out = MatMul(h, W2)"
    )
    model = text_model(
        body, opset=17, inputs="float[rows, 1] x", outputs="float[tokens, 4] out", constants=integers(four=[4])
    )
    cases.proved(model, form="compact")


@pytest.mark.parametrize("form", ["compact", pytest.param("maskless", marks=pytest.mark.slow)])
def test_four_axes_of_a_tensor_from_outside_a_branch_are_certified(form: str) -> None:
    body = (
        "yes = Constant<value_int = 1>() c = Cast<to = 9>(yes) out = If(c) <then_branch = g () => (float[] a) { "
        "s = Identity(x) y = MatMul(s, W1) h = Relu(y) a = MatMul(h, W2) }, "
        "else_branch = k () => (float[] b) { b = Identity(x) }>"
    )
    model = text_model(body, inputs="float[p, q, r, 4] x", outputs="float[p, q, r, 4] out")
    assert rewrite(model, form=form, validate="certificate").exit_status == 0


LOOP = (
    "trips = Constant<value_int = 2>() yes = Cast<to = 9>(trips) out = Loop(trips, yes, x) <body = g (int64 i, bool go,"
    " float[] s) => (bool on, float[] again) { on = Identity(go) y = MatMul(s, W1) u = MatMul(s, V1) h = Relu(y) "
    "gated = Mul(h, u) again = MatMul(gated, W2) }>"
)
TURNED = {"gate": ["query_rows"], "value": ["value_rows"], "both": ["query_rows", "value_rows"]}


@pytest.mark.slow
def test_rows_of_a_stream_of_any_rank_are_certified_and_others_are_not() -> None:
    """Inference knows no shape in the loop."""
    model = text_model(LOOP)
    report = rewrite(model, form="compact", validate="certificate")
    assert report.exit_status == 0
    assert certify(model, report.rewritten).certificate.certified
    x = np.random.default_rng(0).normal(size=(1, 3, 4)).astype(np.float32)
    for name, turned in TURNED.items():
        other = copied(report.rewritten)
        for rows in turned:
            _turn(other, f"mlp/heads/{rows}")
        assert np.abs(cases.run(other, x=x)["out"] - cases.run(model, x=x)["out"]).max() > 0.1, name
        assert not certify(model, other).certificate.certified, name
    even = copied(report.rewritten)
    (shape,) = (each for each in body_of(even, "body").initializer if each.name == "mlp/heads/integers_1_minus1_8")
    shape.CopyFrom(numpy_helper.from_array(np.array([2, -1, 8]), shape.name))
    with pytest.raises(ValidationError, match="Reshape"):
        cases.run(even, x=x)
    assert not certify(model, even).certificate.certified


def _turn(model: onnx.ModelProto, rows: str) -> None:
    """Let rows be laid out from the entries of all tokens in another order; their shape stays."""
    nodes, reshape = body_of(model, "body").node, maker(model, rows)
    shape, place = f"{rows}_turned_shape", list(nodes).index(reshape)
    model.graph.initializer.append(numpy_helper.from_array(np.array([1, 8, -1]), shape))
    added = [
        helper.make_node("Reshape", [reshape.input[0], shape], [f"{rows}_flat"]),
        helper.make_node("Transpose", [f"{rows}_flat"], [f"{rows}_turned"], perm=[0, 2, 1]),
    ]
    reshape.input[0] = f"{rows}_turned"
    for each in reversed(added):
        nodes.insert(place, each)
