"""All graphs, nodes and tensors of a model, wherever they stand, and how deep they may nest."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from rewriter.errors import ModelError
from rewriter.files.walk import MAX_DEPTH, is_external, iter_nodes, iter_sparse, iter_tensors, subgraphs


def tensor(name: str) -> onnx.TensorProto:
    return numpy_helper.from_array(np.zeros(1, np.float32), name)


def sparse(name: str) -> onnx.SparseTensorProto:
    return onnx.SparseTensorProto(values=tensor(f"{name} values"), indices=tensor(f"{name} indices"))


def graph(name: str, *nodes: onnx.NodeProto) -> onnx.GraphProto:
    return onnx.GraphProto(
        name=name, node=nodes, initializer=[tensor(f"{name} weight")], sparse_initializer=[sparse(f"{name} sparse")]
    )


def model() -> onnx.ModelProto:
    """Something of every kind, each with a name of its own."""
    inner = graph("inner", helper.make_node("Constant", [], ["i"], value=tensor("inner constant")))
    body = graph("body", helper.make_node("If", ["c"], ["b"], then_branch=inner))
    listed = [graph("first"), graph("second")]
    main = graph(
        "main",
        helper.make_node("Constant", [], ["k"], value=tensor("constant")),
        helper.make_node("Custom", [], ["l"], values=[tensor("one"), tensor("two")], graphs=listed),
        helper.make_node("Custom", [], ["s"], one=sparse("attribute"), more=[sparse("list")]),
        helper.make_node("If", ["c"], ["y"], then_branch=body),
        helper.make_node("Last", ["y"], ["z"]),
    )
    made = onnx.ModelProto(graph=main)
    function = made.functions.add(name="f")
    function.node.append(helper.make_node("Constant", [], ["q"], value=tensor("function constant")))
    function.attribute_proto.append(helper.make_attribute("a", tensor("default")))
    made.training_info.add(initialization=graph("start"), algorithm=graph("step"))
    return made


def test_every_tensor_is_found_once() -> None:
    found = [each.name for each in iter_tensors(model())]
    graphs = ["main", "first", "second", "body", "inner", "start", "step"]
    held = [f"{name} {what}" for name in graphs for what in ("weight", "sparse values", "sparse indices")]
    stated = ["constant", "one", "two", "inner constant", "function constant", "default"]
    spread = [f"{name} {part}" for name in ("attribute", "list") for part in ("values", "indices")]
    assert sorted(found) == sorted([*held, *stated, *spread])
    assert found[:1] == ["main weight"]


def test_every_sparse_tensor_is_found_once() -> None:
    found = [each.values.name.removesuffix(" values") for each in iter_sparse(model())]
    graphs = ["main", "first", "second", "body", "inner", "start", "step"]
    assert sorted(found) == sorted([*(f"{name} sparse" for name in graphs), "attribute", "list"])


def test_nodes_come_with_those_inside_them() -> None:
    """In order: what a node holds comes before the node that follows it."""
    found = [(node.op_type, list(node.output)) for node in iter_nodes(model().graph.node)]
    names = [outputs[0] for _, outputs in found]
    assert names == ["k", "l", "s", "y", "b", "i", "z"]


def test_graphs_of_a_node() -> None:
    _, custom, _, branch, last = model().graph.node
    assert [each.name for each in subgraphs(custom)] == ["first", "second"]
    assert [each.name for each in subgraphs(branch)] == ["body"]
    assert subgraphs(last) == []
    odd = onnx.NodeProto(attribute=[onnx.AttributeProto(name="a", type=onnx.AttributeProto.INT, g=graph("hidden"))])
    assert [each.name for each in subgraphs(odd)] == ["hidden"], "whatever its type says"


def test_where_values_are_stored() -> None:
    assert is_external(onnx.TensorProto(data_location=onnx.TensorProto.EXTERNAL))
    assert not is_external(onnx.TensorProto(data_location=onnx.TensorProto.DEFAULT))
    assert not is_external(onnx.TensorProto())


def nested(depth: int) -> onnx.GraphProto:
    """A graph with bodies inside bodies, `depth` of them."""
    made = graph("g0")
    for number in range(depth):
        made = graph(f"g{number + 1}", helper.make_node("If", ["c"], [f"y{number}"], then_branch=made))
    return made


@pytest.mark.parametrize("depth", [0, 1, MAX_DEPTH - 1, MAX_DEPTH])
def test_bodies_may_nest(depth: int) -> None:
    assert len(list(iter_tensors(onnx.ModelProto(graph=nested(depth))))) == 3 * (depth + 1)
    assert len(list(iter_nodes(nested(depth).node))) == depth


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, MAX_DEPTH + 2])
def test_not_too_deep(depth: int) -> None:
    said = "subgraphs nest deeper than 30 levels; this model is damaged or hostile"
    for walk in (iter_tensors, iter_sparse):
        with pytest.raises(ModelError, match=said):
            list(walk(onnx.ModelProto(graph=nested(depth))))
    with pytest.raises(ModelError, match=said):
        list(iter_nodes(nested(depth).node))
