"""Fragments of new nodes: names, constants, bodies of functions."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from rewriter.graph.surgeon import Fragment
from rewriter.graph.view import attributes


def test_nodes_in_order() -> None:
    fragment = Fragment("p")
    x = fragment.tensor("x")
    assert fragment.tensor("x") is x, "one tensor for each name"
    h = fragment.node("Neg", [x], "h")
    k = fragment.constant("k", np.array([1, 2], np.float32))
    fragment.node("Scale", [h, k], "y", output="out", domain="custom", factor=2.5, axes=[1, 2])
    first, second = fragment.nodes({"made": "by", "of": "it"})
    assert (first.name, list(first.input), list(first.output), first.domain) == ("p/h", ["x"], ["p/h"], "")
    assert (second.op_type, second.name, second.domain) == ("Scale", "p/y", "custom")
    assert (list(second.input), list(second.output)) == (["p/h", "p/k"], ["out"])
    assert attributes(second) == {"factor": 2.5, "axes": [1, 2]}
    for node in (first, second):
        assert [(entry.key, entry.value) for entry in node.metadata_props] == [("made", "by"), ("of", "it")]
    assert [tensor.name for tensor in fragment.initializers()] == ["p/k"]


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
