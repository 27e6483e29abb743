"""What differs between two files: nodes by name and structure, weights bit for bit, what models say of themselves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from rewriter.compare.graphs import GraphDifference, difference
from rewriter.files.load import LoadedModel, load_model
from tests.counting import steps
from tests.textmodels import SILU, mlp, text_model

Change = Callable[[onnx.ModelProto], None]


def of(a: onnx.ModelProto, b: onnx.ModelProto) -> GraphDifference:
    return difference(load_model(a), load_model(b))


def renamed(model: onnx.ModelProto) -> onnx.ModelProto:
    """Every node and every tensor inside gets another name."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    kept = {value.name for value in (*model.graph.input, *model.graph.output)}
    for number, node in enumerate(result.graph.node):
        node.name = f"n{number}"
        for names in (node.input, node.output):
            for place, name in enumerate(names):
                names[place] = name if name in kept or not name else f"t_{name}"
    for tensor in result.graph.initializer:
        tensor.name = f"t_{tensor.name}"
    return result


def test_a_model_and_itself() -> None:
    model = mlp(SILU)
    found = of(model, model)
    assert found.same
    assert (found.same_nodes, found.renamed, found.same_tensors) == (6, 0, 4)
    assert found.operators == {"Add": (2, 2), "MatMul": (2, 2), "Mul": (1, 1), "Sigmoid": (1, 1)}


def test_renaming_is_no_difference() -> None:
    model = mlp(SILU)
    found = of(model, renamed(model))
    assert found.same
    assert (found.same_nodes, found.renamed, found.same_tensors) == (6, 6, 4)


def reads_another(model: onnx.ModelProto) -> None:
    node = next(node for node in model.graph.node if node.op_type == "Mul")
    node.input[0] = "first"


def other_operator(model: onnx.ModelProto) -> None:
    next(node for node in model.graph.node if node.op_type == "Sigmoid").op_type = "Tanh"


@pytest.mark.parametrize(
    ("change", "a", "b", "what"),
    [
        (other_operator, "Sigmoid s", "Tanh s", ("operator",)),
        (reads_another, "Mul h", "Mul h", ("input 0",)),
    ],
)
@pytest.mark.parametrize("names", ["same names", "other names"])
def test_a_changed_node(change: Change, a: str, b: str, what: tuple[str, ...], names: str) -> None:
    ours, theirs = mlp(SILU), mlp(SILU)
    change(theirs)
    if names == "other names":
        theirs = renamed(theirs)
    (node,) = of(ours, theirs).nodes
    assert (node.status, node.what) == ("changed", what)
    if names == "same names":
        assert (node.a, node.b) == (a, b)


def test_a_changed_attribute_and_a_stated_default() -> None:
    body = "y = Softmax<axis={axis}>(x) out = Gather{gather}(y, index)"
    constants = {"index": numpy_helper.from_array(np.asarray([0, 1]), "index")}
    plain = text_model(body.format(axis=1, gather=""), constants=constants)
    stated = text_model(body.format(axis=1, gather="<axis=0>"), constants=constants)
    other = text_model(body.format(axis=2, gather=""), constants=constants)
    assert of(plain, stated).same
    (node,) = of(plain, other).nodes
    assert node.what == ("attribute axis",)


def test_nodes_on_one_side_only() -> None:
    added = text_model("y = Relu(x) z = Abs(x) w = Neg(z) out = Add(y, w)")
    found = of(text_model("y = Relu(x) out = Add(y, x)"), added)
    assert {(node.status, node.b) for node in found.nodes if node.status != "changed"} == {
        ("only in B", "Abs z"),
        ("only in B", "Neg w"),
    }
    assert found.operators["Abs"] == (0, 1)
    assert [(node.a, node.what) for node in found.nodes if node.status == "changed"] == [("Add out", ("input 1",))]


def test_bodies_of_control_flow_are_compared() -> None:
    def model(inner: str) -> onnx.ModelProto:
        branch = f"{{ b = {inner}(x) }}"
        return text_model(
            f"out = If (flag) <then_branch = g1 () => (float[batch, tokens, 4] b) {branch}, "
            f"else_branch = g2 () => (float[batch, tokens, 4] b) {branch}>",
            inputs="bool flag, float[batch, tokens, 4] x",
        )

    assert of(model("Abs"), model("Abs")).same
    found = of(model("Abs"), model("Neg"))
    assert sorted(node.scope for node in found.nodes) == ["If/else_branch", "If/then_branch"]
    assert {node.what for node in found.nodes} == {("operator",)}


def test_time_is_linear_in_the_nodes() -> None:
    """Counted, after a first time that fills caches: 600 more nodes take six times the steps of 100 more."""

    def chain(length: int, prefix: str) -> LoadedModel:
        names = ["x", *(f"{prefix}{index}" for index in range(1, length)), "out"]
        nodes = [
            helper.make_node(
                "Add" if index % 3 else "Mul", [names[index], "c"], [names[index + 1]], f"{prefix}n{index}"
            )
            for index in range(length)
        ]
        values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in ("x", "out")]
        graph = helper.make_graph(nodes, "g", values[:1], values[1:], [helper.make_tensor("c", 1, [1], [1.0])])
        return LoadedModel(helper.make_model(graph), None, None, (), 0)

    made = []
    for length in (100, 100, 200, 800):
        ours, theirs = chain(length, "a"), chain(length, "b")
        theirs.proto.graph.node[length // 2].op_type = "Sub"
        made.append(steps(partial(difference, ours, theirs)))
        found = difference(ours, theirs)
        assert [(node.a, node.what) for node in found.nodes] == [
            (f"{ours.proto.graph.node[length // 2].op_type} an{length // 2}", ("operator",))
        ]
        assert found.same_nodes == length - 1
    _, small, middle, large = made
    assert large - middle <= 6.1 * (middle - small), "quadratic work would be 30 times as much"
    assert middle - small >= 100


# -- weights ----------------------------------------------------------------------------------------------------------


def test_a_changed_weight_says_how_and_where() -> None:
    model, other = mlp(SILU), mlp(SILU)
    tensor = next(tensor for tensor in other.graph.initializer if tensor.name == "W1")
    values = numpy_helper.to_array(tensor).copy()
    values[2, 5] += np.float32(0.25)
    values[3, 1] -= np.float32(0.5)
    tensor.CopyFrom(numpy_helper.from_array(values, "W1"))
    (change,) = of(model, other).tensors
    assert (change.name, change.status, change.elements, change.index) == ("W1", "changed", 2, (3, 1))
    assert change.max_difference == pytest.approx(0.5, abs=1e-6)
    assert change.kind == ("float32[4, 8]", "float32[4, 8]")


def test_merged_and_constant_weights_are_the_same_weights() -> None:
    """What optimisers do: equal weights become one, Constant nodes become initializers."""
    ours = text_model("a = Add(x, b2) out = Add(a, twin)", constants={"twin": np.asarray([1, 2, 3, 4.0])})
    theirs = text_model("a = Add(x, b2) out = Add(a, twin)", constants={"twin": np.asarray([1, 2, 3, 4.0])})
    tensor = theirs.graph.initializer.pop(0)
    node = helper.make_node("Constant", [], [tensor.name], "made", value=tensor)
    theirs.graph.node.insert(0, node)
    found = of(ours, theirs)
    assert found.same
    assert found.operators["Constant"] == (0, 1)
