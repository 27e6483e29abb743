"""Matching nodes: what each digest depends on, and which key pairs which nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from rewriter.compare.graphs import Graph, aliases, attributes, match, operator, value_of
from rewriter.files.load import LoadedModel, load_model
from tests.textmodels import text_model

EMPTY = LoadedModel(onnx.ModelProto(), None, None, (), 0)


def graph(body: str, names: str = "", **options: Any) -> Graph:
    """The nodes of a text model; `names` are those of its nodes, `-` for none."""
    model = text_model(body, **options)
    for node, name in zip(model.graph.node, names.split() or [""] * len(model.graph.node), strict=True):
        node.name = name.replace("-", "")
    loaded = load_model(model)
    return Graph.of(loaded, loaded.proto.graph)


def pairs(a: Graph, b: Graph) -> tuple[set[tuple[str, str]], list[str], list[str]]:
    """Pairs of first outputs, and those without a partner."""
    found, only_a, only_b = match(a, b)
    ours, theirs = ([node.output[0] for node in side.nodes] for side in (a, b))
    return (
        {(ours[left], theirs[right]) for left, right in found},
        [ours[index] for index in only_a],
        [theirs[index] for index in only_b],
    )


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        # By name and operator, whatever is around them.
        (("p = Abs(x) out = Neg(p)", "one two"), ("q = Abs(x) r = Neg(q) out = Neg(r)", "one - two"),
         ({("p", "q"), ("out", "out")}, [], ["r"])),
        # A name alone is not enough, and one that two nodes have says nothing.
        (("p = Abs(x) out = Neg(p)", "one -"), ("r = Exp(x) s = Sin(r) out = Neg(s)", "one - -"),
         ({("out", "out"), ("p", "r")}, [], ["s"])),
        (("p = Abs(x) q = Abs(p) out = Neg(q)", "one one -"), ("q = Abs(x) p = Abs(q) out = Neg(p)", "one one -"),
         ({("p", "p"), ("q", "q"), ("out", "out")}, [], [])),
        # By the output's name, even if the operator is another.
        (("p = Abs(x) out = Neg(p)", ""), ("p = Exp(x) out = Sin(p)", ""), ({("p", "p"), ("out", "out")}, [], [])),
        # By what is above.
        (("p = Abs(x) q = Neg(p) out = Exp(q)", ""), ("s = Abs(x) t = Neg(s) out = Sin(t)", ""),
         ({("p", "s"), ("q", "t"), ("out", "out")}, [], [])),
        # By what is below: above differs.
        (("a = Sin(x) p = Abs(a) q = Neg(p) out = Exp(q)", ""), ("b = Cos(x) s = Abs(b) t = Neg(s) out = Exp(t)", ""),
         ({("p", "s"), ("q", "t"), ("out", "out"), ("a", "b")}, [], [])),
        # Twins in graph order, if there are equally many.
        (("p = Abs(x) q = Abs(x) out = Add(p, q)", ""), ("s = Abs(x) t = Abs(x) out = Add(s, t)", ""),
         ({("p", "s"), ("q", "t"), ("out", "out")}, [], [])),
        (("p = Abs(x) q = Abs(x) out = Sum(p, q)", ""), ("s = Abs(x) t = Abs(x) u = Abs(x) out = Sum(s, t, u)", ""),
         ({("p", "s"), ("q", "t"), ("out", "out")}, [], ["u"])),
        # By the tensors read.
        (("p = Abs(x) out = Neg(p)", ""), ("q = Exp(x) r = Sin(q) out = Neg(r)", ""),
         ({("p", "q"), ("out", "out")}, [], ["r"])),
    ],
    ids=["name", "other-operator", "twice", "output", "above", "below", "twins", "more-twins", "inputs"],
)  # fmt: skip
def test_pairs(a: tuple[str, str], b: tuple[str, str], expected: Any) -> None:
    assert pairs(graph(*a), graph(*b)) == expected


def test_pairs_far_from_what_names_tell() -> None:
    """Between a changed weight above and a changed operator below."""
    middle = " ".join(f"{{0}}{i + 1} = {name}({{0}}{i})" for i, name in enumerate(["Abs", "Neg", "Exp", "Sin", "Cos"]))
    ours = graph(f"p0 = Mul(x, $2.0) {middle.format('p')} out = Tanh(p5)")
    theirs = graph(f"q0 = Mul(x, $3.0) {middle.format('q')} out = Sigmoid(q5)")
    found, left, right = pairs(ours, theirs)
    assert found == {*((f"p{number}", f"q{number}") for number in range(6)), ("out", "out")}
    assert (left, right) == ([], [])


def bare(nodes: list[onnx.NodeProto], captured: Mapping[str, str] | None = None, opset: int = 17) -> Graph:
    """Nodes alone."""
    model = onnx.ModelProto(graph=onnx.GraphProto(node=nodes), opset_import=[helper.make_opsetid("", opset)])
    return Graph.of(LoadedModel(model, None, None, (), 0), model.graph, captured=captured)


# -- operators and attributes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("domain", "overload", "expected"),
    [("", "", "Op"), ("ai.onnx", "", "Op"), ("d", "", "d::Op"), ("d", "v", "d::Op:v"), ("", "v", "Op:v")],
)
def test_operators(domain: str, overload: str, expected: str) -> None:
    node = helper.make_node("Op", [], ["y"], domain=domain)
    node.overload = overload
    assert operator(node) == expected


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (helper.make_node("LeakyRelu", ["x"], ["y"], alpha=0.01), []),
        (helper.make_node("LeakyRelu", ["x"], ["y"], alpha=0.02), ["alpha"]),
        (helper.make_node("LeakyRelu", ["x"], ["y"], domain="ai.onnx", alpha=0.01), []),
        (helper.make_node("LeakyRelu", ["x"], ["y"], domain="d", alpha=0.01), ["alpha"]),
        (helper.make_node("Unheard", ["x"], ["y"], b=1, a=2), ["a", "b"]),
        (helper.make_node("Transpose", ["x"], ["y"], perm=[1, 0]), ["perm"]),
        (helper.make_node("LeakyRelu", ["x"], ["y"]), []),
    ],
)
def test_attributes_at_their_defaults_are_left_out(node: onnx.NodeProto, expected: list[str]) -> None:
    found = attributes(bare([node]), node)
    assert list(found) == expected


def test_a_default_is_that_of_the_version() -> None:
    """The first version of Softmax had axis 1; from 13 on it is the last one."""
    for version, default in ((1, 1), (11, 1), (13, -1), (17, -1)):
        for axis in (1, -1):
            node = helper.make_node("Softmax", ["x"], ["y"], axis=axis)
            assert list(attributes(bare([node], opset=version), node)) == ([] if axis == default else ["axis"])


def tensor(value: float, name: str = "") -> onnx.TensorProto:
    return numpy_helper.from_array(np.asarray([value], np.float32), name)


def sparse(value: float, place: int, size: int = 4) -> onnx.SparseTensorProto:
    return helper.make_sparse_tensor(tensor(value), numpy_helper.from_array(np.asarray([place])), [size])


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (1, 1, True),
        (1, 2, False),
        (1, 1.0, False),
        ([1, 2], [2, 1], False),
        ("a", "a", True),
        (tensor(1.0, "a"), tensor(1.0, "b"), True),
        (tensor(1.0), tensor(2.0), False),
        ([tensor(1.0), tensor(2.0)], [tensor(1.0), tensor(2.0)], True),
        ([tensor(1.0), tensor(2.0)], [tensor(2.0), tensor(1.0)], False),
        (sparse(1.0, 1), sparse(1.0, 1), True),
        (sparse(1.0, 1), sparse(2.0, 1), False),
        (sparse(1.0, 1), sparse(1.0, 2), False),
        (sparse(1.0, 1), sparse(1.0, 1, 8), False),
        ([sparse(1.0, 1)], [sparse(1.0, 2)], False),
        ([sparse(1.0, 1)], [sparse(1.0, 1)], True),
    ],
)
def test_values_of_attributes(one: Any, other: Any, same: bool) -> None:
    """Names, doc strings, and where a tensor keeps its values, make no difference."""
    ours, theirs = helper.make_attribute("a", one), helper.make_attribute("b", other)
    ours.doc_string = "said"
    before = ours.SerializeToString()
    assert (value_of(ours, EMPTY) == value_of(theirs, EMPTY)) is same
    assert ours.SerializeToString() == before


def test_graphs_count_by_their_number() -> None:
    graphs = [onnx.GraphProto(name=name) for name in "abc"]
    values = [graphs[0], graphs[1], graphs[:1], graphs[:2], graphs]
    found = [value_of(helper.make_attribute("g", value), EMPTY) for value in values]
    assert found == [b"1 graphs", b"1 graphs", b"1 graphs", b"2 graphs", b"3 graphs"]


def test_counterparts_of_tensors() -> None:
    """Inputs by place, tensors around by their names there, outputs of pairs in order, without unnamed ones."""
    ours = [helper.make_node("Split", ["x"], ["p", "", "q"]), helper.make_node("Abs", ["p"], ["r"])]
    theirs = [helper.make_node("Split", ["y"], ["s", "t", "u"]), helper.make_node("Abs", ["s"], ["v"])]
    a = replace(bare(ours, {"around": "outside"}), inputs={"x": "0", "extra": "1"})
    b = replace(bare(theirs), inputs={"y": "0"})
    assert aliases(a, b, [(0, 0)]) == {"around": "outside", "x": "y", "p": "s", "q": "u"}
    assert aliases(a, b, [(0, 0), (1, 1)])["r"] == "v"
