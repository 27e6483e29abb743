"""The float64 evaluation: what is widened, what is refused, that nothing is rounded on the way."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from rewriter.evaluate.arithmetic import Unsupported
from rewriter.evaluate.table import OPERATORS as OPERATORS_OF_TABLE
from rewriter.files.load import LoadedModel
from rewriter.proof.run import open_reference
from tests.oracle import evaluate

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 3, 4)).astype(np.float32)


def parse(signature: str, body: str, opset: int = 21, rest: str = "") -> onnx.ModelProto:
    versions = f'"": {opset}, "com.microsoft": 1, "local": 1, "own": 1'
    return parser.parse_model(f"<ir_version: 10, opset_import: [{versions}]> g {signature} {{ {body} }} {rest}")


def reference_of(model: onnx.ModelProto, base_dir: Path | None = None) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    return open_reference(LoadedModel(model, None, base_dir, (), 0))


def run(model: onnx.ModelProto, **feeds: Any) -> Any:
    return reference_of(model)(feeds)["y"]


@pytest.mark.parametrize("kind", ["float", "float16", "bfloat16"])
def test_everything_is_widened(kind: str) -> None:
    model = parse(
        f"({kind}[n] x, int64[n] i) => ({kind}[n] y)",
        "a = Constant<value_float = 0.1>() b = Cast<to=10>(i) c = Cast<to=1>(b) s = Shape(x) "
        "d = ConstantOfShape(s) e = ConstantOfShape<value = float[1] {2}>(s) f = CastLike(i, x) "
        "g = Add(c, a) h = Add(d, e) j = Add(g, h) k = Add(j, f) y = Add(k, x)",
    )
    before = model.SerializeToString()
    x = np.array([1, 2.5], helper.tensor_dtype_to_np_dtype(model.graph.input[0].type.tensor_type.elem_type))
    result = run(model, x=x, i=np.array([2049, 2**24 + 1]))
    assert result.dtype == np.float64
    assert model.SerializeToString() == before
    # 2049 is not a float16 and 2^24 + 1 not a float32: nothing is rounded.
    expected = 2 * np.array([2049, 2**24 + 1]) + 2 + float(np.float32(0.1)) + x.astype(float)
    np.testing.assert_array_equal(result, expected)


NORM = "LayerNormalization<epsilon = 0.001>"
OPERATORS = {
    **{f"y = {call}": f"y = {call}" for call in (
        "Gelu(x)", 'Gelu<approximate = "tanh">(x)', "HardSwish(x)", f"{NORM}(x, s, b)", "com.microsoft.Gelu(x)",
        "com.microsoft.FastGelu(x)", "com.microsoft.FastGelu(x, b)", "com.microsoft.BiasGelu(x, b)",
        "com.microsoft.QuickGelu(x)",
    )},
    "y = com.microsoft.FusedMatMul<alpha = 0.25, transB = 1>(x, x)":
        "t = Transpose<perm = [0, 2, 1]>(x) p = MatMul(x, t) h = Mul(b, b) i = ReduceMax(h) y = Mul(p, i)",
}  # fmt: skip
"""What onnx's evaluator does not compute in float64 (others: `tests/rewriter/evaluate`), and how the oracle does."""


@pytest.mark.parametrize("body", OPERATORS)
def test_operators_are_exact(body: str) -> None:
    constants = "s = Constant<value = float[4] {2,2,2,2}>() b = Constant<value = float[4] {0.5,0.5,0.5,0.5}>() "
    model, plain = (
        parse("(float[2, 3, 4] x) => (float[2, 3, 4] y)", constants + text) for text in (body, OPERATORS[body])
    )
    result = run(model, x=X)
    assert result.dtype == np.float64
    np.testing.assert_allclose(result, evaluate(plain, {"x": X})["y"], rtol=1e-13, atol=1e-15)


FUNCTION = '<domain: "local", opset_import: ["": 11]> f (a) => (b) { b = Softmax<axis = 0>(a) }'


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("y = DynamicQuantizeLinear(x)", r"^DynamicQuantizeLinear 'y' has no known float64 form$"),
        ("y = RandomNormalLike(x)", r"^RandomNormalLike 'y' has no known float64 form$"),
        ("y = Hardmax(x)", r"^Hardmax 'y' has no known float64 form$"),
        ("y = MaxPool<kernel_shape = [1]>(x)", r"^MaxPool 'y': it is not in the table of operators$"),
        ("y = Nothing(x)", r"^Nothing 'y': it is not in the table of operators$"),
        ("y = com.microsoft.MatMulNBits<N = 2>(x, x, x)", "^com.microsoft::MatMulNBits 'y': data decides a weight$"),
        ("y = Cast<to = 17>(x)", r"^Cast 'y': a conversion to float8_e4m3fn$"),
        ("y = local.thing(x)", r"^local::thing 'y': it is not in the table of operators$"),
        # Up to opset 12 Softmax flattens what follows its axis: the function cannot be inlined unchanged.
        ("y = local.f(x)", r"^local::f 'y': it is not in the table of operators$"),
        ("y = Constant()", r"^Constant 'y': a constant of another kind$"),
    ],
)
def test_what_has_no_float64_form_is_refused(body: str, reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        run(parse("(float[2] x) => (float[2] y)", body, 17, FUNCTION), x=X[0, 0, :2])


@pytest.mark.parametrize("holder", ["initializer", "attribute"])
def test_external_data(holder: str, tmp_path: Path) -> None:
    constant = "w = Constant<value = float[4] {0, 1, 2, 3}>() " if holder == "attribute" else ""
    model = parse("(float[4] x) => (float[4] y)", f"{constant}y = Add(x, w)")
    tensor = numpy_helper.from_array(np.arange(4, dtype=np.float32), "w")
    if constant:
        model.graph.node[0].attribute[0].t.CopyFrom(tensor)
    else:
        model.graph.initializer.append(tensor)
    onnx.save(
        model, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0,
        convert_attribute=True,
    )  # fmt: skip
    proto = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    feeds = {"x": np.zeros(4, np.float32)}
    assert reference_of(proto, tmp_path)(feeds)["y"].tolist() == [0, 1, 2, 3]
    held = proto.graph.node[0].attribute[0].t if constant else proto.graph.initializer[0]
    assert held.data_location == TensorProto.EXTERNAL
    (tmp_path / "w.bin").unlink()
    with pytest.raises(Unsupported, match=r"cannot open external data 'w\.bin'"):
        reference_of(proto, tmp_path)(feeds)


def test_larger_than_2_gb(tmp_path: Path) -> None:
    model = parse("(float[4] x) => (float[4] y)", "y = Add(x, w)")
    tensor = model.graph.initializer.add(name="w", data_type=TensorProto.FLOAT, dims=[1 << 15, 1 << 15])
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="w.bin")
    with pytest.raises(Unsupported, match=r"^larger than 2 GB$"):
        reference_of(model, tmp_path)


# -- the engine: what computes which operator, what is kept and fed, what is refused ----------------------------------

SQUARE = np.array([[0.5, -1.5], [2.0, 0.25]], np.float32)


def parse_square(body: str, signature: str = "(float[2, 2] x) => (float y)") -> onnx.ModelProto:
    """A model whose outputs have any shape."""
    model = parse(signature, body, 17)
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    return model


def test_a_default_that_is_fed() -> None:
    model = parse_square("y = Add(x, b)")
    model.graph.initializer.append(numpy_helper.from_array(np.ones((2, 2), np.float32), "b"))
    model.graph.input.append(helper.make_tensor_value_info("b", TensorProto.FLOAT, [2, 2]))
    reference = reference_of(model)
    np.testing.assert_array_equal(reference({"x": SQUARE})["y"], SQUARE + 1)
    np.testing.assert_array_equal(reference({"x": SQUARE, "b": SQUARE})["y"], SQUARE + SQUARE)
    np.testing.assert_array_equal(reference({"x": SQUARE})["y"], SQUARE + 1)


def test_shapes_that_follow_from_values() -> None:
    model = parse_square("a = Exp(x) b = Floor(a) c = NonZero(b) d = Transpose(c) f = Shape(d) y = Cast<to = 1>(f)")
    reference = reference_of(model)
    assert reference({"x": SQUARE})["y"].tolist() == [3, 2]
    assert reference({"x": SQUARE * 0})["y"].tolist() == [4, 2]


def test_an_operator_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Any, x: Any) -> Any:
        raise IndexError("out of\nbounds")

    monkeypatch.setitem(OPERATORS_OF_TABLE, ("", "Erf"), broken)
    with pytest.raises(Unsupported, match=r"^Erf 'y': IndexError out of bounds$"):
        run(parse_square("y = Erf(x)"), x=SQUARE)


def test_feeds_that_do_not_fit() -> None:
    model = parse_square("y = Gather(x, i)", signature="(float[2, 2] x, int64[1] i) => (float y)")
    with pytest.raises(Unsupported, match=r"^Gather 'y': IndexError index 5 is out of bounds for axis 0 with size 2$"):
        reference_of(model)({"x": SQUARE, "i": np.array([5])})


def test_what_nobody_reads_is_not_computed() -> None:
    model = parse_square("a = Exp(x) b = own.Unknown(a) c = Softsign(x) y = Neg(x)")
    np.testing.assert_array_equal(reference_of(model)({"x": SQUARE})["y"], -SQUARE)
