"""The index of a graph: what the bodies of control flow read from around them."""

import onnx

from rewriter.graph.constants import Constants
from rewriter.graph.types import TensorType
from rewriter.graph.view import all_views, graph_at, holder_name
from rewriter.graph.walk import all_graphs, reads, subgraphs
from tests.textmodels import text_model


def test_a_name_that_one_branch_defines_is_captured_by_the_other() -> None:
    """An initializer of a body may have the name of an outer tensor; the other body still reads that tensor."""
    model = text_model(
        "t = Neg(x) out = If (c) <then_branch = a () => (float[4] p) <float[4] t = {1, 2, 3, 4}> { p = Abs(t) }, "
        "else_branch = b () => (float[4] q) { q = Abs(t) }>",
        inputs="float[4] x, bool c",
    )
    assert reads(model.graph.node[1]) == ["c", "t"]


def test_integers_are_folded_exactly() -> None:
    large = 2**63 - 1
    model = text_model(f"c = Constant<value_int = {large}>() i = Identity(c) n = Neg(c) out = Identity(x)")
    constants = Constants(all_views(model)[0])
    assert [int(value) for name in ("i", "n") if (value := constants.value(name)) is not None] == [large, -large]


FLOAT, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
NESTED = """
<ir_version: 8, opset_import: ["ai.onnx": 17, "custom": 3]>
g (float[2] x, bool c) => (float[2] out) <float[2] w = {1, 2}> {
  k = Constant<value = float[2] {5, 6}>()
  n = Constant<value_int = 3>()
  z = ConstantOfShape<value = float[1] {7}>(n)
  out = If (c) <
    then_branch = a () => (float[2] p) <float[2] w = {3, 4}> {
      p = If (c) <
        then_branch = b () => (float[2] q) { q = Add(w, k) }, else_branch = d () => (float[2] r) { r = Neg(x) }
      >
    },
    else_branch = e () => (float[2] s) { t = Exp(x) s = Mul(t, w) }
  >
}
"""


def test_an_index() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17, "custom": 2]> g (float[2] x, float[2] w) => (float[2] out) '
        "<float[2] w = {1, 2}, float[2] v = {1, 2}> { a = Add(x, x) b, , e = custom.Two(a, , v) out = Mul(b, w) }"
    )
    view = all_views(model)[0]
    assert (view.where, view.path) == ("", ())
    assert [node.op_type for node in view.nodes] == ["Add", "Two", "Mul"]
    assert view.producer == {"a": 0, "b": 1, "e": 1, "out": 2}
    assert view.consumers == {"x": (0, 0), "a": (1,), "v": (1,), "b": (2,), "w": (2,)}
    assert set(view.initializers) == {"w", "v"}
    assert view.overridable == {"w"}
    assert (view.inputs, view.outputs) == (("x",), ("out",))
    assert view.opsets == {"": 17, "custom": 2}
    assert view.made_by("b") is view.nodes[1]
    assert view.made_by("a") is view.nodes[0]
    assert view.made_by("x") is view.made_by("w") is None
    assert view.type_of("a") == TensorType(FLOAT, (2,))
    assert view.type_of("b") == TensorType()
    assert [view.is_onnx(node) for node in view.nodes] == [True, False, True]


def test_initializers_of_old_files_are_not_overridable() -> None:
    (view,) = all_views(text_model("out = Mul(x, w)", inputs="float[2] x, float[2] w", constants={"w": [1, 2]}, ir=3))
    assert (view.overridable, view.inputs) == (frozenset(), ("x",))


def test_a_body_hides_names_around_it() -> None:
    """What it defines has neither the types nor the values of a tensor of that name in the graph around it."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17, "custom": 1]>
        g (float[n, 2] x, bool c) => (float[n, 2] out, int64[2] h, int64[2] u)
        <float[2] w = {1, 2}, float[1] v = {5}> {
          out = If (c) <
            then_branch = a () => (float[n, 2] p) <float[2] w = {3, 4}>
            { h = Add(x, w) k = Mul(h, h) u = custom.Of(k) p = Add(k, v) },
            else_branch = d () => (float[n, 2] q) { h = Mul(x, w) q = Add(h, h) }
          >
          h = Shape(out) u = Shape(out)
        }"""
    )
    main, then, other = all_views(model)
    assert set(main.consumers) == {"c", "x", "w", "v", "out"}
    assert main.consumers["w"] == main.consumers["x"] == (0,)
    assert main.type_of("h") == TensorType(INT64, (2,))
    assert then.type_of("u") == TensorType()
    assert then.type_of("h") == then.type_of("k") == other.type_of("h") == TensorType(FLOAT, ("n", 2))
    assert [onnx.numpy_helper.to_array(view.initializers["w"]).tolist() for view in (then, other)] == [[3, 4], [1, 2]]
    assert set(then.initializers) == set(other.initializers) == {"w", "v"}
    assert reads(main.nodes[0]) == ["c", "v", "w", "x"]


def test_views_of_bodies() -> None:
    model = onnx.parser.parse_model(NESTED)
    main, outer, other, inner, last = all_views(model)
    assert [view.where for view in (main, outer, other, inner, last)] == [
        "",
        "If/then_branch",
        "If/else_branch",
        "If/then_branch/If/then_branch",
        "If/then_branch/If/else_branch",
    ]
    path = (("out", "then_branch"), ("p", "then_branch"))
    assert inner.path == path
    assert [node.output[0] for node in inner.nodes] == ["q"]
    assert all(view.opsets == {"": 17, "custom": 3} for view in (main, outer, other, inner, last))
    assert set(inner.initializers) == {"w", "k", "n"}, "Constant nodes of either kind, and nothing that is computed"
    assert onnx.numpy_helper.to_array(inner.initializers["w"]).tolist() == [3, 4]
    assert onnx.numpy_helper.to_array(other.initializers["w"]).tolist() == [1, 2]
    assert onnx.numpy_helper.to_array(inner.initializers["k"]).tolist() == [5, 6]
    assert "k" not in main.initializers
    assert inner.type_of("x") == other.type_of("t") == TensorType(FLOAT, (2,))
    assert (inner.inputs, inner.outputs) == ((), ("q",))
    assert graph_at(model, path).name == "b"
    assert graph_at(model, path[:1]).name == "a"
    assert graph_at(model, ()) is model.graph
    assert {graph.name for graph in all_graphs(model.graph)} == {"g", "a", "b", "d", "e"}
    assert main.consumers["x"] == main.consumers["w"] == (3,), "a capture counts once"


def test_lists_of_graphs() -> None:
    graphs = [onnx.GraphProto(name=name) for name in "ab"]
    node = onnx.helper.make_node("Custom", ["x"], ["", "y"], one=onnx.GraphProto(name="c"), many=graphs, number=1)
    assert [(name, graph.name) for name, graph in subgraphs(node)] == [("many[0]", "a"), ("many[1]", "b"), ("one", "c")]
    assert holder_name(node) == "y"
    assert holder_name(onnx.helper.make_node("Custom", [], [""])) == ""


def test_captures_of_sparse_weights_and_of_outputs() -> None:
    """A body may return an outer tensor unchanged; its own sparse weight does not come from outside."""
    body = onnx.GraphProto(name="b")
    for name in ("outer", "sparse"):
        body.output.append(onnx.ValueInfoProto(name=name))
    body.sparse_initializer.add().values.name = "sparse"
    node = onnx.helper.make_node("If", ["c"], ["y"], then_branch=body, else_branch=onnx.GraphProto(name="e"))
    assert reads(node) == ["c", "outer"]
