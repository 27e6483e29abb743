"""From plan to new model: what is emitted, and that everything else stays unchanged."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx
import pytest

from passes.options import Options
from passes.plan import KEY, apply, make_plan
from rewriter import ExitStatus, rewrite
from tests.attention import Array
from tests.cases import planned, run
from tests.changes import copied, graphs, set_nodes
from tests.errors import EMITTED, RATIO, Feeds, accurate, apart, correct, error_ratio, feeds_of
from tests.textmodels import ELEMENTS, ERF_GELU, FIRST, SECOND, SILU, mlp, text_model

DOMAIN = "attnonly"
ATTENTION = {"Add", "Cast", "Clip", "Constant", "Div", "Exp", "Gather", "Max", "Mul", "Neg", "Reciprocal", "Sub"}
"""The operators of softmax attention over {self, bias tokens}."""

MISH = "p = Softplus(y) t = Tanh(p) h = Mul(y, t)"
GLU = "s = Sigmoid(y) h = Mul(s, u)"
GLU_FIRST = "m = MatMul(x, W1wide) y, u = Split<axis = -1>(m)"
PROGRAMS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("silu", SILU, {}),
    ("quick-gelu", "b = Mul(y, $1.702) s = Sigmoid(b) h = Mul(y, s)", {}),
    ("relu", "h = Relu(y)", {}),
    ("leaky-relu", "h = LeakyRelu<alpha = 0.1>(y)", {}),
    ("sigmoid", "h = Sigmoid(y)", {}),
    ("tanh", "h = Tanh(y)", {}),
    ("mish", MISH, {}),
    ("gelu", ERF_GELU, {}),
    ("gelu-twice", ERF_GELU.replace("$0.5", "$1.0"), {}),
    ("glu", GLU, {"first": GLU_FIRST, "opset": 13}),
)
"""One block for every kind of head program: name, text, options of `mlp`."""

VALUE: Mapping[str, Mapping[str, Any]] = {GLU: {"value": "u"}}

BOTH_WAYS = pytest.mark.parametrize("inline", [False, True], ids=["function", "inline"])


def converted(model: onnx.ModelProto, **options: Any) -> onnx.ModelProto:
    return apply(planned(model, **options))


def metadata(node: onnx.NodeProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in node.metadata_props}


def new_nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if f"{DOMAIN}.block" in metadata(node)]


def all_nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    for holder in (*graphs(model.graph), *model.functions):
        yield from holder.node


def same(model: onnx.ModelProto, options: Mapping[str, Any] | None = None, **bounds: Any) -> onnx.ModelProto:
    """The model with its one block converted, which is the same function and as accurate; see `tests.errors`."""
    return accurate(model, planned(model, **(options or {})), **bounds)


@pytest.mark.parametrize(("text", "options"), [p[1:] for p in PROGRAMS], ids=[p[0] for p in PROGRAMS])
def test_only_attention_is_left_of_a_block(text: str, options: dict[str, Any]) -> None:
    """As a function and inline, which are the same bit for bit; and the same input gives the same bytes."""
    model, computed = mlp(text, **options), []
    for inline in (False, True):
        result = converted(model, inline=inline)
        onnx.checker.check_model(result, full_check=True)
        outside = {"MatMul", "Split"}
        assert {node.op_type for node in all_nodes(result) if node.domain == ""} <= ATTENTION | outside
        assert {node.op_type for node in new_nodes(result) if node.domain == ""} <= ATTENTION
        calls = [node for node in result.graph.node if node.domain == DOMAIN]
        assert [len(calls), len(result.functions)] == ([0, 0] if inline else [1, 1])
        assert "Exp" in {node.op_type for node in all_nodes(result)}
        again = converted(mlp(text, **options), inline=inline)
        assert again.SerializeToString(deterministic=True) == result.SerializeToString(deterministic=True)
        computed.append(run(result, **feeds_of(model))["out"])
    np.testing.assert_array_equal(computed[0], computed[1])


@BOTH_WAYS
def test_names_and_metadata(inline: bool) -> None:
    result = converted(mlp(ERF_GELU), inline=inline)
    made = new_nodes(result)
    assert made
    for node in made:
        assert node.name.startswith("mlp/heads/")
        assert [name for name in node.output if not name.startswith("mlp/heads/")] in ([], ["h"])
        assert {key: value for key, value in metadata(node).items() if key != f"{DOMAIN}.max_error"} == {
            f"{DOMAIN}.block": "mlp",
            f"{DOMAIN}.form": "local",
            f"{DOMAIN}.activation": "gelu",
            f"{DOMAIN}.program": "gelu_erf_k11",
        }
        assert 1.5e-8 <= float(metadata(node)[f"{DOMAIN}.max_error"]) < 1e-6
    old = {initializer.name for initializer in mlp(ERF_GELU).graph.initializer}
    new = {initializer.name for initializer in result.graph.initializer} - old
    assert new
    assert all(name.startswith("mlp/heads/") for name in new)
    assert_unique_names(result)


def assert_unique_names(model: onnx.ModelProto) -> None:
    made = [name for node in model.graph.node for name in node.output if name]
    given = [initializer.name for initializer in model.graph.initializer] + [value.name for value in model.graph.input]
    nodes = [node.name for node in model.graph.node if node.name]
    assert len(set(made + given)) == len(made + given)
    assert len(set(nodes)) == len(nodes)


def test_weights_are_reused_by_reference() -> None:
    model = mlp(SILU)
    result = converted(model)
    (call,) = new_nodes(result)
    assert (list(call.input), list(call.output)) == (["y", "mlp/heads/key", "y"], ["h"])
    weights = {tensor.name: tensor.SerializeToString() for tensor in model.graph.initializer}
    kept = {tensor.name: tensor.SerializeToString() for tensor in result.graph.initializer}
    assert set(kept) - set(weights) == {"mlp/heads/key"}
    assert all(kept[name] == weights[name] for name in ("W1", "b1", "W2", "b2"))


TWO_BLOCKS = (
    f"{FIRST} {SILU} second = MatMul(h, W2) z = Add(second, x) "
    "f2 = MatMul(z, V1) y2 = Add(f2, c1) s2 = Sigmoid(y2) h2 = Mul(s2, y2) out = MatMul(h2, W2)"
)


def test_blocks_share_one_function() -> None:
    model = text_model(TWO_BLOCKS)
    result = apply(make_plan(model, Options()))
    assert [node.name for node in new_nodes(result)] == ["mlp/heads/attention", "mlp_2/heads/attention"]
    assert [function.name for function in result.functions] == ["NeuronAttention"]
    assert [entry.domain for entry in result.opset_import] == ["", DOMAIN]


def test_converting_one_block_after_the_other() -> None:
    model = text_model(TWO_BLOCKS)
    first = apply(make_plan(model, Options(only=("mlp",))))
    plan = make_plan(first, Options())
    assert len(plan.conversions) == 1
    both = apply(plan)
    at_once = apply(make_plan(model, Options()))
    assert_unique_names(both)
    assert len(both.functions) == 1
    np.testing.assert_array_equal(run(both, **feeds_of(both))["out"], run(at_once, **feeds_of(both))["out"])


def dressed() -> onnx.ModelProto:
    """A model with everything that a careless round trip would lose."""
    model = mlp(
        f"{SILU} w = Sqrt($2.0) dead = Mul(y, w)",
        outputs="float[batch, tokens, 4] out, float[batch, tokens, 4] twice",
        second="second = MatMul(h, W2) out = Add(second, b2) twice = other.Twice(out)",
        domains={"other": 3},
        functions='<domain: "other", opset_import: ["": 17]> Twice (a) => (b) { b = Add(a, a) }',
    )
    model.producer_name, model.producer_version, model.domain = "maker", "4.2", "org.example"
    model.model_version, model.doc_string = 7, "a model"
    model.metadata_props.add(key="licence", value="none")
    graph = model.graph
    graph.doc_string = "a graph"
    graph.metadata_props.add(key="graph", value="kept")
    for number, node in enumerate(graph.node):
        node.name, node.doc_string = f"node_{number}", f"documented {number}"
        node.metadata_props.add(key="number", value=str(number))
    graph.input[0].doc_string = "documented input"
    graph.output[0].type.denotation = "TENSOR"
    for name in ("first", "y", "s", "h", "second"):
        graph.value_info.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    graph.initializer[0].doc_string = "documented weight"
    graph.quantization_annotation.add(tensor_name="W1").quant_parameter_tensor_names.add(key="k", value="v")
    model.functions[0].doc_string = "documented function"
    return model


def normalised(model: onnx.ModelProto, removed: set[str]) -> bytes:
    """The bytes of a model without heads and plan, and without the nodes and value_info that compute `removed`."""
    copy = copied(model)
    graph = copy.graph
    nodes = [node for node in graph.node if f"{DOMAIN}.block" not in metadata(node)]
    nodes = [node for node in nodes if not removed.intersection(node.output)]
    values_ = [value for value in graph.value_info if value.name not in removed - {"h"}]
    weights = [tensor for tensor in graph.initializer if "/heads/" not in tensor.name]
    functions = [function for function in copy.functions if function.domain != DOMAIN]
    imports = [entry for entry in copy.opset_import if entry.domain != DOMAIN]
    properties = [entry for entry in copy.metadata_props if entry.key != KEY]
    for field, kept in (
        (graph.node, nodes),
        (graph.value_info, values_),
        (graph.initializer, weights),
        (copy.functions, functions),
        (copy.opset_import, imports),
        (copy.metadata_props, properties),
    ):
        set_nodes(field, kept)
    data: bytes = copy.SerializeToString(deterministic=True)
    return data


@BOTH_WAYS
def test_everything_else_is_kept_byte_for_byte(inline: bool) -> None:
    model = dressed()
    before = model.SerializeToString(deterministic=True)
    result = converted(model, inline=inline)
    assert model.SerializeToString(deterministic=True) == before
    assert normalised(result, set()) == normalised(model, {"s", "h"})
    assert (result.opset_import[0].version, result.ir_version) == (17, model.ir_version)
    assert [entry.domain for entry in result.opset_import] == ["", "other"] + [DOMAIN] * (not inline)


def test_constants_of_the_region_go_and_shared_ones_stay() -> None:
    text = "b = Mul(y, $1.702) s = Sigmoid(b) h = Mul(y, s)"
    alone = converted(mlp(text))
    assert [tensor.name for tensor in alone.graph.initializer if "number" in tensor.name] == []
    shared = converted(mlp(text, second="second = MatMul(h, W2) out = Mul(second, $1.702)"))
    assert float(np.float32(1.702)) in [onnx.numpy_helper.to_array(t).tolist() for t in shared.graph.initializer]


def beside(name: str) -> str:
    return f"float[batch, tokens, 4] out, float[batch, tokens, 8] {name}"


SHARED_INTERIORS: tuple[tuple[str, str, dict[str, Any], str], ...] = (
    ("graph-output", SILU, {"outputs": beside("s")}, "s"),
    *(
        (name, SILU, {"second": f"{SECOND} also = {operator}(s)", "outputs": beside("also")}, "also")
        for name, operator in (("another-consumer", "Neg"), ("softmax-of-the-interior", "Softmax"))
    ),
    ("gelu-erf", ERF_GELU, {"outputs": beside("e")}, "e"),
    ("pre-activation", SILU, {"outputs": beside("y")}, "y"),
    (
        "captured-by-a-branch",
        SILU,
        {"second": f"{SECOND} yes = Not(no) also = If (yes) "
                   "<then_branch = a () => (float[batch, tokens, 8] p) { p = Neg(s) }, "
                   "else_branch = b () => (float[batch, tokens, 8] q) { q = Identity(s) }>",
         "constants": {"no": onnx.numpy_helper.from_array(np.array(False), "no")},
         "outputs": beside("also")},
        "also"),
)  # fmt: skip


@pytest.mark.sample(6)
@BOTH_WAYS
@pytest.mark.parametrize(
    ("text", "options", "shared"), [s[1:] for s in SHARED_INTERIORS], ids=[s[0] for s in SHARED_INTERIORS]
)
def test_shared_interior_keeps_its_value(text: str, options: dict[str, Any], shared: str, inline: bool) -> None:
    model = mlp(text, **options)
    result = same(model, {"inline": inline})
    np.testing.assert_array_equal(run(result, **feeds_of(model))[shared], run(model, **feeds_of(model))[shared])


def test_activation_output_keeps_its_name() -> None:
    same(mlp(SILU, outputs=beside("h")))


def test_captured_weights_and_activations_stay() -> None:
    """A branch that captures the activation's output reads the heads' output under the same name."""
    options = next(s[2] for s in SHARED_INTERIORS if s[0] == "captured-by-a-branch")
    second = str(options["second"]).replace("(s)", "(h)")
    same(mlp(SILU, **{**options, "second": second}))


@pytest.mark.parametrize(("ir", "opset"), [(3, 7), (4, 9), (5, 10), (6, 11), (7, 13)])
def test_old_ir_versions_are_inlined(ir: int, opset: int) -> None:
    model = mlp(SILU, ir=ir, opset=opset)
    for initializer in model.graph.initializer if ir < 4 else ():  # IR version 3 requires all of them to be inputs too
        info = onnx.helper.make_tensor_value_info(initializer.name, initializer.data_type, list(initializer.dims))
        model.graph.input.append(info)
    onnx.checker.check_model(model)
    plan = planned(model)
    assert plan.notes == (f"the model has IR version {ir}, without model-local functions: the heads are written out",)
    result = apply(plan)
    assert (result.ir_version, len(result.functions), result.opset_import[0].version) == (ir, 0, opset)
    onnx.checker.check_model(result)


@pytest.mark.sample(1)
@pytest.mark.parametrize("opset", [7, 8])
@pytest.mark.parametrize("text", ["h = LeakyRelu<alpha = 0.1>(y)", "h = Tanh(y)", SILU])
def test_opsets_without_integer_constants_are_inlined(text: str, opset: int) -> None:
    report = rewrite(mlp(text, ir=8, opset=opset))
    (note,) = report.notes
    assert report.exit_status is ExitStatus.CONVERTED
    assert note.startswith(f"the model has opset {opset}, whose Constant operator holds no integers")


@pytest.mark.sample(12)
@BOTH_WAYS
@pytest.mark.parametrize("text", [SILU, ERF_GELU, MISH, "h = Relu(y)", "h = Tanh(y)"])
@pytest.mark.parametrize("opset", [9, 10, 11, 13, 17, 21])
def test_opset_is_kept_and_enough(opset: int, text: str, inline: bool) -> None:
    model = mlp(text, opset=opset)
    result = correct(model, planned(model, inline=inline))
    onnx.checker.check_model(result, full_check=True)
    run(result, **feeds_of(result))


@pytest.mark.sample(10)
@BOTH_WAYS
@pytest.mark.parametrize(
    ("elem", "casts"), [("float", []), ("double", []), ("float16", [1, 10]), ("bfloat16", [1, 16])]
)
@pytest.mark.parametrize("text", [SILU, ERF_GELU, "h = Relu(y)"], ids=["silu", "gelu", "relu"])
def test_element_types(text: str, elem: str, casts: list[int], inline: bool) -> None:
    """Half precisions are computed in float32, double in double; one Cast on each side."""
    model = mlp(text, elem=elem)
    result = correct(model, planned(model, inline=inline))
    onnx.checker.check_model(result, full_check=True)
    found = [node.attribute[0].i for node in result.graph.node if node.op_type == "Cast"]
    assert found == casts
    types = {tensor.data_type for tensor in result.graph.initializer if "/heads/" in tensor.name}
    wide = onnx.TensorProto.DOUBLE if elem == "double" else onnx.TensorProto.FLOAT
    assert types <= {wide, onnx.TensorProto.INT64}


def test_gated_half_precision_casts_both_inputs() -> None:
    result = converted(mlp(GLU, first=GLU_FIRST, opset=13, elem="float16"))
    assert [node.attribute[0].i for node in result.graph.node if node.op_type == "Cast"] == [1, 1, 10]
    onnx.checker.check_model(result, full_check=True)


@pytest.mark.parametrize("elem", ["float", "float16"])
def test_element_type_behind_an_unknown_operator_is_that_of_the_weight(elem: str) -> None:
    first = "odd = strange.Op(x) y = MatMul(odd, W1)"
    (conversion,) = planned(mlp(SILU, first=first, domains={"strange": 1}, elem=elem)).conversions
    assert conversion.block.elem_type == ELEMENTS[elem]


PLANTED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("initializer", {"constants": {"mlp/heads/key": np.array(3.0)},
                     "second": 'k = MatMul(h, W2) out = Mul(k, "mlp/heads/key")'}),
    ("tensor", {"second": '"mlp/heads/key" = MatMul(h, W2) out = Add("mlp/heads/key", b2)'}),
    ("node", {"second": '["mlp/heads/attention"] k = MatMul(h, W2) out = Add(k, b2)'}),
    ("graph-input", {"inputs": 'float[batch, tokens, 4] x, float[4] "mlp/heads/key"',
                     "second": 'k = MatMul(h, W2) out = Add(k, "mlp/heads/key")'}),
    ("graph-output", {"second": 'out = MatMul(h, W2) "mlp/heads/key" = Add(out, b2)',
                      "outputs": 'float[batch, tokens, 4] out, float[batch, tokens, 4] "mlp/heads/key"'}),
    ("inside-a-branch", {"second": 'k = MatMul(h, W2) out = If (yes) <then_branch = a () => (float[] p) '
                                   '{ "mlp/heads/key" = Neg(k) p = Neg("mlp/heads/key") }, '
                                   'else_branch = b () => (float[] q) { q = Identity(k) }>',
                         "constants": {"yes": onnx.numpy_helper.from_array(np.array(True), "yes")}}),
    ("of-two-blocks", {"constants": {"mlp/heads/key": np.array(3.0), "mlp_2/heads/key": np.array(2.0)},
                       "second": 'k = MatMul(h, W2) l = Mul(k, "mlp/heads/key") out = Mul(l, "mlp_2/heads/key")'}),
)  # fmt: skip


@BOTH_WAYS
@pytest.mark.parametrize("options", [p[1] for p in PLANTED], ids=[p[0] for p in PLANTED])
def test_taken_names_are_avoided(options: dict[str, Any], inline: bool) -> None:
    model = mlp(SILU, **options)
    result = same(model, {"inline": inline})
    assert_unique_names(result)
    assert all(not node.name.startswith("mlp/heads/") for node in new_nodes(result))


def test_foreign_function_of_the_same_name_is_not_called() -> None:
    model = mlp(
        SILU,
        domains={DOMAIN: 1},
        functions=f'<domain: "{DOMAIN}", opset_import: ["": 17]> '
        "NeuronAttention (query, key, value) => (output) { output = Mul(query, value) }",
    )
    result = same(model)
    assert [function.name for function in result.functions] == ["NeuronAttention"]
    assert DOMAIN not in {node.domain for node in result.graph.node}


@BOTH_WAYS
@pytest.mark.parametrize("taken", [True, False])
def test_block_in_a_branch(taken: bool, inline: bool) -> None:
    body = (
        f"out = If (yes) <then_branch = a () => (float[batch, tokens, 4] p) {{ {FIRST} {SILU} p = MatMul(h, W2) }}, "
        "else_branch = b () => (float[batch, tokens, 4] q) { q = Identity(x) }>"
    )
    model = text_model(body, constants={"yes": onnx.numpy_helper.from_array(np.array(taken), "yes")})
    result = converted(model, inline=inline)
    assert {"Sigmoid"}.isdisjoint(node.op_type for node in all_nodes(result))
    assert "Exp" in {node.op_type for node in all_nodes(result)}
    onnx.checker.check_model(result, full_check=True)
    assert apart(model, result, []).exact <= EMITTED
    assert error_ratio(model, result) <= RATIO


def test_block_in_a_function() -> None:
    """A function takes its weights as inputs, so it is inlined, and the plan says so."""
    model = text_model(
        "out = other.Mlp(x, W1, W2)",
        domains={"other": 1},
        functions='<domain: "other", opset_import: ["": 17]> Mlp (x, w, v) => (o) '
        "{ y = MatMul(x, w) s = Sigmoid(y) h = Mul(y, s) o = MatMul(h, v) }",
    )
    plan = planned(model)
    assert plan.notes == ("local functions that hold parts of blocks are inlined: other::Mlp",)
    result = apply(plan)
    assert apart(model, result, []).exact <= EMITTED
    assert error_ratio(model, result) <= RATIO


FUSED: tuple[tuple[str, str, str, Callable[[Feeds], Array]], ...] = (
    ("bias-gelu", "first = MatMul(x, W1)", "h = com.microsoft.BiasGelu(first, b1)", lambda v: v["first"] + v["b1"]),
    ("fast-gelu", "first = MatMul(x, W1)", "h = com.microsoft.FastGelu(first, b1)", lambda v: v["first"] + v["b1"]),
    (
        "fused-gemm",
        "",
        'h = com.microsoft.FusedGemm<activation = "Relu", transB = 1>(x, W1t, b1)',
        lambda v: v["x"] @ v["W1t"].T + v["b1"],
    ),
)
"""Name, first operator, activation, and what the pre-activation would be."""


@BOTH_WAYS
@pytest.mark.parametrize(("first", "text", "gate"), [f[1:] for f in FUSED], ids=[f[0] for f in FUSED])
def test_activation_fused_with_its_neighbour(first: str, text: str, gate: Any, inline: bool) -> None:
    rows = {"inputs": "float[tokens, 4] x", "outputs": "float[tokens, 4] out"} if "Gemm" in text else {}
    model = mlp(text, first=first, domains={"com.microsoft": 1}, **rows)
    result = same(model, {"inline": inline}, gate=gate)
    assert {node.domain for node in result.graph.node} <= {"", DOMAIN}


@pytest.mark.parametrize(("first", "text"), [f[1:3] for f in FUSED], ids=[f[0] for f in FUSED])
def test_fused_activation_outside_of_a_block_stays(first: str, text: str) -> None:
    rows = {"inputs": "float[tokens, 4] x", "outputs": "float[tokens, 8] out"} if "Gemm" in text else {}
    options = {"outputs": "float[batch, tokens, 8] out", **rows, "domains": {"com.microsoft": 1}}
    model = mlp(text, first=first, second="out = Softmax(h)", **options)
    plan = make_plan(model, Options())
    assert plan.conversions == ()
    assert [node.domain for node in plan.model.graph.node] == [node.domain for node in model.graph.node]


def test_accuracy_beyond_all_programs_is_refused() -> None:
    (left,) = rewrite(mlp(ERF_GELU), accuracy=1e-15, dry_run=True).left
    assert (left.reason or "").startswith("the closest program, gelu")
    assert (left.reason or "").endswith("--accuracy asks for 1e-15")


OLD = "opset {} is older than 7; convert the model to a newer opset first"
REFUSED = {
    **{OLD.format(opset): mlp("h = Relu(y)", opset=opset, ir=3) for opset in (6, 1)},
    # Neither the data nor the weight, a constant computed by an unknown operator, gives the type of the product.
    "its element type is unknown; add value_info, for example with onnx.shape_inference": mlp(
        SILU, first="odd = strange.Op(x) w = strange.Permute(W1) y = MatMul(odd, w)", domains={"strange": 1}
    ),
    "its element type int32 is not a floating-point type that heads can be computed in": mlp(
        "h = Relu(y)", first="y = MatMul(x, W1)", second="out = MatMul(h, W2)", elem="int32"
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_opsets_and_types_that_are_refused(reason: str) -> None:
    plan = make_plan(REFUSED[reason], Options())
    assert (plan.conversions, [left.miss.reason for left in plan.left]) == ((), [reason])


@pytest.mark.slow
def test_node_models_of_onnx_pass_through() -> None:
    """The plan accepts each of them, and changes none, since none has an MLP."""
    from onnx.backend.test.case import node

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # onnx's own case makers overflow on purpose
        models = {case.name: case.model for case in node.collect_testcases(None) if case.model is not None}
    assert len(models) > 1000
    for name, model in models.items():
        before = model.SerializeToString(deterministic=True)
        for scope in ("mlp", "all"):
            plan = make_plan(model, Options(scope=scope))
            assert not plan.conversions, name
            assert model.SerializeToString(deterministic=True) == before, name
            if plan.model is model:
                assert apply(plan).SerializeToString(deterministic=True) == before, name
