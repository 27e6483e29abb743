"""Cutting a part out of a graph: its nodes, its interface, and the model that it becomes."""

import math

import onnx
import pytest

from rewriter.graph.edit import Cut, between, bytes_of, extract, split, with_outputs
from rewriter.graph.view import GraphView, all_views
from rewriter.graph.walk import reads
from tests.committed import FOLDER as MODELS
from tests.textmodels import text_model

FLOAT = onnx.TensorProto.FLOAT

TEXT = """
<ir_version: 9, opset_import: ["": 17, "custom": 2]>
g (float[n, 4] x, float[n, 4] other) => (float[n, 4] out)
<float[4, 4] W = {1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1}, float[4] b = {1, 2, 3, 4}, float[4] c = {5, 6, 7, 8}>
{
  before = Neg(x)
  turned = Transpose(W)
  side = Abs(other)
  spare = Exp(c)
  h = MatMul(before, turned)
  y = Add(h, b)
  odd = custom.Unheard(other)
  z = Mul(y, side)
  r = Sin(y)
  out = Add(z, odd)
}
"""
BEFORE, TURNED, SIDE, SPARE, H, Y, ODD, Z, R, OUT = range(10)


def model() -> onnx.ModelProto:
    return onnx.parser.parse_model(TEXT)


def view() -> GraphView:
    return all_views(model())[0]


@pytest.mark.parametrize(
    ("inputs", "outputs", "expected"),
    [
        (["x"], ["y"], [BEFORE, TURNED, H, Y]),
        (["before"], ["y"], [TURNED, H, Y]),
        (["before"], ["z"], [TURNED, H, Y, Z]),
        (["h"], ["z", "r"], [Y, Z, R]),
        (["y"], ["out"], [Z, OUT]),
        (["y", "other"], ["out"], [SIDE, ODD, Z, OUT]),
        (["y"], ["y"], []),
    ],
)
def test_between(inputs: list[str], outputs: list[str], expected: list[int]) -> None:
    """Constants belong to the part that needs them; nodes that depend on no input do not."""
    assert between(view(), inputs, outputs) == expected


def test_constants_that_only_another_part_needs_are_left_out() -> None:
    body = "k = Exp(c) side = Mul(other, k) h = Neg(x) out = Add(h, side)"
    model = text_model(body, inputs="float[4] x, float[4] other", constants={"c": [5, 6, 7, 8]})
    assert between(all_views(model)[0], ["x"], ["out"]) == [2, 3]


@pytest.mark.parametrize(
    ("stops", "outputs", "expected"),
    [
        ([], ["y"], Cut(("x",), ("y",), (BEFORE, TURNED, H, Y))),
        (["h"], ["y"], Cut(("h",), ("y",), (Y,))),
        (["y"], ["y"], Cut(("x",), ("y",), (BEFORE, TURNED, H, Y))),
        (["y"], ["z", "y"], Cut(("x", "other"), ("y", "z"), (BEFORE, TURNED, SIDE, H, Y, Z))),
        (["y"], ["z"], Cut(("other", "y"), ("z",), (SIDE, Z))),
        (["turned"], ["h"], Cut(("x", "turned"), ("h",), (BEFORE, H))),
    ],
)
def test_one_part(stops: list[str], outputs: list[str], expected: Cut) -> None:
    assert split(view(), outputs, math.inf, frozenset(stops)) == (expected,)


LOOP = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[n] x, float[n] scale) => (float[n] out) {
  trips = Constant<value = int64 {3}>()
  always = Constant<value = bool {1}>()
  twice = Add(scale, scale)
  out = Loop(trips, always, x) <body = step (int64 i, bool going, float[n] state) => (bool on, float[n] next) {
    on = Identity(going)
    inner = Mul(state, twice)
    next = Add(inner, x)
  }>
}
"""


def test_what_a_body_captures_is_in_the_part() -> None:
    graph = all_views(onnx.parser.parse_model(LOOP))[0]
    assert split(graph, ["out"], math.inf) == (Cut(("scale", "x"), ("out",), (0, 1, 2, 3)),)
    assert split(graph, ["out"], math.inf, frozenset({"twice"})) == (Cut(("x", "twice"), ("out",), (0, 1, 3)),)
    assert reads(graph.nodes[3]) == ["trips", "always", "x", "twice", "x"]


def test_a_part_as_a_model() -> None:
    whole = model()
    called = '<opset_import: ["": 17], domain: "custom"> f (p) => (q) { q = Neg(p) }'
    whole.functions.append(onnx.parser.parse_function(called))
    graph = all_views(whole)[0]
    part = extract(whole, graph, Cut(("h", "odd", "not-read"), ("y", "b"), (Y,)))
    assert part.ir_version == 9
    assert [(entry.domain, entry.version) for entry in part.opset_import] == [("", 17), ("custom", 2)]
    assert list(part.functions) == list(whole.functions)
    assert part.graph.name == "part"
    assert list(part.graph.node) == [whole.graph.node[Y]]
    assert [tensor.name for tensor in part.graph.initializer] == ["b"]
    assert [declared(value) for value in part.graph.input] == [("h", FLOAT, False)]
    assert [declared(value) for value in part.graph.output] == [("y", FLOAT, False), ("b", FLOAT, False)]


def test_inputs_of_unknown_type() -> None:
    whole = text_model("odd = custom.Unheard(x) out = custom.Two(odd, x)", domains={"custom": 2}, elem="double")
    whole.graph.output[0].type.tensor_type.elem_type = 0
    part = extract(whole, all_views(whole)[0], Cut(("odd", "x"), ("out",), (1,)))
    assert [declared(value) for value in part.graph.input] == [("odd", 0, False), ("x", onnx.TensorProto.DOUBLE, False)]
    assert not part.graph.input[0].HasField("type")
    assert [declared(value) for value in part.graph.output] == [("out", 0, False)]


def test_further_outputs() -> None:
    whole = model()
    more = with_outputs(whole, all_views(whole)[0], ["y", "out", "turned", "y", "odd"])
    assert [declared(value) for value in more.graph.output] == [
        ("out", FLOAT, True),
        ("y", FLOAT, False),
        ("turned", FLOAT, False),
        ("odd", 0, False),
    ]
    assert [value.name for value in whole.graph.output] == ["out"]
    assert with_outputs(whole, all_views(whole)[0], ["out", "x"]) is whole
    del more.graph.output[1:]
    assert more == whole


def declared(value: onnx.ValueInfoProto) -> tuple[str, int, bool]:
    """Name, element type, and whether a shape is declared."""
    return value.name, value.type.tensor_type.elem_type, value.type.tensor_type.HasField("shape")


CHAIN = """<ir_version: 8, opset_import: ["": 17]>
g (float[n, 4] x) => (float[n, 4] out, float[4, 4] turned)
<float[4, 4] W = {1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1},
 float[4, 4] V = {1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7}>
{
  turned = Transpose(V)
  a = MatMul(x, W)
  b = Relu(a)
  c = MatMul(b, turned)
  d = MatMul(c, W)
  unused = Neg(d)
  out = Add(d, a)
}"""
SIZE = 64


def chain() -> GraphView:
    return all_views(onnx.parser.parse_model(CHAIN))[0]


@pytest.mark.parametrize(
    ("limit", "wanted", "expected"),
    [
        # A constant that is an output is made in the first part, and again wherever it is read.
        (10**6, ["out", "turned"], [["Transpose", "MatMul", "Relu", "MatMul", "MatMul", "Add"]]),
        (SIZE, ["out", "turned"], [["Transpose", "MatMul", "Relu"], ["Transpose", "MatMul"], ["MatMul", "Add"]]),
        (1, ["out", "turned"], [["Transpose", "MatMul"], ["Relu"], ["Transpose", "MatMul"], ["MatMul"], ["Add"]]),
        (SIZE, ["b"], [["MatMul", "Relu"]]),  # what nothing wanted needs is in no part
    ],
)
def test_parts(limit: int, wanted: list[str], expected: list[list[str]]) -> None:
    graph = chain()
    assert [[graph.nodes[index].op_type for index in part.nodes] for part in split(graph, wanted, limit)] == expected


def test_what_crosses() -> None:
    first, second, third = split(chain(), ("out", "turned", "b"), SIZE)
    assert (first.inputs, set(first.outputs)) == (("x",), {"a", "b", "turned"})
    assert (second.inputs, second.outputs) == (("b",), ("c",))
    assert (set(third.inputs), third.outputs) == ({"c", "a"}, ("out",))


@pytest.mark.parametrize("file", sorted(path.name for path in MODELS.glob("*.onnx")))
@pytest.mark.parametrize("limit", [2000, 20_000, 10**9])
def test_parts_are_bounded_ordered_and_complete(file: str, limit: int) -> None:
    graph = all_views(onnx.load(MODELS / file))[0]
    parts = split(graph, graph.outputs, limit)
    known = set(graph.inputs)
    for part in parts:
        assert set(part.inputs) <= known
        known.update(part.outputs)
        used = {name for index in part.nodes for name in graph.nodes[index].input if name in graph.initializers}
        large = [name for name in used if bytes_of(graph.initializers[name]) > limit]
        assert sum(bytes_of(graph.initializers[name]) for name in used - set(large)) <= limit
        assert len(large) <= 1
    assert set(graph.outputs) <= known
    assert (len(parts) == 1) is (limit == 10**9)
