"""Differences that leave every node and every weight as it was: what is wired to what, and in which order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from rewriter.compare.graphs import GraphDifference, difference
from rewriter.files.load import load_model
from tests.rewriter.compare.edits import (
    Change,
    body,
    graphs,
    latest_first,
    reads,
    swap,
    swap_branches,
    swap_names,
    weight,
)
from tests.textmodels import text_model

Make = Callable[[], onnx.ModelProto]


SHAPE = "float[batch, tokens, 4]"
WEIGHTS = {"W": np.asarray([1, 2, 3, 4.0]), "V": np.asarray([4, 3, 2, 1.0])}


def named(*given: Any, **options: Any) -> onnx.ModelProto:
    """A text model in which every node has a name, by which it is known again whatever its outputs are called."""
    model = text_model(*given, **options)
    for graph in graphs(model.graph):
        for node in graph.node:
            node.name = f"n_{node.output[0]}"
    return model


def two_outputs() -> onnx.ModelProto:
    return named(
        "out = Add(x, W) other = Sub(x, z) kept = Sub(x, V)",
        inputs=f"{SHAPE} x, {SHAPE} z",
        outputs=f"{SHAPE} out, {SHAPE} other, {SHAPE} kept",
        constants=WEIGHTS,
    )


def branches() -> onnx.ModelProto:
    return named(
        "p = Abs(x) q = Neg(x) out, other = If (flag) "
        f"<then_branch = g1 () => ({SHAPE} b, {SHAPE} c) {{ b = Add(p, W) c = Mul(q, V) }}, "
        f"else_branch = g2 () => ({SHAPE} b, {SHAPE} c) {{ b = Sub(q, W) c = Div(p, V) }}>",
        inputs=f"bool flag, {SHAPE} x",
        outputs=f"{SHAPE} out, {SHAPE} other",
        constants=WEIGHTS,
    )


def loop() -> onnx.ModelProto:
    body = (
        "body = g1 (int64 step, bool going, float[4] one, float[4] two) => (bool on, float[4] three, float[4] four) "
        "{ on = Identity(going) three = Sub(one, two) four = Abs(two) }"
    )
    return named(
        f"p, q = Loop (trips, , W, V) <{body}> out = Sub(p, q)",
        inputs="int64 trips",
        outputs="float[4] out",
        constants=WEIGHTS,
    )


def calls() -> onnx.ModelProto:
    function = (
        '<opset_import: ["": 17], domain: "d"> f <slope: float = 0.5> (a) => (b) { b = LeakyRelu<alpha = @slope>(a) }'
    )
    model = named("out = d.f(x)", domains={"d": 1}, functions=function)
    model.functions[0].node[0].attribute[0].type = onnx.AttributeProto.FLOAT  # the parser leaves it open
    return model


def give_default(model: onnx.ModelProto) -> None:
    """The input gets a default, which equals a weight of both models."""
    tensor = onnx.TensorProto()
    tensor.CopyFrom(model.graph.initializer[0])
    tensor.name = "z"
    model.graph.initializer.append(tensor)


def other_overload(model: onnx.ModelProto) -> None:
    function = onnx.FunctionProto.FromString(model.functions[0].SerializeToString())
    function.overload = "second"
    function.node[0].op_type = "Elu"
    model.functions.append(function)
    model.graph.node[0].overload = "second"


def default_of_attribute(model: onnx.ModelProto) -> None:
    model.functions[0].attribute_proto[0].f = 0.25


def capture_other(model: onnx.ModelProto) -> None:
    """The tensors that the bodies capture are made by each other's nodes, and are still called the same."""
    swap_names(model, "p", "q")


def attribute_type(model: onnx.ModelProto) -> None:
    """An attribute of the same bytes that a custom operator would read as something else."""
    model.graph.node[0].attribute[0].CopyFrom(helper.make_attribute("mode", b"1"))


def custom() -> onnx.ModelProto:
    model = named("out = x.Custom(x)", domains={"x": 1})
    model.graph.node[0].attribute.append(helper.make_attribute("mode", 1))
    return model


def lose_body(model: onnx.ModelProto) -> None:
    attribute = model.graph.node[0].attribute[0]
    del attribute.graphs[1]


def many_bodies() -> onnx.ModelProto:
    model = named("out = x.Switch(x)", domains={"x": 1})
    inner = [text_model(f"b = {name}(x)", outputs=f"{SHAPE} b").graph for name in ("Abs", "Neg")]
    for graph in inner:
        del graph.input[:]
    model.graph.node[0].attribute.append(helper.make_attribute("bodies", inner))
    return model


CHANGES: tuple[tuple[str, Make, Change, tuple[str, ...]], ...] = (
    ("graph outputs made by each other's nodes", two_outputs, lambda m: swap_names(m, "out", "other"),
     ("source of output out: Add n_out, Sub n_other", "source of output other: Sub n_other, Add n_out")),
    ("order of graph outputs", two_outputs, lambda m: swap(m.graph.output, 0, 1),
     ("order outputs: out, other, kept, other, out, kept",)),
    ("order of graph inputs", two_outputs, lambda m: swap(m.graph.input, 0, 1), ("order inputs: x, z, z, x",)),
    ("an input that is read instead of another", two_outputs, lambda m: reads(m, "out", 0, "z"),
     ("Add n_out: input 0",)),
    ("a weight that is read instead of another", two_outputs, lambda m: reads(m, "out", 1, "V"),
     ("Add n_out: input 1",)),
    ("an input that gets a default", two_outputs, give_default,
     ("input z: float32[batch, tokens, 4], float32[batch, tokens, 4] with a default",)),
    ("outputs of a body", branches, lambda m: swap(body(m, "then_branch").output, 0, 1),
     ("source of output n_out/then_branch 0: Add n_b, Mul n_c",
      "source of output n_out/then_branch 1: Mul n_c, Add n_b")),
    ("an output that a body lacks", branches, lambda m: body(m, "then_branch").output.pop(),
     ("outputs n_out/then_branch: 2, 1",)),
    ("branches", branches, swap_branches,
     ("Add n_b: operator, input 0", "Mul n_c: operator, input 0", "Sub n_b: operator, input 0",
      "Div n_c: operator, input 0")),
    ("tensors that a body captures, by name", branches, lambda m: reads(m, "c", 0, "p"), ("Mul n_c: input 0",)),
    ("tensors that a body captures, by what they are", branches, capture_other,
     ("Add n_b: input 0", "Mul n_c: input 0", "Sub n_b: input 0", "Div n_c: input 0")),
    ("weights that a body captures", branches, lambda m: reads(m, "b", 1, "V"), ("Add n_b: input 1",)),
    ("inputs of a body", loop, lambda m: swap(body(m, "body").input, 2, 3),
     ("Sub n_three: input 0, input 1", "Abs n_four: input 0")),
    ("outputs of a loop's body", loop, lambda m: swap(body(m, "body").output, 1, 2),
     ("source of output n_p/body 1: Sub n_three, Abs n_four",
      "source of output n_p/body 2: Abs n_four, Sub n_three")),
    ("outputs of a node", loop, lambda m: swap_names(m, "p", "q"), ("Sub n_out: input 0, input 1",)),
    ("an operator's overload", calls, other_overload, ("d::f n_out: operator", "function d::f:second: None, 1 nodes")),
    ("the default of a function's attribute", calls, default_of_attribute, ("function d::f: 1 nodes, 1 nodes",)),
    ("the type of an attribute", custom, attribute_type, ("x::Custom n_out: attribute mode",)),
    ("a body of several", many_bodies, lose_body, ("x::Switch n_out: attribute bodies",)),
)  # fmt: skip


def of(a: onnx.ModelProto, b: onnx.ModelProto) -> GraphDifference:
    return difference(load_model(a), load_model(b))


def texts(found: GraphDifference) -> set[str]:
    nodes = {f"{node.a or node.b}: {', '.join(node.what) or node.status}" for node in found.nodes}
    return nodes | {f"{change.what} {change.name}: {change.a}, {change.b}" for change in found.fields}


@pytest.mark.parametrize(
    ("make", "change", "expected"), [case[1:] for case in CHANGES], ids=[case[0] for case in CHANGES]
)
def test_what_changed_is_named(make: Make, change: Change, expected: tuple[str, ...]) -> None:
    theirs = make()
    assert of(make(), theirs).same
    change(theirs)
    found = of(make(), theirs)
    assert not found.same
    assert texts(found) == set(expected)


def test_another_value_of_a_weight_changes_no_node() -> None:
    ours, theirs = (named("y = MatMul(x, W1) h = Relu(y) out = MatMul(h, W2)") for _ in "ab")
    weight(theirs, "W1").CopyFrom(numpy_helper.from_array(np.ones((4, 8), np.float32), "W1"))
    found = of(ours, theirs)
    assert texts(found) == set()
    assert [change.name for change in found.tensors] == ["W1"]


def test_an_empty_input_is_not_what_an_unnamed_output_became() -> None:
    """Each model uses another one of a node's outputs, and B reads its own where A reads nothing."""
    ours = named("a, b = TopK(x, k) out = Clip(x, , top)", constants=CLIPS)
    theirs = named("a, b = TopK(x, k) out = Clip(x, b, top)", constants=CLIPS)
    ours.graph.node[0].output[1] = theirs.graph.node[0].output[0] = ""
    assert texts(of(ours, theirs)) == {"TopK n_a: outputs", "Clip n_out: input 1"}


def test_a_name_that_stands_for_another_tensor_now() -> None:
    """B has a tensor of the name that A's node reads, and it is made by what makes another one in A."""
    ours = named("p = Abs(x) q = Neg(x) out = Add(p, q)")
    theirs = named("q = Neg(x) out = Add(q, q)")
    for node in theirs.graph.node:
        for names in (node.input, node.output):
            names[:] = ["p" if name == "q" else name for name in names]
    assert texts(of(ours, theirs)) == {"Abs n_p: only in A", "Add n_out: input 0"}


def test_a_weight_that_is_an_input_now() -> None:
    ours, theirs = (named("out = Add(x, W)", constants=WEIGHTS) for _ in "ab")
    theirs.graph.input.append(helper.make_tensor_value_info("W", TensorProto.FLOAT, [4]))
    del theirs.graph.initializer[:]
    assert "Add n_out: input 1" in texts(of(ours, theirs))


@pytest.mark.parametrize("inside", [1.0, 2.0])
def test_a_weight_of_a_body_under_the_name_of_one_outside(inside: float) -> None:
    """Weights of one name are one only where both are defined equally far out."""
    ours, theirs = branches(), branches()
    moved = weight(theirs, "W")
    values = numpy_helper.to_array(moved) * np.float32(inside)
    for name in ("then_branch", "else_branch"):
        body(theirs, name).initializer.append(numpy_helper.from_array(values, "W"))
    theirs.graph.initializer.remove(moved)
    found = of(ours, theirs)
    nodes = {node.a: node.what for node in found.nodes}
    changed = {} if inside == 1.0 else {"Add n_b": ("input 1",), "Sub n_b": ("input 1",)}
    assert nodes == changed


def test_nodes_of_a_body_are_told_apart_by_what_they_capture() -> None:
    """Without names, and with nothing that reads their outputs."""

    def make(p: str, q: str, *reads: str) -> onnx.ModelProto:
        inner = " ".join(f"{name} = Abs({read})" for name, read in zip((f"c_{p}", f"d_{p}"), reads, strict=True))
        return text_model(
            f"{p} = Exp(x) {q} = Neg(x) out = If (flag) "
            f"<then_branch = g1 () => ({SHAPE} b) {{ {inner} b = Add({p}, W) }}, "
            f"else_branch = g2 () => ({SHAPE} b) {{ b = Sub({q}, V) }}>",
            inputs=f"bool flag, {SHAPE} x",
            outputs=f"{SHAPE} out",
            constants=WEIGHTS,
        )

    assert texts(of(make("p", "q", "p", "q"), make("s", "t", "t", "s"))) == set()


def test_an_input_of_a_body_hides_the_weight_of_its_name() -> None:
    ours, theirs = loop(), loop()
    reads(ours, "three", 1, "W")
    reads(theirs, "three", 1, "W")
    body(theirs, "body").input[3].name = "W"
    reads(theirs, "four", 0, "W")
    assert texts(of(ours, theirs)) == {"Sub n_three: input 1"}


CLIPS = {"k": numpy_helper.from_array(np.asarray([1]), "k"), "top": np.asarray(6.0)}


def test_names_of_bodies_and_of_what_they_read_are_free() -> None:
    """The places of inputs and outputs tell them apart in a body, and captured tensors go by what makes them."""
    for make in (branches, loop):
        theirs = make()
        kept = {value.name for value in (*theirs.graph.input, *theirs.graph.output)}

        def other(name: str, kept: set[str] = kept) -> str:
            return name if name in kept or not name else f"t_{name}"

        for graph in graphs(theirs.graph):
            for value in (*graph.input, *graph.output, *graph.initializer):
                value.name = other(value.name)
            for node in graph.node:
                node.input[:], node.output[:] = ([other(name) for name in names] for names in (node.input, node.output))
        found = of(make(), theirs)
        assert texts(found) == set()
        assert found.same


@pytest.mark.parametrize("make", [two_outputs, branches])
def test_the_order_of_nodes_is_free(make: Make) -> None:
    theirs = make()
    latest_first(theirs)
    assert theirs != make()
    assert of(make(), theirs).same


def test_default_domain_under_its_other_name() -> None:
    """A default is one of the operator's version: until opset 13 Softmax had axis 1, and now it has -1."""
    ours, theirs = (named(f"out = Softmax{axis}(x)") for axis in ("", "<axis = 1>"))
    for model in (ours, theirs):
        model.graph.node[0].domain = "ai.onnx"
    assert texts(of(ours, theirs)) == {"Softmax n_out: attribute axis"}


@pytest.mark.parametrize(
    ("attribute", "values", "changes"),
    [
        ("value", ("float {1}", "float {2}"), set()),  # a weight: it is the tensor that differs
        ("value_float", ("1.0", "2.0"), {"Constant n_k: attribute value_float"}),
        ("value_floats", ("[1.0]", "[2.0]"), {"Constant n_k: attribute value_floats"}),
        ("value_float", ("1.0", "1.0"), set()),
    ],
)
def test_constant_nodes(attribute: str, values: tuple[str, str], changes: set[str]) -> None:
    """A tensor counts as a weight, a number as an attribute."""
    ours, theirs = (named(f"k = Constant<{attribute} = {value}>() out = Add(x, k)") for value in values)
    found = of(ours, theirs)
    assert texts(found) == changes
    assert [change.name for change in found.tensors] == (["k"] if attribute == "value" else [])
    assert found.same is (values[0] == values[1])
    assert found.operators["Constant"] == (1, 1)


def sparse(name: str, values: list[float], indices: list[int], size: int) -> onnx.SparseTensorProto:
    return helper.make_sparse_tensor(
        numpy_helper.from_array(np.asarray(values, np.float32), name),
        numpy_helper.from_array(np.asarray(indices)),
        [size],
    )


@pytest.mark.parametrize(
    "other",
    [sparse("S", [1.0], [2], 4), sparse("S", [2.0], [1], 4), sparse("S", [1.0], [1], 8)],
    ids=["indices", "values", "dims"],
)
def test_sparse_weights(other: onnx.SparseTensorProto) -> None:
    models = [named("out = Identity(S)", inputs="float[4] x", outputs="float[4] out") for _ in range(2)]
    for model, tensor in zip(models, (sparse("S", [1.0], [1], 4), other), strict=True):
        model.graph.sparse_initializer.append(tensor)
    assert of(models[0], models[0]).same
    found = of(*models)
    assert not found.same
    assert {change.what for change in found.fields} == {"sparse weight"}


@pytest.mark.parametrize("where", ["attribute", "function"])
def test_attributes_with_their_values_in_another_file(where: str, tmp_path: Path) -> None:
    paths = []
    for name, value in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "data").write_bytes(np.asarray([value], np.float32).tobytes())
        tensor = TensorProto(name="v", data_type=TensorProto.FLOAT, dims=[1], data_location=TensorProto.EXTERNAL)
        tensor.external_data.add(key="location", value="data")
        node = helper.make_node("ConstantOfShape", ["x"], ["out"], "n_out", value=tensor)
        given = helper.make_tensor_value_info("x", TensorProto.INT64, [1])
        out = helper.make_tensor_value_info("out", TensorProto.FLOAT, None)
        opset = [helper.make_opsetid("", 17), helper.make_opsetid("d", 1)]
        functions = [helper.make_function("d", "f", ["x"], ["out"], [node], opset[:1])] if where == "function" else []
        nodes = [helper.make_node("f", ["x"], ["out"], "n_out", domain="d")] if functions else [node]
        graph = helper.make_graph(nodes, "g", [given], [out])
        paths.append(folder / "model.onnx")
        onnx.save(helper.make_model(graph, opset_imports=opset, functions=functions, ir_version=8), paths[-1])
    models = [load_model(path) for path in paths]
    assert difference(models[0], models[1]).same
    assert texts(difference(models[0], models[2])) == {
        "ConstantOfShape n_out: attribute value" if where == "attribute" else "function d::f: 1 nodes, 1 nodes"
    }
