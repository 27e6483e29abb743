"""Types and shapes without weights: what is declared, what is inferred, and what the skeleton leaves out."""

import onnx
import pytest

from rewriter.graph.types import TensorType, declared_types, inferred_graph, skeleton_of, terms_of

BLOCKED = "com.microsoft.nchwc"
UNSHAPED: tuple[int | str, ...] = ()
FLOAT, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64


def model_of(body: str, weights: str = "", *, inputs: str = "float[n, 4] x") -> onnx.ModelProto:
    return onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1, "custom": 1]> '
        f"g ({inputs}) => (float[n, 4] out) <{weights}> {{ {body} }}"
    )


def ones(count: int) -> str:
    return ", ".join(["1"] * count)


def test_what_is_declared() -> None:
    """An initializer knows its own type; value_info may be stale."""
    model = model_of("out = Add(x, w)", "float[4] w = {1, 2, 3, 4}")
    graph = model.graph
    for name, elem, shape in (("x", INT64, [9]), ("w", INT64, [9]), ("out", INT64, [9]), ("free", INT64, None)):
        graph.value_info.append(onnx.helper.make_tensor_value_info(name, elem, shape))
    graph.value_info.append(onnx.helper.make_tensor_sequence_value_info("sequence", FLOAT, None))
    graph.value_info.append(onnx.helper.make_tensor_value_info("odd", FLOAT, [3, 0, None, "m"]))
    assert declared_types(graph) == {
        "x": TensorType(FLOAT, ("n", 4)),
        "out": TensorType(FLOAT, ("n", 4)),
        "w": TensorType(FLOAT, (4,)),
        "free": TensorType(INT64, None),
        "odd": TensorType(FLOAT, (3, 0, None, "m")),
    }


@pytest.mark.parametrize(
    ("body", "shape"),
    [
        ("h = com.microsoft.Gelu(x)", ("n", 4)),
        ("h = com.microsoft.BiasGelu(x, b)", ("n", 4)),
        ("h = com.microsoft.QuickGelu<alpha = 1.0>(x)", ("n", 4)),
        ("h = com.microsoft.SkipLayerNormalization(x, x, b)", ("n", 4)),
        ("h = com.microsoft.FusedMatMul(x, w)", ("n", 2)),
        ("h = com.microsoft.FusedMatMul<transA = 0, transB = 0, alpha = 2.0>(x, w)", ("n", 2)),
        ("h = com.microsoft.FusedMatMul<transB = 1>(w, w)", (4, 4)),
        ("h = com.microsoft.FusedMatMul<transBatchA = 1>(x, w)", UNSHAPED),
        ("h = com.microsoft.Unheard(x)", None),
        (f"c = {BLOCKED}.Conv(i, k) h = {BLOCKED}.ReorderOutput<channels = 6>(c)", ("a", 6, 4, 4)),
        (f"c = {BLOCKED}.ReorderInput(i) h = {BLOCKED}.MaxPool<kernel_shape = [4, 4]>(c)", ("a", 3, 2, 2)),
        (f"h = {BLOCKED}.ReorderOutput<channels = 6, channels_last = 1>(i)", UNSHAPED),
        ("h = custom.Gelu(x)", None),
        ("h, mean = com.microsoft.SkipLayerNormalization(x, x, b)", ("n", 4)),
        ("y, mean, deviation, h = com.microsoft.SkipLayerNormalization<epsilon = 0.1>(x, x, b)", ("n", 4)),
        ("y, , , h = com.microsoft.SkipSimplifiedLayerNormalization(x, x, b)", ("n", 4)),
        ("h = SimplifiedLayerNormalization(x, b)", ("n", 4)),
        ("h, mask = com.microsoft.EmbedLayerNormalization(ids, , w, w, , b, b)", ("m", "s", 2)),
        ("y, mask, h = com.microsoft.EmbedLayerNormalization(ids, , w, w, , b, b)", ("m", "s", 2)),
        ("h = com.microsoft.Gelu()", None),
    ],
)
def test_inference_goes_on_behind_fused_operators(body: str, shape: tuple[int | str, ...] | None) -> None:
    weights = f"float[4] b = {{{ones(4)}}}, float[4, 2] w = {{{ones(8)}}}, float[8, 3, 2, 2] k = {{{ones(96)}}}"
    inputs = "float[n, 4] x, int32[m, s] ids, float[a, 3, 5, 5] i"
    model = model_of(f"{body} g = Exp(h) out = Identity(x)", weights, inputs=inputs)
    known = declared_types(inferred_graph(model))
    assert not {"mean", "deviation"} & known.keys()
    for name in "hg":
        assert known.get(name) == (TensorType(FLOAT, shape or None) if shape is not None else None)
    assert len(inferred_graph(model).node) == len(model.graph.node)


def test_inference_goes_on_in_bodies_and_leaves_functions_of_the_model_alone() -> None:
    branch = "{ y = com.microsoft.BiasGelu(x, x) z = Exp(y) }"
    model = model_of(
        f"out = Identity(x) o = If<then_branch = t () => (z) {branch}, else_branch = e () => (z) {branch}>(c)"
    )
    (_, held) = inferred_graph(model).node
    for attribute in held.attribute:
        assert declared_types(attribute.g)["y"] == TensorType(FLOAT, ("n", 4))
    own = '<opset_import: ["": 17], domain: "com.microsoft"> BiasGelu (p, q) => (r) { r = Shape(p) }'
    model = model_of("y = com.microsoft.BiasGelu(x, x) out = Identity(x)")
    del model.opset_import[1:]  # onnxruntime does not need its own domains to be imported
    assert declared_types(inferred_graph(model))["y"] == TensorType(FLOAT, ("n", 4))
    model.functions.append(onnx.parser.parse_function(own))
    assert declared_types(inferred_graph(model))["y"] == TensorType(INT64, (2,))


def test_declared_types_remain_where_inference_fails() -> None:
    model = model_of("out = Transpose<perm = [0, 1, 2, 3, 3]>(x) h = Exp(x)")
    model.graph.node[0].attribute[0].ints[:] = [7, 9]
    assert declared_types(inferred_graph(model))["x"] == TensorType(FLOAT, ("n", 4))


def test_operands_of_shape_operators_are_read() -> None:
    model = model_of("t = Reshape(x, s) out = Identity(x)", "int64[3] s = {2, 2, -1}", inputs="float[4, 4] x")
    assert declared_types(inferred_graph(model))["t"] == TensorType(FLOAT, (2, 2, 4))


@pytest.mark.parametrize(("count", "kept"), [(1024, True), (1025, False)])
def test_large_weights_are_stubs(count: int, kept: bool) -> None:
    model = model_of("out = Identity(x)", f"float[{count}] w = {{{ones(count)}}}")
    before = model.SerializeToString()
    (tensor,) = skeleton_of(model).graph.initializer
    assert (tensor.name, tensor.data_type, list(tensor.dims)) == ("w", FLOAT, [count])
    assert (bool(tensor.float_data), tensor.data_location == onnx.TensorProto.EXTERNAL) == (kept, not kept)
    assert model.SerializeToString() == before


@pytest.mark.parametrize(("count", "kept"), [(1000, True), (2000, True), (2100, False), (4000, False)])
def test_large_constant_nodes_are_stubs(count: int, kept: bool) -> None:
    model = model_of(f"c = Constant<value = float[{count}] {{{ones(count)}}}>() out = Identity(x)")
    model.graph.node[0].name = "named"
    model.graph.node[0].attribute.add(name="other", type=onnx.AttributeProto.INT, i=3)
    node = skeleton_of(model).graph.node[0]
    assert (node.op_type, node.name, list(node.output), node.domain) == ("Constant", "named", ["c"], "")
    assert [attribute.name for attribute in node.attribute] == ["value", "other"]
    assert node.attribute[1].i == 3
    value = node.attribute[0].t
    assert (value.data_type, list(value.dims)) == (FLOAT, [count])
    assert bool(value.float_data or value.raw_data) is kept
    assert declared_types(inferred_graph(model))["c"] == TensorType(FLOAT, (count,))


def test_a_skeleton_has_all_but_weights() -> None:
    model = model_of("out = Add(x, w)", "float[4] w = {1, 2, 3, 4}")
    model.graph.value_info.append(onnx.helper.make_tensor_value_info("v", FLOAT, [2]))
    called = '<opset_import: ["": 17], domain: "d"> f (p) => (q) { q = Neg(p) }'
    model.functions.append(onnx.parser.parse_function(called))
    skeleton = skeleton_of(model)
    assert skeleton.ir_version == 8
    for field in ("node", "input", "output", "value_info", "initializer"):
        assert list(getattr(skeleton.graph, field)) == list(getattr(model.graph, field)), field
    assert list(skeleton.opset_import) == list(model.opset_import)
    assert list(skeleton.functions) == list(model.functions)


def test_products_with_packed_weights() -> None:
    """onnx does not know MatMulNBits; without sizes or scales its output has no type, and other tensors keep theirs."""
    for attributes, known in (("K = 32, N = 64, bits = 4, block_size = 32", True), ("bits = 4", False)):
        model = onnx.parser.parse_model(
            '<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]> g (float[n, 32] x) => (float[n, m] out) '
            "<uint8[64, 1, 16] B = {0}, float[64] scales = {0}> "
            f"{{ y = com.microsoft.MatMulNBits<{attributes}>(x, B, scales) z = Relu(x) out = Relu(y) }}"
        )
        found = declared_types(inferred_graph(model))
        assert found.get("y") == (TensorType(onnx.TensorProto.FLOAT, ("n", 64)) if known else None)
        assert found["z"] == TensorType(onnx.TensorProto.FLOAT, ("n", 32))
        assert "y/unpacked" not in found


@pytest.mark.parametrize(
    ("dim", "terms"),
    [
        ("batch", {"batch": 1}),
        ("16*s0", {"s0": 16}),
        ("past_seq_len + seq_len", {"past_seq_len": 1, "seq_len": 1}),
        ("past_sequence_length+1", {"past_sequence_length": 1, "": 1}),
        ("2*s0 - 3", {"s0": 2, "": -3}),
        ("s0 + s0", {"s0": 2}),
        ("batch-size", {"batch-size": 1}),
        ("encoder_sequence_length / 2", {"encoder_sequence_length / 2": 1}),
        ("(s76//5) + 1", {"(s76//5) + 1": 1}),
    ],
)
def test_a_dimension_is_a_sum_of_names(dim: str, terms: dict[str, int]) -> None:
    assert terms_of(dim) == terms
