"""Fragments of new nodes: names, constants, bodies of functions."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from rewriter.graph.surgeon import Fragment


def test_names_are_qualified() -> None:
    assert Fragment("a/b").qualified("c") == "a/b/c"
    assert Fragment("").qualified("c") == "c"
    inner = Fragment("a").within("b")
    assert inner.qualified("c") == "a/b/c"


def test_nodes_in_order() -> None:
    fragment = Fragment("p")
    x = fragment.tensor("x")
    assert fragment.tensor("x") is x, "one tensor for each name"
    h = fragment.node("Neg", [x], "h")
    inner = fragment.within("in")
    k = inner.constant("k", np.array([1, 2], np.float32))
    inner.node("Scale", [h, k], "y", output="out", domain="custom", factor=2.5, axes=[1, 2])
    assert fragment.outline() == [
        ("Neg", ["x"], ["p/h"]),
        ("Scale", ["p/h", "p/in/k"], ["out"]),
    ]
    first, second = fragment.nodes({"made": "by", "of": "it"})
    assert (first.op_type, first.name, list(first.input), list(first.output), first.domain) == (
        "Neg",
        "p/h",
        ["x"],
        ["p/h"],
        "",
    )
    assert (second.op_type, second.name, second.domain) == ("Scale", "p/in/y", "custom")
    assert {entry.name: onnx.helper.get_attribute_value(entry) for entry in second.attribute} == {
        "factor": 2.5,
        "axes": [1, 2],
    }
    for node in (first, second):
        assert [(entry.key, entry.value) for entry in node.metadata_props] == [("made", "by"), ("of", "it")]
    assert [tensor.name for tensor in fragment.initializers()] == ["p/in/k"]


@pytest.mark.parametrize(
    "values",
    [
        np.float32(0.5),
        np.array([[1, 2], [3, 4]], np.float32).T,
        np.array([], np.int64),
        np.array([[1.5]], np.float16),
        np.array([True, False]),
    ],
    ids=["scalar", "transposed", "empty", "half", "truth"],
)
def test_constants_keep_values_shape_and_type(values: np.ndarray) -> None:
    fragment = Fragment("")
    fragment.constant("c", np.asarray(values))
    (tensor,) = fragment.initializers()
    made = onnx.numpy_helper.to_array(tensor)
    np.testing.assert_array_equal(made, values)
    assert (tensor.name, made.shape, made.dtype) == ("c", np.shape(values), values.dtype)


FUNCTION = """
<opset_import: ["": 17], domain: "d"> f (p, c) => (q) {
  h = Clip(p, , c)
  q = If (c) <
    then_branch = t () => (float[2] a) { a = Abs(h) },
    else_branch = e () => (float[2] b) { b = If (c) <
      then_branch = u () => (float[2] v) { v = Neg(p) }, else_branch = w () => (float[2] z) { z = Exp(h) }
    > }
  >
}
"""


@pytest.mark.parametrize(("name", "prefix"), [("call", "top/call"), ("", "top")])
def test_the_body_of_a_function_is_inlined(name: str, prefix: str) -> None:
    """Operands take the caller's names, everything else, also in bodies, a name of its own."""
    function = onnx.parser.parse_function(FUNCTION)
    function.node[1].name = "choice"
    before = function.SerializeToString(deterministic=True)
    fragment = Fragment("top")
    result = fragment.inlined(function, [fragment.tensor("x"), fragment.tensor("flag")], name)
    assert result.name == f"{prefix}/q"
    assert fragment.outline() == [
        ("Clip", ["x", "", "flag"], [f"{prefix}/h"]),
        ("If", ["flag"], [f"{prefix}/q"]),
    ]
    first, second = fragment.nodes({"key": "value"})
    assert (first.name, second.name) == (f"{prefix}/h", f"{prefix}/choice")
    assert [entry.key for node in (first, second) for entry in node.metadata_props] == ["key", "key"]
    then, other = (attribute.g for attribute in second.attribute)
    assert [value.name for value in then.output] == [f"{prefix}/a"]
    assert [(node.op_type, list(node.input), list(node.output)) for node in then.node] == [
        ("Abs", [f"{prefix}/h"], [f"{prefix}/a"])
    ]
    (inner,) = other.node
    assert (list(inner.input), list(inner.output)) == (["flag"], [f"{prefix}/b"])
    assert [list(node.input) for attribute in inner.attribute for node in attribute.g.node] == [["x"], [f"{prefix}/h"]]
    assert function.SerializeToString(deterministic=True) == before


def test_a_fragment_as_a_function() -> None:
    fragment = Fragment("")
    total = fragment.node("Add", [fragment.tensor("p"), fragment.constant("k", np.array([1, 2], np.float32))], "sum")
    fragment.node("Neg", [total], "last", output="q")
    function = fragment.function("d", "f", ["p"], "q", opset=18, doc="what it does")
    assert (function.domain, function.name, function.doc_string) == ("d", "f", "what it does")
    assert (list(function.input), list(function.output)) == (["p"], ["q"])
    assert [(entry.domain, entry.version) for entry in function.opset_import] == [("", 18)]
    assert [(node.op_type, list(node.output)) for node in function.node] == [
        ("Constant", ["k"]),
        ("Add", ["sum"]),
        ("Neg", ["q"]),
    ]
    assert onnx.numpy_helper.to_array(function.node[0].attribute[0].t).tolist() == [1, 2]


def test_attributes_of_a_body_stay_as_they_are() -> None:
    """Only tensors are renamed, also where an attribute holds a list."""
    body = 'h = Transpose<perm = [1, 0]>(p) q = custom.Op<s = "p">(h)'
    function = onnx.parser.parse_function(f'<opset_import: ["": 17], domain: "d"> f (p) => (q) {{ {body} }}')
    fragment = Fragment("top")
    fragment.inlined(function, [fragment.tensor("x")], "call")
    for made, node in zip(fragment.nodes({}), function.node, strict=True):
        assert list(made.attribute) == list(node.attribute)
