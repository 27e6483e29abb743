"""What differs between two files: weights bit for bit, and what models declare."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from rewriter.compare import Change, GraphDifference, difference, renamed, signature_differences
from rewriter.errors import ModelError, UsageError
from rewriter.files.load import LoadedModel, load_model
from tests.changes import Change as Edit
from tests.changes import add_weight, body, graphs, set_nodes, swap, weight
from tests.textmodels import SILU, mlp, text_model

SHAPE = "float[batch, tokens, 4]"
WEIGHTS = {"W": np.asarray([1, 2, 3, 4.0]), "V": np.asarray([4, 3, 2, 1.0])}


def named(*given: Any, **options: Any) -> onnx.ModelProto:
    """A text model in which every node has a name, which identifies it independently of its outputs' names."""
    model = text_model(*given, **options)
    for graph in graphs(model.graph):
        for node in graph.node:
            node.name = f"n_{node.output[0]}"
    return model


def two_outputs() -> onnx.ModelProto:
    return named(
        "out = Add(x, W) other = Sub(x, z)",
        inputs=f"{SHAPE} x, {SHAPE} z",
        outputs=f"{SHAPE} out, {SHAPE} other",
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


def of(a: onnx.ModelProto, b: onnx.ModelProto) -> GraphDifference:
    return difference(load_model(a), load_model(b))


STATED: dict[str, tuple[Edit, str]] = {
    "order of outputs": (lambda m: swap(m.graph.output, 0, 1), "order outputs: out, other in A, other, out in B"),
    "order of inputs": (lambda m: swap(m.graph.input, 0, 1), "order inputs: x, z in A, z, x in B"),
    "a default": (
        lambda m: add_weight(m, "z", numpy_helper.to_array(weight(m, "W"))),  # which equals a weight of both models
        "input z: float32[batch, tokens, 4] in A, float32[batch, tokens, 4] with a default in B"),
}  # fmt: skip


@pytest.mark.parametrize("what", STATED)
def test_what_a_model_declares(what: str) -> None:
    ours, theirs = two_outputs(), two_outputs()
    assert of(ours, theirs).same
    change, expected = STATED[what]
    change(theirs)
    found = of(ours, theirs)
    assert (found.same, [each.text for each in found.fields]) == (False, [expected])


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
    assert {change.text.rpartition(" is ")[2] for change in found.tensors} == (
        set() if inside == 1.0 else {"only in A", "only in B"}
    )


@pytest.mark.parametrize(
    ("attribute", "values"),
    [
        ("value", ("float {1}", "float {2}")),
        ("value_float", ("1.0", "2.0")),
        ("value_floats", ("[1.0]", "[2.0]")),
        ("value_float", ("1.0", "1.0")),
    ],
)
def test_constant_nodes(attribute: str, values: tuple[str, str]) -> None:
    """However the value is stated, it is a weight."""
    ours, theirs = (named(f"k = Constant<{attribute} = {value}>() out = Add(x, k)") for value in values)
    found = of(ours, theirs)
    assert [change.name for change in found.tensors] == (["k"] if values[0] != values[1] else [])
    assert (found.same, found.operators["Constant"]) == (values[0] == values[1], (1, 1))


def sparse(value: float, index: int, size: int) -> onnx.SparseTensorProto:
    values = numpy_helper.from_array(np.full(1, value, np.float32), "S")
    return helper.make_sparse_tensor(values, numpy_helper.from_array(np.asarray([index])), [size])


@pytest.mark.parametrize("other", [(1.0, 2, 4), (2.0, 1, 4), (1.0, 1, 8)])
def test_sparse_weights(other: tuple[float, int, int]) -> None:
    models = [named("out = Identity(S)", inputs="float[4] x", outputs="float[4] out") for _ in range(2)]
    for model, tensor in zip(models, (sparse(1.0, 1, 4), sparse(*other)), strict=True):
        model.graph.sparse_initializer.append(tensor)
    assert of(models[0], models[0]).same
    found = of(*models)
    assert (found.same, [change.name for change in found.tensors]) == (False, ["S"])


def test_a_model_and_itself() -> None:
    model = mlp(SILU)
    found = of(model, model)
    assert (found.same, found.same_tensors) == (True, 4)
    assert found.operators == {"Add": (2, 2), "MatMul": (2, 2), "Mul": (1, 1), "Sigmoid": (1, 1)}


# -- weights ----------------------------------------------------------------------------------------------------------


def test_merged_and_constant_weights_are_the_same_weights() -> None:
    """What optimisers do: equal weights become one, Constant nodes become initializers."""
    ours, theirs = (
        text_model("a = Add(x, b2) out = Add(a, twin)", constants={"twin": np.asarray([1, 2, 3, 4.0])}) for _ in "ab"
    )
    tensor = theirs.graph.initializer.pop(0)
    node = helper.make_node("Constant", [], [tensor.name], "made", value=tensor)
    theirs.graph.node.insert(0, node)
    found = of(ours, theirs)
    assert (found.same, found.operators["Constant"]) == (True, (0, 1))


INF, NAN = float("inf"), float("nan")


def holding(tensor: onnx.TensorProto, base: Path | None = None) -> LoadedModel:
    return LoadedModel(onnx.ModelProto(graph=onnx.GraphProto(initializer=[tensor])), None, base, (), 0)


def changed(a: onnx.TensorProto, b: onnx.TensorProto) -> Change | None:
    found = difference(holding(a), holding(b)).tensors
    return found[0] if found else None


def inline(values: Any, dtype: Any = np.float32) -> onnx.TensorProto:
    return numpy_helper.from_array(np.asarray(values, dtype), "w")


@pytest.mark.parametrize(
    ("dtype", "a", "b", "how"),
    [
        ("f4", [1.0, 2.0, 3.0], [1.0, 2.5, 3.0], "1 element, by up to 0.5 at [1]"),
        ("f4", [[1.0, 2.0], [3.0, 4.0]], [[1.0, 2.0], [7.0, 6.0]], "2 elements, by up to 4 at [1, 0]"),
        ("f4", [1.0, 0.0], [1.0, -0.0], "1 element, by up to 0 at [1]"),  # bits differ, values do not
        ("f4", [1.0, 2.0, 3.0], [9.0, NAN, 3.0], "2 elements, by up to inf at [1]"),  # a NaN in one of them
        ("f4", [1.0, INF], [1.0, -INF], "1 element, by up to inf at [1]"),
        ("f4", [1.0, NAN], [1.0, NAN], None),  # the same NaN
        ("f4", 3.0, 4.0, "1 element, by up to 1"),
        # Differences are those of numbers, neither wrapped around nor rounded to the element type.
        ("i1", [-128], [127], "1 element, by up to 255 at [0]"),
        ("u1", [0, 200], [255, 200], "1 element, by up to 255 at [0]"),
        ("i8", [5], [2**40], "1 element, by up to 1.1e+12 at [0]"),
        ("?", [True], [False], "1 element, by up to 1 at [0]"),
        ("f2", [1.0], [1.5], "1 element, by up to 0.5 at [0]"),
        # No real numbers.
        (object, ("a", "bc"), ("ab", "c"), "values"),
        ("c8", [1], [2], "values"),
    ],
)
def test_how_weights_differ(dtype: Any, a: Any, b: Any, how: str | None) -> None:
    found = changed(*(inline(each, dtype) for each in (a, b)))
    assert (found.how if found is not None else None) == how


def test_weights_of_other_types_or_dims() -> None:
    zeros = inline(np.zeros((2, 3)))
    for other, kind in ((inline(np.zeros((3, 2))), "float32[3, 2]"), (inline(np.zeros((2, 3)), "i4"), "int32[2, 3]")):
        found = changed(zeros, other)
        assert found == Change("weight", "w", "float32[2, 3]", kind)
        assert found.text == f"weight w: float32[2, 3] in A, {kind} in B"
    packed = [helper.make_tensor("w", TensorProto.INT4, [3], values) for values in ([1, 2, 3], [1, 2, 4])]
    assert changed(*packed) == Change("weight", "w", "int4[3]", "int4[3]", "1 element, by up to 1 at [2]")


def external(path: Path, values: Any, offset: int = 0) -> tuple[onnx.TensorProto, Path]:
    array = np.asarray(values, np.float32)
    path.write_bytes(b"\x07" * offset + array.tobytes())
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=array.shape, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", path.name), ("offset", str(offset)), ("length", str(array.nbytes))):
        tensor.external_data.add(key=key, value=value)
    return tensor, path.parent


def test_data_may_lie_elsewhere(tmp_path: Path) -> None:
    values = np.arange(10.0)
    moved = values + np.array([0, 0.5, 0, 0, 0, -3, 0, 0, 0, 1.0])
    one, same = (holding(*external(tmp_path / name, values, offset)) for name, offset in (("a", 8), ("b", 0)))
    assert difference(one, same).same
    (found,) = difference(one, holding(inline(moved))).tensors
    assert found == Change("weight", "w", "float32[10]", "float32[10]", "3 elements, by up to 3 at [5]")
    (tmp_path / "b").write_bytes(b"short")
    with pytest.raises(ModelError, match="the data file is incomplete"):
        difference(one, same)


def test_what_follows_a_weight_does_not_count(tmp_path: Path) -> None:
    sides = [external(tmp_path / name, [1.0, 2.0, last]) for name, last in (("a", 3.0), ("b", 9.0))]
    for tensor, _ in sides:
        tensor.dims[0] = 2
        tensor.external_data[2].value = "8"
    one, other = (holding(*each) for each in sides)
    assert difference(one, other).same


# -- what models declare -----------------------------------------------------------------------------------------------

FUNCTION = '<opset_import: ["": 17], domain: "d"> f (a) => (b) { c = Neg(a) b = e.Inner(c) }'


def calling() -> onnx.ModelProto:
    return text_model("h = d.f(x) out = Abs(h)", domains={"d": 1}, functions=FUNCTION)


def opset(domain: str, version: int) -> Edit:
    def change(model: onnx.ModelProto) -> None:
        kept = [entry for entry in model.opset_import if entry.domain != domain]
        set_nodes(model.opset_import, [*kept, helper.make_opsetid(domain, version)])

    return change


def entries(found: Iterable[Change]) -> list[str]:
    return [f"{each.what} {each.name}: {each.a}, {each.b}" for each in found]


@pytest.mark.parametrize(
    ("change", "expected", "said"),
    [
        (str, [], []),  # no change
        (opset("", 18), ["opset ai.onnx: 17, 18"], []),
        (opset("d", 2), ["opset d: 1, 2"], []),
        (opset("e", 5), ["opset e: None, 5"], []),  # only a function uses it
        (opset("unused", 5), [], ["unused opset unused: None, 5"]),
        (lambda m: setattr(m, "ir_version", 9), [], ["model IR version: 8, 9"]),
        (lambda m: setattr(m, "producer_name", "p"), [], ["model producer: None, p"]),
        (lambda m: setattr(m.graph, "name", "h"), [], ["model graph: g, h"]),
        (lambda m: m.metadata_props.add(key="k", value="v"), [], ["metadata k: None, v"]),
    ],
)
def test_models(change: Edit, expected: list[str], said: list[str]) -> None:
    theirs = calling()
    change(theirs)
    a, b = (LoadedModel(each, None, None, (), 0) for each in (calling(), theirs))
    found = difference(a, b)
    assert (entries(found.fields), entries(found.remarks)) == (expected, said)
    assert len(difference(b, a).fields) == len(expected)


def value(name: str, dims: list[str | int | None] | None, elem: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, elem, dims)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (value("v", [2, "n", None, 0]), "float32[2, n, ?, 0]"),
        (value("v", []), "float32[]"),
        (value("v", None), "float32"),
        (value("v", None, TensorProto.INT64), "int64"),
        (value("v", [1], 999), "999[1]"),
        (helper.make_tensor_sequence_value_info("v", TensorProto.FLOAT, None), "sequence"),
        (helper.make_value_info("v", helper.make_optional_type_proto(value("e", None).type)), "optional"),
        (onnx.ValueInfoProto(name="v"), "of unknown type"),
    ],
)
def test_types(given: onnx.ValueInfoProto, text: str) -> None:
    ours, theirs = (
        LoadedModel(onnx.ModelProto(graph=graph), None, None, (), 0)
        for graph in (onnx.GraphProto(output=[given], input=[given]), onnx.GraphProto())
    )
    found = {(each.what, each.name): (each.a, each.b) for each in difference(ours, theirs).fields}
    assert found["input", "v"] == found["output", "v"] == (text, None)
    assert difference(ours, ours).same


# -- what must agree before both are run -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "differences"),
    [
        ({}, ()),
        ({"inputs": "float[b, 7, 4] x"}, ()),
        ({"outputs": "float[b, 7, 4] out"}, ()),
        (
            {"inputs": "float16[batch, tokens, 4] x"},
            ("input 'x': float32[batch, tokens, 4] in A, float16[batch, tokens, 4] in B",),
        ),
        ({"inputs": "float[batch, 4] x"}, ("input 'x': float32[batch, tokens, 4] in A, float32[batch, 4] in B",)),
        (
            {"outputs": "float[batch, tokens, 5] out"},
            ("output 'out': float32[batch, tokens, 4] in A, float32[batch, tokens, 5] in B",),
        ),
        ({"inputs": "float[batch, tokens, 4] x, float[4] z"}, ("input 'z' is only in B",)),
    ],
)
def test_signatures(other: dict[str, str], differences: tuple[str, ...]) -> None:
    given: dict[str, Any] = other
    a, b = text_model("out = Relu(x)"), text_model("out = Relu(x)", **given)
    assert signature_differences(a, b) == differences


def test_other_names() -> None:
    """The default is what no name stands in for; only inputs and outputs of A are renamed."""
    a, b = (
        load_model(text_model(f"{y} = Relu({x})", inputs=f"{SHAPE} {x}", outputs=f"{SHAPE} {y}"))
        for x, y in ("xy", "pq")
    )
    same, half = (renamed(a, b, names) for names in ({"x": "p", "y": "q"}, {"x": "p"}))
    assert signature_differences(a.proto, same.proto) == ()
    assert difference(a, same).fields == ()
    assert signature_differences(a.proto, half.proto) == ("output 'y' is only in A", "output 'q' is only in B")
    for wrong in ({"z": "p"}, {"x": "p", "y": "p"}, {"x": "y"}):
        with pytest.raises(UsageError, match="--map: "):
            renamed(a, b, wrong)


def test_an_initializer_that_is_an_input_too_is_none() -> None:
    """IR version 3 lists all of them as inputs."""
    a = text_model("out = Add(x, b2)")
    b = text_model("out = Add(x, b2)", inputs="float[batch, tokens, 4] x, float[4] b2")
    assert signature_differences(a, b) == signature_differences(b, a) == ()
